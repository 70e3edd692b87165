"""Dumps as a run would have written them, made of random numbers, and what they hold."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.tools.dump import folder as dump
from trl_rollout_corr.tools.dump import reading
from trl_rollout_corr.tools.dump.columns import SCHEMA


WORDS = [" the", " sum", " of", " 3", " 7", " and", " is", " 10", ",", ".", "\n", " so", " <b>", " équation", " 数"]


def make_dump(
    folder: Path | str,
    *,
    steps: int = 3,
    rows: int = 32,
    length: int = 40,
    spread: float = 0.05,
    growth: float = 1.0,
    seed: int = 0,
    settings: dict | None = None,
    sampled: int | None = None,
    worst: int = 4,
    group: int = 8,
    ranks: int = 1,
    gaussian: bool = False,
    vary: bool = True,
    tools: bool = True,
    broken: int = 0,
    logs: bool = True,
    age: int = 0,
) -> Path:
    """
    Write a dump of `steps` optimizer steps with a batch of `rows` each, and return its folder.

    The log-ratio has the root mean square `spread` at the first step, and at the others `growth` times that of the step
    before. It is larger for unlikely tokens, unless `gaussian`. `sampled` rows (all but four by default) are drawn at random,
    and `worst` are the worst. `group` is the number of completions per prompt, and `broken` the number of tokens per step that
    have no log-probability. Unless told otherwise, completions `vary` in length, and some have tokens of `tools`. The
    youngest completions have an `age`.
    """
    folder = Path(folder)
    config = RolloutCorrectionConfig(**(settings or {"rollout_correction": "decoupled_token_is"}))
    rng = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        s = spread * growth ** (step - 1)
        present, mask = _masks(rows, length, rng, vary=vary, tools=tools)
        train, rollout = _logps(rows, length, s, rng, gaussian=gaussian)
        for row in torch.randperm(rows, generator=rng)[:broken].tolist():
            rollout[row, int(mask[row].nonzero()[0])] = math.nan
        rewards, advantages = _rewards(rows, group, rng)
        given = advantages if any(criterion.directed for criterion in config.settings.criteria) else None
        correction = compute_rollout_correction(train, rollout, mask, config, advantages=given)
        is_sampled, is_worst = _choice(train - rollout, mask, sampled, worst, rng)
        ids = torch.randint(len(WORDS), (rows, length), generator=rng)
        batch = []
        for i in range(rows):
            here = present[i]
            tokens = [WORDS[j] for j in ids[i, here].tolist()]
            batch.append(
                {
                    "step": step,
                    "rank": i * ranks // rows,
                    "sampled": is_sampled[i].item(),
                    "worst": is_worst[i].item(),
                    "prompt": f"Question {step}.{i // group}: what is {i // group} + {step}?",
                    "completion": "".join(tokens),
                    "tokens": tokens,
                    "token_ids": ids[i, here].tolist(),
                    "mask": mask[i, here].tolist(),
                    "train_logps": train[i, here].tolist(),
                    "rollout_logps": rollout[i, here].tolist(),
                    "weights": None if correction.weights is None else correction.weights[i, here].tolist(),
                    "keep": correction.keep[i, here].tolist(),
                    "coefficients": correction.coefficients[i, here].tolist(),
                    "reward": rewards[i].item(),
                    "advantage": advantages[i].item(),
                    "staleness": age + (step - 1) % 4,
                    "prompt_ids": [step % len(WORDS), i // group % len(WORDS)],
                    "padding": i // group % 3,
                }
            )
        for rank in range(ranks):
            written = [row for row in batch if row["rank"] == rank and (row["sampled"] or row["worst"])]
            if written:
                dump.write_rows(folder, step, rank, written, config.settings.fields)
        if logs:
            entry = {"loss": 0.01, "reward": rewards.mean().item(), "learning_rate": 1e-6}
            entry["completions/mean_length"] = mask.sum(-1).float().mean().item()
            dump.append_log(folder, {**entry, **correction.metrics(), "step": step, "epoch": step / 100})
    return folder


def _masks(rows: int, length: int, rng: torch.Generator, *, vary: bool, tools: bool):
    """Masks of the tokens that exist, and of those of the loss."""
    lengths = torch.full((rows,), length)
    if vary:
        lengths = torch.randint(max(length // 4, 1), length + 1, (rows,), generator=rng)
        lengths[0] = length
    position = torch.arange(length)
    present = position < lengths[:, None]
    mask = present.clone()
    if tools:
        start = lengths // 2
        tool = (position >= start[:, None]) & (position < (start + 1 + length // 10)[:, None])
        tool[torch.arange(rows) % 4 != 1] = False
        mask &= ~tool | (position == 0)
    return present, mask


def _logps(rows: int, length: int, spread: float, rng: torch.Generator, *, gaussian: bool):
    """Log-probabilities of the two policies. Under the sampler `E[exp(d)] = 1`, so the mean of `d` is `-s^2 / 2`."""
    easy = torch.rand(rows, length, generator=rng) < 0.6
    nll = -torch.rand(rows, length, generator=rng).clamp(min=1e-6).log()
    nll = torch.where(easy, 0.02 * nll, nll)
    s = torch.full_like(nll, spread)
    if gaussian:
        nll = nll + 8 * spread  # no probability above 1
    else:
        s = 0.01 + 1 - (-nll).exp()  # so small near 1 that the bound below hardly acts
        s *= spread / s.square().mean().sqrt()
    d = s * torch.randn(rows, length, generator=rng) - s.square() / 2
    train = -nll
    return train, (train - d).clamp(max=0.0)


def _rewards(rows: int, group: int, rng: torch.Generator):
    rewards = (torch.rand(rows, generator=rng) < 0.4).float()
    advantages = torch.empty(rows)
    for start in range(0, rows, group):
        of_group = rewards[start : start + group]
        advantages[start : start + group] = (of_group - of_group.mean()) / (of_group.std(correction=0) + 1e-4)
    return rewards, advantages


def _choice(d: torch.Tensor, mask: torch.Tensor, sampled: int | None, worst: int, rng: torch.Generator):
    rows = len(d)
    sampled = max(rows - 4, 1) if sampled is None else sampled
    largest = (d.nan_to_num(0.0).abs() * mask).amax(-1)
    chosen = torch.zeros(2, rows, dtype=torch.bool)
    chosen[0, torch.randperm(rows, generator=rng)[:sampled]] = True
    chosen[1, largest.topk(min(worst, rows)).indices] = True
    return chosen


class Written(NamedTuple):
    """Content of a dump: one dictionary per row, the fields in effect at the last step, and what was logged."""

    rows: list[dict[str, Any]]
    fields: dict[str, Any]
    logs: list[dict[str, Any]]


def read_dump(path: Path | str) -> Written:
    """Read a dump, row by row, as no command does: Python numbers take twenty times the memory."""
    table, fields, _, _ = read_table(path)
    return Written(table.to_pylist(), fields, dump.read_logs(Path(path)))


def read_table(path: Path | str) -> tuple[Any, dict[str, Any], dict[str, str], list[str]]:
    """All rows of a dump, however large, its fields, facts about the run, and a sentence per damaged file."""
    damage: list[str] = []
    files = reading._look_at(Path(path), damage)
    table = reading._read_whole(files, SCHEMA.names, damage)
    return table, files[-1].fields, reading._about_of(files), damage
