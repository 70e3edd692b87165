"""Pushes of weights, or of an adapter, from the asynchronous trainer to its server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..arrival.server import AdapterCheck
from ..trainers.pushes import CheckedPushes
from .trl_parts import AsyncRolloutWorker


class PushesToServer(CheckedPushes):
    """Checked pushes of the asynchronous trainer."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._adapters = AdapterCheck()

    def push(self, push: Callable[[], object]) -> None:
        """Push weights or an adapter with TRL's method, and check that they arrive."""
        trainer = self.trainer
        with self.weights.watching(trainer, "_streaming_iter"):
            push()
        step = trainer.state.global_step
        announced = trainer.rollout_step not in (None, step)
        if not self.is_adapter:
            self.weights.judge(step, announced=announced)
            self.log_unmoved()
        elif self.server is not None:
            folder, trained = Path(trainer._lora_dir, self.served_model), self.weights.trained()
            self._adapters.pushed(self.server, self.served_model, folder, trained, step)
        self.movement.pushed(step, announced=announced)

    @property
    def is_adapter(self) -> bool:
        """True if the server loads an adapter from files, and the trainer pushes no weights."""
        return getattr(self.trainer, "_lora_sync", False)  # a newer TRL may have no such attribute

    @property
    def server(self) -> str | None:
        trainer = self.trainer
        has_address = trainer.accelerator.is_main_process and isinstance(trainer.rollout_worker, AsyncRolloutWorker)
        return str(trainer.vllm_client.server_url) if has_address else None

    @property
    def served_model(self) -> str:
        if self.is_adapter:
            return f"{self.trainer._lora_name}-v{self.trainer.model_version}"
        return str(self.weights.model.config._name_or_path)
