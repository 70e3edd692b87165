"""`rollout_correction: trl`, which keeps TRL's own correction, and configurations of ours in TRL's own trainers."""

import html
import io
import json
import warnings
from contextlib import redirect_stdout

import pytest
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.training import VLLM, build, freeze_sampler, logged, losses, push_by_reload
from trl_rollout_corr import (
    RolloutCorrectedGRPOConfig,
    RolloutCorrectedGRPOTrainer,
    RolloutCorrectedRLOOConfig,
    RolloutCorrectedRLOOTrainer,
    RolloutCorrectionConfig,
)
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.tools.formats import yaml_lines
from trl_rollout_corr.tools.monitor.stock import CLIPPED, GAP, GAP_MAX, LENGTH, RATIO, RATIO_MAX, RATIO_MIN
from trl_rollout_corr.tools.report.run import read_run


OF_TRL = "vllm_importance_sampling_"
GRPO = (GRPOTrainer, GRPOConfig), (RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig)
RLOO = (RLOOTrainer, RLOOConfig), (RolloutCorrectedRLOOTrainer, RolloutCorrectedRLOOConfig)
MODES = [
    {},
    {"mode": "sequence_mask", "clip_max": 1.5, "clip_min": 0.5},
    {"mode": "sequence_truncate", "clip_max": 1.5},
    {"mode": "token_mask", "clip_max": 1.2, "clip_min": 0.8},
    {"mode": "token_truncate", "clip_max": 1.2},
    {"mode": "token_truncate", "clip_max": 1.2, "clip_min": 0.9},
    {"mode": "token_truncate", "clip_max": None, "clip_min": 0.9},
    {"correction": False},
]


@pytest.fixture
def make(tiny_model_path, tmp_path, shared_engine):
    def make(trainer_class, config_class, **fields):
        trainer = build(trainer_class, config_class, tiny_model_path, tmp_path, **{**VLLM, **fields})
        push_by_reload(trainer.vllm_generation)  # TRL's own push of weights fails on a CPU
        freeze_sampler(trainer, 0.1)
        return trainer

    return make


def assert_every_command_reads(trainer, folder, of_trl):
    """See that `report`, `compare` and `diagnose` read the settings of a run with `trl`, and show what the user has set."""
    assert read_run(str(folder)).settings == trainer._settings
    trainer.state.save_to_json(str(folder / "trainer_state.json"))
    assert printed("report", folder, "-o", folder / "report.html")
    page = html.unescape((folder / "report.html").read_text())
    shown = {name: value for name, value in of_trl.items() if value != "sequence_mask"}  # TRL's default
    assert yaml_lines({"rollout_correction": "trl", **shown}) in page
    assert "rollout_is: " not in page  # which cannot be set beside it
    table = printed("compare", folder)
    assert all(f"`{line}`" in table for line in yaml_lines(shown).splitlines())
    assert json.loads(printed("diagnose", folder, "--json"))["tokens"] > 0


def assert_the_log_of_trl_is_read(trainer, folder, mode):
    """See that `report` and `diagnose` read what a trainer of TRL logs, and refuse the log of one that has no ratio."""
    (folder / "checkpoint-3").mkdir(parents=True)
    trainer.state.save_to_json(str(folder / "checkpoint-3" / "trainer_state.json"))
    logged_of_trl = {*trainer.state.log_history[0]}
    if not mode.get("correction", True):
        assert main(["diagnose", str(folder)]) == 2
        assert not logged_of_trl & {RATIO, GAP}
        return
    assert logged_of_trl >= {RATIO, RATIO_MIN, RATIO_MAX, GAP, GAP_MAX, LENGTH, CLIPPED}
    ratios = [entry[RATIO] for entry in trainer.state.log_history if RATIO in entry]
    found = json.loads(printed("diagnose", folder, "--json"))["ratio"]
    assert (found["first"], found["last"], found["entries"]) == (ratios[0], ratios[-1], len(ratios))
    assert printed("report", folder, "-o", folder / "report.html")
    page = (folder / "report.html").read_text()
    assert "TRL's mean importance ratio" in html.unescape(page)


def printed(*arguments):
    """What a command prints, which must not refuse its input."""
    with redirect_stdout(io.StringIO()) as output:
        assert main([*map(str, arguments)]) in (0, 1)
    return output.getvalue()


@pytest.mark.seam
@pytest.mark.vllm
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_loss_of_the_unchanged_script_is_kept_bit_for_bit(make, mode, tmp_path):
    fields = {OF_TRL + name: value for name, value in mode.items()}
    theirs = make(*GRPO[0], **fields)
    expected = losses(theirs)
    assert_the_log_of_trl_is_read(theirs, tmp_path / "theirs", mode)
    ours = make(*GRPO[1], rollout_correction="trl", rollout_dump_dir=str(tmp_path / "dump"), **fields)
    assert losses(ours) == expected
    assert min(logged(ours, "k3_kl")) > 1e-4
    assert_every_command_reads(ours, tmp_path, fields)
    corrects = mode.get("correction", True)
    assert ours._settings.corrects is corrects
    assert bool(logged(ours, "rollout_is_mean")) is corrects
    assert ours.vllm_importance_sampling_correction is corrects


@pytest.mark.vllm
@pytest.mark.parametrize(
    "fields",
    [
        {"beta": 0.1, "loss_type": "grpo"},
        {"loss_type": "dr_grpo", "num_iterations": 2},
        {"schedule": "several steps per generation"},
        {"schedule": "not a multiple"},
        {"importance_sampling_level": "sequence"},
        {"importance_sampling_level": "sequence", f"{OF_TRL}mode": "token_truncate"},
        {"loss_type": "vespo", f"{OF_TRL}mode": "token_truncate"},
    ],
    ids=str,
)
def test_it_is_kept_with_other_losses_and_schedules(make, fields):
    expected = losses(make(*GRPO[0], **fields))
    assert losses(make(*GRPO[1], rollout_correction="trl", **fields)) == expected


@pytest.mark.vllm
def test_the_weights_that_are_reported_are_those_of_trl(make):
    fields = {f"{OF_TRL}mode": "token_truncate", f"{OF_TRL}clip_max": 1.2}
    ours = make(*GRPO[1], rollout_correction="trl", **fields)
    ours.train()
    entries = [entry for entry in ours.state.log_history if "loss" in entry]
    of_trl = [entry["sampling/importance_sampling_ratio/mean"] for entry in entries]
    assert logged(ours, "rollout_is_mean") == [pytest.approx(mean, rel=1e-4) for mean in of_trl]


@pytest.mark.seam
@pytest.mark.vllm
def test_for_rloo_it_is_no_correction(make, tmp_path):
    expected = losses(make(*RLOO[0]))
    ours = make(*RLOO[1], rollout_correction="trl", rollout_dump_dir=str(tmp_path / "dump"))
    assert losses(ours) == expected
    assert_every_command_reads(ours, tmp_path, {})
    assert not ours._settings.corrects
    assert min(logged(ours, "k3_kl")) > 1e-4


# Half a migration -----------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.parametrize("classes", [GRPO, RLOO], ids=["grpo", "rloo"])
def test_a_configuration_of_ours_in_a_trainer_of_trl_is_trls_default(make, classes):
    (theirs, their_config), (_, our_config) = classes
    expected = losses(make(theirs, their_config))
    half = make(theirs, our_config, rollout_correction="bypass_pg_is")
    with pytest.warns(UserWarning, match="settings of rollout correction have no effect, .* a trainer of TRL") as said:
        assert losses(half) == expected
    assert len([warning for warning in said if "no effect" in str(warning.message)]) == 1
    assert getattr(half, f"{OF_TRL}correction", True) is True


@pytest.mark.vllm
def test_our_trainer_switches_trls_correction_off_and_leaves_the_configuration_alone(make):
    ours = make(*GRPO[1], rollout_correction="disabled")
    assert ours.vllm_importance_sampling_correction is False
    assert ours.args.vllm_importance_sampling_correction is True
    assert losses(ours) == losses(make(*GRPO[0], **{f"{OF_TRL}correction": False}))


# Settings -------------------------------------------------------------------------------------------------------------


def plain(**fields):
    return RolloutCorrectionConfig(rollout_correction="trl", **fields)


def builder(config_class):
    return lambda **fields: config_class("output", use_cpu=True, bf16=False, rollout_correction="trl", **fields)


BUILDERS = [plain, builder(RolloutCorrectedGRPOConfig), builder(RolloutCorrectedRLOOConfig)]


@pytest.mark.parametrize("make_config", BUILDERS, ids=["plain", "grpo", "rloo"])
@pytest.mark.parametrize(
    "fields",
    [{"rollout_is": "token"}, {"rollout_rs": ["token_k1"], "rollout_rs_threshold": 2.0}, {"bypass_mode": True}],
)
def test_no_other_correction_can_be_set_beside_it(make_config, fields):
    message = f"`{next(iter(fields))}` is .* `rollout_correction: trl` keeps the loss of TRL"
    with pytest.raises(ValueError, match=message):
        make_config(**fields)


def test_weights_of_trl_cannot_be_measured_only():
    measured, sampling = {"rollout_metrics_only": True}, {"use_vllm": True}
    for make_config, fields in ((BUILDERS[0], measured), (BUILDERS[1], {**measured, **sampling})):
        with pytest.raises(ValueError, match=r"`rollout_metrics_only` is .* keeps the loss of TRL"):
            make_config(**fields)
    for make_config in BUILDERS[1:]:  # TRL's RLOO has no weights, and its GRPO none without vLLM
        with pytest.warns(match=r"`rollout_metrics_only` .* there is no correction"):
            make_config(**measured)


def test_without_fields_of_trl_it_is_trls_default():
    settings = RolloutCorrectionConfig(rollout_correction="trl").settings
    assert (settings.rollout_is, settings.rollout_is_threshold) == ("sequence", [0.0, 3.0])
    assert settings.corrects
    assert not settings.changes_loss


def test_fields_of_trl_that_have_no_effect_are_named(tiny_model_path, tmp_path):
    from tests.tiny import StaleSampler

    def built(**fields):
        return build(*GRPO[1], tiny_model_path, tmp_path, sampler=StaleSampler(tiny_model_path), **fields)

    off = {f"{OF_TRL}correction": False}
    with pytest.warns(UserWarning, match="`vllm_importance_sampling_clip_max=5.0` has no effect: .* is 'auto'"):
        built(**{f"{OF_TRL}clip_max": 5.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        moved = built(**off, rollout_correction="default")._settings  # a script that is moved keeps what it did
        assert moved.by_trl
        assert not moved.corrects
        built(**off, rollout_correction="disabled")
        built()
