"""
Products of 8-bit numbers on a CPU, faster.

PyTorch turns all 8-bit weights into float32 at each product, and has no fast kernel for scales of whole tensors. Here weights
are kept in float32 during a generation. The numbers are the same, up to the order of a sum in float32.
"""

from typing import Any

import torch
from torch._inductor.select_algorithm import extern_kernels
from vllm import LLM


def keep_weights_in_float32() -> None:
    """Let the compiled engines of this process multiply 8-bit numbers in this way."""
    kept: dict[tuple[int, torch.Size], torch.Tensor] = {}
    generate = LLM.generate

    def generate_with_new_weights(llm: LLM, *args: Any, **kwargs: Any) -> Any:
        kept.clear()  # a push changes weights in place
        return generate(llm, *args, **kwargs)

    def scaled_mm(
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        *,
        out: torch.Tensor,
        **how: Any,
    ) -> torch.Tensor:
        key = b.data_ptr(), b.shape
        if key not in kept:
            kept[key] = b.float()
        return out.copy_(torch.mm(a.float(), kept[key]).mul_(scale_a).mul_(scale_b))

    LLM.generate = generate_with_new_weights
    extern_kernels._scaled_mm = scaled_mm
