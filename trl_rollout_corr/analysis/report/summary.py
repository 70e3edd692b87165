"""Numbers of the charts, from the tokens of a dump. Everything is counted over whole arrays: a dump may hold millions."""

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...config import RolloutCorrectionConfig
from .table import Table


BINS = 80
# By probability under the sampler. Beside each bucket, the mean of |d| of Qwen3-8B in bfloat16 with vLLM 0.12, from
# https://github.com/AknA13/train-infer-mismatch
PROBABILITIES = (
    (0.0, 0.01, 0.110),
    (0.01, 0.1, 0.097),
    (0.1, 0.5, 0.069),
    (0.5, 0.9, 0.028),
    (0.9, math.inf, 0.0008),
)


class Bound(NamedTuple):
    """A bound of the settings: its name, the level of the ratio it acts on, and its place on the axis of `d`."""

    name: str
    scope: str
    d: float


class Histogram(NamedTuple):
    """Tokens per bin of `d`. The outermost bins hold everything beyond the edges, too."""

    edges: np.ndarray
    counts: np.ndarray


class Bucket(NamedTuple):
    """The size of `d` in a bucket of tokens."""

    low: float
    high: float
    tokens: int
    mean: float
    median: float
    p99: float


class Completions(NamedTuple):
    """Completions that represent the batch: tokens of the loss, sum of `d`, and whether a token of them is rejected."""

    length: np.ndarray
    log_weight: np.ndarray
    rejected: np.ndarray


def bounds(config: RolloutCorrectionConfig | None) -> list[Bound]:
    """Where weights are cut and tokens or sequences rejected, as log-ratios."""
    if config is None:
        return []
    found = []
    if config.rollout_is is not None:
        lower, upper = config.weight_bounds
        ratios = [("upper", upper)] if lower is None else [("lower", lower), ("upper", upper)]
        found += [Bound(f"{config.rollout_is} weights, {side}", config.rollout_is, _log(x)) for side, x in ratios]
    for criterion in config.criteria:
        if criterion.divergence == "k1":
            limits = (-criterion.upper, -criterion.lower)
        elif criterion.divergence == "k2":
            limits = (-math.sqrt(2 * criterion.upper), math.sqrt(2 * criterion.upper))
        else:
            limits = (_solve_k3(criterion.upper, -1), _solve_k3(criterion.upper, 1))
        sides = zip(("lower", "upper"), limits, strict=True)
        found += [Bound(f"{criterion.name}, {side}", criterion.scope, limit) for side, limit in sides]
    return [bound for bound in found if math.isfinite(bound.d)]


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf


def _solve_k3(bound: float, sign: int) -> float:
    """The `d` of one sign with `exp(d) - 1 - d = bound`, by bisection."""
    low, high = 0.0, 1.0 + bound + math.sqrt(2 * bound)
    if not math.isfinite(high):
        return sign * math.inf
    for _ in range(100):
        middle = (low + high) / 2
        value = math.expm1(sign * min(middle, 60.0)) - sign * middle
        low, high = (middle, high) if value < bound else (low, middle)
    return sign * high


def histogram(table: Table, limits: list[Bound]) -> Histogram:
    """The range is that of nearly all tokens and of the bounds near them; a single far token does not squeeze the rest."""
    d = table.d[table.batch]
    size = np.abs(d)
    reach = 1.5 * float(np.quantile(size, 0.999)) if len(d) else 0.0
    near = [abs(bound.d) for bound in limits if abs(bound.d) < 5 * reach]
    reach = max([reach, *(1.15 * bound for bound in near)])
    reach = min(reach, float(size.max(initial=0.0))) if not near else reach
    reach = min(reach, 1e30)  # twice that is still a number
    reach = float(np.float32(reach)) or 1.0  # as the tokens are, so that none is cut to just beyond the last edge
    edges = np.linspace(-reach, reach, BINS + 1)
    counts, _ = np.histogram(np.clip(d, -reach, reach), edges)
    return Histogram(edges, counts)


def by_position(table: Table) -> list[Bucket]:
    """By position in the completion, in octaves."""
    position = table.position[table.batch]
    last = int(position.max(initial=0))
    ends = [2**i for i in range(last.bit_length() + 1)]
    return _buckets(table, position, ends)


def by_probability(table: Table) -> list[Bucket]:
    """By probability under the sampler."""
    return _buckets(table, np.exp(table.rollout[table.batch]), [low for low, _, _ in PROBABILITIES] + [math.inf])


def _buckets(table: Table, x: np.ndarray, ends: list[float]) -> list[Bucket]:
    size = np.abs(table.d[table.batch])
    found = []
    for low, high in pairwise(ends):
        here = size[(x >= low) & (x < high)]
        if len(here):
            median, p99 = np.quantile(here, [0.5, 0.99])
            mean = here.mean(dtype=np.float64)
            found.append(Bucket(low, high, len(here), float(mean), float(median), float(p99)))
    return found


def completions(table: Table) -> Completions:
    """Of the rows that represent the batch, those with a token."""
    length = table.per_row(table.valid)
    log_weight = table.per_row(np.where(table.valid, table.d, 0.0))
    rejected = table.per_row(table.valid & ~table.keep) > 0
    chosen = table.represents & (length > 0)
    return Completions(length[chosen].astype(int), log_weight[chosen], rejected[chosen])


def token_spread(table: Table) -> float:
    """Root mean square of `d`."""
    d = table.d[table.batch].astype(np.float64)
    return float(np.sqrt(np.mean(d * d))) if len(d) else 0.0


def sample_sizes(table: Table, windows: int = 40) -> list[tuple[int, int, float, float]]:
    """
    Effective sample sizes of the ratios without bounds, over windows of steps.

    Args:
        table ([`Table`]):
            The dump.
        windows (`int`, *optional*, defaults to `40`):
            Largest number of windows.

    Returns:
        `list[tuple]`: first step, number of completions, sample size of token weights and of sequence weights.
    """
    chosen = table.represents & (table.per_row(table.valid) > 0)
    log_weight = table.per_row(np.where(table.valid, table.d, 0.0))
    steps = np.unique(table.step[chosen])
    found = []
    for window in np.array_split(steps, min(windows, len(steps)) or 1):
        rows = chosen & np.isin(table.step, window)
        if rows.any():
            tokens = table.d[table.valid & rows[table.row]]
            found.append((int(window[0]), int(rows.sum()), effective_size(tokens), effective_size(log_weight[rows])))
    return found


def effective_size(log_weights: np.ndarray) -> float:
    """`(sum w)^2 / (n sum w^2)` of weights given as logarithms, however large they are."""
    w = np.exp(log_weights.astype(np.float64) - log_weights.max())
    return float(w.sum() ** 2 / (len(w) * (w * w).sum()))
