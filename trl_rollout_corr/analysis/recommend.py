"""The settings to try first, which `report` and `compare` recommend, and the steps that are fit to make bounds of."""

from collections.abc import Mapping, Sequence

import numpy as np

from ..dumps.sequences import Sequences
from ..health.advice import Advice, advise, mode_of
from ..health.rule import Alarm
from ..health.rules import BOUNDS
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


def healthy_rows(sequences: Sequences, log: Sequence[Mapping[str, object]], findings: Sequence[Alarm]) -> np.ndarray:
    """True for the sequences of steps before the logging windows that raised the first alarm about the gap, `(B,)`."""
    alarm = first_alarm(findings)
    if alarm is None:
        return np.ones(len(sequences), bool)
    steps = [entry["step"] for entry in log]
    before = steps.index(alarm.step) - BOUNDS[alarm.bound].patience
    return sequences.step <= (steps[before] if before >= 0 else 0)
