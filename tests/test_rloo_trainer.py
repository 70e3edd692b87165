"""`RolloutCorrectedRLOOTrainer` on the real TRL and a real vLLM, frozen at other weights than the trainer's."""

import math

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import RLOOConfig, RLOOTrainer

from tests.tiny import length_reward, prompts
from tests.training import (
    SCHEDULES,
    VISITED_BEFORE_UPDATE,
    VLLM,
    assert_gradients_equal,
    assert_in_step,
    assert_same_steps,
    assert_trains,
    backward,
    build,
    counting_forwards,
    freeze_sampler,
    gradients,
    logged,
    losses,
    micro_batches,
    plain_model,
    policy_logps,
    push_by_reload,
)
from trl_rollout_corr import RolloutCorrectedRLOOConfig, RolloutCorrectedRLOOTrainer
from trl_rollout_corr.trainers.keys import FIRST_COEFFICIENTS, FIRST_LOGPS, ROLLOUT_LOGPS


pytestmark = pytest.mark.vllm

LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")


@pytest.fixture
def make(tiny_model_path, tmp_path, shared_engine):
    """Build a trainer; by default ours, with a sampler frozen at perturbed weights (`spread=None`: synced)."""

    def make(trainer_class=RolloutCorrectedRLOOTrainer, spread=0.05, model=tiny_model_path, **fields):
        config_class = RLOOConfig if trainer_class is RLOOTrainer else RolloutCorrectedRLOOConfig
        trainer = build(trainer_class, config_class, model, tmp_path, **{**VLLM, **fields})
        push_by_reload(trainer.vllm_generation)
        if spread is not None:
            trainer.sampler_weights = freeze_sampler(trainer, spread)
        return trainer

    return make


# Off means off --------------------------------------------------------------------------------------------------------


@pytest.mark.seam
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_metrics_only_is_bit_for_bit_trl(make, schedule, beta):
    plain = losses(make(RLOOTrainer, schedule=schedule, beta=beta))
    measured = make(
        schedule=schedule, beta=beta, rollout_metrics_only=True, rollout_rs="token_k1", rollout_rs_threshold=1.05
    )
    assert losses(measured) == plain
    assert any(value > 0 for value in logged(measured, "rollout_rs_masked_fraction"))
    assert losses(make(schedule=schedule, beta=beta, rollout_correction="disabled")) == plain


def test_weights_of_one_change_nothing(make):
    plain = losses(make(RLOOTrainer, spread=None))
    corrected = make(spread=None, rollout_is="sequence", rollout_rs="token_k1", rollout_rs_threshold=1.1)
    assert_same_steps(losses(corrected), plain)
    assert_in_step(corrected)


def test_a_run_of_trl_goes_on_from_its_checkpoint(make, tmp_path):
    fields = {"spread": None, "save_strategy": "steps", "save_steps": 2, "output_dir": tmp_path / "run"}
    make(RLOOTrainer, max_steps=2, **fields).train()
    resumed = make(rollout_correction="trl", max_steps=4, **fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry] == [1, 2, 3, 4]
    assert_in_step(resumed)  # vLLM has the weights of the checkpoint


# Log-probabilities of the sampler -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"pad_to_multiple_of": 4}])
def test_log_probabilities_are_aligned_after_shuffling_and_padding(make, tiny_model_path, fields):
    trainer = make(schedule="several steps per generation", **fields)
    batches, model = micro_batches(trainer), plain_model(tiny_model_path, trainer.sampler_weights)
    lengths, seen_prompts = set(), set()
    for batch in batches:
        mask = batch["completion_mask"].bool()
        expected = policy_logps(model, batch).detach()
        torch.testing.assert_close(batch[ROLLOUT_LOGPS][mask], expected[mask], rtol=1e-4, atol=1e-4)
        assert (batch[ROLLOUT_LOGPS][~mask] == 0).all()
        lengths |= set(mask.sum(1).tolist())
        seen_prompts |= {tuple(ids.tolist()) for ids in batch["prompt_ids"]}
    assert len(lengths) > 1
    assert len(seen_prompts) > 2


def test_log_probabilities_are_aligned_in_evaluation(make, tiny_model_path):
    trainer = make(per_device_eval_batch_size=4, num_generations_eval=2, extra={"eval_dataset": prompts(8)})
    trainer.model.eval()
    model = plain_model(tiny_model_path, trainer.sampler_weights)
    for examples in trainer.get_eval_dataloader():
        batch = trainer._prepare_inputs(examples)
        mask = batch["completion_mask"].bool()
        expected = policy_logps(model, batch).detach()
        torch.testing.assert_close(batch[ROLLOUT_LOGPS][mask], expected[mask], rtol=1e-4, atol=1e-4)


# Forward passes -------------------------------------------------------------------------------------------------------


@pytest.mark.seam
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_forwards_are_counted(make, schedule, beta):
    accumulation, per_generation, iterations = SCHEDULES[schedule]
    micro_steps = 2 * accumulation
    old_pass = math.ceil(micro_steps / (per_generation * iterations)) * per_generation

    def count(**fields):
        trainer = make(schedule=schedule, beta=beta, max_steps=2, **fields)
        with counting_forwards(trainer) as forwards:
            trainer.train()
        return forwards["forwards"]

    assert count(trainer_class=RLOOTrainer) == micro_steps + old_pass
    assert count(rollout_correction="bypass_pg_is") == micro_steps
    assert count(rollout_correction="bypass_ppo_clip") == micro_steps
    spared = beta == 0.0 and schedule in VISITED_BEFORE_UPDATE
    assert count(rollout_correction="decoupled_seq_is") == micro_steps + (0 if spared else old_pass)


@pytest.mark.parametrize("iterations", [2, 4])
def test_old_policy_of_the_first_visit_equals_a_recomputed_one(make, monkeypatch, iterations):
    fields = {"rollout_is": "geometric", "num_iterations": iterations, "max_steps": 2 * iterations}
    first_visit = losses(make(**fields))
    monkeypatch.setattr(RolloutCorrectedRLOOTrainer, "_needs_old_pass", True)
    recomputed = losses(make(**fields))
    assert_same_steps(first_visit, recomputed)


# Gradients, against formulas written out, in float64 ------------------------------------------------------------------

WEIGHTS = {
    "token": lambda d, mask: d,
    "sequence": lambda d, mask: d.sum(1, keepdim=True).expand_as(d),
    "geometric": lambda d, mask: (d.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).expand_as(d),
}
# Enough completions, far enough off, that in any sample some tokens are rejected, some truncated, and some neither
REJECTION = {"rollout_rs": ["token_k1", "seq_max_k3"], "rollout_rs_threshold": [[0.85, 1.2], 0.05]}
GRADIENT = {**REJECTION, "spread": 0.08, "per_device_train_batch_size": 16}


def double(trainer):
    """The policy in float64, without TRL's changes."""
    return plain_model(trainer.model.config._name_or_path, trainer.model.state_dict(), torch.float64)


def reference(trainer, batch, *, lower=0.85, upper=1.2, worst_k3=0.05):
    """`logps` with gradient, `d`, `mask` and the keep-mask, by default that of `REJECTION`, in float64."""
    model = double(trainer)
    logps, mask = policy_logps(model, batch), batch["completion_mask"].double()
    d = (logps.detach() - batch[ROLLOUT_LOGPS].double()) * mask
    worst = ((d.exp() - 1 - d) * mask).amax(1, keepdim=True)
    keep = (d.exp() >= lower) & (d.exp() <= upper) & (worst <= worst_k3) & mask.bool()
    assert 0 < keep.sum() < mask.sum()
    return model, logps, d, mask, keep


@pytest.mark.seam
@pytest.mark.parametrize("level", WEIGHTS)
@pytest.mark.parametrize("normalize", [False, True])
def test_decoupled_gradient(make, level, normalize):
    trainer = make(
        rollout_is=level, rollout_is_threshold=1.1, rollout_is_batch_normalize=normalize,
        schedule="several generations per step", **GRADIENT,
    )  # fmt: skip
    batches = micro_batches(trainer)
    batch = batches[0]
    found = gradients(trainer, batch)
    model, logps, d, mask, keep = reference(trainer, batch)
    weights = WEIGHTS[level](d, mask).exp().clamp(max=1.1)
    if normalize:
        everything = [reference_weights(trainer, other, level) for other in batches]
        weights = weights / torch.cat(everything).mean()
    advantages = batch["advantages"].double()
    # one step per batch: the ratio is 1, and its gradient that of the log-likelihood
    loss = -(advantages[:, None] * (weights * keep) * logps).sum(1).mean()
    assert_gradients_equal(found, backward(model, loss))


def reference_weights(trainer, batch, level):
    model = double(trainer)
    mask = batch["completion_mask"].double()
    d = (policy_logps(model, batch).detach() - batch[ROLLOUT_LOGPS].double()) * mask
    weights = WEIGHTS[level](d, mask).exp().clamp(max=1.1)
    return weights[mask.bool()] if level == "token" else weights[:, 0]


def test_decoupled_gradient_at_a_later_visit(make):
    trainer = make(rollout_is="token", rollout_is_threshold=1.1, schedule="two iterations", **GRADIENT)
    batch = micro_batches(trainer)[0]
    gradients(trainer, batch)  # the first visit settles weights and anchor
    old, coefficients = batch[FIRST_LOGPS].double(), batch[FIRST_COEFFICIENTS].double()
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(2e-4 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    found = gradients(trainer, batch)
    assert torch.equal(batch[FIRST_COEFFICIENTS].double(), coefficients)
    model = double(trainer)
    logps, mask = policy_logps(model, batch), batch["completion_mask"].double()
    weighted = logps.detach() + coefficients * (logps - logps.detach())
    ratio = ((weighted - old) * mask).sum(1).exp()
    assert (ratio - 1).abs().max() > 1e-3
    advantages = batch["advantages"].double()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    assert_gradients_equal(found, backward(model, loss))


@pytest.mark.parametrize("level", [*WEIGHTS, None])
@pytest.mark.parametrize("normalize", [False, True])
def test_reinforce_gradient(make, level, normalize):
    if level is None and normalize:
        pytest.skip("nothing to normalise")
    trainer = make(
        bypass_mode=True, rollout_loss_type="reinforce", rollout_is=level, rollout_is_batch_normalize=normalize, **GRADIENT
    )  # fmt: skip
    batch = micro_batches(trainer)[0]
    found = gradients(trainer, batch)
    model, logps, d, mask, keep = reference(trainer, batch)
    weights = torch.ones_like(d) if level is None else WEIGHTS[level](d, mask).exp().clamp(max=2.0)
    if normalize:  # over the micro-batch
        weights = weights / (weights[mask.bool()] if level == "token" else weights[:, 0]).mean()
    loss = -(weights * keep * batch["advantages"].double()[:, None] * logps).sum(1).mean()
    assert_gradients_equal(found, backward(model, loss))


def test_bypass_ppo_gradient(make):
    bounds = {"rollout_rs": "token_k1", "rollout_rs_threshold": [0.75, 1.4]}
    trainer = make(bypass_mode=True, rollout_is="token", **{**GRADIENT, **bounds, "spread": 0.06})
    batch = micro_batches(trainer)[0]
    found = gradients(trainer, batch)
    model, logps, _, mask, keep = reference(trainer, batch, lower=0.75, upper=1.4, worst_k3=math.inf)
    ratio = ((logps - batch[ROLLOUT_LOGPS].double()) * mask * keep).sum(1).exp()  # of the tokens that are kept
    advantages = batch["advantages"].double() * keep.any(1)
    clipped = (ratio < 0.8) | (ratio > 1.2)
    assert clipped.any()
    assert not clipped.all()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    assert_gradients_equal(found, backward(model, loss))


def test_a_rejected_completion_adds_nothing_to_the_loss(make):
    trainer = make(rollout_is=None, rollout_rs="seq_mean_k1", rollout_rs_threshold=1.000001, spread=0.3)
    assert trainer.compute_loss(trainer.model, micro_batches(trainer)[0]).item() == 0.0


def test_a_saturated_ratio_gives_no_gradient_and_no_nan(make):
    trainer = make(rollout_correction="bypass_ppo_clip", spread=0.0)
    batch = micro_batches(trainer)[0]
    batch["advantages"] = -batch["advantages"].abs() - 1  # negative: PPO does not clip a large ratio
    longest = batch["completion_mask"].sum(1).argmax()
    assert batch["completion_mask"][longest].sum() > 1
    batch[ROLLOUT_LOGPS][longest] -= 15.0  # no token saturates, but the product of two does
    found = gradients(trainer, batch)
    batch["advantages"][longest] = 0.0
    expected = gradients(trainer, batch)
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert_gradients_equal(found, expected)


# The KL divergence in the reward --------------------------------------------------------------------------------------


def leave_one_out(rewards, group):
    grouped = rewards.view(-1, group)
    return (grouped - (grouped.sum(1, keepdim=True) - grouped) / (group - 1)).view(-1)


def scored(trainer):
    """The scored generation batch, unshuffled, and the examples it was made from."""
    torch.manual_seed(0)
    trainer.model.train()
    return trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))


def moved(trainer):
    """Move the policy away from its reference."""
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    return trainer


@pytest.mark.parametrize("schedule", ["aligned", "several steps per generation"])
def test_kl_in_the_reward_is_that_of_the_old_policy(make, schedule):
    plain = scored(moved(make(RLOOTrainer, beta=0.5, schedule=schedule)))
    ours = scored(moved(make(beta=0.5, schedule=schedule, rollout_correction="decoupled_token_is")))
    assert torch.equal(ours["completion_ids"], plain["completion_ids"])
    assert torch.equal(ours["advantages"], plain["advantages"])


@pytest.mark.parametrize("broken", [False, True])
def test_kl_in_the_reward_is_that_of_the_sampler_in_bypass_mode(make, tiny_model_path, broken):
    trainer = moved(make(beta=0.5, rollout_correction="bypass_pg_is"))
    if broken:  # a token without a log-probability must not make the completion unscorable
        generate = trainer.vllm_generation.generate
        trainer.vllm_generation.generate = lambda **kwargs: break_first(trainer, generate(**kwargs))
    batch = scored(trainer)
    reference_model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    mask = batch["completion_mask"].bool()
    rollout = batch[ROLLOUT_LOGPS]
    assert rollout[mask].isnan().any() == broken
    kl = torch.where(mask, rollout - policy_logps(reference_model, batch).detach(), 0.0).nan_to_num(0.0).sum(1)
    completions = trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    rewards = torch.tensor(length_reward(completions)) - 0.5 * kl
    torch.testing.assert_close(batch["advantages"], leave_one_out(rewards, 4), rtol=1e-3, atol=1e-3)


def break_first(trainer, output):
    trainer._record_logprobs([[None, *row[1:]] for row in trainer._pass.logprobs], trainer._pass.prompts)
    return output


# With TRL's own options -----------------------------------------------------------------------------------------------

MODES = {
    "decoupled": {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": [0.3, 3.0]},
    "ppo_clip": {"bypass_mode": True, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": [0.3, 3.0]},
    "reinforce": {"bypass_mode": True, "rollout_loss_type": "reinforce", "rollout_is": "sequence"},
}
OPTIONS = {
    "beta": {"beta": 0.1},
    "normalised advantages": {"normalize_advantages": True},
    "clipped rewards": {"reward_clip_range": [0.5, 1.5]},
    "two iterations": {"schedule": "two iterations"},
    "several steps per generation": {"schedule": "several steps per generation"},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "truncated completions masked": {"mask_truncated_completions": True},
    "adapter": {"extra": {"peft_config": LORA}},
    "adapter with a reference": {"extra": {"peft_config": LORA}, "beta": 0.1, "schedule": "two iterations"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("option", OPTIONS)
def test_trains_with_options_of_trl(make, mode, option):
    spread = None if "extra" in OPTIONS[option] else 0.05  # the sampler of an adapter is synced
    assert_trains(
        make(**MODES[mode], **OPTIONS[option], spread=spread, learning_rate=1e-2 if spread is None else 1e-3)
    )


# What can go wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_engine_with_broken_weights(make, mode, beta):
    trainer = make(spread=math.nan, beta=beta, **MODES[mode])
    assert losses(trainer) == [(0.0, 0.0)] * 3
    assert logged(trainer, "nonfinite_fraction") == [1.0] * 3
