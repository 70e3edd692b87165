"""The choice of rows from a dump with more tokens than an ordinary machine can hold in memory."""

from typing import NamedTuple

import numpy as np


# Most tokens that a command reads from a dump. `report`, the most demanding, then needs less than 2 GiB and a minute
MOST_TOKENS = 2_000_000
_PART = 0.1  # largest share of these tokens for each kind of row that is kept on purpose
_STEPS = 2_000  # most optimizer steps to read: each costs a few milliseconds, however small
_GOLDEN = (5**0.5 - 1) / 2  # the fractional parts of its multiples are spread evenly, however many there are


class RowFacts(NamedTuple):
    """Rows of a dump, `(B,)` each."""

    step: np.ndarray
    sampled: np.ndarray  # drawn at random by the run
    tokens: np.ndarray  # number of tokens of the completion
    distance: np.ndarray  # largest absolute log-ratio of the tokens of the loss; infinite where one is not finite


class Sample(NamedTuple):
    """The rows to read, `(B,)` each."""

    read: np.ndarray
    sampled: np.ndarray  # rows that represent the batch; others are read only because they are the worst
    kept: tuple[str, ...]  # kinds of rows read on purpose, in words


def choose_rows(rows: RowFacts, most: int, *, worst: bool) -> Sample:
    """
    Choose rows with at most `most` tokens, evenly over the steps. Rows of the first and the last step, rows without a
    finite log-ratio, and with `worst` the worst rows are chosen on purpose, each kind up to a share of the tokens.
    """
    drawn = rows.sampled if rows.sampled.any() else np.ones(len(rows.step), bool)
    order = _evenly(rows.step, drawn)
    ends = order[np.isin(rows.step[order], (rows.step.min(), rows.step.max()))]
    broken = order[np.isinf(rows.distance[order])]
    kinds = {"of the first and the last step": ends, "with a log-probability that is not finite": broken}
    chosen, kept = np.zeros(len(drawn), bool), []
    for name, of_kind in kinds.items():
        here = _up_to(of_kind, rows.tokens, _PART * most)
        chosen[here] = True
        kept += [f"all {name}" if len(here) == len(of_kind) else f"{len(here):,} {name}"] if len(of_kind) else []
    read = chosen.copy()
    if worst:
        furthest = np.argsort(-rows.distance, kind="stable")
        read[_up_to(furthest, rows.tokens, _PART * most)] = True
        kept.append("the worst")
    # a row that is read as one of the worst costs no more, and represents the batch if it is drawn, however far off it
    # is
    costs = np.where(read, 0, rows.tokens)
    chosen[_up_to(order, costs, most - int(rows.tokens[read].sum()))] = True
    return Sample(read | chosen, chosen & rows.sampled, tuple(kept))


def _evenly(step: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Indices of the rows of some steps, in an order whose every beginning covers these steps evenly."""
    steps, number = np.unique(step, return_inverse=True)
    places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _STEPS)).round().astype(int))
    order = np.random.default_rng(0).permutation(np.flatnonzero(among & np.isin(number, places)))
    by_step = order[np.argsort(number[order], kind="stable")]
    sorted_steps = number[by_step]
    visit = np.arange(len(by_step)) - np.searchsorted(sorted_steps, sorted_steps)  # of a step: its first row, ...
    within = (sorted_steps * _GOLDEN) % 1
    return np.asarray(by_step[np.lexsort((within, visit))])


def _up_to(order: np.ndarray, tokens: np.ndarray, most: float) -> np.ndarray:
    """The beginning of an order, with at most `most` tokens but at least one row."""
    return order[: max(int(np.searchsorted(np.cumsum(tokens[order]), most, side="right")), 1)]
