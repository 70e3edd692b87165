"""Causes whose gap grows from sequence to sequence: with the age of the weights, with the step, or with padding."""

from collections.abc import Callable

import numpy as np

from ..health.advice import mode_of
from .evidence import (
    FLOOR,
    LARGE,
    SIZE,
    Picture,
    Points,
    Seen,
    bounded,
    mean,
    ranks_of,
    rms,
    spearman,
    usual_size,
)
from .observed import Observed


_END = 0.1  # share of the sequences that are compared at each end
_GROWTH = 1.4  # smallest growth of the mean square that counts
_JUMP = 9.0  # growth of the mean square above which it need not be monotone
_CHANCE = 3.0  # standard deviations of a rank correlation by chance, above which it counts


def growing(o: Observed, x: np.ndarray, said: str) -> Seen | None:
    """Test whether the mean square of `d` grows with `x` (shape `(B,)`), an age, a step or a number of tokens of padding."""
    here = o.core
    squares = o.of_rows(
        np.square(o.d) * here
    )  # few tokens are not in the core, about the same number in each sequence
    # relative to equally likely tokens, so that unlikely tokens count no more
    typical = o.of_rows(np.abs(o.d) / np.maximum(usual_size(o, here), 1e-12) * here)
    known = np.isfinite(x) & np.isfinite(squares)
    values, squares, lengths = x[known], squares[known], o.lengths[known]
    if len(values) < 8 or values.min() == values.max():
        return None
    lowest, highest = values <= np.quantile(values, _END), values >= np.quantile(values, 1 - _END)
    low, high = (float(np.average(squares[here], weights=lengths[here])) for here in (lowest, highest))
    correlation, growth = spearman(values, typical[known]), high / max(low, (FLOOR / 4) ** 2)
    numbers = {"low": low**0.5, "high": high**0.5, "correlation": correlation}
    share = bounded(1 - low / max(float(np.average(squares, weights=lengths)), 1e-300))
    if growth > _JUMP:  # a gap that appears at once and stays is not monotone in `x`
        correlation = max(correlation, 2 * _beyond(typical[known], lowest) - 1)
    more = growth > _GROWTH and correlation * (len(values) - 1) ** 0.5 > _CHANCE
    return Seen(correlation if more else 0.0, share, numbers, said)


def _beyond(values: np.ndarray, lowest: np.ndarray) -> float:
    """Probability that the value of another sequence is larger than that of one of the lowest sequences."""
    ranks = ranks_of(values)
    n, m = int((~lowest).sum()), int(lowest.sum())
    return float(ranks[~lowest].sum() - n * (n - 1) / 2) / (n * m) if n else 0.5


def stale(o: Observed) -> Seen | None:
    if _visits(o):
        return None
    said = "|d| is {low} in the freshest samples and {high} in the oldest (rank correlation {correlation})"
    return growing(o, o.staleness, said)


def own_updates(o: Observed) -> Seen | None:
    if not _visits(o):
        return None
    said = "|d| is {low} when a batch is first trained on and {high} when last (rank correlation {correlation})"
    return growing(o, o.staleness, said)


def _visits(o: Observed) -> bool:
    """True if ages count the visits of a batch: bypass mode compares the sampler with the policy that was updated since."""
    if mode_of(o.settings) == "decoupled":
        return False
    known = np.isfinite(o.staleness)
    one_age = all(len(np.unique(o.staleness[known & (o.step == step)])) <= 1 for step in np.unique(o.step[known]))
    return bool(known.any()) and one_age and float(o.staleness[known].min()) == 0.0


def _by_step(o: Observed) -> Seen | None:
    said = "|d| is {low} in the first steps and {high} in the last (rank correlation {correlation}), at any age"
    freshest = np.nanmin(o.staleness) if np.isfinite(o.staleness).any() else np.nan
    # the freshest samples only, so that age cannot be the cause
    steps = np.where(np.isnan(freshest) | (o.staleness == freshest), o.step, np.nan)
    return growing(o, steps, said)


def never_pushed(o: Observed) -> Seen | None:
    return None if _as_small_as_rounding(o) else _by_step(o)


def lora_merge(o: Observed) -> Seen | None:
    """Test whether the gap is almost 0 in the first steps, where the adapter is 0, and as small as rounding later."""
    if not _as_small_as_rounding(o) or o.about.get("adapter") == "none" or _visits(o):
        return None
    seen = _by_step(o)
    if seen is None or seen.numbers["low"] > 0.3 * seen.numbers["high"]:
        return None
    return seen._replace(
        statistic=seen.share, said="|d| is {low} in the first steps and {high} in the last, as small as rounding"
    )


def _as_small_as_rounding(o: Observed) -> bool:
    return rms(o.d[o.core]) < 0.03


def old_throughout(o: Observed) -> Seen | None:
    """Test whether all samples are old and the gap is larger than that of rounding, where no fresh samples can be compared."""
    gap = rms(o.d[o.core])
    ages = o.staleness[o.row]
    if gap <= LARGE or not np.isfinite(ages).any() or _visits(o):
        return None
    said = (
        "samples are at least {age} optimizer steps old, |d| is {gap}, more than rounding explains, and no other cause fits; "
        "the dump has no fresh samples to compare with"
    )
    old = mean(ages >= 1)
    return Seen(old, 1.0, {"age": float(np.min(ages[ages >= 1], initial=np.inf)), "gap": gap}, said)


# Pictures -----------------------------------------------------------------------------------------------------------------


def by_sequence(label: str, of: Callable[[Observed], np.ndarray]) -> Picture:
    """A picture of the gap over a number of each sequence."""

    def points(o: Observed) -> Points:
        values = of(o)[o.row]
        known = np.isfinite(values) & o.core
        groups = np.unique(values[known])
        if len(groups) > 24:
            edges = np.unique(np.quantile(groups, np.linspace(0, 1, 13)))
            middle = (edges[1:] + edges[:-1]) / 2
            place = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(middle) - 1)
            sizes = [rms(o.d[known & (place == i)]) for i in range(len(middle))]
            return Points(label, SIZE, middle.tolist(), sizes)
        return Points(label, SIZE, groups.tolist(), [rms(o.d[known & (values == group)]) for group in groups])

    return points


steps = by_sequence("optimizer step", lambda o: o.step.astype(float))


def ages(o: Observed) -> Points:
    if len(np.unique(o.staleness[np.isfinite(o.staleness)])) < 2:  # no curve
        return steps(o)
    return by_sequence("optimizer steps since the weights that sampled", lambda o: o.staleness)(o)
