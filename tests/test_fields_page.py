"""The page about fields has all of them, and examples that work. `test_docs` compares the rest of a row with the code."""

import dataclasses
import math
import re
import warnings

import pytest
import torch
import yaml

import trl_rollout_corr
from tests.launching import ROOT
from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.settings.criteria import CRITERIA


DEFAULTS = {field.name: field.default for field in dataclasses.fields(RolloutCorrectionConfig)}
PAGE = (ROOT / "docs/fields.md").read_text()
ROWS = {  # examples by field
    name: line.split(" | ")[-1]
    for name, line in re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.split("## Python")[0], re.MULTILINE)
    if not re.fullmatch(r"k\d|tv|kl|binary_kl", name)
}
# Values that are taken, and values that are refused, of fields whose text says which
OTHERS = {
    "rollout_is_threshold": ([2.0, [0.5, 5.0], [[0, 1], [1, 1]]], [0.5, [2.0, 3.0]]),
    "rollout_rs": ([["token_k1"], None], [["token_k4"]]),
    "rollout_rs_threshold": ([0.5, [0.1]], [-1.0]),
    "rollout_clip_ratio_c": ([3.0, None], [1.0]),
    "rollout_engine_kwargs": ([{"dtype": "float16"}, None], ["float16"]),
    "rollout_monitor_bounds": ([{"k3_high": 0.1}, {"k3_high": None}], [{"k3_high": "high"}]),
    "rollout_dump_dir": (["a/folder", None], [3, ""]),
    "rollout_dump_max_gb": ([0.5], [0.0, 10**400]),
}
COMPANIONS = {
    "rollout_rs": {"rollout_rs_threshold": 1.5},
    "rollout_rs_threshold": {"rollout_rs": ["token_k2"]},
    "rollout_is_threshold": {"rollout_is": "token", "rollout_is_clamp": True},
    "rollout_clip_ratio_c": {"bypass_mode": True},
}


def build(settings: dict) -> RolloutCorrectionConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return RolloutCorrectionConfig(**settings)


def test_every_field_has_a_row():
    assert list(ROWS) == list(DEFAULTS)


def test_every_public_name_has_a_row():
    section = PAGE.split("## Python")[1]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sorted(trl_rollout_corr.__all__)


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_example_of_a_row_sets_the_field(name):
    settings = yaml.safe_load("\n".join(re.findall(r"`([^`]+)`", ROWS[name])))
    assert name in settings
    config = build(settings)
    default = RolloutCorrectionConfig().settings
    if name not in ("rollout_correction", "rollout_is", "rollout_is_clamp"):  # whose examples are the usual values
        assert getattr(config.settings, name) != getattr(default, name)


@pytest.mark.parametrize("name", OTHERS)
def test_values_are_taken_and_others_refused(name):
    taken, refused = OTHERS[name]
    for value in taken:
        build({name: value, **(COMPANIONS.get(name, {}) if value is not None else {})})
    for value in refused:
        with pytest.raises((ValueError, TypeError), match=name):
            build({name: value, **COMPANIONS.get(name, {})})


def test_every_criterion_is_listed():
    table = PAGE.split("### Names of criteria")[1].split("## ")[0]
    assert set(re.findall(r"`((?:token|turn|seq)_\w+)`", table)) == set(CRITERIA)


def test_the_direction_of_the_mean_divergence_is_the_one_on_the_page():
    assert "for `seq_mean_binary_kl` `D(q, p)`, with `q` the probability in vLLM" in PAGE
    p, q = 0.1, 0.6
    divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))  # 0.75; the other direction is 0.55
    for bound, kept in ((0.7, False), (0.8, True)):
        config = build({"rollout_rs": "seq_mean_binary_kl", "rollout_rs_threshold": bound})
        logps = [torch.full((1, 2), math.log(x)) for x in (p, q)]
        assert compute_rollout_correction(*logps, torch.ones(1, 2), config).keep.all().item() == kept
    assert 0.7 < divergence < 0.8
