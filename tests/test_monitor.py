"""`RolloutCorrectionMonitor` on the real TRL, with a sampler that is far from the trainer."""

import dataclasses
import math
import random
import re
import warnings
from itertools import count

import pytest
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from tests.launching import ROOT
from tests.test_reporting import finished_wandb_records
from tests.tiny import StaleSampler
from tests.training import (
    TRAINERS,
    VLLM,
    BrokenSampler,
    build,
    evaluation,
    freeze_sampler,
    logged,
    messages,
    saying,
)
from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectionConfig
from trl_rollout_corr.tools.monitor.callback import RolloutCorrectionMonitor
from trl_rollout_corr.tools.monitor.rule import ALARMS
from trl_rollout_corr.tools.monitor.rules import BOUNDS
from trl_rollout_corr.tools.monitor.windows import Course


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
    with saying(
        caplog, r"^✖ step 1: k3_kl has been .*\[k3_at_start > 0.1\].*Rounding does not.*`rollout_diagnose: true`"
    ):
        trainer.train()
    assert trainer.state.global_step == 3
    assert len(logged(trainer, "monitor/alarms")) == 3
    assert min(logged(trainer, "monitor/alarms")) >= 1


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
    with saying(caplog, "k3_at_start"):
        trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluations
    assert not any(ALARMS in entry for entry in evaluations)


def test_an_error_in_a_bound_ends_no_run_and_is_told_once(make, caplog, monkeypatch):
    def broken(window):
        if window.step == 1:
            return 0.0
        raise ZeroDivisionError("division by zero")

    bound = dataclasses.replace(BOUNDS["k3_high"], measure=broken)
    monkeypatch.setitem(BOUNDS, "k3_high", bound)
    trainer = make(RolloutCorrectionMonitor(), max_steps=5)
    trainer.train()
    assert trainer.state.global_step == 5
    (said,) = [message for message in messages(caplog) if "ZeroDivisionError" in message]
    assert re.match(
        r"The monitor cannot judge step \d, and perhaps later ones: ZeroDivisionError: division by zero", said
    )


def test_an_error_about_the_history_ends_no_run_that_resumes(make, caplog, monkeypatch):
    make(RolloutCorrectionMonitor(), save_strategy="steps", save_steps=1, max_steps=1).train()

    def broken(*_):
        raise ZeroDivisionError("division by zero")

    trainer = make(RolloutCorrectionMonitor(), max_steps=2)
    monkeypatch.setattr(Course, "go_on", broken)
    with saying(caplog, "The monitor forgets the steps before the checkpoint: ZeroDivisionError: division by zero."):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2


def nothing_is_finite(output):
    output["logprobs"] = [[math.nan] * len(sequence) for sequence in output["logprobs"]]


def test_a_sampler_without_finite_log_probabilities_is_warned_about(make, tiny_model_path, caplog):
    trainer = make(RolloutCorrectionMonitor(), sampler=BrokenSampler(tiny_model_path, nothing_is_finite))
    with saying(caplog, "came without a finite log-probability"):
        trainer.train()
    assert [re.search(r"step (\d+): .* \[(\w+)", message).groups() for message in messages(caplog)] == [
        ("1", "nonfinite_many"),
    ]


def test_a_run_that_rejects_everything_is_warned_about(make, caplog):
    trainer = make(
        RolloutCorrectionMonitor(),
        rollout_correction=None,
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold=1.0001,
    )
    with saying(caplog, "All tokens were rejected or have no gradient"):
        trainer.train()
    assert trainer.state.global_step == 3


def nothing_ends(output):
    for ids in output["completion_ids"]:
        ids[-1] = 5


def test_a_run_whose_completions_are_all_masked_is_warned_about(make, tiny_model_path, caplog):
    """TRL takes completions without an EOS token as cut, also those that a `stop` string has ended."""
    sampler = BrokenSampler(tiny_model_path, nothing_ends)
    trainer = make(RolloutCorrectionMonitor(), sampler=sampler, mask_truncated_completions=True, max_steps=4)
    with saying(caplog, "No token was left in the loss.*`mask_truncated_completions`.*`stop` string"):
        trainer.train()
    assert [re.search(r"\[(\w+)", message)[1] for message in messages(caplog)] == ["no_tokens"]


# Fillers ---------------------------------------------------------------------------------------------------------------

FILLERS = {
    "0.0": lambda logps: [0.0] * len(logps),
    "the mean of the sequence": lambda logps: [sum(logps) / len(logps)] * len(logps),
    "those of other tokens": lambda logps: logps[::-1],
}


@pytest.mark.parametrize(
    ("filler", "share"), [("0.0", 1.0), ("the mean of the sequence", 0.25), ("those of other tokens", 0.25)]
)
def test_fillers_are_critical_at_the_first_step_and_named_as_a_bias(make, tiny_model_path, caplog, filler, share):
    dice = random.Random(0)

    def fill(output):
        rows = output["logprobs"]
        output["logprobs"] = [FILLERS[filler](logps) if dice.random() < share else logps for logps in rows]

    sampler = BrokenSampler(tiny_model_path, fill, noise=0.0)
    fields = {"rollout_correction": "auto", "per_device_train_batch_size": 32, "learning_rate": 1e-6}
    make(RolloutCorrectionMonitor(), sampler=sampler, max_steps=10, **fields).train()
    first = {re.search(r"\[(\w+)", message)[1]: message for message in reversed(messages(caplog))}
    assert first["k3_at_start"].startswith("✖ step 1: ")
    assert "such as 0.0" in first["biased_ratio"]
    assert not re.search("harmless|cache gave", " ".join(first.values()))


def test_a_sampler_that_is_off_in_every_third_step_is_warned_about_at_once(make, tiny_model_path, caplog):
    steps = count(1)

    def shift(output):
        if next(steps) % 3 == 0:
            output["logprobs"] = [logps[::-1] for logps in output["logprobs"]]

    sampler = BrokenSampler(tiny_model_path, shift, noise=0.0)
    fields = {"rollout_correction": "auto", "max_steps": 4, "learning_rate": 1e-6}
    make(RolloutCorrectionMonitor(), sampler=sampler, **fields).train()
    (message,) = messages(caplog)
    assert re.match(r"▲ step 3: k3_kl is .*\[k3_corrected > 0.03\]", message)
    assert "harmless" not in message


# Nothing to learn from --------------------------------------------------------------------------------------------------


def easy(completions, trainer_state, **kwargs):
    """All rewards are 1 in two of three steps."""
    return [1.0 if trainer_state.global_step % 3 else float(i % 2) for i in range(len(completions))]


REWARDS = {
    "0": lambda completions, **kwargs: [0.0] * len(completions),
    "1": lambda completions, **kwargs: [1.0] * len(completions),
    "0.3": lambda completions, **kwargs: [0.3] * len(completions),
    "None": lambda completions, **kwargs: [None] * len(completions),
    "easy": easy,
}


@pytest.mark.parametrize("reward", REWARDS)
def test_a_run_with_nothing_to_learn_from_is_warned_about(make, tiny_model_path, caplog, reward):

    def cut(output):
        """Let no completion end, and give the log-probabilities of what it has then."""
        nothing_ends(output)
        output["logprobs"] = sampler.score(output["prompt_ids"], output["completion_ids"])

    sampler = BrokenSampler(tiny_model_path, cut, noise=0.0)
    extra = {"reward_funcs": REWARDS[reward]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make(RolloutCorrectionMonitor(), sampler=sampler, max_steps=8, learning_rate=1e-6, extra=extra)
        trainer.train()
    said = [message for message in messages(caplog) if message.startswith(("▲", "✖"))]
    if reward == "easy":
        assert said == []
        assert 0.5 < sum(logged(trainer, "zero_advantage_fraction")) / 8 < 1
    else:
        (message,) = said
        assert message.startswith("▲ step 7: All advantages are 0, so no reward changes the policy. [nothing_to_learn")
        assert "A share of 1 of the completions is cut" in " ".join(message.split())


class Drawing(StaleSampler):
    """A sampler of the trainer's policy that draws at a temperature, and reports values at 1."""

    def __init__(self, model_path: str, temperature: float):
        super().__init__(model_path)
        self.temperature, self.dice = temperature, torch.Generator().manual_seed(0)

    @torch.no_grad()
    def __call__(self, prompts, trainer) -> dict:
        ids = torch.tensor([(trainer.processing_class(prompt).input_ids * 4)[:4] for prompt in prompts])
        first, logps = ids.shape[1], []
        for _ in range(8):
            logits = trainer.model(ids).logits[:, -1].float()
            drawn = torch.multinomial((logits / self.temperature).softmax(-1), 1, generator=self.dice)
            logps.append(logits.log_softmax(-1).gather(-1, drawn))
            ids = torch.cat([ids, drawn], 1)
        completions = ids[:, first:].tolist()
        return {
            "prompt_ids": ids[:, :first].tolist(),
            "completion_ids": completions,
            "logprobs": torch.cat(logps, 1).tolist(),
        }


@pytest.mark.parametrize(("temperature", "alarms"), [(1.0, 0), (0.05, 1)])
def test_tokens_of_another_distribution_than_their_values_are_warned_about(
    make, tiny_model_path, caplog, temperature, alarms
):
    """The gap is 0, and only the entropy tells."""
    trainer = make(
        RolloutCorrectionMonitor(),
        sampler=Drawing(tiny_model_path, temperature),
        max_steps=12,
        learning_rate=1e-6,
        max_completion_length=8,
    )
    trainer.train()
    said = [message for message in messages(caplog) if message.startswith(("▲", "✖"))]
    assert [re.search(r"\[(\w+)", message)[1] for message in said] == ["other_draws"] * alarms


# Between logs ---------------------------------------------------------------------------------------------------------


def test_alarms_do_not_wait_for_a_log(make, caplog):
    trainer = make(RolloutCorrectionMonitor(), logging_steps=100, max_steps=4)
    with saying(caplog, r"^✖ step 1: k3_kl .*\[k3_at_start > 0.1\]"):
        trainer.train()
    assert len(logged(trainer, "monitor/alarms")) == 1  # a single log, at the end


def test_a_healthy_run_with_few_logs_has_no_alarm(make, tiny_model_path, caplog):
    sampler = StaleSampler(tiny_model_path, noise=0.0)
    trainer = make(RolloutCorrectionMonitor(), sampler=sampler, logging_steps=4, max_steps=8, learning_rate=1e-6)
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
    def observe(monitor, windows, before=(), spacing=1, settings=None):
        """
        Let a monitor see the log of a run without correction, and return its messages and the state. `before`
        are windows of `spacing` steps that were logged before the run was resumed.
        """
        args = RolloutCorrectionConfig(rollout_correction="disabled", rollout_monitor=None)
        args.output_dir = "output"
        state, control = TrainerState(), TrainerControl()
        steps = count(spacing, spacing)
        state.log_history = [
            {"loss": 0.0, **window, "step": step} for step, window in zip(steps, before, strict=False)
        ]
        state.global_step = spacing * len(before)
        monitor._examiner.settings = settings or args.settings  # as a trainer does when training begins
        monitor.on_train_begin(args, state, control)
        caplog.clear()
        for step, window in enumerate(windows, state.global_step + 1):
            logs, state.global_step = {"loss": 0.0, **window}, step
            state.log_history.append({**logs, "step": step})
            monitor.on_log(args, state, control, logs=logs)
        return messages(caplog), state

    return observe


FAR, NEAR, BETWEEN = ({"rollout_corr/k3_kl": value} for value in (0.06, 1e-4, 0.02))


def test_a_cause_that_lasts_is_repeated_ever_more_rarely(observe):
    said, state = observe(RolloutCorrectionMonitor(), [FAR] * 200)
    steps = [int(re.match(r"▲ step (\d+): ", message)[1]) for message in said]
    assert steps == [2, 12, 32, 72, 152]
    assert all(
        "k3_kl is 0.06, above 0.03, and nothing corrects for it. [k3_high > 0.03]" in message for message in said
    )
    assert ["most of our uncorrected runs" in message for message in said] == [True, False, False, False, False]
    assert all(message.endswith("since step 2") for message in said[1:])
    assert [entry[ALARMS] for entry in state.log_history] == [0, *[1] * 199]


def test_a_cause_that_comes_and_goes_does_not_flood(observe):
    said, _ = observe(RolloutCorrectionMonitor(), [FAR, FAR, FAR, NEAR, NEAR, NEAR] * 33)
    assert 3 <= len(said) <= 6


def test_two_causes_have_messages_of_their_own(observe):
    window = {"rollout_corr/staleness_max": 40.0, "rollout_corr/rollout_is_mean": 3.0}
    said, _ = observe(RolloutCorrectionMonitor(), [window] * 3)
    assert [re.search(r"\[(\w+)", message)[1] for message in said] == ["staleness", "weight_mean_high"]


def test_the_alarm_in_the_readme_is_one_of_the_monitor(observe):
    """Its lines, up to the dots that stand for what was left out."""
    of_age = {"rollout_corr/staleness_mean": 8.0, "rollout_corr/staleness_max": 8.0}
    gaps = [0.001] * 18 + [0.04] * 2
    windows = [{"rollout_corr/k3_kl": gap, "rollout_corr/kl": gap, **of_age} for gap in gaps]
    args = RolloutCorrectedGRPOConfig("output", rollout_correction="disabled", use_cpu=True, bf16=False)
    said, _ = observe(RolloutCorrectionMonitor(), windows, settings=args.settings)
    (message,) = (" ".join(message.split()) for message in said)
    for readme in ("README.md", "README.zh-CN.md"):
        (shown,) = re.findall(r"^```text\n(▲.*?)^```", (ROOT / readme).read_text(), re.MULTILINE | re.DOTALL)
        parts = [" ".join(part.split()) for part in shown.split("...")]
        assert len(parts) > 1
        assert all(part in message for part in parts), message


def test_only_the_main_process_speaks(monkeypatch, observe):
    monkeypatch.setenv("RANK", "1")
    said, state = observe(RolloutCorrectionMonitor(), [FAR] * 3)
    assert said == []
    assert state.log_history[-1][ALARMS] == 1


def test_logs_of_something_else_are_left_alone():
    monitor, control, state = RolloutCorrectionMonitor(), TrainerControl(), TrainerState()
    monitor.on_train_begin(RolloutCorrectionConfig(rollout_monitor=None), state, control)
    for logs in (None, {}, {"my_metric": 1.0}, {"eval_rollout_corr/k3_kl": 9.0}, {"train_runtime": 1.0}):
        before = dict(logs or {})
        monitor.on_log(None, state, control, logs=logs)
        assert (logs or {}) == before


# After a resume -------------------------------------------------------------------------------------------------------


def test_steps_after_a_resume_are_not_mixed_with_windows_of_the_log(observe):
    """A window of ten steps is enough for an alarm that foretells a collapse, a step is not."""
    near, far = {"rollout_corr/k3_kl": 1e-4}, {"rollout_corr/k3_kl": 0.2}  # not far enough for a single step
    for windows, steps in (([far, near, near], []), ([far, far, near], ["22"])):
        said, _ = observe(
            RolloutCorrectionMonitor(bounds={"k3_uncorrected": None}), windows, before=[near] * 2, spacing=10
        )
        assert [re.match(r"▲ step (\d+): ", message)[1] for message in said] == steps


def test_how_a_resumed_run_began_is_known(observe):
    def said(before):
        window = {f"rollout_corr/{key}": 0.05 for key in ("kl", "k3_kl")}
        first = {f"rollout_corr/{key}": before for key in ("kl", "k3_kl")}
        return observe(RolloutCorrectionMonitor(), [window] * 3, before=[first] * 30)[0][0]

    assert "Rounding seldom explains it" in said(0.05)
    assert "Rounding" not in said(0.001)


def test_what_is_no_rule_is_refused():
    with pytest.raises(ValueError, match=r"`rollout_monitor_bounds` must be numbers, or None, by name .* got 'stop'"):
        RolloutCorrectionMonitor("stop")
    with pytest.raises(ValueError, match=r"`rollout_monitor_bounds` is .*, and 'k4' is not a bound"):
        RolloutCorrectionMonitor(bounds={"k4": 1.0})


def test_the_document_shows_a_message(observe, caplog):
    window = {f"rollout_corr/{key}": 0.02 for key in ("kl", "k3_kl")} | {"rollout_corr/staleness_max": 8.0}
    early = {**window, "rollout_corr/k3_kl": 0.001, "rollout_corr/kl": 0.001}
    observe(RolloutCorrectionMonitor(), [*[early] * 9, window, window, window])  # an age of 8 needs 8 steps before
    (said,) = caplog.messages
    assert f"<!-- message -->\n\n```text\n{said}\n```\n" in (ROOT / "docs/alarms.md").read_text(), said


# Alerts of trackers ---------------------------------------------------------------------------------------------------


def test_alerts_in_wandb(make, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    make(RolloutCorrectionMonitor(), report_to=["wandb"], run_name="run", max_steps=2).train()
    alerts = [record.alert for record in finished_wandb_records(lambda record: record.HasField("alert"))]
    (alert,) = [alert for alert in alerts if alert.title.startswith("k3_at_start at step 1")]
    assert alert.level == "ERROR"
    assert re.search(r"`k3_kl` has been .* above 0.1, .* Set `rollout_diagnose: true`", alert.text)


def test_alerts_in_trackio(make, capsys, monkeypatch, tmp_path):
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.chdir(tmp_path)
    monitor = RolloutCorrectionMonitor()
    make(monitor, report_to=["trackio"], project="alerts", run_name="run", max_steps=2).train()
    (alert,) = [a for a in SQLiteStorage.get_alerts("alerts") if a["title"] == "k3_at_start at step 1"]
    assert alert["level"] == "error"
    assert "`k3_kl` has been" in alert["text"]
    assert "[TRACKIO" not in capsys.readouterr().out


def test_a_tracker_that_refuses_an_alert_ends_no_run(make, monkeypatch, tmp_path, caplog):
    trackio = pytest.importorskip("trackio")

    def alert(*args, **kwargs):
        raise RuntimeError("no connection")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trackio, "alert", alert)
    trainer = make(RolloutCorrectionMonitor(), report_to=["trackio"], project="alerts", run_name="r", max_steps=4)
    trainer.train()
    assert trainer.state.global_step == 4
    (told,) = [message for message in caplog.messages if "did not become an alert" in message]
    assert "Trackio (RuntimeError: no connection)" in told


# Fields that nothing follows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "told"),
    [({}, 0), ({"rollout_monitor": "warn", "rollout_monitor_bounds": {"k3_high": 1.0}}, 1)],
)
def test_fields_beside_a_monitor_of_the_user_are_named(tiny_model_path, tmp_path, fields, told):
    extra = {"callbacks": [RolloutCorrectionMonitor()]}
    fields = {"extra": extra, "max_steps": 1, **fields}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(*TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=StaleSampler(tiny_model_path), **fields).train()
    said = [str(w.message) for w in caught if str(w.message).startswith("`rollout_monitor_bounds` is set to")]
    assert len(said) == told
    assert all("takes the place of the trainer's own" in message for message in said)


def test_a_monitor_that_is_added_later_is_looked_at_too(tiny_model_path, tmp_path):
    trainer = build(
        *TRAINERS["grpo"],
        tiny_model_path,
        tmp_path,
        sampler=StaleSampler(tiny_model_path),
        rollout_monitor="warn",
        rollout_monitor_bounds={"k3_high": 1.0},
    )
    trainer.add_callback(RolloutCorrectionMonitor())
    with pytest.warns(UserWarning, match=r"`rollout_monitor_bounds` is set to .* but has no effect"):
        trainer.train()
