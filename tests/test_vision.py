"""Vision-language models: the real trainers, on a real vLLM, with images and without."""

import warnings

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.launching import HAS_ASYNCHRONOUS
from tests.training import (
    TRAINERS,
    VLLM,
    assert_gradients_equal,
    assert_in_step,
    assert_trains,
    backward,
    build,
    freeze_sampler,
    gradients,
    logged,
    losses,
    micro_batches,
    push_by_reload,
)
from tests.vision import (
    TOKENS_OF_AN_IMAGE,
    build_vision_model,
    expand_once,
    length_reward,
    questions,
    random_sampler,
    vision_logps,
)
from trl_rollout_corr import compute_rollout_correction
from trl_rollout_corr.pushes.to_vllm import forget_images
from trl_rollout_corr.tools.dump.reading import open_dump
from trl_rollout_corr.trainers.keys import ROLLOUT_LOGPS


pytest.importorskip("PIL")


@pytest.fixture(scope="module")
def vision_path(imported_trl, tmp_path_factory) -> str:
    return build_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def make(vision_path, tmp_path):
    """Build a trainer; by default our GRPO with a `rollout_func`."""

    def make(trainer="grpo", images=True, sampler=random_sampler, **fields):
        classes = TRAINERS[trainer] if isinstance(trainer, str) else trainer
        extra = {"reward_funcs": length_reward, "train_dataset": questions(images=images)}
        return build(*classes, vision_path, tmp_path, sampler=sampler, extra=extra, **fields)

    return make


@pytest.fixture
def make_vllm(make, shared_engine):
    """Build a trainer with a colocated vLLM, which reads the trainer's prompts unless it expands them `twice`."""

    def make_vllm(trainer="grpo", twice=False, **fields):
        built = make(trainer, sampler=None, **{**VLLM, "learning_rate": 2e-3, **fields})
        if not twice:
            expand_once(built)
        return built

    return make_vllm


# A rollout function ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", [True, False])
def test_metrics_only_is_bit_for_bit_trl(make, images):
    plain = losses(make((GRPOTrainer, GRPOConfig), images))
    measured = make(images=images, rollout_metrics_only=True, rollout_diagnose=True)
    assert losses(measured) == plain
    assert all(value > 0 for value in logged(measured, "k3_kl"))
    assert losses(make(images=images, rollout_correction="disabled")) == plain


@pytest.mark.parametrize("images", [True, False])
@pytest.mark.parametrize("preset", ["auto", "bypass_pg_is"])
def test_gradients_are_those_of_weighted_log_probabilities(make, images, preset):
    trainer = make(images=images, rollout_correction=preset, loss_type="grpo")
    batch = micro_batches(trainer)[0]
    assert ("pixel_values" in batch) == images
    found = gradients(trainer, batch)
    logps, mask = vision_logps(trainer.model, batch), batch["completion_mask"]
    advantages, rollout = batch["advantages"], batch[ROLLOUT_LOGPS]
    correction = compute_rollout_correction(logps.detach(), rollout, mask, trainer.args, advantages=advantages)
    assert correction.coefficients[mask.bool()].unique().numel() > 2
    per_token = -correction.coefficients * advantages[:, None] * logps * mask
    loss = (per_token.sum(1) / mask.sum(1)).mean() / trainer.args.gradient_accumulation_steps
    assert_gradients_equal(found, backward(trainer.model, loss))


def test_a_dense_model_has_no_routes_to_replay(make):
    with pytest.raises(ValueError, match="`rollout_routing` is 'replay', but the model contains no router"):
        make(rollout_routing="replay")


# A real vLLM ----------------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
@pytest.mark.parametrize("preset", ["auto", "bypass_pg_is"])
def test_a_synced_sampler_sees_the_images_of_the_trainer(make_vllm, tmp_path, trainer, preset):
    trainer = make_vllm(trainer, rollout_correction=preset, rollout_dump_dir=str(tmp_path / "dump"))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*of a prompt with an image")
        trainer.train()
    moved = [name for name, p in trainer.model.named_parameters() if (p - before[name]).abs().max() > 1e-3]
    assert any("vision_model" in name for name in moved)  # else the features of an image stay those of its first use
    assert_in_step(trainer)
    tokens = trainer.processing_class.tokenizer.convert_tokens_to_ids(TOKENS_OF_AN_IMAGE)
    dumped = open_dump(tmp_path / "dump").sequences
    assert all(ids[:7].tolist() == tokens for ids in dumped.prompts)


@pytest.mark.vllm
@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_prompts_that_vllm_expands_again_are_named(make_vllm, trainer):
    trainer = make_vllm(trainer, twice=True, max_steps=1)
    with pytest.warns(UserWarning, match=r"has read \d+ tokens of a prompt with an image, and the trainer \d+"):
        trainer.train()
    assert logged(trainer, "k3_kl")[0] > 1e-3  # and rounding is below 1e-6


@pytest.mark.vllm
@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_prompts_without_images_are_those_of_the_trainer(make_vllm, trainer):
    trainer = make_vllm(trainer, images=False, twice=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*of a prompt with an image")
        trainer.train()
    assert_in_step(trainer)


@pytest.mark.vllm
def test_metrics_only_is_bit_for_bit_trl_in_rloo(make_vllm):
    def frozen(trainer, **fields):
        trainer = make_vllm(trainer, learning_rate=3e-4, max_steps=2, **fields)
        push_by_reload(trainer.vllm_generation)  # TRL's own push of weights fails on a CPU
        freeze_sampler(trainer, 0.05)
        forget_images(trainer.vllm_generation)
        return trainer

    plain = losses(frozen((RLOOTrainer, RLOOConfig)))
    measured = frozen("rloo", rollout_metrics_only=True)
    assert losses(measured) == plain
    assert all(value > 1e-4 for value in logged(measured, "k3_kl"))


@pytest.mark.vllm
@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_kept_tokens_are_replayed(make_vllm, trainer):
    trainer = make_vllm(trainer, rollout_support="replay", top_p=0.7, rollout_is="token", max_steps=2)
    trainer.train()
    assert max(logged(trainer, "k3_kl")) < 1e-6
    assert logged(trainer, "nonfinite_fraction")[0] == 0.0


# Asynchronous ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_ASYNCHRONOUS, reason="TRL's asynchronous trainer does not import")
@pytest.mark.parametrize("fields", [{}, {"rollout_correction": "bypass_pg_is"}, {"rollout_metrics_only": True}])
def test_the_asynchronous_trainer_trains_on_text_alone(vision_path, tiny_model_path, tmp_path, fields):
    from tests.asynchronous import WorkerHere, build_ours

    dump = {"rollout_dump_dir": str(tmp_path / "dump")}
    trainer = build_ours(vision_path, tmp_path, WorkerHere(tiny_model_path), **dump, **fields)
    frozen = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "vision_model" in name}
    assert_trains(trainer)
    assert all(torch.equal(p, frozen[name]) for name, p in trainer.model.named_parameters() if name in frozen)
    assert len(open_dump(tmp_path / "dump").sequences.prompts) > 0
