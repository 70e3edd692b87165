"""Axolotl's GRPO trainer with rollout correction. The plugin names it, and Axolotl imports it after its own trainers."""

from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer

from ..trainers.batches import TAGS
from ..trainers.grpo import RolloutCorrectedGRPOTrainer


class RolloutCorrectedAxolotlTrainer(RolloutCorrectedGRPOTrainer, AxolotlGRPOTrainer):
    """
    Axolotl's trainer for `rl: grpo`, with rollout correction. Axolotl builds it, with its own arguments.

    Rollout correction comes before Axolotl's trainer among the bases, so that `super()` reaches Axolotl's methods.
    """

    _tag_names = [*AxolotlGRPOTrainer._tag_names, *TAGS]
