"""
Pushes of weights to the sampler, each of which is checked afterwards.

`B` completions, `T` completion tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ._engine_weights import read
from .run_metadata import engine_metadata
from .server_check import MovementCheck, has_extension, read_server, score_text
from .weight_check import WeightCheck


if TYPE_CHECKING:
    from transformers import Trainer as _Host
else:
    _Host = object


class CheckedPushes(_Host):
    """
    The checks that weights arrive, shared by the trainers. A trainer defines the address of its server, `_server`, and the
    name of the policy there, `_served_model`.
    """

    _server: str | None  # on the main process; `None` without a server
    _served_model: str
    _engine_config: Any
    _loss_mask: Any
    temperature: float

    def _set_up_push_checks(self) -> None:
        model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=True)
        self._weight_check = WeightCheck(self._read_sampler, model, self._sampler_dtype)
        self._movement_check = MovementCheck(self.accelerator, model, self._score_with_server, self.temperature)
        # a text cannot have images; a processor is the same on all ranks, and images may be on some
        self._movement_check.done = hasattr(self.processing_class, "image_processor")

    def _sampler_dtype(self) -> str:
        return engine_metadata(self._engine_config).get("sampler_dtype", "bfloat16")

    def _read_sampler(self, names: list[str]) -> dict[str, Any] | None:
        """Weights that the sampler holds: [`~trl_rollout_corr.trainers._engine_weights.read`]; `None` if it cannot be read."""
        if self._server is None or not has_extension(self._engine_config):
            return None
        return read_server(self._server, names)

    def _score_with_server(self, texts: list[list[int]]) -> list[list[float]]:
        if self._server is None:
            raise RuntimeError("There is no server.")
        return score_text(self._server, self._served_model, texts)

    def _keep_text(self, batch: dict[str, Any], score: Callable[[], torch.Tensor]) -> None:
        """Let a server be checked with a micro-batch. `score` computes its log-probabilities, `(B, T)`, when called."""
        if self.model.training and self._movement_check.needs_text:
            self._movement_check.keep(batch, self._loss_mask(batch), score)


class PushesToVLLM(CheckedPushes):
    """Checked pushes of a trainer that generates with `vllm_generation`."""

    vllm_generation: Any
    rollout_step: int | None

    @contextmanager
    def _pushing(self) -> Iterator[None]:
        """A push of weights, which is checked afterwards."""
        self.rollout_step = step = self.state.global_step
        with self._weight_check.watching(self.vllm_generation, "_iter_named_params"):
            yield
        announced = self.rollout_step != step  # a sampler may have older weights on purpose
        self._weight_check.judge(step, announced=announced, doubt=self._doubt_sampler())
        self._movement_check.pushed(step, announced=announced)

    def _doubt_sampler(self) -> str:
        """Reason why the weights of vLLM may not matter; empty if they do."""
        return ""

    @property
    def _server(self) -> str | None:  # type: ignore[override]
        client = getattr(self.vllm_generation, "vllm_client", None) if self.use_vllm else None
        return getattr(client, "base_url", None)

    @property
    def _served_model(self) -> str:  # type: ignore[override]
        return str(self.vllm_generation.vllm_client.model)

    def _read_sampler(self, names: list[str]) -> dict[str, Any] | None:
        if self.vllm_mode != "colocate":
            return super()._read_sampler(names)
        engine = self.vllm_generation.llm.llm_engine.model_executor.driver_worker
        return read(engine.get_model(), names, getattr(self.vllm_generation, "tp_group", None))
