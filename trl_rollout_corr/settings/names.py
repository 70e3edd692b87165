"""Replacements for names of other systems that are no fields here. No torch."""

import difflib
from collections.abc import Iterable

from ..messages import nearest
from .trl_correction import DEFAULTS_OF_TRL


_RATIO_CAP = "Write `rollout_is: token`, and the number as `rollout_is_threshold`."
_VETO = (
    "Write `rollout_rs: [seq_max_k1]` and `rollout_rs_threshold: [[0.0001, inf]]`, with your number as the lower "
    "bound."
)
_PURE_IS = "Write `bypass_mode: true` and `rollout_loss_type: reinforce`."
# Replacements for names of other systems that are no fields here, although similar names are
INSTEAD = {
    "rollout_token_veto_threshold": _VETO,
    "rollout_is_veto_threshold": _VETO,
    "rollout_is_level": "Write the level as `rollout_is`: token, window, turn, sequence or geometric.",
    "rollout_is_mode": "A number as `rollout_is_threshold` truncates weights. To mask tokens, set `rollout_rs`, too.",
    "rollout_is_threshold_lower": "Write both bounds as a pair: `rollout_is_threshold: [0.5, 2.0]`.",
    "rollout_rs_threshold_lower": "Write both bounds as a pair: `rollout_rs_threshold: [[0.5, 2.0]]`.",
    "bypass_old_logprob_for_rollout": "Write `bypass_mode: true`.",
    "use_pure_rollout_correction": _PURE_IS,
    "use_policy_gradient": _PURE_IS,
    "tis_imp_ratio_cap": _RATIO_CAP,
    "imp_ratio_cap": _RATIO_CAP,
    "use_tis": _RATIO_CAP,
    "loss_type": "Of TRL's trainers, only GRPO has it. The loss of `bypass_mode` is `rollout_loss_type`.",
    "use_vllm": "It is a field for GRPO and RLOO. An asynchronous run always samples with a vLLM server, so remove "
    "it there.",
}


def instead_of(name: str, names: Iterable[str]) -> str:
    """A sentence, after a blank, on what to write instead of an unknown name; empty if nothing is close."""
    names = list(names)
    if name in INSTEAD:
        return f" {INSTEAD[name]}"
    if name in DEFAULTS_OF_TRL:
        return (
            " It is a field of TRL's GRPOConfig alone. Remove it, and choose the correction by `rollout_correction`."
        )
    # A misspelt field is as close to older names, such as `rollout_is_treshold` to `rollout_is_veto_threshold`
    old = difflib.get_close_matches(name, INSTEAD, 1, 0.85)
    if old and _likeness(name, old[0]) > max((_likeness(name, field) for field in names), default=0.0):
        return f" Did you mean {old[0]!r}, which is no field here either? {INSTEAD[old[0]]}"
    return nearest(name, names)


def _likeness(name: str, other: str) -> float:
    """How alike two names are, from 0 to 1."""
    return difflib.SequenceMatcher(None, other, name).ratio()
