"""An extension of vLLM's worker, which runs in the process of the engine or of a server."""

from typing import Any

from .pushes.fingerprints import read_weights
from .pushes.reloading import reload


class PackingWorker:
    """
    An extension of vLLM's worker: `--worker-extension-cls trl_rollout_corr.worker.PackingWorker`. A server on a CPU
    needs it, and on any server it lets the trainer check that weights arrive. Its methods are for `/collective_rpc`.
    """

    def reload_and_pack(self, weights_path: str) -> None:
        """Load weights from a folder, and pack all of them."""
        reload(self, weights_path=weights_path)

    def read_weights(self, names: list[str]) -> dict[str, Any]:
        """Fingerprints of the worker's weights: [`~trl_rollout_corr.pushes.fingerprints.read_weights`]."""
        return read_weights(self.get_model(), names)  # type: ignore[attr-defined]  # of vLLM's worker
