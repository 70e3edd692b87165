"""
Arguments of vLLM's engine that TRL has no field for: `rollout_engine_kwargs`.

TRL builds the engine of its colocate mode inside its trainer, as `vllm_generation.LLM`. This name is replaced while the
trainer is built.

With `quantization`, vLLM rounds weights while it loads them, and again at each push
([`~trl_rollout_corr.trainers.pushes.PushesToVLLM`]).
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from trl.generation import vllm_generation

from ..door import tool
from ..messages import nearest, warn


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
    "trust_remote_code": "set `trust_remote_code`",
}


_SPECULATION = (
    "Perhaps the log-probabilities are not those of the sampled tokens: with n-gram speculation in vLLM 0.31 and fresh "
    "float32 weights, `k3_kl` rose to 0.55, and up to 10 percent of the tokens came without a finite log-probability. "
    "Other methods of speculation were not run"
)
_OLD_CACHE = (
    "Perhaps keys and values of old weights outlive a push there, as only vLLM's own cache is known to be cleared, and "
    "completions then continue from them"
)
_OTHER_IMAGES = "Perhaps vLLM sees other images or frames than the trainer, which takes them from its own processor"
# Arguments with which a log-probability may mean something else than the trainer's, and how
DOUBTFUL = {
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _SPECULATION),
    "logits_processors": "A processor of logits changes what vLLM samples but not what the trainer scores, so that every "
    "ratio is off by the probability that was moved",
    "watermark_config": "A watermark decides which token is drawn, so that tokens are not sampled with the reported "
    "log-probabilities. This was never run",
    "reasoning_config": "With a `thinking_token_budget`, vLLM forces the tokens that end the reasoning, which no policy "
    "sampled. Perhaps they come with a log-probability of 0",
    "diffusion_config": "A diffusion model does not sample one token after the other, as the trainer scores them",
    "default_mm_loras": "vLLM applies adapters that the trainer does not have",
    "model_class_overrides": "Perhaps vLLM computes another model than the trainer",
    **dict.fromkeys(
        ("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend", "ec_transfer_config"), _OLD_CACHE
    ),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate"), _OTHER_IMAGES),
}
# Parts of a model's configuration that change its precision, but not what it computes
_PRECISIONS = ("dtype", "torch_dtype", "head_dtype")
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def check_engine_kwargs(kwargs: Mapping[str, object]) -> None:
    """Refuse arguments that TRL sets, and those that the installed vLLM does not know."""
    for name in kwargs:
        if name in RESERVED:
            raise ValueError(
                f"`rollout_engine_kwargs` has {name!r}, which is set elsewhere: {RESERVED[name]}. Remove it."
            )
    engine = getattr(vllm_generation, "LLM", None)  # missing without vLLM, about which TRL has an error of its own
    known = None if engine is None else known_arguments(engine)
    if known is not None and (unknown := [name for name in kwargs if name not in known]):
        raise ValueError(
            f"`rollout_engine_kwargs` has {unknown[0]!r}, which is no argument of the engine of vLLM {_version()}."
            f"{nearest(unknown[0], known)}"
        )


def known_arguments(engine: Callable[..., Any]) -> set[str] | None:
    """Names of all arguments of vLLM's engine, or `None` if they cannot be told."""
    try:
        from vllm.engine.arg_utils import EngineArgs

        own, passed_on = (inspect.signature(function).parameters for function in (engine, EngineArgs))
    except Exception:  # vLLM has moved them, so that vLLM itself has to refuse
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in passed_on.values()):
        return None
    return {name for name, parameter in {**own, **passed_on}.items() if parameter.kind is not parameter.VAR_KEYWORD}


def known_sampling_options() -> set[str] | None:
    """Names of the options of sampling of the installed vLLM, or `None` if they cannot be told."""
    try:
        parameters = inspect.signature(vllm_generation.SamplingParams).parameters.values()
    except Exception:  # there is no vLLM, or it does not say
        return None
    return None if any(it.kind is it.VAR_KEYWORD for it in parameters) else {it.name for it in parameters}


def _version() -> str:
    import vllm

    return str(getattr(vllm, "__version__", "of unknown version"))


def warn_about_engine(kwargs: Mapping[str, Any]) -> None:
    """Warn about arguments that may change what a log-probability means, and about those that vLLM does not read."""
    field = "rollout_engine_kwargs"
    for name, doubt in DOUBTFUL.items():
        if kwargs.get(name):
            warn(f"`{field}` has {name!r}. {doubt}. Remove it, or compare `k3_kl` of a few steps without it.", field)
    overrides = kwargs.get("hf_overrides")
    if isinstance(overrides, Mapping) and (parts := [key for key in overrides if key not in _PRECISIONS]):
        warn(
            f"`{field}` changes {', '.join(map(repr, parts))} of the model's configuration by 'hf_overrides': perhaps vLLM "
            "then computes another model than the trainer. Make the same change in the trainer's model, in the "
            "`config.json` of its folder.",
            field,
        )
    defaults = kwargs.get("override_generation_config")
    if isinstance(defaults, Mapping) and (idle := [name for name in _OF_SAMPLING if name in defaults]):
        warn(
            f"`{field}` sets {', '.join(map(repr, idle))} in 'override_generation_config', which has no effect: TRL gives "
            "vLLM these options with each prompt. Set TRL's fields of these names.",
            field,
        )
    if kwargs.get("quantization_config") and kwargs.get("quantization") is None:
        warn(
            f"`{field}` has 'quantization_config' without 'quantization'. vLLM then rounds no layer of a model of 16 or 32 "
            "bits. Add {'quantization': 'online'}, or remove it.",
            field,
        )


def engine_arguments(args: Any) -> AbstractContextManager:
    """Context in which TRL builds its engine with `rollout_engine_kwargs`."""
    kwargs = args.settings.rollout_engine_kwargs
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
