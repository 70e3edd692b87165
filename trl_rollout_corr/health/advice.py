"""
The correction to advise. Monitor, report, `compare` and `diagnose` ask here, so that all of them give one answer; `README.md`
and `docs/choosing.md` say the same.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


Mode = Literal["decoupled", "ppo_clip", "reinforce"]
Situation = Literal["healthy", "gap", "growing gap", "broken"]

# Root mean square of the log-ratio, in nats, below which a correction changes nothing (`benchmarks/exact`). The rounding of
# bfloat16 is larger in most models.
NEGLIGIBLE = 0.004

# The preset of each mode: one without bounds that must be fitted to the run. `benchmarks/arena` has the accuracy of each.
ADVISED: Mapping[Mode, str] = {
    "decoupled": "auto",
    "ppo_clip": "bypass_ppo_clip",
    "reinforce": "bypass_pg_token_icepop",
}


class Advice(NamedTuple):
    """Advice on the correction, and the reason in a sentence."""

    settings: Mapping[str, Any]  # to change; empty: leave them as they are
    reason: str

    @property
    def sentence(self) -> str:
        """The advice in a sentence, as messages have it."""
        chosen = ", ".join(f"`{name}` to {value}" for name, value in self.settings.items())
        return f"Set {chosen}." if chosen else f"Keep the settings of the correction: {self.reason}"


def in_effect(settings: object) -> Mapping[str, Any]:
    """
    Fields by name, as far as they are known. `settings` are a mapping, a configuration, whose settings in effect take
    precedence over its fields, or settings in effect.
    """
    if isinstance(settings, Mapping):
        return settings
    return {**getattr(settings, "__dict__", {}), **getattr(getattr(settings, "settings", None), "__dict__", {})}


def mode_of(settings: object) -> Mode:
    """
    The mode of a run: `"decoupled"`, or the loss of bypass mode. `settings` are fields of [`RolloutCorrectionConfig`], as
    attributes or items; unknown ones are those of decoupled mode.
    """
    known = in_effect(settings)
    bypass = known.get("bypass_mode", str(known.get("rollout_correction") or "").startswith("bypass"))
    if bypass is not True:
        return "decoupled"
    return "reinforce" if known.get("rollout_loss_type") == "reinforce" else "ppo_clip"


def advise(mode: Mode, situation: Situation, *, corrects: bool = False, spread: float | None = None) -> Advice:
    """
    Advise a correction for a run in a mode of [`mode_of`], which the advice keeps.

    `situation` is the state of the run: `"healthy"` (no alarm), `"gap"` (trainer and sampler are too far apart),
    `"growing gap"` (the gap grows although it is corrected), or `"broken"` (log-probabilities are wrong, which no correction
    repairs). `spread` is the root mean square of the log-ratio, in nats, if it is known.
    """
    preset = {"rollout_correction": ADVISED[mode]}
    if situation == "broken":
        return Advice({}, "The log-probabilities are wrong, and no correction repairs them. Find the cause first.")
    if situation == "growing gap":
        return Advice(
            preset, "This preset has no bounds to fit, and bounds that are fitted to a growing gap would be wrong."
        )
    if spread is not None and spread < NEGLIGIBLE:
        return Advice(
            {}, f"The log-ratio has a root mean square of {spread:.2g} nats. A correction would change nothing."
        )
    if corrects:
        return Advice({}, "The run has a correction, and sampler and trainer are close enough for it.")
    return Advice(preset, "This preset has no bounds to fit.")
