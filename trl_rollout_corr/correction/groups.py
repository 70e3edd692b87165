"""
Effect of the correction on groups of tokens: by the sign of the advantage and by turn. Torch only.

All values are sums in one vector until they are logged, as in `metrics.py`, so that a share does not depend on the
split of the batch over ranks, micro-batches or logging steps. The layout is the same for every configuration.
"""

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch

from .functional import accumulation_dtype, as_numbers, k3, row_blocks
from .sums import Applied, SegmentedSums


# A token with an advantage of 0 gets no policy gradient that a correction could remove
SIGNS = ("positive", "negative")
# Turns of an agent: the first, the last of several, and the first two tokens of every later turn, which follow the
# answer of a tool
TURNS = ("first", "last", "start")
_BEGINNING = 2
_MEASURES = ("tokens", "rejected", "removed")


class Groups(SegmentedSums):
    """Sums over groups of tokens, and rewards of completions."""

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "sign": tuple(f"{sign}/{measure}" for sign in SIGNS for measure in _MEASURES),
        "turn": tuple(f"turn_{turn}/{measure}" for turn in TURNS for measure in ("tokens", "k3")),
        "mean_reward": ("kept/rows", "kept/reward", "rejected/rows", "rejected/reward"),
        "advantage": ("rows", "idle/rows"),
    }

    def _metrics(self, s: dict[str, float], applied: Applied) -> dict[str, float]:
        metrics: dict[str, float] = {}
        rewards = {name: (s[f"{name}/reward"], s[f"{name}/rows"]) for name in ("kept", "rejected")}
        total, rows = map(math.fsum, zip(*rewards.values(), strict=True))
        if rows:
            metrics["reward_mean"] = total / rows
        if applied.rejects:
            metrics |= {f"{name}/reward_mean": total / rows for name, (total, rows) in rewards.items() if rows}
        if s["rows"]:
            metrics["zero_advantage_fraction"] = s["idle/rows"] / s["rows"]
        for sign in SIGNS:
            if tokens := s[f"{sign}/tokens"]:
                if applied.rejects:
                    metrics[f"rejected/advantage_{sign}"] = s[f"{sign}/rejected"] / tokens
                if applied.weighs:
                    metrics[f"downweighted/advantage_{sign}"] = s[f"{sign}/removed"] / tokens
        for turn in TURNS if s["turn_last/tokens"] else ():  # with one turn the group is the whole batch
            if tokens := s[f"turn_{turn}/tokens"]:
                metrics[f"turn_{turn}/k3_kl"] = s[f"turn_{turn}/k3"] / tokens
        return metrics


def add_up_groups(
    valid: torch.Tensor,  # (B, T), boolean: the tokens that count
    keep: torch.Tensor,  # (B, T), boolean: the tokens that no criterion rejects
    coefficients: torch.Tensor,  # (B, T), factors of the policy gradient
    advantages: torch.Tensor,  # (B,) or (B, T)
    rewards: torch.Tensor,  # (B,), NaN for a completion that was not scored
    turns: torch.Tensor | None = None,  # (B, T), from 1; by default there is one turn
    log_ratio: torch.Tensor | None = None,  # (B, T), in nats; needed with `turns`
) -> Groups:
    """
    Add up tokens, rejected tokens and gradient removed by weights, by the sign of the advantage, and the gap by turn.
    A kept token counts `max(0, 1 - coefficient)` as removed. No host synchronisation, no collective.
    """
    of_token = advantages.dim() == 2  # each token has a sign of its own
    by_row, by_sign = _add_up(valid, keep, coefficients, advantages if of_token else None)
    if not of_token:
        by_sign = torch.stack([(by_row * chosen.unsqueeze(1)).sum(0) for chosen in (advantages > 0, advantages < 0)])
    lengths = by_row[:, 0]
    rewards, counted = rewards.to(lengths.dtype), lengths.sign()
    scored, rewards = rewards.isfinite() * counted, rewards.nan_to_num(0.0)
    keeps_none = by_row[:, 1] >= lengths
    idle = (advantages == 0).all(1) if of_token else advantages == 0
    of_reward = torch.stack([scored, scored * rewards], 1)
    segments = {
        "sign": by_sign,
        "advantage": torch.stack([counted.sum(), (counted * idle).sum()]),
        "mean_reward": torch.stack([(of_reward * chosen.unsqueeze(1)).sum(0) for chosen in (~keeps_none, keeps_none)]),
    }
    if turns is not None and log_ratio is not None:
        # `rollout_nan_policy` neutralizes a valid token without a finite log-ratio
        d = log_ratio.masked_fill(~valid | ~log_ratio.isfinite(), 0.0)
        segments["turn"] = torch.stack([_by_turn(x.to(lengths.dtype), turns) for x in (valid, k3(d))], 1)
    return Groups.of(segments)


def _by_turn(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Sums, `(3,)`, over the parts of `TURNS`. `x`, `(B, T)`, is 0 on tokens that do not count."""
    later, last = turns > 1, turns == turns.amax(1, keepdim=True)
    before = torch.nn.functional.pad(turns, (_BEGINNING, 0))[:, : turns.shape[1]]
    return torch.stack([(x * chosen).sum() for chosen in (~later, later & last, later & (turns > before))])


def _add_up(
    valid: torch.Tensor, keep: torch.Tensor, coefficients: torch.Tensor, advantages: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Sums of the measures over each row, `(B, 3)`, and over the tokens with a positive and with a negative advantage of
    their own, `(2, 3)`; zeros without `advantages`, `(B, T)`.
    """
    dtype = accumulation_dtype(valid.device)
    by_row, by_sign = [], coefficients.new_zeros(2, len(_MEASURES), dtype=dtype)
    for rows in row_blocks(valid):
        of_block, signs = [], () if advantages is None else (advantages[rows] > 0, advantages[rows] < 0)
        for i, measure in enumerate(_measures(valid[rows], keep[rows], coefficients[rows])):
            of_block.append(measure.sum(1))
            for j, chosen in enumerate(signs):
                by_sign[j, i] += (measure * chosen).sum(dtype=dtype)
        by_row.append(torch.stack(of_block, 1))
    return torch.cat(by_row).to(dtype), by_sign


def _measures(valid: torch.Tensor, keep: torch.Tensor, coefficients: torch.Tensor) -> Iterator[torch.Tensor]:
    """Three `(B, T)`, each valid until the next: counts, is rejected, gradient removed by weights."""
    counts, kept_tokens = (as_numbers(mask, coefficients.dtype) for mask in (valid, keep))
    yield counts
    yield counts.sub_(kept_tokens)
    yield kept_tokens.sub_(coefficients).clamp_(min=0.0)  # the coefficient of a rejected token is 0
