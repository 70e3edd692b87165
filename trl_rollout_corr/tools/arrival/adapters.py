"""
A push of a PEFT adapter that leaves the base model as it is.

TRL pushes an adapter by merging it into the base, sending the base, and unmerging it. In bfloat16
that changes the base a little at every push. Here PEFT merges each layer into a copy in float32,
which is rounded once and sent.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import Module, Parameter


# Types of a base whose copy PEFT can merge into
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def leaving_base_alone(model: Any, fsdp_version: int | None = None) -> Iterator[bool]:
    """
    Context of a push in which `merge_adapter` of a PEFT model changes no weight. Until
    `unmerge_adapter`, `named_parameters` returns the merged weights instead. Yields True if that
    works; otherwise TRL merges.
    """
    layers = _layers_with_adapters(model)
    # FSDP1 flattens parameters, and its modules are read without asking the model
    if not layers or fsdp_version == 1 or not all(map(_can_be_copied, layers)):
        yield False
        return
    merged: MergedWeights | None = None
    named_parameters = model.named_parameters

    def merge_adapter(*args: Any, **kwargs: Any) -> None:
        nonlocal merged
        model.base_model._check_merge_allowed()
        merged = MergedWeights(layers)

    def unmerge_adapter() -> None:
        nonlocal merged
        merged = None

    def named_merged_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in named_parameters(*args, **kwargs):
            yield name, parameter if merged is None else merged[parameter]

    with (
        patch.object(model, "merge_adapter", merge_adapter),
        patch.object(model, "unmerge_adapter", unmerge_adapter),
        patch.object(model, "named_parameters", named_merged_parameters),
    ):
        yield True


def _layers_with_adapters(model: Any) -> list[Any]:
    """Layers of PEFT with an adapter; none if the model has nothing to merge."""
    if not hasattr(model, "merge_adapter"):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def _can_be_copied(layer: Any) -> bool:
    """
    True if a merge changes only parameters of the base layer itself, in a type and a place to
    compute with.
    """
    base = layer.get_base_layer()
    own = [*base.parameters(recurse=False)]
    return (
        not layer.merged
        and len(own) == len([*base.parameters()])
        and all(p.dtype in FLOATS and p.device.type != "meta" for p in own)
    )


class MergedWeights:
    """
    Weights of a base model with its active adapters merged, by parameter of the base. They are
    computed for one layer at a time, so that at most one layer is in memory twice.
    """

    def __init__(self, layers: list[Any]) -> None:
        self._layers: dict[
            int, list[Any]
        ] = {}  # by parameter of their base; several for a tied weight and for experts
        for layer in layers:
            for parameter in layer.get_base_layer().parameters(recurse=False):
                self._layers.setdefault(id(parameter), []).append(layer)
        self._made: dict[int, torch.Tensor] = {}  # merged weights of the latest layer, by parameter

    def __getitem__(self, parameter: torch.Tensor) -> torch.Tensor:
        """The merged weight of a parameter of the base; any other parameter as it is."""
        layers = self._layers.get(id(parameter))
        if layers is None:
            return parameter
        if id(parameter) not in self._made:
            self._made = _merge(layers)
        return self._made.pop(id(parameter))


@torch.no_grad()
def _merge(layers: list[Any]) -> dict[int, torch.Tensor]:
    """
    Merged weights of layers that share a parameter, by the identity of the parameter in the base.
    """
    copies: dict[int, tuple[torch.Tensor, Parameter]] = {}

    def copy(parameter: torch.Tensor) -> Parameter:
        if id(parameter) not in copies:
            precise = torch.promote_types(parameter.dtype, torch.float32)
            copied = Parameter(parameter.detach().to(precise, copy=True), requires_grad=False)
            copies[id(parameter)] = parameter, copied
        return copies[id(parameter)][1]

    def precise(parameter: torch.Tensor) -> torch.Tensor:
        return (
            Parameter(parameter.detach().float(), requires_grad=False) if parameter.dtype in FLOATS[2:] else parameter
        )

    with ExitStack() as replaced:
        for base in {id(base): base for base in (layer.get_base_layer() for layer in layers)}.values():
            replaced.enter_context(_with_parameters(base, copy))
        for layer in layers:
            parts = [child for name, child in layer.named_children() if name != "base_layer"]
            for part in (module for child in parts for module in child.modules()):
                replaced.enter_context(_with_parameters(part, precise))
        for layer in layers:
            layer.merge()
        merged = {key: copied.detach().to(of.dtype, copy=True) for key, (of, copied) in copies.items()}
        for layer in reversed(layers):
            if layer.merged:
                _forget_merge(layer)
    return merged


def _forget_merge(layer: Any) -> None:
    """Let PEFT forget that a layer was merged, into copies that nobody needs any more."""
    from peft.tuners.lora import Linear

    if type(layer) is Linear and not getattr(layer, "lora_variant", True):
        layer.merged_adapters.clear()  # taking the adapter away from the copies takes as long as the merge
    else:
        layer.unmerge()  # which forgets what a variant, such as DoRA, keeps


@contextmanager
def _with_parameters(module: Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Context in which a module's own parameters are replaced."""
    before = dict(module._parameters)
    try:
        for name, parameter in before.items():
            if parameter is not None:
                module._parameters[name] = change(parameter)  # type: ignore[assignment]  # it works as a parameter
        yield
    finally:
        for name, parameter in before.items():
            module._parameters[name] = parameter
