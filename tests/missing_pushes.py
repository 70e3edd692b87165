"""An extension of vLLM's worker, for servers of tests: the second of two replicas misses pushes."""

import os
from pathlib import Path

from trl_rollout_corr.worker import PackingWorker


class MissingPushes(PackingWorker):
    """As ours, but the second replica takes no weights while the file exists that the variable `MISSES_PUSHES` names."""

    def reload_and_pack(self, weights_path: str) -> None:
        is_second = self.vllm_config.parallel_config.data_parallel_index == 1
        if not (is_second and Path(os.environ["MISSES_PUSHES"]).exists()):
            super().reload_and_pack(weights_path)
