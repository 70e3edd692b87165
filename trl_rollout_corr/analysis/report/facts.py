"""The facts about a run: everything that a report says, each computed once."""

from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from ...diagnosis import Diagnosis, Observed, diagnose
from ...health.examine import examine
from ...health.rule import Alarm
from ...messages import printable
from ...settings.config import RolloutCorrectionConfig
from ..recommend import HealthySteps, Recommendation, healthy_steps, recommend_from
from ..run import Dump, Run, entries_of
from .rejection import shares_of
from .status import Status, judge
from .token_statistics import TokenStatistics, count_tokens
from .worst_tokens import Worst, find_worst


class Facts(NamedTuple):
    """The facts about a run. Those from `shares` on are for a page about this run alone, and empty otherwise."""

    name: str
    run: Run
    windows: str  # the number of logging windows, in words
    findings: list[Alarm]  # in the log, the most serious first
    status: Status
    shares: Mapping[str, pd.DataFrame] = {}  # of tokens rejected and down-weighted, by family of groups
    worst: Worst | None = None  # tokens with the largest log-ratio, if there is a dump
    diagnosis: tuple[Observed, Diagnosis] | None = None  # the cause of the gap, if there are enough tokens
    statistics: TokenStatistics | None = None  # of the log-ratio, if there is a token that has one
    healthy: HealthySteps | None = None
    recommendation: Recommendation | None = None  # made of the healthy steps

    @property
    def log(self) -> pd.DataFrame:
        return self.run.log

    @property
    def config(self) -> RolloutCorrectionConfig | None:
        return self.run.dump.config if self.run.dump else None


def analyse(name: str, run: Run, *, alone: bool) -> Facts:
    """
    Compute the facts about a run.

    Args:
        name (`str`):
            Name of the run.
        run ([`~trl_rollout_corr.analysis.run.Run`]):
            A run, a dump, or both.
        alone (`bool`):
            Whether the page is about this run alone, so that its tokens are looked at.

    Returns:
        [`Facts`].
    """
    kind = "logging window" if run.logged_by == "trainer" else "dumped step"
    windows = f"{len(run.log)} {kind}{'' if len(run.log) == 1 else 's'}"
    dump = run.dump if alone else None
    diagnosis = None if dump is None else _diagnose(dump)
    findings = examine(entries_of(run.log), run.dump.config if run.dump else None)
    facts = Facts(printable(name), run, windows, findings, judge(run.log, findings, windows), diagnosis=diagnosis)
    if alone:
        facts = facts._replace(shares=shares_of(run.log, dump))
    if dump is None:
        return facts
    sequences, config = dump.sequences, dump.config
    facts = facts._replace(worst=find_worst(sequences))
    if not sequences.counted.any():
        return facts
    healthy = healthy_steps(sequences, run.log.index, findings)
    best = recommend_from(sequences, config, healthy)
    return facts._replace(healthy=healthy, recommendation=best, statistics=count_tokens(sequences, config))


def _diagnose(dump: Dump) -> tuple[Observed, Diagnosis] | None:
    observed = Observed(dump.sequences, dump.settings, dump.about)
    try:
        return observed, diagnose(observed)
    except ValueError:  # too few tokens
        return None
