"""`RolloutCorrectedGRPOTrainer` on the real TRL, with a sampler that is not the trainer's policy."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tests.dumps import read_dump
from tests.test_dumps import Interruption
from tests.tiny import StaleSampler, length_reward, prompts
from tests.training import (
    SCHEDULES,
    VISITED_BEFORE_UPDATE,
    BrokenSampler,
    assert_gradients_equal,
    assert_same_metrics,
    assert_same_steps,
    assert_trains,
    backward,
    build,
    corrected_batches,
    counting_forwards,
    gradients,
    logged,
    losses,
    messages,
    micro_batches,
    policy_logps,
    saying,
    told,
    window,
)
from trl_rollout_corr import (
    RolloutCorrectedGRPOConfig,
    RolloutCorrectedGRPOTrainer,
    __version__,
)
from trl_rollout_corr.messages import SettingWarning
from trl_rollout_corr.trainers.keys import ROLLOUT_LOGPS


LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"]
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")


@pytest.fixture
def make(tiny_model_path, tmp_path):
    """Build a trainer; by default ours, with a stale sampler."""

    def make(trainer_class=RolloutCorrectedGRPOTrainer, sampler=None, model=tiny_model_path, **fields):
        config_class = GRPOConfig if trainer_class is GRPOTrainer else RolloutCorrectedGRPOConfig
        if trainer_class is GRPOTrainer:
            fields.setdefault("vllm_importance_sampling_correction", False)
        sampler = sampler or StaleSampler(tiny_model_path)
        return build(trainer_class, config_class, model, tmp_path, sampler=sampler, **fields)

    return make


def loss_type_fields(loss_type):
    return {"loss_type": loss_type, **({"epsilon_high": 5.0} if loss_type == "cispo" else {})}


# Off means off --------------------------------------------------------------------------------------------------------


@pytest.mark.seam
@pytest.mark.parametrize("loss_type", [*LOSS_TYPES, "vespo"])
def test_metrics_only_is_bit_for_bit_trl(make, loss_type):
    fields = {**loss_type_fields(loss_type), "beta": 0.1}
    plain = losses(make(GRPOTrainer, **fields))
    assert losses(make(rollout_correction="disabled", **fields)) == plain


@pytest.mark.seam
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_metrics_only_is_bit_for_bit_trl_in_every_schedule(make, schedule):
    plain = losses(make(GRPOTrainer, schedule=schedule, max_steps=6))
    measured = make(
        schedule=schedule,
        max_steps=6,
        rollout_metrics_only=True,
        rollout_is="sequence",
        rollout_is_batch_normalize=True,
        rollout_rs="token_k1",
        rollout_rs_threshold=1.1,
    )
    assert losses(measured) == plain
    assert all(value != 1.0 for value in logged(measured, "rollout_is_mean"))
    assert all(value > 0.0 for value in logged(measured, "rollout_rs_masked_fraction"))


def test_metrics_only_makes_no_forward_of_its_own(make):
    for schedule in SCHEDULES:
        counts = []
        for trainer in (make(GRPOTrainer, schedule=schedule), make(rollout_correction="disabled", schedule=schedule)):
            with counting_forwards(trainer) as count:
                trainer.train()
            counts.append(count["forwards"])
        assert counts[0] == counts[1], schedule


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_weights_of_one_change_nothing(make, loss_type):
    class SamePolicy(StaleSampler):
        """Returns no log-probabilities of its own, but those of the trainer."""

        def __call__(self, prompts, trainer):
            self.model.load_state_dict(trainer.model.state_dict())
            return super().__call__(prompts, trainer)

    def same(model):
        return SamePolicy(model, noise=0.0)

    path = make().model.config._name_or_path
    plain = losses(make(GRPOTrainer, sampler=same(path), **loss_type_fields(loss_type)))
    fields = {"rollout_is": "sequence", "rollout_rs": "token_k1", "rollout_rs_threshold": 1.1}
    corrected = losses(make(sampler=same(path), **fields, **loss_type_fields(loss_type)))
    assert_same_steps(corrected, plain)


# Decoupled mode -------------------------------------------------------------------------------------------------------


@pytest.mark.seam
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_decoupled_forwards_are_counted(make, schedule):
    accumulation, per_generation, iterations = SCHEDULES[schedule]
    steps = 4
    trainer = make(schedule=schedule, max_steps=steps)
    with counting_forwards(trainer) as count:
        trainer.train()
    micro_steps = steps * accumulation
    generations = math.ceil(micro_steps / (per_generation * iterations))
    old_pass = 0 if schedule in VISITED_BEFORE_UPDATE else generations * per_generation
    assert count["forwards"] == micro_steps + old_pass


@pytest.mark.parametrize("iterations", [2, 4])
@pytest.mark.parametrize(
    "fields", [{}, {"rollout_is": "sequence", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.5}]
)
def test_old_policy_of_the_first_visit_equals_a_recomputed_one(make, monkeypatch, iterations, fields):
    fields = {**fields, "num_iterations": iterations, "max_steps": 2 * iterations, "beta": 0.04}
    first_visit = losses(make(**fields))
    monkeypatch.setattr(RolloutCorrectedGRPOTrainer, "_needs_old_pass", True)
    trainer = make(**fields)
    with counting_forwards(trainer) as count:
        recomputed = losses(trainer)
    assert count["forwards"] > 2 * 2 * iterations  # it did compute it
    assert_same_steps(first_visit, recomputed)


def test_the_ratio_moves_over_iterations_and_the_weights_do_not(make):
    trainer = make(schedule="two iterations", max_steps=2)
    seen = []
    enter_loss = trainer._enter_loss

    def spy(inputs, logps, anchor, coefficients):
        seen.append(((logps.detach() - anchor).abs().max().item(), coefficients))
        return enter_loss(inputs, logps, anchor, coefficients)

    trainer._enter_loss = spy
    trainer.train()
    (first, weights), (second, weights_again) = seen[0], seen[2]
    assert first == 0.0
    assert second > 0.0
    assert torch.equal(weights, weights_again)


@pytest.mark.parametrize("schedule", ["aligned", "several steps per generation"])
def test_batch_normalisation_spans_the_generation_batch(make, schedule):
    trainer = make(schedule=schedule, rollout_is="sequence", rollout_is_batch_normalize=True)
    batches = micro_batches(trainer)
    weights = torch.cat([batch["rollout_corr_coefficients"].amax(-1) for batch in batches])
    assert weights.mean() == pytest.approx(1.0, abs=1e-5)
    assert weights.std() > 0.01
    for batch in batches:  # and not each micro-batch
        assert batch["rollout_corr_coefficients"].amax(-1).mean() != pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("fields", [{"rollout_is_batch_normalize": True}, {"rollout_rs": "token_k1",
    "rollout_rs_threshold": 1.3, "rollout_rs_renormalize": True}], ids=["weights", "kept tokens"])  # fmt: skip
def test_a_run_that_only_measures_has_the_coefficients_that_it_would_apply(make, tmp_path, fields):
    """Where TRL makes an old pass of its own, which is known before the first micro-batch."""
    coefficients = []
    for only in (False, True):
        dump = tmp_path / f"dump-{only}"
        trainer = make(
            RolloutCorrectedGRPOTrainer, schedule="several steps per generation", learning_rate=0.0, max_steps=2,
            rollout_is="token", rollout_metrics_only=only, rollout_dump_dir=str(dump), rollout_dump_sampled=16, **fields,
        )  # fmt: skip
        trainer.train()
        coefficients.append({tuple(row["rollout_logps"]): row["coefficients"] for row in read_dump(dump).rows})
    applied, measured = coefficients
    assert len(applied) == 16
    assert measured.keys() == applied.keys()
    for sampled, expected in applied.items():
        assert measured[sampled] == pytest.approx(expected, rel=1e-5)


def test_renormalisation_scales_the_loss_by_valid_over_kept(make):
    fields = {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": 1.2, "loss_type": "dapo"}
    plain, renormalized = make(**fields), make(rollout_rs_renormalize=True, **fields)
    gradient, scaled = (gradients(trainer, micro_batches(trainer)[0]) for trainer in (plain, renormalized))
    batches = renormalized._buffered_inputs
    valid = sum(batch["completion_mask"].sum() for batch in batches)
    kept = sum((batch["rollout_corr_coefficients"] > 0).sum() for batch in batches)
    assert 0 < kept < valid
    assert_gradients_equal(scaled, {name: g * valid / kept for name, g in gradient.items()})


def test_rejected_tokens_stay_in_the_denominators(make):
    # Rejecting every token of half the rows must leave the gradient of the others alone
    trainer = make(rollout_is=None, rollout_rs="seq_mean_k1", rollout_rs_threshold=1.05, loss_type="grpo")
    batch = micro_batches(trainer)[0]
    with corrected_batches(trainer) as coefficients:
        corrected = gradients(trainer, batch)
    kept = coefficients[0].amax(-1)
    assert 0 < kept.sum() < len(kept)
    plain = make(GRPOTrainer, loss_type="grpo")
    expected = micro_batches(plain)[0]
    expected["advantages"] = expected["advantages"] * kept
    assert_gradients_equal(corrected, gradients(plain, expected))


# Bypass mode ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_bypass_makes_no_extra_forward_in_any_schedule(make, loss, schedule, beta):
    trainer = make(
        schedule=schedule, bypass_mode=True, rollout_loss_type=loss, rollout_is="sequence", beta=beta, max_steps=2
    )
    with counting_forwards(trainer) as count:
        trainer.train()
    assert count["forwards"] == 2 * SCHEDULES[schedule][0]  # the reference model is another module


def reduce(per_token, batch, trainer, loss_type):
    """TRL's reductions, written out."""
    mask = batch["completion_mask"]
    accumulation = trainer.args.gradient_accumulation_steps
    if loss_type == "grpo":
        return ((per_token * mask).sum(1) / mask.sum(1)).mean() / accumulation
    return (per_token * mask).sum() / (batch["num_items_in_batch"] * accumulation / trainer.args.steps_per_generation)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric", None])
def test_reinforce_is_minus_weight_advantage_logp(make, loss_type, level):
    trainer = make(
        bypass_mode=True, rollout_loss_type="reinforce", rollout_is=level, loss_type=loss_type,
        rollout_rs="token_k2", rollout_rs_threshold=0.2,
    )  # fmt: skip
    batch = micro_batches(trainer)[0]
    found = gradients(trainer, batch)
    logps = policy_logps(trainer.model, batch)
    d = torch.where(batch["completion_mask"].bool(), logps.detach() - batch[ROLLOUT_LOGPS], 0.0)
    exponent = {
        "token": d,
        "sequence": d.sum(1, keepdim=True),
        "geometric": d.sum(1, keepdim=True) / batch["completion_mask"].sum(1, keepdim=True),
        None: torch.zeros_like(d),
    }[level]
    weights = exponent.exp().clamp(max=2.0) * (d**2 / 2 <= 0.2)
    loss = reduce(-weights * batch["advantages"][:, None] * logps, batch, trainer, loss_type)
    assert_gradients_equal(found, backward(trainer.model, loss))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_bypass_ppo_clips_around_the_rollout_policy(make, loss_type):
    trainer = make(
        bypass_mode=True, rollout_is="token", loss_type=loss_type, rollout_rs="seq_max_k2", rollout_rs_threshold=0.05
    )
    batch = micro_batches(trainer)[0]
    found = gradients(trainer, batch)
    logps = policy_logps(trainer.model, batch)
    mask = batch["completion_mask"].bool()
    d = torch.where(mask, logps.detach() - batch[ROLLOUT_LOGPS], 0.0)
    keep = (d**2 / 2).amax(1, keepdim=True) <= 0.05
    assert 0 < keep.sum() < len(keep)
    ratio = torch.where(mask, (logps - batch[ROLLOUT_LOGPS]).exp(), 1.0)
    advantages = batch["advantages"][:, None]
    per_token = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * keep
    assert_gradients_equal(found, backward(trainer.model, reduce(per_token, batch, trainer, loss_type)))
    assert logged_now(trainer, "rollout_is_mean") != 1.0  # reported


def logged_now(trainer, key):
    return window(trainer).finish()[f"rollout_corr/{key}"]


def test_a_saturated_ratio_gives_no_gradient_and_no_nan(make, tiny_model_path, caplog):
    def shift(output):
        output["logprobs"] = [[x - 200.0 for x in sequence] for sequence in output["logprobs"]]  # ratio e^200

    sampler = BrokenSampler(tiny_model_path, shift)
    trainer = make(sampler=sampler, rollout_correction="bypass_ppo_clip", rollout_monitor="warn")
    with saying(caplog, "Rounding does not explain it"):
        assert losses(trainer) == [(0.0, 0.0)] * 3


def test_bypass_recomputes_the_weights_at_every_visit(make):
    bypass = {"rollout_is": "token", "bypass_mode": True, "rollout_loss_type": "reinforce"}
    with pytest.warns(UserWarning, match="`num_iterations` is 2 with `rollout_loss_type='reinforce'`"):
        trainer = make(schedule="two iterations", max_steps=2, **bypass)
    seen = []
    enter_loss = trainer._enter_loss

    def spy(inputs, logps, anchor, coefficients):
        seen.append(coefficients)
        return enter_loss(inputs, logps, anchor, coefficients)

    trainer._enter_loss = spy
    trainer.train()
    assert not torch.equal(seen[0], seen[2])


def test_bounds_of_ppo_change_nothing_in_reinforce_as_the_warning_says(make):
    bounds = {"epsilon": 1e-5, "epsilon_high": 2e-5, "delta": 1.00001}
    fields = {"schedule": "two iterations", "max_steps": 4, "learning_rate": 1e-3}
    with pytest.warns(SettingWarning, match="has no effect") as told:
        bounded = losses(make(rollout_correction="bypass_dppo_tv", **fields, **bounds))
    said = " ".join(str(warning.message) for warning in told)
    assert all(f"`{name}` is set to {value} but has no effect" in said for name, value in bounds.items())
    assert bounded == losses(make(rollout_correction="bypass_dppo_tv", **fields))
    clipped = losses(make(rollout_correction="bypass_ppo_clip", **fields, **bounds))
    assert clipped != losses(make(rollout_correction="bypass_ppo_clip", **fields))


# With TRL's own options -----------------------------------------------------------------------------------------------

MODES = {
    "decoupled": {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": [0.7, 1.5]},
    "ppo_clip": {"bypass_mode": True, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": [0.7, 1.5]},
    "reinforce": {"bypass_mode": True, "rollout_loss_type": "reinforce", "rollout_is": "sequence"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_trains_with_every_loss_type(make, mode, loss_type):
    assert_trains(make(**MODES[mode], **loss_type_fields(loss_type)))


OPTIONS = {
    "beta": {"beta": 0.1},
    "reference model synced": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "truncated completions masked": {"mask_truncated_completions": True},
    "off-policy sequence mask": {"off_policy_mask_threshold": 0.05},
    "high-entropy tokens": {"top_entropy_quantile": 0.5},
    "entropy bonus": {"entropy_coef": 0.01},
    "two-sided clipping": {"delta": 1.5},
    "batch-scaled rewards": {"scale_rewards": "batch"},
    "padding to a multiple": {"pad_to_multiple_of": 4},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("option", OPTIONS)
def test_trains_with_options_of_trl(make, mode, option):
    idle = mode == "reinforce" and "delta" in OPTIONS[option]  # nothing is clipped
    with pytest.warns(SettingWarning, match="`delta` is set to 1.5") if idle else nullcontext():
        trainer = make(**MODES[mode], **OPTIONS[option])
    assert_trains(trainer)


@pytest.mark.parametrize("mode", ["decoupled", "ppo_clip"])
def test_trains_with_sequence_level_ratios(make, mode):
    fields = {**MODES[mode], "rollout_is": "sequence"}
    assert_trains(make(**fields, importance_sampling_level="sequence", loss_type="grpo"))


def test_gspo_with_auto_gives_a_completion_the_mean_of_the_factors_of_its_tokens(make):
    trainer = make(rollout_correction="auto", importance_sampling_level="sequence", loss_type="grpo")
    seen = []
    enter_loss = trainer._enter_loss

    def spy(inputs, logps, anchor, coefficients):
        before = inputs["advantages"]
        found = enter_loss(inputs, logps, anchor, coefficients)
        seen.append((before, coefficients, trainer._loss_mask(inputs), inputs["advantages"]))
        return found

    trainer._enter_loss = spy
    trainer.train()
    assert any((factors[mask == 1] != 1).any() for _, factors, mask, _ in seen)
    for advantages, factors, mask, entered in seen:
        means = torch.stack([row[kept == 1].mean() for row, kept in zip(factors, mask, strict=True)])
        torch.testing.assert_close(entered, (advantages * means)[:, None])


@pytest.mark.parametrize("mode", ["decoupled", "ppo_clip"])
@pytest.mark.parametrize(
    "loss",
    [
        {"loss_type": "grpo", "top_entropy_quantile": 0.5},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "cispo", "epsilon_high": 5.0, "top_entropy_quantile": 0.5},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*act.* on single tokens")
def test_with_ratios_of_completions_each_token_of_the_loss_has_its_own_factor(make, tiny_model_path, mode, loss):
    """Also where only some tokens are in the loss, and with `cispo`, in which each has a gradient of its own."""
    correction = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": [0.8, 1.25]}
    sampler = StaleSampler(tiny_model_path, min_length=4)
    fields = {"bypass_mode": mode == "ppo_clip", "rollout_clip_ratio_c": None, "importance_sampling_level": "sequence"}
    trainer = make(sampler=sampler, **correction, **fields, **loss)
    batch, in_loss, select = micro_batches(trainer)[0], [], trainer.get_high_entropy_mask

    def selecting(*args):
        in_loss.append(select(*args))
        return in_loss[-1]

    trainer.get_high_entropy_mask = selecting
    found = gradients(trainer, batch)
    mask, logps = batch["completion_mask"], policy_logps(trainer.model, batch)
    d = torch.where(mask.bool(), logps.detach() - batch[ROLLOUT_LOGPS], 0.0)
    keep = (d.exp() >= 0.8) & (d.exp() <= 1.25)
    assert 0 < (keep * mask).sum() < mask.sum()
    factors, anchor = keep * (d.exp().clamp(max=2.0) if mode == "decoupled" else 1.0), logps.detach()
    if mode == "ppo_clip":  # a rejected token does not move the ratio of its completion
        anchor = torch.where(keep, batch[ROLLOUT_LOGPS], anchor)
    ratio = (((logps - anchor) * mask).sum(1) / mask.sum(1)).exp()[:, None]
    advantages = batch["advantages"][:, None]
    per_token = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    if loss["loss_type"] == "cispo":
        per_token = -ratio.detach().clamp(max=5.0) * advantages * logps
    per_token = per_token * factors * (in_loss[0] if in_loss else 1.0)
    expected = reduce(per_token, batch, trainer, loss["loss_type"])
    assert_gradients_equal(found, backward(trainer.model, expected))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rollout_is": "token"}, "`rollout_is='token'` act"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": 1.0, "rollout_is": None}, "`token_k2` act"),
    ],
)
def test_single_tokens_in_a_ratio_of_the_completion_are_warned_about(tmp_path, fields, named):
    common = {"use_cpu": True, "bf16": False, "importance_sampling_level": "sequence"}
    with pytest.warns(UserWarning, match=named):
        RolloutCorrectedGRPOConfig(str(tmp_path), **common, **fields)


def test_a_rejected_token_leaves_the_ratio_of_its_completion_in_bypass_mode(make):
    trainer = make(
        bypass_mode=True, rollout_is=None, rollout_rs="seq_max_k1", rollout_rs_threshold=[1e-9, 1e9], loss_type="grpo",
        importance_sampling_level="sequence", rollout_clip_ratio_c=None,
    )  # fmt: skip
    batch = micro_batches(trainer)[0]
    batch[ROLLOUT_LOGPS] = trainer._get_per_token_logps_and_entropies(
        trainer.model, torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1), batch["completion_ids"].size(1),
    )[0].detach()  # fmt: skip
    batch["advantages"] = -torch.ones_like(batch["advantages"])
    row = int((batch["completion_mask"].sum(1) > 1).nonzero()[0])
    on_policy = trainer.compute_loss(trainer.model, batch).item()
    batch[ROLLOUT_LOGPS][row, 0] -= 18.0  # over the eight tokens of the longest completion, still a ratio of 9
    kept = trainer.compute_loss(trainer.model, batch).item()
    assert kept > 2 * on_policy
    trainer.args.rollout_rs, trainer.args.rollout_rs_threshold = ["token_k1"], [[0.5, 2.0]]
    trainer._settings = trainer.args.settings
    trainer._observer.windows["train"].sums.clear()  # those of other criteria do not add to them
    found = trainer.compute_loss(trainer.model, batch).item()
    assert found < on_policy  # the token adds nothing, and the ratio of the others stays 1


def test_a_saturated_ratio_shows_in_the_effective_learning_rate(make):
    trainer = make(rollout_correction="bypass_ppo_clip")
    batch = micro_batches(trainer)[0]
    batch[ROLLOUT_LOGPS] = batch[ROLLOUT_LOGPS] - 100.0
    trainer.compute_loss(trainer.model, batch)
    assert logged_now(trainer, "effective_lr") == 0.0


def test_messages_about_the_run_come_once_and_only_where_they_are_true(make, tiny_model_path, caplog):
    def broken(output: dict):
        output["logprobs"][0][0] = None

    make(sampler=BrokenSampler(tiny_model_path, broken), max_steps=3, rollout_monitor="warn").train()
    assert len([text for text in messages(caplog) if "without a finite" in text]) == 1
    # nothing is rejected from a loss that is only measured
    rejecting = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.000001, "rollout_monitor": "warn"}
    caplog.clear()
    make(rollout_metrics_only=True, **rejecting).train()
    assert not any("All tokens were rejected" in text for text in messages(caplog))
    rejected = [text for text in messages(caplog) if "is rejected" in text]
    assert rejected
    assert all("If the correction were applied: " in text for text in rejected)


def test_cispo_must_not_cap_a_ratio_of_one(tmp_path):
    fields = {"use_cpu": True, "bf16": False, "loss_type": "cispo", "rollout_correction": "bypass_pg_is"}
    with pytest.raises(
        ValueError, match=r"`epsilon_high` is 0.2, which with `loss_type='cispo'` .*Set `epsilon_high` to 1"
    ):
        RolloutCorrectedGRPOConfig(str(tmp_path), **fields)
    RolloutCorrectedGRPOConfig(str(tmp_path), **fields, epsilon_high=5.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("schedule", ["aligned", "two iterations", "several steps per generation"])
def test_trains_a_lora_adapter(make, tiny_model_path, mode, beta, schedule):
    trainer = make(**MODES[mode], beta=beta, schedule=schedule, extra={"peft_config": LORA})
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path).state_dict()
    assert_trains(trainer)
    merged = trainer.model.merge_and_unload().state_dict()
    assert not torch.equal(
        merged["model.layers.0.self_attn.q_proj.weight"], base["model.layers.0.self_attn.q_proj.weight"]
    )
    assert torch.equal(merged["lm_head.weight"], base["lm_head.weight"])


@pytest.mark.seam
@pytest.mark.parametrize("mode", MODES)
def test_the_reference_pass_is_not_mistaken_for_the_old_pass(make, mode):
    # With PEFT both run on the same module, so only the order of the calls tells them apart
    trainer = make(**MODES[mode], beta=0.1, schedule="two iterations", extra={"peft_config": LORA})
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            if "lora_B" in name:
                p.normal_()  # the policy is not its reference any more
    batch = micro_batches(trainer)[0]
    with trainer.model.disable_adapter():
        reference = policy_logps(trainer.model, batch).detach()
    mask = batch["completion_mask"].bool()
    torch.testing.assert_close(batch["ref_per_token_logps"][mask], reference[mask], rtol=1e-4, atol=1e-4)
    assert (policy_logps(trainer.model, batch).detach()[mask] - reference[mask]).abs().max() > 0.1


def test_tool_tokens_are_out_of_weights_rejection_and_metrics(make, tiny_model_path):
    def with_tool_tokens(output):
        output["env_mask"] = [[i % 3 != 1 for i in range(len(ids))] for ids in output["completion_ids"]]
        output["env_mask"] = [[int(x) for x in mask] for mask in output["env_mask"]]
        for sequence, mask in zip(output["logprobs"], output["env_mask"], strict=True):
            sequence[:] = [x if m else 0.0 for x, m in zip(sequence, mask, strict=True)]

    trainer = make(
        sampler=BrokenSampler(tiny_model_path, with_tool_tokens, min_length=4),
        rollout_is="sequence", rollout_rs="seq_max_k2", rollout_rs_threshold=2.0,
    )  # fmt: skip
    batch = micro_batches(trainer)[0]
    assert (batch["tool_mask"] == 0).any()
    with corrected_batches(trainer) as coefficients:
        gradients(trainer, batch)
    assert (coefficients[0][batch["tool_mask"] == 0] == 0).all()
    assert (coefficients[0] > 0).any()
    assert logged_now(trainer, "log_ratio_max") < 2.0  # a tool token would show its own negative log-probability
    assert_trains(trainer)


def test_metrics_of_an_interrupted_step_do_not_enter_the_next_training(make, tiny_model_path):
    """As after Ctrl-C in a notebook. Only the first training sees a gap."""
    sampler = StaleSampler(tiny_model_path, noise=0.5)
    fields = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 2, "learning_rate": 0.0}
    trainer = make(sampler=sampler, extra={"callbacks": [Interruption()]}, **fields)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    sampler.noise = 0.0
    trainer.train()
    assert len(logged(trainer, "k3_kl")) == 2
    assert max(logged(trainer, "k3_kl")) < 1e-6


@pytest.mark.parametrize("fields", [{}, {"num_iterations": 2}, {"steps_per_generation": 8}], ids=str)
def test_an_interrupted_trainer_resumes_as_a_new_one_does(make, tmp_path, fields):
    """As after Ctrl-C in a notebook, with a part of a generation visited."""
    fields = {
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 4,
        "max_steps": 4,
        "learning_rate": 3e-3,
        **fields,
    }
    fields |= {"output_dir": tmp_path / "run", "save_strategy": "steps", "save_steps": 1}
    interrupted = make(extra={"callbacks": [Interruption()]}, **fields)
    with pytest.raises(KeyboardInterrupt):
        interrupted.train()
    found = []
    for trainer in (interrupted, make(**fields)):
        trainer.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-1"))
        found.append([(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry])
    assert len(found[0]) == 4
    assert_same_steps(*found)


class ExactSampler(StaleSampler):
    """It scores with the weights of the trainer, as a vLLM does that was just updated."""

    def __call__(self, prompts, trainer):
        self.model, trainer.rollout_step = trainer.model, trainer.state.global_step
        return super().__call__(prompts, trainer)


def test_an_update_after_an_interrupt_is_no_gap_of_the_engine(make, tiny_model_path):
    """
    A run without a correction goes on with the rest of its generation, as TRL's does, so that half of each later one is
    visited after an update. Its old policy is unknown there.
    """
    sampler = ExactSampler(tiny_model_path, noise=0.0)
    fields = {"gradient_accumulation_steps": 4, "steps_per_generation": 4, "max_steps": 4, "learning_rate": 3e-3}
    fields |= {"rollout_correction": "disabled", "extra": {"callbacks": [Interruption()]}}
    trainer = make(sampler=sampler, **fields)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert logged(trainer, "lag_max")[-3:] == [1.0, 1.0, 1.0]
    assert min(logged(trainer, "k3_kl")[-3:]) > 1e-6
    assert max(logged(trainer, "engine_k3_kl")[-3:]) < 1e-9


def test_a_run_of_trl_goes_on_from_its_checkpoint_with_the_same_losses(make, tmp_path):
    """Who changes the classes in the middle of a run loses nothing, and has metrics from there on."""
    fields = {"max_steps": 4, "seed": 1, "save_strategy": "steps", "save_steps": 2, "output_dir": tmp_path / "run"}
    uninterrupted = losses(make(GRPOTrainer, **fields))
    resumed = make(rollout_correction="trl", **fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    history = [(entry["loss"], entry["grad_norm"]) for entry in resumed.state.log_history if "loss" in entry]
    assert history == uninterrupted
    assert [entry["step"] for entry in resumed.state.log_history if "rollout_corr/k3_kl" in entry] == [3, 4]


def test_metrics_do_not_depend_on_accumulation_or_logging(make):
    # the same 16 completions, in one or four micro-batches, logged at once
    def final(**fields):
        trainer = make(learning_rate=0.0, max_steps=1, rollout_rs="token_k1", rollout_rs_threshold=1.2, **fields)
        trainer.train()
        return {k: v for k, v in trainer.state.log_history[0].items() if k.startswith("rollout_corr/")}

    one = final(per_device_train_batch_size=16, gradient_accumulation_steps=1, steps_per_generation=1)
    four = final(per_device_train_batch_size=4, gradient_accumulation_steps=4, steps_per_generation=4)
    assert_same_metrics(one, four)


def test_a_maximum_stays_a_maximum_over_the_logging_window(make):
    fields = {"learning_rate": 0.0, "max_steps": 4}
    every_step, once = make(**fields), make(logging_steps=4, **fields)
    every_step.train()
    once.train()
    assert logged(once, "log_ratio_max") == [pytest.approx(max(logged(every_step, "log_ratio_max")))]
    assert logged(once, "rollout_is_min") == [pytest.approx(min(logged(every_step, "rollout_is_min")))]


# What can go wrong ----------------------------------------------------------------------------------------------------


def break_some(output):
    for sequence in output["logprobs"][::2]:
        sequence[0] = None  # what vLLM's NaN becomes on its way through TRL


def break_all(output):
    output["logprobs"] = [[math.nan] * len(sequence) for sequence in output["logprobs"]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["drop", "neutralize"])
def test_broken_log_probabilities_are_survived_and_counted(make, tiny_model_path, mode, policy):
    trainer = make(sampler=BrokenSampler(tiny_model_path, break_some), **MODES[mode], rollout_nan_policy=policy)
    assert_trains(trainer)
    assert all(0 < value < 1 for value in logged(trainer, "nonfinite_fraction"))


@pytest.mark.parametrize("mode", MODES)
def test_broken_log_probabilities_can_stop_the_run(make, tiny_model_path, mode):
    trainer = make(sampler=BrokenSampler(tiny_model_path, break_some), **MODES[mode], rollout_nan_policy="raise")
    with pytest.raises(ValueError, match="`rollout_nan_policy` is 'raise'"):
        trainer.train()


def test_broken_log_probabilities_leave_a_measured_run_alone(make, tiny_model_path):
    sampler = BrokenSampler(tiny_model_path, break_some)
    assert losses(make(sampler=sampler, rollout_correction="disabled")) == losses(make(GRPOTrainer, sampler=sampler))


def test_trl_corrects_no_completions_of_a_rollout_function(make):
    """TRL's own correction acts with `use_vllm` alone, so that a run on the default is not corrected here."""
    trainer = make(rollout_correction="trl")
    assert not trainer.args.settings.corrects
    assert trainer.args.description == "trl (TRL's loss, unchanged): no correction."
    assert losses(trainer) == losses(make(GRPOTrainer))
    assert not logged(trainer, "rollout_is_mean")
    of_vllm = RolloutCorrectedGRPOConfig("output", use_vllm=True, use_cpu=True, bf16=False, rollout_correction="trl")
    assert of_vllm.settings.corrects


@pytest.mark.parametrize("mode", MODES)
def test_a_sampler_without_a_single_finite_log_probability(make, tiny_model_path, mode):
    trainer = make(sampler=BrokenSampler(tiny_model_path, break_all), **MODES[mode])
    assert losses(trainer) == [(0.0, 0.0)] * 3
    assert logged(trainer, "nonfinite_fraction") == [1.0] * 3
    neutral = make(
        sampler=BrokenSampler(tiny_model_path, break_all), **{**MODES[mode], "rollout_nan_policy": "neutralize"}
    )
    plain = losses(make(GRPOTrainer))
    assert_same_steps(losses(neutral)[:1], plain[:1])


def test_dropped_and_neutralised_tokens_in_the_gradient(make, tiny_model_path):
    for mode in MODES.values():
        for policy, share in (("drop", 0.0), ("neutralize", 1.0)):
            trainer = make(sampler=BrokenSampler(tiny_model_path, break_all), **mode, rollout_nan_policy=policy)
            batch = micro_batches(trainer)[0]
            found = gradients(trainer, batch)
            loss = reduce(-batch["advantages"][:, None] * policy_logps(trainer.model, batch), batch, trainer, "dapo")
            for name, gradient in backward(trainer.model, loss).items():
                torch.testing.assert_close(found[name], share * gradient, rtol=1e-4, atol=1e-5)


def test_the_wrong_configuration_class(tiny_model_path, tmp_path):
    with pytest.raises(TypeError, match="`args` must be a `RolloutCorrectedGRPOConfig`, got a `GRPOConfig`"):
        build(RolloutCorrectedGRPOTrainer, GRPOConfig, tiny_model_path, tmp_path)


def test_args_may_be_left_out(tiny_model_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_cpu = partial(RolloutCorrectedGRPOConfig, use_cpu=True, bf16=False)  # TRL's default is bf16, for a GPU
    monkeypatch.setattr(RolloutCorrectedGRPOTrainer, "_config_class", on_cpu)
    trainer = RolloutCorrectedGRPOTrainer(
        tiny_model_path, length_reward, train_dataset=prompts(), rollout_func=StaleSampler(tiny_model_path)
    )
    assert isinstance(trainer.args, RolloutCorrectedGRPOConfig)
    assert trainer.args.output_dir.endswith("-GRPO")


def test_user_logs_neither_reset_the_window_nor_wait_for_other_ranks(make):
    trainer = make()
    gradients(trainer, micro_batches(trainer)[0])
    before = window(trainer)
    trainer.accelerator.gather = None  # would raise
    trainer.log({"my_metric": 1.0})
    assert window(trainer) is before


def test_training_begins_with_a_line_about_the_correction(make, caplog):
    trainer = make(rollout_is="token", max_steps=1)
    trainer.train()
    assert told(caplog)[0] == f"Rollout correction {__version__}: {trainer.args.description}"


class FarSampler(StaleSampler):
    """It reports one token of each completion as so unlikely that its ratio overflows."""

    def __call__(self, prompts, trainer):
        result = super().__call__(prompts, trainer)
        for logprobs in result["logprobs"]:
            logprobs[0] = -200.0
        return result


def test_a_ratio_that_overflows_leaves_the_loss_finite_where_ppo_clips_around_the_sampler(make, tiny_model_path):
    trainer = make(sampler=FarSampler(tiny_model_path, min_length=4), rollout_correction="bypass_ppo_clip")
    assert all(math.isfinite(x) for step in losses(trainer) for x in step)
    assert all(p.isfinite().all() for p in trainer.model.parameters())
