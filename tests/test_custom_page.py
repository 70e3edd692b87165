"""The page about criteria, weights and rules of one's own: its programs run, and what they define acts."""

import contextlib
import io
import math
import re

import pytest
import torch

from tests.launching import ROOT
from tests.tiny import StaleSampler
from tests.training import TRAINERS, VLLM, build, freeze_sampler, logged, losses
from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction


PAGE = (ROOT / "docs/custom.md").read_text()
PROGRAMS = {
    (re.findall(r"^class (\w+)\(", code, re.MULTILINE) or ["none"])[0]: code
    for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    if "import" in code
}


def class_of(name: str, trainer: str = "GRPO") -> type:
    """The class that a program defines, for another trainer if asked."""
    names: dict = {}
    exec(PROGRAMS[name].split("\n\n\ndef reward")[0].replace("GRPO", trainer), names)
    return names[name]


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


def test_the_page_has_these_programs():
    assert set(PROGRAMS) == {"WithoutRareTokens", "SquareRootWeights", "StopWhenTheRewardFalls", "none"}


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["WithoutRareTokens", "SquareRootWeights", "StopWhenTheRewardFalls"])
def test_a_program_trains(name, tiny_model_path, shared_engine, tmp_path, monkeypatch):
    program = PROGRAMS[name]
    monkeypatch.chdir(tmp_path)
    for written, small in (
        ("Qwen/Qwen2.5-0.5B-Instruct", tiny_model_path),
        ("use_vllm=True", "use_vllm=True, use_cpu=True, bf16=False, max_steps=2"),
        ("max_completion_length=32", "max_completion_length=8"),
    ):
        assert written in program
        program = program.replace(written, small)
    names: dict = {}
    exec(program, names)
    assert names["trainer"].state.global_step == 2


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
    (lines,) = re.findall(r"^```python\n(log_ratio = .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    correction = compute_rollout_correction(
        torch.tensor([[-1.0, -9.0], [-1.0, -9.0]]),
        torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]),
        torch.tensor([[1, 1], [1, 0]]),
        RolloutCorrectionConfig(rollout_is="token"),
    )
    names = {"correction": correction, "train_logps": torch.tensor([[-1.0, -9.0], [-1.0, -9.0]])}
    names["batch"] = {"sampling_per_token_logps": torch.full((2, 2), -1.0)}
    exec(lines, names)
    assert correction.adjusted(keep=names["keep"]).keep.tolist() == [[False, False], [True, False]]


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
    adjusted = correction.adjusted(keep=torch.tensor([[True, False, True]]), weights=torch.full((1, 3), 0.5))
    assert adjusted.coefficients.tolist() == [[0.5, 0.0, 0.0]]  # the last one is rejected by the settings
    assert correction.coefficients.tolist() == [[1.0, 1.0, 0.0]]


# A rule ---------------------------------------------------------------------------------------------------------------


def test_the_rule_ends_a_run_whose_reward_falls(make):
    rewards = iter([1.0, 1.0, *[0.0] * 20])

    def reward(completions, **kwargs):
        level = next(rewards)
        return [level + 0.01 * (i % 2) for i in range(len(completions))]

    rule = class_of("StopWhenTheRewardFalls")(gap=0.0, window=2)
    fields = {"max_steps": 8, "extra": {"callbacks": [rule], "reward_funcs": reward}}
    trainer = make(TRAINERS["grpo"][0], **fields)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        trainer.train()
    first_low = 1 + [entry["reward"] < 0.5 for entry in trainer.state.log_history if "reward" in entry].index(True)
    assert trainer.state.global_step == first_low + 2
    assert f"Step {first_low + 2}: the reward has fallen" in output.getvalue()


def test_the_rule_leaves_a_healthy_run_alone(make):
    rule = class_of("StopWhenTheRewardFalls")(gap=math.inf, window=2)
    trainer = make(TRAINERS["grpo"][0], max_steps=5, extra={"callbacks": [rule]})
    trainer.train()
    assert trainer.state.global_step == 5


# Without TRL ----------------------------------------------------------------------------------------------------------


def test_the_program_without_trl_prints_what_the_page_shows():
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(PROGRAMS["none"], {})
    assert f"```text\n{output.getvalue()}```" in PAGE
