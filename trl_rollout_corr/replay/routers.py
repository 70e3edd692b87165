"""
Router classes of transformers, and their combine weights for given experts.

`N` tokens, `E` experts, `k` experts per token.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


def _softmax(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    # w_i = p_i / sum_chosen p, p = softmax(logits); without the sum if `norm_topk_prob` is False
    chosen = logits.float().softmax(-1).gather(-1, experts)
    return chosen / chosen.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else chosen


def _softmax_of_chosen(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    # w = softmax(chosen logits)
    return logits.gather(-1, experts).softmax(-1)


def _sigmoid(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    # w_i = scale * s_i / sum_chosen s, s = sigmoid(logits); a bias affects only the choice
    chosen = logits.float().sigmoid().gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return chosen * getattr(router, "routed_scaling_factor", 1.0)


class Kind(NamedTuple):
    """Output of a router class: its formula, and the places of logits, weights and experts in its tuple."""

    weights: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
    places: tuple[int, int, int] = (0, 1, 2)


ROUTERS = {
    "Qwen2MoeTopKRouter": Kind(_softmax),
    "Qwen3MoeTopKRouter": Kind(_softmax),
    "Qwen3NextTopKRouter": Kind(_softmax),
    "Qwen3_5MoeTopKRouter": Kind(_softmax),
    "MixtralTopKRouter": Kind(_softmax),
    "OlmoeTopKRouter": Kind(_softmax),
    "FlexOlmoTopKRouter": Kind(_softmax),
    "GptOssTopKRouter": Kind(_softmax_of_chosen),
    "GraniteMoeTopKRouter": Kind(_softmax_of_chosen, (2, 1, 0)),
    "Glm4MoeTopkRouter": Kind(_sigmoid),
    "Glm4MoeLiteTopkRouter": Kind(_sigmoid),
    "DeepseekV3TopkRouter": Kind(_sigmoid),
    "MiniMaxM2TopKRouter": Kind(_sigmoid),
}


def take(router: torch.nn.Module, output: tuple, experts: torch.Tensor) -> tuple:
    """
    Output of a router with other experts, `(N, k)`. Their weights come from the logits of the output, so the router
    still gets a gradient.
    """
    kind = ROUTERS[type(router).__name__]
    at_logits, at_weights, at_experts = kind.places
    replaced = list(output)
    weights = kind.weights(router, output[at_logits], experts)
    replaced[at_weights] = weights.to(output[at_weights].dtype)
    replaced[at_experts] = experts.to(output[at_experts].dtype)
    return tuple(replaced)


def chosen_experts(router: torch.nn.Module, output: tuple) -> torch.Tensor:
    """Experts in the output of a router, `(N, k)`."""
    experts: torch.Tensor = output[ROUTERS[type(router).__name__].places[2]]
    return experts


def find_routers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Routers of a model by the index of their decoder layer. A `ValueError` without one, or with an unknown class."""
    routers: dict[int, torch.nn.Module] = {}
    unknown = set()
    for name, module in model.named_modules():
        kind, children = type(module).__name__, dict(module.named_children())
        if kind in ROUTERS:
            layer = re.search(r"layers\.(\d+)\.", name)
            if layer is None or int(layer[1]) in routers:
                unknown.add(f"`{kind}` at {name!r}, which is not the only router of a decoder layer")
            else:
                routers[int(layer[1])] = module
        elif re.search(r"(Router|TopKGate|Gating)$", kind) or (
            "experts" in children and not {type(child).__name__ for child in children.values()} & ROUTERS.keys()
        ):
            unknown.add(f"`{kind}`")
    if unknown or not routers:
        got = f"the model routes with {', '.join(sorted(unknown))}" if unknown else "the model contains no router"
        raise ValueError(
            f"`rollout_routing` is 'replay', but {got}. Router classes that can be replayed: {', '.join(ROUTERS)}. "
            "Set `rollout_routing` to None."
        )
    return dict(sorted(routers.items()))
