"""Sections about the log of a run, or of two runs against each other: metrics over optimizer steps, and who is rejected."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from ...health.bands import HEALTHY, in_words
from ...messages import PREFIX, number, percent
from .facts import Facts, is_healthy
from .page import Axis, Card, Chart, Section, Series, ends_of


class Trend(NamedTuple):
    """
    A chart of metrics: its title, and labels by metric. The first metric has the healthy band, unless a note says where to
    look instead; the others are its parts.
    """

    title: str
    metrics: Mapping[str, str]
    log: bool = False
    note: str = ""


_START = "start of later turns"
# Without the prefix of their keys
TRENDS = {
    "k3-kl": Trend(
        "Gap (k3_kl), nats per token",
        {"k3_kl": "all", "engine_k3_kl": "engine", "update_k3_kl": "updates since"},
        log=True,
    ),
    "rejected": Trend("Share of tokens rejected", {"rollout_rs_masked_fraction": "share"}),
    "sample-size": Trend("Effective sample size of the importance weights", {"rollout_is_eff_sample_size": "share"}),
    "effective-lr": Trend("Effective learning rate", {"effective_lr": "effective_lr"}),
    "reward": Trend("Reward", {"reward": "reward"}),
    "kl": Trend(
        "KL divergence, mean of -d",
        {"kl": "kl"},
        note="Another estimate of the gap, with more noise, which may be negative. The gap itself has the healthy band.",
    ),
    "kl-by-advantage": Trend(
        "KL divergence by the sign of the advantage",
        {"kl_advantage_positive": "positive", "kl_advantage_negative": "negative"},
    ),
    "k3-kl-by-turn": Trend(
        "Gap by turn (k3_kl), nats per token",
        {"turn_first/k3_kl": "first", "turn_last/k3_kl": "last", "turn_start/k3_kl": _START},
        log=True,
    ),
    "percentiles": Trend(
        "Percentiles of d", {"log_ratio_p50": "median", "log_ratio_p1": "1 %", "log_ratio_p99": "99 %"}
    ),
    "mean-weight": Trend("Mean importance weight", {"rollout_is_mean": "mean"}),
    "nonfinite": Trend("Share of tokens that are not finite", {"nonfinite_fraction": "share"}),
    "staleness": Trend("Age of the data, in optimizer steps", {"staleness_mean": "mean", "staleness_max": "largest"}),
}
OVERVIEW = ("k3-kl", "rejected", "sample-size", "effective-lr", "reward")
_LAST = 10  # windows of which a main number is the mean: as many, or a tenth of the run if that is more
POINTS = 250  # per curve; more cannot be told apart
_NOISE = 1e-6  # nats per token: a gap below is rounding, and an axis that shows it would squeeze the rest

# Groups of tokens whose shares of rejected and down-weighted tokens are logged
_GROUPS = ("advantage_positive", "advantage_negative")
_MEASURES = {"rejected": "rejected", "downweighted": "down-weighted"}

Alarms = Sequence[tuple[int, str]]  # steps, and the numbers of findings
COLORS = ("line", "second", "third")


def trends(
    logs: Mapping[str, pd.DataFrame],
    names: Sequence[str],
    alarms: Mapping[str, Alarms],
    colors: Sequence[str] = COLORS,
) -> list[Chart]:
    """
    Charts of the metrics that were logged, over optimizer steps. Of one run every metric of a chart is drawn, of two the first
    of each. `alarms` are in order of steps, by key of the metric; `""` for all metrics.
    """
    charts = []
    for name in names:
        curves = _curves(TRENDS[name], logs)
        if curves is not None and not (name == "nonfinite" and not curves.any(axis=None)):
            metric = next(iter(TRENDS[name].metrics))
            of_chart = alarms.get("", ()) or alarms.get(_key(metric), ())
            charts.append(_trend(name, metric, curves, of_chart, logs, colors))
    return charts


def _trend(
    name: str,
    metric: str,
    curves: pd.DataFrame,
    alarms: Alarms,
    logs: Mapping[str, pd.DataFrame],
    colors: Sequence[str],
) -> Chart:
    means, trend = curves["mean"], TRENDS[name]
    log = trend.log and bool(curves.min(axis=None) > 0)
    ends = "; ".join(f"{label + ' ' if len(means.columns) > 1 else ''}{ends_of(means[label])}" for label in means)
    banded = metric in HEALTHY and not trend.note
    healthy = f" Healthy: {in_words(metric)}." if banded else f" {trend.note}".rstrip()
    labels = [*(logs if len(logs) > 1 else trend.metrics.values())]
    healthy += "".join(f" {label.capitalize()}: the same curve." for label in curves.attrs["same"])
    color = dict(zip(labels, colors, strict=False))
    shown = curves.clip(lower=min(_NOISE, curves.max(axis=None))) if log else curves
    series = []
    for i, label in enumerate(means):
        mean, low, high = (shown[kind][label] for kind in ("mean", "min", "max"))
        if (high > low).any():
            series.append(Series("", means.index, high, "area", color[label], low))
        mark = "dashed" if i and len(logs) == 1 else "line"  # a part of the first curve, so that both are seen
        series.append(Series(label if len(means.columns) > 1 else "", means.index, mean, mark, color[label]))
    steps = [step for of_run in logs.values() for step in of_run.index]
    room = (max(steps) - min(steps)) / 50 or 0.5
    return Chart(
        name,
        trend.title,
        f"{ends}.{healthy}",
        Axis("optimizer step", whole=True, limits=(min(steps) - room, max(steps) + room)),  # the same in every chart
        Axis(log=log),
        series,
        means.set_axis(means.index.to_numpy().round(1)).rename_axis("step").reset_index(),
        HEALTHY[metric] if banded else (None, None),
        alarms,
    )


def _curves(trend: Trend, logs: Mapping[str, pd.DataFrame]) -> pd.DataFrame | None:
    """Columns `mean`, `min` and `max` by curve, over at most `POINTS` windows of steps; `None` without a value."""
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
    first, *others = values.columns
    same = [label for label in others if len(logs) == 1 and np.allclose(values[label], values[first], equal_nan=True)]
    values = values.drop(columns=same)
    window = np.arange(len(values)) // -(-len(values) // POINTS)
    steps = pd.Series(values.index, dtype=float).groupby(window).mean()
    kinds = {kind: values.groupby(window).agg(kind) for kind in ("mean", "min", "max")}
    curves = pd.concat(kinds, axis=1).set_axis(steps)
    curves.attrs["same"] = same  # parts that are not drawn, because they are equal to the first curve
    return curves


def _key(metric: str) -> str:
    return metric if metric == "reward" else PREFIX + metric


def main_numbers(log: pd.DataFrame) -> list[Card]:
    """The four main numbers of a run, with their first values and healthy bands; none without a log."""
    name = "sample-size" if _key("rollout_is_eff_sample_size") in log else "effective-lr"
    return [] if log.empty else [_main_number(TRENDS[key], log) for key in ("k3-kl", name, "rejected", "reward")]


def _main_number(trend: Trend, log: pd.DataFrame) -> Card:
    metric = next(iter(trend.metrics))
    values = log.get(_key(metric), pd.Series(dtype=float)).replace([np.inf, -np.inf], np.nan).dropna()
    if values.empty:
        return Card(f"{trend.title}: -", "not logged")
    n = max(min(_LAST, len(values) // 2), len(values) // _LAST, 1)
    first, last = float(values[:n].mean()), float(values[-n:].mean())
    notes = [f"at first {number(first)}"] if len(values) > 1 else []
    level = ""
    if metric in HEALTHY:
        notes.append(f"healthy: {in_words(metric)}")
        level = "healthy" if is_healthy(metric, last) else "warning"
    return Card(f"{trend.title}: {number(last)}", ", ".join(notes), level)


def overview(runs: Sequence[Facts]) -> Section:
    """The main charts, of one run or two."""
    alarms = sorted((alarm for facts in runs for alarm in facts.alarms), key=lambda alarm: alarm[:2])
    where = ", ".join(f"{name} ({finding.bound}) at step {step}" for step, name, finding in alarms)
    text = "No alarm was raised."
    if alarms:
        text = f"Dashed red lines mark the first alarms. They have the numbers of the findings: {where}."
    logs = {facts.name: facts.run.log for facts in runs}
    charts = trends(logs, OVERVIEW, {"": [(step, name) for step, name, _ in alarms]}, _colors(runs))
    return Section("overview", "What happened", text if charts else "", charts=charts)


def _colors(runs: Sequence[Facts]) -> Sequence[str]:
    """Colours of curves: a run without correction has the second one, here and in the picture of any other run beside it."""
    corrects = [facts.run.config is None or facts.run.config.settings.corrects for facts in runs]
    swap = not corrects[0] and corrects.count(False) < 2
    return ("second", "line", "third") if swap else COLORS


def more_trends(facts: Facts) -> Section | None:
    """Charts of the other metrics."""
    alarms: dict[str, list[tuple[int, str]]] = {}
    for step, name, finding in facts.alarms:
        alarms.setdefault(finding.key, []).append((step, name))
    charts = trends({"": facts.run.log}, [name for name in TRENDS if name not in OVERVIEW], alarms, _colors([facts]))
    text = "Healthy values are shaded green. A dashed red line marks the first alarm of a finding, and has its number."
    if len(facts.run.log) > POINTS:
        text += (
            " Lines are means over windows of steps, and the pale bands reach from the lowest to the highest value."
        )
    return Section("trends", "More trends", text, charts=charts) if charts else None


# Who is rejected ----------------------------------------------------------------------------------------------------------


def rejected(facts: Facts) -> Section | None:
    """The shares of tokens that are rejected, by criterion and by group of tokens."""
    log, config = facts.run.log, facts.run.config
    means = log.replace([np.inf, -np.inf], np.nan).mean()
    shares = (
        {c.name: means.get(f"{PREFIX}rollout_rs_{c.name}_masked_fraction", math.nan) for c in config.settings.criteria}
        if config
        else {}
    )
    sentences = [
        f"{percent(float(share))} of the tokens (`{name}`)" for name, share in shares.items() if math.isfinite(share)
    ]
    parts = [f"Rejected by criterion: {', '.join(sentences)}."] if sentences else []
    elsewhere, rejected = (float(means.get(f"{PREFIX}{name}/reward_mean", math.nan)) for name in ("kept", "rejected"))
    if math.isfinite(elsewhere + rejected):
        where = f"{number(rejected)} where a completion is rejected as a whole, and {number(elsewhere)} elsewhere"
        parts.append(f"The mean reward is {where}.")
    groups = _by_group(means)
    if not groups.empty:
        parts += [
            "The table has means of the logged shares. Training learns least from the group with the largest share."
        ]
        parts += [
            "Down-weighted is the mean of max(0, 1 - factor on the gradient) over all tokens of the group, where a rejected "
            "token counts as 0."
        ]
    table = None if groups.empty else groups
    return Section("rejected", "Who is rejected", " ".join(parts), table=table) if parts else None


def _by_group(means: pd.Series) -> pd.DataFrame:
    """Shares of tokens that are rejected and down-weighted, a row for each group of tokens."""
    shares: dict[str, dict[str, float]] = {}
    for key, mean in means.dropna().items():
        measure, _, group = str(key).removeprefix(PREFIX).partition("/")
        if str(key).startswith(PREFIX) and measure in _MEASURES and group in _GROUPS:
            shares.setdefault(group.replace("_", " "), {})[_MEASURES[measure]] = mean
    table = pd.DataFrame.from_dict(shares, orient="index", columns=[*_MEASURES.values()])
    return table.rename_axis("tokens of").reset_index()
