"""
Counter-experiments: one thing is changed on purpose, and what becomes of the gap says whether it was the cause. The probe runs
them (`trl_rollout_corr/probe/command.py`); here is what they are, and what their outcome means.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..diagnosis.causes import CAUSES
from ..diagnosis.observed import Observed
from ..diagnosis.ranking import Diagnosis, Finding, diagnose
from ..diagnosis.signatures import FLOOR, Seen, caches_in_low_precision
from ..messages import number, percent, yaml_lines


# Share of d^2 that is left, up to which what was changed was the cause, and from which it was not. Another sample of 64
# completions moves the share by a few percent.
REMOVED, KEPT = 0.25, 0.8
# Times the trainer's own noise that the gap was at least, and is at most, where nothing but that noise is left
_ABOVE, _LEVEL = 1.5, 1.25
_SURE = 0.9  # certainty from which no engine is started to make sure
_LEAST = 0.1  # share of d^2 below which a cause is not worth a word once another one is confirmed


class Experiment(NamedTuple):
    """
    A counter-experiment.

    Args:
        what (`str`):
            What is changed, in words.
        cause (`str`):
            The cause that it speaks for if the gap goes away, a key of `CAUSES`.
        decisive (`bool`, *optional*, defaults to `False`):
            If the gap stays, it is not that cause. Otherwise the other side may still have it.
        settings (`Mapping[str, Any]`, *optional*):
            Settings of a trainer that change it for good.
        engine (`Mapping[str, Any]`, *optional*):
            Arguments of the engine that it takes, which must be started anew.
    """

    what: str
    cause: str
    decisive: bool = False
    settings: Mapping[str, Any] = {}
    engine: Mapping[str, Any] = {}


_FLOAT32_HEAD = {"hf_overrides": {"head_dtype": "float32"}}

# Of two that take the gap away the first is believed: the head is a part of all that computes in float32
EXPERIMENTS: dict[str, Experiment] = {
    # the same tokens, scored again by the trainer
    "batch_of_one": Experiment(
        "the trainer scores one by one, without padding", "padding", True, {"per_device_train_batch_size": 1}
    ),
    "dropout_off": Experiment("no dropout in the trainer", "dropout", True, {"disable_dropout": True}),
    "float32_head": Experiment(
        "a head of the trainer in float32", "head", settings={"cast_lm_head_to_fp32": True}
    ),
    "float32_trainer": Experiment(
        "the trainer computes in float32", "rounding",
        settings={"bf16": False, "fp16": False, "model_init_kwargs": {"dtype": "float32"}},
    ),
    # new tokens of the same engine
    "whole_distribution": Experiment(
        "the sampler draws from the whole distribution", "truncation", True, {"top_p": 1.0, "top_k": 0, "min_p": None}
    ),
    "no_penalty": Experiment("no penalty in the sampler", "penalty", True, {"repetition_penalty": 1.0}),
    "before_the_push": Experiment("the sampler has the weights that vLLM has loaded, and none was pushed", "weights"),
    # an engine of its own
    "cache_of_the_model": Experiment(
        "keys and values are cached in the type of the model", "kv_cache", True,
        {"rollout_engine_kwargs": {"kv_cache_dtype": "auto"}}, {"kv_cache_dtype": "auto"},
    ),
    "float32_head_of_the_sampler": Experiment(
        "a head of the sampler in float32", "head",
        settings={"rollout_engine_kwargs": _FLOAT32_HEAD}, engine=_FLOAT32_HEAD,
    ),
    "float32_sampler": Experiment(
        "the sampler computes in float32", "rounding",
        settings={"rollout_engine_kwargs": {"dtype": "float32"}}, engine={"dtype": "float32"},
    ),
}  # fmt: skip


class Outcome(NamedTuple):
    """
    What an experiment did.

    Args:
        name (`str`):
            Key of `EXPERIMENTS`.
        before (`float`):
            Root mean square of the log-ratio as it is, in nats.
        after (`float` or `None`):
            The same with the change; `None` if the experiment was left out.
        reason (`str`, *optional*, defaults to `""`):
            Why it was left out.
        noise (`float`, *optional*):
            What the trainer differs from itself, in nats.
    """

    name: str
    before: float
    after: float | None
    reason: str = ""
    noise: float | None = None

    @property
    def experiment(self) -> Experiment:
        return EXPERIMENTS[self.name]

    @property
    def left(self) -> float | None:
        """Share of the squared log-ratio that is left."""
        return None if self.after is None else (self.after / max(self.before, 1e-300)) ** 2

    @property
    def says(self) -> str:
        """`"confirms"` or `"rules out"` its cause, or neither: `""`."""
        if self.left is None or self.before < FLOOR:  # where there is no gap, nothing takes it away
            return ""
        if self.left <= REMOVED or self._at_noise:
            return "confirms"
        return "rules out" if self.experiment.decisive and self.left >= KEPT else ""

    @property
    def _at_noise(self) -> bool:
        """Whether the gap was more than the trainer's own noise, and is no more than that now."""
        if not self.noise or self.after is None:
            return False
        return self.before >= _ABOVE * self.noise and self.after <= _LEVEL * self.noise


def own_noise(o: Observed) -> float | None:
    """What the trainer differs from itself, a padded batch against one by one: root mean square in nats, `None` if unknown."""
    again = np.isfinite(o.again)
    return float(np.sqrt(np.mean(np.square((o.train - o.again)[again])))) if again.any() else None


def engines_to_try(diagnosis: Diagnosis, facts: Mapping[str, str], outcomes: Iterable[Outcome]) -> list[str]:
    """
    Experiments that are worth an engine of their own: those whose cause is open after the cheap ones.

    Args:
        diagnosis ([`~trl_rollout_corr.diagnosis.Diagnosis`]):
            What the tokens say.
        facts (`Mapping[str, str]`):
            How trainer and sampler compute, as in the dump.
        outcomes (`Iterable[Outcome]`):
            Of the cheap experiments.

    Returns:
        `list[str]`: names, two at most.
    """
    if diagnosis.size < FLOOR or any(outcome.says == "confirms" for outcome in outcomes):
        return []
    if caches_in_low_precision(facts):
        return ["cache_of_the_model"]  # a low precision of weights looks the same
    first = diagnosis.findings[0] if diagnosis.findings else None
    if first is not None and (first.name not in ("head", "rounding", "weights") or _settled(first)):
        return []
    low = ("bfloat16", "float16")
    tries = {
        "float32_head_of_the_sampler": facts.get("sampler_head_dtype") in low,
        "float32_sampler": facts.get("sampler_dtype") in low,
    }
    return [name for name, worth in tries.items() if worth]


def _settled(finding: Finding) -> bool:
    return finding.name == "rounding" and finding.certainty > _SURE


def judge(o: Observed, outcomes: Iterable[Outcome]) -> Diagnosis:
    """
    Diagnose in the light of experiments, which count for more than marks: what one confirms comes first, and what one rules
    out is not looked for.

    Args:
        o ([`~trl_rollout_corr.diagnosis.Observed`]):
            Tokens as they were sampled and scored without a change.
        outcomes (`Iterable[Outcome]`):
            What the experiments did.

    Returns:
        [`~trl_rollout_corr.diagnosis.Diagnosis`].
    """
    confirming, ruled_out = _speaking(outcomes)
    return _with_confirmed(diagnose(o, ruled_out), confirming)


def _speaking(outcomes: Iterable[Outcome]) -> tuple[dict[str, Outcome], set[str]]:
    """Outcomes that confirm, by cause, and causes that are ruled out."""
    confirming: dict[str, Outcome] = {}
    ruled_out: set[str] = set()
    for outcome in sorted(outcomes, key=lambda outcome: list(EXPERIMENTS).index(outcome.name)):
        cause = outcome.experiment.cause
        if outcome.says == "confirms" and not (cause == "rounding" and "head" in confirming):
            confirming.setdefault(cause, outcome)
        elif outcome.says == "rules out":
            ruled_out.add(cause)
    return confirming, ruled_out - confirming.keys()


def _with_confirmed(diagnosis: Diagnosis, confirming: Mapping[str, Outcome]) -> Diagnosis:
    if not confirming:
        return diagnosis
    known = {finding.name: finding for finding in diagnosis.findings}
    confirmed = [_confirmed(cause, outcome, known.get(cause)) for cause, outcome in confirming.items()]
    left = min(1 - finding.share for finding in confirmed)
    others = [
        finding._replace(share=finding.share * left)
        for finding in diagnosis.findings
        if finding.name not in confirming
    ]
    others = [finding for finding in others if finding.share >= _LEAST or finding.name == "nan_rows"]
    confirmed.sort(key=lambda finding: -finding.share)
    return diagnosis._replace(findings=[*confirmed, *others], verdict="found")


def _confirmed(cause: str, outcome: Outcome, known: Finding | None) -> Finding:
    share = 1 - (outcome.left or 0.0)
    said = "an experiment takes the gap away: |d| is {before}, and {after} if " + outcome.experiment.what
    numbers = {"before": outcome.before, "after": outcome.after or 0.0}
    if known is None:
        return Finding(cause, 0.99, share, Seen(1.0, share, numbers, said))
    seen = known.seen._replace(numbers={**known.seen.numbers, **numbers}, said=f"{known.seen.said}; {said}")
    return Finding(cause, 0.99, share, seen)


# Written down -------------------------------------------------------------------------------------------------------------

COLUMNS = ("changed", "|d|, nats", "times the trainer's own", "d^2 that is left", "speaks")


def rows(before: float, noise: float | None, outcomes: Iterable[Outcome]) -> list[tuple[str, str, str, str, str]]:
    """The table of the experiments that were run, as text, with `COLUMNS`. `noise` as of `own_noise`."""
    table = [("nothing", number(before), _times(before, noise), "", "")]
    for outcome in outcomes:
        if outcome.after is not None:
            cause = outcome.experiment.cause
            speaks = {"confirms": f"for {cause}", "rules out": f"against {cause}"}.get(outcome.says, "")
            left = percent(round(outcome.left or 0.0, 2)) if before >= FLOOR else "-"
            table.append((outcome.experiment.what, number(outcome.after), _times(outcome.after, noise), left, speaks))
    return table


def _times(gap: float, noise: float | None) -> str:
    return number(gap / noise) if noise else "-"


def as_text(before: float, noise: float | None, outcomes: Iterable[Outcome], about: Mapping[str, str]) -> str:
    """What is printed. `about` as in the dump."""
    outcomes = list(outcomes)
    table = [COLUMNS, *rows(before, noise, outcomes)]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
    lines = ["", "Counter-experiments: one thing is changed, and the gap is measured again."]
    for row in table:
        lines.append("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if noise is not None:
        lines.append(f"The trainer's own: {number(noise)} nats between a padded batch and one by one.")
    known = {"trainer_dtype": "the trainer", "sampler_dtype": "the sampler", "kv_cache_dtype": "the sampler's cache"}
    sides = [f"{side} {about[name]}" for name, side in known.items() if name in about]
    lines.append(f"Types: {', '.join(sides)}.")
    for outcome in outcomes:
        if outcome.reason:
            lines.append(f"Left out: {outcome.experiment.what}. {outcome.reason}")
        if outcome.says == "confirms" and not _is_remedy(outcome.experiment):
            lines.append(f"To keep it that way: {outcome.experiment.what}.")
            lines += [f"  {line}" for line in yaml_lines(outcome.experiment.settings).splitlines()]
    return "\n".join(lines) + "\n"


def _is_remedy(experiment: Experiment) -> bool:
    """Whether the remedy of the cause says already what to set."""
    remedy = CAUSES[experiment.cause].settings
    return all(remedy.get(name) == value for name, value in experiment.settings.items())


def as_data(noise: float | None, outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """The same for machines."""
    return [
        {
            "experiment": outcome.name,
            "changed": outcome.experiment.what,
            "cause": outcome.experiment.cause,
            "rms_log_ratio_before": outcome.before,
            "rms_log_ratio_after": outcome.after,
            "multiple_of_noise_floor_after": outcome.after / noise if noise and outcome.after is not None else None,
            "says": outcome.says or None,
            "left_out": outcome.reason or None,
            "settings": dict(outcome.experiment.settings),
        }
        for outcome in outcomes
    ]
