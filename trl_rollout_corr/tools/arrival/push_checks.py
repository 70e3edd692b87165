"""
The checks of a push of weights, for all trainers: what was sent is compared with what the sampler holds, and frozen weights
of the trainer stay as they are.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...messages import PREFIX
from .fingerprints import read
from .frozen import FrozenCheck
from .server import AdapterCheck, MovementCheck, has_extension, read_server, score_text
from .weights import WeightCheck


QUANTISED_UNMOVED = f"{PREFIX}quantised_unmoved"


class PushChecks:
    """
    Checks of the `pushes` of a trainer ([`~trl_rollout_corr.trainers.pushes.Pushes`]). `model` is the trainer's, not wrapped.
    """

    def __init__(self, pushes: Any, model: torch.nn.Module) -> None:
        self.pushes, self.trainer = pushes, pushes.trainer
        accelerator = self.trainer.accelerator
        self.weights = WeightCheck(self.read_sampler, model, lambda: pushes.sampler_dtype)
        self.frozen = FrozenCheck(model, self._on_any_rank)
        self.adapters = AdapterCheck()
        self.movement = MovementCheck(
            model,
            self._score_with_server,
            self.trainer.temperature,
            is_main_process=accelerator.is_main_process,
            broadcast=pushes.broadcast,
        )
        # A text cannot have images. A processor is the same on all ranks; images may be on some
        self.movement.done = hasattr(self.trainer.processing_class, "image_processor")

    def noting(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights on their way to the sampler, of which fingerprints are taken."""
        return self.weights.noting(weights)

    @contextmanager
    def pushing(self, folder_of_adapter: Callable[[], Path | None] = lambda: None) -> Iterator[None]:
        """
        A push of weights, which is checked afterwards. `folder_of_adapter` returns, after the push, the folder of the adapter
        that was pushed in place of weights.
        """
        trainer = self.trainer
        step = trainer.state.global_step
        self.frozen.before()
        yield
        self.frozen.after(step)
        announced = trainer.rollout_step not in (None, step)  # a sampler may have older weights on purpose
        folder = folder_of_adapter()
        if folder is None:
            self.weights.judge(step, announced=announced, doubt=self.pushes.doubt)
            self._log_unmoved()
        elif self.pushes.server is not None:
            name = self.pushes.served_model
            self.adapters.pushed(self.pushes.server, name, folder, self.weights.trained(), step)
        self.movement.pushed(step, announced=announced)

    def keep(self, batch: dict[str, Any], score: Callable[[], torch.Tensor]) -> None:
        """Let a server be checked with a micro-batch. `score` computes its log-probabilities, `(B, T)`, when called."""
        if self.movement.needs_text:
            self.movement.keep(batch, self.trainer._loss_mask(batch), score)

    def read_sampler(self, names: list[str]) -> dict[str, Any] | None:
        """What [`~trl_rollout_corr.tools.arrival.fingerprints.read`] tells of the sampler; `None` if it cannot be read."""
        generation = self.pushes.engine
        if generation is not None:
            worker = generation.llm.llm_engine.model_executor.driver_worker
            return read(worker.get_model(), names, getattr(generation, "tp_group", None))
        if self.pushes.server is None or not has_extension(self.trainer._engine_config):
            return None
        return read_server(self.pushes.server, names)

    def _score_with_server(self, texts: list[list[int]]) -> list[list[float]]:
        if self.pushes.server is None:
            raise RuntimeError("The log-probabilities of a server were asked for, but this run has no server.")
        return score_text(self.pushes.server, self.pushes.served_model, texts)

    def _log_unmoved(self) -> None:
        """Log the share of quantised tensors that stood still at the last push. TRL takes the mean over pushes."""
        if self.weights.unmoved is not None:
            self.trainer._metrics["train"][QUANTISED_UNMOVED].append(self.weights.unmoved)

    def _on_any_rank(self, value: bool) -> bool:
        """True if the value is true on a rank. All ranks ask."""
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1:
            return value
        return bool(accelerator.gather(torch.tensor([value], device=accelerator.device)).any())
