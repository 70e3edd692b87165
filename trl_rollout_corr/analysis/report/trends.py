"""Trends over the steps of a run."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from ...metrics import PERCENTILES, PREFIX
from ...rules import HEALTHY, Finding
from .drawing import Chart, Colors, number, whole_steps


class Trend(NamedTuple):
    """What one chart of a trend shows: metrics with their labels, of which the first has the healthy band."""

    name: str
    title: str
    metrics: dict[str, str]
    log: bool = False


TRENDS = (
    Trend(
        "k3-kl",
        "KL divergence, k3",
        {f"{PREFIX}k3_kl": "all", f"{PREFIX}engine_k3_kl": "engine", f"{PREFIX}staleness_k3_kl": "updates since"},
        log=True,
    ),
    Trend("kl", "KL divergence, mean of -d", {f"{PREFIX}kl": "kl"}),
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
_ROLES = ("line", "second", "third")

Curve = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # step, mean, lowest, highest


def trends(logs: Sequence[Mapping[str, Any]], findings: Sequence[Finding]) -> list[Chart]:
    """
    Charts of what was logged.

    Args:
        logs (`Sequence[Mapping]`):
            Log entries, each with a `step`.
        findings (`Sequence[Finding]`):
            What was found, to mark where.

    Returns:
        `list[Chart]`: one per trend that was logged.
    """
    charts = [chart for trend in TRENDS if (chart := _chart(trend, logs, findings)) is not None]
    fan = _fan(logs)
    return charts[:2] + fan + charts[2:] if fan else charts


def curve(logs: Sequence[Mapping[str, Any]], key: str) -> Curve | None:
    """One metric over steps: mean, lowest and highest value of windows, short enough to draw."""
    points = [(entry["step"], entry[key]) for entry in logs if np.isfinite(entry.get(key, np.nan))]
    if not points:
        return None
    steps, values = np.array(points, np.float64).T
    width = -(-len(points) // POINTS)
    windows = [slice(i, i + width) for i in range(0, len(points), width)]
    summary = [(steps[w].mean(), values[w].mean(), values[w].min(), values[w].max()) for w in windows]
    return tuple(np.array(summary).T)


def _chart(trend: Trend, logs: Sequence[Mapping[str, Any]], findings: Sequence[Finding]) -> Chart | None:
    curves = {label: c for key, label in trend.metrics.items() if (c := curve(logs, key)) is not None}
    main = next(iter(trend.metrics))
    if next(iter(trend.metrics.values())) not in curves or (trend.name == "nonfinite" and not _any(curves)):
        return None
    band = HEALTHY.get(main.removeprefix(PREFIX), (None, None))
    alarms = sorted(f.step for f in findings if f.key.removeprefix(PREFIX) == main.removeprefix(PREFIX))
    steps, values = next(iter(curves.values()))[:2]
    ends = [f"{number(values[i])} at step {number(round(steps[i]))}" for i in ((0, -1) if len(steps) > 1 else (0,))]
    says = f"{', '.join(ends)}.{_healthy(band)}{_alarms(alarms)}"
    return Chart(
        trend.name,
        trend.title,
        f"{trend.title} over steps, between {number(values.min())} and {number(values.max())}: {says}",
        partial(_draw, curves=curves, band=band, alarms=alarms, log=trend.log),
        ("step", *curves),
        _rows(curves),
        says,
    )


def _any(curves: Mapping[str, Curve]) -> bool:
    return any(highest.max() > 0 for _, _, _, highest in curves.values())


def _healthy(band: tuple[float | None, float | None]) -> str:
    low, high = band
    if low is None and high is None:
        return ""
    if low is None or high is None:
        return f" Healthy: {'0' if high == 0 else f'below {number(high)}' if low is None else f'above {number(low)}'}."
    return f" Healthy: {number(low)} to {number(high)}."


def _alarms(steps: list[int]) -> str:
    return f" Alarm at step {' and '.join(map(str, steps))}." if steps else ""


def _rows(curves: Mapping[str, Curve]) -> list[tuple[float, ...]]:
    """Values by step. Curves of the same run may have been logged at different steps."""
    values = [dict(zip(steps, means, strict=True)) for steps, means, _, _ in curves.values()]
    steps = sorted(set().union(*values))
    return [(round(float(step), 1), *(of_step.get(step) for of_step in values)) for step in steps]


def _draw(axes: Axes, colors: Colors, *, curves, band, alarms, log):
    positive = all(lowest.min() > 0 for _, _, lowest, _ in curves.values())
    if log and positive:
        axes.set_yscale("log")
    for role, (label, (steps, means, lowest, highest)) in zip(_ROLES, curves.items(), strict=False):
        axes.fill_between(steps, lowest, highest, color=colors[role], alpha=0.2, linewidth=0)
        marker = "o" if len(steps) <= 12 else None
        axes.plot(
            steps, means, color=colors[role], marker=marker, markersize=4, label=label if len(curves) > 1 else None
        )
    axes.set_ylim(*_limits(curves, band, log and positive))
    low, high = axes.get_ylim()
    lower, upper = band
    if band != (None, None) and upper != 0:
        axes.axhspan(
            low if lower is None else lower, high if upper is None else upper, color=colors["band"], alpha=0.13, lw=0
        )
        for edge in band:
            if edge is not None:
                axes.axhline(edge, color=colors["band"], linewidth=1.0, alpha=0.8)
    for i, step in enumerate(alarms):
        axes.axvline(step, color=colors["alarm"], linewidth=1.4, linestyle="--", label="alarm" if i == 0 else None)
    whole_steps(axes)


def _limits(curves: Mapping[str, Curve], band: tuple[float | None, float | None], log: bool) -> tuple[float, float]:
    """All values, and the ends of the healthy band."""
    values = np.concatenate([np.concatenate([lowest, highest]) for _, _, lowest, highest in curves.values()])
    low, high = values.min(), values.max()
    edges = [edge for edge in band if edge is not None and (edge > 0 or not log)]
    low, high = min([low, *edges]), max([high, *edges])
    if log:
        return low / 1.6, high * 1.6
    room = 0.07 * (high - low) or 0.1 * abs(high) or 1.0
    return (0.0 if 0 <= low < 0.6 * high else low - room), high + room


def _fan(logs: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Percentiles of the log-ratio, from the logs."""
    curves = {p: c for p in PERCENTILES if (c := curve(logs, f"{PREFIX}log_ratio_p{p}")) is not None}
    if len(curves) < len(PERCENTILES) or len({len(c[0]) for c in curves.values()}) > 1:
        return []
    last = {p: number(float(c[1][-1])) for p, c in curves.items()}
    ends = f"at the last step, 1 percent of tokens are below {last[1]} and 1 percent above {last[99]}"
    steps = curves[50][0]
    rows = [(round(float(step), 1), *(float(curves[p][1][i]) for p in PERCENTILES)) for i, step in enumerate(steps)]
    return [
        Chart(
            "percentiles",
            "Percentiles of d",
            f"Percentiles of the log-ratio over steps; {ends}.",
            partial(_draw_fan, curves=curves),
            ("step", *(f"p{p}" for p in PERCENTILES)),
            rows,
            f"{ends.capitalize()}.",
        )
    ]


def _draw_fan(axes: Axes, colors: Colors, *, curves: Mapping[int, Curve]):
    steps = curves[50][0]
    for (low, high), alpha in zip(((1, 99), (5, 95), (25, 75)), (0.18, 0.25, 0.35), strict=True):
        label = f"{low} to {high} %"
        axes.fill_between(steps, curves[low][1], curves[high][1], color=colors["line"], alpha=alpha, lw=0, label=label)
    axes.plot(steps, curves[50][1], color=colors["line"], marker="o" if len(steps) <= 12 else None, markersize=4)
    axes.set_ylabel("d, nats")
    whole_steps(axes)
