"""Rollout correction for TRL: importance weights, rejection and bypass for samplers that are not the trained policy."""

from typing import TYPE_CHECKING

from .messages import __version__ as __version__


if TYPE_CHECKING:
    from .asynchronous.disk_weight_transfer import DiskWeightTransfer
    from .asynchronous.trainer import RolloutCorrectedAsyncGRPOConfig, RolloutCorrectedAsyncGRPOTrainer
    from .commands.script import ScriptParser, model_config, model_init_kwargs, one_line_errors
    from .correction.compute import compute_rollout_correction
    from .health.examine import examine
    from .settings.config import RolloutCorrectionConfig
    from .recording.dumping import check_dump_folder
    from .trainers.grpo import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer
    from .recording.monitor import RolloutCorrectionMonitor
    from .trainers.rloo import RolloutCorrectedRLOOConfig, RolloutCorrectedRLOOTrainer

_MODULES = {
    "DiskWeightTransfer": "asynchronous.disk_weight_transfer",
    "RolloutCorrectedAsyncGRPOConfig": "asynchronous.trainer",
    "RolloutCorrectedAsyncGRPOTrainer": "asynchronous.trainer",
    "RolloutCorrectionConfig": "settings.config",
    "RolloutCorrectedGRPOConfig": "trainers.grpo",
    "RolloutCorrectedGRPOTrainer": "trainers.grpo",
    "RolloutCorrectedRLOOConfig": "trainers.rloo",
    "RolloutCorrectedRLOOTrainer": "trainers.rloo",
    "RolloutCorrectionMonitor": "recording.monitor",
    "ScriptParser": "commands.script",
    "check_dump_folder": "recording.dumping",
    "compute_rollout_correction": "correction.compute",
    "examine": "health.examine",
    "model_config": "commands.script",
    "model_init_kwargs": "commands.script",
    "one_line_errors": "commands.script",
}

__all__ = [
    "DiskWeightTransfer",
    "RolloutCorrectedAsyncGRPOConfig",
    "RolloutCorrectedAsyncGRPOTrainer",
    "RolloutCorrectedGRPOConfig",
    "RolloutCorrectedGRPOTrainer",
    "RolloutCorrectedRLOOConfig",
    "RolloutCorrectedRLOOTrainer",
    "RolloutCorrectionConfig",
    "RolloutCorrectionMonitor",
    "ScriptParser",
    "check_dump_folder",
    "compute_rollout_correction",
    "examine",
    "model_config",
    "model_init_kwargs",
    "one_line_errors",
]


def __getattr__(name: str) -> object:
    # Lazy, so that the mathematics can be used without importing TRL, which takes seconds
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
