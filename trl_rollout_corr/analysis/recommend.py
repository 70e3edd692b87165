"""The settings to try first, which `report` and `compare` recommend."""

from collections.abc import Sequence

from ..health.advice import Advice, advise, mode_of
from ..health.rule import Alarm
from ..messages import PREFIX
from ..settings.config import RolloutCorrectionConfig


# Metrics of the gap between the policies. An alarm about weights or bounds does not make the sequences unhealthy.
_OF_THE_POLICIES = (f"{PREFIX}k3_kl", f"{PREFIX}kl")


def first_alarm(findings: Sequence[Alarm]) -> Alarm | None:
    """The first alarm about the gap between the policies."""
    alarms = [finding for finding in findings if finding.key in _OF_THE_POLICIES]
    return min(alarms, key=lambda finding: finding.step, default=None)


def recommend(config: RolloutCorrectionConfig, findings: Sequence[Alarm], spread: float) -> Advice:
    """
    Recommend settings.

    Args:
        config ([`RolloutCorrectionConfig`]):
            Configuration of the run, whose mode is kept.
        findings (`Sequence[Alarm]`):
            Alarms in its log.
        spread (`float`):
            Root mean square of the log-ratio, in nats.

    Returns:
        [`~trl_rollout_corr.health.advice.Advice`]: empty settings are those of the run.
    """
    # after an alarm about the gap, a small mean over all steps says nothing
    return advise(mode_of(config), "gap", spread=None if first_alarm(findings) else spread)
