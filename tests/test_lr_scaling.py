"""`rollout_lr_scaling`: the size of the step from the effective sample size of its completions."""

import math

import pytest
import torch
from transformers import TrainerCallback
from transformers.optimization import Adafactor, AdafactorSchedule

from tests.asynchronous import WorkerHere, build_ours
from tests.launching import HAS_ASYNCHRONOUS
from tests.reference import sequence_ess
from tests.tiny import StaleSampler
from tests.training import (
    SCHEDULES,
    TRAINERS,
    VLLM,
    assert_same_steps,
    build,
    evaluation,
    freeze_sampler,
    logged,
    losses,
)
from trl_rollout_corr.correction import compute
from trl_rollout_corr.correction.functional import select_tokens
from trl_rollout_corr.correction.step_size import ess_sqrt, ratio_sums
from trl_rollout_corr.trainers import core
from trl_rollout_corr.trainers.batch import ROLLOUT_LOGPS


ESS = {"rollout_lr_scaling": "ess_sqrt"}


def inputs(rows=6, tokens=5, spread=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    train = -torch.rand(rows, tokens, generator=generator) - 0.1
    rollout = train + spread * torch.randn(rows, tokens, generator=generator)
    mask = torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    return train, rollout, mask


def sums(train, rollout, mask, **options):
    tokens = select_tokens(train, rollout, mask, **options)
    return ratio_sums(tokens.log_ratio, tokens.valid)


def scale(train, rollout, mask, **options):
    return ess_sqrt(sums(train, rollout, mask, **options)).item()


# The formula ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.3, 2.0])
def test_it_is_the_root_of_the_effective_sample_size_per_completion(spread):
    train, rollout, mask = inputs(spread=spread)
    expected = math.sqrt(sequence_ess(train, rollout, mask) / len(mask))
    assert scale(train, rollout, mask) == pytest.approx(expected, rel=1e-5)
    assert 1 / math.sqrt(len(mask)) <= expected <= 1 + 1e-9


def test_equal_policies_take_a_whole_step():
    train, _, mask = inputs()
    assert scale(train, train, mask) == 1.0


def test_one_completion_that_outweighs_all_others_counts_as_one():
    train, rollout, mask = inputs(spread=0.0)
    rollout[2] -= 30.0
    assert scale(train, rollout, mask) == pytest.approx(math.sqrt(1 / 6), rel=1e-6)


def test_a_common_factor_does_not_matter_also_where_it_is_tiny():
    train, rollout, mask = inputs(spread=0.5)
    mask[:] = True
    assert scale(train, rollout + 6.0, mask) == pytest.approx(scale(train, rollout, mask), rel=1e-4)


def test_longer_completions_take_smaller_steps():
    found = [scale(*inputs(rows=512, tokens=n, spread=0.1)[:2], torch.ones(512, n)) for n in (4, 16, 64, 256)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.95
    assert found[-1] < 0.5


def test_sums_of_parts_add_up():
    train, rollout, mask = inputs(rows=8)
    parts = [sums(train[i], rollout[i], mask[i]) for i in (slice(0, 3), slice(3, 4), slice(4, 8))]
    assert torch.allclose(sum(parts), sums(train, rollout, mask), rtol=1e-12)


def test_tokens_and_completions_that_do_not_count():
    train, rollout, mask = inputs()
    expected = scale(train[:4], rollout[:4], mask[:4])
    mask[4:] = False
    train[4], rollout[5] = torch.nan, torch.inf
    rollout[~mask] = torch.nan
    assert scale(train, rollout, mask) == pytest.approx(expected, rel=1e-6)
    assert scale(train, rollout, torch.zeros_like(mask)) == 1.0  # nothing to learn from


def test_broken_tokens_are_left_out_or_taken_as_equal():
    train, rollout, _ = inputs()
    mask = torch.ones_like(train)
    rollout[0, 0] = torch.nan
    rest = mask.clone()
    rest[0, 0] = 0
    assert scale(train, rollout, mask) == pytest.approx(scale(train, rollout, rest), rel=1e-6)
    rollout[1] = torch.nan  # a completion without a token that counts, or with a ratio of 1
    equal = rollout.where(rollout.isfinite(), train)
    assert scale(train, rollout, mask) == pytest.approx(scale(*(x[[0, 2, 3, 4, 5]] for x in (train, rollout, mask))))
    assert scale(train, rollout, mask, neutralize=True) == pytest.approx(scale(train, equal, mask), rel=1e-6)


# In training ----------------------------------------------------------------------------------------------------------


class Rates(TrainerCallback):
    """Learning rates of the optimizer step, the scheduler and the checkpoint. Added last, so that it comes after ours."""

    def __init__(self):
        self.used, self.left = [], []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.used.append([float(group["lr"]) for group in optimizer.param_groups])

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.left.append([group["lr"] for group in optimizer.param_groups])


def watch(trainer):
    trainer.rates = Rates()
    trainer.add_callback(trainer.rates)
    return trainer


@pytest.fixture
def make(tiny_model_path, tmp_path):
    def make(folder="run", **fields):
        sampler = StaleSampler(tiny_model_path, noise=0.3)
        return watch(build(*TRAINERS["grpo"], tiny_model_path, tmp_path / folder, sampler=sampler, **fields))

    return make


def recorded(trainer):
    """Everything that is counted for a step, by step."""
    steps, weigh = {}, trainer._weigh_step

    def record(current, batch, *seen):
        tensors = current, batch[ROLLOUT_LOGPS], trainer._loss_mask(batch)
        steps.setdefault(trainer.state.global_step, []).append([x.detach().clone() for x in tensors])
        weigh(current, batch, *seen)

    trainer._weigh_step = record
    return steps


def expected_scale(micro_batches):
    """By loops, of all completions of a step."""
    ess, n = 0.0, sum(len(mask) for *_, mask in micro_batches)
    width = max(mask.shape[1] for *_, mask in micro_batches)
    pad = [[torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in tensors] for tensors in micro_batches]
    ess = sequence_ess(*(torch.cat(parts) for parts in zip(*pad, strict=True)))
    return math.sqrt(ess / n)


def weights_of(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_step_is_scaled_by_all_its_completions(make, schedule):
    trainer = make(schedule=schedule, max_steps=4, lr_scheduler_type="linear", **ESS)
    steps = recorded(trainer)
    trainer.train()
    scales = [expected_scale(steps[step]) for step in range(4)]
    assert all(scale < 0.99 for scale in scales)
    assert [len(steps[step]) for step in range(4)] == [trainer.args.gradient_accumulation_steps] * 4
    nominal = [3e-4 * (4 - step) / 4 for step in range(4)]
    assert [rates[0] for rates in trainer.rates.used] == pytest.approx(
        [rate * scale for rate, scale in zip(nominal, scales, strict=True)], rel=1e-5
    )
    assert [rates[0] for rates in trainer.rates.left] == pytest.approx(nominal)
    assert all(type(rate) is float for rates in trainer.rates.left for rate in rates)
    assert [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry] == nominal
    assert logged(trainer, "lr_scale")[:1] == pytest.approx(scales[:1], rel=1e-5)


def test_a_log_is_of_the_steps_of_its_window(make):
    trainer = make(max_steps=4, logging_steps=2, **ESS)
    steps = recorded(trainer)
    trainer.train()
    scales = [expected_scale(steps[step]) for step in range(4)]
    assert logged(trainer, "lr_scale") == pytest.approx(
        [(scales[0] + scales[1]) / 2, (scales[2] + scales[3]) / 2], rel=1e-5
    )


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_the_model_moves_so_much_less(make, optim):
    fields = {"optim": optim, "max_steps": 1, "max_grad_norm": 0.0, "learning_rate": 1e-2}
    plain, scaled = make("plain", **fields), make("scaled", **fields, **ESS)
    before = weights_of(plain)
    plain.train()
    scaled.train()
    (scale,) = logged(scaled, "lr_scale")
    assert scale < 0.95
    moved = weights_of(plain) - before
    assert torch.allclose(weights_of(scaled) - before, moved * scale, rtol=1e-2, atol=float(moved.abs().max()) * 1e-4)


def test_a_run_that_is_resumed_goes_on_as_it_would_have(make):
    fields = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear", **ESS}
    whole = make("whole", **fields)
    whole.train()
    resumed = make("resumed", **fields)
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-2")
    for found, expected in zip(resumed.rates.used, whole.rates.used[2:], strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    assert torch.allclose(weights_of(resumed), weights_of(whole), atol=1e-6)


def test_evaluations_do_not_count(make):
    plain, evaluated = make("plain", **ESS), make("evaluated", **evaluation(), **ESS)
    plain.train()
    evaluated.train()
    for found, expected in zip(evaluated.rates.used, plain.rates.used, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    assert "eval_rollout_corr/lr_scale" not in set().union(*evaluated.state.log_history)


def test_it_needs_no_correction(make):
    trainer = make(rollout_correction="disabled", **ESS)
    trainer.train()
    assert all(used[0] < 0.95 * left[0] for used, left in zip(trainer.rates.used, trainer.rates.left, strict=True))


@pytest.mark.filterwarnings("ignore:`rollout_lr_scaling` is set")
def test_measured_only_it_is_reported_and_the_step_left_alone(make):
    measured = make("measured", rollout_metrics_only=True, **ESS)
    plain = make("plain", rollout_metrics_only=True)
    assert_same_steps(losses(measured), losses(plain))
    assert torch.allclose(weights_of(measured), weights_of(plain), atol=1e-6)
    assert all(scale < 0.95 for scale in logged(measured, "lr_scale"))
    assert not logged(plain, "lr_scale")


def test_a_step_that_fails_leaves_the_learning_rate_as_it_was(make):
    trainer = make(lr_scheduler_type="constant", **ESS)
    trainer.add_callback(FailsOnce())
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] < 3e-4
    trainer.train()
    assert trainer.rates.left == [[3e-4, 3e-4]] * 3


class FailsOnce(TrainerCallback):
    def __init__(self):
        self.failed = False

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if not self.failed:
            self.failed = True
            raise RuntimeError("out of memory")


@pytest.mark.vllm
def test_rloo(tiny_model_path, tmp_path, shared_engine):
    trainer = watch(build(*TRAINERS["rloo"], tiny_model_path, tmp_path, **VLLM, **ESS))
    freeze_sampler(trainer, 0.3)
    steps = recorded(trainer)
    trainer.train()
    scales = [expected_scale(steps[step]) for step in range(3)]
    assert logged(trainer, "lr_scale") == pytest.approx(scales, rel=1e-5)
    assert [rates[0] for rates in trainer.rates.used] == pytest.approx(
        [left[0] * scale for left, scale in zip(trainer.rates.left, scales, strict=True)], rel=1e-5
    )
    assert min(scales) < 0.99


@pytest.mark.skipif(not HAS_ASYNCHRONOUS, reason="the asynchronous trainer is that of TRL 1.16")
def test_asynchronous(tiny_model_path, tmp_path):
    trainer = watch(build_ours(tiny_model_path, tmp_path, WorkerHere(tiny_model_path), logging_steps=1, **ESS))
    steps = recorded(trainer)
    trainer.train()
    scales = [expected_scale(steps[step]) for step in sorted(steps)]
    assert logged(trainer, "lr_scale") == pytest.approx(scales, rel=1e-5)
    assert [rates[0] for rates in trainer.rates.used] == pytest.approx(
        [left[0] * scale for left, scale in zip(trainer.rates.left, scales, strict=True)], rel=1e-5
    )
    assert min(scales) < 0.99


@pytest.mark.parametrize("preset", ["bypass_ppo_clip", "decoupled_token_is"])
def test_tokens_are_selected_once_per_micro_batch(make, monkeypatch, preset):
    selected, corrected = [], []

    def counted(*args, **kwargs):
        selected.append(args)
        return select_tokens(*args, **kwargs)

    for module in (compute, core):
        monkeypatch.setattr(module, "select_tokens", counted)
    trainer = make(max_steps=2, rollout_correction=preset, rollout_nan_policy="raise", **ESS)
    correct = trainer._correct
    trainer._correct = lambda *args: corrected.append(args) or correct(*args)
    trainer.train()
    assert len(selected) == len(corrected) > 2


# What cannot be scaled ------------------------------------------------------------------------------------------------


def test_an_optimizer_that_steps_on_its_own_is_refused(make):
    with pytest.raises(ValueError, match=r"`rollout_lr_scaling` is set, but `optim` is 'galore_adamw_layerwise'"):
        make(optim="galore_adamw_layerwise", optim_target_modules=["q_proj"], **ESS)


def test_an_optimizer_that_ignores_its_learning_rate_is_refused(make):
    trainer = make(**ESS)
    trainer.optimizer = Adafactor(trainer.model.parameters(), lr=None, relative_step=True)
    trainer.lr_scheduler = AdafactorSchedule(trainer.optimizer)
    with pytest.raises(
        ValueError,
        match=r"chooses its own learning rate. Give it a learning rate, or set `rollout_lr_scaling` to None",
    ):
        trainer.train()
