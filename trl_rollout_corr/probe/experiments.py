"""
Results of counter-experiments, and their part in the diagnosis. The experiments are in the records of the causes
(`trl_rollout_corr/diagnosis/causes.py`); `command` runs them.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ..diagnosis.causes import CAUSES, Experiment
from ..diagnosis.evidence import FLOOR, Evidence, rms
from ..diagnosis.observed import DumpedTokens
from ..diagnosis.precision import caches_in_low_precision, coarser_sampler
from ..diagnosis.ranking import Diagnosis, Finding, diagnose
from ..messages import number, percent


# Share of d^2 that is left: up to the first, the cause is confirmed, from the second on it is ruled out. Another sample of 64
# completions changes the share by a few percent.
REMOVED, UNCHANGED = 0.25, 0.8
# The gap over the trainer's own noise: at least the first before the change, and at most the second where only noise is left
_ABOVE, _LEVEL = 1.5, 1.25
_SURE = 0.9  # certainty from which no other engine is started
_LEAST = 0.1  # share of d^2 below which a cause is left out once another one is confirmed


_PLACES = ("trainer", "sampler", "engine")
# Causes and experiments by name, in the order in which they are made. Of two that take the gap away the first is believed: the
# head is a part of everything that computes in float32
EXPERIMENTS: dict[str, tuple[str, Experiment]] = {
    name: (cause, experiment)
    for place in _PLACES
    for cause, record in CAUSES.items()
    for name, experiment in record.experiments.items()
    if experiment.on == place
}


class Result(NamedTuple):
    """
    The result of an experiment.

    Args:
        name (`str`):
            Key of `EXPERIMENTS`.
        before (`float`):
            Root mean square of the log-ratio without the change, in nats.
        after (`float` or `None`):
            The same with the change; `None` if the experiment was left out.
        reason (`str`, *optional*, defaults to `""`):
            The reason why it was left out.
        noise (`float`, *optional*):
            The trainer's difference from itself, in nats.
    """

    name: str
    before: float
    after: float | None
    reason: str = ""
    noise: float | None = None

    @property
    def cause(self) -> str:
        """Name of the cause that it is about."""
        return EXPERIMENTS[self.name][0]

    @property
    def experiment(self) -> Experiment:
        return EXPERIMENTS[self.name][1]

    @property
    def left(self) -> float | None:
        """Share of the squared log-ratio that is left."""
        return None if self.after is None else (self.after / max(self.before, 1e-300)) ** 2

    @property
    def says(self) -> str:
        """`"confirms"` or `"rules out"` its cause, or neither: `""`."""
        if self.left is None or self.before < FLOOR:  # there is no gap
            return ""
        if self.left <= REMOVED or self._at_noise:
            return "confirms"
        return "rules out" if self.experiment.decisive and self.left >= UNCHANGED else ""

    @property
    def _at_noise(self) -> bool:
        """True if the gap was larger than the trainer's own noise, and is not larger any more."""
        if not self.noise or self.after is None:
            return False
        return self.before >= _ABOVE * self.noise and self.after <= _LEVEL * self.noise


def own_noise(o: DumpedTokens) -> float | None:
    """
    Root mean square of the trainer's difference, padded batch against one by one, in nats; `None` if it is unknown, or if the
    sampler rounds more coarsely than the trainer.
    """
    again = np.isfinite(o.again)
    return rms((o.train - o.again)[again]) if again.any() and not coarser_sampler(o.about) else None


def engines_to_try(diagnosis: Diagnosis, facts: Mapping[str, str], results: Iterable[Result]) -> list[str]:
    """
    Experiments that need another engine and are worth it: those whose cause is open after the cheap ones.

    Args:
        diagnosis ([`~trl_rollout_corr.diagnosis.Diagnosis`]):
            Diagnosis of the tokens.
        facts (`Mapping[str, str]`):
            Types in which trainer and sampler compute, as in the dump.
        results (`Iterable[Result]`):
            Results of the cheap experiments.

    Returns:
        `list[str]`: names, two at most.
    """
    if diagnosis.size < FLOOR or any(result.says == "confirms" for result in results):
        return []
    if caches_in_low_precision(facts):
        return ["cache_of_the_model"]  # a low precision of weights looks the same
    for first in diagnosis.findings[:1]:
        settled = first.name == "rounding" and first.certainty > _SURE
        if settled or first.name not in ("head", "rounding", "weights"):
            return []
    low = ("bfloat16", "float16")
    tries = {
        "float32_head_of_the_sampler": facts.get("sampler_head_dtype") in low,
        "float32_sampler": facts.get("sampler_dtype") in low,
    }
    return [name for name, worth in tries.items() if worth]


def judge(o: DumpedTokens, results: Iterable[Result]) -> Diagnosis:
    """
    Diagnose with the results of experiments, which count for more than tests of the tokens: a confirmed cause comes first, and
    a cause that is ruled out is not looked for.

    Args:
        o ([`~trl_rollout_corr.diagnosis.DumpedTokens`]):
            Tokens without a change.
        results (`Iterable[Result]`):
            Results of the experiments.

    Returns:
        [`~trl_rollout_corr.diagnosis.Diagnosis`].
    """
    confirming, ruled_out = _speaking(results)
    return _with_confirmed(diagnose(o, ruled_out), confirming)


def _speaking(results: Iterable[Result]) -> tuple[dict[str, Result], set[str]]:
    """Confirming results by cause, and causes that are ruled out."""
    confirming: dict[str, Result] = {}
    ruled_out: set[str] = set()
    for result in sorted(results, key=lambda result: list(EXPERIMENTS).index(result.name)):
        cause = result.cause
        if result.says == "confirms" and not (cause == "rounding" and "head" in confirming):
            confirming.setdefault(cause, result)
        elif result.says == "rules out":
            ruled_out.add(cause)
    return confirming, ruled_out - confirming.keys()


def _with_confirmed(diagnosis: Diagnosis, confirming: Mapping[str, Result]) -> Diagnosis:
    if not confirming:
        return diagnosis
    findings = {finding.name: finding for finding in diagnosis.findings}
    confirmed = [_confirmed(cause, result, findings.get(cause)) for cause, result in confirming.items()]
    left = min(1 - finding.share for finding in confirmed)
    others = [
        finding._replace(share=finding.share * left)
        for finding in diagnosis.findings
        if finding.name not in confirming
    ]
    others = [finding for finding in others if finding.share >= _LEAST or finding.name == "nan_rows"]
    confirmed.sort(key=lambda finding: -finding.share)
    return diagnosis._replace(findings=[*confirmed, *others], verdict="found")


def _confirmed(cause: str, result: Result, finding: Finding | None) -> Finding:
    share = 1 - (result.left or 0.0)
    sentence = "an experiment removes the gap: |d| is {before}, and {after} if " + result.experiment.change
    numbers = {"before": result.before, "after": result.after or 0.0}
    if finding is None:
        return Finding(cause, 0.99, share, Evidence(1.0, share, numbers, sentence))
    evidence = finding.evidence
    sentence = f"{evidence.sentence}; {sentence}"
    return Finding(cause, 0.99, share, evidence._replace(numbers={**evidence.numbers, **numbers}, sentence=sentence))


# Written down -------------------------------------------------------------------------------------------------------------

_COLUMNS = ("changed", "|d|, nats", "times the trainer's own", "d^2 that is left", "evidence")


def as_text(before: float, noise: float | None, results: Iterable[Result], about: Mapping[str, str]) -> str:
    """The results as text for a terminal. `noise` as of [`own_noise`], `about` as in the dump."""
    results = list(results)
    table = [_COLUMNS, ("nothing", number(before), _times(before, noise), "", "")]
    for result in results:
        if result.after is not None:
            cause = result.cause
            evidence = {"confirms": f"for {cause}", "rules out": f"against {cause}"}.get(result.says, "")
            left = percent(round(result.left or 0.0, 2)) if before >= FLOOR else "-"
            table.append((result.experiment.change, number(result.after), _times(result.after, noise), left, evidence))
    widths = [max(len(row[i]) for row in table) for i in range(len(_COLUMNS))]
    lines = ["", "Counter-experiments: one change each, after which the gap is measured again."]
    for row in table:
        lines.append("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if noise is not None:
        lines.append(f"The trainer's own: {number(noise)} nats between scoring a padded batch and one by one.")
    kinds = {"trainer_dtype": "the trainer", "sampler_dtype": "the sampler", "kv_cache_dtype": "the sampler's cache"}
    sides = [f"{side} {about[name]}" for name, side in kinds.items() if name in about]
    lines.append(f"Types: {', '.join(sides)}.")
    for result in results:
        if result.reason:
            lines.append(f"Left out: {result.experiment.change}. {result.reason}")
    return "\n".join(lines) + "\n"


def _times(gap: float, noise: float | None) -> str:
    return number(gap / noise) if noise else "-"


def as_data(noise: float | None, results: Iterable[Result]) -> list[dict[str, object]]:
    """The results as data for JSON."""
    return [
        {
            "experiment": result.name,
            "changed": result.experiment.change,
            "cause": result.cause,
            "rms_log_ratio_before": result.before,
            "rms_log_ratio_after": result.after,
            "multiple_of_noise_floor_after": result.after / noise if noise and result.after is not None else None,
            "says": result.says or None,
            "left_out": result.reason or None,
        }
        for result in results
    ]
