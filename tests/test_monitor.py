"""`RolloutCorrectionMonitor` on the real TRL, with a sampler that is far from the trainer."""

import math
import random
import re
import warnings
from itertools import count

import numpy as np
import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState

from tests.launching import ROOT
from tests.test_reporting import finished_wandb_records
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
from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectionConfig
from trl_rollout_corr.tools.monitor.callback import RolloutCorrectionMonitor
from trl_rollout_corr.tools.monitor.reward import Reward
from trl_rollout_corr.tools.monitor.rule import ALARMS


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


# The reward falls from step 45 to 65. A run that is stopped ends after it has begun to fall.
ONE_BATCH = {"gradient_accumulation_steps": 1, "steps_per_generation": 1}  # a step, as there are many
FALLS = {"max_steps": 75, **ONE_BATCH, "extra": {"reward_funcs": falling_reward}}
BEGAN = 45


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
        RolloutCorrectionMonitor("stop"),
        rollout_correction=None,
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold=1.0001,
    )
    with saying(caplog, "All tokens were rejected or have no gradient"):
        trainer.train()
    assert trainer.state.global_step == 3  # bounds may be too tight, which is no reason to end a run


def nothing_ends(output):
    for ids in output["completion_ids"]:
        ids[-1] = 5


def test_a_run_whose_completions_are_all_masked_is_warned_about(make, tiny_model_path, caplog):
    """TRL takes completions without an EOS token as cut, also those that a `stop` string has ended."""
    sampler = BrokenSampler(tiny_model_path, nothing_ends)
    trainer = make(RolloutCorrectionMonitor("stop"), sampler=sampler, mask_truncated_completions=True, max_steps=4)
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
        pairs = zip(output["prompt_ids"], output["completion_ids"], strict=True)
        output["logprobs"] = [sampler.score(prompt, ids) for prompt, ids in pairs]

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


# Between logs ---------------------------------------------------------------------------------------------------------


def test_alarms_do_not_wait_for_a_log(make, caplog):
    trainer = make(RolloutCorrectionMonitor("stop"), logging_steps=100, **FALLS)
    with saying(caplog, r"^✖ step 1: k3_kl .*\[k3_at_start > 0.1\]"), saying(caplog, "training ends here"):
        trainer.train()
    assert BEGAN < trainer.state.global_step < FALLS["max_steps"]
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
    def observe(monitor, windows, before=(), spacing=1, settings=None):
        """
        Let a monitor see the log of a run without correction, and return its messages, the state, and the control. `before`
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
        return messages(caplog), state, control

    return observe


FAR, NEAR, BETWEEN = ({"rollout_corr/k3_kl": value} for value in (0.06, 1e-4, 0.02))


def test_a_cause_that_lasts_is_repeated_ever_more_rarely(observe):
    said, state, control = observe(RolloutCorrectionMonitor(), [FAR] * 200)
    steps = [int(re.match(r"▲ step (\d+): ", message)[1]) for message in said]
    assert steps == [2, 12, 32, 72, 152]
    assert all(
        "k3_kl is 0.06, above 0.03, and nothing corrects for it. [k3_high > 0.03]" in message for message in said
    )
    assert ["Not every run is harmed" in message for message in said] == [True, False, False, False, False]
    assert all(message.endswith("since step 2") for message in said[1:])
    assert [entry[ALARMS] for entry in state.log_history] == [0, *[1] * 199]
    assert not control.should_training_stop


def test_a_cause_that_comes_and_goes_does_not_flood(observe):
    said, _, _ = observe(RolloutCorrectionMonitor(), [FAR, FAR, FAR, NEAR, NEAR, NEAR] * 33)
    assert 3 <= len(said) <= 6


def test_two_causes_have_messages_of_their_own(observe):
    window = {"rollout_corr/staleness_max": 40.0, "rollout_corr/rollout_is_mean": 3.0}
    said, _, _ = observe(RolloutCorrectionMonitor(), [window] * 3)
    assert [re.search(r"\[(\w+)", message)[1] for message in said] == ["staleness", "weight_mean_high"]


def test_the_alarm_in_the_readme_is_one_of_the_monitor(observe):
    """Its lines, up to the dots that stand for what was left out."""
    ours = {"k3_kl": 0.002, "rollout_is_mean": 0.27, "staleness_mean": 0.0, "staleness_max": 0.0}
    of_trl = {"completions/mean_length": 1024.0, **{f"rollout_corr/{name}": value for name, value in ours.items()}}
    args = RolloutCorrectedGRPOConfig("output", rollout_correction="trl", use_vllm=True, use_cpu=True, bf16=False)
    said, _, _ = observe(RolloutCorrectionMonitor(), [of_trl] * 2, settings=args.settings)
    (message,) = (" ".join(message.split()) for message in said)
    for readme in ("README.md", "README.zh-CN.md"):
        (shown,) = re.findall(r"^```text\n(▲.*?)^```", (ROOT / readme).read_text(), re.MULTILINE | re.DOTALL)
        parts = [" ".join(part.split()) for part in shown.split("...")]
        assert len(parts) > 1
        assert all(part in message for part in parts), message


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


def course(*levels, spread=0.02):
    """Rewards with a level for so many steps, or between two levels on the way: `(0.6, 50), (0.6, 0.1, 20)`."""
    found = []
    for *ends, steps in levels:
        found += [ends[0] + (ends[-1] - ends[0]) * (step + 0.5) / steps for step in range(steps)]
    return [level + spread * (-1) ** step for step, level in enumerate(found)]


COLLAPSE = course((0.6, 60), (0.6, 0.1, 20), (0.1, 20))


def fallen(window):
    """Windows of a run whose reward falls."""
    return rewarded(window, COLLAPSE)


def test_an_alarm_about_the_gap_stops_once_the_reward_has_fallen(observe):
    said, _, control = observe(RolloutCorrectionMonitor("stop"), fallen(FAR))
    assert control.should_training_stop
    assert control.should_save
    ends = next(message for message in said if "training ends here" in message)
    assert re.search(r"The mean reward has fallen from 0\.6 to 0\.\d+", ends)
    assert 60 < int(re.match(r"▲ step (\d+): ", ends)[1]) < 90


@pytest.mark.parametrize(
    ("window", "rewards"),
    {
        "the alarm alone, without rewards": (FAR, None),
        "steady": (FAR, course((0.6, 200))),
        "rising": (FAR, course((0.2, 40), (0.2, 0.6, 40), (0.6, 100))),
        "constant": (FAR, [0.0] * 200),
        "other prompts": (FAR, course((0.6, 60), (0.1, 60), (0.5, 60))),
        "harder prompts": (FAR, course((0.9, 0.2, 200))),
        "less than a quarter": (FAR, course((0.6, 60), (0.6, 0.5, 20), (0.5, 40), spread=0.001)),
        "the reward alone": (NEAR, COLLAPSE),
    }.values(),
)
def test_a_run_goes_on_unless_both_are_bad(observe, window, rewards):
    windows = [window] * 60 if rewards is None else rewarded(window, rewards)
    _, _, control = observe(RolloutCorrectionMonitor("stop"), windows)
    assert not control.should_training_stop


def test_a_reward_that_has_come_back_has_not_fallen():
    reward = Reward()
    for value in COLLAPSE:
        reward.add(value)
    assert reward.fell
    for value in course((0.1, 0.6, 20), (0.6, 20)):
        reward.add(value)
    assert not reward.fell


def answered(rng, shares, completions):
    """Mean rewards of steps in which this share of so many completions is right."""
    return rng.binomial(completions, np.clip(shares, 0, 1)) / completions


def repeated(levels, steps, every):
    return np.repeat(levels, every)[:steps]


# Runs without a fall: of a generator, the rewards of a run, with few or many completions a step
WITHOUT_A_FALL = {
    "constant": lambda rng, n: answered(rng, np.full(600, rng.choice([0.05, 0.5, 0.9])), n),
    "noise": lambda rng, n: rng.normal(rng.choice([0, 1]), rng.choice([0.01, 0.1, 1.0]), 600),
    "easy to hard, 100 steps": lambda rng, n: answered(rng, np.linspace(0.9, 0.2, 100), n),
    "easy to hard, 1,000 steps": lambda rng, n: answered(rng, np.linspace(0.9, 0.2, 1000), n),
    "easy to hard, slow at the ends": lambda rng, n: answered(rng, 1 / (1 + np.exp(np.linspace(-3, 3, 600))), n),
    "blocks of 25": lambda rng, n: answered(rng, repeated(rng.uniform(0.1, 0.9, 24), 600, 25), n),
    "blocks of 100": lambda rng, n: answered(rng, repeated(rng.uniform(0.1, 0.9, 6), 600, 100), n),
    "two kinds of blocks": lambda rng, n: answered(rng, repeated([0.7, 0.3] * 2, 600, 200), n),
}
COMPLETIONS = (4, 16, 64)
SEEDS = range(50_000, 50_300)  # none of them was used to choose a limit


def fall_of(rewards):
    """Step at which the reward is first said to have fallen; `None` if it never is."""
    reward = Reward()
    for step, value in enumerate(rewards, 1):
        reward.add(float(value))
        if reward.fell:
            return step
    return None


@pytest.mark.parametrize("kind", WITHOUT_A_FALL)
def test_runs_without_a_fall_show_none(kind):
    runs = (WITHOUT_A_FALL[kind](np.random.default_rng(seed), COMPLETIONS[seed % 3]) for seed in SEEDS)
    assert sum(fall_of(run) is not None for run in runs) <= 0.02 * len(SEEDS)


@pytest.mark.parametrize(
    ("fall", "completions", "begins", "found"),
    [
        ("collapse", 32, 100, 50),
        ("collapse", 128, 100, 30),
        ("collapse after learning", 128, 200, 30),
        ("slow decay", 64, 400, 200),
    ],
)
def test_real_falls_are_found_within_a_reasonable_time(fall, completions, begins, found):
    level, drop, low = np.full(100, 0.6), np.linspace(0.6, 0.1, 30), np.full(60, 0.1)
    shares = {
        "collapse": [level, drop, low],
        "collapse after learning": [np.linspace(0.2, 0.6, 100), level, drop, low],
        "slow decay": [np.full(400, 0.6), np.linspace(0.6, 0.3, 200), np.full(100, 0.3)],
    }[fall]
    steps = [
        fall_of(answered(np.random.default_rng(seed), np.concatenate(shares), completions)) for seed in SEEDS[:20]
    ]
    in_time = [step is not None and begins < step <= begins + found for step in steps]
    assert np.mean(in_time) >= 0.8, steps


def test_a_run_that_only_warns_goes_on(observe):
    _, _, control = observe(RolloutCorrectionMonitor(), fallen(FAR))
    assert not control.should_training_stop


def test_a_run_is_stopped_after_a_checkpoint_and_goes_on_from_there(make, tmp_path, caplog):
    fields = {**FALLS, "save_strategy": "no"}
    trainer = make(RolloutCorrectionMonitor("stop"), **fields)
    with saying(caplog, "training ends here, with a checkpoint in "):
        trainer.train()
    step = trainer.state.global_step
    assert BEGAN < step < fields["max_steps"]
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
    *_, control = observe(RolloutCorrectionMonitor("stop"), rewarded(FAR, [0.1] * 10), before=fallen(FAR))
    assert not control.should_training_stop
    *_, control = observe(RolloutCorrectionMonitor("stop"), fallen(FAR), before=fallen(FAR))
    assert control.should_training_stop


def test_steps_after_a_resume_are_not_mixed_with_windows_of_the_log(observe):
    """A window of ten steps is enough for an alarm that ends a run, a step is not."""
    near, far = {"rollout_corr/k3_kl": 1e-4}, {"rollout_corr/k3_kl": 0.2}  # not far enough for a single step
    for windows, steps in (([far, near, near], []), ([far, far, near], ["22"])):
        said, *_ = observe(
            RolloutCorrectionMonitor(bounds={"k3_uncorrected": None}), windows, before=[near] * 2, spacing=10
        )
        assert [re.match(r"▲ step (\d+): ", message)[1] for message in said] == steps


def test_how_a_resumed_run_began_is_known(observe):
    def said(before):
        window = {f"rollout_corr/{key}": 0.05 for key in ("kl", "k3_kl")}
        first = {f"rollout_corr/{key}": before for key in ("kl", "k3_kl")}
        return observe(RolloutCorrectionMonitor(), [window] * 3, before=[first] * 30)[0][0]

    assert "there from the first step" in said(0.05)
    assert "there from the first step, so" not in said(0.001)


def test_a_checkpoint_is_saved_if_it_is_not_the_best(make, tmp_path, monkeypatch, caplog):
    best = {"save_strategy": "best", "metric_for_best_model": "loss"}
    evaluated = {**evaluation(), "eval_steps": 1, "eval_delay": BEGAN}  # also at the last step
    extra = {**evaluated["extra"], **FALLS["extra"]}
    trainer = make(RolloutCorrectionMonitor("stop"), **{**FALLS, **best, **evaluated, "extra": extra})
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
    with pytest.raises(ValueError, match=r"`rollout_monitor_bounds` is .*, and 'k4' is not a bound"):
        RolloutCorrectionMonitor(bounds={"k4": 1.0})


def test_the_document_shows_a_message(observe, caplog):
    window = {f"rollout_corr/{key}": 0.02 for key in ("kl", "k3_kl")} | {"rollout_corr/staleness_max": 8.0}
    early = {**window, "rollout_corr/k3_kl": 0.001, "rollout_corr/kl": 0.001}
    observe(RolloutCorrectionMonitor(), [early, window, window, window])
    (said,) = caplog.messages
    assert f"<!-- message -->\n\n```text\n{said}\n```\n" in (ROOT / "docs/alarms.md").read_text(), said


# Alerts of trackers ---------------------------------------------------------------------------------------------------


def test_alerts_in_wandb(make, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    make(RolloutCorrectionMonitor("warn"), report_to=["wandb"], run_name="run", max_steps=2).train()
    alerts = [record.alert for record in finished_wandb_records(lambda record: record.HasField("alert"))]
    (alert,) = [alert for alert in alerts if alert.title.startswith("k3_at_start at step 1")]
    assert alert.level == "ERROR"
    assert re.search(r"`k3_kl` has been .* above 0.1, .* Set `rollout_diagnose: true`", alert.text)


def test_alerts_in_trackio(make, capsys, monkeypatch, tmp_path):
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.chdir(tmp_path)
    monitor = RolloutCorrectionMonitor("warn")
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
    trainer = make(
        RolloutCorrectionMonitor("warn"), report_to=["trackio"], project="alerts", run_name="r", max_steps=4
    )
    trainer.train()
    assert trainer.state.global_step == 4
    (told,) = [message for message in caplog.messages if "did not become an alert" in message]
    assert "Trackio (RuntimeError: no connection)" in told


# Fields that nothing follows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "told"), [({}, 0), ({"rollout_monitor": "stop"}, 1), ({"rollout_monitor": None}, 0)]
)
def test_fields_beside_a_monitor_of_the_user_are_named(tiny_model_path, tmp_path, fields, told):
    extra = {"callbacks": [RolloutCorrectionMonitor("warn")]}
    fields = {"rollout_monitor_bounds": {"k3_high": 1.0} if told else None, "extra": extra, "max_steps": 1, **fields}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(*TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=StaleSampler(tiny_model_path), **fields).train()
    for name in ("rollout_monitor", "rollout_monitor_bounds"):
        said = [str(w.message) for w in caught if str(w.message).startswith(f"`{name}` is set to")]
        assert len(said) == told, name
        assert all("takes the place of the trainer's own" in message for message in said)


def test_a_monitor_that_is_added_later_is_looked_at_too(tiny_model_path, tmp_path):
    trainer = build(
        *TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=StaleSampler(tiny_model_path), rollout_monitor="stop"
    )
    trainer.add_callback(RolloutCorrectionMonitor("warn"))
    with pytest.warns(UserWarning, match=r"`rollout_monitor` is set to 'stop' but has no effect"):
        trainer.train()
