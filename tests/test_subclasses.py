"""Use around the trainers: subclasses, copied batches, other models in the loss, scoring of their own."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer

from tests.launching import ROOT
from tests.tiny import StaleSampler, length_reward
from tests.training import TRAINERS, VLLM, build, freeze_sampler, logged, losses, plain_model
from trl_rollout_corr import RolloutCorrectedGRPOTrainer, RolloutCorrectedRLOOTrainer


@pytest.fixture
def make(tiny_model_path, tmp_path, request):
    """Build a trainer of a class, on completions of a sampler that is not the policy."""

    def make(trainer_class=RolloutCorrectedGRPOTrainer, **fields):
        kind = "rloo" if issubclass(trainer_class, RolloutCorrectedRLOOTrainer) else "grpo"
        fields = {"rollout_rs": "token_k1", "rollout_rs_threshold": 3.0, **fields}
        if kind == "grpo":
            fields["sampler"] = StaleSampler(tiny_model_path)
        else:
            request.getfixturevalue("shared_engine")
            fields = {**VLLM, **fields}
        trainer = build(trainer_class, TRAINERS[kind][1], tiny_model_path, tmp_path, **fields)
        if kind == "rloo":
            freeze_sampler(trainer, 0.05)
        return trainer

    return make


both = pytest.mark.parametrize(
    "trainer_class",
    [RolloutCorrectedGRPOTrainer, pytest.param(RolloutCorrectedRLOOTrainer, marks=pytest.mark.vllm)],
)


# A batch that is copied -----------------------------------------------------------------------------------------------


def copying_in_the_loss(trainer_class, copy_of):
    class Copying(trainer_class):
        def compute_loss(self, model, inputs, *args, **kwargs):
            return super().compute_loss(model, copy_of(inputs), *args, **kwargs)

    return Copying


def copying_when_prepared(trainer_class, copy_of):
    class Copying(trainer_class):
        def _prepare_inputs(self, generation_batch):
            return copy_of(super()._prepare_inputs(generation_batch))

    return Copying


def tensors_copied(inputs):
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}


@both
@pytest.mark.parametrize("copying", [copying_in_the_loss, copying_when_prepared])
@pytest.mark.parametrize("fields", [{}, {"rollout_correction": "bypass_ppo_clip"}, {"rollout_is": "sequence"}])
def test_a_copied_batch_keeps_its_old_policy(make, trainer_class, copying, fields):
    fields = {"schedule": "two iterations", "learning_rate": 3e-3, "max_steps": 4, **fields}
    plain = make(trainer_class, **fields)
    expected = losses(plain)
    assert any(entry.get("clip_ratio/region_mean", 0) > 0 for entry in plain.state.log_history)  # revisits are clipped
    assert losses(make(copying(trainer_class, dict), **fields)) == expected


@pytest.mark.parametrize("copying", [copying_in_the_loss, copying_when_prepared])
def test_tensors_that_are_copied_before_each_visit_are_an_error(make, copying):
    trainer = make(copying(RolloutCorrectedGRPOTrainer, tensors_copied), schedule="two iterations", max_steps=4)
    with pytest.raises(
        RuntimeError, match=r"log-probabilities of its first visit are lost.*copy the dictionary \(`dict\(inputs\)`\)"
    ):
        trainer.train()
    assert trainer.state.global_step == 1  # the first visits were fine


def test_tensors_may_be_copied_where_each_batch_is_visited_once(make):
    expected = losses(make())
    assert losses(make(copying_in_the_loss(RolloutCorrectedGRPOTrainer, tensors_copied))) == expected


def test_tensors_may_be_copied_between_two_iterations(make):
    class Reordering(RolloutCorrectedGRPOTrainer):
        """Copies what the first iteration has filled in."""

        def _prepare_inputs(self, generation_batch):
            inputs = super()._prepare_inputs(generation_batch)
            visits = self._step % (self.args.steps_per_generation * self.num_iterations)
            return tensors_copied(inputs) if visits >= self.args.steps_per_generation else inputs

    fields = {"schedule": "two iterations", "learning_rate": 3e-3, "max_steps": 4}
    assert losses(make(Reordering, **fields)) == losses(make(**fields))


# Other models in the loss ---------------------------------------------------------------------------------------------


def with_a_teacher(trainer_class, *, gradient: bool):
    class WithTeacher(trainer_class):
        """Scores another model before the policy."""

        def _compute_loss(self, model, inputs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            with torch.set_grad_enabled(gradient):
                self._get_per_token_logps_and_entropies(self.ref_model, ids, mask, inputs["completion_ids"].size(1))
            return super()._compute_loss(model, inputs)

    return WithTeacher


@both
@pytest.mark.parametrize("gradient", [False, True])
def test_the_correction_attaches_to_the_policy_and_not_to_a_teacher(make, trainer_class, gradient):
    expected = losses(make(trainer_class, beta=0.1))
    trainer = make(with_a_teacher(trainer_class, gradient=gradient), beta=0.1)
    trainer.ref_model.requires_grad_(gradient)
    assert losses(trainer) == expected


def scoring_the_policy(gradient: bool):
    class Probing(RolloutCorrectedGRPOTrainer):
        """Runs the policy itself a second time, before the loss does."""

        def _compute_loss(self, model, inputs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            with torch.set_grad_enabled(gradient):
                self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))
            return super()._compute_loss(model, inputs)

    return Probing


def test_the_policy_may_be_probed_without_gradient(make):
    assert losses(make(scoring_the_policy(gradient=False))) == losses(make())


def test_a_second_forward_pass_of_the_policy_is_an_error(make):
    with pytest.raises(RuntimeError, match=r"The loss ran the policy twice.*torch\.no_grad"):
        make(scoring_the_policy(gradient=True)).train()


@pytest.mark.parametrize("read", [lambda inputs: inputs["advantages"], lambda inputs: inputs.get("advantages")])
def test_reading_the_advantages_too_early_is_explained(make, read):
    class Early(RolloutCorrectedGRPOTrainer):
        def _compute_loss(self, model, inputs):
            read(inputs)
            return super()._compute_loss(model, inputs)

    with pytest.raises(RuntimeError, match="`advantages` are read before the forward pass of the policy"):
        make(Early).train()


# Losses that are not known --------------------------------------------------------------------------------------------


def test_a_loss_below_the_mixin_is_refused(make):
    class CorrectedGMPO(RolloutCorrectedGRPOTrainer, GMPOTrainer):
        pass

    with pytest.raises(TypeError, match=r"`CorrectedGMPO` inherits `_compute_loss` from `GMPOTrainer`"):
        make(CorrectedGMPO)


def test_a_base_that_leaves_the_loss_alone_is_welcome(make):
    class Base(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            self.generated = getattr(self, "generated", 0) + 1
            return super()._generate_and_score_completions(inputs)

    class CorrectedBatch(RolloutCorrectedGRPOTrainer, Base):
        pass

    trainer = make(CorrectedBatch)
    assert losses(trainer) == losses(make())
    assert trainer.generated == 3


# Scoring by the user --------------------------------------------------------------------------------------------------


def scored_by(trainer_of: list):
    """A reward function that asks the trainer for log-probabilities, and what it was told."""
    told = []

    def reward(completions, prompts, **kwargs):
        trainer = trainer_of[0]
        ids = torch.full((2, 6), 5)
        with torch.no_grad():
            logps, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 3)
        told.append(logps)
        return length_reward(completions)

    return reward, told


@both
@pytest.mark.parametrize("schedule", ["aligned", "not a multiple"])
def test_a_reward_function_may_score_with_the_trainer(make, tiny_model_path, trainer_class, schedule):
    trainer_of = []
    reward, told = scored_by(trainer_of)
    trainer = make(trainer_class, schedule=schedule, extra={"reward_funcs": reward})
    trainer_of.append(trainer)
    before = plain_model(tiny_model_path, copy.deepcopy(trainer.model.state_dict()))
    assert losses(trainer) == losses(make(trainer_class, schedule=schedule))
    logits = before(torch.full((1, 6), 5)).logits[0, 2:5].log_softmax(-1)[:, 5]
    torch.testing.assert_close(told[0], logits.detach().expand(2, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("schedule", ["aligned", "not a multiple"])
def test_a_rollout_function_may_score_with_the_trainer(make, tiny_model_path, schedule):
    inner, told = StaleSampler(tiny_model_path), []

    def sampler(prompts, trainer):
        ids = torch.full((2, 6), 5)
        with torch.no_grad():
            told.append(trainer._get_per_token_logps_and_entropies(trainer.model, ids, torch.ones_like(ids), 3)[0])
        return inner(prompts, trainer)

    trainer = make(schedule=schedule)
    trainer.rollout_func = sampler
    assert losses(trainer) == losses(make(schedule=schedule))
    assert all((logps < 0).all() for logps in told)


def generating_twice(base):
    class Twice(base):
        """Generates again and keeps the second batch, as dynamic sampling does."""

        def _generate_and_score_completions(self, inputs):
            super()._generate_and_score_completions(inputs)
            return super()._generate_and_score_completions(inputs)

    return Twice


@pytest.mark.parametrize("schedule", ["aligned", "not a multiple"])
@pytest.mark.parametrize("above", [True, False])
def test_a_class_may_generate_twice_and_keep_the_last(make, schedule, above):
    if above:
        twice = generating_twice(RolloutCorrectedGRPOTrainer)
    else:
        base = generating_twice(GRPOTrainer)
        twice = type("Twice", (RolloutCorrectedGRPOTrainer, base), {})
    trainer = make(twice, schedule=schedule)
    assert losses(trainer) == losses(make(schedule=schedule))
    assert logged(trainer, "kl")


def test_a_batch_that_is_put_together_below_the_mixin_is_refused_by_name(make):
    class Joining(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            parts = [super(Joining, self)._generate_and_score_completions(inputs) for _ in range(2)]
            return {
                key: torch.cat([part[key] for part in parts]) if value.dim() else value
                for key, value in parts[0].items()
            }

    class CorrectedBatch(RolloutCorrectedGRPOTrainer, Joining):
        pass

    with pytest.raises(RuntimeError, match=r"`Joining\._generate_and_score_completions`"):
        make(CorrectedBatch).train()


# A trainer that was never initialised, as in TRL's own tests ------------------------------------------------------------


def bare_trainer(trainer_class, rollout_func):
    """A trainer with the attributes alone that TRL reads to call a rollout function."""
    trainer = object.__new__(trainer_class)
    trainer.accelerator = SimpleNamespace(device=torch.device("cpu"), is_main_process=True)
    trainer.model, trainer.use_vllm, trainer.rollout_func = SimpleNamespace(training=True), False, rollout_func
    return trainer


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RolloutCorrectedGRPOTrainer])
def test_a_rollout_function_without_required_keys_is_refused_by_a_bare_trainer(trainer_class):
    trainer = bare_trainer(trainer_class, lambda prompts, trainer: {"prompt_ids": [[1]], "completion_ids": [[2]]})
    with pytest.raises(ValueError, match=r"rollout_func must return keys \['logprobs'\] in its output dict"):
        trainer._generate(["prompt"])


# A criterion of one's own ----------------------------------------------------------------------------------------------


def with_criterion(trainer_class, keeps):
    class WithCriterion(trainer_class):
        def _compute_correction(self, train_logps, batch):
            correction = super()._compute_correction(train_logps, batch)
            return correction.adjusted(keep=torch.full_like(correction.keep, keeps))

    return WithCriterion


@both
def test_a_criterion_of_ones_own_acts_on_the_gradient(make, trainer_class):
    nothing = make(with_criterion(trainer_class, False))
    assert {norm for _, norm in losses(nothing)} == {0.0}
    assert set(logged(nothing, "effective_lr")) == {0.0}
    assert losses(make(with_criterion(trainer_class, True))) == losses(make(trainer_class))


@both
def test_the_loss_of_the_documents_is_corrected(make, trainer_class):
    """`loss_type` may be a name that TRL does not know, as the page says."""
    (code,) = re.findall(
        r"```python\n(import torch\n.*?class PlainPolicyGradient.*?)```",
        (ROOT / "docs/custom.md").read_text(),
        re.DOTALL,
    )
    base = trainer_class.__name__
    space: dict = {}
    exec(code.replace("RolloutCorrectedGRPOTrainer", base), space)
    own = {"loss_type": "my_loss"} if base == "RolloutCorrectedGRPOTrainer" else {}
    fields = {"rollout_rs_threshold": 1.05, "learning_rate": 1e-4, **own}
    trainer = make(space["PlainPolicyGradient"], **fields)
    corrected = losses(trainer)
    assert trainer._gradient_checked
    plain = losses(make(space["PlainPolicyGradient"], **{**fields, "rollout_rs_threshold": 1e6}))
    assert all(norm > 0 for _, norm in corrected)
    assert [norm for _, norm in corrected] != [norm for _, norm in plain]
