"""Metadata of a run: types, adapter and quantization of trainer and sampler, for `diagnose`."""

from collections.abc import Mapping
from typing import Any

import torch


def trainer_metadata(model: Any, args: Any) -> dict[str, str]:
    """
    Type in which the trainer computes, type of its weights, how they are quantised, kind of its adapter, whether
    experts are routed, and whether TRL can let the head compute in float32.
    """
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    computes = "bfloat16" if args.bf16 else "float16" if args.fp16 else _name(dtype)
    adapters = getattr(model, "peft_config", None)
    configs = list(adapters.values()) if isinstance(adapters, dict) else []
    kind = next((getattr(config.peft_type, "value", config.peft_type) for config in configs), "")
    mixed = any("experts" in name.split(".") for name, _ in model.named_modules())
    method = getattr(model, "quantization_method", None) if getattr(model, "is_quantized", False) else "none"
    return {
        "trainer_dtype": computes,
        "base_dtype": _name(_base_dtype(model) or dtype),
        "trainer_quantization": str(getattr(method, "value", method) or "unknown"),
        "adapter": str(kind or "none"),
        "experts": "routed" if mixed else "none",
        "head": _head(model),
    }


def _base_dtype(model: Any) -> torch.dtype | None:
    """Type of the weights below an adapter; `None` without an adapter, or if they are packed."""
    below = (p.dtype for name, p in model.named_parameters() if ".base_layer." in name and p.is_floating_point())
    return next(below, None)


def _head(model: Any) -> str:
    """
    Kind of head for TRL's `cast_lm_head_to_fp32`: `"own"` if it works, else a kind that it refuses or fails with.
    """
    head = getattr(model, "lm_head", None)
    if head is None:
        return "unknown"
    if hasattr(head, "get_base_layer"):
        return "adapted"
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    # where TRL looks for the embedding; a PEFT model has the whole base model there
    found = hasattr(getattr(model, "model", None), "embed_tokens")
    return "tied" if tied and not found else "own"


def engine_metadata(config: Any) -> dict[str, str]:
    """Known types and quantization of vLLM, from its `VllmConfig` or from a server's mapping."""
    metadata = {
        "sampler_dtype": part_of(config, "model_config", "dtype"),
        "sampler_head_dtype": part_of(config, "model_config", "head_dtype"),
        "kv_cache_dtype": part_of(config, "cache_config", "cache_dtype"),
        "quantization": part_of(config, "model_config", "quantization"),
    }
    return {name: _name(value) for name, value in metadata.items() if value is not None}


def quantises(config: Any) -> bool:
    """True if vLLM with this `VllmConfig` quantises weights of higher precision at loading."""
    quantization = part_of(config, "quant_config")
    return quantization is not None and quantization.get_name() == "online"


def part_of(config: Any, *path: str) -> Any:
    """A part of vLLM's configuration, an object or a server's mapping; `None` if it is missing."""
    for name in path:
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return config


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")
