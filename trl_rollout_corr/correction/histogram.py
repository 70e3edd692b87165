"""
Histogram of the log-ratio, and percentiles from it. Torch only.

The bins are fixed, so that the counts of several ranks add up. There are 32 bins per octave of `|d|` from 2^-23 to 2^7 on
either side of 0, and one bin for smaller values, which are rounding noise. A bin spans at most 3.1 percent of its value, so
that a percentile has an error of at most 1.6 percent.
"""

import math
from bisect import bisect_left
from functools import cache
from itertools import accumulate

import torch

from .functional import Tokens


PERCENTILES = (1, 50, 99)

_MANTISSA_BITS = 5
SMALLEST_EXPONENT, LARGEST_EXPONENT = -23, 7
SIDE_BINS = (LARGEST_EXPONENT - SMALLEST_EXPONENT) * 2**_MANTISSA_BITS
BINS = 2 * SIDE_BINS + 1
_FIRST_BIN = (127 + SMALLEST_EXPONENT) * 2**_MANTISSA_BITS  # exponent and mantissa bits of the smallest magnitude


def count(tokens: Tokens) -> torch.Tensor:
    """Counts of the log-ratio, `(BINS,)`. Sign, exponent and first mantissa bits of a float32 are the number of its bin."""
    leading = (
        9 + _MANTISSA_BITS
    )  # bits of a float32 that make the number of the bin: sign, 8 of the exponent, mantissa
    bits = tokens.log_ratio.float().view(torch.int32)
    index = (bits >> (32 - leading)).bitwise_and_(2**leading - 1).flatten().long()
    counts = tokens.valid.new_zeros(2**leading)
    counts.scatter_add_(0, index, tokens.valid.flatten())  # whole numbers, so the order does not matter
    sides = counts.view(2, -1)  # positive and negative, by magnitude
    last = _FIRST_BIN + SIDE_BINS - 1
    small, beyond = sides[:, :_FIRST_BIN].sum().reshape(1), sides[:, last:].sum(1, keepdim=True)
    positive, negative = torch.cat([sides[:, _FIRST_BIN:last], beyond], 1)
    return torch.cat([negative.flip(0), small, positive])


@cache
def bin_edges() -> tuple[float, ...]:
    """The `BINS + 1` edges, in nats."""
    octave = 2**_MANTISSA_BITS
    side = [2.0 ** (SMALLEST_EXPONENT + i // octave) * (1 + i % octave / octave) for i in range(SIDE_BINS + 1)]
    return (*(-edge for edge in reversed(side)), *side)


def percentiles(counts: list[float], smallest: float, largest: float) -> dict[int, float]:
    """
    Percentiles of the log-ratio by percent, in nats: the geometric mean of the edges of the bin that holds the percentile. NaN
    if no token was counted. The outermost bins also hold all values beyond them, up to the `smallest` and `largest` log-ratio.
    """
    cumulative = list(accumulate(counts))
    return {percent: _percentile(cumulative, percent / 100, smallest, largest) for percent in PERCENTILES}


def _percentile(cumulative: list[float], fraction: float, smallest: float, largest: float) -> float:
    if not cumulative[-1]:
        return math.nan
    side = bisect_left(cumulative, math.ceil(fraction * cumulative[-1] - 1e-6)) - SIDE_BINS
    if side == 0:
        return 0.0
    edges = bin_edges()[SIDE_BINS + abs(side) : SIDE_BINS + abs(side) + 2]
    middle = math.copysign(math.sqrt(edges[0] * edges[1]), side)
    return min(max(middle, smallest), largest)
