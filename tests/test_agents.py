"""Agents on a real vLLM: tools, environments, and a rollout function of several turns."""

import pytest
import torch

from tests.dumps import read_dump
from tests.tiny import build_tiny_tokenizer, conversations, prompts, with_tools
from tests.training import (
    VLLM,
    assert_gradients_equal,
    backward,
    build,
    freeze_sampler,
    gradients,
    logged,
    losses,
    micro_batches,
    policy_logps,
    window,
)
from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer
from trl_rollout_corr.trainers.batch import FIRST_COEFFICIENTS, ROLLOUT_LOGPS


pytestmark = pytest.mark.vllm


def look(place: str) -> str:
    """
    Look at a place.

    Args:
        place: Letter of the place.

    Returns:
        What is there.
    """
    return f"{ord(place) - ord('a')} 7"


class Room:
    """An environment whose reward is the number of places that were looked at."""

    def reset(self, **kwargs) -> str:
        self.seen = 0
        return "?"

    def look(self, place: str) -> str:
        """
        Look at a place.

        Args:
            place: Letter of the place.

        Returns:
            What is there.
        """
        self.seen += 1
        return look(place)

    def get_reward(self) -> float:
        return self.seen / 4


class Cave(Room):
    """Another one, in which there is nothing."""


def calls(completions, **kwargs) -> list[float]:
    """Reward: messages of the conversation."""
    return [len(completion) / 4 for completion in completions]


def two_turns(prompts, trainer) -> dict:
    """Rollout function: a turn, an answer of three tokens, and another turn."""
    tokenizer = trainer.processing_class
    answer = tokenizer("> 7").input_ids
    prompt_ids, generate = [tokenizer(prompt).input_ids for prompt in prompts], trainer.vllm_generation.generate
    _, first, of_first, *_ = generate(prompt_ids, None, 1)
    histories = [p + c + answer for p, c in zip(prompt_ids, first, strict=True)]
    _, second, of_second, *_ = generate(histories, None, 1)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [a + answer + b for a, b in zip(first, second, strict=True)],
        "logprobs": [
            [x[0] for x in a] + [0.0] * 3 + [x[0] for x in b] for a, b in zip(of_first, of_second, strict=True)
        ],
        "env_mask": [[1] * len(a) + [0] * 3 + [1] * len(b) for a, b in zip(first, second, strict=True)],
    }


SOURCES = {
    "tools": {"tools": [look], "train_dataset": conversations(64), "reward_funcs": calls},
    "environment": {"environment_factory": Room, "train_dataset": conversations(64), "reward_funcs": None},
    "environments": {
        "environment_factory": {"room": Room, "cave": Cave},
        "train_dataset": conversations(64, environment="cave"),
        "reward_funcs": None,
    },
    "rollout function": {"rollout_func": two_turns, "train_dataset": prompts(64)},
}


@pytest.fixture
def make(tiny_model_path, tmp_path, shared_engine):
    def make(source="tools", spread=0.15, extra=None, **fields):
        tokenizer = with_tools(build_tiny_tokenizer(), "look", "place")
        extra = {"processing_class": tokenizer, **SOURCES[source], **(extra or {})}
        more = {"max_completion_length": 24, "max_tool_calling_iterations": 3, "vllm_max_model_length": 128, **fields}
        trainer = RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig
        trainer = build(*trainer, tiny_model_path, tmp_path, extra=extra, **{**VLLM, **more})
        if spread:
            freeze_sampler(trainer, spread)
        return trainer

    return make


MODES = {
    "decoupled": {"rollout_correction": "decoupled_token_is", "rollout_rs": "token_k1", "rollout_rs_threshold": 1.3},
    "ppo_clip": {"rollout_correction": "bypass_ppo_clip_geo_rs", "rollout_rs_threshold": [0.9, 1.1]},
    "reinforce": {"rollout_correction": "bypass_pg_is"},
    "metrics only": {"rollout_metrics_only": True},
}


@pytest.mark.parametrize(("source", "mode"), [*zip(SOURCES, MODES, strict=True)])
def test_agents_train(make, source, mode):
    trainer = make(source, **MODES[mode])
    steps = losses(trainer)
    assert len(steps) == 3
    assert any(gradient > 0 for _, gradient in steps)
    assert all(k3 > 0 for k3 in logged(trainer, "k3_kl"))


@pytest.mark.parametrize("source", ["tools", "rollout function"])
def test_a_sampler_in_step_agrees_in_every_turn(make, source):
    """A turn that was scored behind other tokens than it was sampled behind would have another log-probability."""
    trainer = make(source, spread=None, learning_rate=1e-2)
    losses(trainer)
    assert max(map(abs, logged(trainer, "log_ratio_max") + logged(trainer, "log_ratio_min"))) < 1e-4


@pytest.mark.parametrize("method", ["reset", "get_reward"])
def test_an_environment_that_raises_is_named_and_nothing_is_lost(make, tmp_path, method):
    class Fragile(Room):
        pass

    def fail(self, **kwargs):
        if trainer.state.global_step == 1 and self is trainer.environments[5]:
            raise ConnectionError("the server is gone")
        return getattr(Room, method)(self, **kwargs)

    trainer = make("environment", rollout_dump_dir=str(tmp_path / "dump"), extra={"environment_factory": Fragile})
    setattr(Fragile, method, fail)
    with pytest.raises(ConnectionError, match="the server is gone") as raised:
        trainer.train()
    assert "environment `Fragile` of completion 5 of this rank, after optimizer step 1" in raised.value.__notes__[0]
    assert {row["step"] for row in read_dump(tmp_path / "dump").rows} == {1}
    setattr(Fragile, method, getattr(Room, method))
    trainer.args.rollout_dump_dir = None
    assert len(losses(trainer)) == 3


def turns_of_loop(mask: list[int]) -> list[list[int]]:
    """Indices of the tokens of each turn: runs of tokens of the policy."""
    turns = []
    for t, model in enumerate(mask):
        if model and (t == 0 or not mask[t - 1]):
            turns.append([])
        if model:
            turns[-1].append(t)
    return turns


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_a_loss_without_the_tokens_of_tools(make, mode):
    trainer = make(**MODES[mode], loss_type="grpo")
    batch = micro_batches(trainer)[0]
    found = gradients(trainer, batch)
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert (batch["tool_mask"] == 0).any()
    logps = policy_logps(trainer.model, batch)
    d = torch.where(mask, logps.detach() - batch[ROLLOUT_LOGPS], 0.0)
    advantages, total = batch["advantages"][:, None], d.sum(1, keepdim=True)
    # weights on the gradient of the log-likelihood, at the first visit of a batch
    if mode == "decoupled":
        weights = d.exp().clamp(max=2.0) * (d.abs() <= torch.tensor(1.3).log())
    elif mode == "ppo_clip":
        ratio, mean = d.exp(), (total / mask.sum(1, keepdim=True)).exp()
        clipped = torch.where(advantages > 0, ratio > 1.2, (ratio < 0.8) | (ratio > 3.0))
        weights = ratio * ~clipped * ((mean >= 0.9) & (mean <= 1.1))
    else:
        weights = total.exp().clamp(max=2.0) if mode == "reinforce" else torch.ones_like(d)
    weights = weights * mask
    assert mode == "metrics only" or (weights * mask).std() > 0
    per_token = -weights * advantages * logps
    expected = (per_token.sum(1) / mask.sum(1).clamp(min=1)).mean() / trainer.args.gradient_accumulation_steps
    assert_gradients_equal(found, backward(trainer.model, expected))
    sums = window(trainer)
    assert sums["tokens"] == mask.sum()
    assert sums["d"] == pytest.approx(d.sum().item(), rel=1e-3)
    if mode == "decoupled":
        assert (batch[FIRST_COEFFICIENTS][~mask] == 0).all()
