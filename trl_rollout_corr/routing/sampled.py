"""
Experts that the sampler chose, by sequence, and their tensor in a batch.

A sequence is a prompt with its completion, `n` tokens. The sampler never reads its last token, so there are `n - 1` rows of
experts, `(n - 1, L, k)`: `L` layers with a router, `k` experts per token. `B` sequences of `S` tokens with padding.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def no_route(experts: torch.Tensor) -> int:
    """Index that stands for no expert: the largest of the type."""
    return torch.iinfo(experts.dtype).max


class SampledRoutes:
    """
    Routes by sequence. `layers` are the decoder layers with a router, of the `n_layers` that the sampler counts.

    Routes of two equal sequences are kept in the order of their generation.
    """

    def __init__(self, layers: Sequence[int], n_experts: int, top_k: int) -> None:
        self.layers, self.n_experts, self.top_k = list(layers), n_experts, top_k
        self.dtype = torch.uint8 if n_experts < 256 else torch.int16  # one index is for no expert
        self._rows: defaultdict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)

    def clear(self) -> None:
        """Forget all routes."""
        self._rows.clear()

    def keep(self, tokens: Sequence[int], experts: Any) -> None:
        """
        Keep the routes of a sequence: `tokens` of prompt and completion, and `experts` of each but the last in each decoder
        layer, `(n - 1, decoder layers, k)`.

        Raises:
            `ValueError`: if rows are missing, if the shape does not fit, or if all experts are 0.
        """
        if experts is None:
            raise ValueError(
                "vLLM returned no routes. Set `rollout_engine_kwargs: {enable_return_routed_experts: true}`, or "
                "`rollout_routing` to None."
            )
        found, n = np.asarray(experts), len(tokens) - 1
        layers = found.shape[1] if found.ndim == 3 else 0
        if layers <= self.layers[-1] or found.shape[2] != self.top_k:
            raise ValueError(
                f"The routes of a completion have shape {found.shape}, but must have {n} tokens, one entry for each decoder "
                f"layer (at least {self.layers[-1] + 1}) and {self.top_k} experts. Sample from the trainer's model, or set "
                "`rollout_routing` to None."
            )
        found = found[:n, self.layers].astype(np.int64)
        if len(found) < n or (found < 0).any():
            known = int((found >= 0).all((1, 2)).sum())
            raise ValueError(
                f"The routes of a completion have {known} rows for {n} tokens: the sampler did not return the routes of "
                "tokens that it took from its prefix cache, or of a part of a sequence. Set `rollout_engine_kwargs: "
                "{enable_prefix_caching: false}`, and no `routed_experts_prompt_start`."
            )
        if n and not 0 < found.max() < self.n_experts:
            raise ValueError(
                f"The largest expert in the routes of a completion is {found.max()}, but must be 1 to {self.n_experts - 1}: 0 "
                "stands for a kernel that does not record its experts. Set another `moe_backend` in `rollout_engine_kwargs`, "
                "such as triton, or `rollout_routing` to None."
            )
        self._rows[tuple(tokens)].append(torch.from_numpy(found).to(self.dtype))

    def keep_batch(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, routes: torch.Tensor) -> None:
        """Keep the routes of a padded batch, `(B, S, L, k)`, again."""
        for ids, mask, rows in zip(input_ids.cpu(), attention_mask.bool().cpu(), routes.cpu(), strict=True):
            self._rows[tuple(ids[mask].tolist())].append(rows[mask][:-1])

    def place(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, strict: bool = True
    ) -> torch.Tensor:
        """
        Routes of a padded batch, `(B, S, L, k)`, on the CPU. Padding, the last token of a sequence and completions that are
        masked as a whole have no route.

        Raises:
            `ValueError`: with `strict`, if a sequence was not sampled.
        """
        ids, mask = input_ids.cpu(), attention_mask.bool().cpu()
        routes = torch.zeros(*ids.shape, len(self.layers), self.top_k, dtype=self.dtype)
        routes.fill_(no_route(routes))
        seen: Counter[tuple[int, ...]] = Counter()
        for i in range(len(ids)):
            if not mask[i, -logits_to_keep:].any():
                continue
            tokens = tuple(ids[i][mask[i]].tolist())
            found = self._rows.get(tokens)
            if not found and not strict:
                continue
            if not found:
                raise ValueError(
                    f"Completion {i} of the batch has no routes: the sampler did not generate these tokens, as after text "
                    "was added or cut, or with images. Keep sampled tokens as they are, or set `rollout_routing` to None. A "
                    "`rollout_func` gives routes to `trainer.keep_routes`."
                )
            routes[i, mask[i].nonzero()[:-1, 0]] = found[seen[tokens] % len(found)]
            seen[tokens] += 1
        return routes
