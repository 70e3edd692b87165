"""Tables of tokens by text: the worst tokens, and the tokens that the correction rejects."""

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
import pandas as pd

from ...settings.resolve import Settings
from ..dump.sequences import Sequences
from ..formats import percent


_ROWS = 12  # of a table of lost tokens
_WORST = 20  # rows of the table of the worst tokens
# The furthest percent of all tokens, within these limits, is grouped by text, one row per text
_AMONG = (200, 2000)
_PER_COMPLETION = 3  # rows at most, so that one broken completion does not hide the others
_AROUND = 6  # tokens of context on either side


class Example(NamedTuple):
    """The text of a token in its place."""

    text: str
    before: str
    after: str


class Token(NamedTuple):
    """One of the worst tokens, and its numbers in the dump."""

    example: Example
    d: float  # NaN or infinite for a token without a log-probability
    times: int  # tokens among the furthest with the same text and sign of d
    train: float  # probability under the trainer
    rollout: float  # and under the sampler
    step: int
    position: int  # in the completion, from 1
    kept: bool


class Worst(NamedTuple):
    """The worst tokens of a dump."""

    tokens: list[Token]  # one per text and sign of d: first tokens without a finite log-ratio, then the furthest
    among: int  # number of tokens that were searched
    broken: int  # tokens of the loss without a finite log-ratio


class LostText(NamedTuple):
    """Rejected tokens with one text and one sign of the advantage."""

    example: Example
    times: int
    completions: int  # number of completions with such a token
    share: float  # of all rejected tokens of this sign
    occurs: float  # the text's share of all tokens of this sign
    train: float  # mean probability under the trainer
    rollout: float  # and under the sampler


class LostTable(NamedTuple):
    """The texts rejected most, the most frequent first, and the numbers that their shares refer to."""

    sign: str  # of the advantage: positive or negative
    rejected: int  # tokens
    tokens: int  # of this sign
    completions: int  # with a rejected token
    rows: list[LostText]


class Lost(NamedTuple):
    """The tables of a dump. All of them count the sequences that represent the batch."""

    tables: list[LostTable]
    text: str  # what the tables mean under the settings of the run
    completions: int  # sequences that were counted
    drawn: bool  # True if they were drawn at random


def _example(sequences: Sequences, index: int) -> Example:
    """The token at an index of all tokens, with its neighbours."""
    row = int(sequences.row[index])
    place, n = index - int(sequences.starts[row]), int(sequences.lengths[row])
    before, after = range(max(place - _AROUND, 0), place), range(place + 1, min(place + 1 + _AROUND, n))
    around = ("".join(sequences.text(row, i) for i in places) for places in (before, after))
    return Example(sequences.text(row, place), *around)


# The worst -----------------------------------------------------------------------------------------------------------


def find_worst(sequences: Sequences) -> Worst:
    """The worst tokens of a dump."""
    size = sequences.distance
    among = min(int(np.clip(len(size) // 100, *_AMONG)), len(size))
    furthest = np.argsort(-size, kind="stable")[:among]
    furthest = furthest[size[furthest] > 0]
    signs = np.where(sequences.broken, 0.0, np.sign(sequences.log_ratio))
    chosen: dict[tuple[str, float], int] = {}
    times: Counter[tuple[str, float]] = Counter()
    of_row: Counter[int] = Counter()
    for i, row in zip(furthest.tolist(), sequences.row[furthest].tolist(), strict=True):
        key = sequences.text(row, i - int(sequences.starts[row])), float(signs[i])
        times[key] += 1
        if key not in chosen and len(chosen) < _WORST and of_row[row] < _PER_COMPLETION:
            of_row[row] += 1
            chosen[key] = i
    tokens = [_worst(sequences, i, times[key]) for key, i in chosen.items()]
    return Worst(tokens, len(furthest), int(sequences.broken.sum()))


def _worst(sequences: Sequences, i: int, times: int) -> Token:
    row = int(sequences.row[i])
    return Token(
        _example(sequences, i),
        float(sequences.log_ratio[i]),
        times,
        math.exp(min(sequences.train_logps[i], 60.0)),
        math.exp(min(sequences.rollout_logps[i], 60.0)),
        int(sequences.step[row]),
        i - int(sequences.starts[row]) + 1,
        bool(sequences.keep[i]),
    )


# Tokens that lose their gradient -------------------------------------------------------------------------------------


def find_lost(sequences: Sequences, settings: Settings | None) -> Lost:
    """Find the tokens that lose their gradient under the settings of a run."""
    advantage = np.nan_to_num(sequences.advantage_of_token)
    tables = [
        table
        for sign, of_sign in (("positive", advantage > 0), ("negative", advantage < 0))
        if (table := _table(sequences, sign, sequences.counted & of_sign))
    ]
    notes = [] if tables else ["No token with an advantage other than 0 is rejected in these completions."]
    if settings is not None and settings.rollout_metrics_only:
        notes.append("The run only measures (`rollout_metrics_only`): these tokens would have been rejected.")
    criteria = settings.criteria if settings else ()
    if criteria and all(criterion.unit != "token" for criterion in criteria):
        notes.append(
            "The criteria judge whole completions or turns, so a text is rejected together with the text around it."
        )
    return Lost(tables, " ".join(notes), int(sequences.represents.sum()), bool(sequences.sampled.any()))


def _table(sequences: Sequences, sign: str, here: np.ndarray) -> LostTable | None:
    """The table of the rejected tokens with one sign of the advantage; `None` without any."""
    places = np.flatnonzero(here & (sequences.coefficients == 0))
    if not places.size:
        return None
    all_ids = sequences.token_ids[here]
    tokens = pd.DataFrame({"token": sequences.token_ids[places], "place": places, "row": sequences.row[places]})
    for name, logps in (("train", sequences.train_logps), ("rollout", sequences.rollout_logps)):
        tokens[name] = np.exp(np.minimum(logps[places], 0.0)).astype(float)
    texts = tokens.groupby("token").agg(
        times=("place", "size"),
        last=("place", "last"),  # in order of steps: the example
        completions=("row", "nunique"),
        train=("train", "mean"),
        rollout=("rollout", "mean"),
    )
    rows = []
    for text in texts.nlargest(_ROWS, "times").itertuples():
        example = _example(sequences, text.last)
        example = example._replace(text=example.text or f"#{text.Index}")
        share, occurs = text.times / len(places), np.count_nonzero(all_ids == text.Index) / len(all_ids)
        rows.append(LostText(example, text.times, text.completions, share, occurs, text.train, text.rollout))
    return LostTable(sign, len(places), len(all_ids), tokens["row"].nunique(), rows)


def percent_of(share: float) -> str:
    """A share in a table, in percent."""
    return percent(round(share, 3))
