"""Experts that a colocated vLLM chooses: from its output, or on a CPU from its routers."""

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from .sampled_experts import ON_CPU, SampledRoutes


class RecordingEngine:
    """vLLM's engine that keeps the routes of all that it generates."""

    def __init__(self, llm: Any, routes: SampledRoutes) -> None:
        self._llm, self._routes = llm, routes
        self._returns = returns_routes(llm.llm_engine.vllm_config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if self._returns:
            outputs, captured = self._llm.generate(*args, **kwargs), None
        else:
            with capturing(self._llm) as captured:
                outputs = self._llm.generate(*args, **kwargs)
        for output in outputs:
            for completion in output.outputs:
                tokens = [*output.prompt_token_ids, *completion.token_ids]
                experts = (
                    completion.routed_experts if captured is None else captured.of(output.request_id, len(tokens) - 1)
                )
                self._routes.try_keep(tokens, experts)
        return outputs


def returns_routes(config: Any) -> bool:
    """True if an engine returns its routes. A `ValueError` if it does not, and they cannot be captured in this process."""
    places = (getattr(config, "aux_output_config", None), config.model_config)
    if any(getattr(place, "enable_return_routed_experts", False) for place in places):
        return True
    if config.device_config.device_type != "cpu":
        raise ValueError(
            "`rollout_routing` is 'replay', but vLLM does not return its routes. Set `rollout_engine_kwargs: "
            "{enable_return_routed_experts: true}`, or `rollout_routing` to None."
        )
    reasons = []
    if config.cache_config.enable_prefix_caching:
        reasons.append("`enable_prefix_caching` is True: tokens from vLLM's prefix cache pass no router")
    if compiles(config):
        reasons.append(
            "`enforce_eager` is False: vLLM compiles its model, and compiled routers do not tell their experts"
        )
    if reasons:
        raise ValueError(
            f"`rollout_routing` is 'replay', but on this CPU {', and '.join(reasons)}. Set `{ON_CPU}`, or `rollout_routing` "
            "to None."
        )
    return False


def compiles(config: Any) -> bool:
    """True if an engine compiles its model."""
    return bool(config.compilation_config.mode) and os.environ.get("TORCHDYNAMO_DISABLE") != "1"


class Captured:
    """Routes by request, in parts: the first position of a part, and its experts, `(tokens, decoder layers, k)`."""

    def __init__(self) -> None:
        self.layers: dict[int, torch.Tensor] = {}  # of the current forward pass, (tokens, k)
        self._parts: defaultdict[str, list[tuple[int, np.ndarray]]] = defaultdict(list)

    def take(self, layer: int, experts: torch.Tensor) -> None:
        """Keep the experts of one layer in the current forward pass."""
        self.layers[layer] = experts.to(torch.int32).cpu()

    def split(self, scheduled: Any, order: list[str]) -> None:
        """Give the experts of a forward pass to its requests, which stand in `order` in the batch."""
        if not self.layers:
            return
        starts = {request.req_id: request.num_computed_tokens for request in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        n_tokens, top_k = next(iter(self.layers.values())).shape
        experts = np.zeros((n_tokens, max(self.layers) + 1, top_k), dtype=np.int32)
        for layer, chosen in self.layers.items():
            experts[:, layer] = chosen.numpy()
        first = 0
        for request in order:
            n = scheduled.num_scheduled_tokens.get(request, 0)
            if n:  # the name has a random part
                self._parts[request.rpartition("-")[0] or request].append(
                    (starts[request], experts[first : first + n])
                )
            first += n

    def of(self, request: str, n: int) -> np.ndarray | None:
        """Experts of the first `n` tokens of a request, -1 for tokens that passed no router; `None` without any."""
        parts = self._parts.get(request)
        if not parts:
            return None
        rows = np.full((n, *parts[0][1].shape[1:]), -1, dtype=np.int32)
        for start, experts in parts:
            rows[start : start + len(experts)] = experts[: max(n - start, 0)]
        return rows


@contextmanager
def capturing(llm: Any) -> Iterator[Captured]:
    """Capture the routes of an engine in this process."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    runner, captured = llm.llm_engine.model_executor.driver_worker.model_runner, Captured()
    layers = [module for module in runner.get_model().modules() if isinstance(module, MoERunner)]
    execute = runner.execute_model

    def execute_and_split(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        captured.layers = {}
        result = execute(scheduled, *args, **kwargs)
        captured.split(scheduled, list(runner.input_batch.req_ids))
        return result

    for layer in layers:
        layer.router.set_capture_fn(partial(captured.take, layer.layer_id))
    runner.execute_model = execute_and_split
    try:
        yield captured
    finally:
        del runner.execute_model
        for layer in layers:
            layer.router.set_capture_fn(None)
