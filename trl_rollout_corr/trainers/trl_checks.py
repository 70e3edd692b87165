"""
Checks of settings that need TRL's own fields. `settings/config.py` checks the fields of the correction alone.

Each check is a function of a configuration, for TRL's fields, and of its `Settings`, which were resolved once. It
raises a [`SettingError`] about settings that exclude each other, or warns about settings that are probably a mistake.
"""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import torch

from .. import door
from ..messages import SettingError, warn, warn_idle
from ..settings.effects import effects, shares_gradient, truncations
from ..settings.fields import LOSS_TYPES
from ..settings.presets import DEFAULT
from ..settings.resolve import Settings
from ..settings.trl_correction import MODE, PREFIX_OF_TRL


# vLLM samples greedily at 0, and raises lower temperatures to this one
_LOWEST_TEMPERATURE = 0.01


class WarnIfUnreadMixin:
    """A configuration that warns if TRL's own trainer uses it, which ignores the settings."""

    _is_read = False  # True once a trainer of this package read the settings

    def get_warmup_steps(self, num_training_steps: int) -> Any:
        # This is the method of a configuration that Transformers calls when training begins, and only then
        if not self._is_read:
            warn(
                "The settings of rollout correction have no effect, because no trainer of this package has read them: "
                f"a trainer of TRL trains with this `{type(self).__name__}`, and keeps its own correction. Build the "
                "trainer with a class of this package, such as `RolloutCorrectedGRPOTrainer`.",
                "rollout_correction",
            )
            self._is_read = True  # warn once
        return super().get_warmup_steps(num_training_steps)  # type: ignore[misc]


# The loss ------------------------------------------------------------------------------------------------------------


def check_loss_type(config: Any) -> None:
    """Refuse values of `rollout_loss_type`."""
    if config.loss_type in LOSS_TYPES:
        remedy = "Set `rollout_loss_type` to it, and `loss_type` to a loss of TRL: grpo, dr_grpo, dapo, ..."
        raise SettingError("loss_type", config.loss_type, "which is a loss of `bypass_mode`", remedy=remedy)


def check_loss(config: Any, settings: Settings) -> None:
    """
    Refuse values of `rollout_loss_type`, and corrections that do not go with a loss that applies its own importance
    weights.
    """
    check_loss_type(config)
    if config.loss_type != "vespo":
        return
    mode = getattr(config, MODE)
    is_refused = config.use_vllm and not mode.startswith("token")  # by TRL, once it has loaded the model
    if settings.changes_loss:
        and_mode = f" and `{MODE}` to token_truncate" if is_refused else ""
        raise SettingError(
            "loss_type",
            "vespo",
            "which has importance weights of its own, so no other weight or rejection can be applied to it",
            remedy=f"Choose another `loss_type`, or set `rollout_correction` to trl{and_mode}, or only measure: set "
            "`rollout_correction` to disabled, or `rollout_metrics_only` to true.",
        )
    if settings.by_trl and settings.corrects and is_refused:
        reason = "which TRL refuses with `loss_type='vespo'`"
        raise SettingError(MODE, mode, reason, remedy="Set it to token_truncate or token_mask.")


def check_reinforce(config: Any, settings: Settings) -> None:
    """Refuse losses that break the ratio of 1 in `rollout_loss_type="reinforce"`."""
    if not settings.changes_loss or settings.mode != "reinforce":
        return
    cap = config.epsilon_high or config.epsilon
    is_of_user = "rollout_loss_type" in settings.given
    field = "`rollout_loss_type='reinforce'`"
    cause = field if is_of_user else f"`{settings.rollout_correction}` ({field})"
    another = "" if is_of_user else f", or `rollout_correction` to {DEFAULT}"
    if config.loss_type == "cispo" and cap < 1.0:
        raise SettingError(
            "epsilon_high",
            cap,
            f"which with `loss_type='cispo'` is the upper bound of the ratio, and with {cause} the ratio is 1: every "
            f"gradient would be multiplied by {cap}",
            remedy=f"Set `epsilon_high` to 1 or more{another}.",
        )
    if config.importance_sampling_level != "token":
        raise SettingError(
            "importance_sampling_level",
            config.importance_sampling_level,
            f"and the loss of {cause} is a sum over tokens",
            remedy="Set it to 'token'; for weights of sequences set `rollout_is` to 'sequence' or 'geometric'."
            if is_of_user
            else f"Set `rollout_correction` to {DEFAULT}, or `importance_sampling_level` to 'token'.",
        )


def warn_about_sequence_level(config: Any, settings: Settings) -> None:
    """
    Warn about weights and rejection of tokens and turns that were asked for in a loss with ratios per completion. A
    preset asks for neither: what it does there is in the description of the settings, for every preset as for the
    default.
    """
    asked = settings.given & {"rollout_is", "rollout_rs"}
    if not asked or not settings.changes_loss or not shares_gradient(vars(config)):
        return
    weights = f"rollout_is={settings.rollout_is!r}"
    acting = [f"`{weights if name == 'rollout_is' else name}`" for name in settings.acting_on_parts]
    if acting:
        act = "acts" if len(acting) == 1 else "act"
        warn(
            f"{' and '.join(acting)} {act} on single tokens or turns, but with "
            "`importance_sampling_level='sequence'` all tokens of a completion have the same gradient: their mean "
            "acts on the completion, as in TRL's own correction. To weight or reject completions, use "
            "`rollout_is='sequence'` or 'geometric', and criteria that start with `seq_`."
        )


def warn_about_clip_ratio(config: Any, settings: Settings) -> None:
    """Warn if TRL's loss does not bound the ratio to the sampler by `rollout_clip_ratio_c`."""
    if not (settings.changes_loss and settings.clips_around_sampler) or settings.rollout_clip_ratio_c in (None, 3.0):
        return
    if config.loss_type in ("cispo", "sapo"):
        reason = f"`loss_type` is {config.loss_type!r}, which has its own bound on the ratio"
    elif config.delta is not None:
        reason = f"`delta` is {config.delta}, which is the same bound and takes precedence"
    else:
        return
    warn_idle("rollout_clip_ratio_c", settings.rollout_clip_ratio_c, reason)


def warn_about_clipping(config: Any, settings: Settings) -> None:
    """Warn about bounds of PPO's ratio in a loss whose ratio is always 1."""
    if not settings.changes_loss or settings.mode != "reinforce" or getattr(config, "loss_type", "") == "cispo":
        return
    of_user = "rollout_loss_type" in settings.given
    clips = "`rollout_loss_type` to 'ppo_clip'" if of_user else "`rollout_correction` to bypass_ppo_clip"
    reason = f"with `rollout_loss_type='reinforce'` nothing is clipped. Remove it, or to clip set {clips}"
    for name in ("epsilon", "epsilon_high", "delta"):
        value = getattr(config, name, None)
        stops = name == "delta" and value is not None and value < 1.0  # every gradient, so it has an effect
        if value != getattr(type(config), name, None) and not stops:
            warn_idle(name, value, reason)


def warn_about_iterations(config: Any, settings: Settings) -> None:
    """Warn about several visits of completions by a loss without a bound on the step."""
    if not settings.changes_loss or settings.mode != "reinforce" or config.num_iterations == 1:
        return
    if not any(criterion.directed for criterion in settings.criteria):  # a trust region
        warn(
            f"`num_iterations` is {config.num_iterations} with `rollout_loss_type='reinforce'`, which has no "
            "clipping: only the bound of the weights limits the steps, and each visit of a completion moves the "
            "policy further. Set `rollout_loss_type` to 'ppo_clip', `num_iterations` to 1, or add a trust region: "
            "'token_tv' in `rollout_rs`."
        )


# Batch normalisation -------------------------------------------------------------------------------------------------


def check_batch_normalization(config: Any, settings: Settings) -> None:
    """Refuse batch normalisation over one sequence, whose weight would be 1. Warn for a turn."""
    if not settings.bypass_mode or config.per_device_train_batch_size * config.world_size > 1:
        return
    name, reason, remedy = (
        "rollout_is_batch_normalize",
        "and with `bypass_mode` the mean is over the micro-batch of all ranks, which is one sequence: its weight "
        "would always be 1",
        "Set `per_device_train_batch_size` to 2 or more (and divide `gradient_accumulation_steps` accordingly), or "
        "use `bypass_mode=False`, which normalises over the generation batch.",
    )
    if normalizes_over(settings, "sequence", "geometric"):
        raise SettingError(name, True, reason, remedy=remedy)
    if normalizes_over(settings, "turn"):
        warn(str(SettingError(name, True, f"{reason} if it has one turn", remedy=remedy)), name)


def normalizes_over(settings: Settings, *levels: str) -> bool:
    """True if weights of one of the levels are divided by their mean."""
    return bool(settings.changes_loss and settings.normalizes and settings.rollout_is in levels)


# Sampling ------------------------------------------------------------------------------------------------------------


def check_temperature(config: Any, _: Settings) -> None:
    """Refuse temperatures at which vLLM samples from another distribution than the trainer's."""
    if getattr(config, "use_vllm", True) and not _LOWEST_TEMPERATURE <= config.temperature < math.inf:
        raise SettingError(
            "temperature",
            config.temperature,
            "below it, vLLM samples greedily or at another temperature, while the trainer divides by this one",
            allowed=f"a number of at least {_LOWEST_TEMPERATURE}",
            remedy="Set it to 1.0.",
        )


def check_shared_process(config: Any, _: Settings) -> None:
    """Refuse what breaks the trainer in the process shared with vLLM, or warn where it may."""
    if not config.use_vllm or config.vllm_mode != "colocate":
        return
    if config.vllm_model_impl == "transformers":
        raise SettingError(
            "vllm_model_impl",
            "transformers",
            "and with `vllm_mode='colocate'` vLLM then changes the class of the model in Transformers: the forward "
            "pass of the trainer fails in the same process (`'LlamaModel' object has no attribute 'do_not_compile'`)",
            remedy="Set `vllm_model_impl` to 'vllm' or 'auto', or `vllm_mode` to 'server', and start the server with "
            "`--model-impl transformers`.",
        )
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") in ("", "0"):
        return
    remedy = "Unset it, or set `vllm_mode` to 'server', and set the variable for the server alone."
    if config.use_cpu or not torch.accelerator.is_available():
        raise ValueError(
            "The environment variable VLLM_BATCH_INVARIANT is set, which ends vLLM with an error on a CPU: its "
            f"kernels need a GPU. {remedy}"
        )
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 8:
        warn(
            "Perhaps the first backward pass will fail: the environment variable VLLM_BATCH_INVARIANT is set, and on "
            "a GPU of compute capability 8 vLLM then replaces operators of PyTorch, `linear` among them, in the whole "
            "process, which the trainer shares. According to vLLM's source, they have no gradient; this was never "
            f"run. {remedy}"
        )


def check_sampler_options(config: Any, settings: Settings) -> None:
    """Refuse replays, arguments and options unknown to the sampler. Warn about doubtful ones."""
    if not config.use_vllm:
        return
    kwargs = (settings.rollout_engine_kwargs if config.vllm_mode == "colocate" else None) or {}
    replays = settings.rollout_support or settings.rollout_routing
    if kwargs or config.generation_kwargs or replays:
        door.check_sampler(config, settings, kwargs, truncates=bool(truncations(vars(config))))


def check_names_of_bounds(config: Any, settings: Settings) -> None:
    """Refuse names that are no bounds of the monitor."""
    if settings.rollout_monitor_bounds and settings.rollout_monitor is not None:
        door.check_monitor_bounds(settings.rollout_monitor_bounds)


def warn_about_engine_kwargs(config: Any, settings: Settings) -> None:
    """Warn about arguments of an engine that TRL does not build."""
    if not getattr(config, "use_vllm", True):
        reason = "`use_vllm` is False"
    elif getattr(config, "vllm_mode", "server") == "server":  # an asynchronous run always uses a server
        reason = "a server has the arguments that it was started with, so give them to `vllm serve`"
    else:
        return
    if settings.rollout_engine_kwargs:
        warn_idle("rollout_engine_kwargs", settings.rollout_engine_kwargs, reason)


def warn_about_effects(config: Any, settings: Settings) -> None:
    """Warn about what the configuration does to the loss, see [`~trl_rollout_corr.settings.effects`]."""
    defaults = {
        field.name: field.default for field in dataclasses.fields(config) if field.name.startswith(PREFIX_OF_TRL)
    }
    given = {name: x for name, x in vars(config).items() if name not in defaults or x != defaults[name]}
    for effect in effects(settings, given):
        advice = f" {door.advice(settings, vars(config))}" if effect.is_harm else ""
        warn(f"{effect.text}{advice}", effect.field)


# In the order in which a user learns of them: refusals come first
Check = Callable[[Any, Settings], None]
_OF_SAMPLING: list[Check] = [
    check_names_of_bounds,
    check_shared_process,
    check_temperature,
    check_sampler_options,
    warn_about_engine_kwargs,
    warn_about_effects,
]
_OF_REINFORCE: list[Check] = [warn_about_clipping, warn_about_iterations]
CHECKS_OF_GRPO: list[Check] = [
    check_loss,
    check_reinforce,
    check_batch_normalization,
    *_OF_SAMPLING,
    warn_about_sequence_level,
    warn_about_clip_ratio,
    *_OF_REINFORCE,
]
CHECKS_OF_RLOO: list[Check] = [check_batch_normalization, *_OF_SAMPLING, *_OF_REINFORCE]
