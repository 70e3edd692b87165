"""
Arguments of vLLM's engine that TRL has no field for: `rollout_engine_kwargs`.

TRL builds the engine of its colocate mode inside its trainer, as `vllm_generation.LLM`. This name
is replaced while the trainer is built.

With `quantization`, vLLM rounds weights while it loads them, and again at each push
([`~trl_rollout_corr.trainers.pushes.PushesToVLLM`]).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from trl.generation import vllm_generation

from ..door import tool
from ..settings.resolve import Settings


# Arguments that TRL or rollout correction sets, with the way to change them
RESERVED = {
    "model": "the sampler runs the trainer's model",
    "tensor_parallel_size": "set `vllm_tensor_parallel_size`",
    "gpu_memory_utilization": "set `vllm_gpu_memory_utilization`",
    "max_model_len": "set `vllm_max_model_length`",
    "max_num_seqs": "TRL sets it to the size of a generation",
    "enable_sleep_mode": "set `vllm_enable_sleep_mode`",
    "model_impl": "set `vllm_model_impl`",
    "distributed_executor_backend": "the engine runs in TRL's processes",
    "seed": "ranks that share an engine must draw the same numbers",
    "logprobs_mode": "TRL asks for the log-probabilities of the distribution sampled from, which the correction needs",
    "trust_remote_code": "set `trust_remote_code`",
}


def check_engine_kwargs(kwargs: Mapping[str, object]) -> None:
    """Refuse arguments that TRL sets."""
    for name in kwargs:
        if name in RESERVED:
            raise ValueError(
                f"`rollout_engine_kwargs` has {name!r}, which is set elsewhere: {RESERVED[name]}. Remove it."
            )


def engine_arguments(args: Any, settings: Settings) -> AbstractContextManager:
    """Context in which TRL builds its engine with `rollout_engine_kwargs`."""
    kwargs = settings.rollout_engine_kwargs
    if not kwargs or not args.use_vllm or args.vllm_mode != "colocate":
        return nullcontext()
    check_engine_kwargs(kwargs)
    built = vllm_generation.LLM

    def build(*given: Any, **of_trl: Any) -> Any:
        if kwargs.get("quantization") is not None:
            return tool("quantised engine")(built, of_trl, kwargs)
        plain = {name: x for name, x in kwargs.items() if name != "quantization"}  # null leaves TRL's
        return built(*given, **{**of_trl, **plain})

    return patch.object(vllm_generation, "LLM", build)
