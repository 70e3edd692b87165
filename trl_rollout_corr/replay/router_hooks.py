"""
Forward passes that take given experts.

`B` sequences of `S` tokens, in chunks; `L` layers with a router; `k` experts per token.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch

from ..correction.sums import Applied, SegmentedSums
from .routers import chosen_experts, take
from .sampled_experts import no_route


class RouterHooks:
    """
    Hooks on the routers of a model. Between passes the routers work as the model defines them.

    A pass with gradient keeps its routes until the next one or [`RouterHooks.end`], because gradient checkpointing
    computes layers again in the backward pass. Other forward passes do not get them.
    """

    def __init__(self, routers: Mapping[int, torch.nn.Module]) -> None:
        self._routes: torch.Tensor | None = None  # of the current chunk, (tokens, L, k)
        self._inside = False  # True in forward passes that get routes
        self._flipped: dict[int, torch.Tensor] = {}  # by layer, (tokens,)
        for place, router in enumerate(routers.values()):
            router.register_forward_hook(partial(self._replace, place))

    def _replace(self, place: int, router: torch.nn.Module, args: Any, output: tuple) -> tuple | None:
        again = not self._inside and _in_backward()
        if self._routes is None or not (self._inside or again):
            return None
        own = chosen_experts(router, output)
        if len(own) != len(self._routes):
            raise RuntimeError(
                f"`rollout_routing` is 'replay', but a router sees {len(own)} tokens and the batch "
                f"{len(self._routes)}: the model splits or packs sequences. Set `rollout_routing` to None."
            )
        given = self._routes[:, place].long()
        has_route = given != no_route(self._routes)
        if not again:
            other = given.sort(-1).values != own.sort(-1).values
            self._flipped[place] = (other & has_route).any(-1)
        return take(router, output, torch.where(has_route, given, own))

    @contextmanager
    def over(self, model: torch.nn.Module, routes: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """
        Replay routes, `(B, S, L, k)`, in the forward passes of a model over chunks of the batch, in order. The
        returned list fills chunk by chunk with the tokens whose experts differ in the trainer, `(B * S,)` boolean.
        """
        before, start, flipped = (self._routes, self._inside), 0, list[torch.Tensor]()

        def next_chunk(module: torch.nn.Module, args: Any, kwargs: Mapping[str, torch.Tensor]) -> None:
            nonlocal start
            self._settle(flipped)
            chunk = routes[start : start + len(kwargs["input_ids"])]
            if torch.is_grad_enabled() and len(chunk) != len(routes):
                raise RuntimeError(
                    "`rollout_routing` is 'replay', but a batch with gradient runs several forward passes. This "
                    "version of TRL is not supported: install a version of trl that this release was tested with."
                )
            self._routes, start = chunk.flatten(0, 1).to(kwargs["input_ids"].device), start + len(chunk)

        handle = model.register_forward_pre_hook(next_chunk, with_kwargs=True)
        self._inside = True
        try:
            yield flipped
            self._settle(flipped)
        finally:
            handle.remove()
            self._flipped, self._inside = {}, before[1]
            if not torch.is_grad_enabled():
                self._routes = before[0]

    def _settle(self, flipped: list[torch.Tensor]) -> None:
        if self._flipped:
            flipped.append(torch.stack([*self._flipped.values()]).any(0))
        self._flipped = {}

    def end(self) -> None:
        """Give the routers back to the model, after the backward pass."""
        self._routes, self._flipped = None, {}


def _in_backward() -> bool:
    """True in a backward pass, by the same test as `torch.utils.checkpoint`."""
    return torch._C._current_graph_task_id() != -1


class Flips(SegmentedSums):
    """Sums over tokens whose experts differ between sampler and trainer."""

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {"routing": ("routed", "flipped")}

    @classmethod
    def count(cls, flipped: torch.Tensor, mask: torch.Tensor) -> "Flips":
        """Sums over the tokens of the loss, `mask`; both `(B, T)`."""
        mask = mask.bool()
        counts = torch.stack([mask.sum(), (flipped & mask).sum()])
        return cls.of({"routing": counts.float()})

    def _metrics(self, s: dict[str, float], applied: Applied) -> dict[str, float]:
        return {"routing_flipped_fraction": s["flipped"] / s["routed"]} if s["routed"] else {}
