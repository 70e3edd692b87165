"""
Exact changes of what was sampled: rows of a dump in, rows of a dump out. Lists of a row have one entry per token of the
completion, log-probabilities are in nats.
"""

import math
import random
import struct
from collections.abc import Callable, Mapping
from typing import Any


Row = Mapping[str, Any]
Change = Callable[[Row], dict[str, Any]]
VOCABULARY = 320  # of the models here


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


def mean_of_some(row: Row) -> dict[str, Any]:
    """Each token of one completion in two, or in ten, has the mean of its completion, where a server sent only that."""
    tokens = sum(row["token_ids"])
    rare = len(row["prompt_ids"]) % 2 == 0
    return mean_of_all(row) if tokens % (10 if rare else 2) == 0 else dict(row)


def value_before(row: Row) -> dict[str, Any]:
    """A value that is missing, one of six, is that of the token before."""
    logps = list(row["rollout_logps"])
    for i in range(1, len(logps)):
        if (row["token_ids"][i] + i) % 6 == 0:
            logps[i] = logps[i - 1]
    return {**row, "rollout_logps": logps}


def uniform_values(row: Row) -> dict[str, Any]:
    """A value that is missing, one of eight, is that of a token drawn from the whole vocabulary."""
    filled = -math.log(VOCABULARY)
    pairs = enumerate(zip(row["rollout_logps"], row["token_ids"], strict=True))
    return {**row, "rollout_logps": [filled if (token + i) % 8 == 0 else x for i, (x, token) in pairs]}


# Values that are missing --------------------------------------------------------------------------------------------------


def some_none(row: Row) -> dict[str, Any]:
    """A rollout function has no value for single tokens, one of 29."""
    pairs = enumerate(row["rollout_logps"])
    return {**row, "rollout_logps": [None if (row["token_ids"][i] + i) % 29 == 0 else x for i, x in pairs]}


# A part of the completions ------------------------------------------------------------------------------------------------


def some_broken(row: Row) -> dict[str, Any]:
    """An engine breaks one request in four, or in 16: its values are of another distribution, with noise of a nat."""
    one_in = 4 if len(row["prompt_ids"]) % 2 else 16
    return _noisy(row, 1.0) if sum(row["token_ids"]) % one_in == 0 else dict(row)


def _noisy(row: Row, size: float) -> dict[str, Any]:
    """Noise that is larger where the sampler is less sure, of the same mean of the ratio as samples have."""
    dice = random.Random(sum(row["token_ids"]))
    noisy = []
    for x in row["rollout_logps"]:
        scale = size * (1 - math.exp(x))
        noisy.append(min(x - scale * dice.gauss(0, 1) + scale**2 / 2, 0.0))
    return {**row, "rollout_logps": noisy}


# A fault that no cause covers ---------------------------------------------------------------------------------------------


def growing_noise(row: Row) -> dict[str, Any]:
    """Noise that grows from step to step, as of a kernel that gets worse."""
    return _noisy(row, 0.04 * row["step"])


def in_float16(row: Row) -> dict[str, Any]:
    """Log-probabilities that were sent as float16."""
    return {**row, "rollout_logps": [struct.unpack("e", struct.pack("e", x))[0] for x in row["rollout_logps"]]}
