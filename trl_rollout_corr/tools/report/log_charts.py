"""Sections about the log of one or two runs: metrics over optimizer steps, and rejected tokens."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from ...messages import PREFIX
from ..bands import HEALTHY, band_in_words
from ..formats import number, percent
from ..monitor.stock import CLIPPED, GAP, LENGTH, RATIO
from .facts import Facts, finite_values, is_healthy
from .page import Card, Chart, Curve, Section


class Trend(NamedTuple):
    """
    A chart of metrics: its title, and labels by metric. The healthy band belongs to the first metric; the others are
    its parts.
    """

    title: str
    metrics: Mapping[str, str]
    log: bool = False


# Metrics without the prefix of their keys
OVERVIEW = {
    "k3-kl": Trend(
        "Gap (k3_kl), nats per token",
        {"k3_kl": "all", "engine_k3_kl": "engine", "update_k3_kl": "updates since"},
        log=True,
    ),
    "pushes": Trend(
        "Gap after a push, of the same tokens (k3), nats per token",
        {"fresh_k3_kl": "equal weights", "age_k3_kl": "old weights"},
        log=True,
    ),
    "rejected": Trend("Share of tokens rejected", {"rollout_rs_masked_fraction": "share"}),
    "sample-size": Trend("Effective sample size of the importance weights", {"rollout_is_eff_sample_size": "share"}),
    "effective-lr": Trend("Effective learning rate", {"effective_lr": "effective_lr"}),
    "reward": Trend("Reward", {"reward": "reward"}),
}
# Metrics that TRL's own trainer logs without this package
OF_TRL = {
    "trl-ratio": Trend("TRL's mean importance ratio", {RATIO: "mean"}),
    "trl-gap": Trend("Difference of log-probabilities in TRL, nats per token", {GAP: "mean"}),
    "length": Trend("Length of completions, tokens", {LENGTH: "mean"}),
    "clipped": Trend("Share of completions that are cut", {CLIPPED: "share"}),
    "trl-clip": Trend("Share of tokens that PPO clips", {"clip_ratio/region_mean": "share"}),
}
MORE = {
    "kl-rewarded": Trend("KL divergence over tokens with a positive advantage", {"kl_advantage_positive": "positive"}),
    "k3-kl-by-turn": Trend(
        "Gap by turn (k3_kl), nats per token",
        {"turn_first/k3_kl": "first", "turn_last/k3_kl": "last", "turn_start/k3_kl": "start of later turns"},
        log=True,
    ),
    "mean-weight": Trend("Mean importance weight", {"rollout_is_mean": "mean"}),
    **OF_TRL,
    "staleness": Trend("Age of the data, in optimizer steps", {"staleness_mean": "mean", "staleness_max": "largest"}),
}
_OF_TRL = {"reward", RATIO, GAP, LENGTH, CLIPPED, "clip_ratio/region_mean"}
_LAST = 10  # a main number is the mean of this many windows, or of a tenth of the run if that is more
POINTS = 250  # per curve; a reader cannot tell more apart
_NOISE = 1e-6  # nats per token: a smaller gap is rounding, and showing it would squeeze the rest of the axis
_HIDDEN = 0.5  # a curve that shares more than this part of its points with another is hard to see below it
COLORS = ("line", "second", "third")


def draw_trends(
    trends: Mapping[str, Trend],
    logs: Mapping[str, pd.DataFrame],
    colors: Sequence[str] = COLORS,
    alarms: Sequence[tuple[int, str]] = (),
) -> list[Chart]:
    """
    Charts of the logged metrics over optimizer steps. One run draws every metric of a chart, two runs only the first.
    """
    charts = (_chart(name, trend, logs, colors, alarms) for name, trend in trends.items())
    return [chart for chart in charts if chart is not None]


def _chart(
    name: str, trend: Trend, logs: Mapping[str, pd.DataFrame], colors: Sequence[str], alarms: Sequence[tuple[int, str]]
) -> Chart | None:
    values = _logged(trend, logs)
    if values.empty:
        return None
    first, *others = values.columns
    same = [label for label in others if len(logs) == 1 and np.allclose(values[label], values[first], equal_nan=True)]
    windows = _in_windows(values.drop(columns=same))  # a curve that equals the first one would hide it
    means = windows.xs("mean", axis=1, level=1)
    metric = next(iter(trend.metrics))
    log = trend.log and bool(windows.min(axis=None) > 0)
    names = {label: f"{label} " if means.shape[1] > 1 else "" for label in means}
    note = f"{'; '.join(f'{names[label]}{_ends(means[label])}' for label in means)}."
    note += f" Healthy: {band_in_words(metric)}." if metric in HEALTHY else ""
    note += "".join(f" {label.capitalize()}: the same curve." for label in same)
    shown = windows.clip(lower=min(_NOISE, windows.max(axis=None))) if log else windows
    color = dict(zip(logs if len(logs) > 1 else trend.metrics.values(), colors, strict=False))
    curves = [
        Curve(names[label].strip(), shown[label], color[label], dashed=i > 0 and (len(logs) == 1 or _covers(means)))
        for i, label in enumerate(means)
    ]
    steps = [step for of_run in logs.values() for step in of_run.index]
    room = (max(steps) - min(steps)) / 50 or 0.5
    table = means.set_axis(means.index.to_numpy().round(1)).rename_axis("step").reset_index()
    ends = (min(steps) - room, max(steps) + room)  # the same ends in every chart
    return Chart(name, trend.title, note, ends, log, curves, table, HEALTHY.get(metric, (None, None)), alarms)


def _covers(means: pd.DataFrame) -> bool:
    """True if the second of two runs would hide the first. It is dashed then."""
    both = means.dropna()
    return bool(len(both)) and bool(np.isclose(both.iloc[:, 0], both.iloc[:, -1], rtol=1e-3).mean() > _HIDDEN)


def _logged(trend: Trend, logs: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """A column for each curve with values, and optimizer steps as index."""
    if len(logs) == 1:
        columns = [(label, metric, log) for log in logs.values() for metric, label in trend.metrics.items()]
    else:
        columns = [(name, next(iter(trend.metrics)), log) for name, log in logs.items()]
    logged = {label: log[_key(metric)] for label, metric, log in columns if _key(metric) in log}
    values = pd.DataFrame(logged).sort_index().replace([np.inf, -np.inf], np.nan)
    return values.dropna(how="all").dropna(how="all", axis=1)


def _in_windows(values: pd.DataFrame) -> pd.DataFrame:
    """Columns `mean`, `min` and `max` of each curve, over at most `POINTS` windows of steps."""
    window = np.arange(len(values)) // -(-len(values) // POINTS)
    steps = pd.Series(values.index, dtype=float).groupby(window).mean()
    return values.groupby(window).agg(["mean", "min", "max"]).set_axis(steps)


def _ends(values: pd.Series) -> str:
    """The first and the last value of a curve, with their steps."""
    values = values.dropna()
    ends = (f"{number(float(values.iloc[i]))} at step {number(round(values.index[i]))}" for i in (0, -1))
    return ", ".join(dict.fromkeys(ends))


def _key(metric: str) -> str:
    return metric if metric in _OF_TRL else PREFIX + metric


def main_numbers(log: pd.DataFrame) -> list[Card]:
    """The four main numbers of a run, with their first values and healthy bands; none without a log."""
    if RATIO in log and _key("k3_kl") not in log:  # a log of TRL's own trainer
        trends = (OF_TRL["trl-ratio"], OF_TRL["trl-gap"], OF_TRL["length"], OVERVIEW["reward"])
        return [_main_number(trend, log) for trend in trends]
    name = "sample-size" if _key("rollout_is_eff_sample_size") in log else "effective-lr"
    return [] if log.empty else [_main_number(OVERVIEW[key], log) for key in ("k3-kl", name, "rejected", "reward")]


def _main_number(trend: Trend, log: pd.DataFrame) -> Card:
    metric = next(iter(trend.metrics))
    values = finite_values(log, _key(metric))
    if values.empty:
        return Card(f"{trend.title}: -", "not logged")
    n = max(min(_LAST, len(values) // 2), len(values) // _LAST, 1)
    first, last = float(values[:n].mean()), float(values[-n:].mean())
    span, of_first = (
        (f"mean of the last {n} windows", f"of the first {n}") if n > 1 else ("last window", "first window")
    )
    notes = [f"{span}; {of_first}: {number(first)}"] if len(values) > 1 else []
    level = ""
    if metric in HEALTHY:
        notes.append(f"healthy: {band_in_words(metric)}")
        level = "healthy" if is_healthy(metric, last) else "warning"
    return Card(f"{trend.title}: {number(last)}", ", ".join(notes), level)


def overview(runs: Sequence[Facts]) -> Section:
    """Section with the main charts of one or two runs."""
    alarms = sorted((alarm for facts in runs for alarm in facts.numbered_alarms), key=lambda alarm: alarm[:2])
    where = ", ".join(f"{name} ({finding.bound}) at step {step}" for step, name, finding in alarms)
    text = "Healthy values are shaded green. "
    text += (
        f"Dashed red lines mark the first alarms. Their numbers are the numbers of the findings: {where}."
        if alarms
        else "No alarm was raised."
    )
    if any(len(facts.run.log) > POINTS for facts in runs):
        text += (
            " Lines are means over windows of steps, and the pale bands reach from the lowest to the highest value."
        )
    logs = {facts.name: facts.run.log for facts in runs}
    drawn = {**OVERVIEW, **OF_TRL} if all(facts.course for facts in runs) else OVERVIEW
    charts = draw_trends(drawn, logs, _colors(runs), [(step, name) for step, name, _ in alarms])
    return Section("overview", "What happened", text if charts else "", charts=charts)


def _colors(runs: Sequence[Facts]) -> Sequence[str]:
    """Colours of curves. A run without correction always gets the second one, whatever it is compared with."""
    corrects = [facts.run.settings is None or facts.run.settings.corrects for facts in runs]
    swap = not corrects[0] and corrects.count(False) < 2
    return ("second", "line", "third") if swap else COLORS


def more_trends(facts: Facts) -> Section | None:
    """Section with charts of the other metrics, if any."""
    charts = draw_trends({} if facts.course else MORE, {"": facts.run.log}, _colors([facts]))
    return Section("trends", "More trends", charts=charts) if charts else None


# Rejected tokens -----------------------------------------------------------------------------------------------------


def rejected(facts: Facts) -> Section | None:
    """Section with the shares of rejected and down-weighted tokens, by criterion and by sign of the advantage."""
    log, settings = facts.run.log, facts.run.settings
    means = log.replace([np.inf, -np.inf], np.nan).mean().dropna()
    criteria = settings.criteria if settings else ()
    words = {f"rollout_rs_{c.name}_masked_fraction": f"rejected by {c.name}" for c in criteria}
    for measure, done in (("rejected", "rejected"), ("downweighted", "down-weighted")):
        for sign in ("positive", "negative"):
            words[f"{measure}/advantage_{sign}"] = f"{done}, of those with a {sign} advantage"
    rows = [(text, percent(float(means[_key(key)]))) for key, text in words.items() if _key(key) in means]
    parts = []
    elsewhere, dropped = (float(means.get(_key(f"{name}/reward_mean"), math.nan)) for name in ("kept", "rejected"))
    if math.isfinite(elsewhere + dropped):
        where = f"{number(dropped)} where a completion is rejected as a whole, and {number(elsewhere)} elsewhere"
        parts.append(f"The mean reward is {where}.")
    if rows:
        parts.append(
            "The table shows means of the logged shares. Down-weighted is the mean of max(0, 1 - factor on the "
            "gradient), where a rejected token counts as 0."
        )
    table = pd.DataFrame(rows, columns=["tokens", "share"]) if rows else None
    return Section("rejected", "Who is rejected", " ".join(parts), table=table) if parts else None
