"""Charts of what was logged, over the steps of a run."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...correction.histogram import PERCENTILES
from ...health.examine import Finding
from ...health.rules import HEALTHY
from ...messages import PREFIX, number
from .drawing import Axes, Chart, Colors, draw_band, draw_line, label_steps


class Trend(NamedTuple):
    """What one chart shows: metrics with their labels, of which the first has the healthy band, or percentiles."""

    name: str
    title: str
    metrics: dict[str, str]
    log: bool = False
    fan: bool = False


TRENDS = (
    Trend(
        "k3-kl",
        "Gap (k3_kl), nats per token",
        {f"{PREFIX}k3_kl": "all", f"{PREFIX}engine_k3_kl": "engine", f"{PREFIX}update_k3_kl": "updates since"},
        log=True,
    ),
    Trend("kl", "KL divergence, mean of -d", {f"{PREFIX}kl": "kl"}),
    Trend(
        "kl-by-advantage",
        "KL divergence by the sign of the advantage",
        {f"{PREFIX}kl_advantage_positive": "positive", f"{PREFIX}kl_advantage_negative": "negative"},
    ),
    Trend("percentiles", "Percentiles of d", {f"{PREFIX}log_ratio_p{p}": f"p{p}" for p in PERCENTILES}, fan=True),
    Trend("effective-lr", "Effective learning rate", {f"{PREFIX}effective_lr": "effective_lr"}),
    Trend("sample-size", "Effective sample size of the weights", {f"{PREFIX}rollout_is_eff_sample_size": "share"}),
    Trend("mean-weight", "Mean weight", {f"{PREFIX}rollout_is_mean": "mean weight"}),
    Trend("rejected", "Share of tokens rejected", {f"{PREFIX}rollout_rs_masked_fraction": "share"}),
    Trend("nonfinite", "Share of tokens that are not finite", {f"{PREFIX}nonfinite_fraction": "share"}),
    Trend("reward", "Reward", {"reward": "reward"}),
    Trend(
        "staleness",
        "Age of the data, in optimizer steps",
        {f"{PREFIX}staleness_mean": "mean", f"{PREFIX}staleness_max": "largest"},
    ),
)
POINTS = 250  # per curve; more cannot be told apart
ROLES = ("line", "second", "third")

Band = tuple[float | None, float | None]


class Curve(NamedTuple):
    """A metric over windows of steps: the mean step, and mean, lowest and highest value."""

    steps: np.ndarray
    means: np.ndarray
    lowest: np.ndarray
    highest: np.ndarray


def trends(logs: Sequence[Mapping[str, Any]], findings: Sequence[Finding], told: Collection[str]) -> list[Chart]:
    """One chart per trend that was logged and is not told already, marked where something was found."""
    rest = [trend for trend in TRENDS if trend.name not in told]
    charts = (_fan(trend, logs) if trend.fan else _chart(trend, logs, findings) for trend in rest)
    return [chart for chart in charts if chart is not None]


def is_flat(curve: Curve) -> bool:
    """Whether there is nothing to see but a straight line."""
    low, high = float(curve.lowest.min()), float(curve.highest.max())
    return high - low <= 1e-6 + 1e-3 * abs(high)


def in_short(curve: Curve) -> str:
    steps, values, *_ = curve
    if len(steps) > 1 and is_flat(curve):
        return f"{number(float(values[-1]))} at every step"
    ends = (0, -1) if len(steps) > 1 else (0,)
    return ", ".join(f"{number(float(values[i]))} at step {number(round(steps[i]))}" for i in ends)


def curves_of(trend: Trend, logs: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Curves of a trend by label, short enough to draw."""
    curves = {}
    for key, label in trend.metrics.items():
        points = [(entry["step"], entry[key]) for entry in logs if np.isfinite(entry.get(key, np.nan))]
        if points:
            steps, values = np.array(points, np.float64).T
            width = -(-len(points) // POINTS)
            windows = [slice(i, i + width) for i in range(0, len(points), width)]
            rows = [(steps[w].mean(), values[w].mean(), values[w].min(), values[w].max()) for w in windows]
            curves[label] = Curve(*np.array(rows).T)
    return curves


def _chart(trend: Trend, logs: Sequence[Mapping[str, Any]], findings: Sequence[Finding]) -> Chart | None:
    curves = curves_of(trend, logs)
    main, label = next(iter(trend.metrics.items()))
    if label not in curves or (trend.name == "nonfinite" and not curves[label].highest.any()):
        return None
    metric = main.removeprefix(PREFIX)
    band = HEALTHY.get(metric, (None, None))
    alarms = sorted(finding.step for finding in findings if finding.key.removeprefix(PREFIX) == metric)
    values = curves[label].means
    says = f"{in_short(curves[label])}.{healthy(band)}{_alarms(alarms)}"
    return Chart(
        trend.name,
        trend.title,
        f"{trend.title} over steps, between {number(values.min())} and {number(values.max())}: {says}",
        partial(draw_curves, curves=curves, band=band, alarms=alarms, log=trend.log),
        ("step", *curves),
        rows_of(curves),
        says,
        says if all(map(is_flat, curves.values())) else "",
    )


def healthy(band: Band) -> str:
    low, high = band
    if low is None and high is None:
        return ""
    if low is None or high is None:
        return f" Healthy: {'0' if high == 0 else f'below {number(high)}' if low is None else f'above {number(low)}'}."
    return f" Healthy: {number(low)} to {number(high)}."


def _alarms(steps: list[int]) -> str:
    return f" Alarm at step {' and '.join(map(str, steps))}." if steps else ""


def rows_of(curves: Mapping[str, Curve]) -> list[tuple[Any, ...]]:
    """Values by step. Curves of the same run may have been logged at different steps."""
    values = [dict(zip(curve.steps, curve.means, strict=True)) for curve in curves.values()]
    steps = sorted(set().union(*values))
    return [(round(float(step), 1), *(of_step.get(step) for of_step in values)) for step in steps]


def draw_curves(
    axes: Axes,
    colors: Colors,
    *,
    curves: Mapping[str, Curve],
    band: Band,
    alarms: list[int],
    log: bool,
    roles: Sequence[str] = ROLES,
    versus: bool = False,
):
    """Curves, of which the first is on top of its parts; those of two runs are equals."""
    log = log and all(curve.lowest.min() > 0 for curve in curves.values())
    if log:
        axes.set_yscale("log")
    for i, (role, (label, curve)) in enumerate(zip(roles, curves.items(), strict=False)):
        axes.fill_between(curve.steps, curve.lowest, curve.highest, color=colors[role], alpha=0.2, linewidth=0)
        named = label if versus or len(curves) > 1 else None
        draw_line(axes, curve.steps, curve.means, colors[role], named, under=i > 0 and not versus)
    axes.set_ylim(*_limits(curves, band, log))
    if band != (None, None) and band[1] != 0:
        draw_band(axes, colors, band)
    for i, step in enumerate(alarms):
        axes.axvline(step, color=colors["alarm"], linewidth=1.4, linestyle="--", label="alarm" if i == 0 else None)
    label_steps(axes)


def _limits(curves: Mapping[str, Curve], band: Band, log: bool) -> tuple[float, float]:
    """All values, and the ends of the healthy band."""
    edges = [edge for edge in band if edge is not None and (edge > 0 or not log)]
    low = min([*edges, *(curve.lowest.min() for curve in curves.values())])
    high = max([*edges, *(curve.highest.max() for curve in curves.values())])
    if log:
        return low / 1.6, high * 1.6
    room = 0.07 * (high - low) or 0.1 * abs(high) or 1.0
    return (0.0 if 0 <= low < 0.6 * high else low - room), high + room


def _fan(trend: Trend, logs: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Percentiles, one within another."""
    curves = curves_of(trend, logs)
    if len(curves) < len(PERCENTILES) or len({len(curve.steps) for curve in curves.values()}) > 1:
        return None
    low, high = (number(float(curves[label].means[-1])) for label in ("p1", "p99"))
    ends = f"at the last step, 1 percent of tokens are below {low} and 1 percent above {high}"
    return Chart(
        trend.name,
        trend.title,
        f"Percentiles of the log-ratio over steps; {ends}.",
        partial(_draw_fan, curves=curves),
        ("step", *curves),
        rows_of(curves),
        f"{ends.capitalize()}.",
    )


def _draw_fan(axes: Axes, colors: Colors, *, curves: Mapping[str, Curve]):
    steps, median, *_ = curves["p50"]
    for (low, high), alpha in zip(((1, 99), (5, 95), (25, 75)), (0.18, 0.25, 0.35), strict=True):
        ends, label = (curves[f"p{low}"].means, curves[f"p{high}"].means), f"{low} to {high} %"
        axes.fill_between(steps, *ends, color=colors["line"], alpha=alpha, lw=0, label=label)
    draw_line(axes, steps, median, colors["line"])
    axes.set_ylabel("d, nats")
    label_steps(axes)
