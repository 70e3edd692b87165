"""The benchmarks run, and measure what they say."""

import json
import sys

import pytest
import torch

from tests.launching import ROOT, benchmarks, output_of
from trl_rollout_corr import RolloutCorrectionConfig


@pytest.fixture
def computation():
    with benchmarks("") as load:
        yield load("computation")


def test_host_reads_are_counted(computation):
    assert computation.host_reads(lambda: torch.ones(3).sum().item() + torch.ones(2).max().item()) == 2
    batch = computation.make_batch("4x16")
    ours = computation.contestants(batch, computation.CASES["token, two criteria"], verl=None)["ours"]
    assert computation.host_reads(ours) == 1  # its metrics, all at once


def test_batches_are_ragged(computation):
    train, rollout, mask = computation.make_batch("8x64")
    assert train.shape == rollout.shape == mask.shape == (8, 64)
    assert len(set(mask.sum(1).tolist())) > 3


@pytest.mark.slow
@pytest.mark.vllm
def test_step(tmp_path):
    output_of(
        sys.executable, "benchmarks/step.py", "--hidden", "64", "--layers", "1", "--completion_length", "8", "--rounds", "1",
        "--steps", "1", "--output", str(tmp_path / "out.json"),
    )  # fmt: skip
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(rows) == 14
    assert all(row["step_s"] > row["training_s"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.vllm
def test_memory(tmp_path):
    output = str(tmp_path / "out.json")
    output_of(sys.executable, "benchmarks/memory.py", "--completion_length", "16", "--rounds", "1", "--output", output)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [bool(row["looks"]) for row in rows] == ["TRL" not in row["arm"] for row in rows]
    assert all(row["training_mib"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.vllm
def test_gpu(tmp_path):
    output_of(sys.executable, "benchmarks/gpu.py", "--smoke", "--output_dir", str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    rows = {part["section"]: part["rows"] for part in results["parts"]}
    assert {row["trainer"] for row in rows["gap"]} == {"fp32 weights, bf16 autocast", "bf16", "fp32"}
    assert all(0 < row["k3"] < 0.01 for row in rows["gap"])
    assert [row["ratio"] for row in rows["cost"] if row["correction"] == "no correction"] == [1.0]
    assert rows["training"][0]["last"] > 0
    assert 0 < rows["step"][0]["push"] < rows["step"][0]["step"]
    assert rows["generation"][0]["speed"] > 0
    assert str(tmp_path) not in (tmp_path / "results.md").read_text()


# Exact gradients -------------------------------------------------------------------------------------------------------


@pytest.fixture
def exact():
    """Modules of the benchmark, and a problem of 4 tokens out of 3 with a sampler that rounds."""
    with benchmarks("exact") as load:
        errors, policies = load("errors"), load("policies")
        problem = policies.make_problem(length=4, size=3, seed=0)
        yield errors, policies, problem, policies.rounding(problem, 0.3, seed=0)


def test_the_true_gradient_is_that_of_the_expected_reward(exact):
    _, policies, problem, _ = exact
    logits = problem.logits.clone().requires_grad_()
    chances = policies.probabilities(problem, logits.log_softmax(-1))
    (chances * problem.rewards).sum().backward()
    torch.testing.assert_close(policies.true_gradient(problem), logits.grad)


def test_bias_and_alignment_are_what_samples_show(exact):
    errors, policies, problem, table = exact
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=1.5)
    mass = policies.probabilities(problem, table)
    advantages = problem.rewards - (mass * problem.rewards).sum()
    logits = problem.logits.clone().requires_grad_()
    d = problem.logps(problem.logits.log_softmax(-1)) - problem.logps(table)
    terms = d.exp().clamp(max=1.5) * advantages[:, None] * problem.logps(logits.log_softmax(-1))
    each = [torch.autograd.grad(row.sum(), logits, retain_graph=True)[0].flatten() for row in terms]
    expected = sum(p * gradient for p, gradient in zip(mass, each, strict=True))
    true = policies.true_gradient(problem).flatten()
    variance = sum(p * (gradient - expected).square().sum() for p, gradient in zip(mass, each, strict=True))
    length = (expected.square().sum() + variance / errors.BATCH).sqrt()  # of the gradient of a batch
    found = errors.error_of(problem, table, config)
    assert found.bias == pytest.approx(((expected - true).norm() / true.norm()).item(), rel=1e-5)
    assert found.alignment == pytest.approx((expected @ true / true.norm() / length).item(), rel=1e-5)


def test_claims_of_the_theory_hold(exact):
    errors, policies, problem, table = exact

    def bias(**fields):
        return errors.error_of(problem, table, RolloutCorrectionConfig(**fields)).bias

    exactly = {"rollout_is": "sequence", "rollout_is_threshold": float("inf")}
    assert bias(**exactly) < 1e-6 < 0.01 < bias(rollout_is="token", rollout_is_threshold=float("inf"))
    assert bias(rollout_is="token", rollout_is_threshold=float("inf")) < bias(rollout_correction="disabled")
    mass, d = policies.probabilities(problem, table), errors.log_ratio(problem, table)
    assert (mass @ d.exp()).tolist() == pytest.approx([1.0] * 4)  # raw token ratios
    assert mass @ d.sum(1).exp() == pytest.approx(1.0)
    assert mass @ d.mean(1).exp() < 1
    near = policies.rounding(problem, 0.05, seed=0)
    s, ratio = errors.spread_of_the_gap(problem, near), errors.log_ratio(problem, near).sum(1).exp()
    assert policies.probabilities(problem, near) @ (ratio - 1).square() == pytest.approx(4 * s**2, rel=0.5)


@pytest.mark.slow
def test_exact(tmp_path):
    script = ROOT / "benchmarks/exact/run.py"
    output = output_of(sys.executable, str(script), "--seeds", "1", "--lengths", "2", "--output", str(tmp_path))
    assert "| decoupled_token_is | 0.0" in output
    for row in json.loads((tmp_path / "results.json").read_text()):
        if row["s_from"] < 0.1:
            assert row["alignment"]["decoupled_token_is"] >= row["alignment"]["disabled"] - 1e-3
