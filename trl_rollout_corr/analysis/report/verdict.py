"""The answer in a banner: how the run is doing, and four numbers."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...health.examine import Finding
from ...health.rules import HEALTHY, in_words
from ...messages import PREFIX, number, percent, steps


class Tile(NamedTuple):
    """
    A number of the banner.

    Args:
        label (`str`):
            What it is.
        value (`str`):
            Its mean over the last windows, or `"-"`.
        note (`str`):
            Where it came from, and where it is healthy.
        state (`str`):
            `"good"` or `"bad"` by its healthy band, or empty.
    """

    label: str
    value: str
    note: str
    state: str


class Verdict(NamedTuple):
    """
    How a run is doing.

    Args:
        level (`str`):
            `"critical"`, `"warning"`, `"healthy"`, or `"unknown"` without metrics.
        headline (`str`):
            The answer in a few words.
        detail (`str`):
            What it is based on.
        tiles (`list[Tile]`):
            Four numbers.
    """

    level: str
    headline: str
    detail: str
    tiles: list[Tile]


_HEADLINES = {
    "critical": "Act now",
    "warning": "Look into it",
    "healthy": "Healthy",
    "unknown": "No metrics",
}
_LAST, _PART = 10, 10  # windows that a number is the mean of: that many, or the tenth part of the run if it is more


def judge(logs: Sequence[Mapping[str, Any]], findings: Sequence[Finding], windows: str) -> Verdict:
    """
    Sum up a run.

    Args:
        logs (`Sequence[Mapping]`):
            Log entries in order of steps.
        findings (`Sequence[Finding]`):
            What is unhealthy, the most serious first.
        windows (`str`):
            The number of log entries, in words.

    Returns:
        [`Verdict`]: the banner.
    """
    if not logs:
        return Verdict("unknown", _HEADLINES["unknown"], "There are no metrics to look at.", [])
    outside = left_bands(logs)
    if findings:
        first, more = findings[0], len(findings) - 1
        level, detail = first.severity, f"{first.seen} Seen in {steps(first.step, first.last_step)}."
        detail += f" {more} other finding{'s' if more > 1 else ''} below." if more else ""
    elif outside:
        level, detail = "warning", f"No alarm in {windows}, but the last ones were not healthy. {outside}"
    else:
        level, detail = "healthy", f"Nothing unhealthy was found in {windows}."
    return Verdict(level, _HEADLINES[level], detail, _tiles(logs))


def left_bands(logs: Sequence[Mapping[str, Any]]) -> str:
    """The rules wait for more than one unhealthy window, so that the last ones may have left a band without a finding."""
    last = logs[-1] if logs else {}
    names = [
        f"`{name}` ({number(value)})"
        for name in HEALTHY
        if (value := last.get(PREFIX + name)) is not None and _state(name, value) == "bad"
    ]
    return f"At the last step, these were outside their healthy bands: {', '.join(names)}." if names else ""


def _tiles(logs: Sequence[Mapping[str, Any]]) -> list[Tile]:
    weighted = any(f"{PREFIX}rollout_is_eff_sample_size" in entry for entry in logs)
    second = (
        _tile("Effective sample size", f"{PREFIX}rollout_is_eff_sample_size", logs, percent)
        if weighted
        else _tile("Effective learning rate", f"{PREFIX}effective_lr", logs)
    )
    return [
        _tile("Gap (k3_kl, nats per token)", f"{PREFIX}k3_kl", logs),
        second,
        _tile("Tokens rejected", f"{PREFIX}rollout_rs_masked_fraction", logs, percent, "no criterion rejects"),
        _tile("Reward", "reward", logs),
    ]


def _tile(
    label: str, key: str, logs: Sequence[Mapping[str, Any]], write: Any = number, nothing: str = "not logged"
) -> Tile:
    values = [float(entry[key]) for entry in logs if math.isfinite(entry.get(key, math.nan))]
    if not values:
        return Tile(label, "-", nothing, "")
    n = max(min(_LAST, len(values) // 2), len(values) // _PART, 1)
    name = key.removeprefix(PREFIX)
    first, last = (sum(part) / n for part in (values[:n], values[-n:]))
    notes = [f"at first {write(first)}"] if len(values) > 1 else []
    band = in_words(name)
    if band and write is percent:
        band = re.sub(r"[\d.]+", lambda share: percent(float(share[0])), band)
    notes += [f"healthy: {band}"] if band else []
    return Tile(label, write(last), ", ".join(notes), _state(name, last))


def _state(name: str, value: float) -> str:
    low, high = HEALTHY.get(name, (None, None))
    if low is None and high is None:
        return ""
    return "bad" if (low is not None and value < low) or (high is not None and value > high) else "good"
