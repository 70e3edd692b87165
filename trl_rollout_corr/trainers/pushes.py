"""
Pushes of weights to the sampler, each of which is checked afterwards.

`B` completions, `T` completion tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from ..arrival.fingerprints import read
from ..arrival.server import MovementCheck, has_extension, read_server, score_text
from ..arrival.weights import WeightCheck
from ..recording.run_metadata import engine_metadata


QUANTISED_UNMOVED = "rollout_corr/quantised_unmoved"


class CheckedPushes:
    """
    The checks that the weights of a `trainer` arrive. Subclasses know the address of its server, and the name of the policy
    there.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, model = trainer, trainer._bare(trainer.model)
        self.weights = WeightCheck(self.read_sampler, model, self._sampler_dtype)
        self.movement = MovementCheck(
            model,
            self._score_with_server,
            trainer.temperature,
            is_main_process=trainer.accelerator.is_main_process,
            broadcast=broadcast_object_list,
        )
        # A text cannot have images. A processor is the same on all ranks; images may be on some
        self.movement.done = hasattr(trainer.processing_class, "image_processor")

    @property
    def server(self) -> str | None:
        """Address of the server, on the main process; `None` without a server."""
        raise NotImplementedError

    @property
    def served_model(self) -> str:
        """Name of the policy on the server."""
        raise NotImplementedError

    def _sampler_dtype(self) -> str:
        return engine_metadata(self.trainer._engine_config).get("sampler_dtype", "bfloat16")

    def read_sampler(self, names: list[str]) -> dict[str, Any] | None:
        """Weights that the sampler holds: [`~trl_rollout_corr.arrival.fingerprints.read`]; `None` if it cannot be read."""
        if self.server is None or not has_extension(self.trainer._engine_config):
            return None
        return read_server(self.server, names)

    def _score_with_server(self, texts: list[list[int]]) -> list[list[float]]:
        if self.server is None:
            raise RuntimeError("The log-probabilities of a server were asked for, but this run has no server.")
        return score_text(self.server, self.served_model, texts)

    def log_unmoved(self) -> None:
        """Log the share of quantised tensors that stood still at the last push. TRL takes the mean over pushes."""
        if self.weights.unmoved is not None:
            self.trainer._metrics["train"][QUANTISED_UNMOVED].append(self.weights.unmoved)

    def keep_text(self, batch: dict[str, Any], score: Callable[[], torch.Tensor]) -> None:
        """Let a server be checked with a micro-batch. `score` computes its log-probabilities, `(B, T)`, when called."""
        if self.trainer.model.training and self.movement.needs_text:
            self.movement.keep(batch, self.trainer._loss_mask(batch), score)


class PushesToVLLM(CheckedPushes):
    """Checked pushes of a trainer that generates with `vllm_generation`. `doubt`: a reason why its weights may not matter."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        other = getattr(trainer, "rollout_func", None) is not None
        self.doubt = "Completions come from `rollout_func`, which may use another sampler." if other else ""

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """A push of weights, which is checked afterwards."""
        trainer = self.trainer
        trainer.rollout_step = step = trainer.state.global_step
        with self.weights.watching(trainer.vllm_generation, "_iter_named_params"):
            yield
        announced = trainer.rollout_step != step  # a sampler may have older weights on purpose
        self.weights.judge(step, announced=announced, doubt=self.doubt)
        self.log_unmoved()
        self.movement.pushed(step, announced=announced)

    @property
    def server(self) -> str | None:
        client = getattr(self.trainer.vllm_generation, "vllm_client", None) if self.trainer.use_vllm else None
        return getattr(client, "base_url", None)

    @property
    def served_model(self) -> str:
        return str(self.trainer.vllm_generation.vllm_client.model)

    def read_sampler(self, names: list[str]) -> dict[str, Any] | None:
        if self.trainer.vllm_mode != "colocate":
            return super().read_sampler(names)
        generation = self.trainer.vllm_generation
        engine = generation.llm.llm_engine.model_executor.driver_worker
        return read(engine.get_model(), names, getattr(generation, "tp_group", None))
