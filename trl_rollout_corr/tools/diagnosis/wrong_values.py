"""Values of the sampler that are no log-probabilities of the sampled tokens: lacking, shifted, offset or filled in."""

import numpy as np

from .measures import ENOUGH_TOKENS, FLOOR, MANY, Evidence, bounded, errors_from_1, in_bins, mean, spearman
from .observed import DumpedTokens


def nan_rows(tokens: DumpedTokens) -> Evidence | None:
    """
    Look for rows of NaN logits: the trainer's, or the sampler's from some token of a completion to its end, because a
    NaN in the key-value cache makes all later rows NaN. None is not NaN, but a number that was not returned.
    """
    of_trainer = np.isnan(tokens.broken.train)
    return _without_ratio(
        tokens, of_trainer | (_nan_of_sampler(tokens) & _in_a_run(tokens)), {"trainer": mean(of_trainer)},
        "{tokens} tokens in {rows} completions, a share of {share}, lack a log-ratio, because a log-probability is "
        "NaN: the trainer's at a share of {trainer} of them, and otherwise the sampler's up to the end of the "
        "completion",
    )  # fmt: skip


def missing(tokens: DumpedTokens) -> Evidence | None:
    """Look for tokens with a finite log-probability in the trainer but not in the sampler."""
    absent = ~np.isfinite(tokens.broken.rollout) & ~np.isnan(tokens.broken.train)
    here = absent & ~(_nan_of_sampler(tokens) & _in_a_run(tokens))
    counts = {
        "infinite": np.isinf(tokens.broken.rollout),
        "none": tokens.broken.missing,
        "nan": _nan_of_sampler(tokens),
    }
    return _without_ratio(
        tokens, here, {name: float((here & x).sum()) for name, x in counts.items()},
        "{tokens} tokens in {rows} completions, a share of {share}, lack a finite log-probability from the sampler "
        "({none} are None, {nan} NaN, and {infinite} infinite), while the trainer gives one",
    )  # fmt: skip


def _nan_of_sampler(tokens: DumpedTokens) -> np.ndarray:
    """Of each broken token, whether the sampler's log-probability is NaN, which was computed, and not None."""
    return np.asarray(np.isnan(tokens.broken.rollout) & ~tokens.broken.missing)


def _in_a_run(tokens: DumpedTokens) -> np.ndarray:
    """Boolean mask of the broken tokens that are one of several up to the end of their completion."""
    run = np.bincount(tokens.broken.row, tokens.broken.to_the_end, minlength=len(tokens.lengths))
    return np.asarray(tokens.broken.to_the_end & (run[tokens.broken.row] > 1))


def _without_ratio(tokens: DumpedTokens, here: np.ndarray, more: dict[str, float], sentence: str) -> Evidence | None:
    """Evidence from tokens without a log-ratio, which add nothing to `d^2`."""
    n = int(here.sum())
    if not n:
        return None
    share = n / tokens.n_tokens
    numbers = {"tokens": float(n), "rows": float(len(np.unique(tokens.broken.row[here]))), "share": share, **more}
    first = int(np.flatnonzero(here)[0])
    numbers |= {"step": float(tokens.step[tokens.broken.row[first]]), "place": float(tokens.broken.place[first] + 1)}
    sentence += "; the first is token {place} of a completion of step {step}"
    return Evidence(share, 0.0, numbers, sentence)


def shift(tokens: DumpedTokens) -> Evidence | None:
    """Test whether the two sides agree better if one of them is shifted by one or two tokens."""
    fits = {lag: misfit(tokens, lag) for lag in (-2, -1, 0, 1, 2)}
    if fits[0] is None or any(fit is None for fit in fits.values()):
        return None
    lag = min((lag for lag in fits if lag), key=lambda lag: fits[lag] or 0.0)
    here, there = fits[0] or 0.0, fits[lag] or 0.0
    share = bounded(1 - there / max(here, 1e-300))
    numbers = {"lag": float(lag), "here": here**0.5, "there": there**0.5}
    sentence = "the two sides fit if one is shifted by {lag} tokens: |d| is {there} then, and {here} without the shift"
    return Evidence(share, share, numbers, sentence)


def misfit(tokens: DumpedTokens, lag: int) -> float | None:
    """
    Mean square of `train` minus `rollout`, taken `lag` tokens later in the same completion; `None` if impossible.
    """
    i = np.arange(max(0, -lag), len(tokens) - max(0, lag))
    i = i[
        tokens.core[i]
        & (tokens.row[i] == tokens.row[i + lag])
        & (tokens.position[i + lag] - tokens.position[i] == lag)
    ]
    return mean(np.square(tokens.train[i] - tokens.rollout[i + lag])) if len(i) > 20 else None


_SURE = -1e-6  # log-probability that is 0 up to the precision of float32
_FLAT = 0.3  # a log-ratio is the same at likely and unlikely tokens if its means differ by at most this share of it


def offset(tokens: DumpedTokens) -> Evidence | None:
    """
    Test whether the log-ratio is the same number at every token, likely or not. No two policies differ like this,
    because the probabilities of both add up to 1.
    """
    d = tokens.d[tokens.core]
    amount = mean(d)
    if len(d) < ENOUGH_TOKENS or abs(amount) < FLOOR:
        return None
    constant = amount**2 / mean(np.square(d))
    means = in_bins(tokens.middle[tokens.core], d)
    apart = float(np.quantile(np.abs(means - amount), MANY)) / abs(amount)
    impossible = mean(tokens.rollout > -_SURE)
    numbers = {"amount": amount, "constant": constant, "apart": float((d - amount).std()), "above": impossible}
    sentence = (
        "d is {amount} at every token, likely or not: that number alone explains a share of {constant} of d^2, and "
        "the rest is {apart}; a share of {above} of the sampler's values is above 0"
    )
    # truncation of a policy that is nowhere sure takes the same from every token, and leaves no value above 0
    proven = amount > 0 or impossible > 0
    return Evidence(constant if apart < _FLAT and proven else 0.0, constant, numbers, sentence)


_IMPLAUSIBLE = -3.0  # logarithm of a share of the distribution too small for any truncation
_EQUAL = 5  # tokens with one value beyond chance


def not_sampled(tokens: DumpedTokens) -> Evidence | None:
    """
    Test for fillers, for values as high as the likeliest tokens', and for a mean of `exp(d)` above 1, which is
    impossible for tokens sampled with the sampler's probabilities, whatever the trainer computes, unless it has
    trained on these tokens before.
    """
    d, train, rollout = tokens.d[tokens.core], tokens.train[tokens.core], tokens.rollout[tokens.core]
    zeros, forced = rollout > _SURE, _forced(tokens)
    if (zeros & (d < _IMPLAUSIBLE)).sum() < _EQUAL and forced is None:
        zeros[:] = False
    equal = _equal(tokens)[tokens.core]
    total, ratio = max(float(np.square(d).sum()), 1e-300), np.exp(d.clip(-20, 5))
    large, alike = np.abs(d) > 0.3, spearman(train, rollout)
    beyond = errors_from_1(ratio[tokens.once[tokens.core] & (tokens.used_before[tokens.row[tokens.core]] == 0)])
    fillers, deep = (float(np.square(d[x]).sum()) / total for x in (zeros | equal, d < _IMPLAUSIBLE))
    numbers = {"fillers": fillers, "zeros": mean(zeros), "deep": deep, "ratio": mean(ratio), "alike": alike}
    numbers["completions"] = float(len(np.unique(tokens.row[tokens.core][zeros | equal])))
    signs = [
        (fillers, fillers, "a share of {fillers} of d^2 comes from tokens of {completions} completions whose values "
         "are 0 (a share of {zeros}) or equal, while the trainer's differ from each other"),
        (deep if mean(d[large] < 0) > 0.98 else 0.0, 1.0, "no value is below the trainer's, and a share of {deep} of "
         "d^2 comes from tokens that the trainer finds 20 times less likely or more: no truncated sampling leaves so "
         "little"),
        (1 - alike if beyond > 6 else 0.0, 1.0, "the mean of exp(d) is {ratio}, where samples of any sampler give at "
         "most 1, and the rank correlation of the two sides is {alike}"),
    ]  # fmt: skip
    statistic, share, sentence = max(signs)
    words = ""
    if forced is not None and statistic == fillers:
        times, token, words = forced
        numbers |= {"times": float(times), "token": float(token)}
        sentence += (
            "; the value is 0 at {times} tokens with the number {token}, as where an engine forces a token, such as "
        )
        sentence += "the end of the reasoning after a budget"
    return Evidence(statistic, bounded(share), numbers, sentence, words)


_TWICE, _NEARLY = 2, 0.8  # least number of zeros that an engine forced, and share of them at one token


def _forced(tokens: DumpedTokens) -> tuple[int, int, str] | None:
    """
    A token that the engine forced, how often, and the text of the first; `None` without one. Nearly all implausible
    values of 0 are then at this token, and at most a few in a completion.
    """
    zeros = np.flatnonzero(tokens.core & (tokens.rollout > _SURE) & (tokens.d < _IMPLAUSIBLE))
    ids, counts = np.unique(tokens.token[zeros], return_counts=True)
    if len(zeros) < _TWICE or counts.max() < _NEARLY * len(zeros):
        return None
    token = int(ids[np.argmax(counts)])
    here = zeros[tokens.token[zeros] == token]
    return len(here), token, tokens.words(int(here[0]))


_DIFFERENT = 0.3  # equal values are fillers if the trainer's differ by this many nats, and standard deviations of all


def _equal(tokens: DumpedTokens) -> np.ndarray:
    """
    Boolean mask of the tokens whose sampler value repeats in a completion or in the dump, or equals the value of the
    token before, while the trainer's values differ as much as at any tokens. A value that comes again with its text is
    no repetition.
    """
    spread = max(_DIFFERENT, _DIFFERENT * float(tokens.train.std()))
    surely = tokens.rollout < _SURE
    equal = np.zeros(len(tokens), bool)
    _, values = np.unique(tokens.rollout, return_inverse=True)
    for keys in (values * (int(tokens.row.max(initial=0)) + 1) + tokens.row, values):
        _, group = np.unique(keys, return_inverse=True)
        counts = np.bincount(group, tokens.once)
        means = np.bincount(group, tokens.train * tokens.once) / np.maximum(counts, 1)
        variance = np.bincount(group, np.square(tokens.train - means[group]) * tokens.once) / np.maximum(counts, 1)
        equal |= surely & ((counts >= _EQUAL) & (variance > spread**2))[group]
    before = (
        np.flatnonzero((np.diff(tokens.row) == 0) & (np.diff(tokens.position) == 1) & (np.diff(tokens.rollout) == 0))
        + 1
    )
    before = before[surely[before] & (np.abs(tokens.train[before] - tokens.train[before - 1]) > spread)]
    if len(before) >= _EQUAL:
        equal[before] = True
    return equal
