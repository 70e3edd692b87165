"""
Changes of a trainer for a counter-experiment, each a context manager: a head or a whole model in float32.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from ..arrival.server import without_dropout
from ..recording.run_metadata import dropout_of
from .configuration import Trainer


@contextmanager
def head_in_float32(trainer: Trainer) -> Iterator[None]:
    """The head in float32, outside autocast. An embedding with the same weight is not changed."""
    model = causal_model(trainer)
    head = model.get_output_embeddings()
    weight, bias, forward = head.weight, head.bias, head.forward

    def in_float32(hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(hidden.float(), head.weight, head.bias)

    try:
        head.weight = torch.nn.Parameter(weight.detach().float(), requires_grad=False)
        if bias is not None:
            head.bias = torch.nn.Parameter(bias.detach().float(), requires_grad=False)
        head.forward = in_float32
        with _float32_fused_head(model, trainer.temperature):
            yield
    finally:
        head.weight, head.bias, head.forward = weight, bias, forward


@contextmanager
def _float32_fused_head(model: Any, temperature: float) -> Iterator[None]:
    """Let TRL's fused head compute in float32, as with `cast_lm_head_to_fp32`. No effect if TRL has no fused head."""
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError:
        yield
        return
    had = "forward" in model.__dict__
    forward = model.forward
    add_fused_lm_head(model, temperature=temperature, cast_lm_head_to_fp32=True, outputs=("log_probs", "entropy"))
    try:
        yield
    finally:
        if had:
            model.forward = forward
        else:
            del model.forward


@contextmanager
def all_in_float32(trainer: Trainer) -> Iterator[None]:
    """The whole model in float32, without autocast."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=True)
    tensors = [x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()]
    before = [(x, x.data) for x in tensors]
    with ExitStack() as stack:
        stack.enter_context(_without_autocast(trainer, model))
        stack.callback(_put_back, before)
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield


def _put_back(before: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, data in before:
        tensor.data = data


@contextmanager
def _without_autocast(trainer: Trainer, model: Any) -> Iterator[None]:
    """Remove autocast, which Accelerate puts around the forward pass of a prepared model, and TRL around its own call."""
    prepared, autocast = model.__dict__.get("forward"), trainer.accelerator.autocast
    plain = model.__dict__.get("_original_forward")
    trainer.accelerator.autocast = nullcontext
    if plain is not None:
        model.forward = plain
    try:
        yield
    finally:
        trainer.accelerator.autocast = autocast
        if plain is not None:
            model.forward = prepared


def causal_model(trainer: Trainer) -> PreTrainedModel:
    """The model with the head, unwrapped."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=True)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head_dtype(trainer: Trainer) -> torch.dtype | None:
    """The type in which the head of the trainer computes, or `None` if it is not a plain matrix."""
    head: Any = causal_model(trainer).get_output_embeddings()
    weight = getattr(head, "_parameters", {}).get("weight")
    if weight is None or not weight.is_floating_point():
        return None
    if getattr(trainer.args, "cast_lm_head_to_fp32", False):
        return torch.float32
    return torch.bfloat16 if trainer.args.bf16 else torch.float16 if trainer.args.fp16 else weight.dtype


def rescorings(trainer: Trainer, dtype: str) -> Mapping[str, Callable[[Trainer], AbstractContextManager[None]]]:
    """
    Experiments that the trainer can make alone, by their names in `EXPERIMENTS`.

    Args:
        trainer (`Trainer`):
            A trainer that is about to train.
        dtype (`str`):
            Type that it computes in.

    Returns:
        `dict`: a context manager that takes the trainer, by experiment.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=True)
    can_cast = not getattr(causal_model(trainer), "is_quantized", False)
    return {
        **({"dropout_off": lambda trainer: without_dropout(trainer.model_wrapped)} if any(dropout_of(model)) else {}),
        **({"float32_head": head_in_float32} if head_dtype(trainer) in (torch.bfloat16, torch.float16) else {}),
        **({"float32_trainer": all_in_float32} if can_cast and dtype in ("bfloat16", "float16") else {}),
    }
