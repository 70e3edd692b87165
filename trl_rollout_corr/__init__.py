"""
Rollout correction for TRL: importance weights, rejection and bypass for samplers that are not the trained policy.
"""

from typing import TYPE_CHECKING

from .messages import __version__ as __version__


if TYPE_CHECKING:
    from .asynchronous.async_grpo import RolloutCorrectedAsyncGRPOConfig, RolloutCorrectedAsyncGRPOTrainer
    from .correction.compute import compute_rollout_correction
    from .settings.config import RolloutCorrectionConfig
    from .tools.monitor.callback import RolloutCorrectionMonitor
    from .tools.monitor.examine import examine
    from .trainers.grpo import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer
    from .trainers.rloo import RolloutCorrectedRLOOConfig, RolloutCorrectedRLOOTrainer

_MODULES = {
    "RolloutCorrectedAsyncGRPOConfig": "asynchronous.async_grpo",
    "RolloutCorrectedAsyncGRPOTrainer": "asynchronous.async_grpo",
    "RolloutCorrectionConfig": "settings.config",
    "RolloutCorrectedGRPOConfig": "trainers.grpo",
    "RolloutCorrectedGRPOTrainer": "trainers.grpo",
    "RolloutCorrectedRLOOConfig": "trainers.rloo",
    "RolloutCorrectedRLOOTrainer": "trainers.rloo",
    "RolloutCorrectionMonitor": "tools.monitor.callback",
    "compute_rollout_correction": "correction.compute",
    "examine": "tools.monitor.examine",
}

__all__ = [
    "RolloutCorrectedAsyncGRPOConfig",
    "RolloutCorrectedAsyncGRPOTrainer",
    "RolloutCorrectedGRPOConfig",
    "RolloutCorrectedGRPOTrainer",
    "RolloutCorrectedRLOOConfig",
    "RolloutCorrectedRLOOTrainer",
    "RolloutCorrectionConfig",
    "RolloutCorrectionMonitor",
    "compute_rollout_correction",
    "examine",
]


def __getattr__(name: str) -> object:
    # Lazy, so that the mathematics can be used without importing TRL, which takes seconds
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
