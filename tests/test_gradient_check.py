"""A correction that does not reach TRL's loss is found at the first step, and one that does is not complained about."""

import pytest
import torch
from trl import GRPOTrainer, RLOOTrainer

from tests.editing import edited
from tests.tiny import StaleSampler
from tests.training import TRAINERS, build, freeze_sampler, losses, micro_batches
from trl_rollout_corr import RolloutCorrectedGRPOTrainer


MODES = {
    "decoupled": {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": [0.8, 1.25]},
    "sequence weights": {"rollout_is": "sequence"},
    "whole batch": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "ppo_clip": {"bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": [0.7, 1.5]},
    "reinforce": {"bypass_mode": True, "rollout_loss_type": "reinforce", "rollout_is": "token"},
}
LOSSES = {
    **{name: {"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "luspo")},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "two-sided clipping": {"delta": 1.5},
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "high-entropy tokens": {"top_entropy_quantile": 0.5},
    "entropy bonus": {"entropy_coef": 0.01},
    "a reference": {"beta": 0.1},
    "no bias correction of the reference": {"beta": 0.1, "use_bias_correction_kl": False},
    "bfloat16": {"bf16": True},
}


@pytest.fixture
def make(tiny_model_path, tmp_path, request):
    def make(kind="grpo", trainer_class=None, **fields):
        ours, config_class = TRAINERS[kind]
        if kind == "grpo":
            fields["sampler"] = StaleSampler(tiny_model_path)
        else:
            request.getfixturevalue("shared_engine")
            fields = {
                "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64, "temperature": 1.0, "beta": 0.0,
                **fields,
            }  # fmt: skip
        trainer = build(trainer_class or ours, config_class, tiny_model_path, tmp_path, **fields)
        if kind == "rloo":
            freeze_sampler(trainer, 0.05)
        return trainer

    return make


def loss_of_first(trainer) -> torch.Tensor:
    return trainer.compute_loss(trainer.model, micro_batches(trainer)[0])


both = pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.vllm)])


# What arrives ---------------------------------------------------------------------------------------------------------


@pytest.mark.seam
@pytest.mark.parametrize(
    ("mode", "loss"),
    [*(("decoupled", loss) for loss in LOSSES), *((mode, "dapo") for mode in MODES if mode != "decoupled")],
)
def test_every_loss_is_seen_to_be_corrected(make, mode, loss):
    trainer = make(**MODES[mode], **LOSSES[loss])
    assert not trainer._gradient_checked
    loss_of_first(trainer)
    assert trainer._gradient_checked


@pytest.mark.parametrize("mode", ["sequence weights", "whole batch"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_ratios_of_completions_are_seen_to_be_corrected(make, mode, beta):
    trainer = make(**MODES[mode], importance_sampling_level="sequence", loss_type="grpo", beta=beta)
    loss_of_first(trainer)
    assert trainer._gradient_checked


@pytest.mark.seam
@pytest.mark.vllm
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_rloo_is_seen_to_be_corrected(make, mode, beta):
    trainer = make("rloo", **MODES[mode], beta=beta)
    batches = micro_batches(trainer)
    for batch in batches:
        trainer.compute_loss(trainer.model, batch)
    assert trainer._gradient_checked


@both
def test_looking_changes_neither_loss_nor_gradient(make, kind):
    looked, blind = make(kind, rollout_is="token"), make(kind, rollout_is="token")
    blind._gradient_checked = True
    found = []
    for trainer in (looked, blind):
        loss = loss_of_first(trainer)
        trainer.model.zero_grad()
        loss.backward()
        found.append((loss.item(), [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]))
    (one, gradients), (other, expected) = found
    assert one == other
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_a_batch_without_gradient_cannot_tell_and_the_next_one_does(make):
    trainer = make()
    batches = micro_batches(trainer)
    trainer.compute_loss(trainer.model, {**batches[0], "advantages": torch.zeros_like(batches[0]["advantages"])})
    assert not trainer._gradient_checked
    trainer.compute_loss(trainer.model, batches[1])
    assert trainer._gradient_checked


def test_evaluation_and_measuring_are_not_looked_at(make):
    trainer = make(rollout_correction="disabled")
    loss_of_first(trainer)
    trainer = make()
    batch = micro_batches(trainer)[0]
    with torch.no_grad():
        trainer.compute_loss(trainer.model, batch)
    assert not trainer._gradient_checked


# What TRL might change without a word ---------------------------------------------------------------------------------

UNCORRECTED = 'next(b["advantages"] for b in self._buffered_inputs if b["completion_ids"] is inputs["completion_ids"])'
READ, RATIO = 'advantages = inputs["advantages"]', "log_ratio = per_token_logps - old_per_token_logps"
WEIGHTED = 'mode = "train" if self.model.training else "eval"\n    if self.loss_type in ["grpo", "sapo"]'
CHANGES = {  # of the loss of GRPO: text, other text, what the error says
    "advantages from elsewhere": (READ, f"advantages = {UNCORRECTED}", "does not read `advantages`"),
    "advantages read and not used": (READ, f"{READ}; advantages = {UNCORRECTED}", "does not depend on the coefficients"),
    "advantages detached": (READ, f"{READ}.detach()", "does not depend on the coefficients"),
    "advantages averaged": (READ, f"{READ}.mean(1)", "acts on the gradient of others"),
    "advantages of the first token": (READ, f"{READ}[:, 0]", "acts on the gradient of others"),
    "the anchor renamed": ('inputs.get("old_per_token_logps")', 'inputs.get("anchor_logps")', "does not read `old_per_"),
    "log-probabilities detached": (
        RATIO, f"per_token_logps = per_token_logps.detach(); {RATIO}", "does not depend on the log-probabilities"
    ),
    "another policy gradient beside it": (
        WEIGHTED, f"per_token_loss = per_token_loss - 0.2 * {UNCORRECTED}[:, None] * per_token_logps\n    {WEIGHTED}",
        "of the gradient of some token does not follow its coefficient",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", ["decoupled", "reinforce"])
def test_a_loss_that_leaves_the_correction_out_is_an_error(make, monkeypatch, change, mode):
    old, new, message = CHANGES[change]
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", edited(GRPOTrainer._compute_loss, (old, new)))
    trainer = make(**MODES[mode])
    with pytest.raises(RuntimeError, match=rf"does not reach the loss of trl .*{message}"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('inputs["old_logps"]', "logps.detach()", "does not read `old_logps`"),
        ('advantages = inputs["advantages"]', f"advantages = {UNCORRECTED}", "does not read `advantages`"),
        ("log_ratio = logps - old_logps", "log_ratio = logps.detach() - old_logps", "does not depend on the log-prob"),
    ],
)
def test_a_loss_of_rloo_that_leaves_the_correction_out_is_an_error(make, monkeypatch, old, new, message):
    monkeypatch.setattr(RLOOTrainer, "_compute_loss", edited(RLOOTrainer._compute_loss, (old, new)))
    with pytest.raises(RuntimeError, match=rf"does not reach the loss of trl .*{message}"):
        make("rloo").train()


@pytest.mark.parametrize("detached", [False, True])
def test_a_loss_without_second_derivatives_is_judged_by_the_first(make, monkeypatch, detached):
    kernel = (
        "type('Kernel', (torch.autograd.Function,), {"
        "'forward': staticmethod(lambda context, x: (context.save_for_backward(x), x.exp())[1]), "
        "'backward': staticmethod(torch.autograd.function.once_differentiable("
        "lambda context, g: g * context.saved_tensors[0].exp()))}).apply(log_importance_weights)"
    )
    edits = [("coef_1 = torch.exp(log_importance_weights)", f"coef_1 = {kernel}")]
    edits += [(READ, f"{READ}.detach()")] if detached else []
    expected = losses(make())
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", edited(GRPOTrainer._compute_loss, *edits))
    trainer = make()
    if detached:
        with pytest.raises(RuntimeError, match="does not depend on the coefficients"):
            trainer.train()
    else:
        assert losses(trainer) == expected
        assert trainer._gradient_checked


# A loss of the user's own ---------------------------------------------------------------------------------------------


class Own(RolloutCorrectedGRPOTrainer):
    """REINFORCE on completions, with advantages that are clipped and averaged: what a user may well do."""

    detach = False

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        logps, *_ = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))
        advantages = inputs["advantages"].clamp(-1, 1).mean(1)
        if self.detach:
            advantages = advantages.detach()
        return -(advantages * (logps * inputs["completion_mask"]).sum(1)).mean()


def test_a_loss_of_ones_own_may_do_what_it_likes_with_the_coefficients(make):
    trainer = make(trainer_class=Own)
    losses(trainer)
    assert trainer._gradient_checked


def test_a_loss_of_ones_own_that_detaches_them_is_told(make):
    trainer = make(trainer_class=type("Detaching", (Own,), {"detach": True}))
    with pytest.raises(RuntimeError, match=r"If `_compute_loss` is your own, use.*without detaching them"):
        trainer.train()
