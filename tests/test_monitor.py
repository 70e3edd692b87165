"""`RolloutCorrectionMonitor` on the real TRL, with a sampler that is far from the trainer."""

import math
import re
import warnings

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState

from tests.tiny import StaleSampler, falling_reward
from tests.training import (
    TRAINERS,
    VLLM,
    BrokenSampler,
    build,
    evaluation,
    freeze_sampler,
    logged,
    losses,
    messages,
    saying,
)
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.health.rule import ALARMS
from trl_rollout_corr.recording.monitor import RolloutCorrectionMonitor


def make_grpo(model, folder, **fields):
    """A trainer without correction whose sampler is far off: log-probabilities with a noise of one nat."""
    fields = {"sampler": StaleSampler(model, noise=1.0), "rollout_correction": "disabled", **fields}
    return build(*TRAINERS["grpo"], model, folder, rollout_monitor=None, **fields)


def make_rloo(model, folder, **fields):
    """The same for RLOO, which has no rollout functions: a real engine, frozen at other weights."""
    # of eight groups, some have rewards that differ
    fields = {"rollout_correction": "disabled", **VLLM, "per_device_train_batch_size": 16, **fields}
    trainer = build(*TRAINERS["rloo"], model, folder, rollout_monitor=None, **fields)
    freeze_sampler(trainer, 1.0)
    return trainer


# The reward falls after step 20. A run that is stopped ends between that step and the last one.
FALLS = {"max_steps": 40, "extra": {"reward_funcs": falling_reward}}


@pytest.fixture
def make(tiny_model_path, tmp_path):
    def make(monitor=None, folder="run", extra=None, **fields):
        extra = {**(extra or {}), "callbacks": [monitor] if monitor else []}
        return make_grpo(tiny_model_path, tmp_path / folder, extra=extra, **fields)

    return make


@pytest.fixture(params=["grpo", pytest.param("rloo", marks=pytest.mark.vllm)])
def make_either(request, tiny_model_path, tmp_path):
    """The same for both trainers."""
    if request.param == "rloo":
        request.getfixturevalue("shared_engine")

    def make(monitor=None, folder="run", **fields):
        extra = {"callbacks": [monitor] if monitor else []}
        maker = {"grpo": make_grpo, "rloo": make_rloo}[request.param]
        return maker(tiny_model_path, tmp_path / folder, extra=extra, **fields)

    return make


# Warnings -------------------------------------------------------------------------------------------------------------


def test_a_sampler_that_is_far_off_is_warned_about(make_either, caplog):
    trainer = make_either(RolloutCorrectionMonitor())
    with saying(caplog, r"^✖ step 2: k3_kl is .*, above 0.03, and .*\[k3_high > 0.03\].*Set `rollout_correction`"):
        trainer.train()
    assert trainer.state.global_step == 3
    assert len(logged(trainer, "monitor/alarms")) == 3
    assert logged(trainer, "monitor/alarms")[0] == 0  # a single window is not enough
    assert min(logged(trainer, "monitor/alarms")[1:]) >= 1


def test_a_sampler_that_is_the_trainer_is_not(make, tiny_model_path, caplog):
    trainer = make(RolloutCorrectionMonitor(), sampler=StaleSampler(tiny_model_path, noise=0.0), learning_rate=1e-6)
    trainer.train()
    assert messages(caplog) == []
    assert logged(trainer, "monitor/alarms") == [0.0] * 3


def test_reporters_get_the_number_of_alarms(make):
    class Reporter(TrainerCallback):
        seen = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.seen.append(logs.get(ALARMS))

    trainer = make(RolloutCorrectionMonitor(bounds={"k3_high": None, "biased_ratio": None}))
    trainer.add_callback(Reporter())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert Reporter.seen[:3] == logged(trainer, "monitor/alarms")
    assert Reporter.seen[3] is None  # the summary at the end


def test_evaluations_are_passed_over(make, caplog):
    trainer = make(RolloutCorrectionMonitor(), **evaluation())
    with saying(caplog, "k3_high"):
        trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluations
    assert not any(ALARMS in entry for entry in evaluations)


def nothing_is_finite(output):
    output["logprobs"] = [[math.nan] * len(sequence) for sequence in output["logprobs"]]


def test_a_sampler_without_finite_log_probabilities_is_warned_about(make, tiny_model_path, caplog):
    trainer = make(RolloutCorrectionMonitor(), sampler=BrokenSampler(tiny_model_path, nothing_is_finite))
    with saying(caplog, "came without a finite log-probability"):
        trainer.train()
    # at first as little as one token would say, then that most are
    assert [re.search(r"step (\d+): .* \[(\w+)", message).groups() for message in messages(caplog)] == [
        ("1", "nonfinite"),
        ("2", "nonfinite_many"),
    ]


def test_a_run_that_rejects_everything_is_warned_about(make, caplog):
    trainer = make(RolloutCorrectionMonitor("stop"), rollout_rs="seq_mean_k1", rollout_rs_threshold=1.0001)
    with saying(caplog, "All tokens were rejected or have no gradient"):
        trainer.train()
    assert trainer.state.global_step == 3  # bounds may be too tight, which is no reason to end a run


# Between logs ---------------------------------------------------------------------------------------------------------


def test_alarms_do_not_wait_for_a_log(make, caplog):
    trainer = make(RolloutCorrectionMonitor("stop"), logging_steps=100, **FALLS)
    with saying(caplog, r"^✖ step 2: k3_kl is .*\[k3_high > 0.03\]"), saying(caplog, "training ends here"):
        trainer.train()
    assert 21 < trainer.state.global_step < FALLS["max_steps"]
    assert len(logged(trainer, "monitor/alarms")) == 1  # a single log, at the end


def test_a_healthy_run_with_few_logs_has_no_alarm(make, tiny_model_path, caplog):
    sampler = StaleSampler(tiny_model_path, noise=0.0)
    trainer = make(RolloutCorrectionMonitor("stop"), sampler=sampler, logging_steps=4, max_steps=8, learning_rate=1e-6)
    trainer.train()
    assert messages(caplog) == []
    assert logged(trainer, "monitor/alarms") == [0.0, 0.0]


def test_a_log_is_the_same_with_and_without_a_monitor(make):
    entries = []
    for monitor in (RolloutCorrectionMonitor(bounds={"k3_high": None}), None):
        trainer = make(monitor, folder=f"run{len(entries)}", logging_steps=3, max_steps=5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
        entries.append(
            [
                {key: value for key, value in entry.items() if "rollout_corr/" in key and key != ALARMS}
                for entry in trainer.state.log_history
            ]
        )
    with_monitor, without = entries
    assert [len(entry) for entry in without][:1] != [0]
    assert len(with_monitor) == len(without)
    for ours, expected in zip(with_monitor, without, strict=True):
        assert ours == pytest.approx(expected, rel=1e-9, nan_ok=True)


# Without a trainer: how often ----------------------------------------------------------------------------------------


@pytest.fixture
def observe(caplog):
    def observe(monitor, windows, before=()):
        """
        Let a monitor see the log of a run without correction, and return its messages, the state, and the control. `before`
        are windows that were logged before the run was resumed.
        """
        args = RolloutCorrectionConfig(rollout_correction="disabled", rollout_monitor=None)
        args.output_dir = "output"
        state, control = TrainerState(), TrainerControl()
        state.log_history = [{"loss": 0.0, **window, "step": step} for step, window in enumerate(before, 1)]
        monitor.on_train_begin(args, state, control)
        caplog.clear()
        for step, window in enumerate(windows, len(before) + 1):
            logs, state.global_step = {"loss": 0.0, **window}, step
            state.log_history.append({**logs, "step": step})
            monitor.on_log(args, state, control, logs=logs)
        return messages(caplog), state, control

    return observe


FAR, NEAR, BETWEEN = ({"rollout_corr/k3_kl": value} for value in (0.2, 1e-4, 0.02))


def test_a_cause_that_lasts_is_repeated_ever_more_rarely(observe):
    said, state, control = observe(RolloutCorrectionMonitor(), [FAR] * 200)
    steps = [int(re.match(r"✖ step (\d+): ", message)[1]) for message in said]
    assert steps == [2, 12, 32, 72, 152]
    assert all(
        "k3_kl is 0.2, above 0.03, and nothing corrects for it. [k3_high > 0.03]" in message for message in said
    )
    assert ["Rounding gives about" in message for message in said] == [True, False, False, False, False]
    assert all(message.endswith("since step 2") for message in said[1:])
    assert [entry[ALARMS] for entry in state.log_history] == [0, *[1] * 199]
    assert not control.should_training_stop


def test_a_cause_that_comes_and_goes_does_not_flood(observe):
    said, _, _ = observe(RolloutCorrectionMonitor(), [FAR, FAR, FAR, NEAR, NEAR, NEAR] * 33)
    assert 3 <= len(said) <= 6


def test_two_causes_have_messages_of_their_own(observe):
    window = {
        "rollout_corr/staleness_max": 40.0,
        "rollout_corr/rollout_is_mean": 3.0,
    }
    said, _, _ = observe(RolloutCorrectionMonitor(), [window] * 3)
    assert [re.search(r"\[(\w+)", message)[1] for message in said] == ["staleness", "weight_mean_high"]


def test_only_the_main_process_speaks(monkeypatch, observe):
    monkeypatch.setenv("RANK", "1")
    said, state, control = observe(RolloutCorrectionMonitor("stop"), fallen(FAR))
    assert said == []
    assert control.should_training_stop
    assert state.log_history[-1][ALARMS] == 1


def test_logs_of_something_else_are_left_alone():
    monitor, control, state = RolloutCorrectionMonitor("stop"), TrainerControl(), TrainerState()
    monitor.on_train_begin(RolloutCorrectionConfig(rollout_monitor=None), state, control)
    for logs in (None, {}, {"my_metric": 1.0}, {"eval_rollout_corr/k3_kl": 9.0}, {"train_runtime": 1.0}):
        before = dict(logs or {})
        monitor.on_log(None, state, control, logs=logs)
        assert (logs or {}) == before


# Stopping -------------------------------------------------------------------------------------------------------------


def rewarded(window, rewards):
    """Windows with these mean rewards."""
    return [{**window, "rollout_corr/reward_mean": reward} for reward in rewards]


GOOD, BAD = [0.55, 0.65] * 10, [0.35, 0.45] * 10  # of 20 windows


def fallen(window):
    """Windows of a run whose reward falls."""
    return rewarded(window, GOOD + BAD)


def test_a_critical_alarm_stops_once_the_reward_has_fallen(observe):
    said, _, control = observe(RolloutCorrectionMonitor("stop"), fallen(FAR))
    assert control.should_training_stop
    assert control.should_save
    ends = next(message for message in said if "training ends here" in message)
    assert re.search(r"The mean reward of 20 steps has fallen from 0\.6 to 0\.\d+", ends)
    assert 20 < int(re.match(r"✖ step (\d+): ", ends)[1]) < 40


@pytest.mark.parametrize(
    ("window", "rewards"),
    {
        "the alarm alone, without rewards": (FAR, None),
        "steady": (FAR, GOOD * 3),
        "rising": (FAR, BAD + GOOD + GOOD),
        "constant": (FAR, [0.0] * 60),
        "noise": (FAR, GOOD + [0.5, 0.6] * 10),
        "too few steps": (FAR, [0.6] * 10 + [0.0] * 9),
        "less than a quarter of the gain": (FAR, [0.0] * 20 + GOOD + [0.45, 0.55] * 10),
        "the reward alone": (NEAR, GOOD + BAD),
    }.values(),
)
def test_a_run_goes_on_unless_both_are_bad(observe, window, rewards):
    windows = [window] * 60 if rewards is None else rewarded(window, rewards)
    _, _, control = observe(RolloutCorrectionMonitor("stop"), windows)
    assert not control.should_training_stop


def test_a_run_that_only_warns_goes_on(observe):
    _, _, control = observe(RolloutCorrectionMonitor(), fallen(FAR))
    assert not control.should_training_stop


def test_a_run_is_stopped_after_a_checkpoint_and_goes_on_from_there(make, tmp_path, caplog):
    fields = {**FALLS, "save_strategy": "no"}
    trainer = make(RolloutCorrectionMonitor("stop"), **fields)
    with saying(caplog, "training ends here, with a checkpoint in "):
        trainer.train()
    step = trainer.state.global_step
    assert 21 < step < fields["max_steps"]
    checkpoint = tmp_path / "run" / f"checkpoint-{step}"
    assert (checkpoint / "trainer_state.json").exists()
    assert (checkpoint / "model.safetensors").exists()
    resumed = make(folder="resumed", **fields)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == fields["max_steps"]
    assert len(logged(resumed, "kl")) == fields["max_steps"]
    uninterrupted = make(folder="uninterrupted", **fields)
    found = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    assert found == pytest.approx([loss for loss, _ in losses(uninterrupted)], rel=1e-4)


def test_what_was_changed_after_a_stop_gets_its_chance(make, tmp_path, tiny_model_path, caplog):
    fields = {**FALLS, "learning_rate": 1e-6}
    trainer = make(RolloutCorrectionMonitor("stop"), **fields)
    with saying(caplog, "training ends here"):
        trainer.train()
    step = trainer.state.global_step
    repaired = StaleSampler(tiny_model_path, noise=0.0)
    resumed = make(RolloutCorrectionMonitor("stop"), sampler=repaired, folder="resumed", **fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
    assert resumed.state.global_step == fields["max_steps"]


def test_windows_of_before_a_resume_do_not_stop_the_run(observe):
    before, after = fallen(FAR), rewarded(FAR, BAD)
    *_, control = observe(RolloutCorrectionMonitor("stop"), after[:1], before=before)
    assert not control.should_training_stop
    *_, control = observe(RolloutCorrectionMonitor("stop"), after[:2], before=before)
    assert control.should_training_stop


def test_how_a_resumed_run_began_is_known(observe):
    early, late = {"rollout_corr/k3_kl": 0.001}, {"rollout_corr/k3_kl": 0.006}
    assert observe(RolloutCorrectionMonitor(), [late] * 12)[0] == []
    said, _, _ = observe(RolloutCorrectionMonitor(), [late] * 12, before=[early] * 30)
    assert "[k3_growth > 3]" in said[0]


def test_a_checkpoint_is_saved_if_it_is_not_the_best(make, tmp_path, monkeypatch, caplog):
    best = {"save_strategy": "best", "metric_for_best_model": "loss", **evaluation(), "eval_steps": 1}
    extra = {**best.pop("extra", {}), **FALLS["extra"]}
    trainer = make(RolloutCorrectionMonitor("stop"), extra=extra, max_steps=FALLS["max_steps"], **best)
    monkeypatch.setattr(trainer, "_determine_best_metric", lambda metrics, trial: False)
    with saying(caplog, "training ends here"):
        trainer.train()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == [
        f"checkpoint-{trainer.state.global_step}"
    ]


def test_a_warning_does_not_stop(observe):
    said, _, control = observe(RolloutCorrectionMonitor("stop"), fallen(BETWEEN))
    assert "[k3_uncorrected > 0.015]" in said[0]
    assert not control.should_training_stop


def test_what_is_no_action_or_rule_is_refused():
    with pytest.raises(ValueError, match="`rollout_monitor` must be one of warn, stop, got 'tighten'"):
        RolloutCorrectionMonitor("tighten")
    with pytest.raises(ValueError, match="`rollout_monitor_bounds` has 'k4', which is not a bound"):
        RolloutCorrectionMonitor(bounds={"k4": 1.0})
