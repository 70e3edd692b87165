"""Statistics of the log-ratio `d` over the tokens of a dump, over whole arrays: a dump may hold millions of tokens."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from ...dumps.sequences import Sequences
from ...settings.config import RolloutCorrectionConfig
from ...settings.criteria import TOKEN_ONLY, Criterion


BINS = 80
WINDOWS = 40  # of steps, at most
# Lower ends of the buckets of the probability under the sampler, and the mean of |d| in each of Qwen3-8B in bfloat16 with vLLM
# 0.12, from https://github.com/AknA13/train-infer-mismatch
REFERENCE = {0.0: 0.110, 0.01: 0.097, 0.1: 0.069, 0.5: 0.028, 0.9: 0.0008}


class Bound(NamedTuple):
    """A bound of the settings: its name, the level of the ratio that it applies to, and the `d` at which it acts."""

    name: str
    scope: str
    d: float


class TokenStatistics(NamedTuple):
    """Statistics over the sequences that represent the batch: over all, if none were drawn at random."""

    at_random: bool  # whether some were
    bounds: list[Bound]
    size: float  # root mean square of d
    histogram: (
        pd.DataFrame
    )  # `tokens` by bin of d, `from` and `to`; the outermost bins hold the tokens beyond them, too
    # size of d by bucket of the probability under the sampler, and of the position from 1: `tokens`, `mean |d|`, `median` and
    # `99th percentile`, with intervals as index
    by_probability: pd.DataFrame
    by_position: pd.DataFrame
    # of each completion with a token of the loss: `tokens`, `log_weight` (sum of d), `rejected` (whether a token is), `step`
    completions: pd.DataFrame
    # effective sample size of the ratios without bounds, by window of steps: `from step`, `completions`, `token weights` and
    # `sequence weights`
    sample_sizes: pd.DataFrame


def count_tokens(sequences: Sequences, config: RolloutCorrectionConfig) -> TokenStatistics:
    """
    Compute the statistics of a dump.

    Args:
        sequences ([`~trl_rollout_corr.dumps.sequences.Sequences`]):
            Sequences. At least one token of those that represent the batch has a finite log-ratio.
        config ([`RolloutCorrectionConfig`]):
            Configuration of the run.

    Returns:
        [`TokenStatistics`].
    """
    counted = sequences.counted
    d, limits, completions = sequences.log_ratio[counted], bounds(config), _completions(sequences)
    row = sequences.row[counted]
    position = np.flatnonzero(counted) - sequences.starts[row] + 1
    octaves = [2**i for i in range(int(position.max()).bit_length() + 1)]
    return TokenStatistics(
        bool(sequences.sampled.any()),
        limits,
        float(np.sqrt(np.mean(d.astype(np.float64) ** 2))),
        _histogram(d, limits),
        _by_bucket(d, np.exp(sequences.rollout_logps[counted]), [*REFERENCE, math.inf]),
        _by_bucket(d, position, octaves),
        completions,
        _sample_sizes(completions, d, sequences.step[row]),
    )


def bounds(config: RolloutCorrectionConfig) -> list[Bound]:
    """Bounds of weights and criteria, as log-ratios."""
    found = []
    if config.rollout_is is not None:
        for side, ratio in zip(("lower", "upper"), config.weight_bounds, strict=True):
            if ratio:  # neither None nor 0
                found.append(Bound(f"{config.rollout_is} weights, {side}", config.rollout_is, math.log(ratio)))
    for criterion in config.criteria:
        if criterion.divergence not in TOKEN_ONLY:  # those have no bound on the ratio
            sides = zip(("lower", "upper"), _limits(criterion), strict=True)
            found += [Bound(f"{criterion.name}, {side}", criterion.scope, limit) for side, limit in sides]
    return [bound for bound in found if math.isfinite(bound.d)]


def _limits(criterion: Criterion) -> tuple[float, float]:
    """The `d` at which a criterion meets its bounds."""
    if criterion.divergence == "k1":  # -d
        return -criterion.upper, -criterion.lower
    if criterion.divergence == "k2":  # d^2 / 2
        return -math.sqrt(2 * criterion.upper), math.sqrt(2 * criterion.upper)
    return _solve_k3(criterion.upper, -1), _solve_k3(criterion.upper, 1)


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


def _histogram(d: np.ndarray, limits: list[Bound]) -> pd.DataFrame:
    """The range is that of nearly all tokens and of the bounds near them: a few far tokens do not squeeze the others."""
    size = np.abs(d)
    reach = 1.5 * float(np.quantile(size, 0.999))
    near = [1.15 * abs(bound.d) for bound in limits if abs(bound.d) < 5 * reach]
    reach = max(reach, *near) if near else min(reach, float(size.max()))
    reach = min(reach, 1e30)  # twice that is still a number
    reach = (
        float(np.float32(reach)) or 1.0
    )  # float32 as the tokens, so that none is clipped to just beyond the last edge
    edges = np.linspace(-reach, reach, BINS + 1)
    counts, _ = np.histogram(np.clip(d, -reach, reach), edges)
    return pd.DataFrame({"from": edges[:-1], "to": edges[1:], "tokens": counts})


def _by_bucket(d: np.ndarray, x: np.ndarray, ends: Sequence[float]) -> pd.DataFrame:
    buckets = pd.cut(x, ends, right=False)
    sizes = pd.Series(np.abs(d), dtype=np.float64).groupby(buckets, observed=True)
    return pd.DataFrame(
        {
            "tokens": sizes.size(),
            "mean |d|": sizes.mean(),
            "median": sizes.median(),
            "99th percentile": sizes.quantile(0.99),
        }
    )


def _completions(sequences: Sequences) -> pd.DataFrame:
    tokens = sequences.sums(sequences.valid).astype(int)
    table = {
        "tokens": tokens,
        "log_weight": sequences.sums(np.where(sequences.valid, sequences.log_ratio, 0.0)),
        "rejected": sequences.sums(sequences.valid & ~sequences.keep) > 0,
        "step": sequences.step,
    }
    return pd.DataFrame(table)[sequences.represents & (tokens > 0)]


def _sample_sizes(completions: pd.DataFrame, d: np.ndarray, step: np.ndarray) -> pd.DataFrame:
    """From completions, and from the log-ratio and the step of each token."""
    steps = np.unique(completions["step"])
    first = np.array([window[0] for window in np.array_split(steps, min(WINDOWS, len(steps)))])
    of_completions = np.searchsorted(first, completions["step"], side="right")
    of_tokens = np.searchsorted(first, step, side="right")
    log_weights = completions["log_weight"].groupby(of_completions)
    sizes = {
        "from step": first,
        "completions": log_weights.size().to_numpy(),
        "token weights": pd.Series(d).groupby(of_tokens).apply(_effective_sample_size).to_numpy(),
        "sequence weights": log_weights.apply(_effective_sample_size).to_numpy(),
    }
    return pd.DataFrame(sizes)


def _effective_sample_size(log_weights: pd.Series) -> float:
    """`(sum w)^2 / (n sum w^2)` of weights given as logarithms, however large they are."""
    w = np.exp(log_weights.astype(np.float64) - log_weights.max())
    return float(w.sum() ** 2 / (len(w) * (w * w).sum()))
