"""
Pushes of the trainers of GRPO and RLOO to vLLM, which replace TRL's `sync_weights` once: TRL's way, or through vLLM's
reload.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from trl.generation.vllm_generation import VLLMGeneration

from ..trainers.metadata import quantises
from ..trainers.ranks import smallest
from .pushes import NamedWeights, Pushes, refuse_packed_base, sending
from .reloading import push


def needs_reload(generation: VLLMGeneration) -> bool:
    """
    True if TRL's push of single weights fails: on a CPU, where vLLM stores other shapes than the checkpoint, and with
    a colocated engine that quantises weights, because it would keep its old scales.
    """
    if generation.mode != "colocate":
        return False
    return generation.accelerator.device.type == "cpu" or quantises(generation.llm.llm_engine.vllm_config)


def push_through_reload(generation: VLLMGeneration, weights: NamedWeights) -> NamedWeights:
    """Push all weights. TRL, left with none, wakes the engine before and clears its cache after."""
    push(generation.llm, weights)
    return ()


def forget_images(generation: VLLMGeneration) -> None:
    """
    Make a colocated vLLM compute the features of images again after a push.

    vLLM keeps the features of an image for later requests. TRL clears only the prefix cache, so an image would keep
    its features from before the new weights. vLLM's own reload clears the features, but not its list of them, so the
    next request with the image would fail.
    """
    if generation.mode == "colocate" and hasattr(generation.llm.llm_engine, "reset_encoder_cache"):
        generation.llm.llm_engine.reset_encoder_cache()


class PushesToVLLM(Pushes):
    """Pushes of a trainer that generates with `vllm_generation`, replacing `sync_weights`."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._of_function = getattr(trainer, "rollout_func", None) is not None
        self._pushed: int | None = None  # optimizer step of the latest push
        if self._of_function:
            self.doubt = "Completions come from `rollout_func`, which may use another sampler."
        if trainer.use_vllm:
            generation = trainer.vllm_generation
            refuse_packed_base(generation.model, generation.mode)
            self._sync_weights = generation.sync_weights
            generation.sync_weights = self.push

    def push(self, *args: Any, **kwargs: Any) -> None:
        """Push weights with TRL's `sync_weights`, or through vLLM's reload where that fails."""
        trainer, generation = self.trainer, self.trainer.vllm_generation
        before, step = trainer.rollout_step, trainer.state.global_step
        # a sampler with older weights sets it during the push, and a function may ask another sampler
        trainer.rollout_step = None if self._of_function else step
        try:
            with (
                self.checking(),
                self.leaving_base_alone(generation.model),
                sending(generation, "_iter_named_params", self._sent),
            ):
                self._sync_weights(*args, **kwargs)
                forget_images(generation)
            self._pushed = step
        except BaseException:
            trainer.rollout_step = before
            raise

    @contextmanager
    def noting_requests(self) -> Iterator[None]:
        """
        Context of a `rollout_func`. TRL pushes before it, whatever it samples with, so the step of the push is that of
        its sampler only if the function asks the trainer's vLLM for completions, and announces no other. Only the main
        process has a client of a server, and may ask for all ranks: a rank without a step takes the oldest of others.
        """
        with ExitStack() as stack:
            for sampler, name in self._ways_to_ask():
                stack.enter_context(patch.object(sampler, name, self._noted(getattr(sampler, name))))
            yield
        oldest = smallest(self.trainer.accelerator, self.trainer.rollout_step)
        if self.trainer.rollout_step is None:
            self.trainer.rollout_step = oldest

    def _ways_to_ask(self) -> list[tuple[Any, str]]:
        """Objects and their methods that ask the trainer's vLLM for completions on this rank."""
        generation = self.trainer.vllm_generation
        engines = (getattr(generation, name, None) for name in ("llm", "vllm_client"))
        asked = [(engine, name) for engine in engines for name in ("generate", "chat") if hasattr(engine, name)]
        return [(generation, "generate"), *asked]

    def _noted(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(ask)
        def asked(*args: Any, **kwargs: Any) -> Any:
            if self.trainer.rollout_step is None:
                self.trainer.rollout_step = self._pushed
            return ask(*args, **kwargs)

        return asked

    def _sent(self, weights: NamedWeights) -> NamedWeights:
        """Weights that TRL still has to send."""
        generation, noted = self.trainer.vllm_generation, self.noting(weights)
        return push_through_reload(generation, noted) if needs_reload(generation) else noted

    @property
    def scores_at_once(self) -> bool:  # type: ignore[override]  # a sleeping engine drops its weights when done
        return self.engine is None or not self.engine.enable_sleep_mode

    def score(self, ids: torch.Tensor, n: int) -> torch.Tensor:
        logps: torch.Tensor = self.trainer._score_text(ids, n)
        return logps

    @property
    def server(self) -> str | None:
        client = getattr(self.trainer.vllm_generation, "vllm_client", None) if self.trainer.use_vllm else None
        return getattr(client, "base_url", None)

    @property
    def served_model(self) -> str:
        return str(self.trainer.vllm_generation.vllm_client.model)

    @property
    def engine(self) -> Any:
        trainer = self.trainer
        return trainer.vllm_generation if trainer.use_vllm and trainer.vllm_mode == "colocate" else None
