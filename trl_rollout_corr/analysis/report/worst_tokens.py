"""The worst tokens with their text, and tokens without a log-ratio."""

import math
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from ...dumps.sequences import Sequences


_WORST = 20
# Of the furthest tokens, those with the same text are one row: a percent of all, within these limits
_AMONG = (200, 2000)
_PER_COMPLETION = 3  # rows, so that one broken completion does not hide the others
_BROKEN = 10
_EXCERPTS = 2
_AROUND = 6  # tokens of context on either side
_SHOWN = 240  # tokens of an excerpt


class Token(NamedTuple):
    """A token: its place, its text with the tokens around it, and its numbers in the dump."""

    step: int
    row: int
    position: int  # in the completion, from 1
    before: str
    text: str
    after: str
    train: float  # probability under the trainer
    rollout: float  # and under the sampler
    d: float
    kept: bool
    reward: float
    sampled: bool  # whether its sequence was drawn at random
    times: int = 1  # tokens among the furthest with the same text and sign of d


class Excerpt(NamedTuple):
    """A part of a completion around its worst token."""

    step: int
    reward: float  # NaN if unknown
    length: int  # tokens of the completion
    first: int  # position of the first token that is shown
    prompt: str  # its end
    tokens: list[tuple[str, str, float]]  # text, state ("kept", "rejected", "broken" or "tool") and log-ratio


class Worst(NamedTuple):
    """The worst tokens of a dump."""

    tokens: list[Token]  # one of each text and sign of d, the furthest
    among: int  # tokens among which they were looked for
    excerpts: list[Excerpt]  # of the first of their completions
    broken: list[Token]  # the first ones without a finite log-ratio
    n_broken: int


def find_worst(sequences: Sequences) -> Worst:
    """The worst tokens of a dump."""
    worst, among = _worst(sequences)
    first_of_row: dict[int, Token] = {}
    for token in worst:
        first_of_row.setdefault(token.row, token)
    excerpts = [_excerpt(sequences, token) for token in list(first_of_row.values())[:_EXCERPTS]]
    broken = np.flatnonzero(sequences.broken)
    return Worst(worst, among, excerpts, [_token(sequences, int(i)) for i in broken[:_BROKEN]], len(broken))


def _worst(sequences: Sequences) -> tuple[list[Token], int]:
    """One token of each text and sign of `d`, the furthest, and the number of tokens among which they were looked for."""
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
            found[key] = found[key]._replace(times=found[key].times + 1)
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
