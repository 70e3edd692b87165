"""The worst tokens with their text."""

import math
from collections import Counter
from typing import NamedTuple

import numpy as np

from ...dumps.sequences import Sequences


_WORST = 20  # rows
# Of the furthest tokens, those with the same text are one row: a percent of all, within these limits
_AMONG = (200, 2000)
_PER_COMPLETION = 3  # rows, so that one broken completion does not hide the others
_AROUND = 6  # tokens of context on either side


class Token(NamedTuple):
    """A token: its place, its text with the tokens around it, and its numbers in the dump."""

    before: str
    text: str
    after: str
    d: float  # NaN or infinite for a token without a log-probability
    times: int  # tokens among the furthest with the same text and sign of d
    train: float  # probability under the trainer
    rollout: float  # and under the sampler
    step: int
    position: int  # in the completion, from 1
    kept: bool
    reward: float
    sampled: bool  # whether its sequence was drawn at random


class Worst(NamedTuple):
    """The worst tokens of a dump."""

    tokens: list[Token]  # one of each text and sign of d: those without a finite log-ratio first, then the furthest
    among: int  # tokens among which they were looked for
    broken: int  # tokens of the loss without a finite log-ratio


def find_worst(sequences: Sequences) -> Worst:
    """The worst tokens of a dump."""
    size = np.where(sequences.mask, np.nan_to_num(np.abs(sequences.log_ratio), nan=np.inf), 0.0)
    among = min(int(np.clip(len(size) // 100, *_AMONG)), len(size))
    furthest = np.argsort(-size, kind="stable")[:among]
    furthest = furthest[size[furthest] > 0]
    signs = np.where(sequences.broken, 0.0, np.sign(sequences.log_ratio))
    chosen: dict[tuple[str, float], tuple[int, int]] = {}
    times: Counter[tuple[str, float]] = Counter()
    of_row: Counter[int] = Counter()
    for i, row in zip(furthest.tolist(), sequences.row[furthest].tolist(), strict=True):
        key = sequences.text(row, i - int(sequences.starts[row])), float(signs[i])
        times[key] += 1
        if key not in chosen and len(chosen) < _WORST and of_row[row] < _PER_COMPLETION:
            of_row[row] += 1
            chosen[key] = i, row
    tokens = [_token(sequences, i, row, times[key]) for key, (i, row) in chosen.items()]
    return Worst(tokens, len(furthest), int(sequences.broken.sum()))


def _token(sequences: Sequences, i: int, row: int, times: int) -> Token:
    texts, place = sequences.texts(row), i - int(sequences.starts[row])
    return Token(
        "".join(texts[max(place - _AROUND, 0) : place]),
        texts[place],
        "".join(texts[place + 1 : place + 1 + _AROUND]),
        float(sequences.log_ratio[i]),
        times,
        math.exp(min(sequences.train_logps[i], 60.0)),
        math.exp(min(sequences.rollout_logps[i], 60.0)),
        int(sequences.step[row]),
        place + 1,
        bool(sequences.keep[i]),
        float(sequences.reward[row]),
        bool(sequences.sampled[row]),
    )
