"""One advice on the correction, from everything that gives any."""

import json

import pytest

from tests.dumps import make_dump
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.health.advice import advise, mode_of
from trl_rollout_corr.health.examine import examine
from trl_rollout_corr.settings.presets import PRESETS


AUTO = {"rollout_correction": "auto"}
APART = {"rollout_corr/k3_kl": 0.05, "rollout_corr/kl": 0.05, "rollout_corr/effective_lr": 1.0}


def log(**metrics) -> list[dict]:
    return [{**APART, **metrics, "step": step} for step in range(1, 41)]


def advice(settings, **metrics) -> dict[str, str]:
    """Advice of the alarms in a log, by bound."""
    return {alarm.bound: alarm.advice for alarm in examine(log(**metrics), settings)}


@pytest.mark.parametrize(
    ("fields", "preset"),
    [
        ({}, "auto"),
        ({"rollout_correction": "disabled"}, "auto"),
        ({"rollout_correction": "decoupled_geo_rs_token_tis"}, "auto"),
        ({"rollout_correction": "bypass_ppo_clip_geo_rs"}, "bypass_ppo_clip"),
        ({"rollout_correction": "bypass_pg_is"}, "bypass_pg_token_icepop"),
    ],
)
def test_the_mode_is_kept(fields, preset):
    settings = RolloutCorrectionConfig(**fields)
    mode = mode_of(settings)
    assert mode == mode_of({"bypass_mode": settings.bypass_mode, "rollout_loss_type": settings.rollout_loss_type})
    assert advise(mode, "gap").settings == {"rollout_correction": preset}
    assert mode_of(RolloutCorrectionConfig(rollout_correction=preset)) == mode
    assert preset in PRESETS


def test_nothing_is_changed_without_need():
    for mode in ("decoupled", "ppo_clip", "reinforce"):
        assert advise(mode, "healthy", corrects=True).settings == {}
        assert advise(mode, "healthy", spread=0.001).settings == {}
        assert advise(mode, "broken").settings == {}


def test_the_monitor_advises_auto_where_nothing_corrects():
    said = advice(RolloutCorrectionConfig(rollout_correction="disabled"))["k3_high"]
    assert said.startswith("Set `rollout_correction` to auto. ")
    measured = advice(RolloutCorrectionConfig(rollout_correction="auto", rollout_metrics_only=True))["k3_high"]
    assert measured.startswith("Set `rollout_metrics_only` to False")


def test_the_monitor_does_not_advise_what_is_set():
    apart = {"rollout_corr/kl_advantage_positive": 0.1, "rollout_corr/staleness_max": 4.0}
    log_with_start = [{**entry, "rollout_corr/kl": 0.001} for entry in log(**apart)[:3]] + log(**apart)[3:]

    def said(**fields) -> str:
        found = examine(log_with_start, RolloutCorrectionConfig(**fields))
        return next(alarm.advice for alarm in found if alarm.bound == "unlearning")

    assert "`rollout_correction` to auto" in said(rollout_correction="decoupled_token_is")
    assert "rollout_correction" not in said(rollout_correction="auto")
    assert "`rollout_correction` to bypass_ppo_clip" in said(rollout_correction="bypass_ppo_clip_k3_rs")


def test_the_diagnosis_advises_the_same(tmp_path, capsys):
    runs = {
        "auto": {"rollout_correction": "disabled"},
        "bypass_ppo_clip": {"rollout_correction": "ppo_is_bypass", "rollout_metrics_only": True},
    }
    for preset, settings in runs.items():
        folder = make_dump(tmp_path / preset, spread=0.03, settings=settings)
        main(["diagnose", str(folder), "--json"])
        presets = {cause["preset"] for cause in json.loads(capsys.readouterr().out)["causes"]}
        assert preset in presets
        assert presets <= {preset, None}
