"""The worst tokens with their text, and tokens without a log-ratio."""

import math
from typing import NamedTuple

import numpy as np

from .table import Table


_AROUND = 6  # tokens of context on either side
_PER_ROW = 3  # worst tokens of one completion, so that one broken completion does not hide the others
_SHOWN = 240  # tokens of a worst completion


class Token(NamedTuple):
    """A token, where it is, and what the two policies say about it."""

    step: int
    row: int
    position: int
    before: str
    text: str
    after: str
    train: float
    rollout: float
    d: float
    kept: bool
    reward: float
    sampled: bool


class Excerpt(NamedTuple):
    """
    Part of a completion around its worst token.

    Args:
        step (`int`):
            Optimizer step.
        reward (`float`):
            Its reward; NaN if unknown.
        length (`int`):
            Its number of tokens.
        first (`int`):
            Position of the first token that is shown.
        prompt (`str`):
            End of the prompt.
        tokens (`list[tuple[str, str, float]]`):
            Text, state (`"kept"`, `"rejected"`, `"broken"` or `"tool"`) and log-ratio of each token that is shown.
    """

    step: int
    reward: float
    length: int
    first: int
    prompt: str
    tokens: list[tuple[str, str, float]]


def worst_tokens(table: Table, count: int = 20) -> list[Token]:
    """Tokens of the loss with the largest `|d|` over all rows, the largest first, a few of each completion."""
    size = np.where(table.valid, np.abs(table.d), -1.0)
    candidates = np.argpartition(-size, min(100 * count, len(size) - 1))[: 100 * count] if len(size) else []
    found, taken = [], {}
    for i in sorted(candidates, key=lambda i: (-size[i], i)):
        row = int(table.row[i])
        if size[i] <= 0 or len(found) == count:
            break
        taken[row] = taken.get(row, 0) + 1
        if taken[row] <= _PER_ROW:
            found.append(_token(table, int(i)))
    return found


def broken_tokens(table: Table, count: int = 10) -> list[Token]:
    """Tokens of the loss whose log-ratio is NaN or infinite, in order of steps."""
    return [_token(table, int(i)) for i in np.flatnonzero(table.broken)[:count]]


def _token(table: Table, i: int) -> Token:
    row = int(table.row[i])
    place = i - int(table.starts[row])
    texts = table.texts(row)
    return Token(
        int(table.step[row]),
        row,
        place + 1,
        "".join(texts[max(place - _AROUND, 0) : place]),
        texts[place],
        "".join(texts[place + 1 : place + 1 + _AROUND]),
        _probability(table.train[i]),
        _probability(table.rollout[i]),
        float(table.d[i]),
        bool(table.keep[i]),
        float(table.reward[row]),
        bool(table.sampled[row]),
    )


def _probability(logp: float) -> float:
    return math.exp(min(float(logp), 60.0)) if not math.isnan(logp) else math.nan


def worst_completions(worst: list[Token], table: Table, count: int = 2) -> list[Excerpt]:
    """The completions of the worst tokens."""
    first_of_row = {}
    for token in worst:
        first_of_row.setdefault(token.row, token)
    return [_excerpt(table, token) for token in list(first_of_row.values())[:count]]


def _excerpt(table: Table, worst: Token) -> Excerpt:
    whole = table.slice(worst.row)
    length = whole.stop - whole.start
    start = max(min(worst.position - 1 - _SHOWN // 2, length - _SHOWN), 0)
    texts = table.texts(worst.row)
    shown = range(start, min(start + _SHOWN, length))
    tokens = [(texts[j], _state(table, whole.start + j), float(table.d[whole.start + j])) for j in shown]
    return Excerpt(worst.step, worst.reward, length, start + 1, table.prompt(worst.row)[-300:], tokens)


def _state(table: Table, i: int) -> str:
    if not table.mask[i]:
        return "tool"
    if table.broken[i]:
        return "broken"
    return "kept" if table.keep[i] else "rejected"
