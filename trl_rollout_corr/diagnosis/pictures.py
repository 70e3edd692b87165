"""The evidence of each cause as a few points, to be drawn by whoever draws. No matplotlib here."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .observed import Observed
from .ranking import Finding
from .signatures import core, misfit


class Points(NamedTuple):
    """
    Points of a picture.

    Args:
        x (`str`):
            What they are over.
        y (`str`):
            What they show.
        at (`Sequence[float]` or `Sequence[str]`):
            Where they are: numbers make a curve, names make bars.
        values (`Sequence[float]`):
            Their values.
    """

    x: str
    y: str
    at: Sequence[float] | Sequence[str]
    values: Sequence[float]


_SIZE = "root mean square of d, nats"


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def _places(o: Observed) -> Points:
    kinds = {"first": o.first, "inside": core(o), "at a seam": o.seam, "last": o.last}
    kinds = {name: here for name, here in kinds.items() if here.any()}
    return Points("place in the completion", _SIZE, [*kinds], [_rms(o.d[here]) for here in kinds.values()])


def _lags(o: Observed) -> Points:
    fits = {str(lag): misfit(o, lag) for lag in (-2, -1, 0, 1, 2)}
    return Points(
        "tokens by which the sides are set off", _SIZE, [*fits], [(fit or 0.0) ** 0.5 for fit in fits.values()]
    )


def _rows(label: str, of: Callable[[Observed], np.ndarray]) -> Callable[[Observed], Points]:
    def points(o: Observed) -> Points:
        values = of(o)[o.row]
        known = np.isfinite(values) & core(o)
        groups = np.unique(values[known])
        if len(groups) > 24:
            edges = np.unique(np.quantile(groups, np.linspace(0, 1, 13)))
            middle = (edges[1:] + edges[:-1]) / 2
            place = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(middle) - 1)
            sizes = [_rms(o.d[known & (place == i)]) for i in range(len(middle))]
            return Points(label, _SIZE, middle.tolist(), sizes)
        return Points(label, _SIZE, groups.tolist(), [_rms(o.d[known & (values == group)]) for group in groups])

    return points


def _by_probability(y: str, of: Callable[[np.ndarray], float]) -> Callable[[Observed], Points]:
    def points(o: Observed) -> Points:
        here = core(o)
        x, d = o.middle[here], o.d[here]
        order = np.argsort(x)
        parts = [part for part in np.array_split(order, 14) if part.size]
        return Points(
            "log-probability of the token, nats", y, [float(x[p].mean()) for p in parts], [of(d[p]) for p in parts]
        )

    return points


def _repeats(o: Observed) -> Points:
    here = core(o)
    times = np.where(o.seen & (o.times == 0), 0.5, o.times.clip(max=4))
    names = {0.0: "new", 0.5: "in the prompt", 1.0: "once", 2.0: "twice", 3.0: "3 times", 4.0: "more often"}
    kinds = {name: here & (times == value) for value, name in names.items()}
    kinds = {name: which for name, which in kinds.items() if which.sum() >= 5}
    return Points("said before", "mean of d, nats", [*kinds], [float(o.d[which].mean()) for which in kinds.values()])


def _itself(o: Observed) -> Points:
    again = np.isfinite(o.again)
    if not again.any():
        return _rows("tokens of padding", lambda o: o.padding)(o)
    pairs = {
        "trainer - sampler": o.d, "trainer alone - sampler": o.again - o.rollout, "trainer - trainer alone": o.train - o.again
    }  # fmt: skip
    return Points("what is compared", _SIZE, [*pairs], [_rms(values[again]) for values in pairs.values()])


def _few(o: Observed) -> Points:
    squares = np.sort(np.square(o.d[core(o)]))[::-1]
    shares = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    total = max(float(squares.sum()), 1e-300)
    of = [float(squares[: max(round(share * len(squares)), 1)].sum()) / total for share in shares]
    return Points(
        "share of the tokens, those furthest off first", "share of d^2", [f"{100 * share:g} %" for share in shares], of
    )


def _broken(o: Observed) -> Points:
    steps, counts = np.unique(o.step[o.broken_row], return_counts=True)
    return Points("optimizer step", "tokens without a finite log-probability", steps.tolist(), counts.tolist())


_STEPS = _rows("optimizer step", lambda o: o.step.astype(float))


def _ages(o: Observed) -> Points:
    if len(np.unique(o.staleness[np.isfinite(o.staleness)])) < 2:  # no curve
        return _STEPS(o)
    return _rows("optimizer steps since the weights that sampled", lambda o: o.staleness)(o)


_SIZES = _by_probability(_SIZE, _rms)
_MEANS = _by_probability("mean of d, nats", lambda d: float(d.mean()))
_PICTURES: dict[str, Callable[[Observed], Points]] = {
    "nan_rows": _broken,
    "shift": _lags,
    "first_token": _places,
    "last_token": _places,
    "seams": _places,
    "padding": _itself,
    "dropout": _itself,
    "stale": _ages,
    "own_updates": _ages,
    "never_pushed": _STEPS,
    "lora_merge": _STEPS,
    "truncation": _MEANS,
    "temperature": _MEANS,
    "penalty": _repeats,
    "routing": _few,
    "kv_cache": _SIZES,
    "weights": _SIZES,
    "head": _SIZES,
    "rounding": _SIZES,
}


def picture(o: Observed, finding: Finding) -> Points:
    """The evidence for a finding as points."""
    return _PICTURES[finding.name](o)
