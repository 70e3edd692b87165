"""The form of a rule, of its bounds, and of the alarm that a bound raises."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...messages import PREFIX
from .windows import Window, windows_of


ALARMS = f"{PREFIX}monitor/alarms"  # metric: the number of bounds that raised an alarm since the last log


@dataclass(frozen=True)
class Alarm:
    """An alarm about something unhealthy."""

    bound: str  # its name in `rollout_monitor_bounds`
    severity: str  # "critical" if something is wrong for certain, else "warning"
    key: str  # metric that was compared
    step: int  # optimizer step at which it was raised first
    last_step: int  # optimizer step at which it held last
    value: float  # of the metric when the alarm was raised
    seen: str  # the observation
    why: str  # what it may mean
    advice: str  # settings to change, or where to look
    limit: str  # that the metric exceeded: "> 0.03"

    @property
    def in_short(self) -> str:
        """The observation and the bound with its limit, in one line."""
        return f"{self.seen.replace('`', '')} [{self.bound} {self.limit}]"

    def __str__(self) -> str:
        return f"{self.seen} {self.why} {self.advice}"


# A single window of this many optimizer steps suffices for an alarm that foretells a collapse, because three would
# outlast most falls.
LONG = 10
# A fault comes and goes if `RETURNS` of the `LATEST` windows are unhealthy, such as every third step
RETURNS, LATEST = 4, 12


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
    severity: str = "warning"  # or critical, if the alarm is never false
    below: bool = False  # the metric is unhealthy below the limit, not above it
    patience: int = 3  # windows: passed if more than half of the latest ones are unhealthy, with the latest
    lasting: int = 0  # passed after so many consecutive unhealthy steps (at least two windows, and at most `patience`)
    far: float = math.inf  # times the limit: a single window beyond it is enough
    returns: bool = True  # also passed if unhealthy windows return; False if chance makes them return in a small batch
    foretells_collapse: bool = False  # so that a single window of `LONG` steps is enough
    applies: Callable[[Window], bool] = lambda window: True
    measure: Callable[[Window], float | None] | None = None  # the number of a window that replaces the metric
    confirmed: Callable[[Window], bool] = lambda window: True  # a second condition, checked when the bound is passed
    covers: tuple[str, ...] = ()  # bounds of other rules that stay silent while this one, their cause, is passed

    @property
    def metric(self) -> str:
        """Key of the metric in a log; TRL's own have a slash."""
        return self.key if "/" in self.key else PREFIX + self.key

    @property
    def asks_for_correction(self) -> bool:
        """True if its message says which correction to set."""
        return "{correct}" in self.advice

    @property
    def most(self) -> int:
        """Smallest number of windows above half of `patience`."""
        return self.patience // 2 + 1

    @property
    def remembers(self) -> int:
        """The number of latest windows that [`Bound.holds`] looks at."""
        return max(self.patience, LATEST)

    def holds(self, streak: Sequence[bool], spacing: int) -> bool:
        """
        True if the bound is passed after these windows (`True` is unhealthy, the latest comes last), each of `spacing`
        optimizer steps.
        """
        if self.foretells_collapse and spacing >= max(self.lasting, LONG):
            return streak[-1]
        if self.lasting:
            needed = windows_of(self.lasting, spacing, at_most=self.patience)
            return len(streak) >= needed and all(streak[-needed:])
        comes_back = self.returns and self.most <= RETURNS <= sum(streak[-LATEST:])
        return streak[-1] and (sum(streak[-self.patience :]) >= self.most or comes_back)

    def value(self, window: Window) -> float | None:
        """The number that is compared, or `None` if the bound does not apply."""
        if not self.applies(window):
            return None
        return self.measure(window) if self.measure else window.get(self.key)

    def unhealthy(self, value: float, limit: float) -> bool:
        return value < limit if self.below else value > limit

    def is_far(self, value: float, limit: float) -> bool:
        """True if a single value is far enough beyond the limit to need no second one."""
        return self.unhealthy(value, self.at_once(limit))

    def at_once(self, limit: float) -> float:
        """The limit of a single value."""
        return limit / self.far if self.below else limit * self.far
