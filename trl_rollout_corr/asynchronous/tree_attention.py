"""
Attention over packed rows on a CPU, in place of TRL's FlashAttention-3, which needs a GPU.

TRL packs the samples of a micro-batch into one row in which shared prefixes appear once: a tree. Time, and memory for a
boolean mask, grow with the square of the row.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from .trl_parts import TREE_ATTENTION


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    Attention of a packed row of `N` tokens. Each token attends to the tokens before it on its path from the root.

    Queries are `(1, H, N, D)`, keys and values `(1, K, N, D)`: each of the `K` heads is shared by `H / K` heads of the
    queries. The output is `(1, N, H, D)`. `tree_kv_index`, `(P,)`, has the index in the row of each token on the paths of all
    segments, one path after the other; `tree_cu_seqlens_q` and `tree_cu_seqlens_k`, `(S + 1,)`, have the start and end of the
    `S` segments in the row, and of their paths in `tree_kv_index`. The tree defines the mask, so `attention_mask` is not used.
    """
    if softcap:
        raise NotImplementedError(
            f"The model bounds its attention scores (softcap={softcap}), which the attention for packed rows on a CPU does "
            "not support. Train it on a GPU, or use `RolloutCorrectedGRPOTrainer`."
        )
    visible = visible_tokens(tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k, sliding_window)
    grouped = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling, enable_gqa=grouped)
    return output.transpose(1, 2), None


def visible_tokens(
    kv_index: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, sliding_window: int | None = None
) -> torch.Tensor:
    """Attention mask, boolean, `(N, N)`, from arguments of [`tree_attention`]."""
    lengths, path_lengths = (cu.diff().long() for cu in (cu_seqlens_q, cu_seqlens_k))
    segments = torch.arange(len(lengths), device=kv_index.device)
    path_of = segments.repeat_interleave(path_lengths)  # (P,)
    depth_on_path = torch.arange(len(kv_index), device=kv_index.device) - cu_seqlens_k.long()[path_of]
    n = int(lengths.sum())
    depth = torch.empty(n, dtype=torch.long, device=kv_index.device).scatter_(0, kv_index, depth_on_path)
    on_path = torch.zeros(len(lengths), n, dtype=torch.bool, device=kv_index.device)
    on_path[path_of, kv_index] = True
    distance = depth[:, None] - depth[None]
    visible = on_path[segments.repeat_interleave(lengths)] & (distance >= 0)
    return visible if not sliding_window else visible & (distance < sliding_window)


def register_tree_attention() -> None:
    """Replace TRL's attention in models that are built afterwards."""
    AttentionInterface.register(TREE_ATTENTION, tree_attention)
