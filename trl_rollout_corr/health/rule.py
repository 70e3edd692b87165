"""The form of a rule, of its bounds, and of the alarm that a bound raises."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..messages import PREFIX
from .windows import Window, windows_of


ALARMS = f"{PREFIX}monitor/alarms"  # metric: the number of bounds that raised an alarm since the last log


@dataclass(frozen=True)
class Alarm:
    """
    An alarm: something unhealthy.

    Args:
        bound (`str`):
            Name of the bound, as in `rollout_monitor_bounds`.
        severity (`str`):
            `"warning"`, or `"critical"`, which ends a run if the monitor is set to do so.
        key (`str`):
            Metric that was compared.
        step (`int`):
            Optimizer step at which it was raised first.
        last_step (`int`):
            Optimizer step at which it held last.
        value (`float`):
            Value of the metric when it was raised.
        seen, why, advice (`str`):
            The observation, what it may mean, and the settings to change or the place to look.
        limit (`str`):
            The limit that was passed: `"> 0.03"`.
    """

    bound: str
    severity: str
    key: str
    step: int
    last_step: int
    value: float
    seen: str
    why: str
    advice: str
    limit: str

    @property
    def in_short(self) -> str:
        """The observation, and the bound with its limit, in a line."""
        return f"{self.seen.replace('`', '')} [{self.bound} {self.limit}]"

    def __str__(self) -> str:
        return f"{self.seen} {self.why} {self.advice}"


# A window of so many optimizer steps is enough for a critical alarm: three of them would be longer than most falls.
LONG = 10


@dataclass(frozen=True)
class Bound:
    """
    A bound of a rule: when a metric is unhealthy, and the message about it. The metric is unhealthy above the limit, or
    `below` it. Its `key` has no prefix.

    Args:
        name (`str`):
            Name in `rollout_monitor_bounds`, and in messages.
        seen (`str`):
            The observation; `{value}`, `{limit}` and `{side}` ("above" or "below") are filled in.
        advice (`str`):
            The settings to change. In this and in the other texts, [`~trl_rollout_corr.health.texts.fill`] replaces names in
            braces.
        patience (`int`, *optional*, defaults to `3`):
            Number of windows. It is passed if more than half of the latest `patience` windows are unhealthy, with the latest.
        lasting (`int`, *optional*, defaults to `0`):
            Number of consecutive unhealthy optimizer steps after which it is passed (at least two windows, and at most
            `patience`); 0: a majority of `patience` windows.
        measure (`Callable`, *optional*):
            The number of a [`Window`] in place of the metric.
        confirmed (`Callable`, *optional*):
            Second condition on the [`Window`], checked only when the bound is passed.
        covers (`tuple[str]`, *optional*):
            Bounds of other rules that are silent while this one is passed, as this one is the cause.
    """

    name: str
    key: str
    limit: float
    seen: str
    why: str
    advice: str
    severity: str = "warning"  # or critical
    below: bool = False
    patience: int = 3
    lasting: int = 0
    applies: Callable[[Window], bool] = lambda window: True
    measure: Callable[[Window], float | None] | None = None
    confirmed: Callable[[Window], bool] = lambda window: True
    covers: tuple[str, ...] = ()

    @property
    def metric(self) -> str:
        """Key of the metric in a log."""
        return PREFIX + self.key

    def holds(self, streak: Sequence[bool], spacing: int) -> bool:
        """True if it is passed after these windows (`True`: unhealthy, the latest last) of `spacing` optimizer steps each."""
        if self.severity == "critical" and spacing >= max(self.lasting, LONG):
            return streak[-1]
        if not self.lasting:
            return streak[-1] and sum(streak) > self.patience // 2
        needed = windows_of(self.lasting, spacing, at_most=self.patience)
        return len(streak) >= needed and all(streak[-needed:])

    def value(self, window: Window) -> float | None:
        """The number that is compared, or `None` if the bound does not apply."""
        if not self.applies(window):
            return None
        return self.measure(window) if self.measure else window.compared(self.key)

    def unhealthy(self, value: float, limit: float) -> bool:
        return value < limit if self.below else value > limit


class Rule(NamedTuple):
    """A rule: bounds about one problem, the most serious first. While one of them is passed, those after it are silent."""

    name: str
    bounds: tuple[Bound, ...]
