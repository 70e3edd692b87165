"""The page about fields has all of them, with the types, defaults and values of the code."""

import dataclasses
import re
import warnings
from functools import partial

import pytest
import yaml

from tests.launching import ROOT
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.settings.criteria import CRITERIA
from trl_rollout_corr.settings.fields import PARSERS
from trl_rollout_corr.settings.presets import DEFAULT, UNSET, settings_of
from trl_rollout_corr.settings.thresholds import parse_truth


DEFAULTS = {field.name: field.default for field in dataclasses.fields(RolloutCorrectionConfig)}
PAGE = (ROOT / "docs/fields.md").read_text()
ROWS = {
    name: [cell.strip() for cell in line.split(" | ")]
    for name, line in re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE)
}
# The configuration parses and explains these values in its own ways: values that are taken, and values that are refused
OTHERS = {
    "rollout_is_threshold": ([2.0, [0.5, 5.0], [[0, 1], [1, 1]]], [0.5, [2.0, 3.0]]),
    "rollout_rs": ([["token_k1"], None], [["token_k4"]]),
    "rollout_rs_threshold": ([0.5, [0.1]], [-1.0]),
    "rollout_clip_ratio_c": ([3.0, None], [1.0]),
    "rollout_engine_kwargs": ([{"dtype": "float16"}, None], ["float16"]),
    "rollout_monitor_bounds": ([{"k3_high": 0.1}, {"k3_high": None}], [{"k4": 1.0}]),
    "rollout_dump_dir": (["a/folder", None], [3]),
    "rollout_dump_max_gb": ([0.5], [0.0]),
}
COMPANIONS = {
    "rollout_rs": {"rollout_rs_threshold": 1.5},
    "rollout_rs_threshold": {"rollout_rs": ["token_k2"]},
    "rollout_is_threshold": {"rollout_is": "token", "rollout_is_clamp": True},
    "rollout_clip_ratio_c": {"bypass_mode": True},
}


def type_in_docstring(name: str) -> str:
    """Type of a field in the docstring of the configuration, without what the page has in other columns."""
    found = re.search(rf"^ +{name} \((.*?)(?:, \*optional\*.*)?\):$", RolloutCorrectionConfig.__doc__, re.MULTILINE)
    return found[1]


def default_in_code(name: str) -> str:
    if name in UNSET:
        return f"from the preset: `{settings_of(DEFAULT)[name]}`"
    return f"`{DEFAULTS[name]}`"


def allowed_in_code(name: str) -> str | None:
    """Values that the parser of a field lists, as text; `None` if it has none to list."""
    parser = PARSERS[name]
    while isinstance(parser, partial) and parser.func.__name__ == "_unless_none":
        parser = parser.args[0]
    if not isinstance(parser, partial):
        return None
    if parser.func.__name__ == "_choice":
        nothing = name != "rollout_is" and UNSET.get(name, "preset")  # what stands for the preset is in another column
        *most, last = [value for value in parser.args[1] if value not in ("preset", nothing)]
        return f"{', '.join(f'`{value}`' for value in most)} or `{last}`"
    return "`True` or `False`" if parser.func is parse_truth else f"integers of {parser.args[-1]} or more"


def build(settings: dict) -> RolloutCorrectionConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return RolloutCorrectionConfig(**settings)


def test_every_field_has_a_row():
    assert set(ROWS) == set(DEFAULTS)
    assert {len(cells) for cells in ROWS.values()} == {5}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_row_is_that_of_the_code(name):
    kind, default, allowed, sentence, _ = ROWS[name]
    assert kind == type_in_docstring(name)
    assert default == default_in_code(name)
    assert allowed_in_code(name) in (allowed, None), allowed_in_code(name)
    assert re.fullmatch(r"[A-Z].* .*\.", sentence)


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_example_of_a_row_sets_the_field(name):
    example = ROWS[name][-1]
    settings = yaml.safe_load("\n".join(re.findall(r"`([^`]+)`", example)))
    assert name in settings
    config = build(settings)
    default = RolloutCorrectionConfig().settings
    if name not in ("rollout_correction", "rollout_is", "rollout_is_clamp"):  # whose examples are the usual values
        assert getattr(config.settings, name) != getattr(default, name)


@pytest.mark.parametrize("name", OTHERS)
def test_values_in_words_are_taken_and_others_refused(name):
    taken, refused = OTHERS[name]
    for value in taken:
        build({name: value, **(COMPANIONS.get(name, {}) if value is not None else {})})
    for value in refused:
        with pytest.raises((ValueError, TypeError), match=name):
            build({name: value, **COMPANIONS.get(name, {})})


def test_fields_whose_values_are_in_words_are_tried():
    in_words = {name for name in DEFAULTS if allowed_in_code(name) is None}
    assert in_words == {*OTHERS, "rollout_correction"}


def test_every_criterion_is_listed():
    table = PAGE.split("### Names of criteria")[1].split("## ")[0]
    assert set(re.findall(r"`(\w+_(?:k\d|tv|\w*kl))`", table)) == set(CRITERIA)
