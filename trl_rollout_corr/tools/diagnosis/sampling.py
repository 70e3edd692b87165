"""Causes that change the distribution that the sampler draws from: truncation, temperature and penalties."""

from typing import NamedTuple

import numpy as np

from ..bands import beyond_entropy
from .measures import POSSIBLE, Evidence, bounded, errors_from_1, in_bins, mean, pearson
from .observed import DumpedTokens, mean_of_equal


# Slope of the trainer's log-probability below which the sampler is colder, and truncation no explanation
_COLDER = 0.9
_ERRORS = 5.0  # standard errors of a mean ratio, beyond which chance does not explain it
_UNLIKELY = -1.0  # log-probability of tokens that a much colder sampler seldom takes
_ENOUGH = 20  # of these tokens
_LEAST = 0.02  # nats per token by which entropy and surprise may differ
_BEFORE = 8  # number of latest tokens that represent the tokens that could have been sampled instead


def truncation(tokens: DumpedTokens) -> Evidence | None:
    """
    Look for `d = log S`, where `S < 1` is the trainer's total probability of the tokens that the sampler may draw.
    """
    d = tokens.d[tokens.core]
    if not np.abs(d).sum():
        return None
    ratio = np.exp(d.clip(-20, 3))
    bias = (1 - mean(ratio)) / mean(np.abs(d))
    sure = -errors_from_1(ratio[tokens.once[tokens.core]])
    below = float(np.square(d[d < 0]).sum() / np.square(d).sum())
    numbers = {"below": below, "ratio": mean(ratio), "slope": slope(tokens)}
    sentence = (
        "a share of {below} of d^2 comes from negative d, and the mean of exp(d) is {ratio} (1 if the sampler draws "
        "from the whole distribution); the trainer's log-probability grows by {slope} nats for each nat of the "
        "sampler's"
    )
    # a colder sampler finds unlikely tokens less likely than the trainer does; a truncated one finds all tokens more
    # likely
    truncated = sure > 6 and below > 0.55 and numbers["slope"] > _COLDER
    return Evidence(bias if truncated else 0.0, bounded(2 * below - 1), numbers, sentence)


def slope(tokens: DumpedTokens) -> float:
    """By how many nats the trainer's log-probability grows with each nat of the sampler's; 1 if that does not vary."""
    train, rollout = tokens.train[tokens.core], tokens.rollout[tokens.core]
    return float(np.cov(train, rollout)[0, 1] / rollout.var()) if rollout.std() else 1.0


def temperature(tokens: DumpedTokens) -> Evidence | None:
    """
    Explain how the log-ratio varies by the log-probability of the token, first the trainer's and then the sampler's.
    Noise correlates with one of them only, and a constant varies with none.
    """
    here = tokens.core
    d, sides = tokens.d[here], (tokens.train[here], tokens.rollout[here])
    if len(d) < 100 or not all(x.std() for x in sides):
        return None
    varies = d - d.mean()
    total = max(float(np.square(d).sum()), 1e-300)
    explained = min(float(np.square(in_bins(x, varies)).sum()) for x in sides) / total
    unlikely = d[sides[1] < _UNLIKELY]
    numbers = {
        "share": explained,
        "slope": slope(tokens),
        "ratio": mean(np.exp(d.clip(-20, 5))),
        "unlikely": mean(unlikely),
    }
    sentence = (
        "d varies with the log-probability of a token, which explains a share of {share} of d^2; the trainer's grows "
        "by {slope} nats for each nat of the sampler's; the mean of exp(d) is {ratio} (1 with another temperature, "
        "more if the log-probabilities are from before the temperature); the mean of d is {unlikely} at tokens that "
        "the sampler finds unlikely"
    )
    return Evidence(
        max(explained, _much_colder(tokens, unlikely, numbers["slope"])), bounded(explained), numbers, sentence
    )


def _much_colder(tokens: DumpedTokens, unlikely: np.ndarray, slope: float) -> float:
    """
    Share of `d^2` below 0, less the share above, if a sampler that is much colder explains it: it is sure where the
    trainer is not, and finds the tokens that it seldom takes less likely than the trainer does. Their tails are too
    rare for a mean ratio of 1.
    """
    d = tokens.d[tokens.core]
    less_likely = len(unlikely) >= _ENOUGH and mean(unlikely) > _ERRORS * float(unlikely.std()) / len(unlikely) ** 0.5
    below = float(np.square(d[d < 0]).sum() / max(np.square(d).sum(), 1e-300))
    return bounded(2 * below - 1) if less_likely and slope < _COLDER else 0.0


def penalty(tokens: DumpedTokens) -> Evidence | None:
    """
    Look for tokens that the sampler makes less likely if they occurred before, and more likely otherwise. The test
    uses log-odds, because a penalty vanishes in `d` where a model is sure.
    """
    forms = _forms(tokens)
    if not forms:
        return None
    d, difference = (
        tokens.d[tokens.core],
        _log_odds(tokens.train[tokens.core]) - _log_odds(tokens.rollout[tokens.core]),
    )
    effect = _own(tokens, difference)
    correlation, kind = max(((pearson(_own(tokens, x.size), effect), x.kind) for x in forms), key=lambda pair: pair[0])
    repeated, explained = kind > 0, _explained_by(kind, d, tokens.middle[tokens.core])
    numbers = {"seen": mean(d[repeated]), "unseen": mean(d[~repeated]), "correlation": correlation}
    sentence = (
        "the mean of d is {seen} at tokens that occurred before, and {unseen} at others; at occurrences of the same "
        "token, the difference in log-odds correlates with the number of earlier occurrences ({correlation})"
    )
    # tokens that were sampled with the penalised probabilities have a mean ratio of 1
    ratio = np.exp(tokens.d.clip(-20, 5))
    most = POSSIBLE if abs(errors_from_1(ratio[tokens.once])) > _ERRORS else 0.99
    return Evidence(correlation, bounded(explained), numbers, sentence, most=most)


class _Form(NamedTuple):
    """What a form of penalty takes from the tokens of the core."""

    size: np.ndarray  # of the penalty, up to a factor
    kind: np.ndarray  # 0 for tokens without penalty; equal numbers for equal penalties


def _forms(tokens: DumpedTokens) -> list[_Form]:
    """The forms for which enough tokens occurred before, and enough did not."""
    times = tokens.times.clip(max=24).astype(float)
    forms = (
        _Form(tokens.repeated.astype(float), tokens.repeated),  # in the prompt or the completion
        _Form((tokens.times > 0).astype(float), tokens.times > 0),  # in the completion
        _Form(times - _mean_before(tokens.row, times + 1, _BEFORE), tokens.times.clip(max=12)),  # as often
    )
    in_core = [_Form(size[tokens.core], kind[tokens.core]) for size, kind in forms]
    return [x for x in in_core if min((x.kind > 0).sum(), (x.kind == 0).sum()) >= 30]


def _own(tokens: DumpedTokens, values: np.ndarray) -> np.ndarray:
    """
    Subtract from values of the core the means of tokens of this probability and of this token, which other causes
    explain.
    """
    middle, token = tokens.middle[tokens.core], tokens.token[tokens.core]
    weight = np.square(1 - np.exp(middle))
    values = values - in_bins(middle, values, weight)
    return np.asarray((values - mean_of_equal(token, values, weight)) * np.sqrt(weight))


def _explained_by(kind: np.ndarray, d: np.ndarray, middle: np.ndarray) -> float:
    """Share of `d^2` that the mean of its kind at tokens of this probability explains."""
    rest = d.copy()
    for which in np.unique(kind):
        rest[kind == which] -= in_bins(middle[kind == which], d[kind == which])
    return 1 - float(np.square(rest).sum()) / max(float(np.square(d).sum()), 1e-300)


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


def other_draws(tokens: DumpedTokens) -> Evidence | None:
    """
    Compare the mean of `-log p` of the tokens with the trainer's entropy in the log of the run. The first is an
    estimate of the second if the tokens were drawn with these probabilities, and a gap of 0 does not show whether they
    were.
    """
    surprise = tokens.surprise
    if surprise is None:
        return None
    mean_surprise, entropy, error = surprise
    apart = abs(beyond_entropy(mean_surprise, entropy, tokens.k3))
    numbers = {"surprise": mean_surprise, "entropy": entropy, "times": mean_surprise / max(entropy, 1e-12)}
    sentence = (
        "the mean of -log p of the tokens is {surprise} nats, and the trainer's entropy in the log {entropy}: the "
        "first is {times} times the second, and they are equal if tokens are drawn with the probabilities that are "
        "reported"
    )
    beyond = apart > _ERRORS * error and apart > _LEAST
    return Evidence(apart / max(entropy, _LEAST) if beyond else 0.0, 1.0, numbers, sentence)
