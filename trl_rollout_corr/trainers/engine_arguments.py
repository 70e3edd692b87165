"""
Arguments of vLLM's engine without a field in TRL: `rollout_engine_kwargs`.

TRL builds the engine of its colocate mode inside its trainer, as `vllm_generation.LLM`. This name is replaced while
the trainer is built.

With `quantization`, vLLM rounds weights while it loads them, and again at each push
([`~trl_rollout_corr.pushes.to_vllm.PushesToVLLM`]).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from trl.generation import vllm_generation

from ..settings.resolve import Settings
from .quantised_engine import build_quantised


def engine_arguments(args: Any, settings: Settings) -> AbstractContextManager:
    """Context in which TRL builds its engine with `rollout_engine_kwargs`."""
    kwargs = settings.rollout_engine_kwargs
    if not kwargs or not args.use_vllm or args.vllm_mode != "colocate":
        return nullcontext()
    built = vllm_generation.LLM

    def build(*given: Any, **of_trl: Any) -> Any:
        if kwargs.get("quantization") is not None:
            return build_quantised(built, of_trl, kwargs)
        plain = {name: x for name, x in kwargs.items() if name != "quantization"}  # null keeps TRL's
        return built(*given, **{**of_trl, **plain})

    return patch.object(vllm_generation, "LLM", build)
