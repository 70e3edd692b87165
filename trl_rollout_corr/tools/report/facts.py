"""The facts about a run that several parts of a report use, each computed once."""

from typing import NamedTuple

import numpy as np

from ..analysis.run import Run
from ..diagnosis import Diagnosis, diagnose, iterations_of, observe_dump
from ..monitor.bands import HEALTHY
from ..monitor.examine import examine
from ..monitor.rule import Alarm
from ..text import steps


class Facts(NamedTuple):
    """The facts about a run."""

    name: str
    letter: str  # before the numbers of its findings; empty if the page is about this run alone
    run: Run
    windows: str  # the number of logging windows, in words
    findings: list[Alarm]  # in the log, the most serious first
    diagnosis: Diagnosis | None  # the cause of the gap, if the page is about this run alone

    @property
    def alarms(self) -> list[tuple[int, str, Alarm]]:
        """Step, number and finding of each alarm, in order of steps."""
        named = ((finding.step, f"{self.letter}{i}", finding) for i, finding in enumerate(self.findings, 1))
        return sorted(named, key=lambda alarm: alarm[:2])


def analyse(run: Run, name: str, letter: str) -> Facts:
    """Compute the facts about a run."""
    windows = f"{len(run.log)} logging window{'' if len(run.log) == 1 else 's'}"
    settings = None if run.config is None else run.config.settings
    iterations = 1 if run.dump is None else iterations_of(run.dump.settings)
    findings = examine(run.entries, settings, num_iterations=iterations)
    diagnosis = None if letter else _diagnose(run, quiet=not findings and not run.log.empty)
    return Facts(name, letter, run, windows, findings, diagnosis)


def state_of(facts: Facts) -> tuple[str, str, str]:
    """Level (`"critical"`, `"warning"`, `"healthy"`, or `"unknown"` without metrics), state and reason, in words."""
    if facts.run.log.empty:
        return "unknown", "No metrics", "There are no metrics to look at."
    if facts.findings:
        first, more = facts.findings[0], len(facts.findings) - 1
        detail = f"{first.seen} Seen in {steps(first.step, first.last_step)}."
        detail += f" {more} other finding{'s' if more > 1 else ''} below." if more else ""
        return first.severity, "Act now" if first.severity == "critical" else "Look into it", detail
    is_expected = facts.diagnosis is not None and facts.diagnosis.expected
    expected = " Its gap is expected, and is corrected." if is_expected else ""
    return "healthy", "Healthy", f"Nothing unhealthy was found in {facts.windows}.{expected}"


def is_healthy(metric: str, value: float) -> bool:
    """Whether a metric is not outside its healthy band."""
    low, high = HEALTHY[metric]
    return not (value < (-np.inf if low is None else low) or value > (np.inf if high is None else high))


def _diagnose(run: Run, *, quiet: bool) -> Diagnosis | None:
    if run.dump is None:
        return None
    try:
        return diagnose(observe_dump(run.dump, quiet=quiet))
    except ValueError:  # too few tokens
        return None
