"""The settings to try first, which `report` and `compare` recommend."""

from collections.abc import Mapping, Sequence
from typing import Any

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
        [`~trl_rollout_corr.health.advice.Advice`]: if its settings are empty, keep the settings of the run.
    """
    alarm = first_alarm(findings)
    # after an alarm about the gap, a small mean over all steps says nothing
    best = advise(mode_of(config), "gap", spread=None if alarm else spread)
    if not best.settings or not _has(config, best.settings):
        return best
    why = (
        "But trainer and sampler are too far apart even so: find the cause of the gap first." if alarm else best.reason
    )
    return Advice({}, f"The run has the settings of `{best.settings['rollout_correction']}` already. {why}")


def _has(config: RolloutCorrectionConfig, settings: Mapping[str, Any]) -> bool:
    """Whether a run corrects with the settings of a preset."""
    own, preset = config.settings, RolloutCorrectionConfig(**settings).settings
    same = (own.mode, own.bounding, own.criteria) == (preset.mode, preset.bounding, preset.criteria)
    return same and not own.rollout_metrics_only
