"""
Causes that act at some places: the first or last token, seams between turns, some prompts, and values that are not
log-probabilities of the sampled tokens.
"""

import numpy as np

from .evidence import FLOOR, LARGE, POSSIBLE, Evidence, alike, bounded, mean, rms, spearman, usual_size
from .observed import DumpedTokens


# Quantile at which tokens are compared, because most tokens of a confident model have a log-ratio near 0
_MANY = 0.9
# Usual sizes of the log-ratio above which the start of a turn is off: few are by chance
_OFF = 3.0
# Number of tokens from before a push that is needed to compare tokens of the same weights after one
_ENOUGH = 8
# A completion is off if the mean size of its log-ratios, each over the usual size and cut off, is so many times the median.
# Largest share of such completions, and smallest share of the sum of squares that they have
_FAR, _CUT, _MINORITY, _MOST = 2.5, 3.0, 0.5, 0.5
_SURE = -1e-6  # log-probability that is 0 but for the digits of float32
_IMPLAUSIBLE = -3.0  # logarithm of a share of the distribution that no truncation leaves
_FEW = 0.02  # smallest share of the tokens inside that are as unlikely as those at a place, to compare them
_EQUAL = 5  # tokens of a completion with one value that are no chance


def _at(o: DumpedTokens, here: np.ndarray, sentence: str) -> Evidence | None:
    """
    Compare tokens of one kind with equally likely tokens inside: unlikely tokens have a larger log-ratio in any case. A cause
    shows at many tokens of its kind, not at a few.
    """
    rest = o.core & ~here
    if here.sum() < 4 or rest.sum() < 20:
        return None
    usual = np.maximum(usual_size(o, rest), FLOOR)
    level = np.abs(o.d) / usual
    ratio = mean(np.square(level[here])) / max(mean(np.square(level[rest])), 1e-12)
    many = float(np.quantile(level[here], _MANY)) / max(float(np.quantile(level[rest], _MANY)), 0.1)
    share = bounded(float((np.square(o.d) - np.square(usual))[here].sum()) / max(o.total, 1e-300))
    numbers = {"here": rms(o.d[here]), "elsewhere": rms(o.d[rest])}
    # whatever is off inside may be off here, too, and a sure policy has nothing inside to compare with
    likely, weights = np.maximum(o.train, o.rollout), np.square(o.d[here]) + 1e-300
    alone = mean(likely[rest] <= np.average(likely[here], weights=weights)) < _FEW
    most = POSSIBLE if alone or numbers["elsewhere"] > LARGE else 0.99
    return Evidence(min(ratio, many**2) if share > 0.01 else 0.0, share, numbers, sentence, most=most)


def first_token(o: DumpedTokens) -> Evidence | None:
    return _at(o, o.first, "|d| is {here} at the first token of a completion and {elsewhere} inside")


def last_token(o: DumpedTokens) -> Evidence | None:
    return _at(o, o.last, "|d| is {here} at the last token of a completion and {elsewhere} inside")


def seams(o: DumpedTokens) -> Evidence | None:
    evidence = _at(o, o.seam, "|d| is {here} at the start of later turns and {elsewhere} inside")
    if evidence is None:
        return None
    off = o.seam & (np.abs(o.d) > _OFF * np.maximum(usual_size(o, o.core), FLOOR))
    if not off.any():
        return evidence
    turns = len(np.unique(o.turn[off])) / len(np.unique(o.turn[o.seam]))
    i = int(np.flatnonzero(off)[0])
    numbers = {"turns": turns, "step": float(o.step[o.row[i]]), "place": float(o.position[i] + 1)}
    sentence = (
        "; a share of {turns} of these turns is off, the first from token {place} of a completion of step {step} on"
    )
    return evidence._replace(
        numbers={**evidence.numbers, **numbers}, sentence=evidence.sentence + sentence, words=o.words(i)
    )


def some_prompts(o: DumpedTokens) -> Evidence | None:
    """
    Test whether a minority of the completions is far off, and whether these always belong to the same prompts. If samples
    differ in age, only those of different steps are compared: the completions of a prompt in one step have the same age.
    """
    rest = o.core
    # large values are cut off, so that a few tokens, for instance with other experts, cannot decide about a completion
    level = o.of_rows(np.minimum(np.abs(o.d) / np.maximum(usual_size(o, rest), 1e-12), _CUT) * rest)
    known = np.isfinite(level) & (o.prompt >= 0)
    if known.sum() < _ENOUGH:
        return None
    off = known & (level > _FAR * np.median(level[known]))
    part, prompts = mean(off[known]), np.unique(o.prompt[off])
    cells, where = np.unique(np.stack([o.prompt, o.step])[:, known], axis=1, return_inverse=True)
    keys, values = o.prompt[known], off[known].astype(float)
    if len(np.unique(o.staleness[known])) > 1:
        keys, values = cells[0], np.bincount(where.ravel(), off[known]) / np.bincount(where.ravel())
    same = alike(keys, values - values.mean()) if part < _MINORITY else 0.0
    here = off[o.row]
    share = bounded(float(np.square(o.d[here]).sum()) / max(o.total, 1e-300))
    numbers = {
        "completions": float(off.sum()), "part": part, "here": rms(o.d[here]), "elsewhere": rms(o.d[~here]),
        "prompts": float(len(prompts)), "of": float(len(np.unique(o.prompt[known]))), "same": same,
    }  # fmt: skip
    sentence = (
        "|d| is {here} in {completions} completions, a share of {part} of all, and {elsewhere} in the others; they are of "
        "{prompts} of the {of} prompts, and completions of one prompt are alike (correlation {same})"
    )
    words = o.prompt_words(int(np.flatnonzero(off)[0])) if off.any() else ""
    return Evidence(same if share > _MOST else 0.0, share, numbers, sentence, words)


def nan_rows(o: DumpedTokens) -> Evidence | None:
    n = len(o.broken_row)
    if not n:
        return None
    share = n / o.n_tokens
    numbers = {"tokens": float(n), "share": share, "rows": float(len(np.unique(o.broken_row)))}
    return Evidence(
        share, 1.0, numbers, "{tokens} tokens in {rows} completions have no finite log-probability, a share of {share}"
    )


def shift(o: DumpedTokens) -> Evidence | None:
    """Test whether the two sides agree better if one of them is shifted by one or two tokens."""
    fits = {lag: misfit(o, lag) for lag in (-2, -1, 0, 1, 2)}
    if fits[0] is None or any(fit is None for fit in fits.values()):
        return None
    lag = min((lag for lag in fits if lag), key=lambda lag: fits[lag] or 0.0)
    here, there = fits[0] or 0.0, fits[lag] or 0.0
    share = bounded(1 - there / max(here, 1e-300))
    numbers = {"lag": float(lag), "here": here**0.5, "there": there**0.5}
    sentence = "the two sides fit if one is shifted by {lag} tokens: |d| is {there} then, and {here} without the shift"
    return Evidence(share, share, numbers, sentence)


def misfit(o: DumpedTokens, lag: int) -> float | None:
    """Mean square of `train` minus `rollout`, which is taken `lag` tokens later in the same completion."""
    i = np.arange(max(0, -lag), len(o) - max(0, lag))
    i = i[o.core[i] & (o.row[i] == o.row[i + lag]) & (o.position[i + lag] - o.position[i] == lag)]
    return mean(np.square(o.train[i] - o.rollout[i + lag])) if len(i) > 20 else None


def not_sampled(o: DumpedTokens) -> Evidence | None:
    """
    Test for fillers, for values that are as high as those of the likeliest tokens, and for a mean of `exp(d)` above 1: where
    tokens were sampled with the probabilities of the sampler, it is at most 1, whatever the trainer computes.
    """
    d, train, rollout = o.d[o.core], o.train[o.core], o.rollout[o.core]
    zeros = rollout > _SURE
    if (zeros & (d < _IMPLAUSIBLE)).sum() < _EQUAL:
        zeros[:] = False
    far, pairs = np.abs(d) > 1, np.stack([o.row[o.core], rollout])
    _, group, counts = np.unique(pairs[:, far], axis=1, return_inverse=True, return_counts=True)
    far[far] = counts[group.ravel()] >= _EQUAL
    total, ratio = max(float(np.square(d).sum()), 1e-300), np.exp(d.clip(-20, 5))
    large, alike = np.abs(d) > 0.3, spearman(train, rollout)
    beyond = (mean(ratio) - 1) / max(float(ratio.std()) / max(len(d), 1) ** 0.5, 1e-12)
    fillers, deep = (float(np.square(d[x]).sum()) / total for x in (zeros | far, d < _IMPLAUSIBLE))
    numbers = {"fillers": fillers, "zeros": mean(zeros), "deep": deep, "ratio": mean(ratio), "alike": alike}
    signs = [
        (fillers, fillers, "a share of {fillers} of d^2 comes from tokens whose values are 0 (a share of {zeros}) or equal, "
         "while the trainer's differ from each other"),
        (deep if mean(d[large] < 0) > 0.98 else 0.0, 1.0, "no value is below the trainer's, and a share of {deep} of d^2 "
         "comes from tokens that the trainer finds 20 times less likely or more: no truncated sampling leaves so little"),
        (1 - alike if beyond > 6 else 0.0, 1.0, "the mean of exp(d) is {ratio}, where samples of any sampler have at most "
         "1, and the two sides have a rank correlation of {alike}"),
    ]  # fmt: skip
    statistic, share, sentence = max(signs)
    return Evidence(statistic, bounded(share), numbers, sentence)
