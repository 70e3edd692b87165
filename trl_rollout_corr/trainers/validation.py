"""Checks of a trainer configuration that involve both TRL's fields and ours."""

import dataclasses

from trl import GRPOConfig

from ..config import RolloutCorrectionConfig, warn


_TRL_FIELDS = (
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_cap",
)


def replace_trl_correction(config: GRPOConfig):
    """
    Switch TRL's own correction off, and say so if it was configured.

    Args:
        config ([`~trl.GRPOConfig`]):
            Configuration, changed in place before TRL validates it.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(GRPOConfig) if f.name in _TRL_FIELDS}
    changed = {name: getattr(config, name) for name in _TRL_FIELDS if getattr(config, name) != defaults[name]}
    if changed:
        settings = ", ".join(f"`{name}={value!r}`" for name, value in changed.items())
        warn(
            f"{settings} has no effect: rollout correction replaces TRL's. `RolloutCorrectionConfig.from_trl` translates "
            "these settings."
        )
    config.vllm_importance_sampling_correction = False


def check_batch_normalization(config: RolloutCorrectionConfig):
    """
    Refuse batch normalisation over a single sequence, which would set its weight to 1.

    Args:
        config ([`RolloutCorrectionConfig`]):
            Configuration of a trainer, after TRL has resolved batch sizes.

    Raises:
        `ValueError`: if the micro-batch of all ranks is one sequence where it is the scope of a sequence-level mean.
    """
    sequence_level = config.rollout_is in ("sequence", "geometric")
    normalizes = config.corrects and config.applies_weights and config.rollout_is_batch_normalize
    if not (normalizes and sequence_level and config.bypass_mode):
        return
    if config.per_device_train_batch_size * config.world_size == 1:
        raise ValueError(
            "`rollout_is_batch_normalize` is True with `bypass_mode`, where it spans the micro-batch of all ranks, and that "
            "is one sequence: its weight would always be 1. Set `per_device_train_batch_size` to 2 or more (and divide "
            "`gradient_accumulation_steps` accordingly), or use `bypass_mode=False`, which normalises over the generation "
            "batch."
        )
