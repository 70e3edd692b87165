"""
Settings of another tool as text, and TRL's own correction of such text, translated to fields of
[`RolloutCorrectionConfig`].

Settings of verl are translated by [`~trl_rollout_corr.tools.translation.verl`].
"""

import re
from collections.abc import Mapping
from typing import Any

from ...messages import SettingError, nearest
from ...settings.of_trl import DEFAULTS_OF_TRL, fields_of
from ...settings.thresholds import none_if_null, parse_truth


TRL_KEYS = tuple(DEFAULTS_OF_TRL)
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
    """Fields for TRL's `vllm_importance_sampling_*` settings, which may be text; missing ones have TRL's defaults."""
    return fields_of(read_keys(settings, TRL_KEYS, "TRL's `vllm_importance_sampling_*` settings"))
