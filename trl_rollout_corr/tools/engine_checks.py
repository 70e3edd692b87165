"""Checks of vLLM's engine arguments and sampling options: which the installed vLLM knows, and which are doubtful."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from trl.generation import vllm_generation

from ..messages import SettingError, nearest, warn, warn_idle
from ..settings.resolve import Settings
from ..trainers.quantised_engine import schemes, schemes_of_experts
from ..trainers.versions import INSTALLED, NEWEST_TESTED, TESTED, is_untested


_SPECULATION = (
    "Perhaps the log-probabilities belong to other tokens than the sampled ones: with n-gram speculation in vLLM 0.31 "
    "and fresh float32 weights, `k3_kl` rose to 0.55, and up to 10 percent of the tokens came without a finite "
    "log-probability. Other methods of speculation are untested"
)
_OLD_CACHE = (
    "Perhaps keys and values of old weights survive a push there, because only vLLM's own cache is known to be "
    "cleared. Completions would then continue from them"
)
_OTHER_IMAGES = "Perhaps vLLM sees other images or frames than the trainer, which takes them from its own processor"
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
# Arguments that may give log-probabilities another meaning than the trainer's, and why
DOUBTFUL = {
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _SPECULATION),
    "logits_processors": "A processor of logits changes what vLLM samples but not what the trainer scores, so that "
    "every ratio is off by the probability that was moved",
    "watermark_config": "A watermark decides which token is drawn, so that tokens are not sampled with the reported "
    "log-probabilities. This is untested",
    "reasoning_config": "With a `thinking_token_budget`, vLLM forces the tokens that end the reasoning, which no "
    "policy sampled. Perhaps they come with a log-probability of 0",
    "diffusion_config": "A diffusion model does not sample one token after the other, as the trainer scores them",
    "default_mm_loras": "vLLM applies adapters that the trainer lacks",
    "model_class_overrides": "Perhaps vLLM computes another model than the trainer",
    **dict.fromkeys(
        ("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend", "ec_transfer_config"), _OLD_CACHE
    ),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate"), _OTHER_IMAGES),
}
# Parts of a model's configuration that change its precision, but not what it computes
_PRECISIONS = ("dtype", "torch_dtype", "head_dtype")
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def check_reserved(kwargs: Mapping[str, object]) -> None:
    """Refuse arguments that TRL or rollout correction sets."""
    for name, value in kwargs.items():
        if name in RESERVED:
            reason = f"which is set elsewhere: {RESERVED[name]}"
            raise SettingError("rollout_engine_kwargs", value, reason, remedy="Remove it.", part=f"for {name!r}")


def check_names(kwargs: Mapping[str, object]) -> None:
    """Refuse arguments that the engine of the installed vLLM does not know."""
    engine = getattr(vllm_generation, "LLM", None)  # missing without vLLM, for which TRL raises its own error
    known = None if engine is None else known_arguments(engine)
    if known is not None and (unknown := [name for name in kwargs if name not in known]):
        name, remedy = unknown[0], nearest(unknown[0], known).strip()
        reason = f"and no engine argument of vLLM {_version()} has this name"
        raise SettingError("rollout_engine_kwargs", kwargs[name], reason, remedy=remedy, part=f"for {name!r}")


def known_arguments(engine: Callable[..., Any]) -> set[str] | None:
    """Names of all arguments of vLLM's engine, or `None` if unknown."""
    try:
        from vllm.engine.arg_utils import EngineArgs

        own, passed_on = (inspect.signature(function).parameters for function in (engine, EngineArgs))
    except Exception:  # vLLM moved them, so vLLM itself must refuse
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in passed_on.values()):
        return None
    return {name for name, parameter in {**own, **passed_on}.items() if parameter.kind is not parameter.VAR_KEYWORD}


def check_values(kwargs: Mapping[str, object]) -> None:
    """Refuse values that the engine of the installed vLLM does not list for an argument."""
    for name, value in kwargs.items():
        known = known_schemes() if name == "quantization" else known_values(name)
        if known is None or not isinstance(value, str) or value in known:
            continue
        alike = [other for other in known if value.lower() in other] or get_close_matches(value, known, 1)
        hint = f"Did you mean {' or '.join(map(repr, alike))}?" if alike else f"It takes {', '.join(known)}."
        if name == "quantization" and alike and {*alike} <= {*schemes_of_experts()}:
            hint += " It rounds experts only; for a model without experts use fp8."
        reason = f"which is no `{name}` of vLLM {_version()}"
        if name == "quantization":
            reason = f"which is no scheme by which vLLM {_version()} rounds weights while it loads them"
            hint += " `trl-rollout-corr docs models#which-scheme` says where each works."
        raise SettingError("rollout_engine_kwargs", value, reason, remedy=hint, part=f"for {name!r}")


def known_schemes() -> list[str] | None:
    """Names of schemes by which the installed vLLM quantises weights while it loads them, or `None` if unknown."""
    try:
        return schemes()
    except Exception:  # vLLM is missing or moved them, so vLLM itself must refuse
        return None


def known_values(name: str) -> list[str] | None:
    """Values that the installed vLLM lists for an argument; `None` if it takes others or does not tell."""
    try:
        from vllm.engine.arg_utils import EngineArgs

        listed = next(field.type for field in fields(EngineArgs) if field.name == name)
    except Exception:
        return None
    parts = (
        [listed] if get_origin(listed) is Literal else [part for part in get_args(listed) if part is not type(None)]
    )
    if not parts or any(get_origin(part) is not Literal for part in parts):
        return None
    values = [value for part in parts for value in get_args(part)]
    return values if all(isinstance(value, str) for value in values) else None


def known_sampling_options() -> set[str] | None:
    """Names of the sampling options of the installed vLLM, or `None` if unknown."""
    try:
        parameters = inspect.signature(vllm_generation.SamplingParams).parameters.values()
    except Exception:  # vLLM is missing or does not tell
        return None
    return None if any(it.kind is it.VAR_KEYWORD for it in parameters) else {it.name for it in parameters}


def _version() -> str:
    import vllm

    return str(getattr(vllm, "__version__", "of unknown version"))


def warn_about_engine(kwargs: Mapping[str, Any]) -> None:
    """Warn about arguments that may change what a log-probability means, and about arguments that vLLM ignores."""
    field = "rollout_engine_kwargs"
    for name, doubt in DOUBTFUL.items():
        if kwargs.get(name):
            warn(f"`{field}` has {name!r}. {doubt}. Remove it, or compare `k3_kl` of a few steps without it.", field)
    overrides = kwargs.get("hf_overrides")
    if isinstance(overrides, Mapping) and (parts := [key for key in overrides if key not in _PRECISIONS]):
        warn(
            f"`{field}` changes {', '.join(map(repr, parts))} of the model's configuration by 'hf_overrides': perhaps "
            "vLLM then computes another model than the trainer. Make the same change in the trainer's model, in the "
            "`config.json` of its folder.",
            field,
        )
    defaults = kwargs.get("override_generation_config")
    if isinstance(defaults, Mapping) and (idle := [name for name in _OF_SAMPLING if name in defaults]):
        warn(
            f"`{field}` sets {', '.join(map(repr, idle))} in 'override_generation_config', which has no effect: TRL "
            "gives vLLM these options with each prompt. Set TRL's fields of these names.",
            field,
        )
    if kwargs.get("quantization_config") and kwargs.get("quantization") is None:
        warn(
            f"`{field}` has 'quantization_config' without 'quantization'. vLLM then rounds no layer of a model of 16 "
            "or 32 bits. Add {'quantization': 'online'}, or remove it.",
            field,
        )


def check_sampler(config: Any, settings: Settings, kwargs: Mapping[str, Any], *, truncates: bool) -> None:
    """Refuse replays, arguments and options that the sampler does not take, and warn about doubtful ones."""
    check_generation_kwargs(config)
    check_sampling(config.generation_kwargs or {}, colocated=config.vllm_mode == "colocate")
    check_reserved(kwargs)
    check_names(kwargs)
    check_values(kwargs)
    check_routing(config, settings)
    check_support(config, settings, truncates=truncates)
    warn_about_engine(kwargs)


def check_sampling(kwargs: Mapping[str, Any], *, colocated: bool) -> None:
    """Refuse sampling options that vLLM lacks, and warn about one seed. A server may run another vLLM."""
    seed = kwargs.get("seed")
    if colocated and seed is not None:
        warn(
            f"`generation_kwargs` sets `seed` to {seed!r}, which vLLM uses for each completion: all completions of a "
            "prompt are drawn with the same random numbers and are equal, so there is nothing to learn from. Remove "
            "it; TRL's `seed` makes a run repeatable.",
            "generation_kwargs",
        )
    known = known_sampling_options()
    if known is None or not (unknown := [name for name in kwargs if name not in known]):
        return
    field, name, remedy = "generation_kwargs", unknown[0], nearest(unknown[0], known).strip()
    reason = "and no option of vLLM's `SamplingParams` has this name"
    error = SettingError(field, kwargs[name], reason, remedy=remedy, part=f"for {name!r}")
    if colocated:
        raise error
    warn(f"{error} If the vLLM of your server knows it, ignore this.", field)


def check_generation_kwargs(config: Any) -> None:
    """Refuse arguments that make vLLM return log-probabilities of another distribution than it samples from."""
    if not config.use_vllm:
        return
    field, overrides = "generation_kwargs", config.generation_kwargs or {}
    value = overrides.get("temperature", config.temperature)
    if value != config.temperature:
        reason = f"tokens would be sampled with it and scored with `temperature`, which is {config.temperature}"
        raise SettingError(field, value, reason, remedy="Set `temperature` alone.", part="for 'temperature'")
    for name, needed in (("logprobs", 0), ("n", 1)):
        value = overrides.get(name, needed)
        if type(value) is not int or value != needed:
            reason = "rollout correction needs one log-probability of every sampled token"
            raise SettingError(field, value, reason, allowed=str(needed), remedy="Remove it.", part=f"for {name!r}")


def check_routing(config: Any, settings: Settings) -> None:
    """Refuse samplers whose routes do not reach the trainer."""
    if settings.rollout_routing is None or not config.use_vllm:
        return
    reason = None
    if config.vllm_mode != "colocate":
        reason, remedy = "`vllm_mode` is 'server', and TRL's client drops the routes", "`vllm_mode` to 'colocate'"
    elif config.vllm_tensor_parallel_size > 1:
        remedy = "`vllm_tensor_parallel_size` to 1"
        reason = "`vllm_tensor_parallel_size` is above 1, where replay is untested"
    if reason:
        remedy = f"Set {remedy}, or `rollout_routing` to None."
        raise SettingError("rollout_routing", settings.rollout_routing, f"but {reason}", remedy=remedy)


def check_support(config: Any, settings: Settings, *, truncates: bool) -> None:
    """Refuse `rollout_support` where the sampler returns no kept tokens or was never tested; warn if it cuts none."""
    if settings.rollout_support is None or not config.use_vllm:
        return
    reason = None
    if is_untested(INSTALLED):
        reason = (
            f"trl {INSTALLED} is newer than {NEWEST_TESTED}, and may compute log-probabilities over the kept tokens "
            f"itself. Install {TESTED}, or leave truncated sampling to TRL"
        )
    elif config.vllm_mode != "colocate":
        reason = (
            f"`vllm_mode` is {config.vllm_mode!r}, and only a colocated vLLM returns the tokens that sampling kept"
        )
    if reason:
        remedy = "Set `rollout_support` to None."
        raise SettingError("rollout_support", settings.rollout_support, f"but {reason}", remedy=remedy)
    if not truncates:
        warn_idle("rollout_support", settings.rollout_support, "`top_p`, `top_k` and `min_p` do not remove any token")
