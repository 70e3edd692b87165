"""Metadata of a run: settings, types, adapter and quantization of trainer and sampler. A diagnosis reads it in the dump."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel

from ..messages import plain, warn
from ..settings.of_trl import TRL_KEYS


# Fields of TRL that a diagnosis advises to set, or that rules and `compare` read. Of mappings, only these keys: others may be
# secret, such as a Hub token
_OF_TRL: dict[str, tuple[str, ...]] = {
    "cast_lm_head_to_fp32": (),
    "disable_dropout": (),
    "epsilon": (),
    "epsilon_high": (),
    "generation_kwargs": ("frequency_penalty", "presence_penalty"),
    "learning_rate": (),
    "mask_truncated_completions": (),
    "min_p": (),
    "model_init_kwargs": ("dtype",),
    "num_iterations": (),
    "per_device_train_batch_size": (),
    "repetition_penalty": (),
    "temperature": (),
    "top_k": (),
    "top_p": (),
    "use_vllm": (),
    "vllm_mode": (),
    **dict.fromkeys(TRL_KEYS, ()),
}


def settings_in_effect(args: Any) -> dict[str, Any]:
    """Settings in effect, the names of those `given`, and some fields of TRL, in types of JSON."""
    settings = {**asdict(args.settings), "given": sorted(args.given)}
    for name, keys in _OF_TRL.items():
        if hasattr(args, name):
            value = getattr(args, name)
            settings[name] = {key: value[key] for key in keys if key in value} if isinstance(value, Mapping) else value
    engine = settings["rollout_engine_kwargs"] or {}  # vLLM's only secret is the token of the hub
    settings["rollout_engine_kwargs"] = {name: value for name, value in engine.items() if name != "hf_token"} or None
    return {name: plain(value) for name, value in settings.items()}


def trainer_metadata(model: Any, args: Any) -> dict[str, str]:
    """Type of the trainer's computations, kind of its adapter, and whether it has routed experts."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    computes = "bfloat16" if args.bf16 else "float16" if args.fp16 else _name(dtype)
    adapters = getattr(model, "peft_config", None)
    kind = (
        next((getattr(a.peft_type, "value", a.peft_type) for a in adapters.values()), "")
        if isinstance(adapters, dict)
        else ""
    )
    mixed = any("experts" in name.split(".") for name, _ in model.named_modules())
    return {"trainer_dtype": computes, "adapter": str(kind or "none"), "experts": "routed" if mixed else "none"}


def engine_metadata(config: Any) -> dict[str, str]:
    """Types and quantization of vLLM, where known, from its `VllmConfig` or from the mapping that a server returns."""
    metadata = {
        "sampler_dtype": _get(config, "model_config", "dtype"),
        "sampler_head_dtype": _get(config, "model_config", "head_dtype"),
        "kv_cache_dtype": _get(config, "cache_config", "cache_dtype"),
        "quantization": _get(config, "model_config", "quantization"),
    }
    return {name: _name(value) for name, value in metadata.items() if value is not None}


def quantises(config: Any) -> bool:
    """True if vLLM, of a `VllmConfig`, quantises weights of higher precision while it loads them."""
    quantization = _get(config, "quant_config")
    return quantization is not None and quantization.get_name() == "online"


def _get(config: Any, *path: str) -> Any:
    for name in path:
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return config


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def check_types(metadata: Mapping[str, str]) -> None:
    """Warn if trainer and sampler compute in different types."""
    trainer, sampler = metadata.get("trainer_dtype"), metadata.get("sampler_dtype")
    if trainer and sampler and trainer != sampler and "quantization" not in metadata:  # coarser than both
        lost = ", and small updates get lost in the sampler until they add up" if trainer == "float32" else ""
        warn(
            f"The trainer computes in {trainer} and the sampler in {sampler}: their log-probabilities differ by the "
            f"rounding of the coarser one{lost}. Set `rollout_engine_kwargs` to {{'dtype': '{trainer}'}}, start the server "
            f"with `--dtype {trainer}`, or let the trainer compute in {sampler}."
        )


def dropout_of(model: PreTrainedModel) -> tuple[float, list[str]]:
    """Dropout of a model in training mode: its rate in attention, and the names of the layers that have it."""
    in_attention = getattr(model.config.get_text_config(), "attention_dropout", 0.0) or 0.0
    return in_attention, [
        name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Dropout) and layer.p > 0
    ]


def check_dropout(model: PreTrainedModel) -> None:
    """Warn about dropout, which is on in the trainer and off in the sampler."""
    in_attention, layers = dropout_of(model)
    remedies = ["`model_init_kwargs={'attention_dropout': 0.0}`"] if in_attention else []
    remedies += ["`disable_dropout=True`"] if layers else []
    if not remedies:
        return
    adapters = any("lora_dropout" in name for name in layers)
    where = [f"in attention ({in_attention:g})"] if in_attention else []
    where += [f"in {len(layers)} layers{', of the LoRA adapter among them' if adapters else ''}"] if layers else []
    warn(
        f"Dropout is on in the model that trains, {' and '.join(where)}, and off in the sampler. The two are "
        f"different policies even with equal weights, and the correction acts on the difference. Set {' and '.join(remedies)}."
    )
