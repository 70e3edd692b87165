"""
The door between the core, which decides the loss and its metrics, and the tools, which observe, explain and translate.

A tool is imported when a setting asks for it, and only here: one function for each. No other module of the core, and
no trainer, names one.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .settings.resolve import Settings
    from .tools.arrival.push_checks import PushChecks
    from .trainers.replay import Replay
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


def build_quantised(built: Callable[..., Any], of_trl: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Any:
    """Build vLLM's engine with quantised weights."""
    from .tools import quantised_engine

    return quantised_engine.build_quantised(built, of_trl, kwargs)


def replays_of(trainer: Any) -> "Replay":
    """What a trainer takes over from its sampler: kept tokens and experts."""
    from .tools.replay import choices

    return choices.replays_of(trainer)


def knows_routers(model: Any) -> bool:
    """True if the trainer can replay the experts of a model, see `rollout_routing`."""
    from .tools.replay.routers import find_routers

    with suppress(ValueError):
        return bool(find_routers(model))
    return False


def push_checks(pushes: Any, model: Any) -> "PushChecks":
    """The checks of each push."""
    from .tools.arrival.push_checks import PushChecks

    return PushChecks(pushes, model)


def leaving_base_alone(model: Any, fsdp_version: int | None) -> AbstractContextManager:
    """Context in which a push of an adapter changes no weight of its base."""
    from .tools.arrival import adapters

    return adapters.leaving_base_alone(model, fsdp_version)


def check_served_adapter(url: str, model: Any) -> None:
    """Refuse a server that cannot load the adapter of a model."""
    from .tools.arrival.server import check_patterns, served_adapter

    check_patterns(url, served_adapter(model))
