"""Axolotl's GRPO trainer with rollout correction. The plugin names it, and Axolotl imports it after its own trainers."""

from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer

from ..tools.arrival.server import check_patterns, served_adapter
from ..trainers.batches import TAGS
from ..trainers.grpo import RolloutCorrectedGRPOTrainer


class RolloutCorrectedAxolotlTrainer(RolloutCorrectedGRPOTrainer, AxolotlGRPOTrainer):
    """
    Axolotl's trainer for `rl: grpo`, with rollout correction. Axolotl builds it, with its own
    arguments.

    Rollout correction comes before Axolotl's trainer among the bases, so that `super()` reaches
    Axolotl's methods.
    """

    _tag_names = [*AxolotlGRPOTrainer._tag_names, *TAGS]

    def _set_up_observer(self) -> None:
        super()._set_up_observer()
        # Axolotl's field: the server loads the adapter from files
        if getattr(self.args, "vllm_lora_sync", False) and self.accelerator.is_main_process:
            check_patterns(self.vllm_generation.vllm_client.base_url, served_adapter(self._bare(self.model)))
