"""What rounding alone does: how it is measured, which bounds it widens, and what a sampler cannot make it do."""

import math

import numpy as np
import pytest
import torch

from tests.tiny import StaleSampler
from tests.training import TRAINERS, VLLM, build, freeze_sampler, logged, losses
from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.correction.rounding import Rounding, count_sizes, measure_rounding, quantile
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.trainers.rounding_notice import RoundingNotice


def policies(spread, shape=(64, 40), seed=0):
    """Log-probabilities of trainer and sampler, of which a tenth of the tokens are ten times as far apart."""
    dice = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(shape, generator=dice).mul(4)
    far = torch.rand(shape, generator=dice) < 0.1
    noise = spread * torch.randn(shape, generator=dice) * torch.where(far, 10.0, 1.0)
    return (rollout + noise).clamp(max=0.0), rollout


def alone(tensor):
    return tensor


@pytest.mark.parametrize("spread", [1e-4, 1e-3, 0.05])
def test_a_quantile_of_the_histogram_is_that_of_the_sizes(spread):
    train, rollout = policies(spread)
    mask, fresh = torch.ones_like(train), torch.ones(len(train), dtype=torch.bool)
    of_probability, of_log_ratio = map(quantile, measure_rounding(train, rollout, mask, fresh))
    torch.testing.assert_close(of_log_ratio.item(), (train - rollout).abs().quantile(0.99).item(), rtol=0.06, atol=0)
    exact = (train.exp() - rollout.exp()).abs().quantile(0.99).item()
    torch.testing.assert_close(of_probability.item(), exact, rtol=0.06, atol=0)


def test_nothing_seen_is_unknown_and_no_difference_is_exactly_0():
    sizes = torch.zeros(4, 4)
    assert quantile(count_sizes(sizes, torch.zeros(4, 4))).isnan()
    assert quantile(count_sizes(sizes, torch.ones(4, 4))) == 0.0
    assert Rounding().used.tolist() == [0.0, 0.0]


def test_only_fresh_completions_and_tokens_of_the_loss_count():
    train, rollout = policies(0.01)
    fresh = torch.arange(len(train)) % 2 == 0
    train[~fresh] = rollout[~fresh] - 3.0  # old weights
    mask = torch.ones_like(train)
    mask[:, 20:] = 0
    train[:, 20:] = math.nan  # padding
    found = quantile(measure_rounding(train, rollout, mask, fresh)[1])
    exact = (train - rollout)[fresh][:, :20].abs().quantile(0.99)
    torch.testing.assert_close(found.item(), exact.item(), rtol=0.06, atol=0)


def counts(spread, seed=0):
    train, rollout = policies(spread, seed=seed)
    return measure_rounding(train, rollout, torch.ones_like(train), torch.ones(len(train), dtype=torch.bool))


def test_the_split_over_micro_batches_and_ranks_changes_nothing():
    whole, parts, elsewhere = Rounding(), Rounding(), counts(0.05, seed=1)
    whole.add(counts(0.01) + elsewhere)
    whole.settle(alone)
    parts.add(counts(0.01))
    parts.settle(lambda mine: mine + elsewhere)
    torch.testing.assert_close(whole.value, parts.value)


def test_the_first_step_uses_what_it_has_seen_and_later_ones_forget_its_order():
    parts, whole = Rounding(), Rounding()
    parts.add(counts(0.01))
    assert not parts.is_settled
    parts.preview(alone)
    torch.testing.assert_close(parts.value, torch.stack([quantile(x) for x in counts(0.01)]))
    parts.add(counts(0.05, seed=1))
    parts.preview(alone)
    whole.add(counts(0.01) + counts(0.05, seed=1))
    for rounding in (parts, whole):
        rounding.settle(alone)
        assert rounding.is_settled
    torch.testing.assert_close(parts.value, whole.value)


def test_it_follows_what_rounding_becomes_but_not_without_limit():
    """The weights of a sampler to which no push arrives drift away, although it announces that they are the newest."""
    rounding = Rounding()
    rounding.add(counts(0.01))
    rounding.settle(alone)
    first = rounding.value.clone()
    rounding.add(counts(0.02))
    rounding.settle(alone)
    assert (first < rounding.value).all()
    assert (rounding.value < 1.3 * first).all()
    for _ in range(100):
        rounding.add(counts(1.0))
        rounding.settle(alone)
    torch.testing.assert_close(rounding.value[1], 4.0 * first[1])
    assert rounding.value[0] <= min(0.4, 4.0 * first[0])


def test_the_first_value_is_of_the_first_step_that_shows_any():
    """Such as a run whose first samples are of older weights."""
    rounding = Rounding()
    for sizes in (torch.zeros_like(counts(0.01)), counts(0.01)):
        rounding.add(sizes)
        rounding.settle(alone)
    first = torch.stack([quantile(x) for x in counts(0.01)])
    torch.testing.assert_close(rounding.value, first)
    for _ in range(100):
        rounding.add(counts(1.0))
        rounding.settle(alone)
    torch.testing.assert_close(rounding.value[1], 4.0 * first[1])


def test_a_step_counts_what_was_added_since_the_last_one():
    rounding = Rounding()
    rounding.add(counts(0.02))
    rounding.preview(alone)
    rounding.add(counts(0.01, seed=1))  # a preview of a part is no former value
    rounding.settle(alone)
    first = torch.stack([quantile(x) for x in counts(0.02) + counts(0.01, seed=1)])
    torch.testing.assert_close(rounding.value, first)
    rounding.add(counts(0.005, seed=2))
    rounding.settle(alone)
    now = torch.stack([quantile(x) for x in counts(0.005, seed=2)])
    torch.testing.assert_close(rounding.value, 0.9 * first + 0.1 * now)


def test_broken_tokens_are_no_rounding():
    """One token in twenty is a million times less likely for the trainer: its row of logits is broken."""
    train, rollout = policies(0.01)
    broken = torch.zeros_like(train, dtype=torch.bool)
    broken[:, ::20] = True
    train[broken] = rollout[broken] - math.log(1e6)
    found = quantile(measure_rounding(train, rollout, torch.ones_like(train), torch.ones(len(train)))[1])
    exact = (train - rollout)[~broken].abs().quantile(0.99)
    torch.testing.assert_close(found.item(), exact.item(), rtol=0.06, atol=0)


def test_rounding_moves_no_probability_further_than_its_limit():
    rollout = torch.full((8, 8), math.log(0.99))
    train = rollout - 3.0  # a probability of 0.05
    rounding = Rounding()
    rounding.add(measure_rounding(train, rollout, torch.ones(8, 8), torch.ones(8)))
    rounding.preview(alone)
    assert rounding.value[0] == 0.4
    torch.testing.assert_close(rounding.value[1].item(), 3.0, rtol=0.1, atol=0)  # a bin is a tenth wide


def test_no_fresh_completion_leaves_it_as_it_is():
    rounding = Rounding()
    rounding.add(counts(0.01))
    rounding.settle(alone)
    before = rounding.value.clone()
    rounding.add(torch.zeros(2, 151, dtype=torch.float64))
    rounding.settle(alone)
    assert rounding.value.equal(before)


def correct(train, rollout, advantages, rounding=None, **fields):
    config = RolloutCorrectionConfig(**{"rollout_correction": "auto", **fields})
    return compute_rollout_correction(
        train, rollout, torch.ones_like(train), config, advantages=advantages, rounding=rounding
    )


def test_without_rounding_nothing_changes():
    train, rollout = policies(0.3)
    advantages = torch.randn(len(train), generator=torch.Generator().manual_seed(1))
    found = correct(train, rollout, advantages, torch.zeros(2, dtype=torch.float64))
    off = correct(train, rollout, advantages, torch.ones(2, dtype=torch.float64), rollout_allow_rounding=False)
    assert found.coefficients.equal(off.coefficients)
    assert found.statistics.vector.equal(off.statistics.vector)


def test_auto_written_as_fields_has_the_same_bits():
    train, rollout = policies(0.3)
    advantages = torch.randn(len(train), generator=torch.Generator().manual_seed(1))
    rounding = torch.tensor([0.1, 0.3], dtype=torch.float64)
    settings = RolloutCorrectionConfig(rollout_correction="auto").settings
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_clamp", "rollout_rs", "rollout_rs_threshold")
    fields = {name: getattr(settings, name) for name in (*names, "rollout_allow_rounding")}
    named = correct(train, rollout, advantages, rounding)
    written = correct(train, rollout, advantages, rounding, rollout_correction=None, **fields)
    assert named.coefficients.equal(written.coefficients)
    assert not named.coefficients.equal(correct(train, rollout, advantages).coefficients)


@pytest.mark.parametrize(("q", "p", "sign", "keep"), [
    (0.5, 0.75, 1.0, True), (0.5, 0.85, 1.0, False), (0.5, 0.25, -1.0, True), (0.5, 0.15, -1.0, False),
    (0.5, 0.15, 1.0, True), (0.5, 0.85, -1.0, True),
])  # fmt: skip
def test_the_region_begins_beyond_rounding(q, p, sign, keep):
    rounding = torch.tensor([0.1, 0.0], dtype=torch.float64)  # the region ends at 0.3
    found = correct(torch.tensor([[p]]).log(), torch.tensor([[q]]).log(), torch.tensor([sign]), rounding)
    assert found.keep.item() is keep


@pytest.mark.parametrize(("d", "weight"), [(0.0, 1.0), (0.2, 0.2), (-0.2, -0.2), (0.9, 0.5), (-0.9, -0.5)])
def test_good_tokens_are_weighted_as_far_as_rounding_explains(d, weight):
    rounding = torch.tensor([1.0, 0.5], dtype=torch.float64)
    rollout = torch.tensor([[-2.0]])
    found = correct(rollout + d, rollout, torch.tensor([1.0]), rounding)
    assert found.coefficients.item() == pytest.approx(math.exp(weight) if weight != 1.0 else 1.0)
    bad = correct(rollout + d, rollout, torch.tensor([-1.0]), rounding)
    assert bad.coefficients.item() == pytest.approx(math.exp(d))


def test_good_tokens_weigh_at_most_as_much_as_bad_ones():
    rounding = torch.tensor([1.0, 9.0], dtype=torch.float64)
    rollout = torch.tensor([[-6.0]])
    for sign in (1.0, -1.0):
        assert correct(rollout + 5.0, rollout, torch.tensor([sign]), rounding).coefficients.item() == 3.0


def test_good_tokens_weigh_at_least_as_much_as_bad_ones():
    rounding = torch.tensor([0.0, 1.0], dtype=torch.float64)
    rollout, bounds = torch.tensor([[-1.0]]), [[0.5, 3.0], [1.0, 1.0]]
    for sign in (1.0, -1.0):
        found = correct(
            rollout - 0.9, rollout, torch.tensor([sign]), rounding, rollout_is_threshold=bounds, rollout_rs=None
        )
        assert found.coefficients.item() == 0.5


def test_each_completion_has_its_own_rounding_in_a_batch_of_several_blocks():
    """A block ends after 2^17 tokens, which one of these completions fills."""
    train, rollout = policies(0.3, shape=(3, 2**17))
    rounding = torch.tensor([[0.0, 0.0], [0.1, 0.2], [0.2, 0.4]], dtype=torch.float64)
    whole = correct(train, rollout, torch.ones(3), rounding).coefficients
    for i in range(3):
        alone = correct(train[i : i + 1], rollout[i : i + 1], torch.ones(1), rounding[i]).coefficients
        assert whole[i].equal(alone[0])
    assert not whole[1].equal(correct(train[1:2], rollout[1:2], torch.ones(1), rounding[2]).coefficients[0])


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore:The trainer computes in float32")
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_run_measures_it(kind, tmp_path, tiny_model_path, shared_engine):
    trainer = build(*TRAINERS[kind], tiny_model_path, tmp_path, **VLLM, rollout_engine_kwargs={"dtype": "bfloat16"})
    trainer.train()
    found = logged(trainer, "rounding_tv"), logged(trainer, "rounding_log_ratio")
    assert all(0 < value < 0.05 for values in found for value in values)  # a vLLM in bfloat16


@pytest.mark.vllm
def test_old_weights_are_no_rounding(tmp_path, tiny_model_path, shared_engine):
    """A sampler that announces old weights leaves the region at its bound, and today's loss."""
    trainer = build(*TRAINERS["grpo"], tiny_model_path, tmp_path, **VLLM)
    freeze_sampler(trainer, 0.5)
    trainer.rollout_step = -8
    trainer.train()
    assert set(logged(trainer, "rounding_tv")) == {0.0}


def test_a_sampler_of_unknown_age_is_no_rounding(tmp_path, tiny_model_path):
    found = []
    for allowed in (True, False):
        sampler = StaleSampler(tiny_model_path, noise=0.5, min_length=8)
        folder = tmp_path / str(allowed)
        trainer = build(*TRAINERS["grpo"], tiny_model_path, folder, sampler=sampler, rollout_allow_rounding=allowed)
        found.append(losses(trainer))
    assert found[0] == found[1]


class AnnouncingSampler(StaleSampler):
    """It announces weights of the given age at each optimizer step, the last one from then on."""

    def __init__(self, model, *ages):
        super().__init__(model, noise=0.02, min_length=8)
        self.ages = ages

    def __call__(self, prompts, trainer):
        step = trainer.state.global_step
        trainer.rollout_step = step - self.ages[min(step, len(self.ages) - 1)]
        return super().__call__(prompts, trainer)


def announced(model, folder, *ages, **fields):
    """A run that has trained with samples of these ages."""
    sampler = AnnouncingSampler(model, *ages)
    trainer = build(*TRAINERS["grpo"], model, folder, sampler=sampler, max_steps=len(ages), **fields)
    trainer.train()
    return trainer


def test_weights_of_the_step_before_are_no_rounding(tmp_path, tiny_model_path):
    assert set(logged(announced(tiny_model_path, tmp_path, 1, 1), "rounding_tv")) == {0.0}


class FreshSampler(AnnouncingSampler):
    """It samples with the policy of the trainer, except for noise."""

    def __call__(self, prompts, trainer):
        self.model, self.lengths = trainer.model, (4, 8)  # rewards are lengths
        return super().__call__(prompts, trainer)


class NoisierSampler(FreshSampler):
    """Its first samples are the closest to the policy of the trainer."""

    def __call__(self, prompts, trainer):
        self.noise = 0.02 if trainer.state.global_step == 0 else 0.1
        return super().__call__(prompts, trainer)


def test_a_step_uses_what_the_steps_before_it_showed(tmp_path, tiny_model_path):
    fields = {"gradient_accumulation_steps": 1, "steps_per_generation": 1, "max_steps": 3}
    sampler = NoisierSampler(tiny_model_path, 0)
    trainer = build(*TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=sampler, **fields)
    trainer.train()
    first, second, third = logged(trainer, "rounding_log_ratio")
    assert 0 < first == second < third < 4 * first


def test_the_second_visit_of_a_batch_is_not_measured(tmp_path, tiny_model_path):
    """The policy has moved since, by more than its sampler is off."""
    fields = {"bypass_mode": True, "rollout_loss_type": "reinforce", "num_iterations": 2}
    fields |= {"learning_rate": 3e-3, "max_steps": 6}
    trainer = build(*TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=FreshSampler(tiny_model_path, 0), **fields)
    trainer.train()
    rounding = logged(trainer, "rounding_tv")
    assert min(logged(trainer, "k3_kl")[1::2]) > 0.01
    assert 0 < max(rounding) < 1.5 * rounding[0]


def test_a_run_says_again_what_rounding_does_once_it_does_more():
    notice = RoundingNotice(RolloutCorrectionConfig(rollout_correction="auto").settings)

    def said(step, rounding):
        return notice.news(
            step, {f"{PREFIX}k3_kl": 0.0, f"{PREFIX}staleness_mean": 0.0, f"{PREFIX}rounding_tv": rounding}
        )

    assert [said(step, rounding) is not None for step, rounding in enumerate((0.01, 0.05, 0.07, 0.1, 0.13))] == [
        *(True, False, True, False, True)
    ]


def test_a_run_says_once_how_old_its_sampler_is_and_what_rounding_does(tmp_path, tiny_model_path, capfd):
    trainer = announced(tiny_model_path, tmp_path, 0, 0, 8, 8)
    told = [line for line in capfd.readouterr().out.splitlines() if line.startswith("Rollout correction at step")]
    assert [line.split(".")[0] for line in told] == [
        "Rollout correction at step 1: the weights of the sampler are the newest",
        "Rollout correction at step 3: the weights of the sampler are older than those of the trainer",
    ]
    tv, log_ratio = logged(trainer, "rounding_tv")[0], logged(trainer, "rounding_log_ratio")[0]
    assert min(tv, log_ratio) > 0  # already in the first step
    assert f"moves a probability by up to {tv:.2g} (99th percentile)" in told[0]
    assert f"the trust region begins at {0.2 + tv:.3g}" in told[0]
    assert f"tokens with positive advantage are weighted by 1 to within {100 * log_ratio:.2g} %." in told[0]


@pytest.mark.parametrize("age", [None, 8])
def test_a_run_does_not_call_measured_what_was_not(tmp_path, tiny_model_path, capfd, age):
    sampler = StaleSampler(tiny_model_path) if age is None else AnnouncingSampler(tiny_model_path, age)
    build(*TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=sampler, max_steps=1).train()
    (told,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("Rollout correction at step")]
    assert ("does not say how old its weights are" if age is None else "older than those of the trainer") in told
    unmeasured = "No rounding was measured, so the trust region begins at 0.2, and tokens with positive advantage are"
    assert told.endswith(f"{unmeasured} weighted by 1.")


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore:The trainer computes in float32")
def test_a_dump_keeps_it_and_compare_measures_it_where_a_run_did_not(tmp_path, tiny_model_path, shared_engine):
    from trl_rollout_corr.tools.analysis.recompute import batch_of, rounding_of
    from trl_rollout_corr.tools.dump.reading import open_dump

    fields = {
        "rollout_engine_kwargs": {"dtype": "bfloat16"},
        "rollout_dump_dir": str(tmp_path / "dump"),
        "max_steps": 1,
    }
    trainer = build(*TRAINERS["grpo"], tiny_model_path, tmp_path, **VLLM, **fields, rollout_dump_sampled=64)
    trainer.train()
    sequences = open_dump(tmp_path / "dump").sequences
    of_run = [logged(trainer, f"rounding_{name}")[0] for name in ("tv", "log_ratio")]
    assert rounding_of(sequences).tolist() == pytest.approx(of_run, rel=0.5)
    (block,) = batch_of(sequences, sequences.represents).blocks
    # the micro-batches of the first step used what the first ones of them had shown
    assert block.rounding.amax(0).tolist() == pytest.approx(of_run)
    # a run that did not measure it
    sequences.rounding_tv = sequences.rounding_log_ratio = np.full(len(sequences), math.nan, np.float32)
    (block,) = batch_of(sequences, sequences.represents).blocks
    torch.testing.assert_close(block.rounding[0], rounding_of(sequences).float())
    sequences.staleness = np.full(len(sequences), 8.0)  # old weights
    assert rounding_of(sequences).tolist() == [0.0, 0.0]
