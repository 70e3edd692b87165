"""The settings to try first, which `report` and `compare` recommend."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...messages import PREFIX
from ...settings.config import RolloutCorrectionConfig
from ...settings.resolve import Settings
from ..monitor.bands import NEGLIGIBLE
from ..monitor.rule import Alarm
from ..monitor.texts import preset_for


# Metrics of the gap between the policies. An alarm about weights or bounds does not make the sequences unhealthy.
_OF_THE_POLICIES = (f"{PREFIX}k3_kl", f"{PREFIX}kl")


class Advice(NamedTuple):
    """Settings to try, and the reason in sentences."""

    settings: Mapping[str, Any]  # empty: leave them as they are
    reason: str


def first_alarm(alarms: Sequence[Alarm]) -> Alarm | None:
    """The first alarm about the gap between the policies."""
    of_policies = [alarm for alarm in alarms if alarm.key in _OF_THE_POLICIES]
    return min(of_policies, key=lambda alarm: alarm.step, default=None)


def recommend(run: Settings, alarms: Sequence[Alarm], spread: float) -> Advice:
    """Recommend settings in the mode of a run, from its alarms and `spread`, the root mean square of the log-ratio in nats."""
    alarm = first_alarm(alarms)
    if spread < NEGLIGIBLE and alarm is None:  # after an alarm about the gap, a small mean over all steps says nothing
        return Advice(
            {}, f"The root mean square of the log-ratio is {spread:.2g} nats. A correction would change nothing."
        )
    name = preset_for(run)
    reason = "This preset has no bounds to fit."
    preset = RolloutCorrectionConfig(rollout_correction=name).settings
    if not run.corrects or any(getattr(run, x) != getattr(preset, x) for x in ("mode", "bounding", "criteria")):
        remove = (
            f" Remove {', '.join(f'`{field}`' for field in run.beside)}, which would act on top of it."
            if run.beside
            else ""
        )
        return Advice({"rollout_correction": name}, f"{reason}{remove}")
    if alarm:
        reason = "But trainer and sampler are too far apart even so: find the cause of the gap first."
    return Advice({}, f"The run uses the settings of `{name}` already. {reason}")
