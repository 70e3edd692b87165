"""
The correction to set: the only module that decides it. Every alarm, command and page prints its sentence, once.

To change the answer, change a row. No torch.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ..messages import uncapitalized
from ..settings.config import settings_of_preset
from ..settings.presets import DEFAULT as AUTO
from ..settings.resolve import Settings
from ..settings.trl_correction import MODE
from .bands import HEALTHY, NEGLIGIBLE


Gap = Literal["none", "small", "large"]
# Root mean square of the log-ratio in nats, of a gap at the healthy limit of `k3_kl`
SMALL = math.sqrt(2 * (HEALTHY["k3_kl"][1] or 0.0))


class Situation(NamedTuple):
    """All that the answer depends on."""

    gap: Gap = "large"
    is_harmed: bool = False  # an alarm was raised, or the settings of the run take much of the gradient
    hides_mistake: bool = False  # a cause was found that a correction would hide
    uses_it: bool = False  # the run already uses the correction that would be set
    excludes_it: bool = False  # the loss takes no correction of this package


class Row(NamedTuple):
    """An answer. The first row that fits counts."""

    when: Mapping[str, object]  # fields of the situation
    set: Mapping[str, object]  # settings; empty: leave them as they are
    why: str  # the only reason that any voice gives
    evidence: str  # heading in `benchmarks/arena/EVIDENCE.md`


ADVISED: Mapping[str, object] = {"rollout_correction": AUTO}
ROWS = (
    Row(
        {"hides_mistake": True},
        {},
        "A cause was found that a correction would hide. Repair it first: `trl-rollout-corr diagnose` names it.",
        "How sure `diagnose` is",
    ),
    Row(
        {"uses_it": True},
        {},
        f"The run uses `{AUTO}` already, so leave it, and find the cause of a gap that is larger than you expect.",
        "How the corrections compared",
    ),
    Row(
        {"gap": "none", "is_harmed": False},
        {},
        "The gap is so small that a correction would change nothing, so leave the settings as they are.",
        "The bias of one step",
    ),
    Row(
        {"gap": "small", "is_harmed": False},
        {},
        "The gap is small and nothing unhealthy was seen, so leave the settings as they are.",
        "With fresh weights and a lasting gap",
    ),
    Row(
        {"excludes_it": True},
        {},
        f"`loss_type: vespo` has importance weights of its own and excludes `{AUTO}`. We have not compared it: leave "
        "it, or choose another `loss_type`.",
        "Special cases",
    ),
    Row(
        {},
        ADVISED,
        "It drops tokens that have already moved too far, at any length, and needs no tuning.",
        "How the corrections compared",
    ),
)
# Beside `ADVISED`, for a run in which TRL gives each completion one weight. It changes the loss as well
OTHER_OF_TRL = Row(
    {},
    {MODE: "token_truncate"},
    "It gives each token a weight of its own, which suits a vLLM that is up to date.",
    "Long completions",
)


class Decision(NamedTuple):
    """What a run should set."""

    row: Row
    remove: tuple[str, ...] = ()  # fields that would act beside it
    or_of_trl: bool = False  # True if `OTHER_OF_TRL` is an answer, too
    of_unknown: bool = False  # the settings of the run are unknown

    @property
    def set(self) -> Mapping[str, object]:
        """Settings to set; empty to leave them as they are."""
        return self.row.set


def gap_of(spread: float) -> Gap:
    """The size of a gap, by the root mean square of the log-ratio in nats."""
    return "none" if spread < NEGLIGIBLE else "small" if spread <= SMALL else "large"


def decide(
    run: Settings | None,
    fields: Mapping[str, Any],
    *,
    gap: Gap = "large",
    is_harmed: bool = False,
    hides_mistake: bool = False,
) -> Decision:
    """The correction to set in a run with these settings (`None` if unknown) and `fields` of TRL, by name."""
    excludes = fields.get("loss_type") == "vespo"
    uses = run is not None and run.corrects and has_preset(run, AUTO)
    situation = Situation(
        gap=gap, is_harmed=is_harmed, hides_mistake=hides_mistake, uses_it=uses, excludes_it=excludes
    )
    row = row_of(situation)
    if not row.set or run is None:
        return Decision(row, of_unknown=run is None)
    of_completions = run.by_trl and run.rollout_is == "sequence"  # GRPO with vLLM: elsewhere TRL weights nothing
    return Decision(row, run.overriding_fields, or_of_trl=of_completions)


def row_of(situation: Situation) -> Row:
    """The first row that fits."""
    return next(row for row in ROWS if all(getattr(situation, name) == x for name, x in row.when.items()))


def has_preset(run: Settings, name: str) -> bool:
    """True if weights, rejection and mode of a run are as in a preset."""
    preset = settings_of_preset(name)
    return (run.mode, run.bounding, run.criteria) == (preset.mode, preset.bounding, preset.criteria)


def in_words(decision: Decision) -> str:
    """The sentences that every voice prints."""
    row = decision.row
    if not row.set:
        return row.why
    remove = f" and remove {', '.join(f'`{name}`' for name in decision.remove)}" if decision.remove else ""
    unless = ", unless the run has it" if decision.of_unknown else ""
    # One sentence for each setting, because the voices add what they saw and why it matters
    sentences = [f"Set {_pairs(row.set)}{remove}{unless}: {uncapitalized(row.why)}"]
    if decision.or_of_trl:
        why = uncapitalized(OTHER_OF_TRL.why)
        sentences.append(f"Or set {_pairs(OTHER_OF_TRL.set)}, another correction of TRL's own: {why}")
    return " ".join(sentences)


def as_document(decision: Decision) -> dict[str, object]:
    """The decision for JSON."""
    return {"settings": dict(decision.set), "remove": list(decision.remove), "why": in_words(decision)}


def _pairs(settings: Mapping[str, object]) -> str:
    return " and ".join(f"`{name}` to {str(value).lower()}" for name, value in settings.items())
