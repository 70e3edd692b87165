"""
Effect of the correction on groups of tokens: by length, advantage and turn. Torch only.

As in `metrics.py` all values are sums in one vector until they are logged, so that a share does not depend on the split of
the batch over ranks, micro-batches or logging steps. The layout is the same for every configuration.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import ClassVar

import torch

from .functional import LARGEST_POWER, accumulation_dtype, as_numbers, k3, row_blocks
from .sums import Applied, SegmentedSums


# Lower edges of the reported buckets, in tokens. Lengths are counted in octaves, so that the longer half of the completions
# can be found.
BUCKETS = (1, 16, 64, 256, 1024, 4096, 16384)
_OCTAVES = tuple(2**i for i in range(15))
SIGNS = ("negative", "zero", "positive")
_BY_SIGN = tuple(f"advantage_{sign}" for sign in SIGNS)
# Turns of an agent: the first, the last of several, those between them; and the first two tokens of each turn but the first,
# which follow the answer of a tool
TURNS = ("first", "middle", "last", "start")
_BEGINNING = 2
MEASURES = ("tokens", "rejected", "removed")
_OF_TURN = (*MEASURES, "k3")


def _table(name: str, buckets: tuple[str, ...], measures: tuple[str, ...] = MEASURES) -> tuple[str, ...]:
    return tuple(f"{name}/{bucket}/{measure}" for bucket in buckets for measure in measures)


_CELLS = tuple(f"{length}/{sign}" for length in _OCTAVES for sign in SIGNS)


class Accounts(SegmentedSums):
    """Sums over groups of tokens."""

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "cell": _table("cell", _CELLS),
        "rows": tuple(f"rows/{length}" for length in _OCTAVES),
        "turn": _table("turn", TURNS, _OF_TURN),
        "mean_reward": ("kept/rows", "kept/reward", "rejected/rows", "rejected/reward"),
    }

    def _metrics(self, s: dict[str, float], applied: Applied) -> dict[str, float]:
        groups = {name: sums for name, sums in _groups(s).items() if sums["tokens"]}
        metrics: dict[str, float] = {}
        rewards = {name: (s[f"{name}/reward"], s[f"{name}/rows"]) for name in ("kept", "rejected")}
        total, rows = map(math.fsum, zip(*rewards.values(), strict=True))
        if rows:
            metrics["reward_mean"] = total / rows
        if applied.rejects:
            metrics |= {f"rejected/{name}": sums["rejected"] / sums["tokens"] for name, sums in groups.items()}
            metrics |= {f"{name}/reward_mean": total / rows for name, (total, rows) in rewards.items() if rows}
            by_sign = {sign: groups[sign]["rejected"] for sign in _BY_SIGN if sign in groups}
            n_rejected = math.fsum(by_sign.values())
            metrics |= {f"of_rejected/{sign}": n / n_rejected for sign, n in by_sign.items() if n_rejected}
        if applied.weighs:
            metrics |= {f"downweighted/{name}": sums["removed"] / sums["tokens"] for name, sums in groups.items()}
        for turn in TURNS if s["turn/last/tokens"] else ():
            if tokens := s[f"turn/{turn}/tokens"]:
                metrics[f"turn_{turn}/k3_kl"] = s[f"turn/{turn}/k3"] / tokens
        return metrics


def account(
    valid: torch.Tensor,
    keep: torch.Tensor,
    coefficients: torch.Tensor,
    advantages: torch.Tensor,
    rewards: torch.Tensor,
    turns: torch.Tensor | None = None,
    log_ratio: torch.Tensor | None = None,
) -> Accounts:
    """
    Add up tokens, rejected tokens and gradient removed by weights, by group of tokens. By turn also the gap.

    Args:
        valid (`torch.Tensor` of shape `(B, T)`):
            Boolean mask of the tokens that count.
        keep (`torch.Tensor` of shape `(B, T)`):
            Boolean mask of the tokens that no criterion rejects.
        coefficients (`torch.Tensor` of shape `(B, T)`):
            Factor of the policy gradient of each token. Of a kept token, `max(0, 1 - coefficient)` counts as removed.
        advantages (`torch.Tensor` of shape `(B,)` or `(B, T)`):
            Advantages.
        rewards (`torch.Tensor` of shape `(B,)`):
            Rewards; NaN for a completion that was not scored.
        turns (`torch.Tensor` of shape `(B, T)`, *optional*):
            Turn of each token, from 1. By default there is one turn.
        log_ratio (`torch.Tensor` of shape `(B, T)`, *optional*):
            Log-ratio to the sampler, in nats. Needed with `turns`.

    Returns:
        [`Accounts`]: the sums. No host synchronisation, no collective.
    """
    by_row = _by_row(valid, keep, coefficients)
    lengths = by_row[:, 0]
    octave = bucket_of(lengths, _OCTAVES)
    sign = (advantages if advantages.dim() == 1 else advantages.sum(1)).sign().long() + 1
    rewards, counted = rewards.to(lengths.dtype), lengths.sign()
    scored, rewards = rewards.isfinite() * counted, rewards.nan_to_num(0.0)
    keeps_none = (by_row[:, 1] >= lengths).long()
    segments = {
        "cell": add_up(by_row, octave * len(SIGNS) + sign, len(_CELLS)),
        "rows": add_up(counted, octave, len(_OCTAVES)),
        "mean_reward": add_up(torch.stack([scored, scored * rewards], 1), keeps_none, 2),
    }
    if turns is not None and log_ratio is not None:
        # a valid token without a finite log-ratio is one that `rollout_nan_policy` neutralizes
        d = log_ratio.masked_fill(~valid | ~log_ratio.isfinite(), 0.0)
        measures = (*(x.clone() for x in _measures(valid, keep, coefficients)), k3(d.clamp(max=LARGEST_POWER)))
        segments["turn"] = torch.stack([_by_turn(x.to(lengths.dtype), turns) for x in measures], 1)
    return Accounts.of(segments)


def _by_turn(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Sums of `x`, `(B, T)` and 0 on tokens that do not count, over the parts of `TURNS`, `(4,)`."""
    later, last = turns > 1, turns == turns.amax(1, keepdim=True)
    before = torch.nn.functional.pad(turns, (_BEGINNING, 0))[:, : turns.shape[1]]
    return torch.stack(
        [(x * chosen).sum() for chosen in (~later, later & ~last, later & last, later & (turns > before))]
    )


# Sums -----------------------------------------------------------------------------------------------------------------


def _measures(valid: torch.Tensor, keep: torch.Tensor, coefficients: torch.Tensor) -> Iterator[torch.Tensor]:
    """Three tensors, `(B, T)`, each valid until the next: token counts, token is rejected, gradient removed by weights."""
    counts, kept_tokens = (as_numbers(mask, coefficients.dtype) for mask in (valid, keep))
    yield counts
    yield counts.sub_(kept_tokens)
    yield kept_tokens.sub_(coefficients).clamp_(min=0.0)  # the coefficient of a rejected token is 0


def _by_row(valid: torch.Tensor, keep: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Sums of the measures over each row, `(B, 3)`."""
    by_row = [
        torch.stack([x.sum(1) for x in _measures(valid[rows], keep[rows], coefficients[rows])], 1)
        for rows in row_blocks(valid)
    ]
    return torch.cat(by_row).to(accumulation_dtype(valid.device))


def bucket_of(x: torch.Tensor, lower_ends: tuple[float, ...]) -> torch.Tensor:
    """Index of the bucket of each number. The first bucket has no lower end."""
    return torch.bucketize(x.contiguous(), _edges(lower_ends, x.dtype, x.device), right=True)


@cache
def _edges(lower_ends: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Kept on the device, because copying to it waits for it
    return torch.tensor(lower_ends[1:], dtype=dtype, device=device)


def add_up(values: torch.Tensor, index: torch.Tensor, n_buckets: int) -> torch.Tensor:
    """Add up rows of `values` by bucket."""
    return values.new_zeros(n_buckets, *values.shape[1:]).index_add_(0, index, values)


# Numbers --------------------------------------------------------------------------------------------------------------


def _groups(s: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Sums of the measures by name of a group."""
    groups = {}
    for i, low in enumerate(BUCKETS):
        high = BUCKETS[i + 1] if i + 1 < len(BUCKETS) else math.inf
        bucket = f"{low}_{high - 1}" if high < math.inf else f"{low}_or_more"
        octaves = [octave for octave in _OCTAVES if low <= octave < high]
        groups[f"length_{bucket}"] = _total(s, [f"cell/{octave}/{sign}" for octave in octaves for sign in SIGNS])
    for name, sign in zip(_BY_SIGN, SIGNS, strict=True):
        groups[name] = _total(s, [f"cell/{octave}/{sign}" for octave in _OCTAVES])
    if s["turn/last/tokens"]:  # with one turn the group is the whole batch
        groups |= {f"turn_{turn}": _total(s, [f"turn/{turn}"]) for turn in TURNS}
    return groups | _long_and_positive(s)


def _long_and_positive(s: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Completions longer than the median octave whose advantage is positive, and all others."""
    rows = [s[f"rows/{octave}"] for octave in _OCTAVES]
    n_shorter, median = 0.0, 0
    while median < len(rows) - 1 and n_shorter + rows[median] < sum(rows) / 2:
        n_shorter += rows[median]
        median += 1
    longer = _OCTAVES[median + 1 :]
    chosen = {f"cell/{octave}/positive" for octave in longer}
    groups = {
        "long_positive": _total(s, sorted(chosen)),
        "others": _total(s, [f"cell/{cell}" for cell in _CELLS if f"cell/{cell}" not in chosen]),
    }
    return groups if groups["long_positive"]["tokens"] else {}


def _total(s: Mapping[str, float], names: list[str]) -> dict[str, float]:
    return {measure: math.fsum(s[f"{name}/{measure}"] for name in names) for measure in MEASURES}
