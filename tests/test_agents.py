"""Agents on a real vLLM: tools, environments, and a rollout function of several turns."""

import pytest
import torch

from tests import reference
from tests.dumps import read_dump
from tests.tiny import build_tiny_tokenizer, conversations, prompts, with_tools
from tests.training import (
    VLLM,
    assert_gradients_equal,
    backward,
    build,
    corrected_batches,
    freeze_sampler,
    gradients,
    logged,
    losses,
    micro_batches,
    policy_logps,
    window,
)
from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer
from trl_rollout_corr.trainers.keys import ROLLOUT_LOGPS


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
def test_nothing_is_lost_if_an_environment_raises(make, tmp_path, method):
    class Fragile(Room):
        pass

    def fail(self, **kwargs):
        if trainer.state.global_step == 1 and self is trainer.environments[5]:
            raise ConnectionError("the server is gone")
        return getattr(Room, method)(self, **kwargs)

    trainer = make("environment", rollout_dump_dir=str(tmp_path / "dump"), extra={"environment_factory": Fragile})
    setattr(Fragile, method, fail)
    with pytest.raises(ConnectionError, match="the server is gone"):
        trainer.train()
    assert {row["step"] for row in read_dump(tmp_path / "dump").rows} == {1}
    setattr(Fragile, method, getattr(Room, method))
    assert len(losses(make("environment", extra={"environment_factory": Fragile}))) == 3


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_a_loss_without_the_tokens_of_tools(make, mode):
    trainer = make(**MODES[mode], loss_type="grpo")
    batch = micro_batches(trainer)[0]
    with corrected_batches(trainer) as coefficients:
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
        assert (coefficients[0][~mask] == 0).all()


OF_TURNS = {
    "decoupled": {
        "rollout_correction": None, "rollout_is": "turn", "rollout_rs": "turn_mean_k1", "rollout_rs_threshold": [0.8, 1.2]
    },
    "ppo_clip": {"rollout_correction": "bypass_ppo_clip", "rollout_rs": "turn_max_k3", "rollout_rs_threshold": 0.2},
    "reinforce": {"rollout_correction": "bypass_pg_is", "rollout_is": "turn"},
}  # fmt: skip


@pytest.mark.parametrize("mode", OF_TURNS)
def test_gradients_of_turns_are_those_of_loops(make, mode):
    trainer = make("rollout function", **OF_TURNS[mode], loss_type="grpo")
    batch = micro_batches(trainer)[0]
    found = gradients(trainer, batch)
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    logps = policy_logps(trainer.model, batch)
    rows, turns, cells = [], [reference.turns_of(row) for row in mask.tolist()], mask.nonzero()
    for i in range(len(mask)):
        pairs = zip(logps[i][mask[i]].tolist(), batch[ROLLOUT_LOGPS][i][mask[i]].tolist(), strict=True)
        rows.append([*pairs])
    weights, keep = [[1.0] * len(row) for row in rows], [[True] * len(row) for row in rows]
    fields = OF_TURNS[mode]
    if "rollout_is" in fields:
        weights = reference.weights(rows, "turn", None, 2.0, turns=turns)
    if "rollout_rs" in fields:
        keep = reference.keeps(rows, fields["rollout_rs"], fields["rollout_rs_threshold"], turns=turns)
        rejected = [
            {turn for turn, k in zip(t, row, strict=True) if not k} for t, row in zip(turns, keep, strict=True)
        ]
        assert any(len(some) == 1 for some in rejected)  # a turn, and not its completion
    factor = torch.zeros_like(logps)
    factor[cells[:, 0], cells[:, 1]] = torch.tensor([w for row in weights for w in row])
    factor[cells[:, 0], cells[:, 1]] *= torch.tensor([float(k) for row in keep for k in row])
    advantages = batch["advantages"][:, None]
    if mode == "ppo_clip":
        ratio = torch.where(mask, logps.detach() - batch[ROLLOUT_LOGPS], 0.0).exp()
        factor *= ratio * ~torch.where(advantages > 0, ratio > 1.2, (ratio < 0.8) | (ratio > 3.0))
    expected = ((-factor * advantages * logps).sum(1) / mask.sum(1)).mean() / trainer.args.gradient_accumulation_steps
    assert_gradients_equal(found, backward(trainer.model, expected))


def with_turns(change=lambda ids: ids):
    def rollout(prompts, trainer):
        output = two_turns(prompts, trainer)
        output["turn_ids"] = change([[0] * len(mask) for mask in output["env_mask"]])
        return output

    return rollout


def test_turn_ids_of_a_rollout_function_take_the_place_of_runs(make):
    """Here they make one turn of the completion, so that a turn is the sequence."""
    found = []
    for source, level in ((with_turns(), "turn"), (two_turns, "sequence"), (two_turns, "turn")):
        trainer = make("rollout function", extra={"rollout_func": source}, rollout_is=level, rollout_rs=None)
        batch = micro_batches(trainer)[0]
        with corrected_batches(trainer) as coefficients:
            gradients(trainer, batch)
        found += coefficients
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_turns_reach_dump_and_metrics(make, tmp_path):
    fields = {"rollout_dump_dir": str(tmp_path / "dump"), "max_steps": 1, "rollout_correction": "decoupled_token_is"}
    for change, last in ((lambda ids: ids, False), (lambda ids: [[*row[:-1], 1] for row in ids], True)):
        trainer = make("rollout function", extra={"rollout_func": with_turns(change)}, **fields)
        losses(trainer)
        assert bool(logged(trainer, "turn_last/k3_kl")) == last
        fields["rollout_dump_dir"] = None
    assert all(row["turn_ids"] == [0] * len(row["mask"]) for row in read_dump(tmp_path / "dump").rows)


def test_turn_ids_may_be_arrays(make):
    rollout = with_turns(lambda ids: [torch.tensor(row).numpy() for row in ids])
    losses(make("rollout function", extra={"rollout_func": rollout}, rollout_is="turn", max_steps=1))


def test_turns_of_a_completion_reach_the_baseline(make):
    fields = {"rollout_is": None, "rollout_rs_threshold": 1.05, "rollout_rs_exclude_from_baseline": True}
    shares = []
    for criterion in ("turn_sum_k1", "seq_sum_k1"):
        trainer = make("rollout function", extra={"rollout_func": with_turns()}, rollout_rs=criterion, **fields)
        shares.append([batch["advantages"] for batch in micro_batches(trainer)])
    assert all(torch.equal(a, b) for a, b in zip(*shares, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda ids: [row[1:] for row in ids],
            r"`turn_ids\[0\]` must have one entry per token of the completion, got",
        ),
        (lambda ids: ids[1:], "`turn_ids` must have one list per completion, got 15 lists for 16 completions"),
        (
            lambda ids: [[1, *row[1:]] for row in ids],
            r"`turn_ids\[0\]\[1\]` is 0 after 1, but turns follow one another",
        ),
        (lambda ids: [[None, *row[1:]] for row in ids], r"`turn_ids\[0\]\[0\]` is None after 0"),
    ],
)
def test_turn_ids_that_cannot_be_are_refused(make, change, message):
    trainer = make("rollout function", extra={"rollout_func": with_turns(change)}, rollout_is="turn")
    with pytest.raises(ValueError, match=message):
        trainer.train()
