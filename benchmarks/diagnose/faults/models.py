"""Changes of weights and of forward passes, and how they get into the sampler and the trainer, and out again."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trl_rollout_corr.pushes.reloading import push

from .fault import Fault


Weights = Iterable[tuple[str, torch.Tensor]]


# Weights: a name and a weight in, the weight that the sampler gets out -----------------------------------------------------


def _is_matrix(name: str, weight: torch.Tensor) -> bool:
    """Weights that are quantised: matrices of the layers, neither the embedding nor the head."""
    return weight.dim() >= 2 and "embed" not in name and "lm_head" not in name


def int8(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Eight bits per weight, one scale per output channel, rounded to the nearest."""
    return _on_grid(weight, 127) if _is_matrix(name, weight) else weight


def int4(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Four bits per weight, one scale per 32 weights of an output channel."""
    if not _is_matrix(name, weight):
        return weight
    groups = weight.unflatten(-1, (-1, 32)) if weight.shape[-1] % 32 == 0 else weight.unsqueeze(-2)
    return _on_grid(groups, 7).reshape(weight.shape)


def fp8(name: str, weight: torch.Tensor) -> torch.Tensor:
    """E4M3, one scale per matrix."""
    if not _is_matrix(name, weight):
        return weight
    scale = weight.abs().amax().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return ((weight / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale).to(weight.dtype)


def noisy(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Noise of two percent of the size of a weight."""
    if not _is_matrix(name, weight):
        return weight
    dice = torch.Generator().manual_seed(sum(map(ord, name)))
    return weight + 0.02 * weight.float().std() * torch.randn(weight.shape, generator=dice)


def _on_grid(weight: torch.Tensor, levels: int) -> torch.Tensor:
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / levels
    return (weight / scale).round() * scale


def merged(rank: int, size: float, seed: int = 0) -> Callable[[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """
    An adapter whose update has `size` times the root mean square of the weight. Returns a change of a weight, by name, to the
    sum, and to the sum as it is once rounded to bfloat16.
    """

    def change(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if weight.dim() != 2 or not _is_matrix(name, weight):
            return weight, weight
        dice = torch.Generator().manual_seed(seed * 7919 + sum(map(ord, name)))
        a, b = (torch.randn(n, rank, generator=dice) for n in weight.shape)
        update = a @ b.T
        update *= size * weight.float().std() / update.std()
        total = weight.float() + update
        return total, total.bfloat16().float()

    return change


@contextmanager
def sampling_from(llm: Any, weights: Weights, fault: Fault) -> Iterator[None]:
    """Let a vLLM engine of this process sample from weights with a fault, and put the right ones back."""
    if fault.weights is None:
        yield
        return
    weights = list(weights)
    push(llm, ((name, fault.weights(name, weight)) for name, weight in weights))
    try:
        yield
    finally:
        push(llm, weights)


# The forward pass of the trainer ------------------------------------------------------------------------------------------


@contextmanager
def training_on(model: torch.nn.Module, fault: Fault) -> Iterator[None]:
    """Let a model of transformers score with a fault."""
    if fault.trainer is None:
        yield
        return
    undo = fault.trainer(model)
    try:
        yield
    finally:
        undo()


def dropout(p: float) -> Callable[[torch.nn.Module], Callable[[], None]]:
    """Dropout of attention, as in training mode of a model whose configuration has `attention_dropout`."""

    def inject(model: torch.nn.Module) -> Callable[[], None]:
        attentions: list[Any] = [module for module in model.modules() if hasattr(module, "attention_dropout")]
        before = [(module, module.attention_dropout, module.training) for module in attentions]
        if not before:
            raise ValueError(
                "the model has no attention with `attention_dropout`, so that no dropout can be injected."
            )

        def undo():
            for module, value, training in before:
                module.attention_dropout, module.training = value, training

        for module, _, _ in before:
            module.attention_dropout, module.training = p, True
        return undo

    return inject


def head_in(dtype: torch.dtype) -> Callable[[torch.nn.Module], Callable[[], None]]:
    """The head of a model computes in another type than the head of the sampler."""

    def inject(model: torch.nn.Module) -> Callable[[], None]:
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        forward = head.forward

        def in_dtype(hidden: torch.Tensor) -> torch.Tensor:
            logits = torch.nn.functional.linear(hidden.to(dtype), head.weight.to(dtype))
            return logits.to(torch.promote_types(dtype, hidden.dtype))

        head.forward = in_dtype
        return lambda: setattr(head, "forward", forward)

    return inject
