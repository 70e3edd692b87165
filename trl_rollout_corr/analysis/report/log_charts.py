"""Charts of the log of a run, or of two runs against each other, over optimizer steps."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import pandas as pd

from ...correction.histogram import PERCENTILES
from ...messages import PREFIX, number
from .page import Axis, Chart, Series
from .status import Band


class Trend(NamedTuple):
    """A chart of metrics: its title, and labels by metric. The first metric has the healthy band; the others are its parts."""

    title: str
    metrics: Mapping[str, str]
    log: bool = False


# Without the prefix of their keys
TRENDS = {
    "k3-kl": Trend(
        "Gap (k3_kl), nats per token",
        {"k3_kl": "all", "engine_k3_kl": "engine", "update_k3_kl": "updates since"},
        log=True,
    ),
    "kl": Trend("KL divergence, mean of -d", {"kl": "kl"}),
    "kl-by-advantage": Trend(
        "KL divergence by the sign of the advantage",
        {"kl_advantage_positive": "positive", "kl_advantage_negative": "negative"},
    ),
    "percentiles": Trend("Percentiles of d", {f"log_ratio_p{p}": f"p{p}" for p in PERCENTILES}),
    "effective-lr": Trend("Effective learning rate", {"effective_lr": "effective_lr"}),
    "sample-size": Trend("Effective sample size of the weights", {"rollout_is_eff_sample_size": "share"}),
    "mean-weight": Trend("Mean weight", {"rollout_is_mean": "mean weight"}),
    "rejected": Trend("Share of tokens rejected", {"rollout_rs_masked_fraction": "share"}),
    "nonfinite": Trend("Share of tokens that are not finite", {"nonfinite_fraction": "share"}),
    "reward": Trend("Reward", {"reward": "reward"}),
    "staleness": Trend("Age of the data, in optimizer steps", {"staleness_mean": "mean", "staleness_max": "largest"}),
}
OVERVIEW = ("k3-kl", "rejected", "sample-size", "effective-lr", "reward")
POINTS = 250  # per curve; more cannot be told apart
_NOISE = 1e-6  # nats per token: a gap below is rounding, and an axis that shows it would squeeze the rest
_COLORS = ("line", "second", "third")

Alarms = Sequence[tuple[int, str]]


class Curves(NamedTuple):
    """Mean, lowest and highest values over windows of steps: a column per curve, the mean step as index."""

    means: pd.DataFrame
    lowest: pd.DataFrame
    highest: pd.DataFrame


def overview(logs: Mapping[str, pd.DataFrame], alarms: Alarms) -> list[Chart]:
    """
    The main charts.

    Args:
        logs (`Mapping[str, pd.DataFrame]`):
            Log by name of the run. Of one run every metric of a chart is drawn, of two the first of each.
        alarms (`Sequence[tuple[int, str]]`):
            Steps of first alarms, and the numbers of their findings.

    Returns:
        `list[Chart]`: gap, rejected tokens (or else the sample size of the weights), effective learning rate and reward, if
        they were logged.
    """
    charts = {name: chart for name in OVERVIEW if (chart := _chart(name, logs, alarms)) is not None}
    if "rejected" in charts:
        charts.pop("sample-size", None)
    return [chart._replace(size=(5.6, 2.3)) for chart in charts.values()]


def more_trends(log: pd.DataFrame, alarms: Mapping[str, Alarms], shown: Sequence[str]) -> list[Chart]:
    """A chart per trend that was logged and is not shown yet. `alarms` by metric."""
    charts = []
    for name in TRENDS:
        first = next(iter(TRENDS[name].metrics))
        if name == "percentiles":
            charts.append(_percentiles(log))
        elif name not in shown and (name != "nonfinite" or log.get(_key(first), pd.Series()).any()):
            charts.append(_chart(name, {"": log}, alarms.get(_key(first), ())))
    return [chart for chart in charts if chart is not None]


def _chart(name: str, logs: Mapping[str, pd.DataFrame], alarms: Alarms) -> Chart | None:
    trend, two = TRENDS[name], len(logs) > 1
    (metric, main), *_ = trend.metrics.items()
    curves = _curves(trend, logs)
    if curves is None or not (two or main in curves.means):
        return None
    labels, roles = (logs, ("second", "line")) if two else (trend.metrics.values(), _COLORS)
    colors = dict(zip(labels, roles, strict=False))
    band, means = Band.of(metric), curves.means
    ends = {label: _ends(means[label].dropna()) for label in means}
    says = "; ".join(f"{run} {said}" for run, said in ends.items()) if two else ends[main]
    says += f". Healthy: {band.in_words()}." if band != Band() else "."
    at = dict.fromkeys(str(step) for step, _ in alarms)
    alarmed = f" Alarm at step {', '.join(at)}." if alarms else ""
    low, high = number(means.min(axis=None)), number(means.max(axis=None))
    log = trend.log and curves.lowest.min(axis=None) > 0
    series = [_series(curves, label, colors[label], part=not two and label != main) for label in means]
    return Chart(
        name,
        trend.title,
        f"{trend.title} over steps, between {low} and {high}: {says}{alarmed}",
        _steps(logs, alarmed=bool(alarms)),
        Axis(log=log, limits=_limits(curves, band, log, alarmed=bool(alarms))),
        [*chain.from_iterable(series)],
        _table(means),
        says,
        band,
        alarms,
        all(_is_flat(means[label]) for label in means),
    )


def _curves(trend: Trend, logs: Mapping[str, pd.DataFrame]) -> Curves | None:
    """All metrics of a trend of one run, or its first metric of two, over at most `POINTS` windows; `None` without a value."""
    if len(logs) == 1:
        columns = [(label, metric, log) for log in logs.values() for metric, label in trend.metrics.items()]
    else:
        columns = [(name, next(iter(trend.metrics)), log) for name, log in logs.items()]
    logged = {label: log[_key(metric)] for label, metric, log in columns if _key(metric) in log}
    if not logged:
        return None
    values = pd.concat(logged, axis=1).sort_index().replace([np.inf, -np.inf], np.nan)
    values = values.dropna(how="all").dropna(how="all", axis=1)
    if values.empty:
        return None
    window = np.arange(len(values)) // -(-len(values) // POINTS)
    steps, groups = pd.Series(values.index, dtype=float).groupby(window).mean().rename("step"), values.groupby(window)
    return Curves(*(table.set_axis(steps) for table in (groups.mean(), groups.min(), groups.max())))


def _key(metric: str) -> str:
    return metric if metric == "reward" else PREFIX + metric


def _series(curves: Curves, name: str, color: str, *, part: bool) -> list[Series]:
    """A curve, and the area from lowest to highest value. A part of another curve is broad, so that both are seen."""
    means, lowest, highest = (table[name].dropna() for table in curves)
    line = Series(
        name if len(curves.means.columns) > 1 else "", means.index, means, "broad" if part else "line", color
    )
    if (lowest == highest).all():
        return [line]
    return [Series("", means.index, highest, "area", color, 0.2, lowest), line]


def _table(means: pd.DataFrame) -> pd.DataFrame:
    return means.set_axis(means.index.to_numpy().round(1)).rename_axis("step").reset_index()


def _is_flat(values: pd.Series) -> bool:
    """True if the curve is a horizontal line."""
    low, high = values.min(), values.max()
    return bool(high - low <= 1e-6 + 1e-3 * abs(high))


def _ends(values: pd.Series) -> str:
    """The first and the last value of a curve, in words."""
    words = [number(float(value)) for value in values]
    if len(words) > 1 and _is_flat(values):
        return f"{words[-1]} at every step"
    ends = (0, -1) if len(words) > 1 else (0,)
    return ", ".join(f"{words[i]} at step {number(round(values.index[i]))}" for i in ends)


def _steps(logs: Mapping[str, pd.DataFrame], *, alarmed: bool) -> Axis:
    """All steps of the runs, the same in every chart, with room for the number of an alarm at the last step."""
    steps = [step for log in logs.values() for step in log.index]
    room = (max(steps) - min(steps)) / 50 or 0.5
    limits = (min(steps) - room, max(steps) + (4 * room if alarmed else room))
    return Axis("optimizer step", ticks="whole", limits=limits)


def _limits(curves: Curves, band: Band, log: bool, *, alarmed: bool) -> tuple[float, float]:
    """Ends of the axis: all values and the ends of the healthy band, with room for the numbers of alarms at the top."""
    edges = [edge for edge in band if edge is not None and (edge > 0 or not log)]
    highest = curves.highest.max(axis=None)
    low, high = min([*edges, curves.lowest.min(axis=None)]), max([*edges, highest])
    if log:
        low = max(low, min(_NOISE, highest))
        return low / 1.6, high * 1.6 * ((high / low) ** 0.18 if alarmed else 1.0)
    room = 0.07 * (high - low) or 0.1 * abs(high) or 1.0
    bottom = 0.0 if 0 <= low < 0.6 * high else low - room
    return bottom, high + room + (0.15 * (high + room - bottom) if alarmed else 0.0)


def _percentiles(log: pd.DataFrame) -> Chart | None:
    """Percentiles, one within another."""
    curves = _curves(TRENDS["percentiles"], {"": log})
    if curves is None or len(curves.means.columns) < len(PERCENTILES):
        return None
    means = curves.means.dropna()
    low, high = number(means["p1"].iloc[-1]), number(means["p99"].iloc[-1])
    ends = f"at the last step, 1 percent of tokens are below {low} and 1 percent above {high}"
    areas = [
        Series(f"{a} to {b} %", means.index, means[f"p{b}"], "area", alpha=alpha, low=means[f"p{a}"])
        for a, b, alpha in ((1, 99, 0.18), (5, 95, 0.25), (25, 75, 0.35))
    ]
    return Chart(
        "percentiles",
        TRENDS["percentiles"].title,
        f"Percentiles of the log-ratio over steps; {ends}.",
        _steps({"": log}, alarmed=False),
        Axis("d, nats"),
        [*areas, Series("", means.index, means["p50"])],
        _table(means),
        f"{ends.capitalize()}.",
    )
