"""The page about TRL's own correction says what the installed TRL does, and how its settings are translated."""

import re
import warnings

import pytest
import yaml
from trl import GRPOConfig

from tests.launching import ROOT, benchmarks
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.tools.translation.trl import from_trl


PAGE = (ROOT / "docs/trl.md").read_text()
PREFIX = "vllm_importance_sampling_"
ROWS = re.findall(r"^\| (`mode: [^|]*) \| (`rollout_[^|]*) \| [^|]* \|$", PAGE, re.MULTILINE)


def settings_in(cell: str) -> dict:
    return yaml.safe_load("\n".join(re.findall(r"`([^`]+)`", cell)))


def test_defaults_are_those_of_the_installed_trl():
    rows = re.findall(rf"^\| `({PREFIX}\w+)` \| `(.*?)` \|", PAGE, re.MULTILINE)
    defaults = {name: str(GRPOConfig.__dataclass_fields__[name].default) for name, _ in rows}
    assert dict(rows) == defaults
    assert {f"{PREFIX}{name}" for name in ("correction", "mode", "clip_max", "clip_min")} == defaults.keys()


@pytest.mark.parametrize(("theirs", "ours"), ROWS)
def test_a_row_of_the_translation_is_that_of_convert(theirs, ours):
    settings = {f"{PREFIX}{name}": value for name, value in settings_in(theirs).items()}
    assert settings.keys() <= set(GRPOConfig.__dataclass_fields__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        translated = RolloutCorrectionConfig(**from_trl(settings))
        written = RolloutCorrectionConfig(**settings_in(ours), rollout_nan_policy=translated.rollout_nan_policy)
    assert translated.settings == written.settings


def test_every_mode_is_translated():
    modes = {settings_in(theirs).get("mode") for theirs, _ in ROWS}
    listed = re.search(r"_mode` \| `sequence_mask` \| (.*) \|", PAGE)[1]
    assert modes == set(re.findall(r"`(\w+)`", listed))


def test_a_correction_that_was_off_stays_off():
    written = re.search(r"`(correction: false)`\), write `(.*?)`", PAGE)
    off = RolloutCorrectionConfig(**from_trl({f"{PREFIX}correction": False}))
    assert off.settings == RolloutCorrectionConfig(**settings_in(f"`{written[2]}`")).settings


def test_calculated_weights_are_those_of_the_formula():
    with benchmarks("") as load:
        calculated = load("length").calculated
    rows = re.findall(r"^\| (\d+) \| (0\.\d+) \| (0\.\d+) \|$", PAGE, re.MULTILINE)
    assert len(rows) > 3
    for tokens, *weights in rows:
        assert weights == [f"{calculated(k3, int(tokens)):.2f}" for k3 in (0.0008, 0.002)]
