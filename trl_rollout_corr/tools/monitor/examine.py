"""The rules applied to the log of a run, window after window."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...messages import SettingError, nearest
from ...settings.config import settings_of_preset
from ...settings.fields import parse_limits
from ...settings.resolve import Settings
from ..formats import number_beyond
from .history import WITHOUT_METRICS, as_logged, is_window
from .rule import Alarm, Bound
from .rules import BOUNDS, SILENCED
from .stock import windows_of_stock
from .texts import fill
from .windows import Course, Window, is_training_window


# Metrics of weights and rejection, not of the two policies
_EFFECTS = ("rollout_is_", "rollout_rs_", "effective_lr")


class Examiner:
    """
    Applies the rules to one logging window after the other. `limits` replaces the limits of bounds by name; `None`
    switches a bound off. `settings` and `fields` of TRL describe the run; `settings` is `None` if unknown.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        limits: Mapping[str, float | None] | None = None,
        fields: Mapping[str, Any] | None = None,
    ):
        self.settings, self.fields = settings, fields or {}
        chosen = {name: (limits or {}).get(name, bound.limit) for name, bound in BOUNDS.items()}
        self._limits: dict[str, float] = {name: limit for name, limit in chosen.items() if limit is not None}
        self.restart()

    def restart(self, history: Iterable[Mapping[str, object]] = (), step: int = 0) -> None:
        """Forget the run so far. A run that continues after `step` keeps the beginning of its `history`."""
        self._course = Course()
        self._streaks: dict[str, deque[bool]] = {name: deque(maxlen=BOUNDS[name].remembers) for name in self._limits}
        for entry in filter(is_training_window, history):
            self._course.add(self._window(entry))
        self._course.go_on(step)

    def _window(self, entry: Mapping[str, object]) -> Window:
        return Window(entry, self.settings, self._course, self.fields)

    def observe(self, entry: Mapping[str, object]) -> list[Alarm]:
        """Alarms that hold now, the most serious first. An entry without metrics of rollout correction is ignored."""
        return by_severity(self._alarm(*passed) for passed in self._passed(entry))

    def _passed(self, entry: Mapping[str, object]) -> list[tuple[Bound, float, float, Window]]:
        """Bounds that are passed now and not silenced by another, each with its limit, the value and the window."""
        if not is_training_window(entry):
            return []
        window = self._window(entry)
        self._course.add(window)
        passed = [
            (bound, limit, value, window)
            for bound, limit in ((BOUNDS[name], limit) for name, limit in self._limits.items())
            if (value := bound.value(window)) is not None
            and self._holds(bound, value, limit)
            and bound.confirmed(window)
        ]
        silenced = {name for bound, *_ in passed for name in SILENCED[bound.name]}
        return [one for one in passed if one[0].name not in silenced]

    def alarms_of(self, history: Iterable[Mapping[str, object]]) -> list[Alarm]:
        """One alarm per bound of the entries of a log, the most serious first."""
        first: dict[str, Alarm] = {}
        last: dict[str, int] = {}
        for entry in history:
            for bound, limit, value, window in self._passed(entry):
                if bound.name not in first:
                    first[bound.name] = self._alarm(bound, limit, value, window)
                last[bound.name] = window.step
        return by_severity(replace(alarm, last_step=last[name]) for name, alarm in first.items())

    @property
    def compared(self) -> set[str]:
        """Names of the bounds that have had a number to compare. The others are silent whatever happens."""
        return {name for name, streak in self._streaks.items() if streak}

    def _holds(self, bound: Bound, value: float, limit: float) -> bool:
        streak = self._streaks[bound.name]
        streak.append(bound.unhealthy(value, limit))
        return bound.is_far(value, limit) or bound.holds(list(streak), self._course.spacing)

    @staticmethod
    def _alarm(bound: Bound, limit: float, value: float, window: Window) -> Alarm:
        side = "below" if bound.below else "above"
        seen = fill(bound.seen, window, value=number_beyond(value, limit), limit=limit, side=side)
        why, advice = fill(bound.why, window), fill(bound.advice, window)
        if (window.settings is None or window.only_measures) and bound.key.startswith(_EFFECTS):
            seen = f"If the correction {'is' if window.settings is None else 'were'} applied: {seen}"
        passed = f"{'<' if bound.below else '>'} {limit:g}"
        found = bound.name, bound.severity, bound.metric, window.step, window.step, value
        return Alarm(*found, seen, why, advice, passed)


def by_severity(alarms: Iterable[Alarm]) -> list[Alarm]:
    """Sort: the most serious first; of the same severity, the earliest first; then in the order of the rules."""
    return sorted(alarms, key=lambda alarm: (alarm.severity != "critical", alarm.step))


def parse_bounds(bounds: Mapping[str, float | None] | str | None) -> dict[str, float | None]:
    """Limits by name of a bound, with `None` for a bound that is off; also from text."""
    limits = parse_limits(bounds, "rollout_monitor_bounds") or {}
    for name in limits:
        if name not in BOUNDS:
            remedy = f"{nearest(name, BOUNDS)} Available bounds: {', '.join(BOUNDS)}.".strip()
            raise SettingError("rollout_monitor_bounds", bounds, f"and {name!r} is not a bound", remedy=remedy)
    return dict(limits)


def is_small(history: Iterable[Mapping[str, object]]) -> bool:
    """True if a log shows gaps, all within the limit of a corrected run. Silent rules prove less."""
    gaps = [Window(entry, None).get("k3_kl") for entry in history if is_training_window(entry)]
    known = [gap for gap in gaps if gap is not None]
    return bool(known) and max(known) <= BOUNDS["k3_corrected"].limit


def examine(
    history: Iterable[Mapping[str, object]],
    settings: Settings | None = None,
    *,
    fields: Mapping[str, Any] | None = None,
) -> list[Alarm]:
    """
    Apply the rules to the log of a run, as the monitor does during the run and `report` afterwards.

    Args:
        history (`Iterable[Mapping]`):
            Entries of `trainer.state.log_history`, each with a `step`, or rows of a tracker, with `train/global_step`
            and the prefix `train/`. The log may also be one of TRL's own trainer; the rules then read TRL's mean
            ratio.
        settings ([`~trl_rollout_corr.settings.resolve.Settings`], *optional*):
            Settings of the run, `args.settings`, whose `rollout_monitor_bounds` apply. Without them nobody knows
            whether the run corrects, so `k3_high`, `k3_uncorrected`, `gap_stays` and `gap_clipped` stay silent. A log
            of TRL's own trainer is read with TRL's default.
        fields (`Mapping[str, Any]`, *optional*):
            Fields of the configuration by name, such as `vars(args)`. The advice depends on them: TRL corrects only
            GRPO, and only with vLLM. Without `num_iterations` among them, a run trains once on a batch.

    Returns:
        `list[Alarm]`: one per bound, the most serious first; empty if no rule finds anything.

    Raises:
        `ValueError`: if no entry shows metrics of this package or of TRL's own correction, so that there is nothing to
        examine.
    """
    entries = as_logged(history)
    if entries and not any(map(is_window, entries)):
        raise ValueError(f"`history` {WITHOUT_METRICS}")
    return alarms_of_log(entries, settings, fields or {})


def alarms_of_log(
    history: Iterable[Mapping[str, object]],
    settings: Settings | None,
    fields: Mapping[str, Any],
) -> list[Alarm]:
    """As [`examine`], of a log that may be without metrics, such as the log of a dump."""
    entries = as_logged(history)
    if not any(map(is_training_window, entries)) and (of_trl := windows_of_stock(entries)):
        entries, settings = of_trl, settings or settings_of_preset("trl")  # as such a log names none
    limits = None if settings is None else parse_bounds(settings.rollout_monitor_bounds)
    return Examiner(settings, limits, fields).alarms_of(entries)
