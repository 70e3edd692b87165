"""Axolotl's GRPO trainer with rollout correction, for the plugin in `rollout_correction.py`."""

from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer

from trl_rollout_corr import RolloutCorrectedGRPOTrainer


class RolloutCorrectedAxolotlTrainer(RolloutCorrectedGRPOTrainer, AxolotlGRPOTrainer):
    """Rollout correction comes before Axolotl's trainer among the bases."""

    _tag_names = [*AxolotlGRPOTrainer._tag_names, "rollout-correction"]
