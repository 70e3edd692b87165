"""Imports from experimental modules of TRL: the asynchronous trainer and its parts."""

from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from unittest.mock import patch

import torch


try:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutSample
    from trl.experimental.async_grpo.packing import TREE_ATTENTION, TreeRow
    from trl.experimental.async_grpo.vllm_client import VLLMClient
    from trl.experimental.async_grpo.weight_transfer import WeightTransferClient
except ImportError as error:
    raise ImportError(
        f"The asynchronous trainer of trl {version('trl')} is not the one of trl 1.16, which rollout correction supports: "
        f"{error}. Run `pip install 'trl==1.16.*'`, or train with `RolloutCorrectedGRPOTrainer`."
    ) from error


__all__ = [
    "TREE_ATTENTION",
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "AsyncRolloutWorker",
    "RolloutSample",
    "TreeRow",
    "VLLMClient",
    "WeightTransferClient",
    "without_peak_flops",
]


def without_peak_flops(device: torch.device) -> AbstractContextManager:
    """Context in which TRL can build its trainer on a CPU: TRL asks CUDA for the peak throughput of the device."""
    if device.type != "cpu":
        return nullcontext()
    return patch.object(async_grpo_trainer, "get_peak_flops_per_device", lambda accelerator, dtype: None)
