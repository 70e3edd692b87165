"""Completions scored once more after a push: what the two numbers show of it, in runs with a real vLLM."""

import pytest
import torch

from tests.training import (
    TRAINERS,
    VLLM,
    build_checked,
    counting_forwards,
    logged,
    losing,
    losses,
    messages,
)
from trl_rollout_corr.tools.arrival.rescore import MOST


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*changes the distribution", "ignore:The trainer computes", "ignore:Dropout"),
]


@pytest.fixture
def make(tiny_model_path, tied_model_path, tmp_path, shared_engine):
    def make(kind="grpo", tied=False, build=build_checked, **fields):
        path = tied_model_path if tied else tiny_model_path
        fields = {**VLLM, "max_steps": 9, "learning_rate": 1e-2, "lr_scheduler_type": "constant", **fields}
        trainer = build(*TRAINERS[kind], path, tmp_path, **fields)
        if trainer._pushes.checks is not None:
            trainer._pushes.checks.weights.done = True  # which would end the run first
        return trainer

    return make


def numbers(trainer) -> tuple[list[float], list[float]]:
    trainer.train()
    return logged(trainer, "fresh_k3_kl"), logged(trainer, "age_k3_kl")


@pytest.mark.vllm
@pytest.mark.parametrize("kind", TRAINERS)
def test_after_each_push_kernels_and_age_are_two_numbers(make, kind, caplog):
    fresh, age = numbers(make(kind))
    assert len(fresh) == len(age) == 4  # pushes 1, 2, 4 and 8
    assert max(fresh) < 1e-5
    assert age[0] < 1e-5  # at the first push, the sampler scores what it has just sampled
    assert min(age[1:]) > 1e-4
    assert not messages(caplog)


@pytest.mark.vllm
@pytest.mark.parametrize("lost", ["everything", "one layer", "the head", "every second push"])
def test_a_push_that_does_not_arrive_is_as_large_as_the_age_was(make, lost):
    with losing(lost):
        fresh, age = numbers(make())
    assert fresh[0] < 1e-5
    assert max(fresh) > 100 * fresh[0]
    assert max(fresh) > 0.001 * max(age)


@pytest.mark.vllm
def test_a_run_is_the_same_bit_for_bit_with_and_without_it(make):
    """And the trainer makes no forward pass more than eight at each of the four looks."""
    runs, forwards = [], []
    for monitor in ("warn", None):
        trainer = make(rollout_monitor=monitor, model_init_kwargs={"attention_dropout": 0.1})
        with counting_forwards(trainer) as count:
            torch.manual_seed(0)
            runs.append((losses(trainer), [x["completions/mean_length"] for x in trainer.state.log_history[:-1]]))
            forwards.append(count["forwards"])
    assert runs[0] == runs[1]
    assert forwards[0] - forwards[1] == 4 * MOST
