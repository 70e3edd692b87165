"""
Causes that change the distribution that the sampler draws from: truncation, temperature and
penalties.
"""

from typing import NamedTuple

import numpy as np

from .evidence import POSSIBLE, Evidence, bounded, in_bins, mean, pearson
from .observed import DumpedTokens, mean_of_equal


_ERRORS = 5.0  # standard errors of a mean ratio, beyond which chance does not explain it
_BEFORE = 8  # number of latest tokens that represent the tokens that could have been sampled instead


def truncation(o: DumpedTokens) -> Evidence | None:
    """
    Look for `d = log S`, where `S < 1` is the trainer's total probability of the tokens that the
    sampler may draw.
    """
    d = o.d[o.core]
    if not np.abs(d).sum():
        return None
    ratio = np.exp(d.clip(-20, 3))
    bias = (1 - mean(ratio)) / mean(np.abs(d))
    sure = (1 - mean(ratio)) / max(float(ratio.std()) / len(d) ** 0.5, 1e-12)
    below = float(np.square(d[d < 0]).sum() / np.square(d).sum())
    numbers = {"below": below, "ratio": mean(ratio)}
    sentence = (
        "a share of {below} of d^2 comes from negative d, and the mean of exp(d) is {ratio} (1 if the sampler draws from the "
        "whole distribution)"
    )
    return Evidence(bias if sure > 6 and below > 0.55 else 0.0, bounded(2 * below - 1), numbers, sentence)


def temperature(o: DumpedTokens) -> Evidence | None:
    """
    Explain the log-ratio by the log-probability of the token, first the trainer's and then the
    sampler's. Noise correlates with one of them only.
    """
    here = o.core
    d, sides = o.d[here], (o.train[here], o.rollout[here])
    if len(d) < 100 or not all(x.std() for x in sides):
        return None
    total = max(float(np.square(d).sum()), 1e-300)
    explained = min(float(np.square(in_bins(x, d)).sum()) / total for x in sides)
    slope = float(np.cov(*sides)[0, 1] / sides[1].var())
    numbers = {"share": explained, "slope": slope, "ratio": mean(np.exp(d.clip(-20, 5)))}
    sentence = (
        "the log-probability of a token explains a share of {share} of d^2; the trainer's grows by {slope} nats for each nat "
        "of the sampler's; the mean of exp(d) is {ratio} (1 with another temperature, more if the log-probabilities are from "
        "before the temperature)"
    )
    return Evidence(explained, bounded(explained), numbers, sentence)


def penalty(o: DumpedTokens) -> Evidence | None:
    """
    Look for tokens that the sampler makes less likely if they occurred before, and more likely
    otherwise. The test uses log-odds, because a penalty vanishes in `d` where a model is sure.
    """
    forms = _forms(o)
    if not forms:
        return None
    d, difference = o.d[o.core], _log_odds(o.train[o.core]) - _log_odds(o.rollout[o.core])
    effect = _own(o, difference)
    correlation, kind = max(((pearson(_own(o, x.size), effect), x.kind) for x in forms), key=lambda pair: pair[0])
    repeated, explained = kind > 0, _explained_by(kind, d, o.middle[o.core])
    numbers = {"seen": mean(d[repeated]), "unseen": mean(d[~repeated]), "correlation": correlation}
    sentence = (
        "the mean of d is {seen} at tokens that occurred before, and {unseen} at others; at occurrences of the same token, "
        "the difference in log-odds correlates with the number of earlier occurrences ({correlation})"
    )
    # tokens that were sampled with the penalised probabilities have a mean ratio of 1
    most = POSSIBLE if _beyond_chance(np.exp(o.d.clip(-20, 5))) else 0.99
    return Evidence(correlation, bounded(explained), numbers, sentence, most=most)


class _Form(NamedTuple):
    """What a form of penalty takes from the tokens of the core."""

    size: np.ndarray  # of the penalty, up to a factor
    kind: np.ndarray  # 0 for tokens without penalty; equal numbers for equal penalties


def _forms(o: DumpedTokens) -> list[_Form]:
    """The forms for which enough tokens occurred before, and enough did not."""
    times = o.times.clip(max=24).astype(float)
    forms = (
        _Form(o.repeated.astype(float), o.repeated),  # in the prompt or the completion
        _Form((o.times > 0).astype(float), o.times > 0),  # in the completion
        _Form(times - _mean_before(o.row, times + 1, _BEFORE), o.times.clip(max=12)),  # as often
    )
    in_core = [_Form(size[o.core], kind[o.core]) for size, kind in forms]
    return [x for x in in_core if min((x.kind > 0).sum(), (x.kind == 0).sum()) >= 30]


def _own(o: DumpedTokens, values: np.ndarray) -> np.ndarray:
    """
    Subtract from values of the core the means of tokens of this probability and of this token,
    which other causes explain.
    """
    middle, token = o.middle[o.core], o.token[o.core]
    weight = np.square(1 - np.exp(middle))
    values = values - in_bins(middle, values, weight)
    return np.asarray((values - mean_of_equal(token, values, weight)) * np.sqrt(weight))


def _explained_by(kind: np.ndarray, d: np.ndarray, middle: np.ndarray) -> float:
    """Share of `d^2` that the mean of its kind at tokens of this probability explains."""
    rest = d.copy()
    for which in np.unique(kind):
        rest[kind == which] -= in_bins(middle[kind == which], d[kind == which])
    return 1 - float(np.square(rest).sum()) / max(float(np.square(d).sum()), 1e-300)


def _beyond_chance(ratios: np.ndarray) -> bool:
    """True if the mean of ratios differs from 1, the mean of samples of any sampler, by more than chance."""
    error = float(ratios.std()) / max(len(ratios), 1) ** 0.5
    return bool(abs(mean(ratios) - 1) > _ERRORS * error)


def _log_odds(logps: np.ndarray) -> np.ndarray:
    """`log(p / (1 - p))`, with `p` clipped to the precision of float32."""
    p = np.exp(logps).clip(1e-6, 1 - 1e-4)
    return np.asarray(np.log(p / (1 - p)))


def _mean_before(rows: np.ndarray, values: np.ndarray, n: int) -> np.ndarray:
    """Mean over the latest `n` tokens before each token in its row, or 0 at the first token."""
    at = np.arange(len(rows))
    starts = np.maximum.accumulate(np.where(np.diff(rows, prepend=-1) != 0, at, 0))
    first, sums = np.maximum(at - n, starts), np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray((sums[at] - sums[first]) / np.maximum(at - first, 1))
