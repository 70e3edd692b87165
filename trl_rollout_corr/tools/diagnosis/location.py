"""Parts of the data that cause the whole gap, if any: tokens, completions, turns, prompts."""

from typing import NamedTuple

import numpy as np

from ..formats import number
from .measures import FLOOR, rms, spearman
from .observed import DumpedTokens


_ALL = 0.99  # share of d^2 that is called all of the gap
_MOST = 0.95  # smallest share that is worth a sentence
_CONTRAST = 3.0  # smallest ratio of the levels of the two kinds of units
_APART = 0.8  # smallest share of the variance of log levels that lies between the two kinds (0.64 in a Gaussian)
_LIKELY, _SURELY = 3.0, 6.0  # ratios of neighbours at a split, as good as shares of 0.8 and 0.9
_CUT = 3.0  # the log-ratio of a token is capped at this many usual sizes, so that a few tokens do not decide
_SOUND = 0.03  # share of the usual size below which units are equally sound
_LENGTH = 5  # tokens that suffice to judge a unit
_TIMES = 1.5  # completions per prompt from which prompts are units, too
_LEAST = 2  # units on each side of a split
# Share of the deviating units that must be this many times above sound units of the same step and age
_MIXED, _BEYOND = 0.7, 2.0
_FEW, _SHOWN = 10, 3  # most tokens that may cause the whole gap, and how many of them are shown


class Split(NamedTuple):
    """Units, such as completions, split into deviating and sound ones."""

    off: np.ndarray  # True for deviating units, among units that can be judged
    n_units: int
    apart: float  # how clear the split is: the ratio of the neighbouring levels, or the distance of the two kinds
    contrast: float  # typical level of deviating units, relative to the others
    tokens: np.ndarray  # tokens of deviating units, among all tokens
    share: float  # their share of the sum of squares

    @property
    def quantity(self) -> str:
        """The share of the gap, as the beginning of a sentence."""
        return _quantity(self.share)


def _quantity(share: float) -> str:
    return "All of the gap" if share >= _ALL else f"A share of {number(share)} of d^2"


def split_units(tokens: DumpedTokens, units: np.ndarray) -> Split | None:
    """
    Split units where their levels are furthest apart. `units`, `(N,)`, numbers the unit of each token, below 0 for
    none. Returns `None` if they are not apart, or if the step or the age of the samples explains it.
    """
    here = tokens.core & (units >= 0)
    if not here.any():
        return None
    usual = tokens.usual_size(here)
    here &= usual > FLOOR  # no gap can show at tokens that both sides are sure of
    if not here.any():
        return None
    names, unit = np.unique(units[here], return_inverse=True)
    counts = np.bincount(unit)
    levels = np.bincount(unit, np.minimum(np.abs(tokens.d[here]) / usual[here], _CUT)) / counts
    judged = counts >= _LENGTH
    if judged.sum() < 2 * _LEAST:
        return None
    # all units below a small share of the usual size, and below the floor, are equally sound
    least = max(_SOUND, FLOOR / max(rms(tokens.d[here]), FLOOR))
    place, apart, contrast = _place(np.sort(np.log(np.maximum(levels[judged], least))))
    if apart < _LIKELY or contrast < _CONTRAST:
        return None
    off = levels >= np.sort(levels[judged])[place]
    if not _differs_at_equal_step(tokens, here, unit, np.maximum(levels, least), off & judged, ~off & judged):
        return None
    deviating = np.isin(units, names[off]) & (units >= 0)
    share = tokens.share_of(deviating)
    return Split(off, len(np.unique(units[units >= 0])), apart, contrast, deviating, share) if share >= _MOST else None


def _place(levels: np.ndarray) -> tuple[int, float, float]:
    """
    Place to split logarithms of levels in ascending order: the first place of the upper kind, how far the kinds are
    apart, and the ratio of their means. Otsu's criterion serves two kinds of about equal number, the largest step a
    few deviating units.
    """
    n = len(levels)
    places = np.arange(_LEAST, n - _LEAST + 1)
    steps = np.exp(levels[places] - levels[places - 1])
    sums, total = np.cumsum(levels), float(levels.sum())
    lower, upper = sums[places - 1] / places, (total - sums[places - 1]) / (n - places)
    between = places * (n - places) / n**2 * np.square(upper - lower) / max(float(levels.var()), 1e-12)
    # on the scale of steps
    otsu = _LIKELY + (_SURELY - _LIKELY) * (between - _APART) / 0.1
    best = int(np.argmax(np.maximum(steps, otsu)))
    return int(places[best]), float(max(steps[best], otsu[best])), float(np.exp(upper[best] - lower[best]))


def _differs_at_equal_step(
    tokens: DumpedTokens, here: np.ndarray, unit: np.ndarray, levels: np.ndarray, off: np.ndarray, sound: np.ndarray
) -> bool:
    """True if most deviating units lie far above sound units of the same step and age."""
    ages = np.nan_to_num(tokens.staleness, nan=-1.0)
    _, cell = np.unique(np.stack([tokens.step, ages]), axis=1, return_inverse=True)
    cells = cell.ravel()[tokens.row[here]]
    highest = np.full(int(cells.max()) + 1, np.inf)  # level of the sound units of a cell
    for which in np.unique(cells[sound[unit]]):
        highest[which] = levels[unit[(cells == which) & sound[unit]]].max()
    beyond = np.zeros(len(levels))
    np.maximum.at(beyond, unit, levels[unit] / highest[cells])
    return bool((beyond[off] > _BEYOND).mean() >= _MIXED)


def completions(tokens: DumpedTokens) -> Split | None:
    """The completions that cause the gap."""
    return split_units(tokens, tokens.row)


def where(tokens: DumpedTokens) -> list[str]:
    """Sentences about the tokens, prompts, turns or completions that cause the whole gap; none if it is everywhere."""
    if tokens.size < FLOOR:
        return []
    if single := _single_tokens(tokens):
        return [single]
    sentences = []
    prompts = split_units(tokens, tokens.prompt[tokens.row])
    rows = completions(tokens)
    if prompts is not None and prompts.n_units * _TIMES <= len(np.unique(tokens.row)):
        sentences.append(f"{prompts.quantity} is in {_count(prompts, 'prompts')}.")
    if later := _in_later_turns(tokens):
        sentences.append(later)
    elif rows is not None:
        sentences.append(f"{rows.quantity} is in {_count(rows, 'completions')}.")
    return sentences


def _in_later_turns(tokens: DumpedTokens) -> str:
    """A sentence about the turns after the first, if they cause the whole gap; else empty."""
    later = tokens.turn_place > 0
    if not later.any() or later.all():
        return ""
    share = tokens.share_of(later)
    if share < _MOST or rms(tokens.d[later]) < _CONTRAST * rms(tokens.d[~later]):
        return ""
    turns, every = len(np.unique(tokens.turn[later])), len(np.unique(tokens.turn))
    return f"{_quantity(share)} is in the turns after the first of a completion, {turns:,} of {every:,} turns."


def _count(split: Split, units: str) -> str:
    return f"{int(split.off.sum()):,} of {split.n_units:,} {units}"


def _single_tokens(tokens: DumpedTokens) -> str:
    """A sentence about a few tokens that cause the whole gap; empty if there are none."""
    order = np.argsort(-np.abs(tokens.d))
    sums = np.cumsum(np.square(tokens.d[order]))
    n = int(np.searchsorted(sums, _ALL * sums[-1])) + 1
    if n > min(_FEW, len(tokens) / 100):
        return ""
    shown = "; ".join(_token(tokens, int(i)) for i in order[: min(n, _SHOWN)])
    first = " the largest are" if n > _SHOWN else ""
    return f"All of the gap is in {n} of {len(tokens):,} tokens:{first} {shown}."


def _token(tokens: DumpedTokens, i: int) -> str:
    sides = f"{number(tokens.train[i])} in the trainer and {number(tokens.rollout[i])} in the sampler"
    place = f"token {tokens.position[i] + 1} of a completion of step {tokens.step[tokens.row[i]]}"
    return f"{place}{tokens.words(i)}, with {sides}"


def growth(tokens: DumpedTokens, split: Split) -> float:
    """Rank correlation of the step with the size of the log-ratio at the tokens of deviating units."""
    here = split.tokens & tokens.core
    return spearman(tokens.step[tokens.row[here]].astype(float), np.abs(tokens.d[here]))


def begun(tokens: DumpedTokens, split: Split) -> float:
    """
    Share of the deviating completions that deviate from their beginning: one of the first three tokens where a gap can
    show is further off than in sound completions.
    """
    visible = tokens.core & (tokens.usual > FLOOR)
    sound = rms((tokens.d / np.maximum(tokens.usual, FLOOR))[visible & ~split.tokens])
    far = np.abs(tokens.d) > np.maximum(3 * sound * tokens.usual, FLOOR / 2)
    here = np.flatnonzero(visible & split.tokens)
    starts = np.flatnonzero(np.diff(tokens.row[here], prepend=-1))
    return float(np.mean([far[here[i : i + 3]].any() for i in starts])) if len(starts) else 0.0
