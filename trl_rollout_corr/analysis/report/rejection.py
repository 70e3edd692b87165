"""Rejected and down-weighted tokens: shares by group, logged or counted over a dump, and shares by criterion."""

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pandas as pd
import torch

from ...correction.accounting import Accounts, account, turns_of
from ...dumps.sequences import Sequences
from ...messages import PREFIX, number, percent
from ...settings.config import RolloutCorrectionConfig
from ..run import Dump


# Families of groups
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
_MEASURES = {"rejected": "rejected", "downweighted": "down-weighted"}
_ROWS_AT_ONCE = 256
# Tokens that a criterion rejects, by its name or its scope
_REJECTS = {
    "token_tv": "whose probability had changed by more than {bound} in the direction of the advantage",
    "token_kl": "whose KL divergence was above {bound} nats, in the direction of the advantage",
    "token_binary_kl": "whose KL divergence was above {bound} nats",
    "token_k1": "with a ratio {bound}",
    "seq_mean_k1": "of completions whose mean ratio was {bound}",
    "seq_sum_k1": "of completions whose product of ratios was {bound}",
    "seq_max_k1": "of completions with a ratio {bound} at some token",
    "token": "with a {divergence} above {bound}",
    "seq_mean": "of completions with a mean {divergence} above {bound}",
    "seq_sum": "of completions with a summed {divergence} above {bound}",
    "seq_max": "of completions with a {divergence} above {bound} at some token",
}


def shares_of(log: pd.DataFrame, dump: Dump | None) -> dict[str, pd.DataFrame]:
    """
    Shares of groups of tokens that are rejected and down-weighted.

    Args:
        log (`pd.DataFrame`):
            Metrics by step.
        dump ([`~trl_rollout_corr.analysis.run.Dump`] or `None`):
            The dump, which is counted if the log has no shares.

    Returns:
        `dict[str, pd.DataFrame]`: by family, a row per group. Columns `rejected` and `down-weighted` as far as the settings do
        either, and `tokens` if they were counted.
    """
    logged = _families(_logged(log))
    return logged or _families(_counted(dump.sequences, dump.config) if dump else {})


def _logged(log: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Means over the log, by group."""
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for key, mean in log.replace([np.inf, -np.inf], np.nan).mean().dropna().items():
        measure, _, group = str(key).removeprefix(PREFIX).partition("/")
        if measure in _MEASURES and str(key).startswith(PREFIX):
            groups[group][_MEASURES[measure]] = mean
    return groups


def _counted(sequences: Sequences, config: RolloutCorrectionConfig) -> dict[str, dict[str, float]]:
    """Over the tokens that represent the batch, by group."""
    groups: dict[str, dict[str, float]] = {}
    if not sequences.counted.any() or not (config.criteria or config.applies_weights):
        return groups
    rows = np.flatnonzero(sequences.represents)
    blocks = (rows[start : start + _ROWS_AT_ONCE] for start in range(0, len(rows), _ROWS_AT_ONCE))
    for group, counts in reduce(add, (_account(sequences, block) for block in blocks)).groups().items():
        if tokens := counts["tokens"]:
            rejected = {"rejected": counts["rejected"] / tokens} if config.criteria else {}
            removed = {"down-weighted": counts["removed"] / tokens} if config.applies_weights else {}
            groups[group] = {"tokens": tokens, **rejected, **removed}
    return groups


def _account(sequences: Sequences, rows: np.ndarray) -> Accounts:
    columns = (sequences.valid, sequences.valid & sequences.keep, sequences.coefficients, sequences.mask)
    valid, keep, coefficients, mask = (sequences.padded(column, rows) for column in columns)
    rewards = torch.from_numpy(sequences.reward[rows].astype(np.float64))
    advantages = torch.from_numpy(np.nan_to_num(sequences.advantage[rows].astype(np.float64)))
    return account(valid, keep, coefficients.double(), advantages, rewards, turns_of(mask))


def _families(groups: Mapping[str, Mapping[str, float]]) -> dict[str, pd.DataFrame]:
    """Groups such as `length_16_63` by family, in order."""
    buckets: dict[str, dict[str, Mapping[str, float]]] = {family: {} for family in FAMILIES}
    for group, numbers in groups.items():
        family, _, bucket = _NAMES.get(group, group).partition("_")
        if family in FAMILIES and bucket != "mean":
            buckets[family][bucket] = numbers
    columns = ("tokens", *_MEASURES.values())
    tables = {}
    for family, found in buckets.items():
        if found:
            ordered = {_label(bucket): found[bucket] for bucket in sorted(found, key=_order)}
            table = pd.DataFrame.from_dict(ordered, orient="index")
            tables[family] = table[[column for column in columns if column in table]]
    return tables


def _order(bucket: str) -> float:
    try:
        return _ORDER[bucket] if bucket in _ORDER else float(bucket.split("_")[0])
    except ValueError:
        return math.inf


def _label(bucket: str) -> str:
    """`16_63` becomes 16-63, `0.25_to_0.5` 0.25 to 0.5."""
    low, _, high = bucket.partition("_")
    return f"{low}-{high}" if low.isdigit() and high.isdigit() else bucket.replace("_", " ")


# By criterion -------------------------------------------------------------------------------------------------------------


def reasons(log: pd.DataFrame, config: RolloutCorrectionConfig) -> str:
    """
    Say which share of the tokens each criterion rejected.

    Args:
        log (`pd.DataFrame`):
            Metrics by step.
        config ([`RolloutCorrectionConfig`]):
            Configuration of the run, for the bounds.

    Returns:
        `str`: a sentence with means over the log; empty if no criterion was logged.
    """
    parts = []
    thresholds: Any = config.rollout_rs_threshold or []  # parsed when the configuration was built
    for criterion, threshold in zip(config.criteria, thresholds, strict=True):
        key = f"{PREFIX}rollout_rs_{criterion.name}_masked_fraction"
        share = log[key][np.isfinite(log[key])].mean() if key in log else math.nan
        if math.isfinite(share):
            rejects = _REJECTS.get(criterion.name, _REJECTS[criterion.scope])
            rejects = rejects.format(bound=_bound(threshold, criterion.directed), divergence=criterion.divergence)
            parts.append(f"{percent(share) if share else 'none'} of the tokens, {rejects} (`{criterion.name}`)")
    both = " Some by more than one criterion." if len(parts) > 1 else ""
    return f"Rejected: {'; '.join(parts)}.{both}" if parts else ""


def _bound(threshold: Any, directed: bool) -> str:
    if not isinstance(threshold, list):
        return number(threshold)
    if directed and threshold[0] == threshold[1]:
        return number(threshold[0])
    if directed:
        return f"{number(threshold[0])} (down) or {number(threshold[1])} (up)"
    lower, upper = threshold
    if lower == 0:
        return f"above {number(upper)}"
    return f"below {number(lower)}" if upper == math.inf else f"outside [{number(lower)}, {number(upper)}]"


def rewards(log: pd.DataFrame) -> str:
    """Mean rewards of completions that are rejected as a whole, and of the others; empty if they were not logged."""
    kept, rejected = (
        log.get(f"{PREFIX}{name}/reward_mean", pd.Series(dtype=float)).mean() for name in ("kept", "rejected")
    )
    if not math.isfinite(kept + rejected):
        return ""
    return f"The mean reward is {number(rejected)} where a completion is rejected as a whole, and {number(kept)} elsewhere."


def total(shares: pd.DataFrame) -> str:
    """Shares over all groups of a family, if the number of their tokens is known."""
    if "tokens" not in shares:
        return "Training learns least from the group with the largest share."
    tokens = shares["tokens"].sum()
    parts = [
        f"{percent(float((shares[measure] * shares['tokens']).sum() / tokens))} {measure}"
        for measure in _MEASURES.values()
        if measure in shares
    ]
    return f"Of {int(tokens):,} tokens: {', '.join(parts)}."
