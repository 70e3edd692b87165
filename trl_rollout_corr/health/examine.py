"""The rules applied to the log of a run, window after window."""

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from ..messages import PREFIX, nearest
from .rule import Alarm, Rule
from .rules import RULES
from .windows import Course, Window, is_training_window


# Metrics of the weights and of rejection, rather than of the two policies
_EFFECTS = ("rollout_is_", "rollout_rs_", "rejected/")


class Examiner:
    """
    Applies rules to one logging window after the other. `settings`, a [`RolloutCorrectionConfig`] or a dictionary of fields,
    are read at every window, so that they may change. `bounds` replace those of rules by name; `None` switches a rule off.
    """

    def __init__(
        self, rules: Mapping[str, Rule], settings: object = None, bounds: Mapping[str, float | None] | None = None
    ):
        self.rules, self.settings = rules, settings
        chosen = {**{name: rule.bound for name, rule in rules.items()}, **(bounds or {})}
        self._bounds: dict[str, float] = {name: bound for name, bound in chosen.items() if bound is not None}
        self.restart()

    def restart(self) -> None:
        """Forget the run so far."""
        self._course = Course()
        self.forget_streaks()

    def forget_streaks(self) -> None:
        """Start counting unhealthy windows anew, with the history of the run."""
        self._streaks: dict[str, deque[bool]] = {
            name: deque(maxlen=self.rules[name].patience) for name in self._bounds
        }

    def observe(self, entry: Mapping[str, object]) -> list[Alarm]:
        """Alarms that hold now, the most serious first. An entry without metrics of rollout correction is ignored."""
        if not is_training_window(entry):
            return []
        window = Window(entry, self.settings, self._course)
        self._course.add(window)
        holding = [
            self._finding(self.rules[name], bound, value, window)
            for name, bound in self._bounds.items()
            if (value := self.rules[name].value(window)) is not None
            and self._holds(self.rules[name], value, bound)
            and self.rules[name].confirmed(window)
        ]
        covered = {name for finding in holding for name in self.rules[finding.rule].covers}
        return by_severity(finding for finding in holding if finding.rule not in covered)

    def _holds(self, rule: Rule, value: float, bound: float) -> bool:
        streak = self._streaks[rule.name]
        streak.append(rule.unhealthy(value, bound))
        return rule.holds(list(streak), self._course.spacing)

    @staticmethod
    def _finding(rule: Rule, bound: float, value: float, window: Window) -> Alarm:
        seen, step = rule.seen.format(value=value, bound=bound), window.step
        advice = " ".join(rule.advice.format(**window.numbers()).split())
        if window.only_measured and rule.key.startswith(_EFFECTS):
            seen = f"If the correction were applied: {seen}"
        limit = f"{'<' if rule.below else '>'} {bound:g}"
        return Alarm(rule.name, rule.severity, PREFIX + rule.key, step, step, value, seen, rule.why, advice, limit)


def by_severity(findings: Iterable[Alarm]) -> list[Alarm]:
    """Sort: the most serious first; of the same severity, the earliest first; then in the order of the rules."""
    return sorted(findings, key=lambda finding: (finding.severity != "critical", finding.step))


def parse_bounds(bounds: Mapping[str, float | None] | str | None) -> dict[str, float | None]:
    """Check bounds by name of a rule, with `None` for a rule that is off, or the same as JSON. Returns a new dictionary."""
    field = "`rollout_monitor_bounds`"
    if isinstance(bounds, str):  # of a command line
        with suppress(json.JSONDecodeError):
            bounds = json.loads(bounds)
    if bounds is None:
        return {}
    if not isinstance(bounds, Mapping):
        example = '{"k3_high": 0.1} on a command line'
        raise ValueError(f"{field} must have a number, or None, by name of a rule, such as {example}; got {bounds!r}.")
    for name, bound in bounds.items():
        if name not in RULES:
            available = f"{nearest(name, RULES)} Available rules: {', '.join(RULES)}."
            raise ValueError(f"{field} has {name!r}, which is no rule.{available}")
        number = isinstance(bound, int | float) and not isinstance(bound, bool) and not math.isnan(bound)
        if bound is not None and not number:
            raise ValueError(
                f"{field} sets {name!r} to {bound!r}, which must be a number, or None to switch the rule off."
            )
    return dict(bounds)


def examine(history: Iterable[Mapping[str, object]], settings: object = None) -> list[Alarm]:
    """
    Apply the rules to the log of a run, as the monitor does during the run.

    Args:
        history (`Iterable[Mapping]`):
            Entries of `trainer.state.log_history`, each with a `step`.
        settings ([`RolloutCorrectionConfig`] or `dict`, *optional*):
            Settings of the run, whose `rollout_monitor_bounds` are used. Without them, a run whose log has neither
            weights nor rejection is taken as uncorrected.

    Returns:
        `list[Alarm]`: one per rule, the most serious first.
    """
    bounds = Window({}, settings).setting("rollout_monitor_bounds")
    examiner = Examiner(RULES, settings, None if bounds is ... else parse_bounds(bounds))
    found: dict[str, Alarm] = {}
    for entry in history:
        for finding in examiner.observe(entry):
            first = found.setdefault(finding.rule, finding)
            found[finding.rule] = replace(first, last_step=finding.step)
    return by_severity(found.values())
