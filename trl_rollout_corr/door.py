"""
The door between the core, which decides the loss and its metrics, and the tools, which observe, explain and translate.

A tool is imported when a setting asks for it, and only here. No other module of the core names one.
"""

from importlib import import_module
from typing import Any


# Callbacks of a trainer by the field that asks for them, in the order in which they see a batch: all are a
# `~trl_rollout_corr.trainers.watcher.Watcher`
WATCHERS = {
    "rollout_monitor": "recording.monitor:RolloutCorrectionMonitor",
    "rollout_diagnose": "recording.first_step:FirstStepDiagnosis",
    "rollout_dump_dir": "recording.dumping:SequenceDump",
}
OTHERS = {
    "bounds of the monitor": "health.examine:parse_bounds",
    "checks of pushes": "arrival.pushes:PushChecks",
    "replays": "trainers.replays:replays_of",
}


def tool(name: str) -> Any:
    """The tool of a name, which is imported now."""
    module, attribute = {**WATCHERS, **OTHERS}[name].split(":")
    return getattr(import_module(f"trl_rollout_corr.{module}"), attribute)
