"""Pushes of weights, or of an adapter, from the asynchronous trainer to its server."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ..pushes.pushes import Pushes, refuse_packed_base, sending
from ..trainers.scoring import score_text
from .trl_parts import AsyncRolloutWorker


class PushesToServer(Pushes):
    """Pushes of the asynchronous trainer."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._model = self.bare_model
        if not self.is_adapter:
            refuse_packed_base(self._model, "server")

    def push(self, send: Callable[[], object]) -> None:
        """Push weights or an adapter with TRL's method."""
        alone = nullcontext() if self.is_adapter else self.leaving_base_alone(self._model)
        with self.checking(), alone, sending(self.trainer, "_streaming_iter", self.noting):
            send()

    def folder_of_adapter(self) -> Path | None:
        return Path(self.trainer._lora_dir, self.served_model) if self.is_adapter else None

    @property
    def is_adapter(self) -> bool:
        """True if the server loads an adapter from files and the trainer pushes no weights."""
        return getattr(self.trainer, "_lora_sync", False)  # a newer TRL may lack this attribute

    @property
    def scores_at_once(self) -> bool:  # type: ignore[override]
        """True between a push and the next optimizer step, whatever weights the samples of a batch are of."""
        trainer = self.trainer
        return bool(trainer._step_of_version.get(trainer.model_version) == trainer.state.global_step)

    def score(self, ids: torch.Tensor, n: int) -> torch.Tensor:
        trainer, length = self.trainer, ids.shape[1]
        ends = torch.tensor([0, length], dtype=torch.int32, device=ids.device)
        path = torch.arange(length, device=ids.device)
        tree = {"tree_kv_index": path, "tree_cu_seqlens_q": ends, "tree_cu_seqlens_k": ends}
        longest = {"tree_max_seqlen_q": length, "tree_max_seqlen_k": length}
        positions = {"position_ids": path[None]}
        inputs = {**positions, **tree, **longest}
        return score_text(trainer.model_wrapped, trainer.accelerator, trainer.args, ids, n, **inputs)

    @property
    def server(self) -> str | None:
        trainer = self.trainer
        has_address = trainer.accelerator.is_main_process and isinstance(trainer.rollout_worker, AsyncRolloutWorker)
        return str(trainer.vllm_client.server_url) if has_address else None

    @property
    def served_model(self) -> str:
        if self.is_adapter:
            return f"{self.trainer._lora_name}-v{self.trainer.model_version}"
        return str(self._model.config._name_or_path)
