"""How the gap grows: with the step, with the age, and from the first step on."""

import numpy as np

from .measures import FLOOR, Evidence, bounded, pearson, ranks_of, rms, spearman
from .observed import DumpedTokens


ENOUGH = 8  # number of sequences of the lowest age or step that suffices to compare them alone
GROWTH = 1.4  # smallest growth of the mean square that counts
CHANCE = 3.0  # a rank correlation counts above this many standard deviations of chance
_END = 0.1  # share of the sequences compared at each end
_JUMP = 9.0  # growth of the mean square above which it need not be monotone
# A sum of learning rates too small to cause a gap: a tenth of one step at the smallest rate in use
_STILL = 1e-7
_SMALL = 0.03  # root mean square of the log-ratio, in nats, that rounding explains


def growing(tokens: DumpedTokens, x: np.ndarray, sentence: str) -> Evidence | None:
    """
    Test whether the mean square of `d` grows with `x` (shape `(B,)`), an age, a step or a number of tokens of padding.
    """
    here = tokens.core
    squares = tokens.row_means(np.square(tokens.d) * here)  # sequences hardly differ in tokens outside the core
    typical = tokens.level_of_rows
    finite = np.isfinite(x) & np.isfinite(squares)
    values, squares, lengths = x[finite], squares[finite], tokens.lengths[finite]
    if len(values) < 8 or values.min() == values.max():
        return None
    lowest, highest = values == values.min(), values >= np.quantile(values, 1 - _END)
    if lowest.sum() < ENOUGH and (end := np.quantile(values, _END)) < values.max():
        lowest = values <= end
    low, high = (float(np.average(squares[here], weights=lengths[here])) for here in (lowest, highest))
    growth = high / max(low, (FLOOR / 4) ** 2)
    correlation, chance = spearman(values, typical[finite]), (len(values) - 1) ** -0.5
    numbers = {"low": low**0.5, "high": high**0.5, "correlation": correlation}
    share = bounded(1 - low / max(float(np.average(squares, weights=lengths)), 1e-300))
    if growth > _JUMP:  # a gap that appears at once and stays is not monotone in `x`
        correlation, chance = max((correlation, chance), _step_up(typical[finite], lowest))
    more = growth > GROWTH and correlation > CHANCE * chance
    return Evidence(correlation if more else 0.0, share, numbers, sentence)


def _step_up(values: np.ndarray, lowest: np.ndarray) -> tuple[float, float]:
    """
    Rank correlation of the values with not being among the lowest sequences, and its standard deviation under chance.
    """
    ranks = ranks_of(values)
    n, m = int((~lowest).sum()), int(lowest.sum())
    beyond = float(ranks[~lowest].sum() - n * (n - 1) / 2) / (n * m) if n else 0.5
    return 2 * beyond - 1, ((n + m + 1) / (3 * max(n, 1) * m)) ** 0.5


def at_equal(strata: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    """Rank correlation of `x` and `y` within strata, pooled, in standard deviations under chance."""
    ranks, free = np.zeros((2, len(strata))), -1
    for stratum in np.unique(strata):
        here = strata == stratum
        if len(np.unique(x[here])) > 1:
            ranks[:, here] = [values - values.mean() for values in (ranks_of(x[here]), ranks_of(y[here]))]
            free += int(here.sum()) - 1
    return float(pearson(*ranks) * max(free, 0) ** 0.5)


def step_explains(tokens: DumpedTokens) -> bool:
    """True if the gap grows with the step at equal age, but not with the age at equal step. Both rise with a queue."""
    size = tokens.level_of_rows
    finite = np.isfinite(size)
    size, step, age = size[finite], tokens.step[finite], np.nan_to_num(tokens.staleness[finite], nan=-1.0)
    return at_equal(age, step, size) > CHANCE >= at_equal(step, age, size)


def age_explains(tokens: DumpedTokens) -> bool:
    """True if the gap grows with the age at equal step."""
    size = tokens.level_of_rows
    finite = np.isfinite(size) & np.isfinite(tokens.staleness)
    return at_equal(tokens.step[finite], tokens.staleness[finite], size[finite]) > CHANCE


def complete_at_once(tokens: DumpedTokens) -> bool:
    """True if the gap is at its full size in the first step of a run, when the sampler holds the trainer's weights."""
    fresh = not (tokens.staleness[tokens.step == tokens.step.min()] >= 1).all()  # includes unknown ages
    return fresh and tokens.step.min() <= 1 and not ((began := onset(tokens)) and began.statistic > 0)


def onset(tokens: DumpedTokens) -> Evidence | None:
    return growing(tokens, (tokens.step > tokens.step.min()).astype(float), "")


def first_step(tokens: DumpedTokens) -> float:
    """Root mean square of the log-ratio in the first step of the dump."""
    return rms(tokens.d[tokens.core & (tokens.step[tokens.row] == tokens.step.min())])


def with_advantage(tokens: DumpedTokens) -> float:
    """
    Rank correlation of the advantage with `sum(exp(d) - 1) / sqrt(sum(d^2))`, which averages 0 over samples of any
    sampler, however sure it is. Returns 0 where chance explains the correlation. The sums are over completions, or
    over the tokens of one sign in each, if tokens have their own advantages.
    """
    d, means = tokens.d * tokens.core, tokens.parts.means
    excess = means(np.expm1(d.clip(-5, 5))) / np.sqrt(np.maximum(means(np.square(d)), 1e-12))
    known = np.isfinite(tokens.parts.advantage)
    correlation = spearman(excess[known], tokens.parts.advantage[known]) if known.any() else 0.0
    return correlation if correlation * known.sum() ** 0.5 > CHANCE else 0.0


def as_small_as_rounding(tokens: DumpedTokens) -> bool:
    return rms(tokens.d[tokens.core]) < _SMALL


def keeps_growing(tokens: DumpedTokens) -> bool:
    """True if the gap still grows in the second half of the steps, as it does without end if weights do not arrive."""
    later = growing(tokens, np.where(tokens.step > np.median(np.unique(tokens.step)), tokens.step, np.nan), "")
    return later is not None and later.statistic > 0


def stands_still(tokens: DumpedTokens) -> bool:
    """True if the learning rates in the log are too small for any change of the trainer's weights."""
    return tokens.log.movement <= _STILL  # False for NaN
