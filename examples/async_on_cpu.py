"""
What TRL's asynchronous trainer needs on a CPU, in place of its own parts for GPUs.

- `on_a_cpu`: another attention over packed rows than FlashAttention-3, and no question to CUDA about its speed. Build the
  trainer inside of this context.
- `DiskWeightTransfer`: new weights for the vLLM server through files instead of NCCL. It works on a GPU as well.

TRL packs the samples of a micro-batch into one row in which shared prefixes appear once: a tree. Time, and memory for a
boolean mask, grow with the square of the row: this is for small models.
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import requests
import torch
from safetensors.torch import save_file
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from trl_rollout_corr import RolloutCorrectedAsyncGRPOTrainer


# TRL's module, which is in another place from release to release
_TRL: Any = sys.modules[RolloutCorrectedAsyncGRPOTrainer._trl_class.__module__]
_CLIENT = getattr(_TRL, "AsyncVLLMClient", None) or _TRL.VLLMClient
_EXTENSION = "trl_rollout_corr.worker.PackingWorker"


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """Context in which the asynchronous trainer can be built on a CPU."""
    without_speed = patch.object(_TRL, "get_peak_flops_per_device", lambda accelerator, dtype: None)
    with without_speed, patch.object(_TRL, "register_tree_attention", register_tree_attention):
        yield


def register_tree_attention() -> None:
    """Register the attention of this module in place of TRL's, for models that are built afterwards."""
    AttentionInterface.register(_TRL.TREE_ATTENTION, tree_attention)


class DiskWeightTransfer:
    """
    Sends weights to a vLLM server through a folder that both can read. Pass it to `RolloutCorrectedAsyncGRPOTrainer` as
    `weight_transfer`.

    At each synchronisation, requests are paused, which clears the caches of the server, the weights are written, the server
    loads them (`/collective_rpc`), and requests go on. A completion in progress is finished with the new weights.

    The server must be started with `VLLM_SERVER_DEV_MODE=1`; on a CPU also with `--worker-extension-cls
    trl_rollout_corr.worker.PackingWorker`. The folder is made if it is missing, and the weights are removed when
    training ends. `timeout` is in seconds, for one synchronisation.
    """

    def __init__(self, server_url: str, folder: str | Path, timeout: float = 1800.0):
        self.client = _CLIENT(server_url)
        self.folder = Path(folder).absolute()
        self.timeout = timeout
        self._version = 0
        self._method = "reload_weights"  # of the server's worker

    def init_weight_transfer(self):
        """Wait for the server, and refuse one that would take only a part of the weights."""
        self.client.wait_for_server_ready()
        info = self.client.get_server_info()
        if info["parallel_config"].get("worker_extension_cls") == _EXTENSION:
            self._method = "reload_and_pack"
        elif info["device_config"]["device"] == "cpu":
            raise RuntimeError(
                f"The vLLM server at {self.client.server_url} runs on a CPU and was started without `--worker-extension-cls "
                f"{_EXTENSION}`. It would keep the first weights of a head that is tied to the embedding, and mix up the "
                "weights of experts. Start it with that option, where trl-rollout-corr is installed."
            )

    def pause(self):
        """Pause requests, also those in progress. Their keys and values are computed again with the new weights."""
        self.client.pause(timeout=int(self.timeout))

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]):
        """Write weights, by their names in a checkpoint, and make the server load them."""
        previous, self._version = self._path(), self._version + 1
        folder = self._path()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_file({name: x.detach().cpu().contiguous() for name, x in iterator}, folder / "model.safetensors")
        self._load(folder)
        shutil.rmtree(previous, ignore_errors=True)

    def resume(self):
        self.client.resume(timeout=int(self.timeout))

    def destroy(self):
        """Remove the weights on disk."""
        shutil.rmtree(self._path(), ignore_errors=True)

    def _path(self) -> Path:
        return self.folder / f"weights-{self._version}"

    def _load(self, folder: Path):
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


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    Attention of a packed row of `N` tokens. Each token attends to the tokens before it on its path from the root.

    Queries are `(1, H, N, D)`, keys and values `(1, K, N, D)`: each of the `K` heads is shared by `H / K` heads of the
    queries. The output is `(1, N, H, D)`. `tree_kv_index`, `(P,)`, has the index in the row of each token on the paths of all
    segments, one path after the other; `tree_cu_seqlens_q` and `tree_cu_seqlens_k`, `(S + 1,)`, have the start and end of the
    `S` segments in the row, and of their paths in `tree_kv_index`. The tree defines the mask, so `attention_mask` is not used.
    """
    if softcap:
        raise NotImplementedError(
            f"The model bounds its attention scores (softcap={softcap}), which the attention for packed rows on a CPU does "
            "not support. Train it on a GPU, or use `RolloutCorrectedGRPOTrainer`."
        )
    visible = visible_tokens(tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k, sliding_window)
    grouped = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling, enable_gqa=grouped)
    return output.transpose(1, 2), None


def visible_tokens(
    kv_index: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, sliding_window: int | None = None
) -> torch.Tensor:
    """Attention mask, boolean, `(N, N)`, from arguments of `tree_attention`."""
    lengths, path_lengths = (cu.diff().long() for cu in (cu_seqlens_q, cu_seqlens_k))
    segments = torch.arange(len(lengths), device=kv_index.device)
    path_of = segments.repeat_interleave(path_lengths)  # (P,)
    depth_on_path = torch.arange(len(kv_index), device=kv_index.device) - cu_seqlens_k.long()[path_of]
    n = int(lengths.sum())
    depth = torch.empty(n, dtype=torch.long, device=kv_index.device).scatter_(0, kv_index, depth_on_path)
    on_path = torch.zeros(len(lengths), n, dtype=torch.bool, device=kv_index.device)
    on_path[path_of, kv_index] = True
    distance = depth[:, None] - depth[None]
    visible = on_path[segments.repeat_interleave(lengths)] & (distance >= 0)
    return visible if not sliding_window else visible & (distance < sliding_window)
