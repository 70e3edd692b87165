"""Effect of the correction on groups of tokens, and the age of the data: against plain loops, and in training."""

import math
import random
import re
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.dumps import read_dump
from tests.launching import ROOT
from tests.tiny import StaleSampler, length_reward, prompts
from tests.training import TRAINERS, BrokenSampler, asking_vllm, build, config_fields, losses, micro_batches, window
from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.correction.age import Staleness
from trl_rollout_corr.correction.functional import turns_of
from trl_rollout_corr.correction.groups import TURNS, add_up_groups
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.tools.analysis.recompute import _correct_blocks, batch_of
from trl_rollout_corr.tools.dump.reading import open_dump
from trl_rollout_corr.tools.report.token_tables import find_lost


CONFIG = RolloutCorrectionConfig(
    rollout_is="token",
    rollout_is_threshold=1.1,
    rollout_rs=["token_k1", "seq_mean_k1"],
    rollout_rs_threshold=[[0.8, 1.25], [0.9, 1.05]],
)


def random_batch(n: int = 60, length: int = 150, seed: int = 0) -> dict[str, torch.Tensor]:
    """Completions of 0 to `length` tokens, some with results of tools, some unscored, one token broken."""
    generator = torch.Generator().manual_seed(seed)
    dice = random.Random(seed)
    lengths = torch.tensor([0, length, *(dice.randint(1, length) for _ in range(n - 2))])
    train = -torch.rand(n, length, generator=generator) * 3
    rollout = train + 0.2 * torch.randn(n, length, generator=generator)
    rollout[1, 3] = math.nan
    mask = torch.arange(length)[None] < lengths[:, None]
    for row in range(0, n, 3):
        mask[row, 5:9] = mask[row, 10:12] = mask[row, 20 : 20 + row] = False  # results of tools
    rewards = torch.tensor([dice.choice([-1.0, 0.0, 0.3, 0.75, 1.0, math.nan]) for _ in range(n)])
    advantages = torch.tensor([dice.choice([-0.5, 0.0, 1.5]) for _ in range(n)])
    correction = compute_rollout_correction(train, rollout, mask, CONFIG)
    return {
        "valid": correction.valid,
        "keep": correction.keep,
        "coefficients": correction.coefficients,
        "advantages": advantages,
        "rewards": rewards,
        "turns": turns_of(mask),
        "log_ratio": train - rollout,
    }


def finish(groups) -> dict[str, float]:
    metrics = groups.finish(rejects=True, weighs=True)
    return {key.removeprefix(PREFIX): value for key, value in metrics.items()}


def by_loops(batch: dict[str, torch.Tensor]) -> dict[str, float]:
    """The same numbers, token by token."""
    rows = {name: tensor.tolist() for name, tensor in batch.items()}
    shares, gaps, rewards = {}, {}, {"kept": [], "rejected": []}
    for i, valid in enumerate(rows["valid"]):
        advantages, reward, turns = rows["advantages"][i], rows["rewards"][i], rows["turns"][i]
        for t in [t for t, counts in enumerate(valid) if counts]:
            advantage = advantages[t] if isinstance(advantages, list) else advantages
            keep, removed = rows["keep"][i][t], max(0.0, 1 - rows["coefficients"][i][t])
            if advantage:
                sign = "positive" if advantage > 0 else "negative"
                shares.setdefault(f"rejected/advantage_{sign}", []).append(not keep)
                shares.setdefault(f"downweighted/advantage_{sign}", []).append(removed if keep else 0.0)
            parts = ["first"] if turns[t] == 1 else ["last"] if turns[t] == max(turns) else []
            parts += ["start"] if turns[t] > 1 and turns[max(t - 2, 0)] < turns[t] else []
            d = rows["log_ratio"][i][t]
            for part in parts:
                gaps.setdefault(f"turn_{part}/k3_kl", []).append(math.exp(d) - 1 - d)
        if any(valid) and not math.isnan(reward):
            rewards["kept" if any(rows["keep"][i]) else "rejected"].append(reward)
    means = {f"{name}/reward_mean": values for name, values in rewards.items()}
    means["reward_mean"] = [*rewards["kept"], *rewards["rejected"]]
    idle = [not np.any(a) for a, valid in zip(rows["advantages"], rows["valid"], strict=True) if any(valid)]
    means["zero_advantage_fraction"] = idle
    return {key: sum(values) / len(values) for key, values in (shares | gaps | means).items()}


@pytest.mark.parametrize("seed", range(3))
def test_groups_are_those_of_a_loop_over_tokens(seed):
    batch = random_batch(seed=seed)
    found, expected = finish(add_up_groups(**batch)), by_loops(batch)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert 0 < expected["rejected/advantage_positive"] < 1
    assert len({expected[f"turn_{part}/k3_kl"] for part in TURNS}) == 3


def test_groups_do_not_depend_on_how_a_batch_is_split():
    batch = random_batch()
    whole = add_up_groups(**batch)
    for cuts in ([1, 59], [20, 20, 20], [7, 30, 23]):
        parts = zip(*(tensor.split(cuts) for tensor in batch.values()), strict=True)
        first, *others = [add_up_groups(**dict(zip(batch, part, strict=True))) for part in parts]
        for other in others:
            first = first + other
        torch.testing.assert_close(first.vector, whole.vector, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_a_token_with_an_advantage_of_its_own_counts_by_its_sign(seed):
    batch = random_batch(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(-1, 2, batch["valid"].shape, generator=generator).float()
    signs[::7] = 0.0
    batch["advantages"] = signs
    assert finish(add_up_groups(**batch)) == pytest.approx(by_loops(batch), rel=1e-5, abs=1e-7)


def test_advantages_per_token_that_are_those_of_their_row_count_like_them():
    batch = random_batch()
    per_token = {**batch, "advantages": batch["advantages"][:, None] * batch["valid"]}
    assert finish(add_up_groups(**per_token)) == pytest.approx(finish(add_up_groups(**batch)), rel=1e-6)


@pytest.mark.parametrize("first", [-1.0, 1.0])
def test_a_run_with_advantages_per_token_tells_their_signs_apart(make, first):
    """With weights that are 1 where the advantage is positive, wherever such a token stands in a completion."""
    bounds = {"rollout_is": "token", "rollout_is_threshold": [[0.0, 3.0], [1.0, 1.0]], "rollout_is_clamp": True}
    trainer = with_two_signs(make(**bounds, max_steps=1), first)
    losses(trainer)
    (entry,) = entries(trainer)
    assert entry["downweighted/advantage_positive"] == 0.0
    assert entry["downweighted/advantage_negative"] > 0.01


@pytest.mark.parametrize("first", [-1.0, 1.0])
def test_a_dump_of_advantages_per_token_gives_the_correction_of_the_run(make, first, tmp_path):
    """The mean of a completion has one sign, and every second token the other one."""
    folder = tmp_path / "dump"
    trainer = make(rollout_correction="auto", rollout_rs_threshold=[[0.01, 0.01], [0.001, math.inf]],
                   rollout_dump_dir=str(folder), rollout_dump_sampled=16)  # fmt: skip
    losses(with_two_signs(trainer, first))
    sequences = open_dump(folder).sequences
    every = np.ones(len(sequences), bool)
    batch = batch_of(sequences, every)
    again = _correct_blocks(batch, trainer._settings)
    for block, correction in zip(batch.blocks, again, strict=True):
        torch.testing.assert_close(correction.coefficients * block.mask, block.coefficients, rtol=1e-5, atol=1e-6)
        assert torch.equal(correction.keep, block.keep)
    keeps = [{*zip((row["advantages"][t] > 0 for t in range(len(row["keep"]))), row["keep"], strict=True)}
             for row in read_dump(folder).rows]  # fmt: skip
    assert {(True, False), (False, False)} <= set().union(*keeps)  # a token of each sign was rejected
    assert {*np.sign(sequences.advantage[sequences.lengths > 3])} == {-first}
    lost = find_lost(sequences, trainer._settings)
    assert {table.sign for table in lost.tables} == {"positive", "negative"}
    assert main(["compare", str(folder), "--json"]) == 0


def with_two_signs(trainer, first):
    """A trainer of which every second token has another sign of the advantage."""
    score = trainer._generate_and_score_completions

    def scored(inputs):
        output = score(inputs)
        places = torch.arange(output["completion_ids"].shape[1])
        output["advantages"] = torch.where(places % 2 == 0, first, -2 * first).expand(output["completion_ids"].shape)
        return output

    trainer._generate_and_score_completions = scored
    return trainer


@pytest.fixture
def make(tiny_model_path, tmp_path):
    def make(sampler=None, **fields):
        trainer_class, config_class = TRAINERS["grpo"]
        sampler = sampler or StaleSampler(tiny_model_path)
        return build(trainer_class, config_class, tiny_model_path, tmp_path, sampler=sampler, **fields)

    return make


def entries(trainer) -> list[dict[str, float]]:
    """Our metrics of each training log."""
    return [
        {key.removeprefix(PREFIX): value for key, value in entry.items() if key.startswith(PREFIX)}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


MODES = {
    "measured": {"rollout_correction": "disabled"},
    "decoupled": {"rollout_correction": "decoupled_token_is"},
    "bypass, clipped": {"rollout_correction": "bypass_ppo_clip"},
    "bypass, reinforce": {"rollout_correction": "bypass_pg_token_icepop"},
}


@pytest.mark.parametrize("mode", MODES)
def test_engine_and_staleness_are_told_apart(make, mode):
    trainer = make(schedule="two iterations", max_steps=4, learning_rate=1e-3, **MODES[mode])
    losses(trainer)
    first, second, third, fourth = entries(trainer)
    assert "update_k3_kl" not in first  # trained on right after it was generated
    assert first["engine_k3_kl"] == pytest.approx(first["k3_kl"], rel=1e-6)
    assert second["update_k3_kl"] > 1e-5
    assert "engine_kl" not in second
    if "bypass" in mode:  # the whole divergence, of which the update is a part
        assert second["k3_kl"] != pytest.approx(first["k3_kl"], rel=1e-3)
    assert third["engine_k3_kl"] > 0
    assert fourth["update_k3_kl"] > 1e-5


def test_staleness_is_the_divergence_of_the_two_policies(make):
    trainer = make(rollout_correction="disabled", schedule="two iterations")
    (batch, *_) = micro_batches(trainer)
    trainer.compute_loss(trainer.model, batch)
    old = batch["rollout_corr_first_logps"].clone()
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.mul_(1.01)
    trainer.compute_loss(trainer.model, batch)
    metrics = window(trainer, Staleness).finish()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        logits = trainer.model(ids, attention_mask=attention).logits
    length = old.shape[1]
    logps = logits[:, -length - 1 : -1].log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    d = (logps - old)[batch["completion_mask"].bool()].double()
    assert metrics[f"{PREFIX}update_k3_kl"] == pytest.approx((d.expm1() - d).mean().item(), rel=1e-3)


SCHEDULED = {  # mean and largest number of optimizer steps since the weights that sampled, for each of four steps
    ("aligned", 0): [(0, 0)] * 4,
    ("aligned", 2): [(0, 0), (1, 1), (2, 2), (2, 2)],
    ("several steps per generation", 0): [(0, 0), (1, 1), (0, 0), (1, 1)],
    ("two iterations", 0): [(0, 0), (1, 1), (0, 0), (1, 1)],
}


@pytest.mark.parametrize(("schedule", "behind"), SCHEDULED)
def test_optimizer_steps_since_the_sampling_weights_are_counted(make, schedule, behind):
    trainer = make(schedule=schedule, max_steps=4, rollout_correction="disabled")
    sampler = trainer.rollout_func

    def knows_its_weights(prompts, trainer):
        trainer.rollout_step = max(trainer.state.global_step - behind, 0)
        return sampler(prompts, trainer)

    trainer.rollout_func = knows_its_weights
    losses(trainer)
    found = [(entry["staleness_mean"], entry["staleness_max"]) for entry in entries(trainer)]
    assert found == SCHEDULED[schedule, behind]


def test_samples_that_are_used_again_are_corrected(tiny_model_path, tmp_path):
    (code,) = re.findall(r"```python\n(class UsedTwice.*?)```", (ROOT / "docs/asynchronous.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    sampler, seen = StaleSampler(tiny_model_path, noise=0.0), []

    def sample(prompts, trainer):
        seen.append(trainer.state.global_step)
        return sampler(prompts, trainer)

    trainer = build(*TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=names["UsedTwice"](sample), max_steps=3,
                    learning_rate=3e-3, shuffle_dataset=False, extra={"train_dataset": prompts(2)})  # fmt: skip
    losses(trainer)
    assert seen == [0, 2]
    first, again, _ = entries(trainer)
    assert [entry["staleness_max"] for entry in entries(trainer)] == [0, 1, 0]
    assert first["k3_kl"] < 1e-6 < 1e-3 < again["k3_kl"]
    assert again["rollout_is_std"] > 0.01


@pytest.mark.parametrize("mode", ["decoupled", "bypass, reinforce"])
def test_shares_of_a_run_are_those_of_its_batches(make, mode):
    fields = {**MODES[mode], "rollout_rs": "token_k1", "rollout_rs_threshold": 1.2, "rollout_is_threshold": 1.1}
    trainer = make(**fields, max_steps=1)
    recorded = []
    inner = trainer._observer.add_correction

    def corrected(now, seen):
        recorded.append((seen.batch, seen.correction, seen.coefficients))
        inner(now, seen)

    trainer._observer.add_correction = corrected
    losses(trainer)
    (entry,) = entries(trainer)
    positive = {"tokens": 0, "rejected": 0, "removed": 0.0}
    for batch, correction, coefficients in recorded:
        rows = batch["advantages"] > 0
        mask = batch["completion_mask"].bool() & rows[:, None]
        positive["tokens"] += mask.sum().item()
        positive["rejected"] += (mask & ~correction.keep).sum().item()
        positive["removed"] += ((1 - coefficients).clamp(min=0) * (mask & correction.keep)).sum().item()
    assert 0 < positive["rejected"] < positive["tokens"]
    share = {name: positive[name] / positive["tokens"] for name in ("rejected", "removed")}
    assert entry["rejected/advantage_positive"] == pytest.approx(share["rejected"], rel=1e-6)
    assert entry["downweighted/advantage_positive"] == pytest.approx(share["removed"], rel=1e-5)


@pytest.mark.parametrize(
    ("preset", "families"),
    [
        ("decoupled_token_is", {"downweighted"}),
        ("decoupled_k3_rs", {"rejected"}),
        ("decoupled_k3_rs_token_tis", {"rejected", "downweighted"}),
        ("bypass_ppo_clip", set()),  # whose weights are reported and not applied
    ],
)
def test_a_run_reports_shares_of_what_it_takes_away(make, preset, families):
    trainer = make(rollout_correction=preset, max_steps=1)
    losses(trainer)
    (entry,) = entries(trainer)
    assert {key.split("/")[0] for key in entry if "/advantage_" in key} == families


@pytest.mark.parametrize("policy", ["drop", "neutralize"])
def test_turns_of_a_run_with_tools(make, tiny_model_path, policy):
    def call_a_tool(output):
        output["env_mask"] = [[int(t not in (2, 3)) for t in range(len(ids))] for ids in output["completion_ids"]]
        output["logprobs"][0][0] = float("-inf")  # a broken token, which leaves the gap of its turn

    trainer = make(sampler=BrokenSampler(tiny_model_path, call_a_tool, min_length=8), rollout_nan_policy=policy)
    losses(trainer)
    for entry in entries(trainer):
        first = (2 - entry["nonfinite_fraction"] * 6 * (policy == "drop")) / 6
        gap = first * entry["turn_first/k3_kl"] + 4 / 6 * entry["turn_last/k3_kl"]
        assert gap / (first + 4 / 6) == pytest.approx(entry["k3_kl"], rel=1e-5)
        assert entry["turn_start/k3_kl"] != entry["turn_last/k3_kl"]


def test_weights_that_are_pushed_to_vllm_are_those_of_that_step(shared_engine, tiny_model_path, tmp_path):
    trainer_class, config_class = TRAINERS["rloo"]
    fields = config_fields(
        tmp_path, schedule="several steps per generation", use_vllm=True, vllm_mode="colocate", max_steps=4,
        vllm_max_model_length=64, rollout_correction="decoupled_token_is",
    )  # fmt: skip
    trainer = build(trainer_class, config_class, tiny_model_path, tmp_path, **{**fields, "output_dir": str(tmp_path)})
    losses(trainer)
    assert [entry["staleness_mean"] for entry in entries(trainer)] == [0, 1, 0, 1]


def asking_trl(prompts, trainer):
    """The same by way of TRL."""
    prompt_ids = trainer.processing_class(prompts)["input_ids"]
    _, completion_ids, logprobs, _ = trainer.vllm_generation.generate(prompt_ids, None, 1)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": [[ranked[0] for ranked in row] for row in logprobs],
    }


def announcing(prompts, trainer):
    """A sampler of its own that says how old its weights are."""
    trainer.rollout_step = 0
    return StaleSampler(trainer.model.name_or_path)(prompts, trainer)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("sample", "ages"),
    [
        (asking_vllm, [0, 0, 0]),
        (asking_trl, [0, 0, 0]),
        (announcing, [0, 1, 2]),
        # TRL pushes weights before each step to a vLLM that has not written these completions
        (lambda prompts, trainer: StaleSampler(trainer.model.name_or_path)(prompts, trainer), None),
    ],
    ids=["vllm", "trl", "announced", "its own"],
)
def test_a_push_tells_the_age_only_of_a_function_that_asks_the_vllm_of_the_push(
    shared_engine, tiny_model_path, tmp_path, sample, ages
):
    trainer_class, config_class = TRAINERS["grpo"]
    fields = config_fields(
        tmp_path, use_vllm=True, vllm_mode="colocate", max_steps=3, vllm_max_model_length=64, rollout_correction="auto",
    )  # fmt: skip
    args = config_class(**{**fields, "output_dir": str(tmp_path)})
    trainer = trainer_class(tiny_model_path, length_reward, args, train_dataset=prompts(), rollout_func=sample)
    losses(trainer)
    stale = [None] * 3 if ages is None else [float(age > 0) for age in ages]
    assert [entry.get("staleness_mean") for entry in entries(trainer)] == (ages or [None] * 3)
    assert [entry.get("stale_fraction") for entry in entries(trainer)] == stale


@pytest.mark.vllm
def test_a_push_that_fails_tells_no_age(shared_engine, tiny_model_path, tmp_path):
    trainer_class, config_class = TRAINERS["grpo"]
    fields = config_fields(
        tmp_path, use_vllm=True, vllm_mode="colocate", max_steps=2, vllm_max_model_length=64, rollout_correction="auto",
    )  # fmt: skip
    args = config_class(**{**fields, "output_dir": str(tmp_path)})
    trainer = trainer_class(tiny_model_path, length_reward, args, train_dataset=prompts(), rollout_func=asking_trl)
    trainer.train()  # the last push comes after the first step
    trainer.state.global_step, trainer.rollout_step = 9, None
    with (
        patch.object(trainer._pushes, "_sync_weights", side_effect=OSError("lost")),
        pytest.raises(OSError, match="lost"),
    ):
        trainer.vllm_generation.sync_weights()
    with trainer._pushes.noting_requests():
        asking_trl(["1 2 3"], trainer)
    assert trainer.rollout_step == 1
