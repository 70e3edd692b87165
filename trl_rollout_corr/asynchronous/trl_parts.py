"""
Parts of TRL's asynchronous trainer.

The class is in another place from release to release, and its own module has the names of all other parts, wherever they are
defined. A missing part is named.
"""

import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from ..trainers.versions import TESTED


_PLACES = ("trl", "trl.experimental.async_grpo")  # of the class, the newest first
_CLIENT = "trl.generation.async_vllm_client"  # if the module of the trainer does not name it

# Parts in use, by the names that they have had, the newest first
_PARTS = {
    "AsyncGRPOConfig": ("AsyncGRPOConfig",),
    "AsyncRolloutWorker": ("AsyncRolloutWorker",),
    "RolloutSample": ("RolloutSample",),
    "TREE_ATTENTION": ("TREE_ATTENTION",),
    "TreeRow": ("TreeRow",),
    "VLLMClient": ("AsyncVLLMClient", "VLLMClient"),
    "WeightTransferClient": ("WeightTransferClient",),
}


def _module(name: str) -> Any:
    """A module; `None` if it is not there. An error in the module itself is raised."""
    try:
        with warnings.catch_warnings():  # about an import that is not the user's
            warnings.filterwarnings("ignore", message="You are importing from 'trl.experimental'")
            return import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(f"{error.name}"):
            raise
        return None


def find_parts() -> dict[str, Any]:
    """
    The asynchronous trainer of the installed TRL and its parts, by name.

    Raises:
        `ImportError`: if a part is missing.
    """
    owners = [getattr(_module(place), "AsyncGRPOTrainer", None) for place in _PLACES]
    trainer = next((owner for owner in owners if owner is not None), None)
    if trainer is None:
        places = " or ".join(f"`{place}`" for place in _PLACES)
        raise ImportError(_refusal(f"`AsyncGRPOTrainer`, which was not found in {places}"))
    modules = [sys.modules[trainer.__module__], _module(_CLIENT)]
    parts = {"AsyncGRPOTrainer": trainer, "async_grpo_trainer": modules[0]}
    for part, names in _PARTS.items():
        values = [getattr(module, name) for name in names for module in modules if hasattr(module, name)]
        if values:
            parts[part] = values[0]
    missing = [f"`{name}`" for name in _PARTS if name not in parts]
    if missing:
        raise ImportError(_refusal(f"{', '.join(missing)} in `{trainer.__module__}`"))
    return parts


def _refusal(missing: str) -> str:
    return (
        f"The asynchronous trainer of trl {version('trl')} lacks parts that rollout correction uses: {missing}. Install a "
        f"newer trl-rollout-corr, or {TESTED}; or train with `RolloutCorrectedGRPOTrainer`."
    )


_parts = find_parts()
if TYPE_CHECKING:  # editors show its parameters
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
else:
    AsyncGRPOConfig, AsyncGRPOTrainer = _parts["AsyncGRPOConfig"], _parts["AsyncGRPOTrainer"]
AsyncRolloutWorker, RolloutSample = _parts["AsyncRolloutWorker"], _parts["RolloutSample"]
TREE_ATTENTION, TreeRow = _parts["TREE_ATTENTION"], _parts["TreeRow"]
VLLMClient, WeightTransferClient = _parts["VLLMClient"], _parts["WeightTransferClient"]
RolloutLoop = getattr(AsyncRolloutWorker, "_loop_cls", object)  # in the process of the rollout worker


def without_peak_flops(device: torch.device) -> AbstractContextManager:
    """Context in which TRL can build its trainer on a CPU: TRL asks CUDA for the peak throughput of the device."""
    module = _parts["async_grpo_trainer"]
    if device.type != "cpu" or not hasattr(module, "get_peak_flops_per_device"):
        return nullcontext()
    return patch.object(module, "get_peak_flops_per_device", lambda accelerator, dtype: None)
