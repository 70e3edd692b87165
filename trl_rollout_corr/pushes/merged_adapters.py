"""
A push of a PEFT adapter that leaves the base model as it is.

TRL pushes an adapter by merging it into the base, sending the base, and unmerging it. In bfloat16 that changes the
base a little at every push. Here PEFT merges each layer into a copy in float32, which is rounded once and sent.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import Module, Parameter


# Types of a base whose copy PEFT can merge into
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def leaving_base_alone(model: Any, fsdp_version: int | None = None) -> Iterator[None]:
    """
    Context of a push in which `merge_adapter` of a PEFT model changes no weight. Until `unmerge_adapter`,
    `named_parameters` returns the merged weights instead.

    PEFT merges as TRL asks where a merge is more than an addition to parameters of the base
    ([`merges_into_parameters`]). An exception in the context leaves no layer merged either way.
    """
    layers = _layers_with_adapters(model)
    # FSDP1 flattens parameters, and its modules are read without asking the model
    copies = bool(layers) and fsdp_version != 1 and all(map(_can_be_copied, layers))
    merged: MergedWeights | None = None
    named_parameters: Any
    merge: Any
    unmerge: Any
    named_parameters, merge, unmerge = (
        getattr(model, name, None) for name in ("named_parameters", "merge_adapter", "unmerge_adapter")
    )

    def merge_adapter(*args: Any, **kwargs: Any) -> None:
        nonlocal merged
        model.base_model._check_merge_allowed()
        if all(map(merges_into_parameters, _one_of_each_kind(layers))):
            merged = MergedWeights(layers)
        else:
            merge(*args, **kwargs)

    def unmerge_adapter() -> None:
        nonlocal merged
        if merged is None:
            unmerge()
        merged = None

    def named_merged_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in named_parameters(*args, **kwargs):
            yield name, parameter if merged is None else merged[parameter]

    with _unmerging_after_failure(layers), ExitStack() as replaced:
        if copies:
            replaced.enter_context(patch.object(model, "merge_adapter", merge_adapter))
            replaced.enter_context(patch.object(model, "unmerge_adapter", unmerge_adapter))
            replaced.enter_context(patch.object(model, "named_parameters", named_merged_parameters))
        yield


def _layers_with_adapters(model: Any) -> list[Any]:
    """Layers of PEFT with an adapter; none if the model has nothing to merge."""
    if not hasattr(model, "merge_adapter"):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


@contextmanager
def _unmerging_after_failure(layers: list[Any]) -> Iterator[None]:
    """Context that unmerges, after an exception, the layers that PEFT has merged in it."""
    separate = [layer for layer in layers if not layer.merged]
    try:
        yield
    except BaseException:
        from peft.tuners.tuners_utils import onload_layer

        for layer in separate:
            if layer.merged:
                with onload_layer(layer):
                    layer.unmerge()
        raise


def _can_be_copied(layer: Any) -> bool:
    """True if the base layer itself has all of its parameters, in a type and a place to compute with."""
    base = layer.get_base_layer()
    own = [*base.parameters(recurse=False)]
    return (
        not layer.merged
        and len(own) == len([*base.parameters()])
        and all(p.dtype in FLOATS and p.device.type != "meta" for p in own)
    )


def _one_of_each_kind(layers: list[Any]) -> Iterable[Any]:
    """A layer of each kind: what its merge does depends on its class, and on the parameters of its base."""

    def kind(layer: Any) -> tuple[Any, ...]:
        base = layer.get_base_layer()
        return type(layer), type(base), *(name for name, p in base._parameters.items() if p is not None)

    return {kind(layer): layer for layer in layers}.values()


def merges_into_parameters(layer: Any) -> bool:
    """
    True if a merge of a layer changes only the values of parameters of its base. A merge may also put another module
    in the place of the base, as in LN tuning, or give the base another parameter.
    """
    base = layer.get_base_layer()
    names = [*base._parameters]
    with _merged_into_copies([layer]):
        return layer.get_base_layer() is base and [*base._parameters] == names


class MergedWeights:
    """
    Weights of a base model with its active adapters merged, by parameter of the base. They are computed for one layer
    at a time, so that at most one layer is in memory twice.
    """

    def __init__(self, layers: list[Any]) -> None:
        # by parameter of their base; several for a tied weight and for experts
        self._layers: dict[int, list[Any]] = {}
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


def _merge(layers: list[Any]) -> dict[int, torch.Tensor]:
    """Merged weights of layers that share a parameter, by the identity of the parameter in the base."""
    bases = [layer.get_base_layer() for layer in layers]
    own = [(base, name, p) for base in bases for name, p in base._parameters.items() if p is not None]
    with _merged_into_copies(layers):
        return {id(p): base._parameters[name].detach().to(p.dtype, copy=True) for base, name, p in own}


@contextmanager
@torch.no_grad()
def _merged_into_copies(layers: list[Any]) -> Iterator[None]:
    """
    Context in which layers are merged into copies of their base in float32 or wider. The layers are as before
    afterwards: nothing is unmerged, because not every tuner can, and an unmerged weight is rounded.
    """
    copies: dict[int, Parameter] = {}

    def copy(parameter: torch.Tensor) -> Parameter:
        if id(parameter) not in copies:
            precise = torch.promote_types(parameter.dtype, torch.float32)
            copies[id(parameter)] = Parameter(parameter.detach().to(precise, copy=True), requires_grad=False)
        return copies[id(parameter)]

    def precise(parameter: torch.Tensor) -> torch.Tensor:
        half = parameter.dtype in FLOATS[2:]
        return Parameter(parameter.detach().float(), requires_grad=False) if half else parameter

    with ExitStack() as kept:
        for module in {id(module): module for layer in layers for module in layer.modules()}.values():
            kept.enter_context(_as_before(module))
        for base in {id(base): base for base in (layer.get_base_layer() for layer in layers)}.values():
            _change_parameters(base, copy)
        for layer in layers:
            parts = [child for name, child in layer.named_children() if name != "base_layer"]
            for part in (module for child in parts for module in child.modules()):
                _change_parameters(part, precise)
        for layer in layers:
            layer.merge()
        yield


def _change_parameters(module: Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = change(parameter)  # type: ignore[assignment]  # it works as a parameter


@contextmanager
def _as_before(module: Module) -> Iterator[None]:
    """
    Context that gives a module its attributes back: parameters and modules, and what PEFT notes of a merge in flags,
    lists and dictionaries.
    """
    attributes = dict(vars(module))
    contents = {name: _content(x) for name, x in attributes.items() if isinstance(x, dict | list | set)}
    try:
        yield
    finally:
        _restore(vars(module), attributes)
        for name, content in contents.items():
            _restore(attributes[name], content)


def _content(container: dict[Any, Any] | list[Any] | set[Any]) -> dict[Any, Any] | list[Any] | set[Any]:
    """
    A plain copy. DeepSpeed's dictionary of parameters can neither be copied nor be read by key without a gather.
    """
    if isinstance(container, dict):
        return dict(container.items())
    return list(container) if isinstance(container, list) else set(container)


def _restore(container: Any, content: Any) -> None:
    """
    Give a dictionary, a list or a set its content back. A dictionary with the same keys keeps its size all along,
    because TRL iterates over parameters meanwhile.
    """
    if isinstance(container, dict):
        for key in [key for key in container if key not in content]:
            del container[key]
        container.update(content)
    elif isinstance(container, list):
        container[:] = content
    else:
        container.clear()
        container.update(content)
