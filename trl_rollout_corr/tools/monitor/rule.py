"""The form of a rule, of its bounds, and of the alarm that a bound raises."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...messages import PREFIX
from .windows import Window, windows_of


ALARMS = f"{PREFIX}monitor/alarms"  # metric: the number of bounds that raised an alarm since the last log


@dataclass(frozen=True)
class Alarm:
    """An alarm: something unhealthy."""

    bound: str  # its name in `rollout_monitor_bounds`
    severity: str  # "warning", or "critical", which ends a run if the monitor is set to do so
    key: str  # metric that was compared
    step: int  # optimizer step at which it was raised first
    last_step: int  # optimizer step at which it held last
    value: float  # of the metric when it was raised
    seen: str  # the observation
    why: str  # what it may mean
    advice: str  # settings to change or the place to look
    limit: str  # that was passed: "> 0.03"

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
    A bound of a rule: when a metric is unhealthy, and the message about it.
    [`~trl_rollout_corr.tools.monitor.texts.fill`] replaces names in braces in its texts.
    """

    name: str  # in `rollout_monitor_bounds`, and in messages
    key: str  # of the metric, without the prefix
    limit: float
    seen: str  # the observation, with `{value}`, `{limit}` and `{side}` ("above" or "below")
    why: str
    advice: str  # the settings to change
    severity: str = "warning"  # or critical
    below: bool = False  # the metric is unhealthy below the limit, not above it
    patience: int = 3  # windows: passed if more than half of the latest ones are unhealthy, with the latest
    lasting: int = 0  # passed after so many consecutive unhealthy steps (at least two windows, and at most `patience`)
    applies: Callable[[Window], bool] = lambda window: True
    measure: Callable[[Window], float | None] | None = None  # the number of a window in place of the metric
    confirmed: Callable[[Window], bool] = lambda window: True  # a second condition, checked when the bound is passed
    covers: tuple[str, ...] = ()  # bounds of other rules that are silent while this one, their cause, is passed

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
        return self.measure(window) if self.measure else window.get(self.key)

    def unhealthy(self, value: float, limit: float) -> bool:
        return value < limit if self.below else value > limit
