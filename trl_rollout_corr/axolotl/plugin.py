"""
The plugin: settings in Axolotl's YAML become fields of the configuration, and a corrected trainer replaces Axolotl's.

Written for Axolotl 0.21, whose `axolotl train` ran with it. The tests use a stand-in of its interface.
"""

from dataclasses import fields
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, create_model

from ..settings.config import RolloutCorrectionConfig


# Keys of the YAML, of any type: `RolloutCorrectedGRPOConfig` checks their values
FIELDS = [field.name for field in fields(RolloutCorrectionConfig)]
KEYS: dict[str, Any] = dict.fromkeys(FIELDS, (Any, None))
RolloutCorrectionArgs: type[BaseModel] = create_model("RolloutCorrectionArgs", **KEYS)
# A name, because the import must come later: importing Axolotl's trainers joins the fields of its plugins
TRAINER = "trl_rollout_corr.axolotl.trainer.RolloutCorrectedAxolotlTrainer"


class RolloutCorrectionPlugin(BasePlugin):
    """
    Rollout correction for `rl: grpo`. Axolotl builds the plugin from its name under `plugins`, and calls the methods.

    It makes every `rollout_*` field of [`RolloutCorrectionConfig`] a key of Axolotl's YAML. Axolotl drops keys whose
    value is null: write `none` instead.
    """

    def register(self, cfg: dict) -> None:
        """
        Refuse settings of Axolotl that cannot be corrected, and name the corrected trainer unless the YAML names one.
        """
        of_trl = cfg.get("trl") or {}
        if cfg.get("rl") != "grpo":
            raise ValueError(
                f"`rl` is {cfg.get('rl')!r}, but rollout correction supports only 'grpo'. Set `rl` to "
                "'grpo', or remove the plugin."
            )
        for name in ("async_prefetch", "use_data_producer"):
            if of_trl.get(name):
                raise ValueError(
                    f"`trl.{name}` is {of_trl[name]!r}: Axolotl then has a trainer of its own, whose loss cannot be "
                    "corrected. Set it to false."
                )
        for name in ("context_parallel_size", "sequence_parallel_degree"):
            if (cfg.get(name) or 1) > 1:
                raise ValueError(
                    f"`{name}` is {cfg[name]!r}: log-probabilities of a completion are then on several ranks, and "
                    "cannot be compared with the sampler's. Set it to 1."
                )
        if not of_trl.get("use_vllm"):
            raise ValueError("`trl.use_vllm` is not true, so there is no sampler to correct for. Set it to true.")
        # Axolotl passes model and reward functions only to a trainer named in the YAML, not to a class that a plugin
        # returns
        cfg["trainer_cls"] = cfg.get("trainer_cls") or TRAINER

    def get_input_args(self) -> str:
        """Name of the class whose fields become keys of the YAML."""
        return "trl_rollout_corr.axolotl.RolloutCorrectionArgs"

    def get_training_args_mixin(self) -> str:
        """
        Name of the class that Axolotl adds to the bases of its training arguments: the fields, with their checks.
        """
        return "trl_rollout_corr.RolloutCorrectedGRPOConfig"

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Fields that the YAML sets, with their values."""
        return {name: getattr(cfg, name) for name in FIELDS if getattr(cfg, name, None) is not None}
