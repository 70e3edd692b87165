"""
Exact changes of what was sampled: rows of a dump in, rows of a dump out. Lists of a row have one entry per token of the
completion, log-probabilities are in nats.
"""

import math
import struct
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


# Values that are not the log-probabilities of the sampled tokens ----------------------------------------------------------


def zeros(row: Row) -> dict[str, Any]:
    """Nobody asked for log-probabilities, and all of them were filled with 0."""
    return {**row, "rollout_logps": [0.0] * len(row["rollout_logps"])}


def some_zeros(row: Row) -> dict[str, Any]:
    """A request in four came back without log-probabilities."""
    return zeros(row) if sum(row["token_ids"]) % 4 == 0 else dict(row)


def zeros_inside(row: Row) -> dict[str, Any]:
    """The answer of a tool, which nobody sampled, has fillers and counts for the loss."""
    n = len(row["rollout_logps"])
    return {
        **row,
        "rollout_logps": [0.0 if n // 3 <= i < n // 3 + 6 else x for i, x in enumerate(row["rollout_logps"])],
    }


def zeros_at_the_end(row: Row) -> dict[str, Any]:
    """The list was too short, and the rest was filled."""
    n = len(row["rollout_logps"])
    return {**row, "rollout_logps": [0.0 if i >= n - n // 4 - 1 else x for i, x in enumerate(row["rollout_logps"])]}


def mean_of_all(row: Row) -> dict[str, Any]:
    """Each token has the mean of its completion."""
    logps = row["rollout_logps"]
    return {**row, "rollout_logps": [sum(logps) / max(len(logps), 1)] * len(logps)}


def backwards(row: Row) -> dict[str, Any]:
    """The values are in another order than the tokens."""
    return {**row, "rollout_logps": row["rollout_logps"][::-1]}


# A fault that no cause covers ---------------------------------------------------------------------------------------------


def in_float16(row: Row) -> dict[str, Any]:
    """Log-probabilities that were sent as float16."""
    return {**row, "rollout_logps": [struct.unpack("e", struct.pack("e", x))[0] for x in row["rollout_logps"]]}
