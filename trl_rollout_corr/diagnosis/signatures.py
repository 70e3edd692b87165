"""
Signatures: what each cause does to the log-ratio `d`, as tests of the tokens of a dump. `docs/diagnose.md` has them in words.

A test returns what it saw, or `None` where it cannot look. Which level of its statistic speaks for the cause is data:
`SIGNATURES`.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from .observed import Observed


# Root mean square of the log-ratio, in nats, below which nothing is looked for: a correction would change nothing
# (`benchmarks/exact`), and below bfloat16's rounding of most models.
FLOOR = 0.004
# Above it, what noise there is is too large to be that of rounding.
LARGE = 0.1
_BINS = 20
_MANY = 0.9  # quantile of tokens that are compared: a tenth is many, as most are sure in a model that repeats itself
_BEFORE = 8  # tokens sampled last, which stand for what could have been sampled instead
_END = 0.1  # share of the sequences that are compared at each end of what a gap may grow with
_GROWTH, _JUMP = 1.4, 9.0  # of the mean square, from which it is one, and from which it need not go on
_CHANCE = 3.0  # standard deviations of a rank correlation of as many sequences, from which it is more than chance


class Seen(NamedTuple):
    """
    What a test saw.

    Args:
        statistic (`float`):
            What speaks for the cause: larger is more.
        share (`float`):
            Share of the sum of squared log-ratios that the cause explains, between 0 and 1.
        numbers (`Mapping[str, float]`):
            The evidence, by what it is called in `said`.
        said (`str`):
            The evidence in a sentence, with the numbers in braces.
    """

    statistic: float
    share: float
    numbers: Mapping[str, float]
    said: str


class Signature(NamedTuple):
    """
    The signature of a cause.

    Args:
        cause (`str`):
            Its name, a key of [`~trl_rollout_corr.diagnosis.causes.CAUSES`].
        test (`Callable`):
            Looks at tokens.
        weak, strong (`float`):
            The statistic at which the cause is possible, and at which it is as good as certain.
    """

    cause: str
    test: Callable[[Observed], Seen | None]
    weak: float
    strong: float


class Stage(NamedTuple):
    """
    Signatures that are looked for together.

    Args:
        signatures (`tuple[Signature, ...]`):
            Of these, the one that explains most is taken.
        several (`bool`, *optional*, defaults to `False`):
            Take all that are found: each has tokens of its own.
        ends (`bool`, *optional*, defaults to `False`):
            What comes after is not looked for where one is found, because it would be found in what this one does.
        floor (`bool`, *optional*, defaults to `True`):
            Look only where the log-ratio is large enough to matter.
    """

    signatures: tuple[Signature, ...]
    several: bool = False
    ends: bool = False
    floor: bool = True


# Pieces -------------------------------------------------------------------------------------------------------------------


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0


def _rms(values: np.ndarray) -> float:
    return _mean(np.square(values)) ** 0.5


def _typical(values: np.ndarray) -> float:
    """Root mean square without the largest 5 %, which a few tokens that take another route can make as large as they like."""
    size = np.sort(np.abs(values))
    return _rms(size[: max(int(0.95 * len(size)), 1)])


def _bounded(share: float) -> float:
    return float(min(max(share, 0.0), 1.0))


def core(o: Observed) -> np.ndarray:
    """Tokens that are neither at an end of a completion nor at the seam of a turn, where faults of their own are."""
    inside = ~(o.first | o.last | o.seam)
    return inside if inside.any() else np.ones(len(o), bool)


def in_bins(keys: np.ndarray, values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Mean of the values in the bin of each token: bins of the keys with as many tokens each."""
    edges = np.quantile(keys, np.linspace(0, 1, min(_BINS, max(len(keys) // 20, 1)) + 1)[1:-1])
    return _mean_of_equal(np.searchsorted(edges, keys), values, np.ones(len(keys)) if weights is None else weights)


def _level(o: Observed, here: np.ndarray) -> np.ndarray:
    """The log-ratio over its root mean square at tokens of this probability, so that unlikely tokens count no more."""
    return o.d[here] / np.maximum(_usual(o, here)[here], 1e-12)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks, with the mean of those that are equal."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def _rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's, 0 where one does not vary."""
    return _correlation(_ranks(x), _ranks(y))


def alike(keys: np.ndarray, values: np.ndarray) -> float:
    """Mean product of two values with the same key over the mean square: 1 if the key says all, 0 if it says nothing."""
    _, inverse = np.unique(keys, return_inverse=True)
    n, sums, squares = np.bincount(inverse), np.bincount(inverse, values), np.bincount(inverse, np.square(values))
    pairs, square = float((n * (n - 1)).sum()), _mean(np.square(values))
    return float((np.square(sums) - squares).sum()) / pairs / square if pairs and square else 0.0


# At some tokens -----------------------------------------------------------------------------------------------------------


def _at(o: Observed, here: np.ndarray, said: str) -> Seen | None:
    """
    Tokens of one kind against those inside that are as likely: unlikely ones are further off in any case. A fault shows at
    many of them, and not at a few.
    """
    rest = core(o) & ~here
    if here.sum() < 4 or rest.sum() < 20:
        return None
    usual = np.maximum(_usual(o, rest), FLOOR)
    level = np.abs(o.d) / usual
    ratio = _mean(np.square(level[here])) / max(_mean(np.square(level[rest])), 1e-12)
    many = float(np.quantile(level[here], _MANY)) / max(float(np.quantile(level[rest], _MANY)), 0.1)
    share = _bounded(float((np.square(o.d) - np.square(usual))[here].sum()) / max(o.total, 1e-300))
    numbers = {"here": _rms(o.d[here]), "elsewhere": _rms(o.d[rest])}
    return Seen(min(ratio, many**2) if share > 0.01 else 0.0, share, numbers, said)


def _usual(o: Observed, inside: np.ndarray) -> np.ndarray:
    """Root mean square of the log-ratio at tokens inside that are as likely as each token, `(N,)`."""
    edges = np.quantile(o.middle[inside], np.linspace(0, 1, min(_BINS, max(int(inside.sum()) // 20, 1)) + 1)[1:-1])
    bins = np.searchsorted(edges, o.middle)
    n = len(edges) + 1
    squares = np.bincount(bins[inside], np.square(o.d[inside]), n) / np.maximum(
        np.bincount(bins[inside], minlength=n), 1
    )
    return np.sqrt(squares)[bins]


def first_token(o: Observed) -> Seen | None:
    return _at(o, o.first, "|d| is {here} at the first token of a completion and {elsewhere} inside")


def last_token(o: Observed) -> Seen | None:
    return _at(o, o.last, "|d| is {here} at the last token of a completion and {elsewhere} inside")


def seams(o: Observed) -> Seen | None:
    return _at(o, o.seam, "|d| is {here} where a turn begins anew and {elsewhere} inside")


def nan_rows(o: Observed) -> Seen | None:
    n = len(o.broken_row)
    if not n:
        return None
    share = n / o.n_tokens
    numbers = {"tokens": float(n), "share": share, "rows": float(len(np.unique(o.broken_row)))}
    return Seen(
        share, 1.0, numbers, "{tokens} tokens in {rows} completions have no finite log-probability, a share of {share}"
    )


def shift(o: Observed) -> Seen | None:
    """The log-probabilities of one side fit those of the other a token on."""
    fits = {lag: misfit(o, lag) for lag in (-2, -1, 0, 1, 2)}
    if fits[0] is None or any(fit is None for fit in fits.values()):
        return None
    lag = min((lag for lag in fits if lag), key=lambda lag: fits[lag] or 0.0)
    here, there = fits[0] or 0.0, fits[lag] or 0.0
    share = _bounded(1 - there / max(here, 1e-300))
    numbers = {"lag": float(lag), "here": here**0.5, "there": there**0.5}
    return Seen(
        share, share, numbers, "the two sides fit at a lag of {lag} tokens: |d| is {there} there, and {here} at no lag"
    )


def misfit(o: Observed, lag: int) -> float | None:
    """Mean square of `train` minus `rollout`, so many tokens later, over the same completions."""
    i = np.arange(max(0, -lag), len(o) - max(0, lag))
    i = i[core(o)[i] & (o.row[i] == o.row[i + lag]) & (o.position[i + lag] - o.position[i] == lag)]
    return _mean(np.square(o.train[i] - o.rollout[i + lag])) if len(i) > 20 else None


# A rule for all tokens ----------------------------------------------------------------------------------------------------


def truncation(o: Observed) -> Seen | None:
    """`d = log S`, with `S` the probability of what may be sampled: below 0, and a mean ratio below 1 by as much."""
    d = o.d[core(o)]
    if not np.abs(d).sum():
        return None
    ratio = np.exp(d.clip(-20, 3))
    bias = (1 - _mean(ratio)) / _mean(np.abs(d))
    sure = (1 - _mean(ratio)) / max(float(ratio.std()) / len(d) ** 0.5, 1e-12)
    below = float(np.square(d[d < 0]).sum() / np.square(d).sum())
    numbers = {"below": below, "ratio": _mean(ratio)}
    said = "d is below 0 for {below} of its square, and exp(d), whose mean is 1 for whole distributions, has a mean of {ratio}"
    return Seen(bias if sure > 6 and below > 0.55 else 0.0, _bounded(2 * below - 1), numbers, said)


def temperature(o: Observed) -> Seen | None:
    """The log-probability of a token says what its log-ratio is, whichever side's it is: noise leans to one of them."""
    here = core(o)
    d, sides = o.d[here], (o.train[here], o.rollout[here])
    if len(d) < 100 or not all(x.std() for x in sides):
        return None
    total = max(float(np.square(d).sum()), 1e-300)
    explained = min(float(np.square(in_bins(x, d)).sum()) / total for x in sides)
    slope = float(np.cov(*sides)[0, 1] / sides[1].var())
    numbers = {"share": explained, "slope": slope}
    said = (
        "the log-probability of a token explains {share} of d^2; that of the trainer grows by {slope} where "
        "the sampler's grows by 1"
    )
    return Seen(explained, _bounded(explained), numbers, said)


def penalty(o: Observed) -> Seen | None:
    """
    Tokens that were said before are less likely for the sampler than for the trainer, and others more likely.

    In log-odds, however likely a token is, the difference is its own penalty less that of what could have been sampled
    instead. Of `d`, little of it is left where a model is sure.
    """
    here, times = core(o), o.times.clip(max=24).astype(float)
    penalties = (o.seen.astype(float), (o.times > 0).astype(float), times - _mean_before(o.row, times + 1, _BEFORE))
    kinds = (o.seen, o.times > 0, o.times.clip(max=12))
    known = [(x[here], k[here]) for x, k in zip(penalties, kinds, strict=True) if _varies(k[here])]
    if not known:
        return None
    d, middle, token = o.d[here], o.middle[here], o.token[here]
    difference, weight = _log_odds(o.train[here]) - _log_odds(o.rollout[here]), np.square(1 - np.exp(middle))

    def own(values: np.ndarray) -> np.ndarray:
        """What is neither of its probability nor of the token: other causes make log-ratios that are a token's own."""
        values = values - in_bins(middle, values, weight)
        return (values - _mean_of_equal(token, values, weight)) * np.sqrt(weight)

    effect = own(difference)
    correlations = [_correlation(own(penalty), effect) for penalty, _ in known]
    correlation, kind = max(zip(correlations, [kind for _, kind in known], strict=True), key=lambda pair: pair[0])
    seen = kind > 0
    explained = 1 - float(np.square(_without(middle, d, kind)).sum()) / max(float(np.square(d).sum()), 1e-300)
    numbers = {"seen": _mean(d[seen]), "unseen": _mean(d[~seen]), "correlation": correlation}
    said = (
        "d is {seen} on average at tokens that were said before, and {unseen} at others; of one and the same token, what was "
        "said before and the difference in log-odds have a correlation of {correlation}"
    )
    return Seen(correlation, _bounded(explained), numbers, said)


def _varies(kind: np.ndarray) -> bool:
    """Whether there are enough tokens that were said before, and enough that were not."""
    return bool(min(np.sum(kind > 0), np.sum(kind == 0)) >= 30)


def _log_odds(logps: np.ndarray) -> np.ndarray:
    """Logarithm of `p / (1 - p)`, of tokens that are at most nearly certain: float32 knows no more."""
    p = np.exp(logps).clip(1e-6, 1 - 1e-4)
    return np.log(p / (1 - p))


def _mean_before(rows: np.ndarray, values: np.ndarray, n: int) -> np.ndarray:
    """Mean over the `n` tokens before, or those that there are in the row; 0 at the first."""
    at = np.arange(len(rows))
    starts = np.maximum.accumulate(np.where(np.diff(rows, prepend=-1) != 0, at, 0))
    first, sums = np.maximum(at - n, starts), np.concatenate([[0.0], np.cumsum(values)])
    return (sums[at] - sums[first]) / np.maximum(at - first, 1)


def _mean_of_equal(keys: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    _, inverse = np.unique(keys, return_inverse=True)
    return (np.bincount(inverse, values * weights) / np.maximum(np.bincount(inverse, weights), 1e-300))[inverse]


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.corrcoef(x, y)[0, 1]) if x.std() and y.std() else 0.0


def _without(keys: np.ndarray, values: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """Values less the mean of their kind at tokens of this probability."""
    rest = values.copy()
    for which in np.unique(kind):
        rest[kind == which] -= in_bins(keys[kind == which], values[kind == which])
    return rest


# From sequence to sequence ------------------------------------------------------------------------------------------------


def _growing(o: Observed, x: np.ndarray, said: str) -> Seen | None:
    """The square of `d` grows with something that is known of each sequence, from where that is smallest."""
    here = core(o)
    squares = o.of_rows(np.square(o.d) * here)  # of the few tokens outside it there are as many in each
    typical = o.of_rows(
        np.abs(o.d) / np.maximum(_usual(o, here), 1e-12) * here
    )  # without the weight of unlikely tokens
    known = np.isfinite(x) & np.isfinite(squares)
    values, squares, lengths = x[known], squares[known], o.lengths[known]
    if len(values) < 8 or values.min() == values.max():
        return None
    lowest, highest = values <= np.quantile(values, _END), values >= np.quantile(values, 1 - _END)
    low, high = (float(np.average(squares[here], weights=lengths[here])) for here in (lowest, highest))
    correlation, growth = _rank_correlation(values, typical[known]), high / max(low, (FLOOR / 4) ** 2)
    numbers = {"low": low**0.5, "high": high**0.5, "correlation": correlation}
    share = _bounded(1 - low / max(float(np.average(squares, weights=lengths)), 1e-300))
    if growth > _JUMP:  # what begins at once, and stays, is not in order of `x`
        correlation = max(correlation, 2 * _beyond(typical[known], lowest) - 1)
    more = growth > _GROWTH and correlation * (len(values) - 1) ** 0.5 > _CHANCE
    return Seen(correlation if more else 0.0, share, numbers, said)


def _beyond(values: np.ndarray, lowest: np.ndarray) -> float:
    """Chance that a value is larger than one of the lowest sequences."""
    ranks = _ranks(values)
    n, m = int((~lowest).sum()), int(lowest.sum())
    return float(ranks[~lowest].sum() - n * (n - 1) / 2) / (n * m) if n else 0.5


def stale(o: Observed) -> Seen | None:
    if _visits(o):
        return None
    said = "|d| is {low} in the freshest samples and {high} in the oldest (rank correlation {correlation})"
    return _growing(o, o.staleness, said)


def own_updates(o: Observed) -> Seen | None:
    if not _visits(o):
        return None
    said = "|d| is {low} when a batch is first trained on and {high} when last (rank correlation {correlation})"
    return _growing(o, o.staleness, said)


def _visits(o: Observed) -> bool:
    """Whether ages are those of batches that are trained on repeatedly, and compared with the policy as it is by then."""
    if not o.settings.get("bypass_mode", str(o.settings.get("rollout_correction", "")).startswith("bypass")):
        return False
    known = np.isfinite(o.staleness)
    one_age = all(len(np.unique(o.staleness[known & (o.step == step)])) <= 1 for step in np.unique(o.step[known]))
    return bool(known.any()) and one_age and float(o.staleness[known].min()) == 0.0


def _by_step(o: Observed) -> Seen | None:
    said = "|d| is {low} in the first steps and {high} in the last (rank correlation {correlation}), whatever the age"
    freshest = np.nanmin(o.staleness) if np.isfinite(o.staleness).any() else np.nan
    steps = np.where(
        np.isnan(freshest) | (o.staleness == freshest), o.step, np.nan
    )  # so that age cannot be the reason
    return _growing(o, steps, said)


def never_pushed(o: Observed) -> Seen | None:
    return None if _as_small_as_rounding(o) else _by_step(o)


def lora_merge(o: Observed) -> Seen | None:
    """Nothing before the adapter has learned, and rounding from then on."""
    if not _as_small_as_rounding(o) or o.about.get("adapter") == "none" or _visits(o):
        return None
    seen = _by_step(o)
    if seen is None or seen.numbers["low"] > 0.3 * seen.numbers["high"]:
        return None
    return seen._replace(
        statistic=seen.share, said="|d| is {low} in the first steps and {high} in the last, as small as rounding"
    )


def _as_small_as_rounding(o: Observed) -> bool:
    return _rms(o.d[core(o)]) < 0.03


def padding(o: Observed) -> Seen | None:
    """What the trainer scores alone, without padding, fits; or the gap grows with the padding."""
    said = "|d| is {low} with the least padding and {high} with the most (rank correlation {correlation})"
    growing = _growing(o, o.padding, said)
    again = np.isfinite(o.again) & core(o)
    gap, alone = _typical(o.d[again]), _typical((o.again - o.rollout)[again])
    if again.sum() < 30 or gap <= FLOOR:
        return growing
    share = _bounded((gap**2 - alone**2) / max(_typical(o.d[core(o)]), gap) ** 2)  # of that of all sequences
    local = _bounded(1 - (alone / gap) ** 2)
    said = "|d| is {gap} in a batch, and {alone} where the trainer scores a sequence alone"
    seen = Seen(local if share > 0.1 else 0.0, share, {"gap": gap, "alone": alone}, said)
    # where the few that are scored alone have little padding, they leave it open, and all of them together say more
    return growing if growing and local > 0.3 and growing.statistic > seen.statistic else seen


# Everywhere ---------------------------------------------------------------------------------------------------------------


def noise_floor(o: Observed) -> float | None:
    """Mean square of the trainer against itself over that of the gap; `None` where it is not known."""
    again = np.isfinite(o.again) & core(o)
    gap = _typical(o.d[again])
    if again.sum() < 30 or gap < FLOOR / 4:
        return None
    return (_typical((o.train - o.again)[again]) / gap) ** 2


def dropout(o: Observed) -> Seen | None:
    """The trainer does not agree with itself, by more than rounding."""
    floor, again = noise_floor(o), np.isfinite(o.again) & core(o)
    if floor is None:
        return None
    itself = _typical((o.train - o.again)[again])
    numbers = {"itself": itself, "gap": _typical(o.d[again])}
    said = "the trainer differs from itself by {itself} when it scores a sequence twice, and from the sampler by {gap}"
    alone = (_typical((o.again - o.rollout)[again]) / numbers["gap"]) ** 2  # 0 if it is the batch that is at fault
    return Seen(floor if itself > LARGE / 2 and alone > 0.4 else 0.0, _bounded(floor / 2), numbers, said)


def tails(o: Observed) -> tuple[float, float]:
    """Kurtosis of the log-ratio at tokens of equal probability, and percentile 99 of its size over the median."""
    here = core(o)
    level = _level(o, here)
    size = np.abs(level)
    square = _mean(np.square(level))
    return _mean(level**4) / max(square, 1e-300) ** 2, float(np.quantile(size, 0.99)) / max(
        float(np.median(size)), 1e-300
    )


def routing(o: Observed) -> Seen | None:
    """A few tokens have most of the square of `d`, wherever they stand and however likely they are."""
    kurtosis, tail = tails(o)
    size = np.abs(o.d[core(o)])
    top = np.sort(size)[-max(len(size) // 100, 1) :]
    share = float(np.square(top).sum() / max(np.square(size).sum(), 1e-300))
    numbers = {"top": share, "kurtosis": kurtosis, "tail": tail}
    said = (
        "1 % of the tokens have {top} of d^2; at tokens of equal probability its kurtosis is {kurtosis} and "
        "percentile 99 of |d| is {tail} times the median (a Gaussian's: 3 and 3.8)"
    )
    return Seen(kurtosis * tail, _bounded(share), numbers, said)


def by_token(o: Observed) -> float:
    """How much alike the log-ratios of one and the same token are, wherever it stands: 0 for noise, more for other weights."""
    here = core(o)
    return alike(o.token[here], _level(o, here))


def _systematic(o: Observed, said: str) -> Seen:
    same = by_token(o)
    return Seen(same, 1.0, {"alike": same, "gap": _rms(o.d[core(o)])}, said)


def weights(o: Observed) -> Seen | None:
    if caches_in_low_precision(o.about):
        return None
    said = (
        "tokens have a log-ratio of their own: two places with one token share {alike} of d^2, and |d| is {gap} from the "
        "first step on"
    )
    if "kv_cache_dtype" not in o.about:
        said += " (a cache in 8 bits looks the same, and this dump does not say how the engine caches)"
    return _systematic(o, said)


def kv_cache(o: Observed) -> Seen | None:
    """The log-ratios of low precision that is the same at every visit, of an engine that says where it has it."""
    if not caches_in_low_precision(o.about):
        return None
    return _systematic(
        o, "the engine caches in 8 bits or less; two places with one token share {alike} of d^2, and |d| is {gap}"
    )


def caches_in_low_precision(about: Mapping[str, str]) -> bool:
    """Whether the engine says that it keeps keys and values in 8 bits or less."""
    return about.get("kv_cache_dtype", "auto").startswith(("fp8", "int8", "nvfp4"))


def head(o: Observed) -> Seen | None:
    """As small as rounding, but the same whenever the trainer repeats it, which rounding in the layers is not."""
    floor = noise_floor(o)
    gap = _rms(o.d[core(o)])
    if floor is None or gap > LARGE:
        return None
    said = "|d| is {gap}, as of rounding; of its square, {floor} changes when the trainer scores a sequence alone"
    return Seen(1 - floor, 1.0, {"gap": gap, "floor": floor}, said)


def rounding(o: Observed) -> Seen | None:
    """Noise: small, with no token and no place of its own, and larger where tokens are unlikely."""
    here, same = core(o), by_token(o)
    gap = _rms(o.d[here])
    slope = _rank_correlation(o.middle[here], np.abs(o.d[here]))
    said = (
        "|d| is {gap} and grows as tokens get unlikely (rank correlation {slope}); two places with one token share {alike} of "
        "d^2"
    )
    quiet = (1 - min(gap / LARGE, 1.0) ** 2) * (1 - min(max(same, 0.0) / 0.15, 1.0))
    return Seen(quiet if slope < -0.1 else 0.0, 1.0, {"gap": gap, "slope": slope, "alike": same}, said)


def old_throughout(o: Observed) -> Seen | None:
    """Samples that are known to be old, with no fresh ones to compare them with, and a gap that is too large for rounding."""
    gap = _rms(o.d[core(o)])
    ages = o.staleness[o.row]
    if gap <= LARGE or not np.isfinite(ages).any() or _visits(o):
        return None
    said = (
        "samples are {age} optimizer steps old or older, |d| is {gap}, more than rounding makes, and nothing else fits; there "
        "are no fresh ones to compare with"
    )
    old = _mean(ages >= 1)
    return Seen(old, 1.0, {"age": float(np.min(ages[ages >= 1], initial=np.inf)), "gap": gap}, said)


# In the order in which they are looked for
STAGES = (
    Stage((Signature("nan_rows", nan_rows, 0.0, 0.001),), floor=False),
    Stage((Signature("shift", shift, 0.6, 0.85),), ends=True),
    Stage(
        (
            Signature("first_token", first_token, 6.0, 30.0),
            Signature("last_token", last_token, 6.0, 30.0),
            Signature("seams", seams, 6.0, 30.0),
        ),
        several=True,
        floor=False,
    ),
    Stage((Signature("padding", padding, 0.7, 0.9), Signature("dropout", dropout, 0.4, 0.7)), ends=True),
    Stage(
        (
            Signature("stale", stale, 0.4, 0.6),
            Signature("own_updates", own_updates, 0.4, 0.6),
            Signature("never_pushed", never_pushed, 0.4, 0.6),
            Signature("lora_merge", lora_merge, 0.6, 0.9),
        )
    ),
    Stage(
        (
            Signature("truncation", truncation, 0.2, 0.4),
            Signature("penalty", penalty, 0.3, 0.5),
            Signature("temperature", temperature, 0.4, 0.6),
        )
    ),
)
# Of what none of the above explains
DIFFUSE = (
    Stage((Signature("routing", routing, 60.0, 120.0),), ends=True),
    Stage((Signature("kv_cache", kv_cache, 0.15, 0.4), Signature("weights", weights, 0.12, 0.25)), ends=True),
    Stage(
        (
            Signature("head", head, 0.8, 0.95),
            Signature("rounding", rounding, 0.4, 0.8),
            Signature("stale", old_throughout, 0.9, 1.5),  # never more than possible
        )
    ),
)
