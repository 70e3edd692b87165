"""`rollout_compile`: one graph, and the same numbers."""

import pytest
import torch

from tests.reference import threshold_of
from tests.tiny import StaleSampler
from tests.training import build, losses
from trl_rollout_corr import (
    RolloutCorrectedGRPOConfig,
    RolloutCorrectedGRPOTrainer,
    RolloutCorrectionConfig,
    compute_rollout_correction,
)
from trl_rollout_corr.correction import compiling
from trl_rollout_corr.correction.accounting import account, turns_of
from trl_rollout_corr.settings.criteria import CRITERIA, TOKEN_ONLY
from trl_rollout_corr.settings.files import config_of_run, read_config
from trl_rollout_corr.settings.keys import PREFIX


CASES = {
    "token": {},
    "pair": {"rollout_is_threshold": [0.5, 2.0]},
    "normalised": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "criteria": {
        "rollout_rs": list(CRITERIA),
        "rollout_rs_threshold": [threshold_of(name, 1.5) for name in CRITERIA],
        "rollout_nan_policy": "neutralize",
    },
}
PROBABILITY = tuple(f"token_{divergence}" for divergence in TOKEN_ONLY)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")  # which `conftest.py` sets
    compiling.forget()
    yield
    compiling.forget()


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


@pytest.fixture
def graphs(monkeypatch) -> list[torch.fx.GraphModule]:
    """The graphs that are made, which are then run as they are."""
    found = []

    def backend(module, inputs):
        found.append(module)
        return module

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=backend, **options))
    return found


@pytest.mark.parametrize("case", CASES)
def test_it_is_one_graph_for_batches_of_any_shape(case, graphs):
    assert_same(CASES[case], [(3, 7), (5, 9), (4, 20)])
    assert len(graphs) == 1


def assert_digits_are_kept():
    """A divergence of 5e-9, in which `exp(d) - 1` of float32 would leave nothing."""
    train = -3 * torch.rand(8, 300, generator=torch.Generator().manual_seed(0))
    inputs = train, train + 1e-4, torch.ones(8, 300)
    eager, compiled = (
        compute_rollout_correction(*inputs, RolloutCorrectionConfig(rollout_compile=choice)).metrics()
        for choice in (False, True)
    )
    for key in ("k3_kl", "chi2_token", "chi2_seq"):
        assert compiled[PREFIX + key] == pytest.approx(eager[PREFIX + key], rel=1e-2)


def test_a_small_divergence_keeps_its_digits(graphs):
    assert_digits_are_kept()
    assert graphs


@pytest.mark.parametrize("x", [-60.0, -1.0, -0.5, -0.4999, -1e-3, 0.0, 1e-20, 1e-6, 0.3, 0.4999, 0.5, 2.0, 60.0])
def test_the_series_is_exact_to_rounding(x, graphs):
    for dtype, digits in ((torch.float32, 4e-7), (torch.float64, 1e-10)):
        found = torch.compile(compiling.expm1)(torch.tensor(x, dtype=dtype))
        assert found.item() == pytest.approx(torch.expm1(torch.tensor(x, dtype=dtype)).item(), rel=digits)


def assert_same_accounts(shapes: list[tuple[int, int]]):
    for rows, length in shapes:
        mask = batch(rows, length)[2]
        keep = mask & (torch.arange(length) % 3 > 0)
        dice = torch.Generator().manual_seed(length)
        advantages, rewards = torch.randn(2, rows, generator=dice)
        arguments = mask, keep, 0.7 * keep, advantages, rewards, turns_of(torch.arange(length).expand(rows, -1) % 4)
        eager, compiled = (account(*arguments, compile=choice) for choice in (False, True))
        torch.testing.assert_close(compiled.vector, eager.vector, rtol=1e-6, atol=1e-5)


def test_accounting_is_one_graph(graphs):
    assert_same_accounts([(3, 7), (5, 9), (4, 20)])
    assert len(graphs) == 1


def test_many_changes_of_settings_do_not_end_a_run(monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend="eager", **options))
    for name in CRITERIA:  # more than the compiler follows
        assert_same({"rollout_rs": name, "rollout_rs_threshold": threshold_of(name, 1.5)}, [(3, 7)])


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
def test_the_compiler_keeps_digits_and_accounts():
    assert_digits_are_kept()
    assert_same_accounts([(3, 7), (8, 300)])


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
