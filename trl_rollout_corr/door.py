"""
The door between the core, which decides the loss and its metrics, and the tools, which observe, explain and translate.

A tool is imported when a setting asks for it, and only here: one function for each. No other module of the core, and
no trainer, names one.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .settings.resolve import Settings
    from .trainers.watcher import Watcher


def watchers_for(settings: "Settings") -> "list[type[Watcher]]":
    """Classes of the callbacks that settings ask for, in the order in which they see a batch."""
    found: list[type[Watcher]] = []
    if settings.rollout_monitor is not None:
        from .tools.monitor.callback import RolloutCorrectionMonitor

        found.append(RolloutCorrectionMonitor)
    if settings.rollout_diagnose:
        from .tools.diagnosis.first_step import FirstStepDiagnosis

        found.append(FirstStepDiagnosis)
    if settings.rollout_dump_dir is not None:
        from .tools.dump.writing import SequenceDump

        found.append(SequenceDump)
    return found


def check_monitor_bounds(bounds: "Mapping[str, float | None]") -> None:
    """Refuse names in `rollout_monitor_bounds` that are no bounds of the monitor."""
    from .tools.monitor.examine import parse_bounds

    parse_bounds(bounds)


def check_sampler(config: Any, settings: "Settings", kwargs: Mapping[str, Any], *, truncates: bool) -> None:
    """Refuse replays, arguments and options that the sampler does not take, and warn about doubtful ones."""
    from .tools import engine_checks

    engine_checks.check_sampler(config, settings, kwargs, truncates=truncates)


def advice(settings: "Settings", fields: Mapping[str, Any]) -> str:
    """What to set where the correction of a run takes much of its loss. `fields` are those of TRL."""
    from .tools.decision import decide, in_words

    return in_words(decide(settings, fields, is_harmed=True))
