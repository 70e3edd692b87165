"""Who is rejected or down-weighted: shares by group of tokens, as logged or counted over a dump."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch

from ...correction.accounting import Accounts, account, turns_of
from ...dumps.reading import Sequences
from ...messages import PREFIX
from ...settings.config import RolloutCorrectionConfig


# What groups have in common
FAMILIES = {
    "length": "by length of the completion",
    "position": "by position in the completion",
    "advantage": "by sign of the advantage",
    "reward": "by reward",
    "turn": "by turn",
    "long": "of long completions with a positive advantage",
}
_NAMES = {"long_positive": "long_long, positive", "others": "long_all others"}
_ORDER = {"negative": -1.0, "below_0": -1.0, "zero": 0.0, "long, positive": 0.0, "positive": 1.0}
_ROWS_AT_ONCE = 256


class Share(NamedTuple):
    """What part of a group of tokens is rejected, and how far weights reduce the rest. Logged shares have no `tokens`."""

    label: str
    tokens: int | None
    rejected: float | None
    downweighted: float | None


def logged_shares(logs: Iterable[Mapping[str, Any]]) -> dict[str, list[Share]]:
    """Means over the log entries, by family of groups."""
    values = defaultdict(list)
    for entry in logs:
        for key, value in entry.items():
            measure, _, group = key.removeprefix(PREFIX).partition("/")
            if measure in ("rejected", "downweighted") and key.startswith(PREFIX) and np.isfinite(value):
                values[group, measure].append(value)
    means = {key: float(np.mean(of_key)) for key, of_key in values.items()}
    groups = dict.fromkeys(group for group, _ in values)
    return _families(
        {name: (None, means.get((name, "rejected")), means.get((name, "downweighted"))) for name in groups}
    )


def counted_shares(sequences: Sequences, config: RolloutCorrectionConfig) -> dict[str, list[Share]]:
    """Over the tokens that represent the batch, by family of groups."""
    rows = np.flatnonzero(sequences.represents)
    blocks = (rows[start : start + _ROWS_AT_ONCE] for start in range(0, len(rows), _ROWS_AT_ONCE))
    total = reduce(add, (_account(sequences, block) for block in blocks))
    shares = {}
    for group, counts in total.groups().items():
        if tokens := counts["tokens"]:
            rejected = counts["rejected"] / tokens if config.criteria else None
            downweighted = counts["removed"] / tokens if config.applies_weights else None
            shares[group] = (int(tokens), rejected, downweighted)
    return _families(shares)


def _account(sequences: Sequences, rows: np.ndarray) -> Accounts:
    columns = (sequences.valid, sequences.valid & sequences.keep, sequences.coefficients, sequences.mask)
    valid, keep, coefficients, mask = (sequences.padded(column, rows) for column in columns)
    rewards = torch.from_numpy(sequences.reward[rows].astype(np.float64))
    advantages = torch.from_numpy(np.nan_to_num(sequences.advantage[rows].astype(np.float64)))
    return account(valid, keep, coefficients.double(), advantages, rewards, turns_of(mask))


def _families(shares: Mapping[str, tuple[int | None, float | None, float | None]]) -> dict[str, list[Share]]:
    """Groups by family, in order, from `length_16_63` and the like. What says nothing is left out."""
    families: dict[str, list[tuple[float, Share]]] = {family: [] for family in FAMILIES}
    for group, (tokens, rejected, downweighted) in shares.items():
        family, _, bucket = _NAMES.get(group, group).partition("_")
        if family in FAMILIES and bucket != "mean" and (rejected, downweighted) != (None, None):
            families[family].append((_order(bucket), Share(_label(bucket), tokens, rejected, downweighted)))
    return {
        family: [share for _, share in sorted(found, key=lambda pair: pair[0])]
        for family, found in families.items()
        if found
    }


def _order(bucket: str) -> float:
    try:
        return _ORDER[bucket] if bucket in _ORDER else float(bucket.split("_")[0])
    except ValueError:
        return np.inf


def _label(bucket: str) -> str:
    """`16_63` becomes 16-63, `0.25_to_0.5` 0.25 to 0.5."""
    low, _, high = bucket.partition("_")
    return f"{low}-{high}" if low.isdigit() and high.isdigit() else bucket.replace("_", " ")
