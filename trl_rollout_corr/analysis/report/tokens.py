"""The worst tokens with their text, and tokens without a log-ratio."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...dumps.reading import Sequences


_WORST = 20
# Of the furthest tokens, those with the same text are one row: a percent of all, within these limits
_AMONG = (200, 2000)
_PER_COMPLETION = 3  # rows, so that one broken completion does not hide the others
_BROKEN = 10
_EXCERPTS = 2
_AROUND = 6  # tokens of context on either side
_SHOWN = 240  # tokens of an excerpt


@dataclass
class Token:
    """A token, where it is, what the two policies say about it, and how many of the furthest tokens are like it."""

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
    times: int = 1


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


class Worst(NamedTuple):
    """
    The worst tokens, each with its likes, among how many of the furthest they were counted, excerpts of the first of their
    completions, and how many are broken, with the first of those.
    """

    tokens: list[Token]
    among: int
    excerpts: list[Excerpt]
    broken: list[Token]
    n_broken: int


def find_worst(sequences: Sequences) -> Worst:
    """The worst tokens of a dump."""
    worst, among = _worst(sequences)
    first_of_row: dict[int, Token] = {}
    for token in worst:
        first_of_row.setdefault(token.row, token)
    broken = np.flatnonzero(sequences.broken)
    return Worst(
        worst,
        among,
        [_excerpt(sequences, token) for token in list(first_of_row.values())[:_EXCERPTS]],
        [_token(sequences, int(i)) for i in broken[:_BROKEN]],
        len(broken),
    )


def _worst(sequences: Sequences) -> tuple[list[Token], int]:
    """One token of each text and sign of `d`, the furthest, and among how many tokens they were looked for."""
    size = np.where(sequences.valid, np.abs(sequences.log_ratio), -1.0)
    among = int(np.clip(len(size) // 100, *_AMONG))
    largest: Any = np.argpartition(-size, min(among, len(size) - 1))[:among] if len(size) else []
    found: dict[tuple[str, bool], Token] = {}
    of_row: Counter[int] = Counter()
    furthest = [int(i) for i in sorted(largest, key=lambda i: (-size[i], i)) if size[i] > 0]
    for i in furthest:
        row = int(sequences.row[i])
        key = sequences.text(row, i - int(sequences.starts[row])), bool(sequences.log_ratio[i] > 0)
        if key in found:
            found[key].times += 1
        elif len(found) < _WORST and of_row[row] < _PER_COMPLETION:
            of_row[row] += 1
            found[key] = _token(sequences, i)
    return list(found.values()), len(furthest)


def _token(sequences: Sequences, i: int) -> Token:
    row = int(sequences.row[i])
    place = i - int(sequences.starts[row])
    texts = sequences.texts(row)
    return Token(
        int(sequences.step[row]),
        row,
        place + 1,
        "".join(texts[max(place - _AROUND, 0) : place]),
        texts[place],
        "".join(texts[place + 1 : place + 1 + _AROUND]),
        _probability(sequences.train_logps[i]),
        _probability(sequences.rollout_logps[i]),
        float(sequences.log_ratio[i]),
        bool(sequences.keep[i]),
        float(sequences.reward[row]),
        bool(sequences.sampled[row]),
    )


def _probability(logp: float) -> float:
    return math.exp(min(float(logp), 60.0)) if not math.isnan(logp) else math.nan


def _excerpt(sequences: Sequences, worst: Token) -> Excerpt:
    whole = sequences.slice(worst.row)
    length = whole.stop - whole.start
    start = max(min(worst.position - 1 - _SHOWN // 2, length - _SHOWN), 0)
    texts, log_ratio = sequences.texts(worst.row), sequences.log_ratio[whole]
    shown = range(start, min(start + _SHOWN, length))
    tokens = [(texts[j], _state(sequences, whole.start + j), float(log_ratio[j])) for j in shown]
    return Excerpt(worst.step, worst.reward, length, start + 1, sequences.prompt(worst.row)[-300:], tokens)


def _state(sequences: Sequences, i: int) -> str:
    if not sequences.mask[i]:
        return "tool"
    if sequences.broken[i]:
        return "broken"
    return "kept" if sequences.keep[i] else "rejected"
