"""
Axolotl's GRPO trainer with rollout correction. The plugin names it, and Axolotl imports it after its own trainers.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from trl.generation import vllm_generation

from ..pushes.server_api import check_served_adapter
from ..trainers.batches import TAGS
from ..trainers.grpo import RolloutCorrectedGRPOTrainer


def with_missing(extract: Callable) -> Callable:
    """
    `extract_logprobs` that returns `None` where vLLM's log-probability is NaN, as TRL's does.

    Axolotl's returns 0.0 there, which is a probability of 1: such a token would count as one that vLLM was certain of,
    and no metric would show that its log-probability is missing.
    """

    def extracted(requests: Any) -> tuple:
        logprobs, token_ids = extract(requests)
        if logprobs is None:
            return logprobs, token_ids
        of_vllm = [completion.logprobs for request in requests for completion in request.outputs]
        for rows, ids, positions in zip(logprobs, token_ids, of_vllm, strict=True):
            for row, candidates, position in zip(rows, ids, positions, strict=True):
                missing = [math.isnan(position[candidate].logprob) for candidate in candidates]
                row[:] = [None if gone else value for value, gone in zip(row, missing, strict=True)]
        return logprobs, token_ids

    return extracted


@contextmanager
def keeping_missing() -> Iterator[None]:
    """Let TRL read completions of vLLM by `with_missing`, for one generation."""
    extract = vllm_generation.extract_logprobs
    vllm_generation.extract_logprobs = with_missing(extract)
    try:
        yield
    finally:
        vllm_generation.extract_logprobs = extract


class RolloutCorrectedAxolotlTrainer(RolloutCorrectedGRPOTrainer, AxolotlGRPOTrainer):
    """
    Axolotl's trainer for `rl: grpo`, with rollout correction. Axolotl builds it, with its own arguments.

    Rollout correction comes before Axolotl's trainer among the bases, so that `super()` reaches Axolotl's methods.
    """

    _tag_names = [*AxolotlGRPOTrainer._tag_names, *TAGS]

    def _set_up_observer(self) -> None:
        super()._set_up_observer()
        # Axolotl's field: the server loads the adapter from files
        if getattr(self.args, "vllm_lora_sync", False) and self.accelerator.is_main_process:
            check_served_adapter(self.vllm_generation.vllm_client.base_url, self._bare(self.model))

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with keeping_missing():
            return super()._generate(*args, **kwargs)
