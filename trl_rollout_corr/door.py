"""
The door between the core, which decides the loss and its metrics, and the tools, which observe,
explain and translate.

A tool is imported when a setting asks for it, and only here. No other module of the core names one.
"""

from importlib import import_module
from typing import Any


# Callbacks of a trainer by the field that asks for them, in the order in which they see a batch.
# Each is a `~trl_rollout_corr.trainers.watcher.Watcher`
WATCHERS = {
    "rollout_monitor": "tools.monitor.callback:RolloutCorrectionMonitor",
    "rollout_diagnose": "tools.diagnosis.first_step:FirstStepDiagnosis",
    "rollout_dump_dir": "tools.dump.writing:SequenceDump",
}
OTHERS = {
    "checks of the sampler": "tools.engine_checks:check_sampler",
    "names that are no fields": "tools.translation.names:instead_of",
    "bounds of the monitor": "tools.monitor.examine:parse_bounds",
    "checks of pushes": "tools.arrival.push_checks:PushChecks",
    "pushes of adapters": "tools.arrival.adapters:leaving_base_alone",
    "quantised engine": "tools.quantised_engine:build_quantised",
    "unlikely bounds": "tools.bounds:warn_about_bounds",
    "replays": "tools.replay.choices:replays_of",
}


def tool(name: str) -> Any:
    """The tool with this name, imported now."""
    module, attribute = {**WATCHERS, **OTHERS}[name].split(":")
    return getattr(import_module(f"trl_rollout_corr.{module}"), attribute)
