"""The one recommendation for the sequences of a dump, settings and reason, that `report` and `compare` give."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..dumps.sequences import Sequences
from ..health.advice import advise, mode_of
from ..health.rule import Alarm
from ..health.rules import RULES
from ..messages import PREFIX
from ..settings.config import RolloutCorrectionConfig
from ..settings.presets import Preset
from .replay import Batch, batch_of
from .spread import Spread, measure, suggest_bounds


# Metrics of the gap between the policies. An alarm about weights or bounds does not make the sequences unhealthy.
_OF_THE_POLICIES = (f"{PREFIX}k3_kl", f"{PREFIX}kl")

NOTHING: Preset = "disabled"
# By the mode of the run: rejection by bounds that fit the sequences, with token weights where the mode applies weights
_FITTED: dict[str, Preset] = {
    "decoupled": "decoupled_geo_rs_token_tis",
    "ppo_clip": "bypass_ppo_clip_geo_rs",
    "reinforce": "bypass_pg_geo_rs_token_tis",
}


class HealthySteps(NamedTuple):
    """
    The steps before the policies were first found too far apart. Bounds are made of these.

    Args:
        rows (`np.ndarray` of shape `(B,)`):
            True for sequences of these steps.
        last (`int` or `None`):
            The last of these steps; 0 if there is none, `None` if all steps are healthy.
        alarm ([`~trl_rollout_corr.health.rule.Alarm`] or `None`):
            The alarm that came after it.
    """

    rows: np.ndarray
    last: int | None
    alarm: Alarm | None


class Recommendation(NamedTuple):
    """
    The settings to try first.

    Args:
        settings (`dict`):
            Fields of [`RolloutCorrectionConfig`].
        reason (`str`):
            Why, as the end of a sentence that begins with "because".
        fitted (`dict`, *optional*):
            Settings whose bounds fit the sequences, as an alternative; `None` if there are none.
    """

    settings: Mapping[str, Any]
    reason: str
    fitted: dict[str, Any] | None = None


def healthy_steps(sequences: Sequences, logged_steps: Sequence[int], findings: Sequence[Alarm]) -> HealthySteps:
    """
    Find the steps that are fit to make bounds of.

    Args:
        sequences ([`~trl_rollout_corr.dumps.sequences.Sequences`]):
            Sequences of the dump.
        logged_steps (`Sequence[int]`):
            Steps of the log, in order.
        findings (`Sequence[Alarm]`):
            Findings in this log.

    Returns:
        [`HealthySteps`]: without the logging windows that raised the alarm.
    """
    alarms = [finding for finding in findings if finding.key in _OF_THE_POLICIES]
    if not alarms:
        return HealthySteps(np.ones(len(sequences), bool), None, None)
    alarm = min(alarms, key=lambda finding: finding.step)
    before = list(logged_steps).index(alarm.step) - RULES[alarm.rule].patience
    last = int(logged_steps[before]) if before >= 0 else 0
    return HealthySteps(sequences.step <= last, last, alarm)


def recommend_from(
    sequences: Sequences, config: RolloutCorrectionConfig, healthy: HealthySteps
) -> Recommendation | None:
    """The recommendation from the healthy steps of a dump; `None` if they have no token with a finite log-ratio."""
    rows, spread = sequences.represents & healthy.rows, None
    if rows.any():
        if not (sequences.counted & rows[sequences.row]).any():
            return None
        spread = spread_of(batch_of(sequences, rows))
    return recommend(spread, config, healthy.alarm)


def spread_of(batch: Batch) -> Spread | None:
    """Spread of the log-ratio over tokens with a finite log-probability of both policies; `None` if there is no such token."""
    tokens = batch.tokens(RolloutCorrectionConfig())
    return measure(tokens.log_ratio, tokens.valid > 0) if tokens.lengths.any() else None


def recommend(spread: Spread | None, config: RolloutCorrectionConfig, alarm: Alarm | None = None) -> Recommendation:
    """
    Recommend settings.

    Args:
        spread ([`~trl_rollout_corr.analysis.spread.Spread`] or `None`):
            Spread of the log-ratio in healthy steps; `None` if no step is healthy.
        config ([`RolloutCorrectionConfig`]):
            Configuration of the run, whose mode is kept.
        alarm ([`~trl_rollout_corr.health.rule.Alarm`], *optional*):
            The alarm before which no step is healthy.

    Returns:
        [`Recommendation`].
    """
    mode = mode_of(config)
    advised = advise(mode, "gap").settings
    if spread is None:
        raised = f": an alarm was raised at step {alarm.step} (`{alarm.rule}`)" if alarm else ""
        return Recommendation(
            advised,
            "it has no bounds to choose, and bounds made of unhealthy steps would keep tokens that should be "
            f"rejected{raised}, and no step before it was dumped. Find the cause of the alarm first",
        )
    if spread.s == 0.0:
        reason = "the policies agree on every token, so that there is nothing to correct"
        return Recommendation({"rollout_correction": NOTHING}, reason)
    lower, upper = suggest_bounds(spread)
    if lower == 0.0:
        return Recommendation(
            advised,
            "no bounds fit: the two policies have almost nothing in common. Find the cause first",
        )
    fitted = {"rollout_correction": _FITTED[mode], "rollout_rs_threshold": [lower, upper]}
    return Recommendation(advised, "it has no bounds to choose", fitted)
