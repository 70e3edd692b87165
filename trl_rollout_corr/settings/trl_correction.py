"""What TRL's own fields mean: the correction that `rollout_correction: trl` keeps, as fields. No torch."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..messages import SettingError
from .thresholds import parse_number, parse_weight_threshold


PREFIX_OF_TRL = "vllm_importance_sampling_"
SWITCH, MODE = f"{PREFIX_OF_TRL}correction", f"{PREFIX_OF_TRL}mode"
_DEFAULTS = {"correction": True, "mode": "sequence_mask", "clip_max": 3.0, "clip_min": None, "cap": None}
DEFAULTS_OF_TRL: dict[str, Any] = {f"{PREFIX_OF_TRL}{name}": value for name, value in _DEFAULTS.items()}


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields for `vllm_importance_sampling_*` of `GRPOConfig`; missing ones take TRL's defaults."""
    # The `mask` modes set weights outside the bounds to 0 and keep the others, which is IcePop. TRL sets the ratio of
    # a token without a log-probability to 1, hence `rollout_nan_policy`.
    settings = {**DEFAULTS_OF_TRL, **given}
    if not settings[SWITCH]:
        return {"rollout_correction": "disabled"}
    mode = settings[MODE]
    level, _, bounding = str(mode).partition("_")
    if level not in ("token", "sequence") or bounding not in ("truncate", "mask"):
        allowed = "token_truncate, token_mask, sequence_truncate or sequence_mask"
        raise SettingError(MODE, mode, allowed=allowed)
    of_upper = f"{PREFIX_OF_TRL}cap" if settings[f"{PREFIX_OF_TRL}cap"] else f"{PREFIX_OF_TRL}clip_max"
    upper, lower = settings[of_upper], settings[f"{PREFIX_OF_TRL}clip_min"]
    upper = math.inf if upper is None else parse_number(upper, of_upper)
    if upper < 1:
        raise SettingError(of_upper, upper, "or it shrinks all weights", "at least 1", "TRL's default is 3.0.")
    if lower is not None and not 0 <= (lower := parse_number(lower, f"{PREFIX_OF_TRL}clip_min")) <= 1:
        raise SettingError(f"{PREFIX_OF_TRL}clip_min", lower, allowed="from 0 to 1, or None")
    truncates = bounding == "truncate"
    one_bound = truncates and lower is None
    threshold = parse_weight_threshold(upper if one_bound else [lower or 0.0, upper])
    fields = {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_nan_policy": "neutralize"}
    return {**fields, "rollout_is_clamp": True} if truncates and not one_bound else fields


def given_to_trl(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The `vllm_importance_sampling_*` settings among `settings` that differ from TRL's default."""
    return {name: settings[name] for name, value in DEFAULTS_OF_TRL.items() if settings.get(name, value) != value}


def chooses_trl(fields: Mapping[str, Any], *, only_measures: bool) -> bool:
    """
    True if fields of TRL choose its own correction for a run that names none: they set it, unless the run only
    measures, or a loss that goes with no other weights.
    """
    return fields.get("loss_type") == "vespo" or (bool(given_to_trl(fields)) and not only_measures)


def _of_grpo(fields: Mapping[str, Any]) -> dict[str, Any]:
    # TRL corrects no completions of a `rollout_func`. A script may set `use_vllm` where a file does not
    return fields_of(given_to_trl(fields)) if fields.get("use_vllm", True) else {}


def _of_rloo(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {}  # TRL does not correct RLOO


def _of_async_grpo(fields: Mapping[str, Any]) -> dict[str, Any]:
    # TRL clips around the sampler, without a further bound
    return {"bypass_mode": True, "rollout_loss_type": "ppo_clip", "rollout_clip_ratio_c": None}


# Fields that say what `rollout_correction: trl` does in each of TRL's trainers, by fields of the trainer
OF_TRAINER: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "grpo": _of_grpo,
    "rloo": _of_rloo,
    "async_grpo": _of_async_grpo,
}
