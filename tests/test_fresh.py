"""Weights for completions of old weights alone: which completions count as fresh, and what that changes."""

import math
import re

import numpy as np
import pytest
import torch

from tests.tiny import StaleSampler
from tests.training import TRAINERS, VLLM, build, freeze_sampler, logged, losses, messages, told
from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.correction.age import Staleness, count_lags
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.settings.presets import PRESETS
from trl_rollout_corr.trainers.age_notice import AgeNotice


def policies(spread, shape=(64, 40), seed=0):
    """Log-probabilities of trainer and sampler, of which a tenth of the tokens are ten times as far apart."""
    dice = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(shape, generator=dice).mul(4)
    far = torch.rand(shape, generator=dice) < 0.1
    noise = spread * torch.randn(shape, generator=dice) * torch.where(far, 10.0, 1.0)
    return (rollout + noise).clamp(max=0.0), rollout


def correct(train, rollout, advantages, fresh=None, **fields):
    config = RolloutCorrectionConfig(**{"rollout_correction": "auto", **fields})
    return compute_rollout_correction(
        train, rollout, torch.ones_like(train), config, advantages=advantages, fresh=fresh
    )


def signs(train, seed=1):
    return torch.randn(len(train), generator=torch.Generator().manual_seed(seed))


def every_second(train):
    return torch.arange(len(train)) % 2 == 0


def test_fresh_completions_keep_the_region_and_the_floor_and_have_no_weights():
    train, rollout = policies(0.3)
    train[:, 0] = rollout[:, 0] - 8.0  # below the floor
    fresh = every_second(train)
    found = correct(train, rollout, signs(train), fresh).coefficients
    weighted = correct(train, rollout, signs(train)).coefficients
    region = correct(train, rollout, signs(train), rollout_is=None).coefficients
    assert found[fresh].equal(region[fresh])
    assert found[~fresh].equal(weighted[~fresh])
    assert {*region[fresh].unique().tolist()} == {0.0, 1.0}
    assert not weighted[fresh].equal(region[fresh])
    assert (found[fresh][:, 0] == 0).all()


def test_the_age_of_a_completion_is_unknown_by_default_and_counts_as_old():
    train, rollout = policies(0.3)
    old = correct(train, rollout, signs(train), torch.zeros(len(train), dtype=torch.bool))
    assert correct(train, rollout, signs(train)).coefficients.equal(old.coefficients)


@pytest.mark.parametrize("preset", ["decoupled_token_is", "decoupled_token_icepop", "decoupled_seq_is"])
def test_any_weights_may_be_for_old_completions_alone(preset):
    train, rollout = policies(0.3)
    fresh = every_second(train)
    fields = {"rollout_correction": preset, "rollout_is_stale_only": True}
    found = correct(train, rollout, None, fresh, **fields)
    always = correct(train, rollout, None, fresh, rollout_correction=preset)
    assert (found.weights[fresh] == 1.0).all()
    assert found.weights[~fresh].equal(always.weights[~fresh])
    assert not (always.weights[fresh] == 1.0).all()


def test_metrics_are_those_of_the_weights_in_use():
    train, rollout = policies(0.3)
    everywhere = torch.ones(len(train), dtype=torch.bool)
    found = correct(train, rollout, signs(train), everywhere, rollout_rs=None).metrics()
    assert found[f"{PREFIX}rollout_is_mean"] == found[f"{PREFIX}rollout_is_min"] == 1.0
    assert found[f"{PREFIX}rollout_is_eff_sample_size"] == found[f"{PREFIX}effective_lr"] == 1.0
    old = correct(train, rollout, signs(train), rollout_rs=None).metrics()
    assert old[f"{PREFIX}rollout_is_min"] < 0.5
    assert found[f"{PREFIX}k3_kl"] == old[f"{PREFIX}k3_kl"] > 0.01  # the gap is no weight


def test_auto_written_as_fields_has_the_same_bits():
    train, rollout = policies(0.3)
    fresh = every_second(train)
    named = correct(train, rollout, signs(train), fresh)
    written = correct(train, rollout, signs(train), fresh, rollout_correction=None, **PRESETS["auto"])
    assert named.coefficients.equal(written.coefficients)
    assert not named.coefficients.equal(correct(train, rollout, signs(train)).coefficients)


def test_each_completion_has_its_own_age_in_a_batch_of_several_blocks():
    """A block ends after 2^17 tokens, which one of these completions fills."""
    train, rollout = policies(0.3, shape=(3, 2**17))
    fresh = torch.tensor([False, True, False])
    whole = correct(train, rollout, -torch.ones(3), fresh).coefficients
    for i in range(3):
        alone = correct(train[i : i + 1], rollout[i : i + 1], -torch.ones(1), fresh[i : i + 1]).coefficients
        assert whole[i].equal(alone[0])
    assert not whole[1].equal(correct(train[1:2], rollout[1:2], -torch.ones(1)).coefficients[0])


def test_ages_of_another_shape_are_refused():
    train, rollout = policies(0.3, shape=(4, 3))
    with pytest.raises(ValueError, match=r"`fresh` must have the shape \(4,\), got \(4, 3\)"):
        correct(train, rollout, torch.ones(4), torch.ones(4, 3))


class AnnouncingSampler(StaleSampler):
    """It announces weights of the given age at each optimizer step, the last one from then on; `None` is unknown."""

    def __init__(self, model, *ages, noise=0.5):
        super().__init__(model, noise=noise, min_length=8)
        self.ages, self.lengths = ages, (4, 8)  # rewards are lengths

    def __call__(self, prompts, trainer):
        step = trainer.state.global_step
        age = self.ages[min(step, len(self.ages) - 1)]
        trainer.rollout_step = None if age is None else step - age
        return super().__call__(prompts, trainer)


def announced(model, folder, *ages, **fields):
    """A trainer whose samples are of these ages, and have the same gap at each of them."""
    fields = {"max_steps": max(2, len(ages)), **fields}
    return build(*TRAINERS["grpo"], model, folder, sampler=AnnouncingSampler(model, *ages), **fields)


@pytest.mark.parametrize(
    ("age", "same_as", "differs_from"),
    [(0, {"rollout_is": None}, {"rollout_is_stale_only": False}),
     (1, {"rollout_is_stale_only": False}, {"rollout_is": None}),
     (None, {"rollout_is_stale_only": False}, {"rollout_is": None})],
    ids=["fresh", "old", "unknown"],
)  # fmt: skip
def test_a_run_weights_what_older_weights_sampled(age, same_as, differs_from, tmp_path, tiny_model_path):
    auto, same, other = (
        losses(announced(tiny_model_path, tmp_path / str(i), age, **fields))
        for i, fields in enumerate(({}, same_as, differs_from))
    )
    assert auto == same
    assert auto != other


def test_the_log_counts_the_completions_of_older_weights(tmp_path, tiny_model_path):
    trainer = announced(tiny_model_path, tmp_path, 0, 3, 0)
    trainer.train()
    assert logged(trainer, "stale_fraction") == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(("age", "stale"), [(0, 0.0), (3, 1.0)])
def test_an_evaluation_counts_from_the_policy_that_it_evaluates(age, stale, tmp_path, tiny_model_path):
    """It takes place after the update of the last step, for whose policy the last batch of the training was sampled."""
    trainer = announced(tiny_model_path, tmp_path, age, per_device_eval_batch_size=8)
    trainer.train()
    found = trainer.evaluate(trainer.train_dataset.select(range(4)))
    assert found[f"eval_{PREFIX}staleness_mean"] == age
    assert found[f"eval_{PREFIX}stale_fraction"] == stale
    assert (found[f"eval_{PREFIX}rollout_is_mean"] == 1.0) == (not stale)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore:The trainer computes in float32")
@pytest.mark.parametrize("kind", TRAINERS)
def test_vllm_is_fresh_after_each_push(kind, tmp_path, tiny_model_path, shared_engine):
    trainer = build(*TRAINERS[kind], tiny_model_path, tmp_path, **VLLM, rollout_engine_kwargs={"dtype": "bfloat16"})
    trainer.train()
    assert set(logged(trainer, "stale_fraction")) == {0.0}
    assert set(logged(trainer, "rollout_is_mean")) == {1.0}


@pytest.mark.vllm
def test_a_vllm_that_is_behind_is_not(tmp_path, tiny_model_path, shared_engine):
    trainer = build(*TRAINERS["grpo"], tiny_model_path, tmp_path, **VLLM)
    freeze_sampler(trainer, 0.5)
    trainer.rollout_step = -8
    trainer.train()
    assert set(logged(trainer, "stale_fraction")) == {1.0}
    assert max(logged(trainer, "rollout_is_mean")) < 1.0


class FreshSampler(AnnouncingSampler):
    """It samples with the policy of the trainer, except for noise."""

    def __call__(self, prompts, trainer):
        self.model = trainer.model
        return super().__call__(prompts, trainer)


BYPASS = {"bypass_mode": True, "rollout_loss_type": "reinforce"}


@pytest.mark.parametrize(
    ("fields", "stale"),
    [({"num_iterations": 2}, [0.0] * 4), ({"num_iterations": 2, **BYPASS}, [0.0, 1.0, 0.0, 1.0]),
     ({"steps_per_generation": 2, "gradient_accumulation_steps": 1}, [0.0] * 4)],
    ids=["the old policy sampled", "the current one did not", "several steps per generation"],
)  # fmt: skip
def test_several_updates_of_a_generation(fields, stale, tmp_path, tiny_model_path):
    """In decoupled mode the weights correct for the old policy, which sampled. In bypass mode the policy has moved."""
    sampler = FreshSampler(tiny_model_path, 0, noise=0.02)
    fields = {"max_steps": 4, **fields}
    trainer = build(*TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=sampler, **fields)
    trainer.train()
    found = [entry[f"{PREFIX}stale_fraction"] for entry in trainer.state.log_history
             if f"{PREFIX}stale_fraction" in entry]  # fmt: skip
    assert [share for share in found if not math.isnan(share)] == stale[: len(found)]
    assert len(found) > 1


def test_a_run_says_once_how_old_its_sampler_is_and_what_follows(tmp_path, tiny_model_path, caplog):
    announced(tiny_model_path, tmp_path, 0, 0, 8, 0, 8).train()
    lines = [line for line in told(caplog) if line.startswith("Rollout correction at step")]
    assert lines == [
        "Rollout correction at step 1: vLLM is up to date: importance weights are off, the trust region is on.",
        "Rollout correction at step 3: vLLM is behind: importance weights are on for tokens with negative advantage, the "
        "trust region is on.",
    ]


def test_a_window_of_several_ages_says_so(tmp_path, tiny_model_path, caplog):
    """One of three steps is stale, so most tokens have the importance weight 1, and not all of them."""
    announced(tiny_model_path, tmp_path, 0, 0, 8, logging_steps=3).train()
    (line,) = [line for line in told(caplog) if line.startswith("Rollout correction at step")]
    assert (
        "vLLM counts as behind for some completions (`stale_fraction` is 0.33): importance weights are on for their "
        in line
    )


def test_a_run_says_that_it_does_not_know_how_old_its_sampler_is(tmp_path, tiny_model_path, caplog):
    announced(tiny_model_path, tmp_path, None).train()
    (line,) = [line for line in told(caplog) if line.startswith("Rollout correction at step")]
    assert "does not announce its step, so it counts as behind: importance weights are on for tokens" in line


@pytest.mark.parametrize(
    ("fields", "says"),
    [({}, True), ({"rollout_correction": "decoupled_token_is"}, False), ({"rollout_is": None}, False),
     ({"rollout_metrics_only": True}, False)],
)  # fmt: skip
def test_only_a_run_whose_loss_depends_on_the_age_speaks_of_it(fields, says):
    notice = AgeNotice(RolloutCorrectionConfig(**{"rollout_correction": "auto", **fields}).settings)
    assert (notice.news(1, {f"{PREFIX}k3_kl": 0.0, f"{PREFIX}stale_fraction": 0.0}) is not None) == says


@pytest.mark.parametrize("age", [0, 8, None])
def test_a_dump_gives_the_weights_of_the_run(age, tmp_path, tiny_model_path):
    from trl_rollout_corr.tools.analysis.recompute import _correct_blocks, batch_of
    from trl_rollout_corr.tools.dump.reading import open_dump

    fields = {"rollout_dump_dir": str(tmp_path / "dump"), "rollout_dump_sampled": 64}
    trainer = announced(tiny_model_path, tmp_path, age, **fields)
    trainer.train()
    sequences = open_dump(tmp_path / "dump").sequences
    every = np.ones(len(sequences), bool)
    assert {*sequences.is_fresh} == {age == 0}
    batch = batch_of(sequences, every)
    for block, correction in zip(batch.blocks, _correct_blocks(batch, trainer._settings), strict=True):
        torch.testing.assert_close(correction.coefficients * block.mask, block.coefficients, rtol=1e-5, atol=1e-6)
    sequences.lag = np.full(len(sequences), math.nan)  # as in an earlier dump
    assert {*sequences.is_fresh} == {age == 0}


def test_updates_since_the_generation_make_no_dump_stale(tmp_path, tiny_model_path):
    """The log-ratios are of the old policy, whose weights have sampled, whatever the age counts."""
    from trl_rollout_corr.tools.diagnosis import diagnose, read_tokens
    from trl_rollout_corr.tools.dump.reading import open_dump

    dump = str(tmp_path / "dump")
    fields = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "rollout_dump_dir": dump, "max_steps": 4}
    sampler = FreshSampler(tiny_model_path, 0, noise=0.02)
    build(*TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=sampler, **fields).train()
    sequences = open_dump(dump).sequences
    assert {*sequences.staleness} == {0, 1}
    assert sequences.is_fresh.all()
    assert diagnose(read_tokens(dump)).fresh


def test_updates_since_the_generation_are_no_age_of_a_gap(tmp_path, tiny_model_path):
    """A dump of every second step has completions of age 1 alone, and their gap is of weights that have sampled."""
    from trl_rollout_corr.tools.diagnosis import diagnose, read_tokens
    from trl_rollout_corr.tools.dump.reading import open_dump

    dump = str(tmp_path / "dump")
    fields = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "rollout_dump_dir": dump, "max_steps": 16}
    sampler = FreshSampler(tiny_model_path, 0, noise=0.3)
    build(*TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=sampler, rollout_dump_steps=2, **fields).train()
    assert {*open_dump(dump).sequences.staleness} == {1}
    assert "stale" not in [finding.name for finding in diagnose(read_tokens(dump)).findings]


class LaggingSampler(AnnouncingSampler):
    """It is fresh at first, and four steps behind from the third generation of two steps on, and differs only then."""

    def __init__(self, model):
        super().__init__(model, 0, 0, 0, 0, 4)

    def __call__(self, prompts, trainer):
        self.noise = 0.3 if trainer.state.global_step >= 4 else 0.0
        return super().__call__(prompts, trainer)


def lagging(tiny_model_path, folder, **fields):
    """A trainer with two updates on each generation of an old sampler."""
    schedule = {"steps_per_generation": 2, "gradient_accumulation_steps": 1}
    sampler = LaggingSampler(tiny_model_path)
    return build(*TRAINERS["grpo"], tiny_model_path, folder, sampler=sampler, **schedule, **fields)


@pytest.mark.parametrize(
    ("fields", "lags"),
    [({}, {0, 4}), ({"rollout_correction": "bypass_dppo_tv"}, {0, 1, 4, 5})],
    ids=["decoupled", "bypass"],
)
def test_a_dump_tells_the_updates_on_a_generation_from_its_lag(fields, lags, tmp_path, tiny_model_path):
    """The ratios of decoupled mode are of the old policy, and those of bypass mode of the current one."""
    from trl_rollout_corr.tools.diagnosis import read_tokens
    from trl_rollout_corr.tools.dump.reading import open_dump

    dump = str(tmp_path / "dump")
    trainer = lagging(tiny_model_path, tmp_path, rollout_dump_dir=dump, max_steps=8, **fields)
    trainer.train()
    sequences = open_dump(dump).sequences
    assert {*sequences.staleness} == {0, 1, 4, 5}
    assert {*sequences.lag} == {*read_tokens(dump).staleness} == lags
    assert {*logged(trainer, "lag_max")} == lags - {0}
    assert logged(trainer, "staleness_max") == [0.0, 1.0, 0.0, 1.0, 4.0, 5.0, 4.0, 5.0]


def test_a_diagnosis_and_an_alarm_give_the_lag_of_an_old_sampler(tmp_path, tiny_model_path, caplog):
    """Each generation is trained on twice, which adds no step to the age of its ratios."""
    from trl_rollout_corr.tools.diagnosis import diagnose, read_tokens

    dump = str(tmp_path / "dump")
    fields = {"rollout_correction": "disabled", "rollout_monitor": "warn", "rollout_dump_dir": dump}
    lagging(tiny_model_path, tmp_path, max_steps=16, learning_rate=1e-6, **fields).train()
    [stale] = diagnose(read_tokens(dump)).findings
    assert (stale.name, stale.evidence.numbers["oldest"]) == ("stale", 4.0)
    assert "The sampler is 4 steps old" in "\n".join(messages(caplog))


def test_a_completion_without_a_token_of_the_loss_is_neither_fresh_nor_old():
    mask = torch.tensor([[1, 0], [1, 1], [0, 0]])  # TRL masks completions that were cut off
    found = Staleness.of(count_lags(torch.tensor([0, 2, 5]), mask)).finish()
    assert (found[f"{PREFIX}stale_fraction"], found[f"{PREFIX}lag_max"]) == (0.5, 2.0)
    unknown = Staleness.of(count_lags(torch.tensor([0.0, math.nan, 0.0]), mask)).finish()
    assert unknown == {f"{PREFIX}stale_fraction": 0.5}


def test_an_unknown_age_counts_as_old_where_others_are_known():
    mask = torch.ones(3, 2)
    unknown, known = Staleness.of(count_lags(None, mask)), Staleness.of(count_lags(torch.zeros(1), mask[:1]))
    assert f"{PREFIX}stale_fraction" not in unknown.finish()
    assert (unknown + known).finish()[f"{PREFIX}stale_fraction"] == 0.75


class LaterNoise(FreshSampler):
    """Its noise begins in the third generation of two steps."""

    def __call__(self, prompts, trainer):
        self.noise = 0.3 if trainer.state.global_step >= 4 else 0.0
        return super().__call__(prompts, trainer)


def test_updates_since_the_generation_are_no_age_of_an_alarm(tmp_path, tiny_model_path, caplog):
    fields = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "max_steps": 10, "rollout_monitor": "warn"}
    sampler = LaterNoise(tiny_model_path, 0)
    fields["rollout_correction"] = "disabled"
    trainer = build(*TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=sampler, **fields)
    trainer.train()
    assert set(logged(trainer, "staleness_max")) == {0.0, 1.0}
    assert set(logged(trainer, "stale_fraction")) == {0.0}
    said = "\n".join(messages(caplog))
    assert "[k3_" in said
    assert not re.search(r"steps? old", said)
