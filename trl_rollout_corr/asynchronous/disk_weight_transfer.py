"""New weights for a vLLM server through files, for machines without NCCL."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import requests
import torch
from safetensors.torch import save_file

from ..arrival.server import EXTENSION, has_extension
from .trl_parts import VLLMClient


class DiskWeightTransfer:
    """
    Sends weights to a vLLM server through a folder that both can read. Pass it to [`RolloutCorrectedAsyncGRPOTrainer`] as
    `weight_transfer`, in place of TRL's transfer through NCCL, which needs GPUs on both sides.

    At each synchronisation, requests are paused, which clears the caches of the server, the weights are written, the server
    loads them (`/collective_rpc`), and requests go on. A completion in progress is finished with the new weights.

    The server must be started with `VLLM_SERVER_DEV_MODE=1`; on a CPU also with `--worker-extension-cls
    trl_rollout_corr.arrival.worker.PackingWorker`. The folder is made if it is missing, and the weights are removed when
    training ends. `timeout` is in seconds, for one synchronisation.
    """

    def __init__(self, server_url: str, folder: str | Path, timeout: float = 1800.0) -> None:
        self.client = VLLMClient(server_url)
        self.folder = Path(folder).absolute()
        self.timeout = timeout
        self._version = 0
        self._method = "reload_weights"  # of the server's worker

    def init_weight_transfer(self) -> None:
        """Wait for the server, and refuse one that takes no weights, or only a part of them."""
        self.client.wait_for_server_ready()
        response = requests.get(f"{self.client.server_url}/server_info", params={"config_format": "json"}, timeout=60)
        if response.status_code == 404:
            raise RuntimeError(
                f"The vLLM server at {self.client.server_url} does not accept new weights. Start it with "
                "`VLLM_SERVER_DEV_MODE=1` in its environment."
            )
        info = response.json()["vllm_config"]
        if has_extension(info):
            self._method = "reload_and_pack"
        elif info["device_config"]["device"] == "cpu":
            raise RuntimeError(
                f"The vLLM server at {self.client.server_url} runs on a CPU and was started without `--worker-extension-cls "
                f"{EXTENSION}`. It would keep the first weights of a head that is tied to the embedding, and mix up the "
                "weights of experts. Start it with that option, where trl-rollout-corr is installed."
            )

    def pause(self) -> None:
        """Pause requests, also those in progress. Their keys and values are computed again with the new weights."""
        self.client.pause(timeout=int(self.timeout))

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write weights, by their names in a checkpoint, and make the server load them."""
        previous, self._version = self._path(), self._version + 1
        folder = self._path()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_file({name: x.detach().cpu().contiguous() for name, x in iterator}, folder / "model.safetensors")
        self._load(folder)
        shutil.rmtree(previous, ignore_errors=True)

    def resume(self) -> None:
        """Resume requests."""
        self.client.resume(timeout=int(self.timeout))

    def destroy(self) -> None:
        """Remove the weights on disk."""
        shutil.rmtree(self._path(), ignore_errors=True)

    def _path(self) -> Path:
        return self.folder / f"weights-{self._version}"

    def _load(self, folder: Path) -> None:
        response = requests.post(
            f"{self.client.server_url}/collective_rpc",
            json={"method": self._method, "kwargs": {"weights_path": str(folder)}},
            timeout=self.timeout,
        )
        if response.status_code != 200:
            raise RuntimeError(
                f"The vLLM server at {self.client.server_url} did not load the weights in {folder}, which it must be able to "
                f"read: {response.text}"
            )
