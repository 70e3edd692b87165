"""
TRL's own correction, translated to fields of [`RolloutCorrectionConfig`]: the settings that
`rollout_correction: trl` keeps.

Settings of verl are translated by [`~trl_rollout_corr.tools.translation.verl`].
"""

import re
from collections.abc import Mapping
from typing import Any

from ...messages import SettingError, nearest
from ...settings.thresholds import none_if_null, parse_number, parse_truth, parse_weight_threshold


_TRL = "vllm_importance_sampling_"
TRL_KEYS = tuple(f"{_TRL}{name}" for name in ("correction", "mode", "clip_max", "clip_min", "cap"))
# Keys of TRL and of verl that are true or false
TRUTH_KEYS = (
    "rollout_is_batch_normalize",
    "bypass_mode",
    "bypass_old_logprob_for_rollout",
    "use_pure_rollout_correction",
    "use_policy_gradient",
    "vllm_importance_sampling_correction",
)
OFF = {"rollout_correction": "disabled"}
INF = float("inf")


# Values ---------------------------------------------------------------------------------------------------------------


def read_value(value: object, key: str) -> object:
    """A value without the text of null, which is refused if it is empty or has a variable that no shell has expanded."""
    if not isinstance(value, str):
        return value
    if re.search(r"\$[{(\w]", value):
        remedy = "The shell must expand it: run the command in the script that sets the variable, or write the value."
        raise SettingError(key, value, "which is not expanded", remedy=remedy)
    if not value.strip():
        raise SettingError(key, value, "which is empty", remedy="A variable of the script may not be set.")
    return none_if_null(value)


def read_keys(settings: Mapping[str, object], keys: tuple[str, ...], what: str) -> dict[str, Any]:
    """Check the keys, and read null and truth values of text."""
    plain = {key: read_value(value, key) for key, value in settings.items() if key != "_target_"}  # of Hydra
    for key, value in plain.items():
        if key not in keys:
            remedy = f"{nearest(key, keys)} Known keys: {', '.join(keys)}.".strip()
            raise SettingError(key, value, f"which does not belong to {what}", remedy=remedy)
        if key in TRUTH_KEYS and value is not None:
            plain[key] = parse_truth(value, key)
    return plain


def from_trl(settings: Mapping[str, object]) -> dict[str, Any]:
    """Fields for TRL's `vllm_importance_sampling_*` settings of `GRPOConfig`; missing ones have TRL's defaults."""
    # The `mask` modes set weights outside the bounds to 0 and keep the others, which is IcePop. TRL
    # takes the ratio of a token without a log-probability as 1, hence `rollout_nan_policy`.
    settings = read_keys(settings, TRL_KEYS, "TRL's `vllm_importance_sampling_*` settings")
    if not settings.get("vllm_importance_sampling_correction", True):
        return dict(OFF)
    mode = settings.get("vllm_importance_sampling_mode", "sequence_mask")
    of_upper = f"{_TRL}cap" if settings.get(f"{_TRL}cap") else f"{_TRL}clip_max"
    upper, lower = settings.get(of_upper, 3.0), settings.get(f"{_TRL}clip_min")
    level, _, bounding = str(mode).partition("_")
    if level not in ("token", "sequence") or bounding not in ("truncate", "mask"):
        allowed = "token_truncate, token_mask, sequence_truncate or sequence_mask"
        raise SettingError("vllm_importance_sampling_mode", mode, allowed=allowed)
    upper = INF if upper is None else parse_number(upper, of_upper)
    if upper < 1:
        raise SettingError(of_upper, upper, "or it shrinks all weights", "at least 1", "TRL's default is 3.0.")
    if lower is not None and not 0 <= (lower := parse_number(lower, f"{_TRL}clip_min")) <= 1:
        raise SettingError(f"{_TRL}clip_min", lower, allowed="from 0 to 1, or None")
    threshold = parse_weight_threshold(upper if lower is None and bounding == "truncate" else [lower or 0.0, upper])
    fields = {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_nan_policy": "neutralize"}
    return {**fields, "rollout_is_clamp": True} if bounding == "truncate" and lower is not None else fields


def of_configuration(config: object) -> dict[str, Any]:
    """Fields for the `vllm_importance_sampling_*` settings that a configuration has."""
    return from_trl({name: getattr(config, name) for name in TRL_KEYS if hasattr(config, name)})


def given_to_trl(settings: Mapping[str, Any]) -> dict[str, Any]:
    """TRL's `vllm_importance_sampling_*` settings among those of a run, without the ones that have TRL's default."""
    defaults = {"correction": True, "mode": "sequence_mask", "clip_max": 3.0, "clip_min": None, "cap": None}
    values = {key: settings.get(key, defaults[key.removeprefix(_TRL)]) for key in TRL_KEYS}
    return {key: value for key, value in values.items() if value != defaults[key.removeprefix(_TRL)]}
