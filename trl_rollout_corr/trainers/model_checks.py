"""Warnings about a model: different types in trainer and sampler, and dropout."""

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from ..messages import warn
from ..settings.effects import rounds_cache


def check_types(metadata: Mapping[str, str]) -> None:
    """Warn if trainer and sampler compute in different types, or if the sampler rounds keys and values to 8 bits."""
    if rounds_cache(cache := metadata.get("kv_cache_dtype")):
        warn(
            f"The sampler keeps keys and values in {cache}, which opens a gap of its own. Remove `kv_cache_dtype` "
            "from `rollout_engine_kwargs`, or start the server without `--kv-cache-dtype`: the cache then has the "
            "type of the model."
        )
    trainer, sampler = metadata.get("trainer_dtype"), metadata.get("sampler_dtype")
    if trainer and sampler and trainer != sampler and "quantization" not in metadata:  # quantization is coarser
        lost = ", and small updates get lost in the sampler until they add up" if trainer == "float32" else ""
        warn(
            f"The trainer computes in {trainer} and the sampler in {sampler}: their log-probabilities differ by the "
            f"rounding of the coarser one{lost}. Set `rollout_engine_kwargs` to {{'dtype': '{trainer}'}}, start the "
            f"server with `--dtype {trainer}`, or let the trainer compute in {sampler}."
        )


def dropout_of(model: PreTrainedModel) -> tuple[float, list[str]]:
    """Dropout of a model in training mode: its rate in attention, and the names of such layers."""
    in_attention = getattr(model.config.get_text_config(), "attention_dropout", 0.0) or 0.0
    return in_attention, [
        name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Dropout) and layer.p > 0
    ]


def check_dropout(model: PreTrainedModel, *, loaded_by_trl: bool = True) -> None:
    """
    Warn about dropout, which is on in the trainer and off in the sampler. TRL gives `model_init_kwargs` to a model
    that it loads itself.
    """
    in_attention, layers = dropout_of(model)
    own = (
        "`model_init_kwargs={'attention_dropout': 0.0}`"
        if loaded_by_trl
        else "`attention_dropout=0.0` where you load it"
    )
    remedies = [own] if in_attention else []
    remedies += ["`disable_dropout=True`"] if layers else []
    if not remedies:
        return
    adapters = any("lora_dropout" in name for name in layers)
    where = [f"in attention ({in_attention:g})"] if in_attention else []
    where += [f"in {len(layers)} layers{', of the LoRA adapter among them' if adapters else ''}"] if layers else []
    warn(
        f"Dropout is on in the model that trains, {' and '.join(where)}, and off in the sampler. The two are "
        "different policies even with equal weights, and the correction acts on the difference. Set "
        f"{' and '.join(remedies)}."
    )
