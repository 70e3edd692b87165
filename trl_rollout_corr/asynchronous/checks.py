"""Checks of settings that need the fields of TRL's asynchronous trainer."""

from typing import Any

from ..messages import SettingError, warn_idle
from ..settings.resolve import Settings
from ..trainers.trl_checks import (
    Check,
    check_names_of_bounds,
    check_temperature,
    normalizes_over,
    warn_about_clipping,
    warn_about_effects,
    warn_about_engine_kwargs,
)


def check_asynchronous(config: Any, settings: Settings) -> None:
    """Refuse settings that an asynchronous run cannot follow."""
    for name, least in (("max_staleness", 0), ("weight_sync_steps", 1)):
        if getattr(config, name, least) < least:
            raise SettingError(name, getattr(config, name), allowed=f"{least} or more")
    if settings.rollout_rs_exclude_from_baseline:
        raise SettingError(
            "rollout_rs_exclude_from_baseline",
            True,
            "but in an asynchronous run the rollout worker computes rewards and baselines before the trainer gets a "
            "sample, when rejections are not known yet",
            remedy="Set it to False.",
        )
    if settings.rollout_support is not None:
        reason = "which needs a colocated vLLM, and an asynchronous run uses a server"
        raise SettingError("rollout_support", settings.rollout_support, reason, remedy="Set it to None.")
    if settings.rollout_routing is not None:
        reason = "but the rollout worker of an asynchronous run drops the routes of the sampler"
        raise SettingError("rollout_routing", settings.rollout_routing, reason, remedy="Set it to None.")
    budget = getattr(config, "token_budget", None)  # newer releases of TRL lack it
    packs = budget is None or budget > 0  # a row holds as many completions as fit
    fewest = config.world_size * (1 if packs else config.per_device_train_batch_size)
    if normalizes_over(settings, "sequence", "geometric") and fewest == 1:
        raise SettingError(
            "rollout_is_batch_normalize",
            True,
            "and in an asynchronous run the mean is over the micro-batch of all ranks, which "
            f"{'with this `token_budget` may be' if packs else 'is'} one completion: its weight would be 1",
            remedy="Set `token_budget` to 0 and `per_device_train_batch_size` to 2 or more, or "
            "`rollout_is_batch_normalize` to False.",
        )


def warn_about_idle_clipping(config: Any, settings: Settings) -> None:
    """Warn about bounds of PPO's ratio where the correction is decoupled: each sample is visited once."""
    if not settings.changes_loss or settings.mode != "decoupled":
        return
    reason = (
        "PPO's ratio is always 1 with this correction, because a sample is trained on once. Remove it, or to clip "
        "around vLLM set `rollout_correction` to trl or bypass_ppo_clip"
    )
    for name in ("epsilon", "epsilon_high"):
        if (value := getattr(config, name)) != getattr(type(config), name):
            warn_idle(name, value, reason)


CHECKS: list[Check] = [
    check_asynchronous,
    check_names_of_bounds,
    check_temperature,
    warn_about_engine_kwargs,
    warn_about_effects,
    warn_about_clipping,
    warn_about_idle_clipping,
]
