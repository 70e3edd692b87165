"""The form of a rule, and of the alarm that it raises."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .windows import Window, windows_of


@dataclass(frozen=True)
class Alarm:
    """
    An alarm: something unhealthy.

    Args:
        rule (`str`):
            Name of the rule.
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
            The observation, the reason why it matters, and the settings to change or the place to look.
        limit (`str`):
            The bound that was passed: `"> 0.03"`.
    """

    rule: str
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
        """The observation, and the rule with its bound, in a line."""
        return f"{self.seen.replace('`', '')} [{self.rule} {self.limit}]"

    def __str__(self) -> str:
        return f"{self.seen} {self.why} {self.advice}"


# A window of so many optimizer steps is enough for a critical alarm: three of them would be longer than most falls.
LONG = 10


@dataclass(frozen=True)
class Rule:
    """
    A rule: when a metric is unhealthy, and the message about it. The metric, without prefix, is unhealthy above the bound, or
    `below` it.

    Args:
        seen (`str`):
            The observation; `{value}` and `{bound}` are filled in.
        advice (`str`):
            The settings to change. The placeholders of [`Window.numbers`] are filled in.
        patience (`int`, *optional*, defaults to `3`):
            Number of windows. It fires if more than half of the latest `patience` windows are unhealthy, with the latest.
        lasting (`int`, *optional*, defaults to `0`):
            Number of consecutive unhealthy optimizer steps after which it fires (at least two windows, and at most
            `patience`); 0: a majority of `patience` windows.
        measure (`Callable`, *optional*):
            The number of a [`Window`] in place of the metric.
        confirmed (`Callable`, *optional*):
            Second condition on the [`Window`], checked only when the rule holds.
        covers (`tuple[str]`, *optional*):
            Rules about the same thing that are silent while this one holds.
    """

    name: str
    key: str
    bound: float
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

    def holds(self, streak: Sequence[bool], spacing: int) -> bool:
        """True if it fires after these windows (`True`: unhealthy, the latest last) of `spacing` optimizer steps each."""
        if self.severity == "critical" and spacing >= max(self.lasting, LONG):
            return streak[-1]
        if not self.lasting:
            return streak[-1] and sum(streak) > self.patience // 2
        needed = windows_of(self.lasting, spacing, at_most=self.patience)
        return len(streak) >= needed and all(streak[-needed:])

    def value(self, window: Window) -> float | None:
        """The number that is compared, or `None` if the rule does not apply."""
        if not self.applies(window):
            return None
        return self.measure(window) if self.measure else window.compared(self.key)

    def unhealthy(self, value: float, bound: float) -> bool:
        return value < bound if self.below else value > bound
