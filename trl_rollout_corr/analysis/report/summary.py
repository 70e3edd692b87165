"""Numbers of the charts, from the tokens of a dump. Everything is counted over whole arrays: a dump may hold millions."""

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...dumps.reading import Sequences
from ...settings.config import RolloutCorrectionConfig
from ...settings.criteria import TOKEN_ONLY


BINS = 80
WINDOWS = 40  # of steps, at most
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
    """Completions with a token of the loss: tokens, sum of `d`, whether a token is rejected, and optimizer step."""

    length: np.ndarray
    log_weight: np.ndarray
    rejected: np.ndarray
    step: np.ndarray


class Window(NamedTuple):
    """Effective sample sizes of the ratios without bounds, over a window of steps."""

    first_step: int
    completions: int
    of_tokens: float
    of_sequences: float


class Summary(NamedTuple):
    """What the charts of a dump show, of the sequences that represent the batch: all, if none were drawn at random."""

    at_random: bool
    bounds: list[Bound]
    histogram: Histogram
    by_probability: list[Bucket]
    by_position: list[Bucket]
    completions: Completions
    spread: float
    effective_sample_sizes: list[Window]


def summarise(sequences: Sequences, config: RolloutCorrectionConfig) -> Summary:
    """Count the tokens of a dump. At least one in the sequences that represent the batch must have a finite log-ratio."""
    counted = sequences.counted
    d, limits, completions = sequences.log_ratio[counted], bounds(config), _completions(sequences)
    row = sequences.row[counted]
    size, position = np.abs(d), np.flatnonzero(counted) - sequences.starts[row] + 1
    octaves = [2**i for i in range(int(position.max()).bit_length() + 1)]
    probabilities = [low for low, _, _ in PROBABILITIES] + [math.inf]
    return Summary(
        bool(sequences.sampled.any()),
        limits,
        _histogram(d, limits),
        _buckets(size, np.exp(sequences.rollout_logps[counted]), probabilities),
        _buckets(size, position, octaves),
        completions,
        float(np.sqrt(np.mean(d.astype(np.float64) ** 2))),
        _effective_sample_sizes(completions, d, sequences.step[row]),
    )


def bounds(config: RolloutCorrectionConfig) -> list[Bound]:
    """Where weights are cut and tokens or sequences rejected, as log-ratios."""
    found = []
    if config.rollout_is is not None:
        for side, ratio in zip(("lower", "upper"), config.weight_bounds, strict=True):
            if ratio:  # neither None nor 0
                found.append(Bound(f"{config.rollout_is} weights, {side}", config.rollout_is, math.log(ratio)))
    for criterion in config.criteria:
        if criterion.divergence in TOKEN_ONLY:
            continue  # no bound on the ratio
        if criterion.divergence == "k1":
            limits = (-criterion.upper, -criterion.lower)
        elif criterion.divergence == "k2":
            limits = (-math.sqrt(2 * criterion.upper), math.sqrt(2 * criterion.upper))
        else:
            limits = (_solve_k3(criterion.upper, -1), _solve_k3(criterion.upper, 1))
        sides = zip(("lower", "upper"), limits, strict=True)
        found += [Bound(f"{criterion.name}, {side}", criterion.scope, limit) for side, limit in sides]
    return [bound for bound in found if math.isfinite(bound.d)]


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


def _histogram(d: np.ndarray, limits: list[Bound]) -> Histogram:
    """The range is that of nearly all tokens and of the bounds near them; a single far token does not squeeze the rest."""
    size = np.abs(d)
    reach = 1.5 * float(np.quantile(size, 0.999))
    near = [1.15 * abs(bound.d) for bound in limits if abs(bound.d) < 5 * reach]
    reach = max(reach, *near) if near else min(reach, float(size.max()))
    reach = min(reach, 1e30)  # twice that is still a number
    reach = float(np.float32(reach)) or 1.0  # as the tokens are, so that none is cut to just beyond the last edge
    edges = np.linspace(-reach, reach, BINS + 1)
    counts, _ = np.histogram(np.clip(d, -reach, reach), edges)
    return Histogram(edges, counts)


def _buckets(size: np.ndarray, x: np.ndarray, ends: list[float]) -> list[Bucket]:
    found = []
    for low, high in pairwise(ends):
        here = size[(x >= low) & (x < high)]
        if len(here):
            median, p99 = np.quantile(here, [0.5, 0.99])
            mean = here.mean(dtype=np.float64)
            found.append(Bucket(low, high, len(here), float(mean), float(median), float(p99)))
    return found


def _completions(sequences: Sequences) -> Completions:
    length = sequences.sums(sequences.valid).astype(int)
    log_weight = sequences.sums(np.where(sequences.valid, sequences.log_ratio, 0.0))
    rejected = sequences.sums(sequences.valid & ~sequences.keep) > 0
    chosen = sequences.represents & (length > 0)
    return Completions(length[chosen], log_weight[chosen], rejected[chosen], sequences.step[chosen])


def _effective_sample_sizes(of: Completions, d: np.ndarray, step: np.ndarray) -> list[Window]:
    """From the completions, and from the log-ratio and the step of each token."""
    steps = np.unique(of.step)
    found = []
    for window in np.array_split(steps, min(WINDOWS, len(steps))):
        log_weights = of.log_weight[np.isin(of.step, window)]
        of_tokens, of_sequences = map(_effective_sample_size, (d[np.isin(step, window)], log_weights))
        found.append(Window(int(window[0]), len(log_weights), of_tokens, of_sequences))
    return found


def _effective_sample_size(log_weights: np.ndarray) -> float:
    """`(sum w)^2 / (n sum w^2)` of weights given as logarithms, however large they are."""
    w = np.exp(log_weights.astype(np.float64) - log_weights.max())
    return float(w.sum() ** 2 / (len(w) * (w * w).sum()))
