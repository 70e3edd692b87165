"""Facts about a run that several parts of a report use. Each is computed once."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from ...messages import PREFIX, uncapitalized
from ..bands import HEALTHY, band_in_words
from ..diagnosis import Diagnosis, diagnose
from ..diagnosis.loading import alarms_of_run, observe_dump
from ..diagnosis.trl_log import RatioCourse, course_of, suspicion_headline, suspicions
from ..formats import number, steps
from ..monitor.conditions import without_advantages
from ..monitor.rule import Alarm
from ..monitor.rules import BOUNDS, SILENCED
from ..monitor.stock import RATIO
from ..monitor.windows import Window, is_training_window
from .run import Run


# Metrics with a healthy band in a box or a chart
SHOWN = (
    "k3_kl",
    "rollout_rs_masked_fraction",
    "rollout_is_eff_sample_size",
    "effective_lr",
    "kl_advantage_positive",
    "rollout_is_mean",
    RATIO,
)


class Facts(NamedTuple):
    """The facts about a run."""

    name: str
    letter: str  # goes before the numbers of its alarms; empty on a page about this run alone
    run: Run
    windows: str  # the number of logging windows, in words
    alarms: list[Alarm]  # in the log, the most serious first
    diagnosis: Diagnosis | None  # the cause of the gap, on a page about this run alone
    course: RatioCourse | None  # of TRL's ratio, in the log of a trainer of TRL

    @property
    def numbered_alarms(self) -> list[tuple[int, str, Alarm]]:
        """Step, number and alarm of each alarm, in order of steps."""
        named = ((alarm.step, f"{self.letter}{i}", alarm) for i, alarm in enumerate(self.alarms, 1))
        return sorted(named, key=lambda alarm: alarm[:2])


def analyse(run: Run, name: str, letter: str) -> Facts:
    """Compute the facts about a run."""
    windows = f"{len(run.log)} logging window{'' if len(run.log) == 1 else 's'}"
    course = None if run.dump or any(map(is_training_window, run.entries)) else course_of(run.entries)
    alarms = alarms_of_run(run.entries, run.dump)
    diagnosis = None if letter else _diagnose(run)
    return Facts(name, letter, run, windows, alarms, diagnosis, course)


def state_of(facts: Facts) -> tuple[str, str, str]:
    """Level (`"critical"`, `"warning"`, `"healthy"`, or `"unknown"` without metrics), state and reason."""
    if facts.run.log.empty:
        return "unknown", "No metrics", "There are no metrics to look at."
    fall = reward_fall(facts.run.log)
    if facts.alarms:
        worst, more = _worst(facts.alarms), len(facts.alarms) - 1
        parts = [f"{worst.seen} Seen in {steps(worst.step, worst.last_step)}.", _course(worst, facts.run.log), fall]
        parts += [f"{more} other finding{'s' if more > 1 else ''} below."] if more else []
        state = "Act now" if worst.severity == "critical" else "Look into it"
        return worst.severity, state, " ".join(filter(None, parts))
    if facts.course is not None and (found := suspicions(facts.course)):
        return "warning", "Look into it", f"{suspicion_headline(found)}. {fall}".strip()
    expected = ""
    if facts.diagnosis is not None and facts.diagnosis.expected:
        expected = f" Its gap is expected{', and is corrected' if facts.diagnosis.corrects else ''}."
    doubts = _outside(facts.run) + _without_advantages(facts.run)
    if fall:
        doubts.append(uncapitalized(fall[:-1]))
    if doubts:
        return "unknown", "No alarm", f"No alarm was raised in {facts.windows}, but {'; '.join(doubts)}.{expected}"
    return "healthy", "Healthy", f"Nothing unhealthy was found in {facts.windows}.{expected}"


def _worst(alarms: Sequence[Alarm]) -> Alarm:
    """The first alarm, or the one about the same metric that silenced it when the metric got worse."""
    same = [alarm for alarm in alarms if (alarm.severity, alarm.key) == (alarms[0].severity, alarms[0].key)]
    return next((alarm for alarm in same if alarms[0].bound in SILENCED[alarm.bound]), alarms[0])


def _course(alarm: Alarm, log: pd.DataFrame) -> str:
    """A sentence on the worst and the last value of the metric of an alarm; empty if it has not moved since."""
    key = RATIO if alarm.key not in log and alarm.key == f"{PREFIX}rollout_is_mean" else alarm.key
    values = finite_values(log, key)
    values = values[values.index >= alarm.step]
    if len(values) < 2:
        return ""
    at = int(values.idxmin() if BOUNDS[alarm.bound].below else values.idxmax())
    first, worst, last = (number(float(x)) for x in (values.iloc[0], values[at], values.iloc[-1]))
    name = f"`{key.removeprefix(PREFIX)}`"
    if worst == last:
        return "" if worst == first else f"At last, {name} is {last}, its worst value."
    return f"At worst, {name} is {worst} (step {at}), and {last} at the end."


_SPAN = 20  # one in this many windows is averaged at each end of a fall
_FALLS = 0.3  # share of the range of these means that counts as a fall
_BEYOND = 5.0  # standard errors of a mean, which chance hardly exceeds


def reward_fall(log: pd.DataFrame) -> str:
    """A sentence on the fall of the reward from its best mean to its last one; empty if it did not fall for good."""
    values = finite_values(log, "reward")
    n = max(len(values) // _SPAN, 3)
    means = values.rolling(n).mean().dropna()
    if len(means) < 2 * n:
        return ""
    error = float(values.diff().std()) / (2 * n) ** 0.5  # of a mean of `n` windows, without the course of the run
    best, last = float(means.max()), float(means.iloc[-1])
    if best - last <= max(_FALLS * (best - float(means.min())), _BEYOND * error):
        return ""
    at = int(means.idxmax())
    return f"The reward fell from {number(best)} (step {at}) to {number(last)}, both means of {n} values."


def finite_values(log: pd.DataFrame, key: str) -> "pd.Series[float]":
    """The finite values of a metric by step."""
    return log.get(key, pd.Series(dtype=float)).replace([np.inf, -np.inf], np.nan).dropna()


def _outside(run: Run) -> list[str]:
    """Metrics on the page that leave their healthy band in some window, in words."""
    found = []
    for metric in SHOWN:
        if metric == RATIO and f"{PREFIX}rollout_is_mean" in run.log:
            continue  # another name for the same numbers
        values = run.log.get(metric if metric == RATIO else PREFIX + metric, pd.Series(dtype=float)).dropna()
        off = [float(value) for value in values if not is_healthy(metric, value)]
        if off:
            span = " to ".join(dict.fromkeys([number(min(off)), number(max(off))]))  # one number if both read alike
            found.append(
                f"`{metric}`, healthy {band_in_words(metric)}, is {span} in {len(off)} of {len(values)} windows"
            )
    return found


def _without_advantages(run: Run) -> list[str]:
    """Sentences that say so if most windows gave nothing to learn from."""
    known = [x for entry in run.entries if (x := without_advantages(Window(entry, None))) is not None]
    if not known or 2 * sum(known) <= len(known):
        return []
    return [
        f"all advantages were 0 in {sum(known):.0f} of {len(known)} windows, so that there was nothing to learn from"
    ]


def is_healthy(metric: str, value: float) -> bool:
    """True unless a metric is outside its healthy band."""
    low, high = HEALTHY[metric]
    return not (value < (-np.inf if low is None else low) or value > (np.inf if high is None else high))


def _diagnose(run: Run) -> Diagnosis | None:
    if run.dump is None:
        return None
    try:
        return diagnose(observe_dump(run.dump, run.entries))
    except ValueError:  # too few tokens
        return None
