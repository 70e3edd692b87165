"""The settings to try first, which `report` and `compare` recommend."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...messages import PREFIX
from ...settings.resolve import Settings
from ..monitor.advice import STALE_WEIGHTS, advise, has_preset, preset_for_stale, with_fresh
from ..monitor.bands import HEALTHY, NEGLIGIBLE
from ..monitor.rule import Alarm


# Metrics of the gap between the policies. An alarm about weights or bounds does not make the
# sequences unhealthy.
_OF_THE_POLICIES = (f"{PREFIX}k3_kl", f"{PREFIX}kl")
# Spread of the log-ratio in nats up to which fresh weights need no correction
_SMALL = math.sqrt(2 * (HEALTHY["k3_kl"][1] or 0.0))


class Advice(NamedTuple):
    """Settings to try, and the reason in sentences."""

    settings: Mapping[str, Any]  # empty: leave them as they are
    reason: str


def first_alarm(alarms: Sequence[Alarm]) -> Alarm | None:
    """The first alarm about the gap between the policies."""
    of_policies = [alarm for alarm in alarms if alarm.key in _OF_THE_POLICIES]
    return min(of_policies, key=lambda alarm: alarm.step, default=None)


def recommend(
    run: Settings, alarms: Sequence[Alarm], spread: float, age: float | None, fields: Mapping[str, Any]
) -> Advice:
    """
    Recommend settings in the mode of a run, given its alarms, the `spread` (root mean square of the
    log-ratio in nats), the `age` of its oldest completion in optimizer steps (`None` if unknown),
    and its `fields` of TRL.
    """
    alarm = first_alarm(alarms)
    if spread < NEGLIGIBLE and alarm is None:  # after an alarm about the gap, a small mean proves nothing
        return Advice(
            {}, f"The root mean square of the log-ratio is {spread:.2g} nats. A correction would change nothing."
        )
    best, fresh = advise(run, age, fields)
    preset, reason = preset_for_stale(run, fields), "This preset has no bounds to fit."
    if best.settings and best.settings["rollout_correction"] != preset:
        if spread <= _SMALL and not alarms and not run.changes_loss:
            return Advice(
                {}, "The weights are not stale, the gap is small, and no alarm was raised: leave it as it is."
            )
        reason = f"`{preset}` is for {STALE_WEIGHTS}, and all are fresher."
    if not best.settings:
        if alarm:
            reason = "But trainer and sampler are too far apart even so: find the cause of the gap first."
        reason = f"{_of_the_run(run, preset)} {reason}"
    if fresh is not None:
        reason += f" `{preset}` is for {STALE_WEIGHTS}; {with_fresh(fresh, run)}."
    if best.remove:
        reason += f" Remove {', '.join(f'`{field}`' for field in best.remove)}, which would act on top of it."
    return Advice(best.settings, reason)


def _of_the_run(run: Settings, preset: str) -> str:
    """A clause that says that the run already uses a preset."""
    if has_preset(run, preset):
        return f"The run uses the settings of `{preset}` already."
    return "The run weights single tokens already, which is the correction for weights that are not stale."
