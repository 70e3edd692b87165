"""Which part of a run is fit to make bounds of: the steps before anything went wrong."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..health.examine import Finding
from ..health.rules import RULES, examine
from ..messages import PREFIX
from ..settings.config import RolloutCorrectionConfig


# Metrics of how far apart the policies are. An alarm about what weights or bounds do says nothing against the sequences.
_OF_THE_POLICIES = (f"{PREFIX}k3_kl", f"{PREFIX}kl")


class Phase(NamedTuple):
    """
    The healthy part of a run.

    Args:
        last_step (`int` or `None`):
            The last step that is healthy; `None` if all are. 0 if none is.
        alarm ([`~trl_rollout_corr.health.examine.Finding`] or `None`):
            The alarm that came after it.
    """

    last_step: int | None
    alarm: Finding | None


def healthy_phase(logs: Sequence[Mapping[str, Any]], config: RolloutCorrectionConfig) -> Phase:
    """
    Find the steps before the policies were first found too far apart.

    Args:
        logs (`Sequence[Mapping]`):
            Log entries in order of steps, each with a `step`.
        config ([`RolloutCorrectionConfig`]):
            Configuration of the run.

    Returns:
        [`Phase`]: up to which step. The windows that the alarm was raised for are not among them.
    """
    alarms = [finding for finding in examine(logs, config) if finding.key in _OF_THE_POLICIES]
    if not alarms:
        return Phase(None, None)
    alarm = min(alarms, key=lambda finding: finding.step)
    steps = [int(entry["step"]) for entry in logs]
    before = steps.index(alarm.step) - RULES[alarm.rule].patience
    return Phase(steps[before] if before >= 0 else 0, alarm)
