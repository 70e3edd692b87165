"""
The first suspicion from the log of a trainer, for a run without a dump: the course of TRL's mean importance ratio
between trainer and vLLM. A log contains only means, so it proves nothing.
"""

import json
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from ...messages import capitalized
from ..decision import OTHER_OF_TRL
from ..formats import number, yaml_lines
from ..monitor.stock import GAP, LENGTH, RATIO, value_of


LOW, _HIGH = 0.8, 1.2  # healthy mean ratios, at which steps are about as large as the learning rate says
_FALLS = 0.8  # the ratio fell if it is below this share of its first value
_SUDDEN = 50  # optimizer steps within which something breaks; drift takes longer
_LARGE = 0.1  # nats per token, more than rounding causes on average, as a difference or as a `k3_kl`
_MANY = 20  # one in this many entries is averaged at each end


class RatioCourse(NamedTuple):
    """The course of TRL's mean ratio in a log."""

    first: float  # mean ratio of the first entries; NaN if no ratio is a number
    last: float
    lowest: float
    dips: int  # entries below half of the usual ratio
    steps: tuple[int, int]  # optimizer steps of the log
    n: int  # entries with a ratio that is a number
    fall: tuple[int, int]  # optimizer steps between which most of the fall happens
    sudden: bool  # the fall takes few steps
    gap: tuple[float, float] | None  # mean absolute difference of log-probabilities, first and last, nats per token
    length: tuple[float, float] | None  # mean length of completions, first and last
    lost: Sequence[int]  # optimizer steps of the entries whose ratio is NaN or infinite

    @property
    def fell(self) -> bool:
        return self.last < _FALLS * self.first

    @property
    def enough(self) -> float | None:
        """The `k3_kl` that is enough for the last ratio if each completion gets one weight; `None` if unknown."""
        return gap_of_ratio(self.last, self.length[1]) if self.n and self.length is not None else None


def course_of(entries: Sequence[Mapping[str, Any]]) -> RatioCourse | None:
    """The course of the ratio in a log with one entry per step in order; `None` without a ratio."""
    known = [(int(entry["step"]), x) for entry in entries if (x := value_of(entry, RATIO)) is not None]
    lost = [
        int(entry["step"]) for entry in entries if isinstance(x := entry.get(RATIO), float) and not math.isfinite(x)
    ]
    others = _ends(entries, GAP), _ends(entries, LENGTH), lost
    if not known:
        whole = min(lost, default=0), max(lost, default=0)
        return RatioCourse(math.nan, math.nan, math.nan, 0, whole, 0, whole, False, *others) if lost else None
    steps, ratios = np.array([step for step, _ in known]), np.array([x for _, x in known])
    width = max(len(ratios) // _MANY, 1)
    level = np.convolve(ratios, np.ones(width) / width, "valid")  # of a window that begins at each entry
    first, last = float(level[0]), float(level[-1])
    begin, end = _fall(level)
    end = min(end + width - 1, len(steps) - 1)
    fall = int(steps[begin]), int(steps[end])
    sudden = fall[1] - fall[0] <= _SUDDEN or (end - begin <= 1 and len(steps) > 3)
    whole = int(steps[0]), int(steps[-1])
    dips = int((ratios < np.median(ratios) / 2).sum())
    return RatioCourse(first, last, float(ratios.min()), dips, whole, len(ratios), fall, sudden, *others)


def _fall(level: np.ndarray) -> tuple[int, int]:
    """The places between which a level goes through most of the way from its first value to its last one."""
    first, last = level[0], level[-1]
    margin = (first - last) / 10
    begin = int(np.flatnonzero(level >= first - margin)[-1]) if last < first else 0
    below = np.flatnonzero(level[begin:] <= last + margin)
    return begin, begin + int(below[0]) if below.size else begin


def _ends(entries: Sequence[Mapping[str, Any]], key: str) -> tuple[float, float] | None:
    """Means of a metric over the first and the last entries that log it; `None` without any."""
    values = [x for entry in entries if (x := value_of(entry, key)) is not None]
    width = max(len(values) // _MANY, 1)
    return (float(np.mean(values[:width])), float(np.mean(values[-width:]))) if values else None


def gap_of_ratio(ratio: float, length: float) -> float:
    """
    The `k3_kl` that gives completions of a length a mean weight with TRL's default, if log-ratios are normal
    (`docs/trl.md` has the calculation).
    """
    low, high = 1e-9, 1e3  # variance of the logarithm of the weight of a completion
    for _ in range(100):
        v = math.sqrt(low * high)
        mean = NormalDist().cdf((math.log(3) - v / 2) / math.sqrt(v))
        low, high = (v, high) if mean > ratio else (low, v)
    return low / (2 * max(length, 1))


# The suspicions ------------------------------------------------------------------------------------------------------


class Suspicion(NamedTuple):
    """A possible reason for a mean ratio."""

    name: str
    title: str
    text: str  # the reason for the suspicion, with its doubt
    remedy: str
    advised: Mapping[str, object] = {}


_LENGTH = Suspicion(
    "whole_completions",
    "weights of whole completions, which shrink with length",
    "TRL's default gives each completion one weight, the product of its tokens' ratios. Rounding alone adds up there, "
    "so long completions count least.",
    "Check that pushes arrive, and that `top_p`, `top_k`, `min_p` and penalties are at their defaults, because other "
    "weights and options look the same here. Then set `rollout_correction: auto`, or in TRL alone "
    "`vllm_importance_sampling_mode: token_truncate`.",
    OTHER_OF_TRL.set,
)
_LARGE_GAP = Suspicion(
    "large_gap",
    "log-probabilities that differ far more than by rounding, from the first step on",
    "The two sides may read different tokens, hold different weights or use different temperatures, or the sampler "
    "draws from another distribution, by `top_p`, `top_k`, `min_p` or a penalty.",
    "Find the cause before you train, because no weights repair it. First set these options to their defaults, also "
    "in `generation_kwargs` and, with a server, in the model's `generation_config.json`.",
)
_LOST = Suspicion(
    "not_a_number",
    "ratios that are NaN or infinite",
    "A log-probability of vLLM or of the trainer is NaN, and such a step may make all weights NaN.",
    "Compare with `loss` and `grad_norm` in the same log. If they were NaN before, or large, training has diverged. "
    "Otherwise look for a failed push, for an overflow in float16, and for a quantised base that each push quantises "
    "again.",
)
_BROKEN = Suspicion(
    "broken",
    "a sudden break: weights that no longer arrive in vLLM, or a policy that moves too fast",
    "Neither rounding nor length makes a ratio collapse within so few steps.",
    "Look at what happened at that step: a push of weights or of an adapter, a restart or sleep of vLLM, or a "
    "learning rate that is too high (`grad_norm` and `entropy` in the same log). To tell them apart, train a few "
    "steps with `learning_rate: 0` from the initial model: the ratio then stays near 1 unless vLLM holds other "
    "weights.",
)
_DRIFT = Suspicion(
    "drift",
    "weights in vLLM that fall behind, or a gap that grows with training",
    "A push that leaves out some weights, an adapter that is rounded when it is merged, or a vLLM whose sleep mode "
    "loads the base model again (TRL issue 5312) looks like this. So do updates on completions of another policy, "
    "which push the two further apart.",
    "Switch `vllm_enable_sleep_mode` off if it is on. Then resume from a checkpoint before the drop with a trainer of "
    "this package, which checks every push; if it reports none, lower `learning_rate`.",
)
_DIPS = Suspicion(
    "single_steps",
    "single steps that are far off, between healthy ones",
    "With few completions in a step this may be chance. Otherwise some completions came from other weights, or with "
    "wrong log-probabilities, and only now and then.",
    "Compare these steps with the others: a replica of the server may have missed an update, a push may have failed, "
    "or the completions may differ in length.",
)


def suspicions(course: RatioCourse) -> list[Suspicion]:
    """Possible reasons for the ratios of a log, the strongest suspicion first; empty for ratios near 1."""
    of_numbers = _reason_for_numbers(course) if course.n else None
    return [found for found in (_LOST if course.lost else None, of_numbers) if found is not None]


def _reason_for_numbers(course: RatioCourse) -> Suspicion | None:
    """A possible reason for the ratios that are numbers."""
    if course.fell:
        if course.sudden:
            return _BROKEN
        longer = course.length is not None and course.length[1] > 1.5 * course.length[0]
        wider = course.gap is None or course.gap[1] > 1.5 * course.gap[0]
        return _LENGTH if longer and not wider else _DRIFT
    if max(course.first, course.last) > _HIGH or (course.gap is not None and course.gap[0] > _LARGE):
        return _LARGE_GAP
    if min(course.first, course.last) >= LOW:
        return _DIPS if course.dips else None
    return _LARGE_GAP if (course.enough or 0.0) > _LARGE else _LENGTH


# In words ------------------------------------------------------------------------------------------------------------

_TO_FIND_OUT = (
    "To find out, train a few steps with a trainer of this package and `rollout_correction: trl`, which keeps the "
    "loss. Set `rollout_dump_dir`, and diagnose the dump."
)


def suspicion_headline(found: Sequence[Suspicion]) -> str:
    """The answer in a line."""
    return f"Possible: {found[0].title}" if found else "Nothing suspicious in the ratios of this log"


def course_in_words(course: RatioCourse) -> str:
    """Sentences on what the log shows."""
    first, last = course.steps
    parts = []
    if course.n:
        parts.append(
            f"TRL's mean ratio is {number(course.first)} at first and {number(course.last)} at last ({course.n} log "
            f"entries, steps {first} to {last})."
        )
    if course.lost:
        entries = "1 log entry is" if len(course.lost) == 1 else f"{len(course.lost)} log entries are"
        parts.append(f"The ratio of {entries} NaN or infinite, first in step {min(course.lost)}.")
    if course.fell:
        parts.append(f"Most of the drop is between step {course.fall[0]} and step {course.fall[1]}.")
    if course.gap is not None:
        parts.append(
            f"The mean difference of log-probabilities is {number(course.gap[0])} and then {number(course.gap[1])} "
            "nats."
        )
    if course.dips and not course.fell:
        parts.append(
            f"The ratio is below half of its median in {course.dips} entries, and as low as {number(course.lowest)}."
        )
    if course.length is not None:
        parts.append(f"Completions average {course.length[0]:.0f} and then {course.length[1]:.0f} tokens.")
    if course.enough is not None and 0 < course.last < LOW and not course.fell:
        parts.append(
            f"If each completion gets one weight, as by TRL's default, a `k3_kl` of {number(course.enough)} is enough "
            "for this ratio."
        )
    return " ".join([*parts, f"A log contains means only, so it proves nothing. {_TO_FIND_OUT}"])


def suspicions_as_text(course: RatioCourse) -> str:
    """The suspicions as text for a terminal."""
    found = suspicions(course)
    lines = [f"{suspicion_headline(found)}.", course_in_words(course)]
    for place, it in enumerate(found, 1):
        lines += ["", f"{place}. {capitalized(it.title)} ({it.name})", "   possible", f"   Why: {it.text}"]
        lines += [f"   What to do: {it.remedy}", *(f"     {line}" for line in yaml_lines(it.advised).splitlines())]
    return "\n".join(lines) + "\n"


def suspicions_as_json(course: RatioCourse) -> str:
    """The suspicions as JSON."""
    found = suspicions(course)
    causes = [
        {"cause": it.name, "title": it.title, "why": it.text, "remedy": it.remedy, "settings": it.advised}
        for it in found
    ]
    ratio = {"first": course.first, "last": course.last, "lowest": course.lowest}
    document = {
        "verdict": "suspicion" if found else "nothing",
        "healthy": not found,
        "ratio": {name: None if math.isnan(x) else x for name, x in ratio.items()} | {"entries": course.n},
        "steps": course.steps,
        "causes": causes,
    }
    return json.dumps(document, indent=2) + "\n"
