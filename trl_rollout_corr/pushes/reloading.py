"""
New weights for a vLLM engine through its own reload, packed for its kernels on a CPU. It also runs in the process of a
server, where TRL may not be installed.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch


def push(llm: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """
    Push weights, by their names in the checkpoint, through the reload of an engine, and clear its prefix cache. An
    engine that quantises weights computes their scales again.

    vLLM keeps the parts of a fused or padded tensor until they are complete, which may be after the last weight, when
    a gathered shard is already released. So each weight is copied.
    """
    copies = ((name, weight.detach().clone()) for name, weight in weights)
    with torch.no_grad():
        reload(llm.llm_engine.model_executor.driver_worker, weights_iterator=copies)
    llm.reset_prefix_cache()


def reload(worker: Any, **weights: Any) -> None:
    """
    Load weights into the model of a vLLM worker, and pack all of them for its CPU kernels. `weights` go to its
    `reload_weights`.

    vLLM packs weights for its CPU kernels after loading them, and again at a reload, with two exceptions. Experts are
    packed at the first load only. A checkpoint stores no weights for a head tied to the embedding, so the head would
    keep the packed weights of the first load.
    """
    model = worker.get_model()
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu:
        pack_experts_again(model)
    worker.reload_weights(**weights)
    if on_cpu:
        pack_tied_heads(model)


def pack_experts_again(model: torch.nn.Module) -> None:
    """Let vLLM pack experts at the next load, as at the first."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def pack_tied_heads(model: torch.nn.Module) -> None:
    """Pack layers that share their weight with another layer."""
    layers: list[Any] = [x for x in model.modules() if hasattr(x, "quant_method") and hasattr(x, "weight")]
    uses = Counter(id(layer.weight) for layer in layers)
    for layer in layers:
        if uses[id(layer.weight)] > 1:
            layer.quant_method.process_weights_after_loading(layer)
