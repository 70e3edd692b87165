"""The page about criteria, weights and rules of one's own: its programs run, and what they define acts."""

import contextlib
import io
import json
import logging
import math
import re
import textwrap
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from tests.launching import ROOT
from tests.tiny import StaleSampler
from tests.training import TRAINERS, VLLM, build, freeze_sampler, logged, losses
from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.messages import PREFIX


PAGE = (ROOT / "docs/custom.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def block(text: str) -> str:
    """The only block of Python on the page that contains a text."""
    (found,) = [code for code in BLOCKS if text in code]
    return found


def inserted(code: str, lines: str, before: str) -> str:
    """Code with lines of the page before one of its lines, at the same depth."""
    (depth,) = re.findall(rf"^( *){re.escape(before)}", code, re.MULTILINE)
    return code.replace(f"{depth}{before}", f"{textwrap.indent(lines, depth)}{depth}{before}")


PROGRAM = block("class WithoutRareTokens(")
COUNTING = inserted(PROGRAM, block('["rare_tokens"]'), before="return correction.adjusted")
IMPORTS = PROGRAM.split("\n\n\nclass ")[0]


def program(code: str, definition: str, built: str) -> str:
    """A program with another definition before it, and with another statement that builds the trainer."""
    return re.sub(r"^trainer = .*", built.strip().replace("\\", r"\\"), f"{definition}\n\n{code}", flags=re.MULTILINE)


def with_class(name: str) -> str:
    """The program with the class of weights in place of the criterion, as the page says."""
    start, end = PROGRAM.split("\n\n\nclass ")[0], PROGRAM[PROGRAM.index("def reward") :]
    code = f"{start}\n\n\n{block(f'class {name}(')}\n\n{end}".replace("WithoutRareTokens", name)
    return code.replace('rollout_correction="auto"', 'rollout_correction="decoupled_token_is"')


def with_rule(name: str) -> str:
    """The program with the metric of rare tokens, and with a rule, passed as the page passes one."""
    built = block("callbacks=[").replace("WarnAboutRareTokens", name)
    return program(COUNTING, block(f"class {name}("), built)


def defined(code: str) -> dict:
    """What a block of the page defines."""
    names: dict = {}
    exec(code, names)
    return names


def class_of(name: str, trainer: str = "GRPO") -> type:
    """A class of the page, for another trainer if asked. The criterion counts what it rejects."""
    code = COUNTING.split("\n\n\ndef reward")[0] if name == "WithoutRareTokens" else block(f"class {name}(")
    return defined(f"{IMPORTS}\n{code}".replace("GRPO", trainer))[name]


def replay(rule, log) -> str:
    """The function of the page, without its example."""
    return defined(block("def replay(").split("\n\n\nlog = ")[0])["replay"](rule, log)


@pytest.fixture
def make(tiny_model_path, tmp_path, request):
    """Build a trainer of a class, on completions of a sampler that is not the policy."""

    def make(trainer_class, kind="grpo", **fields):
        if kind == "grpo":
            fields["sampler"] = StaleSampler(tiny_model_path)
        else:
            request.getfixturevalue("shared_engine")
            fields = {**VLLM, **fields}
        fields = {"rollout_correction": "decoupled_token_is", **fields}
        trainer = build(trainer_class, TRAINERS[kind][1], tiny_model_path, tmp_path, **fields)
        if kind == "rloo":
            freeze_sampler(trainer, 0.05)
        return trainer

    return make


@pytest.mark.vllm
@pytest.mark.parametrize(
    "code",
    {
        "criterion": PROGRAM,
        "weights": with_class("SquareRootWeights"),
        "warning": with_rule("WarnAboutRareTokens"),
        "stop": with_rule("StopWhenTheRewardFalls"),
    }.values(),
    ids=["criterion", "weights", "warning", "stop"],
)
def test_a_program_trains(code, tiny_model_path, shared_engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for written, small in (
        ("Qwen/Qwen2.5-0.5B-Instruct", tiny_model_path),
        ("use_vllm=True", "use_vllm=True, use_cpu=True, bf16=False, max_steps=2"),
        ("max_completion_length=32", "max_completion_length=8"),
    ):
        assert code.count(written) == 1
        code = code.replace(written, small)
    trainer = defined(code)["trainer"]
    assert trainer.state.global_step == 2
    counts = "rare_tokens" in code
    assert [("rare_tokens" in x) for x in trainer.state.log_history if "loss" in x] == [counts] * 2


def test_the_reward_wants_the_number_and_not_its_digits():
    reward = defined(PROGRAM.split("\n\n\nsums")[0])["reward"]
    completions = [" 5", "15", "51", "5 and 6", "6 or 5", "", "five"]
    assert reward(completions, ["5"] * len(completions)) == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]


# A criterion ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.vllm)])
def test_rare_tokens_have_no_gradient(make, kind):
    parent, own = TRAINERS[kind][0], class_of("WithoutRareTokens", kind.upper())
    plain = losses(make(parent, kind))
    assert losses(make(type("Never", (own,), {"lowest": -math.inf}), kind)) == plain
    half = make(type("Half", (own,), {"lowest": math.log(1 / 15)}), kind)
    assert losses(half) != plain
    rare = [entry["rare_tokens"] for entry in half.state.log_history if "rare_tokens" in entry]
    assert any(0 < share < 1 for share in rare)
    everything = make(type("Always", (own,), {"lowest": math.inf}), kind)
    assert {gradient for _, gradient in losses(everything)} == {0.0}
    assert logged(everything, "effective_lr") == [0.0] * 3


def test_the_mask_of_completions_on_the_page_keeps_whole_rows():
    lines = block("keepdim=True")
    correction = compute_rollout_correction(
        torch.tensor([[-1.0, -9.0], [-1.0, -9.0]]),
        torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]),
        torch.tensor([[1, 1], [1, 0]]),
        RolloutCorrectionConfig(rollout_is="token"),
    )
    names = {"correction": correction, "train_logps": torch.tensor([[-1.0, -9.0], [-1.0, -9.0]])}
    names["batch"] = {"sampling_per_token_logps": torch.full((2, 2), -1.0)}
    exec(lines, names)
    assert names["keep"].shape == (2, 1)
    assert correction.adjusted(keep=names["keep"]).keep.tolist() == [[False, False], [True, False]]


def correction_of(rows: int, tokens: int):
    """A correction that keeps everything."""
    ones = torch.ones(rows, tokens)
    return compute_rollout_correction(-ones, -ones, ones, RolloutCorrectionConfig(rollout_is="token"))


def test_masks_of_the_shapes_on_the_page():
    correction, of_rows = correction_of(3, 2), torch.tensor([True, False, True])
    assert correction.adjusted(keep=of_rows.unsqueeze(1)).keep.tolist() == [[True] * 2, [False] * 2, [True] * 2]
    assert correction.adjusted(keep=torch.eye(3, 2).bool()).keep.tolist() == torch.eye(3, 2).bool().tolist()
    for tokens in (2, 3):  # also if there are as many tokens as completions
        with pytest.raises(ValueError, match=rf"`keep` must have the shape \(3, {tokens}\) or \(3, 1\), got \(3,\)"):
            correction_of(3, tokens).adjusted(keep=of_rows)
    with pytest.raises(ValueError, match=r"`weights` must have the shape \(3, 2\), got \(3, 1\)"):
        correction.adjusted(weights=torch.ones(3, 1))
    names = {"keep": of_rows, "weights": torch.tensor([[1.0], [2.0], [0.5]]), "train_logps": torch.zeros(3, 2)}
    exec(block("expand_as"), names)
    adjusted = correction.adjusted(keep=names["keep"], weights=names["weights"])
    assert adjusted.coefficients.tolist() == [[1.0] * 2, [0.0] * 2, [0.5] * 2]


@pytest.mark.parametrize(
    ("preset", "iterations", "calls"),
    [("auto", 1, 4), ("auto", 2, 2), ("bypass_ppo_clip", 1, 4), ("bypass_ppo_clip", 2, 4), ("disabled", 1, 4)],
)
def test_the_tensors_are_those_of_the_table(make, preset, iterations, calls):
    class Looks(TRAINERS["grpo"][0]):
        def _compute_correction(self, train_logps, batch):
            correction = super()._compute_correction(train_logps, batch)
            shape = train_logps.shape
            matrices = (batch["sampling_per_token_logps"], batch["completion_ids"], correction.valid, correction.keep)
            assert {x.shape for x in matrices} == {shape}
            assert correction.weights is None or correction.weights.shape == shape
            assert batch["advantages"].shape == shape[:1]
            assert correction.valid.dtype == correction.keep.dtype == torch.bool
            assert not any(x.requires_grad for x in (train_logps, *matrices, batch["advantages"]))
            seen.append(shape)
            return correction

    seen: list = []
    schedule = "aligned" if iterations == 1 else "two iterations"
    make(Looks, rollout_correction=preset, schedule=schedule, max_steps=2).train()
    assert [rows for rows, _ in seen] == [4] * calls  # a micro-batch; there are two at each of two steps


# Weights --------------------------------------------------------------------------------------------------------------


def test_own_weights_replace_those_of_the_settings(make):
    class AllOnes(TRAINERS["grpo"][0]):
        def _compute_correction(self, train_logps, batch):
            return super()._compute_correction(train_logps, batch).adjusted(weights=torch.ones_like(train_logps))

    uncorrected = make(TRAINERS["grpo"][0], rollout_correction="disabled")
    assert losses(make(AllOnes)) == [pytest.approx(step, rel=1e-5, abs=1e-7) for step in losses(uncorrected)]
    roots = make(class_of("SquareRootWeights"))
    assert losses(roots) not in (losses(uncorrected), losses(make(TRAINERS["grpo"][0])))


def test_the_square_root_is_that_of_the_ratio():
    train, rollout = torch.tensor([[-1.0, -1.0, math.nan]]), torch.tensor([[-1.5, -9.0, -1.0]])
    settings = RolloutCorrectionConfig(rollout_correction="decoupled_token_is")
    correction = compute_rollout_correction(train, rollout, torch.ones(1, 3), settings)

    class Parent:
        def _compute_correction(self, train_logps, batch):
            return correction

    own = type("Own", (Parent,), {})
    function = class_of("SquareRootWeights")._compute_correction
    method = type(function)(function.__code__, function.__globals__, closure=(type(function.__closure__[0])(own),))
    found = method(own(), train, {"sampling_per_token_logps": rollout})
    assert found.coefficients[0].tolist() == pytest.approx([math.exp(0.25), 2.0, 0.0])
    assert found.metrics()["rollout_corr/effective_lr"] == pytest.approx((math.exp(0.25) + 2.0) / 2)


def test_weights_and_a_criterion_go_together():
    train = torch.tensor([[-1.0, -1.0, -1.0]])
    settings = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=2.0)
    correction = compute_rollout_correction(train, torch.tensor([[-1.0, -1.0, -9.0]]), torch.ones(1, 3), settings)
    weights = torch.full((1, 3), 0.5, requires_grad=True)
    adjusted = correction.adjusted(keep=torch.tensor([[True, False, True]]), weights=weights)
    assert adjusted.coefficients.tolist() == [[0.5, 0.0, 0.0]]  # the last one is rejected by the settings
    assert not adjusted.coefficients.requires_grad
    assert correction.coefficients.tolist() == [[1.0, 1.0, 0.0]]


# A rule that warns ------------------------------------------------------------------------------------------------------


def shares(*values: float, first_step: int = 1) -> list[dict]:
    """Log entries with shares of rare tokens, and an evaluation and a summary, which have none."""
    entries = [{"rare_tokens": value, "step": step} for step, value in enumerate(values, first_step)]
    return [*entries[:1], {"eval_rare_tokens": 0.9, "step": first_step}, *entries[1:], {"train_loss": 0.0, "step": 99}]


def test_the_rule_warns_once_at_the_third_entry_in_a_row(caplog):
    rule = class_of("WarnAboutRareTokens")
    with caplog.at_level(logging.WARNING):
        replay(rule(), shares(0.06, 0.06, 0.04, 0.06, 0.06))
        assert caplog.messages == []
        replay(rule(), shares(0.07, 0.06, 0.061, 0.09, first_step=10))
    (line,) = caplog.messages
    assert f"```text\n{line}\n```" in PAGE
    caplog.clear()
    replay(rule(), shares(*[0.06] * 4, 0.05, *[0.06] * 4))
    assert [message.split(":")[0] for message in caplog.messages] == ["Step 3", "Step 8"]


def test_only_the_first_process_warns(caplog):
    rule, state = class_of("WarnAboutRareTokens")(), TrainerState(is_world_process_zero=False)
    for entry in shares(*[0.06] * 4):
        rule.on_log(None, state, TrainerControl(), logs=entry)
    assert caplog.messages == []


def test_the_warning_goes_to_wandb_as_an_alert(monkeypatch, caplog):
    wandb = pytest.importorskip("wandb")
    code = block("class WarnAboutRareTokens(") + textwrap.indent(block("wandb.run.alert"), " " * 8)
    rule, alerts = defined(code)["WarnAboutRareTokens"], []
    replay(rule(), shares(*[0.06] * 4))  # without a run of W&B there is no alert
    monkeypatch.setattr(wandb, "run", SimpleNamespace(alert=lambda title, text: alerts.append((title, text))))
    replay(rule(), shares(*[0.06] * 4))
    assert alerts == [("Rare tokens", caplog.messages[-1])]


# A rule that stops ------------------------------------------------------------------------------------------------------


def rewards(*values: float) -> list[dict]:
    """Log entries with mean rewards, and an evaluation and a summary, which have none."""
    entries = [{f"{PREFIX}reward_mean": value, "reward": value, "step": step} for step, value in enumerate(values, 1)]
    evaluation = {f"eval_{PREFIX}reward_mean": -9.0, "eval_reward": -9.0, "step": 1}
    return [*entries[:1], evaluation, *entries[1:], {"train_loss": 0.0, "step": len(values)}]


@pytest.mark.parametrize("level", [-100.0, -1.0, 0.0, 1.0, 100.0])
def test_the_rule_acts_on_a_fall_whatever_the_sign_of_the_reward(level):
    rule = class_of("StopWhenTheRewardFalls")
    steady, rising = [level + 0.1 * (i % 2) for i in range(20)], [level + 0.1 * i for i in range(20)]
    for healthy in (steady, rising):
        assert replay(rule(fall=0.3, window=4), rewards(*healthy)) == "The rule does not stop the run."
    falls = [*steady[:10], *[level - 1.0] * 10]
    # two of the latest four are low at the second one: the mean is 0.5 lower, and at the first one 0.25
    assert replay(rule(fall=0.3, window=4), rewards(*falls)) == "The rule stops the run at step 12."


@pytest.mark.parametrize("correction", ["decoupled_token_is", "disabled"])
def test_the_rule_ends_a_run_whose_reward_falls(make, tmp_path, monkeypatch, correction):
    levels = iter([-1.0, -1.0, *[-2.0] * 20])

    def reward(completions, **kwargs):
        level = next(levels)
        return [level + 0.02 * (i % 2) for i in range(len(completions))]

    rule = class_of("StopWhenTheRewardFalls")
    extra = {"callbacks": [rule(window=2)], "reward_funcs": reward}
    dump = tmp_path / "dump"
    fields = {"max_steps": 8, "rollout_dump_dir": dump, "rollout_correction": correction, "extra": extra}
    trainer = make(TRAINERS["grpo"][0], **fields)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        trainer.train()
    assert trainer.state.global_step == 3
    assert "Step 3: the mean reward has fallen from -0.99 to -1.49." in output.getvalue()

    # The checkpoint and the dump have the log, and a replay of the log says the same
    folder = tmp_path / "output/checkpoint-500"
    folder.mkdir(parents=True)
    (tmp_path / "checkpoint-3/trainer_state.json").rename(folder / "trainer_state.json")
    monkeypatch.chdir(tmp_path)
    code = block("def replay(").replace("window=50", "window=2")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, {"StopWhenTheRewardFalls": rule})
    assert output.getvalue().splitlines()[-1] == "The rule stops the run at step 3."
    for reading in re.findall(r"^\| .* \| `(.*)` \| the log ", PAGE, re.MULTILINE):
        log = eval(reading, {"json": json, "trainer": trainer})
        assert replay(rule(window=2), log) == "The rule stops the run at step 3."


# Several processes ------------------------------------------------------------------------------------------------------


class Recording(dict):
    """A log entry that records which metrics are read."""

    def __init__(self, entry: dict, read: set):
        super().__init__(entry)
        self.read = read

    def get(self, key, default=None):
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)


@pytest.mark.parametrize("name", ["WarnAboutRareTokens", "StopWhenTheRewardFalls"])
def test_a_rule_reads_only_metrics_that_every_process_has(name):
    read: set = set()
    state, control = TrainerState(), TrainerControl()
    for entry in [*rewards(*[1.0] * 60, *[-1.0] * 60), *shares(*[0.9] * 5)]:
        class_of(name)().on_log(None, state, control, logs=Recording(entry, read))
    assert read
    assert {key for key in read if not key.startswith(PREFIX)} <= {"rare_tokens"}  # which the program gathers


def in_processes(rules, logs) -> list[int | None]:
    """Steps at which the processes of a run stop, each with a rule and a log of its own."""
    controls = [TrainerControl() for _ in rules]
    stops: list[int | None] = [None] * len(rules)
    for entries in zip(*logs, strict=True):
        for rank, (rule, control, entry) in enumerate(zip(rules, controls, entries, strict=True)):
            state = TrainerState(global_step=entry["step"], is_world_process_zero=rank == 0)
            rule.on_log(None, state, control, logs=entry)
            if control.should_training_stop and stops[rank] is None:
                assert control.should_save
                stops[rank] = entry["step"]
    return stops


def of_asynchronous_processes(log: list[dict]) -> list[list[dict]]:
    """The log as two processes of asynchronous training have it: the second one without the reward of TRL."""
    return [log, [{key: value for key, value in entry.items() if key != "reward"} for entry in log]]


def test_processes_stop_together():
    rule, log = class_of("StopWhenTheRewardFalls"), rewards(*[-1.0] * 10, *[-2.0] * 10)
    stops = in_processes([rule(window=4), rule(window=4)], of_asynchronous_processes(log))
    assert stops == [12, 12]
    # the replay of the page without the metrics of TRL
    names = defined(block("def replay(").split("\n\n\nlog = ")[0]) | {"log": log}
    lines = block("ours = ").replace("window=50", "window=4")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(lines, {**names, "StopWhenTheRewardFalls": rule})
    assert output.getvalue().splitlines()[-1] == "The rule stops the run at step 12."


def test_the_first_process_decides_for_all():
    class ReadsTheReward:
        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs.get("reward", 0.0) < -1.5:
                control.should_save = control.should_training_stop = True

    logs = of_asynchronous_processes(rewards(*[-1.0] * 5, *[-2.0] * 5))
    assert in_processes([ReadsTheReward(), ReadsTheReward()], logs) == [6, None]  # the others wait forever
    names, sent = defined(block("class FirstProcessDecides(")), []
    log = logs[0]  # a replay is the first process
    assert replay(names["FirstProcessDecides"](ReadsTheReward()), log) == "The rule stops the run at step 6."

    def broadcast(objects, from_process):
        assert from_process == 0
        sent.append([*objects])
        objects[:] = sent[-1] if len(sent) % 2 else sent[-2]  # the first process comes first

    names["broadcast_object_list"] = broadcast
    together = names["FirstProcessDecides"]
    assert in_processes([together(ReadsTheReward()), together(ReadsTheReward())], logs) == [6, 6]
    assert len(sent) == 2 * len(logs[0])  # in both processes, at every log


# Without TRL ----------------------------------------------------------------------------------------------------------


def test_the_program_without_trl_prints_what_the_page_shows():
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        names = defined(block("compute_rollout_correction"))
    assert f"```text\n{output.getvalue()}```" in PAGE
    before, after = (float(names[name][0, 2].exp()) for name in ("rollout", "train"))
    assert f"from {before:.2f} to {after:.2f}" in PAGE
