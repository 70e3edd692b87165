"""The benchmarks run, and measure what they say."""

import json
import re
import sys

import pytest
import torch

from tests.launching import ROOT, benchmarks, output_of
from tests.tiny import StaleSampler
from tests.training import TRAINERS, build
from trl_rollout_corr import RolloutCorrectionConfig


@pytest.fixture
def computation():
    with benchmarks("") as load:
        yield load("computation")


def test_memory_is_that_of_the_largest_moment(computation):
    def three_alive():
        a = torch.zeros(64, 64)
        b = a + 1
        del a
        c = b.view(-1) * 2  # `a` is gone, and a view is no tensor of its own
        return [x.exp() for x in (b, c)][:1]

    assert computation.peak_tensors(three_alive, (64, 64), "cpu") == 4  # b, c, and an exponential of each


def test_host_reads_are_counted(computation):
    assert computation.host_reads(lambda: torch.ones(3).sum().item() + torch.ones(2).max().item()) == 2
    batch = computation.make_batch("4x16", "cpu")
    ours = computation.contestants(batch, computation.CASES["token, two criteria"], verl=None)["ours"]
    assert computation.host_reads(ours) == 0


def test_batches_are_ragged(computation):
    train, rollout, mask = computation.make_batch("8x64", "cpu")
    assert train.shape == rollout.shape == mask.shape == (8, 64)
    assert len(set(mask.sum(1).tolist())) > 3


@pytest.mark.slow
def test_gather(tmp_path):
    output = output_of(
        sys.executable,
        "benchmarks/gather.py",
        "--ranks",
        "1",
        "2",
        "--rounds",
        "2",
        "--output",
        str(tmp_path / "out.json"),
    )
    assert re.search(r"\| weights, three criteria \| 512 \| \d+\.\d+ \|", output)
    results = json.loads((tmp_path / "out.json").read_text())
    assert {row["ranks"] for row in results["rows"]} == {1, 2}
    assert {row["ranks"] for row in results["on_paper"]} == {8, 64, 512}


def test_a_log_sends_what_the_benchmark_says(tiny_model_path, tmp_path):
    sampler = StaleSampler(tiny_model_path)
    settings = {"rollout_correction": "decoupled_token_is", "max_steps": 1}
    trainer = build(*TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=sampler, **settings)
    sent, gather = [], trainer.accelerator.gather

    def counting(tensor):
        sent.append(tensor.numel())
        return gather(tensor)

    trainer.accelerator.gather = counting
    trainer.train()
    with benchmarks("") as load:
        module = load("gather")
        parts = module.sums_of_a_batch(module.CONFIGS["token weights"], seed=0)
    assert max(sent) == sum(part.vector.numel() for part in parts)


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
def test_headline(tmp_path):
    output = output_of(
        sys.executable, "benchmarks/headline/run.py", "--arms", "none", "random_rs", "trl_default", "--seeds", "0",
        "--steps", "2", "--workers", "1", "--output_dir", str(tmp_path),
    )  # fmt: skip
    assert "3 of 3 runs to do" in output
    assert len(list((tmp_path / "runs").glob("*.json"))) == 3
    assert (tmp_path / "headline.png").stat().st_size > 10_000
    again = output_of(
        sys.executable, "benchmarks/headline/run.py", "--arms", "none", "random_rs", "trl_default", "--seeds", "0",
        "--steps", "2", "--workers", "1", "--output_dir", str(tmp_path),
    )  # fmt: skip
    assert "0 of 3 runs to do" in again


@pytest.mark.slow
@pytest.mark.vllm
def test_asynchronous(tmp_path):
    output = output_of(
        sys.executable, "benchmarks/asynchronous/run.py", "--smoke", "--accuracy", "0", "--output_dir", str(tmp_path)
    )
    rows = [line.split("|")[1:-1] for line in output.splitlines() if line.startswith("| ")][2:]
    assert [row[0].strip() for row in rows] == ["synchronous", "auto_8"]
    assert all(row[2].strip() == "0" for row in rows)  # any accuracy will do, so that it is there at the start
    assert all(float(row[4]) > 0 for row in rows)
    assert float(rows[1][6]) > 0  # it is behind


@pytest.fixture
def report():
    with benchmarks("asynchronous") as load:
        yield load("report")


def test_the_time_to_an_accuracy_is_that_of_the_first_look_at_it(tmp_path, report):
    for seed, slowness in enumerate((1.0, 3.0, 2.0)):
        record = {
            "settings": {},
            "steps": [0, 10, 20, 30],
            "seconds_at": [0.0, 10 * slowness, 20 * slowness, 30 * slowness],
            "accuracy": [0.4, 0.7, 0.5, 0.8 - 0.1 * seed],
            "history": [{"rollout_corr/staleness_mean": 4.0}],
        }
        (tmp_path / f"auto_8-{seed}.json").write_text(json.dumps(record))
    runs = report.load(tmp_path, ["synchronous", "auto_8"])
    row = "| auto_8 | 3 | 20 | 10 | 2.00 | 0.70 | 0.60 | 4.00 | 0.00 |"
    assert report.table(runs, 0.6).splitlines()[-1] == row
    assert "not by all" in report.table(runs, 0.8)
    report.write(runs, 0.6, tmp_path)
    assert (tmp_path / "time.png").stat().st_size > 10_000


def test_what_is_published_of_asynchronous_training_is_what_was_measured(report):
    folder = ROOT / "benchmarks/asynchronous"
    results = json.loads((folder / "results.json").read_text())
    assert report.table(results["runs"], results["target"]) in (folder / "README.md").read_text()
    assert all(len(records) == 3 for records in results["runs"].values())


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


def test_bias_and_spread_are_what_samples_show(exact):
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
    spread = sum(p * (gradient - expected).square().sum() for p, gradient in zip(mass, each, strict=True)).sqrt()
    found = errors.error_of(problem, table, config)
    assert found.bias == pytest.approx(((expected - true).norm() / true.norm()).item(), rel=1e-5)
    assert found.spread == pytest.approx((spread / true.norm()).item(), rel=1e-5)


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
    s, ratio = errors.gap(problem, near).s, errors.log_ratio(problem, near).sum(1).exp()
    assert policies.probabilities(problem, near) @ (ratio - 1).square() == pytest.approx(4 * s**2, rel=0.5)


@pytest.mark.slow
def test_exact(tmp_path):
    script = ROOT / "benchmarks/exact/run.py"
    output = output_of(sys.executable, str(script), "--seeds", "1", "--lengths", "2", "--output", str(tmp_path))
    assert "| 2 | 0.1 to 0.3 |" in output
    assert (tmp_path / "exact.png").stat().st_size > 10_000
    for row in json.loads((tmp_path / "results.json").read_text()):
        if row["s_from"] < 0.1:
            assert row["alignment"]["decoupled_token_is"] >= row["alignment"]["disabled"] - 1e-3


# The arena ------------------------------------------------------------------------------------------------------------


def test_the_monitor_is_applied_to_runs_that_are_there(tmp_path):
    steps = [float(step) for step in range(1, 31)]
    history = {"step": steps, "rollout_corr/k3_kl": [0.1] * 30, "rollout_corr/kl": [0.1] * 30}
    record = {
        "arm": "none",
        "settings": {"task": "sort", "options": {"rollout_correction": "disabled"}},
        "steps": [0, 10, 20, 30],
        "accuracy": [0.5, 0.5, 0.3, 0.2],
        "history": history,
    }
    (tmp_path / "grpo-sort-lag_8-slow-none-0.json").write_text(json.dumps(record))
    printed = output_of(
        sys.executable, "benchmarks/monitor/arena.py", "--runs", str(tmp_path), "--stage", "second_tuning"
    )
    (line,) = (line for line in printed.splitlines() if "`grpo-sort-lag_8-slow-none-0`" in line)
    assert line.endswith("falls at 20 | 3 | 3 `k3_high` | - | before, 17 steps |")
