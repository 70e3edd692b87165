"""Weights that are pushed and do not arrive in the sampler: found out once, and never where they do arrive."""

import re

import pytest
import torch

from tests.asynchronous import WorkerHere, build_ours
from tests.launching import HAS_ASYNCHRONOUS, ROOT
from tests.tiny import StaleSampler
from tests.training import (
    TRAINERS,
    VLLM,
    build,
    build_with_dropout,
    counting_forwards,
    losses,
    messages,
    pushing_first_weights_only,
    saying,
)
from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer
from trl_rollout_corr.trainers.run_metadata import may_round


NOT_THERE = "The sampler does not have the weights of the trainer"
MAYBE_NOT = "The sampler may not have the weights of the trainer"


@pytest.fixture
def make(tiny_model_path, tied_model_path, tmp_path, shared_engine):
    def make(kind="grpo", tied=False, **fields):
        path = tied_model_path if tied else tiny_model_path
        return build(*TRAINERS[kind], path, tmp_path, **{**VLLM, "max_steps": 8, **fields})

    return make


@pytest.mark.vllm
@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("preset", ["disabled", "decoupled_token_is", "bypass_ppo_clip"])
def test_first_weights_end_the_run(make, kind, preset):
    trainer = make(kind, rollout_correction=preset, learning_rate=1e-3)
    with pushing_first_weights_only(), pytest.raises(RuntimeError, match=NOT_THERE) as raised:
        trainer.train()
    assert "set `trainer.rollout_step`" in str(raised.value)
    assert trainer.state.global_step < 8


@pytest.mark.vllm
def test_a_part_that_stays_behind_ends_the_run(make, monkeypatch):
    monkeypatch.setattr("trl_rollout_corr.trainers._cpu_reload.pack_tied_heads", lambda model: None)
    with pytest.raises(RuntimeError, match=NOT_THERE):
        make(tied=True, learning_rate=1e-2).train()


@pytest.mark.vllm
@pytest.mark.parametrize("schedule", ["several steps per generation", "not a multiple", "two iterations"])
def test_schedules(make, schedule):
    fields = {"schedule": schedule, "learning_rate": 1e-2, "max_steps": 16}
    make(**fields).train()  # where they arrive, nothing is said
    with pushing_first_weights_only(), pytest.raises(RuntimeError, match=NOT_THERE):
        make(**fields).train()


@pytest.mark.vllm
def test_weights_that_arrive_cost_no_forward(make):
    trainer = make(learning_rate=1e-2)
    with counting_forwards(trainer) as count:
        trainer.train()
    assert count["forwards"] == 8 * 2


@pytest.mark.vllm
def test_a_movement_that_is_too_small_says_nothing(make, caplog):
    trainer = make(tied=True, learning_rate=1e-7)
    with pushing_first_weights_only():
        trainer.train()
    assert not trainer._delivery.done
    assert not [message for message in messages(caplog) if "weights" in message]


@pytest.mark.vllm
def test_a_sampler_that_rounds_is_not_an_error(make, caplog):
    fields = {"learning_rate": 1e-3, "rollout_engine_kwargs": {"dtype": "bfloat16"}}
    with pytest.warns(UserWarning, match="computes in float32"):
        arriving, not_arriving = make(tied=True, **fields), make(tied=True, **fields)
    arriving.train()
    assert not messages(caplog)
    with (
        pushing_first_weights_only(),
        saying(caplog, f"{MAYBE_NOT}.*The trainer computes in float32 and the sampler in bf"),
    ):
        not_arriving.train()
    assert not_arriving.state.global_step == 8


@pytest.mark.vllm
def test_a_sampler_that_is_behind_and_says_so_is_believed(make, monkeypatch, caplog):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from quickstart import Lag

    trainer = make(learning_rate=1e-3, max_steps=20)
    Lag(trainer, 2)
    trainer.train()
    assert not messages(caplog)


class Announcing(StaleSampler):
    """A `rollout_func` that says that its samples are from the weights of now. They are not."""

    def __call__(self, prompts, trainer) -> dict:
        trainer.rollout_step = trainer.state.global_step
        return super().__call__(prompts, trainer)


def test_samples_of_a_function_are_not_an_error(tiny_model_path, tmp_path, caplog):
    sampler = Announcing(tiny_model_path, noise=0.0)
    trainer = RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig
    with saying(caplog, f"{MAYBE_NOT}.*Completions come from `rollout_func`"):
        build(*trainer, tiny_model_path, tmp_path, sampler=sampler, learning_rate=1e-3, max_steps=8).train()


def test_looking_does_not_touch_the_loss(tiny_model_path, tmp_path, monkeypatch):
    """Not even where each forward pass draws, in a model with dropout."""
    monkeypatch.setattr("trl_rollout_corr.trainers.delivery.MOVED", 0.0)  # every gap is looked into
    runs = []
    for looks in (True, False):
        trainer = build_with_dropout(tiny_model_path, tmp_path, learning_rate=1e-2, max_steps=8)
        trainer.rollout_func = Announcing(tiny_model_path, noise=0.0)
        trainer._delivery.done = not looks
        with counting_forwards(trainer) as count:
            torch.manual_seed(0)
            runs.append((losses(trainer), count["forwards"]))
    assert runs[0][0] == runs[1][0]
    assert all(gradient > 0 for _, gradient in runs[0][0])
    assert runs[0][1] > runs[1][1]  # it did look


@pytest.mark.skipif(not HAS_ASYNCHRONOUS, reason="needs the asynchronous trainer of TRL 1.16")
@pytest.mark.parametrize("arrives", [True, False])
def test_asynchronous(tiny_model_path, tmp_path, caplog, arrives):
    class WeightTransfer:
        """Gives the sampler the weights, or nothing."""

        def init_weight_transfer(self):
            pass

        pause = resume = destroy = init_weight_transfer

        def send_weights(self, iterator):
            weights = dict(iterator)
            if arrives:
                worker.sampler.model.load_state_dict(weights)

    worker = WorkerHere(tiny_model_path, lags=(0,), noise=0.0)
    fields = {"learning_rate": 1e-3, "max_steps": 12}
    trainer = build_ours(tiny_model_path, tmp_path, worker, extra={"weight_transfer": WeightTransfer()}, **fields)
    trainer.train()
    assert any(MAYBE_NOT in message for message in messages(caplog)) != arrives


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"sampler_dtype": "bfloat16"}, None),
        ({"sampler_dtype": "bfloat16", "in_part": True}, "Both compute in bfloat16"),
        ({"trainer_dtype": "float32", "sampler_dtype": "float32", "in_part": True}, None),
        ({"sampler_dtype": "float32"}, "The trainer computes in bfloat16 and the sampler in float32"),
        ({}, "the sampler in an unknown type"),
        ({"sampler_dtype": "bfloat16", "adapter": "LORA"}, "The adapter is merged"),
        ({"sampler_dtype": "bfloat16", "quantization": "fp8"}, r"quantised \(fp8\)"),
    ],
)
def test_why_a_sampler_may_look_behind(facts, reason):
    found = may_round({"trainer_dtype": "bfloat16", "adapter": "none", **facts}, facts.get("in_part", False))
    assert found is None if reason is None else re.search(reason, found)
