"""
An engine of vLLM that quantises weights while it loads them, and again at each push: `rollout_engine_kwargs` with
`quantization`.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig
from trl.generation import vllm_generation

from ..messages import SettingError, nearest, notify


# Layers that keep their type: routers of experts and vision towers. Heads and embeddings keep it in
# vLLM anyway
KEPT = ["*.gate", "*.router", "*.router.*", "*.shared_expert_gate", "visual.*", "*.visual.*", "*vision_*"]
_FIELD, _PART = "rollout_engine_kwargs", "for 'quantization'"


def schemes() -> list[str]:
    """Names of schemes by which the installed vLLM quantises weights while it loads them."""
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    return ["fp8", *ONLINE_QUANT_SHORTHAND_NAMES]  # an older name of `fp8_per_tensor`


def schemes_of_experts() -> list[str]:
    """Schemes by which the installed vLLM rounds experts while it loads them, and no other layer."""
    try:
        from vllm.config.quantization import _ONLINE_SHORTHANDS as parts
    except Exception:  # vLLM is missing or moved them
        return []
    return [name for name, part in parts.items() if part.linear is None and part.moe is not None]


def build_quantised(built: Any, of_trl: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Any:
    """Build an engine that quantises weights while it loads them, and print which layers it quantises."""
    scheme = kwargs["quantization"]
    check_scheme(scheme, of_trl)
    parts: dict[str, Any] = dict(kwargs.get("quantization_config") or {})
    if "targets" not in parts:
        parts["ignore"] = [*KEPT, *parts.get("ignore", [])]
    try:
        llm = built(**{**of_trl, **kwargs, "quantization_config": parts})
        token = vllm_generation.SamplingParams(max_tokens=1, temperature=0.0)  # missing kernels may show only here
        llm.generate([{"prompt_token_ids": [0]}], token, use_tqdm=False)
    except Exception as error:
        # A working scheme shows that the test itself works. The engine may fail for another reason
        working = [] if scheme == "online" or computes(scheme) else [repr(x) for x in schemes() if computes(x)]
        if working:
            remedy = f"Set it to {' or '.join(working)}, which {'work' if len(working) > 1 else 'works'} here."
            raise _error(scheme, "for which this vLLM has no kernel on this machine", remedy) from error
        error.add_note(
            f"{_named(scheme)}. If the model has experts, vLLM may have no kernel for them. To quantise its other "
            "layers alone, set {'quantization': 'online', 'quantization_config': {'linear': 'fp8_per_channel'}}."
        )
        raise
    summaries = getattr(llm.llm_engine.vllm_config.quant_config, "quantized_layer_summaries", None)
    layers = ", ".join(summary.partition(":")[0] for summary in summaries or ())
    if layers:
        notify(f"{_named(scheme)}: vLLM rounds {layers}. All other layers keep their type.")
    elif summaries is not None:  # vLLM before 0.30 does not tell
        of_experts = [scheme, *schemes_of_experts()]
        notify(
            f"{_named(scheme)}, which has no effect: vLLM rounds no layer of this model. "
            f"Set another of {', '.join(repr(x) for x in schemes() if x not in of_experts)}, or remove it."
        )
    return llm


def _named(scheme: object) -> str:
    return f"`{_FIELD}` sets `quantization: {scheme}`"


def _error(scheme: object, reason: str, remedy: str) -> SettingError:
    return SettingError(_FIELD, scheme, reason, remedy=remedy, part=_PART)


def check_scheme(scheme: object, of_trl: Mapping[str, Any]) -> None:
    """Refuse a scheme that vLLM lacks, and any scheme for a model that is quantised already."""
    if scheme not in schemes():
        remedy = nearest(scheme, schemes()).strip()
        allowed = f"a scheme that this vLLM can apply while it loads weights ({', '.join(schemes())})"
        raise SettingError(_FIELD, scheme, allowed=allowed, remedy=remedy, part=_PART)
    config = AutoConfig.from_pretrained(of_trl["model"], trust_remote_code=of_trl.get("trust_remote_code", False))
    if of_trl.get("quantization") is not None or getattr(config, "quantization_config", None):
        remedy = (
            "Remove `quantization`, or train a model of 16 or 32 bits: without `load_in_8bit` and `load_in_4bit`, and "
            "not a quantised checkpoint."
        )
        raise _error(scheme, "but the trainer's model is quantised already", remedy)


def computes(scheme: str) -> bool:
    """True if vLLM can quantise a small linear layer with a scheme and compute with it."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.platforms import current_platform

    dtype, config = torch.bfloat16, VllmConfig()
    config.model_config = SimpleNamespace(dtype=dtype, hf_text_config=None)  # all that a layer asks for
    try:
        with set_current_vllm_config(config), torch.device(current_platform.device_type), torch.no_grad():
            # `mxfp4` and `mxfp8` also name formats of a checkpoint, so all schemes are given as parts
            parts = {"linear": {"fp8": "fp8_per_tensor"}.get(scheme, scheme)}
            online = OnlineQuantizationConfig(resolve_quantization_config("online", parts))
            layer = ReplicatedLinear(256, 256, bias=False, params_dtype=dtype, quant_config=online)
            layer.weight.weight_loader(layer.weight, torch.ones(256, 256, dtype=dtype))
            layer.quant_method.process_weights_after_loading(layer)
            layer(torch.ones(2, 256, dtype=dtype))
    except Exception:  # also for a scheme without a part for linear layers
        return False
    return True
