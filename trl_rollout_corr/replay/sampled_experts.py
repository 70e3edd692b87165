"""
Experts that the sampler chose, by sequence, and their tensor in a batch.

A sequence is a prompt with its completion, `n` tokens. The sampler never reads its last token, so there are `n - 1`
rows of experts, `(n - 1, L, k)`: `L` layers with a router, `k` experts per token. `B` sequences of `S` tokens with
padding.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch


def no_route(experts: torch.Tensor) -> int:
    """Index that means no expert: the largest of the type."""
    return torch.iinfo(experts.dtype).max


class SampledRoutes:
    """
    Routes by sequence. `layers` are the decoder layers with a router, among the `n_layers` that the sampler counts.

    Routes of two equal sequences are kept in the order of their generation.

    Attributes:
        problem (`str`, *optional*):
            Reason why routes of the sampler did not fit, for the first sequence since [`SampledRoutes.clear`].
    """

    def __init__(self, layers: Sequence[int], n_experts: int, top_k: int) -> None:
        self.layers, self.n_experts, self.top_k = list(layers), n_experts, top_k
        self.dtype = torch.uint8 if n_experts < 256 else torch.int16  # one index means no expert
        self._rows: dict[tuple[int, ...], list[torch.Tensor]] = {}  # the sequence that was generated last comes last
        self._in_order: list[tuple[tuple[int, ...], int]] = []  # sequences with their place in `_rows`, sorted
        self.problem: str | None = None

    def clear(self) -> None:
        """Forget all routes."""
        self._rows.clear()
        self._in_order, self.problem = [], None

    def try_keep(self, tokens: Sequence[int], experts: Any) -> None:
        """
        Keep the routes of a sequence like [`SampledRoutes.keep`], but note misfits as `problem` and raise no error.
        """
        try:
            self.keep(tokens, experts)
        except ValueError as error:
            self.problem = self.problem or str(error)

    def keep(self, tokens: Sequence[int], experts: Any) -> None:
        """
        Keep the routes of a sequence: the `tokens` of prompt and completion, and the `experts` of all but the last one
        in each decoder layer, `(n - 1, decoder layers, k)`. Raises a `ValueError` if routes do not fit.
        """
        if experts is None:
            raise ValueError(
                "vLLM returned no routes. Set `rollout_engine_kwargs: {enable_return_routed_experts: true}`, or "
                "`rollout_routing` to None."
            )
        routes, n = np.asarray(experts), len(tokens) - 1
        layers = routes.shape[1] if routes.ndim == 3 else 0
        if layers <= self.layers[-1] or routes.shape[2] != self.top_k:
            raise ValueError(
                f"The routes of a completion have shape {routes.shape}, but must have {n} tokens, one entry for each "
                f"decoder layer (at least {self.layers[-1] + 1}) and {self.top_k} experts. Sample from the trainer's "
                "model, or set `rollout_routing` to None."
            )
        routes = routes[:n, self.layers].astype(np.int64)
        if len(routes) < n or (routes < 0).any():
            n_complete = int((routes >= 0).all((1, 2)).sum())
            raise ValueError(
                f"The routes of a completion consist of {n_complete} rows for {n} tokens: the sampler did not return "
                "the routes of tokens that it took from its prefix cache, or of a part of a sequence. Set "
                f"`rollout_engine_kwargs: {{enable_prefix_caching: false}}`, and no `routed_experts_prompt_start`."
            )
        # several experts of a token differ, so they are not all 0; a single one may be 0 for all tokens
        smallest = 0 if self.top_k == 1 else 1
        if n and not smallest <= routes.max() < self.n_experts:
            raise ValueError(
                f"The largest expert in the routes of a completion is {routes.max()}, but must be {smallest} to "
                f"{self.n_experts - 1}: 0 alone stands for a kernel that does not record its experts. Set another "
                "`moe_backend` in `rollout_engine_kwargs`, such as triton, or `rollout_routing` to None."
            )
        key, rows = tuple(tokens), torch.from_numpy(routes).to(self.dtype)
        self._rows[key] = [*self._rows.pop(key, []), rows]
        self._in_order = []

    def _rows_of(self, tokens: tuple[int, ...], n_before: int) -> torch.Tensor:
        """
        Routes of the first tokens of a sequence, `(<= n - 1, L, k)`, which is in the batch `n_before` times already.

        The experts of a token depend only on the tokens up to it. So another sequence that begins with the same tokens
        provides valid routes for them. After a turn was cut, the latest such sequence is taken; otherwise the one that
        shares most tokens.
        """
        if routes := self._rows.get(tokens):
            return routes[n_before % len(routes)]
        if not self._in_order:
            self._in_order = sorted((sequence, i) for i, sequence in enumerate(self._rows))
        # sequences that begin alike are neighbours in the sorted order
        start, end = (bisect_left(self._in_order, (bound,)) for bound in (tokens, (*tokens, math.inf)))
        if start < end:
            longer, _ = max(self._in_order[start:end], key=itemgetter(1))
            return self._rows[longer][-1][: len(tokens) - 1]
        neighbours = [sequence for sequence, _ in self._in_order[max(start - 1, 0) : start + 1]]
        n, nearest = max([(_n_alike(sequence, tokens), sequence) for sequence in neighbours], default=(0, ()))
        rows = self._rows[nearest][-1] if n else torch.empty(0, len(self.layers), self.top_k, dtype=self.dtype)
        return rows[: min(n, len(tokens) - 1)]

    def place(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int) -> torch.Tensor:
        """
        Routes of a padded batch, `(B, S, L, k)`, on the CPU. Padding, the last token of a sequence, tokens that the
        sampler did not read and completions masked as a whole get no route.
        """
        ids, mask = input_ids.cpu(), attention_mask.bool().cpu()
        routes = torch.zeros(*ids.shape, len(self.layers), self.top_k, dtype=self.dtype)
        routes.fill_(no_route(routes))
        n_before: Counter[tuple[int, ...]] = Counter()
        for i in range(len(ids)):
            if not mask[i, -logits_to_keep:].any():
                continue
            tokens = tuple(ids[i][mask[i]].tolist())
            rows = self._rows_of(tokens, n_before[tokens])
            n_before[tokens] += 1
            routes[i, mask[i].nonzero()[: len(rows), 0]] = rows
        return routes

    def without(self, routes: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """
        Tokens of the loss, boolean, `(B, T)`, whose log-probability the trainer computes with its own experts, because
        the token before lacks a route in `routes`, `(B, S, L, k)`. `mask`, `(B, T)`, marks the tokens of the loss.
        """
        before = routes[:, -mask.shape[1] - 1 : -1, 0, 0]
        return mask.bool().cpu() & (before == no_route(routes))


def _n_alike(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Number of tokens that two sequences share at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
