"""
Rollout correction as a plugin of Axolotl, for `rl: grpo`.

With this folder in `PYTHONPATH` and `grpo.yaml` beside it:

    PYTHONPATH=examples/axolotl axolotl train examples/axolotl/grpo.yaml

All `rollout_*` fields are keys of Axolotl's YAML. It drops keys that are null: write `none`. For Axolotl 0.21. The tests use a
stand-in of its interface; `trl-rollout-corr docs compatibility` has what ran with Axolotl itself.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, create_model

from trl_rollout_corr import RolloutCorrectionConfig


# Keys of the YAML, of any type: `RolloutCorrectedGRPOConfig` checks their values
FIELDS = [name for name in RolloutCorrectionConfig.__dataclass_fields__ if not name.endswith("_resolved")]
RolloutCorrectionArgs: type[BaseModel] = create_model("RolloutCorrectionArgs", **dict.fromkeys(FIELDS, (Any, None)))
# Not imported here: Axolotl joins the fields of plugins with its own when its trainers are imported
TRAINER = "corrected_trainer.RolloutCorrectedAxolotlTrainer"


class RolloutCorrectionPlugin(BasePlugin):
    """Puts the corrected trainer in place of Axolotl's, and the fields into its configuration."""

    def register(self, cfg: dict) -> None:
        """Refuse settings of Axolotl with other trainers than its synchronous one, and name the trainer."""
        of_trl = cfg.get("trl") or {}
        if cfg.get("rl") != "grpo":
            raise ValueError(f"`rl` is {cfg.get('rl')!r}, and rollout correction is for 'grpo'. Remove the plugin.")
        for name in ("async_prefetch", "use_data_producer"):
            if of_trl.get(name):
                raise ValueError(
                    f"`trl.{name}` is {of_trl[name]!r}: Axolotl then has a trainer of its own, whose loss cannot be "
                    "corrected. Set it to false."
                )
        for name in ("context_parallel_size", "sequence_parallel_degree"):
            if (cfg.get(name) or 1) > 1:
                raise ValueError(
                    f"`{name}` is {cfg[name]!r}: log-probabilities of a completion are then on several ranks, and cannot be "
                    "compared with those of the sampler. Set it to 1."
                )
        if not of_trl.get("use_vllm"):
            raise ValueError("`trl.use_vllm` is not true, so there is no sampler to correct for. Set it.")
        # A class that a plugin returns gets neither model nor reward functions from Axolotl; a name in the YAML does
        cfg["trainer_cls"] = cfg.get("trainer_cls") or TRAINER

    def get_input_args(self) -> str:
        """Keys of the YAML."""
        return f"{__name__}.RolloutCorrectionArgs"

    def get_training_args_mixin(self) -> str:
        """Base of Axolotl's configuration of a run, with the fields and their checks."""
        return "trl_rollout_corr.RolloutCorrectedGRPOConfig"

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Fields that the YAML sets."""
        return {name: getattr(cfg, name) for name in FIELDS if getattr(cfg, name, None) is not None}
