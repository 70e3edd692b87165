"""
The reader of another tool's settings as text, and the translation of TRL's own correction to fields of
[`RolloutCorrectionConfig`].

[`~trl_rollout_corr.tools.translation.verl`] translates settings of verl.
"""

import re
from collections.abc import Mapping
from typing import Any

from ...messages import SettingError, nearest
from ...settings.thresholds import none_if_null, parse_truth
from ...settings.trl_correction import DEFAULTS_OF_TRL, SWITCH, fields_of


TRL_KEYS = tuple(DEFAULTS_OF_TRL)
# Keys of TRL and of verl that are true or false
TRUTH_KEYS = (
    "rollout_is_batch_normalize",
    "bypass_mode",
    "bypass_old_logprob_for_rollout",
    "use_pure_rollout_correction",
    "use_policy_gradient",
    SWITCH,
)
OFF = {"rollout_correction": "disabled"}


# Values --------------------------------------------------------------------------------------------------------------


def read_value(value: object, key: str) -> object:
    """A value, with the text of null as `None`. Refuses empty text and variables that no shell expanded."""
    if not isinstance(value, str):
        return value
    if re.search(r"\$[{(\w]", value):
        remedy = "The shell must expand it: run the command in the script that sets the variable, or write the value."
        raise SettingError(key, value, "which is not expanded", remedy=remedy)
    if not value.strip():
        raise SettingError(key, value, "which is empty", remedy="A variable of the script may not be set.")
    return none_if_null(value)


def read_keys(settings: Mapping[str, object], keys: tuple[str, ...], what: str) -> dict[str, Any]:
    """Check the keys, and read null and truth values from text. Returns the settings."""
    plain = {key: read_value(value, key) for key, value in settings.items() if key != "_target_"}  # a key of Hydra
    for key, value in plain.items():
        if key not in keys:
            remedy = f"{nearest(key, keys)} Known keys: {', '.join(keys)}.".strip()
            raise SettingError(key, value, f"which does not belong to {what}", remedy=remedy)
        if key in TRUTH_KEYS and value is not None:
            plain[key] = parse_truth(value, key)
    return plain


def read_trl(settings: Mapping[str, object]) -> dict[str, Any]:
    """TRL's `vllm_importance_sampling_*` settings, which may be text."""
    return read_keys(settings, TRL_KEYS, "TRL's `vllm_importance_sampling_*` settings")


def from_trl(settings: Mapping[str, object]) -> dict[str, Any]:
    """Fields for TRL's `vllm_importance_sampling_*` settings, which may be text; missing ones take TRL's defaults."""
    return fields_of(read_trl(settings))
