"""
Replay of the experts that the sampler chose: `rollout_routing`.

`B` completions, `P` and `T` tokens of prompts and completions with padding, `L` layers with a router, `k` experts per
token.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..messages import notify
from .capture import RecordingEngine
from .router_hooks import RouterHooks
from .routers import find_routers
from .sampled_experts import SampledRoutes


ROUTES = "rollout_corr_routes"  # column of a batch, (B, P + T, L, k), experts that the sampler chose; on the CPU


class Experts:
    """
    Replay of experts in models with routers: the policy first, then a reference, both without wrappers. `unwrap`
    returns a model without its wrappers.
    """

    def __init__(self, models: Sequence[torch.nn.Module], unwrap: Callable[[Any], torch.nn.Module]) -> None:
        self.unwrap = unwrap
        self._hooks = {id(model): RouterHooks(find_routers(model)) for model in models}
        routers = find_routers(models[0])
        one: Any = next(iter(routers.values()))
        self.sampled = SampledRoutes([*routers], one.num_experts, one.top_k)
        self._was_routed = False  # True once a token of a loss came with a route
        self._warned_unrouted = False  # True once tokens without routes were reported

    def recording(self, llm: Any) -> RecordingEngine:
        """vLLM's engine, which keeps the routes of all its completions from now on."""
        return RecordingEngine(llm, self.sampled)

    def clear(self) -> None:
        self.sampled.clear()

    def place(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
    ) -> dict[str, torch.Tensor]:
        return {ROUTES: self.sampled.place(input_ids, attention_mask, logits_to_keep)}

    def check(self, batch: Mapping[str, torch.Tensor], loss_mask: torch.Tensor) -> None:
        """
        Refuse a sampler whose first generation comes without any route. Later, tokens without routes are only
        reported.
        """
        mask = loss_mask.bool().cpu()
        without = self.sampled.without(batch[ROUTES], mask)
        n, total = int(without.sum()), int(mask.sum())
        first = n == total and not self._was_routed
        self._was_routed |= n < total
        if not n:
            return
        reason = self.sampled.problem or (
            "The sampler did not generate their completions, as after text was added or with images. Keep sampled "
            "tokens as they are, or set `rollout_routing` to None. A `rollout_func` gives routes to "
            "`trainer.keep_routes`."
        )
        missing = f"`rollout_routing` is 'replay', but {n} of {total} tokens of the loss lack routes"
        if first:
            raise ValueError(f"{missing}, so nothing can be replayed. {reason}")
        if not self._warned_unrouted:
            self._warned_unrouted = True
            notify(f"{missing}: the trainer chooses their experts itself. {reason} This message appears once.")

    def alone(self, batch: Mapping[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
        if ROUTES not in batch:
            return {}
        completion = batch["completion_mask"][i].bool()
        if not completion.any():  # masked as a whole: its first token stands for it, without a route
            completion = torch.arange(len(completion), device=completion.device) == 0
        mask = torch.cat([batch["prompt_mask"][i].bool(), completion]).cpu()
        return {ROUTES: batch[ROUTES][i][mask][None]}

    @contextmanager
    def over(self, model: Any, routes: torch.Tensor | None, *, trains: bool) -> Iterator[list[torch.Tensor]]:
        """
        Replay routes, `(B, S, L, k)`, in the forward passes of a model over a batch. `trains` is true for the policy
        in its loss. The returned list fills with the tokens whose experts differ in the trainer, see
        [`RouterHooks.over`].
        """
        hooks = self._hooks.get(id(self.unwrap(model)))
        replayed = nullcontext(list[torch.Tensor]()) if hooks is None or routes is None else hooks.over(model, routes)
        with replayed as flipped:
            yield flipped
        if trains and routes is not None and not flipped:
            raise RuntimeError(
                "`rollout_routing` is 'replay', but no router of the model was called in a forward pass of the "
                "policy: the model was replaced after the trainer was built. Set `rollout_routing` to None."
            )

    def end(self) -> None:
        for hooks in self._hooks.values():
            hooks.end()
