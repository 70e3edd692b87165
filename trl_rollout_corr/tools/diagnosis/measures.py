"""Statistics of the tokens of a dump that several tests use, and the form of the evidence."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..bands import NEGLIGIBLE
from .observed import DumpedTokens, edges_of_bins, mean_of_equal


# Root mean square of the log-ratio, in nats, below which the diagnosis looks for no cause.
FLOOR = NEGLIGIBLE
# Root mean square of the log-ratio, in nats, above which rounding cannot be the only cause.
LARGE = 0.1
POSSIBLE = 0.65  # certainty of a cause while other explanations are possible
MANY = 0.9  # quantile at which tokens are compared, because most log-ratios of a confident model are near 0
ENOUGH_TOKENS = 30  # tokens of a kind that are needed for a comparison
_CHANCE = 3.0  # a mean of products counts above this many standard deviations of chance


class Evidence(NamedTuple):
    """The evidence of a test."""

    statistic: float  # of the test; a larger one makes the cause more certain
    share: float  # of the sum of squared log-ratios that the cause explains, between 0 and 1
    numbers: Mapping[str, float]  # of the evidence, by their names in `sentence`
    sentence: str  # with the numbers in braces
    words: str = ""  # text of the completions, which ends the sentence
    most: float = 0.99  # largest certainty that it allows: `POSSIBLE` where unknown causes would look the same
    rows: np.ndarray | None = None  # (B,), the sequences that show the gap, of a cause that is about a part of them
    tokens: np.ndarray | None = None  # (N,), the tokens of these sequences that show it; `None` for all


def mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0


def rms(values: np.ndarray) -> float:
    return math.sqrt(mean(np.square(values)))


def typical(values: np.ndarray) -> float:
    """Root mean square without the largest 5 %, which a few tokens sent to other experts would dominate."""
    size = np.sort(np.abs(values))
    return rms(size[: max(int(0.95 * len(size)), 1)])


def bounded(share: float) -> float:
    return float(min(max(share, 0.0), 1.0))


def in_bins(keys: np.ndarray, values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Mean of the values in each token's bin. The bins are quantiles of the keys, with equal numbers of tokens."""
    weights = np.ones(len(keys)) if weights is None else weights
    return mean_of_equal(np.searchsorted(edges_of_bins(keys), keys), values, weights)


def alike(keys: np.ndarray, values: np.ndarray) -> float:
    """
    Mean product of two values with the same key, over the mean square: 1 if the key determines the value, 0 for noise
    and for so few pairs that it may be chance.
    """
    _, inverse = np.unique(keys, return_inverse=True)
    n, sums, squares = np.bincount(inverse), np.bincount(inverse, values), np.bincount(inverse, np.square(values))
    pairs, square = float((n * (n - 1)).sum()), mean(np.square(values))
    product = float((np.square(sums) - squares).sum()) / pairs / square if pairs and square else 0.0
    return product if abs(product) * pairs**0.5 > _CHANCE * 2**0.5 else 0.0


def by_token(tokens: DumpedTokens) -> float:
    """
    Correlation of the log-ratios at two places with the same token: 0 for noise, more for different weights. The same
    place of the same text is one place, however often the text comes.
    """
    here = tokens.core & tokens.once
    return alike(tokens.token[here], tokens.level[here])


def errors_from_1(ratios: np.ndarray) -> float:
    """How far the mean of ratios of independent samples is above 1, in standard errors."""
    return float((mean(ratios) - 1) / max(float(ratios.std()) / max(len(ratios), 1) ** 0.5, 1e-12))


def ranks_of(values: np.ndarray) -> np.ndarray:
    """Ranks of the values. Equal values get the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.take(np.cumsum(counts) - (counts + 1) / 2, inverse)


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's rank correlation, 0 where one side does not vary."""
    return pearson(ranks_of(x), ranks_of(y))


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Correlation, 0 where one side does not vary."""
    return float(np.corrcoef(x, y)[0, 1]) if x.std() and y.std() else 0.0
