"""The state of a run in a word, and its four main numbers with their healthy bands."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from ...health.bands import HEALTHY
from ...health.rule import Alarm
from ...messages import PREFIX, number, percent, steps


class Band(NamedTuple):
    """Healthy values of a metric, from `low` to `high`; `None` for no bound."""

    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, key: str) -> "Band":
        """The healthy band of a metric, with or without prefix."""
        return cls(*HEALTHY.get(key.removeprefix(PREFIX), (None, None)))

    def in_words(self, write: Callable[[float], str] = number) -> str:
        """The band as text, such as "below 0.3"; empty without bounds."""
        if self.low is not None and self.high is not None:
            return f"{write(self.low)} to {write(self.high)}"
        if self.high is not None:
            return f"below {write(self.high)}" if self.high else "0"
        return f"above {write(self.low)}" if self.low is not None else ""

    def __contains__(self, value: object) -> bool:
        low, high = -np.inf if self.low is None else self.low, np.inf if self.high is None else self.high
        return isinstance(value, float) and low <= value <= high


class Tile(NamedTuple):
    """A number of the banner."""

    label: str
    value: str
    note: str  # where it began, and where it is healthy
    state: str = ""  # "good" or "bad"


class Status(NamedTuple):
    """The state of a run."""

    level: str  # "critical", "warning", "healthy", or "unknown" without metrics
    headline: str  # the same in words
    detail: str  # the reason
    outside: str = ""  # metrics that were outside their healthy band at the last step
    tiles: Sequence[Tile] = ()


_HEADLINES = {"critical": "Act now", "warning": "Look into it", "healthy": "Healthy"}
_LAST, _PART = 10, 10  # windows of which a tile has the mean: that many, or a tenth of the run if that is more


def judge(log: pd.DataFrame, findings: Sequence[Alarm], windows: str) -> Status:
    """
    Sum up a run.

    Args:
        log (`pd.DataFrame`):
            Metrics by step.
        findings (`Sequence[Alarm]`):
            Findings in them, the most serious first.
        windows (`str`):
            The number of logging windows, in words.

    Returns:
        [`Status`].
    """
    if log.empty:
        return Status("unknown", "No metrics", "There are no metrics to look at.")
    outside = _outside(log.iloc[-1])
    if findings:
        first, more = findings[0], len(findings) - 1
        level, detail = first.severity, f"{first.seen} Seen in {steps(first.step, first.last_step)}."
        detail += f" {more} other finding{'s' if more > 1 else ''} below." if more else ""
    elif outside:
        level, detail = "warning", f"No alarm in {windows}, but the last ones were not healthy. {outside}"
    else:
        level, detail = "healthy", f"Nothing unhealthy was found in {windows}."
    return Status(level, _HEADLINES[level], detail, outside, _tiles(log))


def _outside(last: pd.Series) -> str:
    """The rules wait for more than one unhealthy window, so that the last window may be unhealthy without a finding."""
    values = {name: float(last.get(PREFIX + name, np.nan)) for name in HEALTHY}
    names = [f"`{k}` ({number(v)})" for k, v in values.items() if not np.isnan(v) and v not in Band.of(k)]
    return f"At the last step, these were outside their healthy bands: {', '.join(names)}." if names else ""


def _tiles(log: pd.DataFrame) -> list[Tile]:
    weighted = f"{PREFIX}rollout_is_eff_sample_size" in log
    second = (
        _tile("Effective sample size", f"{PREFIX}rollout_is_eff_sample_size", log, percent)
        if weighted
        else _tile("Effective learning rate", f"{PREFIX}effective_lr", log)
    )
    return [
        _tile("Gap (k3_kl, nats per token)", f"{PREFIX}k3_kl", log),
        second,
        _tile("Tokens rejected", f"{PREFIX}rollout_rs_masked_fraction", log, percent, "no criterion rejects"),
        _tile("Reward", "reward", log),
    ]


def _tile(
    label: str, key: str, log: pd.DataFrame, write: Callable[[float], str] = number, missing: str = "not logged"
) -> Tile:
    values = log[key][np.isfinite(log[key])] if key in log else pd.Series(dtype=float)
    if values.empty:
        return Tile(label, "-", missing)
    n = max(min(_LAST, len(values) // 2), len(values) // _PART, 1)
    first, last = float(values[:n].mean()), float(values[-n:].mean())
    band = Band.of(key)
    notes = [f"at first {write(first)}"] if len(values) > 1 else []
    notes += [f"healthy: {band.in_words(write)}"] if band != Band() else []
    state = "" if band == Band() else "good" if last in band else "bad"
    return Tile(label, write(last), ", ".join(notes), state)
