"""Pushes of TRL's own trainers to a vLLM on a CPU, where TRL's way fails."""

from functools import wraps
from typing import Any

from trl.generation.vllm_generation import VLLMGeneration

from trl_rollout_corr.pushes.pushes import sending
from trl_rollout_corr.pushes.to_vllm import needs_reload, push_through_reload


def push_by_reload(generation: VLLMGeneration) -> None:
    """Let one of TRL's own trainers push weights through vLLM's reload where its own push fails."""
    if not needs_reload(generation):
        return
    sync_weights = generation.sync_weights

    @wraps(sync_weights)
    def reload_weights(*args: Any, **kwargs: Any) -> None:
        with sending(generation, "_iter_named_params", lambda weights: push_through_reload(generation, weights)):
            sync_weights(*args, **kwargs)

    generation.sync_weights = reload_weights
