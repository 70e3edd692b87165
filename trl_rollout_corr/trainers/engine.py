"""
Arguments of vLLM's engine that TRL has no field for: `rollout_engine_kwargs`.

TRL builds the engine of its colocate mode inside its trainer, as `vllm_generation.LLM`. This name is replaced while the
trainer is built.
"""

import dataclasses
import json
import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from trl.generation import vllm_generation

from ..dumps.files import plain
from ..messages import is_first_rank, nearest, warn_idle
from .console import write


# Arguments that TRL or rollout correction sets, with the way to change them
RESERVED = {
    "model": "the sampler has the trainer's model",
    "tensor_parallel_size": "set `vllm_tensor_parallel_size`",
    "gpu_memory_utilization": "set `vllm_gpu_memory_utilization`",
    "max_model_len": "set `vllm_max_model_length`",
    "max_num_seqs": "TRL sets it to the size of a generation",
    "enable_sleep_mode": "set `vllm_enable_sleep_mode`",
    "model_impl": "set `vllm_model_impl`",
    "distributed_executor_backend": "the engine runs in TRL's processes",
    "seed": "ranks that share an engine must draw the same numbers",
    "logprobs_mode": "TRL asks for the log-probabilities of the distribution sampled from, which the correction needs",
    "quantization": "TRL takes it from the trainer's model",
    "trust_remote_code": "set `trust_remote_code`",
}


def check_engine_kwargs(kwargs: Mapping[str, object]) -> None:
    """Refuse arguments that are not of vLLM's engine, or that TRL sets."""
    from vllm import EngineArgs

    names = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in kwargs:
        if name in RESERVED:
            raise ValueError(
                f"`rollout_engine_kwargs` has {name!r}, which is set elsewhere: {RESERVED[name]}. Remove it."
            )
        if name not in names:
            raise ValueError(
                f"`rollout_engine_kwargs` has {name!r}, which is no argument of vLLM's engine.{nearest(name, names)} "
                "It takes the fields of `vllm.EngineArgs`."
            )


def engine_arguments(args: Any) -> AbstractContextManager:
    """Context in which TRL builds its engine with `rollout_engine_kwargs`. For a server, its command line is printed."""
    kwargs = args.rollout_engine_kwargs
    if kwargs and not args.use_vllm:
        warn_idle("rollout_engine_kwargs", kwargs, "`use_vllm` is False")
    elif kwargs:
        check_engine_kwargs(kwargs)
        if args.vllm_mode == "colocate":
            built = vllm_generation.LLM
            return patch.object(vllm_generation, "LLM", lambda *given, **of_trl: built(*given, **{**of_trl, **kwargs}))
        announce_server(kwargs)
    return nullcontext()


def announce_server(kwargs: Mapping[str, object]) -> None:
    """Print the command line of a server with these arguments, which it takes at its start only."""
    if is_first_rank():
        write(f"Start the server with the arguments of `rollout_engine_kwargs`: {serve_line(kwargs)}")


def serve_line(kwargs: Mapping[str, object], model: str = "MODEL") -> str:
    """Command line of a server with these arguments."""
    return " ".join(
        [f"vllm serve {shlex.quote(model)}", *(_flag(name, value) for name, value in plain(kwargs).items())]
    )


def _flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    return f"{flag} {shlex.quote(json.dumps(value) if isinstance(value, dict | list) else str(value))}"
