"""
Routing replay in the trainers: `rollout_routing`. Stands between the correction and TRL's trainer among the bases.

`B` completions, `P` and `T` tokens of prompts and completions with padding, `L` layers with a router, `k` experts per token.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ..messages import report
from ..routing.capture import RecordingEngine
from ..routing.replay import Flips, Replay
from ..routing.routers import find_routers
from ..routing.sampled import SampledRoutes
from .batch import ROUTES


if TYPE_CHECKING:
    from .core import CorrectionCore as _Host
else:
    _Host = object


class RoutingReplay(_Host):
    """Replays the sampler's experts in TRL's forward passes over sampled completions. Without `rollout_routing`, nothing."""

    _replay: dict[int, Replay] | None = None  # by identity of the model
    _was_routed = False  # True once a token of a loss had a route
    _told_without = False  # True once tokens without routes were reported

    def __init__(self, model: Any, reward_funcs: Any, args: Any, *further: Any, **kwargs: Any) -> None:
        super().__init__(model, reward_funcs, args, *further, **kwargs)
        if args.rollout_routing is None:
            return
        models = [self._bare(found) for found in (self.model, getattr(self, "ref_model", None)) if found is not None]
        routers = find_routers(models[0])
        one: Any = next(iter(routers.values()))
        self._sampled = SampledRoutes([*routers], one.num_experts, one.top_k)
        self._replay = {id(found): Replay(find_routers(found)) for found in models}
        if self.use_vllm:
            self.vllm_generation.llm = RecordingEngine(self.vllm_generation.llm, self._sampled)

    def _bare(self, model: Any) -> torch.nn.Module:
        found: torch.nn.Module = self.accelerator.unwrap_model(model, keep_fp32_wrapper=True)
        return found

    def keep_routes(self, tokens: Sequence[int], experts: Any) -> None:
        """Take the routes of a sequence from a `rollout_func`: [`~trl_rollout_corr.routing.sampled.SampledRoutes.keep`]."""
        if self._replay is None:
            raise ValueError("`rollout_routing` is None, so routes have no effect. Set it to 'replay'.")
        self._sampled.keep(tokens, experts)

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        if (self.args.rollout_routing is None) != (self._replay is None):
            raise ValueError(
                f"`rollout_routing` is {self.args.rollout_routing!r}, but had another value when the trainer was built. Build "
                "the trainer with the new one."
            )
        if self._replay is None:
            return super()._generate_and_score_completions(*args, **kwargs)
        self._sampled.clear()
        output = super()._generate_and_score_completions(*args, **kwargs)
        output[ROUTES] = self._sampled.place(*_sequences(output), output["completion_ids"].shape[1])
        self._judge_routes(output)
        self._sampled.clear()
        return output

    def _judge_routes(self, output: dict[str, Any]) -> None:
        """Refuse a sampler whose first generation has no routes at all. Later, tokens without routes are only reported."""
        mask = self._loss_mask(output).bool().cpu()
        without = self._sampled.without(output[ROUTES], mask)
        n, total = int(without.sum()), int(mask.sum())
        first = n == total and not self._was_routed
        self._was_routed |= n < total
        if not n:
            return
        reason = self._sampled.problem or (
            "The sampler did not generate their completions, as after text was added or with images. Keep sampled tokens as "
            "they are, or set `rollout_routing` to None. A `rollout_func` gives routes to `trainer.keep_routes`."
        )
        found = f"`rollout_routing` is 'replay', but {n} of {total} tokens of the loss have no routes"
        if first:
            raise ValueError(f"{found}, so nothing can be replayed. {reason}")
        self._tell_once(f"{found}: the trainer chooses their experts itself. {reason}")

    def _tell_once(self, message: str) -> None:
        """Report the first tokens that have no routes."""
        if not self._told_without:
            self._told_without = True
            report(f"{message} This is said once.")

    def _routes_of(self, input_ids: torch.Tensor, mask: torch.Tensor, n: int) -> torch.Tensor | None:
        """Routes of a padded batch, `(B, P + T, L, k)`; `None` for a forward pass that is not TRL's."""
        batch = self._batch_of_pass
        if batch is None:
            scoring = self._scoring
            return None if scoring is None or scoring.paused else self._sampled.place(input_ids, mask, n)
        if ROUTES not in batch:
            self._tell_once(
                f"`rollout_routing` is 'replay', but a batch has no `{ROUTES}`, as if other code had made it: the trainer "
                "chooses its experts itself."
            )
            return None
        routes: torch.Tensor = batch[ROUTES]
        if routes.shape[:2] == input_ids.shape:
            return routes
        # sequences of the batch scored one by one, without padding
        alone = SampledRoutes(self._sampled.layers, self._sampled.n_experts, self._sampled.top_k)
        alone.keep_batch(*_sequences(batch), routes)
        return alone.place(input_ids, mask, n)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: Any, *args: Any, **kwargs: Any
    ) -> Any:
        forward = super()._get_per_token_logps_and_entropies
        replay = None if self._replay is None else self._replay.get(id(self._bare(model)))
        routes = None if replay is None else self._routes_of(input_ids, attention_mask, logits_to_keep)
        over: AbstractContextManager = nullcontext()
        if replay is not None and routes is not None:
            over = replay.over(model, routes)
        with over as flipped:
            outputs = forward(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        call = self._loss_call
        if self._replay is not None and call is not None and ROUTES in call.batch and torch.is_grad_enabled():
            if not flipped:
                raise RuntimeError(
                    "`rollout_routing` is 'replay', but no router of the model was called in a forward pass of the policy: "
                    "the model was replaced after the trainer was built. Set `rollout_routing` to None."
                )
            # the experts of a token decide the log-probability of the next one
            here = torch.cat(flipped).view(input_ids.shape)[:, -logits_to_keep - 1 : -1]
            self._observer.add(self._now.mode, Flips.count(here, self._loss_mask(call.batch)))
        return outputs

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().training_step(*args, **kwargs)
        finally:
            for replay in (self._replay or {}).values():
                replay.end()


def _sequences(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask of prompts and completions, each `(B, P + T)`."""
    ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    return ids, mask
