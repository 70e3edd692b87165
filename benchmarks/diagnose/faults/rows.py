"""
Exact changes of what was sampled: rows of a dump in, rows of a dump out. Lists of a row have one entry per token of the
completion, log-probabilities are in nats.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any


Row = Mapping[str, Any]
Change = Callable[[Row], dict[str, Any]]


def shift_by_one(row: Row) -> dict[str, Any]:
    """Each token gets the sampler's log-probability of the token before it."""
    logps = row["rollout_logps"]
    return {**row, "rollout_logps": [*logps[:1], *logps[:-1]]}


def force_the_last_token(row: Row) -> dict[str, Any]:
    """The sampler was made to end, by a limit or a stop string, and reports the end as certain."""
    return {**row, "rollout_logps": [*row["rollout_logps"][:-1], *[0.0] * bool(row["rollout_logps"])]}


def another_first_token(row: Row) -> dict[str, Any]:
    """The sampler read another start, such as two BOS tokens: of its first token it was surer by a nat and a half."""
    first = [min(0.0, x + 1.5) if x > -1.5 else x - 1.5 for x in row["rollout_logps"][:1]]
    return {**row, "rollout_logps": [*first, *row["rollout_logps"][1:]]}


def nan_rows(row: Row) -> dict[str, Any]:
    """Whole rows of logits are NaN: the sampler has no log-probability from the middle of a completion on, in one of four."""
    n = len(row["rollout_logps"])
    broken = sum(row["token_ids"]) % 4 == 0
    return {
        **row,
        "rollout_logps": [math.nan if broken and i >= n // 2 else x for i, x in enumerate(row["rollout_logps"])],
    }
