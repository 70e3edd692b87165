"""
Causes that make trainer and sampler compute different numbers from the same weights, or from other weights: padding,
dropout, routing, low precision and rounding.
"""

from collections.abc import Mapping

import numpy as np

from ...settings.effects import rounds_cache
from ..bands import ROUNDED
from .measures import FLOOR, LARGE, POSSIBLE, Evidence, bounded, by_token, mean, rms, spearman, typical
from .observed import DumpedTokens
from .trends import complete_at_once, first_step, growing


# Smallest difference of the trainer from itself that counts as dropout, in nats: 1.5 times the value of a pretrained
# model in bfloat16
_DROPOUT = 0.075
# Factor on the correlation of the log-ratios of one token where the gap exceeds rounding, and number of tokens from
# which it applies
_UNROUNDED, _MANY = 3.0, 1000
_COARSE = 0.5  # share of the trainer's different values below which the sampler's are rounded
_GAUSSIAN_TAIL = 3.8  # percentile 99 over median of the size of a Gaussian number


def noise_floor(tokens: DumpedTokens) -> float | None:
    """
    Mean square of the trainer's difference from itself, over the gap's; `None` if too few tokens were scored twice.
    """
    again = np.isfinite(tokens.again) & tokens.core
    gap = typical(tokens.d[again])
    if again.sum() < 30 or gap < FLOOR / 4:
        return None
    return (typical((tokens.train - tokens.again)[again]) / gap) ** 2


def padding(tokens: DumpedTokens) -> Evidence | None:
    """Test whether the gap vanishes where the trainer scores a sequence alone, or grows with the padding."""
    sentence = "|d| is {low} with the least padding and {high} with the most (rank correlation {correlation})"
    more = growing(tokens, tokens.padding, sentence)
    again = np.isfinite(tokens.again) & tokens.core
    gap, alone = typical(tokens.d[again]), typical((tokens.again - tokens.rollout)[again])
    if again.sum() < 30 or gap <= FLOOR:
        return more
    share = bounded((gap**2 - alone**2) / max(typical(tokens.d[tokens.core]), gap) ** 2)  # of all sequences
    local = bounded(1 - (alone / gap) ** 2)
    sentence = "|d| is {gap} in a batch, and {alone} where the trainer scores a sequence alone"
    local_evidence = Evidence(local if share > 0.1 else 0.0, share, {"gap": gap, "alone": alone}, sentence)
    # the few sequences that were scored alone may contain little padding; then all sequences show more
    return more if more and local > 0.3 and more.statistic > local_evidence.statistic else local_evidence


def dropout(tokens: DumpedTokens) -> Evidence | None:
    """Test whether the trainer differs from itself by more than rounding."""
    floor, again = noise_floor(tokens), np.isfinite(tokens.again) & tokens.core
    if floor is None:
        return None
    itself = typical((tokens.train - tokens.again)[again])
    numbers = {"itself": itself, "gap": typical(tokens.d[again])}
    sentence = (
        "the trainer differs from itself by {itself} when it scores a sequence twice, and from the sampler by {gap}"
    )
    alone = (typical((tokens.again - tokens.rollout)[again]) / numbers["gap"]) ** 2  # 0 if padding is the cause
    return Evidence(floor if itself > _DROPOUT and alone > 0.4 else 0.0, bounded(floor / 2), numbers, sentence)


def tails(tokens: DumpedTokens) -> tuple[float, float]:
    """Kurtosis of the log-ratio at equally likely tokens, and percentile 99 over median of its size."""
    level = tokens.level[tokens.core]
    size = np.abs(level)
    square = mean(np.square(level))
    return mean(level**4) / max(square, 1e-300) ** 2, float(np.quantile(size, 0.99)) / max(
        float(np.median(size)), 1e-300
    )


def routing(tokens: DumpedTokens) -> Evidence | None:
    """Test whether a few tokens, at any place and of any probability, make up most of the sum of `d^2`."""
    if tokens.about.get("experts") == "none":
        return None
    kurtosis, tail = tails(tokens)
    size = np.abs(tokens.d[tokens.core])
    top = np.sort(size)[-max(len(size) // 100, 1) :]
    share = float(np.square(top).sum() / max(np.square(size).sum(), 1e-300))
    numbers = {"top": share, "kurtosis": kurtosis, "tail": tail}
    sentence = (
        "1 % of the tokens carry a share of {top} of d^2; at tokens of equal probability the kurtosis of d is "
        "{kurtosis}, and percentile 99 of |d| is {tail} times the median (3 and 3.8 for a Gaussian)"
    )
    most = 0.99 if tokens.about.get("experts") == "routed" else POSSIBLE
    return Evidence(kurtosis * tail, bounded(share), numbers, sentence, most=most)


def _systematic(tokens: DumpedTokens, sentence: str) -> Evidence:
    same, gap = by_token(tokens), rms(tokens.d[tokens.core])
    # 0.1 is a large correlation in a pretrained model, because its contexts differ, unless rounding is a part of the
    # gap
    statistic = same * (_UNROUNDED if gap > LARGE and tokens.core.sum() >= _MANY else 1.0)
    return Evidence(statistic, 1.0, {"alike": same, "gap": gap, "first": first_step(tokens)}, sentence)


def _looks_like_weights(tokens: DumpedTokens) -> bool:
    """True if the gap must look like different weights anyway, with old samples or known low precision."""
    ages = tokens.staleness[np.isfinite(tokens.staleness)]
    known = caches_in_low_precision(tokens.about) or tokens.quantised
    return known or bool(ages.size and ages.min() > 0)


def weights(tokens: DumpedTokens) -> Evidence | None:
    if _looks_like_weights(tokens):
        return None
    sentence = (
        "the same token has a similar log-ratio wherever it occurs (correlation {alike}), and |d| is {first} in the "
        "first step of the dump and {gap} over all steps"
    )
    if tokens.step.min() > 1:
        sentence += " (an older policy looks the same, unless the dump begins at step 1)"
    if "kv_cache_dtype" not in tokens.about:
        sentence += " (an 8-bit key-value cache looks the same, and the type of the cache is not in this dump)"
    # other positions, a wrong adapter, or another template look the same
    return _systematic(tokens, sentence)._replace(most=POSSIBLE)


def noisy_weights(tokens: DumpedTokens) -> Evidence | None:
    """
    Test whether the gap is noise like rounding, but too large for it and not from the trainer, as with 8-bit weights.
    """
    floor, gap = noise_floor(tokens), rms(tokens.d[tokens.core])
    if floor is None or floor > 0.5 or gap <= LARGE or tokens.core.sum() < _MANY or _looks_like_weights(tokens):
        return None
    slope, (_, tail) = spearman(tokens.middle[tokens.core], np.abs(tokens.d[tokens.core])), tails(tokens)
    sentence = (
        "|d| is {gap}, which is too large for rounding; its tails look like noise (percentile 99 is {tail} times the "
        "median; 3.8 for a Gaussian), and is larger at unlikely tokens (rank correlation {slope})"
    )
    numbers = {"gap": gap, "tail": tail, "slope": slope}
    return Evidence(_GAUSSIAN_TAIL / tail if slope < -0.1 else 0.0, 1.0, numbers, sentence, most=POSSIBLE)


def kv_cache(tokens: DumpedTokens) -> Evidence | None:
    """Test like [`weights`], for an engine that reports a cache in low precision."""
    if not caches_in_low_precision(tokens.about):
        return None
    return _systematic(
        tokens,
        "the key-value cache is stored in 8 bits or less, the same token has a similar log-ratio wherever it occurs "
        "(correlation {alike}), and |d| is {gap}",
    )


def quantised(tokens: DumpedTokens) -> Evidence | None:
    """Test whether the gap is at its full size in the first step, for an engine that reports quantised weights."""
    if not tokens.quantised:
        return None
    sentence = (
        "the engine reports quantised weights; |d| is {first} in the first step of the dump and {gap} over all steps"
    )
    steady = float(tokens.step.min() > 1 or complete_at_once(tokens))
    most = 0.99 if tokens.k3 <= ROUNDED["weights"] else POSSIBLE  # above it, 8 bits seldom explain a gap
    return Evidence(steady, 1.0, {"first": first_step(tokens), "gap": rms(tokens.d[tokens.core])}, sentence, most=most)


def caches_in_low_precision(about: Mapping[str, str]) -> bool:
    """True if the engine reports that it keeps keys and values in 8 bits or less."""
    return rounds_cache(about.get("kv_cache_dtype"))


def head(tokens: DumpedTokens) -> Evidence | None:
    """
    Test whether the gap is as small as rounding but, unlike rounding in the layers, reproduced by the trainer. Other
    small gaps are as well, so this is certain only if the heads are known to compute in different types.
    """
    floor = noise_floor(tokens)
    gap = rms(tokens.d[tokens.core])
    trainer = "float32" if tokens.fields.get("cast_lm_head_to_fp32") else tokens.about.get("trainer_dtype", "")
    sampler = tokens.about.get("sampler_head_dtype", "")
    known = bool(trainer and sampler)
    if floor is None or gap > LARGE or tokens.coarser or (known and trainer == sampler):
        return None
    sentence = (
        "|d| is {gap}, as small as rounding; a share of {floor} of d^2 changes when the trainer scores a sequence "
        "alone"
    )
    numbers, most = {"gap": gap, "floor": floor}, 0.99
    different = [float(len(np.unique(x[tokens.core]))) for x in (tokens.rollout, tokens.train)]
    if different[0] < _COARSE * different[1]:
        numbers |= {"of_sampler": different[0], "of_trainer": different[1]}
        most = POSSIBLE
        sentence += (
            "; but the sampler's values are only {of_sampler} different numbers, and the trainer's {of_trainer}: "
            "values that are rounded on their way, in a `rollout_func` or a server's answer, would look the same"
        )
    words = f"; the trainer's head computes in {trainer}, and the sampler's in {sampler}"
    if not known:
        most, words = POSSIBLE, "; the type of one head is not known, and other small gaps would look the same"
    return Evidence(1 - floor, 1.0, numbers, sentence, words, most=most)


def rounding(tokens: DumpedTokens) -> Evidence | None:
    """Test whether the gap is small noise: unrelated to the token, and larger where tokens are unlikely."""
    here, same = tokens.core, by_token(tokens)
    gap = rms(tokens.d[here])
    slope = spearman(tokens.middle[here], np.abs(tokens.d[here]))
    sentence = (
        "|d| is {gap}, and larger at unlikely tokens (rank correlation {slope}); two occurrences of the same token "
        "correlate with {alike}"
    )
    quiet = (1 - min(gap / LARGE, 1.0) ** 2) * (1 - min(max(same, 0.0) / 0.15, 1.0))
    most = POSSIBLE if noise_floor(tokens) is None else 0.99  # without a second look, the head may be the cause
    return Evidence(
        quiet if slope < -0.1 else 0.0, 1.0, {"gap": gap, "slope": slope, "alike": same}, sentence, most=most
    )
