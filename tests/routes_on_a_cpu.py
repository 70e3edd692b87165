"""Experts of a colocated vLLM on a CPU, which does not return them: read from its routers, in this process."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch


# An engine that is compiled, or that has a prefix cache, has tokens that pass no router
ARGUMENTS = {"enable_prefix_caching": False, "enforce_eager": True}


@contextmanager
def returning_routes() -> Iterator[None]:
    """TRL builds engines that return their routes, as those on a GPU do."""
    from trl.generation import vllm_generation

    built = vllm_generation.LLM
    with patch.object(vllm_generation, "LLM", lambda *args, **kwargs: EngineOnCPU(built(*args, **kwargs))):
        yield


class EngineOnCPU:
    """vLLM's engine, with the experts of each completion in its output."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        llm.llm_engine.vllm_config.aux_output_config.enable_return_routed_experts = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        with capturing(self._llm) as captured:
            outputs = self._llm.generate(*args, **kwargs)
        for output in outputs:
            for completion in output.outputs:
                n = len(output.prompt_token_ids) + len(completion.token_ids) - 1
                completion.routed_experts = captured.of(output.request_id, n)
        return outputs


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
