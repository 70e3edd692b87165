"""Pushes of weights, or of an adapter, from the asynchronous trainer to its server."""

from pathlib import Path

from .pushes import CheckedPushes
from .server_check import AdapterCheck
from .upstream import AsyncRolloutWorker


class PushesToServer(CheckedPushes):
    """
    Checked pushes of the asynchronous trainer.

    Attributes:
        rollout_step (`int`, *optional*):
            Optimizer step of the weights on the server, if they are older than the trainer's on purpose.
    """

    rollout_step: int | None = None

    def _push(self) -> None:
        """Push weights or an adapter, and check that they arrive."""
        with self._weight_check.watching(self, "_streaming_iter"):
            super()._sync_weight()
        step = self.state.global_step
        announced = self.rollout_step not in (None, step)
        if not getattr(self, "_lora_sync", False):  # a newer TRL may have no such attribute
            self._weight_check.judge(step, announced=announced)
        elif self._server is not None:
            folder, trained = Path(self._lora_dir, self._served_model), self._weight_check.trained()
            self._adapter_check.pushed(self._server, self._served_model, folder, trained, step)
        self._movement_check.pushed(step, announced=announced)

    def _set_up_push_checks(self) -> None:
        super()._set_up_push_checks()
        self._adapter_check = AdapterCheck()

    @property
    def _server(self) -> str | None:  # type: ignore[override]
        known = self.accelerator.is_main_process and isinstance(self.rollout_worker, AsyncRolloutWorker)
        return str(self.vllm_client.server_url) if known else None

    @property
    def _served_model(self) -> str:  # type: ignore[override]
        if getattr(self, "_lora_sync", False):
            return f"{self._lora_name}-v{self.model_version}"
        return str(self._weight_check.model.config._name_or_path)
