"""`rollout_compile`: one graph, and the same numbers."""

import pytest
import torch

from tests.tiny import StaleSampler
from tests.training import build, losses
from trl_rollout_corr import (
    RolloutCorrectedGRPOConfig,
    RolloutCorrectedGRPOTrainer,
    RolloutCorrectionConfig,
    compute_rollout_correction,
    correction,
)
from trl_rollout_corr.analysis.settings import config_of_run, read_config
from trl_rollout_corr.criteria import CRITERIA, TOKEN_ONLY


CASES = {
    "token": {},
    "pair": {"rollout_is_threshold": [0.5, 2.0]},
    "normalised": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "criteria": {"rollout_rs": list(CRITERIA), "rollout_rs_threshold": 1.5, "rollout_nan_policy": "neutralize"},
}
PROBABILITY = tuple(f"token_{divergence}" for divergence in TOKEN_ONLY)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")  # which `conftest.py` sets
    torch.compiler.reset()
    correction._compiled.cache_clear()
    yield
    torch.compiler.reset()
    correction._compiled.cache_clear()


def batch(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(rows)
    rollout = -3 * torch.rand(rows, length, generator=dice)
    train = rollout + 0.3 * torch.randn(rows, length, generator=dice)
    rollout[0, 1] = torch.nan
    return train, rollout, torch.arange(length) < torch.randint(2, length + 1, (rows, 1), generator=dice)


def assert_same(case: dict, shapes: list[tuple[int, int]]):
    for rows, length in shapes:
        inputs, advantages = batch(rows, length), torch.linspace(-1, 1, rows)
        eager, compiled = (
            compute_rollout_correction(
                *inputs, RolloutCorrectionConfig(rollout_compile=choice, **case), advantages=advantages
            )
            for choice in (False, True)
        )
        assert torch.equal(compiled.keep, eager.keep)
        torch.testing.assert_close(compiled.coefficients, eager.coefficients, rtol=1e-6, atol=1e-6)
        found, expected = compiled.metrics(), eager.metrics()
        # the sampler's probability of a token that is nearly certain is a small difference, rounded in another order
        of_probabilities = {key for key in found if key.split("rollout_rs_")[-1].startswith(PROBABILITY)}
        for keys, tolerance in ((found.keys() - of_probabilities, 1e-5), (of_probabilities, 1e-2)):
            expected_of_keys = {key: expected[key] for key in keys}
            assert {key: found[key] for key in keys} == pytest.approx(expected_of_keys, rel=tolerance, abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_it_is_one_graph_for_batches_of_any_shape(case, monkeypatch):
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=backend, **options))
    assert_same(CASES[case], [(3, 7), (5, 9), (4, 20)])
    assert len(graphs) == 1


def test_many_changes_of_settings_do_not_end_a_run(monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend="eager", **options))
    for name in CRITERIA:  # more than the compiler follows
        assert_same({"rollout_rs": name, "rollout_rs_threshold": 1.5}, [(3, 7)])


def test_a_compiler_that_does_not_work_is_named_with_the_field(monkeypatch):
    def broken(module, inputs):
        raise RuntimeError("no compiler here")

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=broken, **options))
    with pytest.raises(RuntimeError, match=r"`rollout_compile` is True, but .* no compiler here.* set it to False"):
        assert_same({}, [(3, 7)])


def test_a_dump_is_read_without_a_compiler(tmp_path):
    assert not config_of_run({"rollout_compile": True}, "").rollout_compile
    (tmp_path / "run.yaml").write_text("rollout_compile: true\n")
    assert not read_config(str(tmp_path / "run.yaml")).rollout_compile


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_compiler_makes_the_same_numbers(case):
    assert_same(CASES[case], [(3, 7), (8, 300)])


@pytest.mark.slow
def test_a_trainer_takes_the_same_steps(tiny_model_path, tmp_path):
    found = []
    for choice in (False, True):
        options = {"rollout_correction": "decoupled_token_is", "rollout_compile": choice}
        trainer = build(
            RolloutCorrectedGRPOTrainer,
            RolloutCorrectedGRPOConfig,
            tiny_model_path,
            tmp_path,
            sampler=StaleSampler(tiny_model_path),
            max_steps=3,
            **options,
        )
        found.append(losses(trainer))
    assert found[1] == [pytest.approx(step, rel=1e-3, abs=1e-5) for step in found[0]]
