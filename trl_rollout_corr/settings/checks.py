"""
Checks of the settings of a correction. Neither TRL nor torch here; `trainers/trl_checks.py` has the checks that need TRL.

Each check is a function of a configuration, and raises a [`SettingError`] about settings that exclude each other. [`CHECKS`]
lists all of them.
"""

from collections.abc import Callable
from typing import Any

from ..messages import SettingError


def check_baseline_without_advantages(config: Any) -> None:
    """Refuse a baseline that depends on a rejection that depends on the baseline."""
    directed = [criterion.name for criterion in config.settings.criteria if criterion.directed]
    if config.rollout_rs_exclude_from_baseline and directed:
        reason = f"but {directed[0]!r} in `rollout_rs` depends on the advantages, which are computed from the baseline"
        remedy = "Set it to False, or use criteria that do not depend on them."
        raise SettingError("rollout_rs_exclude_from_baseline", True, reason, remedy=remedy)


def check_baseline_in_bypass(config: Any) -> None:
    """Refuse a baseline without rejected completions where the rejection is not known in time."""
    if config.rollout_rs_exclude_from_baseline and config.bypass_mode:
        reason = (
            "but `bypass_mode` computes no log-probabilities before the rewards are scored, so that no rejection is "
            "known at that time"
        )
        raise SettingError("rollout_rs_exclude_from_baseline", True, reason, remedy="Set one of the two to False.")


CHECKS: list[Callable[[Any], None]] = [check_baseline_without_advantages, check_baseline_in_bypass]
