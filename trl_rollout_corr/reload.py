"""New weights for a vLLM engine that runs in this process."""

from collections.abc import Iterable
from typing import Any

import torch


def push(llm: Any, weights: Iterable[tuple[str, torch.Tensor]]):
    """
    Push weights through vLLM's own reload, and forget what is cached with the old ones.

    vLLM repacks weights for its CPU kernels after loading them. Its reload undoes and redoes that, but for experts, which it
    packs at the first load only: a mixture of experts would sample from weights in the wrong order.

    Args:
        llm (`vllm.LLM`):
            The engine, in this process.
        weights (`Iterable[tuple[str, torch.Tensor]]`):
            Weights by their names in the checkpoint. Experts may be one tensor of a layer or one each.
    """
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    if next(runner.model.parameters()).device.type == "cpu":
        pack_experts_again(runner.model)
    with torch.no_grad():
        runner.reload_weights(weights_iterator=iter(weights))
    llm.reset_prefix_cache()


def pack_experts_again(model: torch.nn.Module):
    """Let vLLM take the next load of experts for the first, in which it packs them."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
