"""A diagnosis as text and as JSON."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..health.examine import Window
from ..messages import number, percent, yaml_lines
from ..settings.presets import DEFAULT, PRESETS, Preset
from .ranking import Diagnosis, Finding
from .signatures import FLOOR


def headline(diagnosis: Diagnosis) -> str:
    """The answer in a line."""
    if diagnosis.verdict == "nothing":
        return "Nothing to correct"
    if diagnosis.verdict == "unknown":
        return "Unknown: there is a gap, and no signature fits it"
    first = diagnosis.findings[0]
    kind = "Normal" if diagnosis.healthy else "Possible" if sure(first) == "possible" else "Found"
    return f"{kind}: {first.cause.title}"


def detail(diagnosis: Diagnosis) -> str:
    """How large the gap is, and what that is made of."""
    parts = [
        f"The root mean square of d is {number(diagnosis.size)} nats, k3_kl {number(diagnosis.k3)}, "
        f"over {diagnosis.n_tokens:,} tokens of {diagnosis.n_sequences:,} completions."
    ]
    if diagnosis.floor is not None:
        parts.append(f"That is {number(diagnosis.floor)} times what the trainer differs from itself.")
    if diagnosis.verdict == "nothing":
        parts.append(f"Below {FLOOR:g} nats a correction changes nothing.")
    if diagnosis.verdict == "unknown":
        more = (
            "" if diagnosis.in_effect.get("rollout_diagnose") else ", and `rollout_diagnose: true` for more to look at"
        )
        parts.append(f"See docs/diagnose.md for tests that need a model{more}.")
    return " ".join(parts)


def evidence(finding: Finding) -> str:
    """What was seen, with its numbers."""
    return re.sub(r"\{(\w+)\}", lambda match: number(finding.seen.numbers[match[1]]), finding.seen.said)


def sure(finding: Finding) -> str:
    """How sure, in a word."""
    return "certain" if finding.certainty > 0.9 else "likely" if finding.certainty > 0.7 else "possible"


class Advice(NamedTuple):
    """
    What to do about a cause.

    Args:
        text (`str`):
            In sentences.
        settings (`dict[str, Any]`):
            Settings to paste: what removes the cause, and the preset for what is left. Without those in effect.
    """

    text: str
    settings: dict[str, Any]


def advise(diagnosis: Diagnosis, finding: Finding) -> Advice:
    """What to do about a cause in the run that has it."""
    cause, run = finding.cause, diagnosis.in_effect
    missing = {name: value for name, value in cause.settings.items() if not _in_effect(value, run.get(name, ...))}
    text = cause.remedy
    if cause.otherwise and not missing:
        done = ", ".join(f"`{line}`" for line in yaml_lines(cause.settings).splitlines())
        text = f"In effect already: {done}. {cause.otherwise}"
    if cause.preset is not None and _corrects(cause.preset, run):
        text += " The run has a correction for the rest."
    elif cause.preset is not None:
        missing["rollout_correction"] = cause.preset
    return Advice(text, missing)


# Values that hold where a mapping of settings does not name them
_DEFAULTS = {"frequency_penalty": 0.0, "kv_cache_dtype": "auto", "presence_penalty": 0.0}


def _in_effect(value: Any, run: Any) -> bool:
    """Whether a setting has an advised value in the run. One that is not known (`...`) has not."""
    if isinstance(value, Mapping):
        known = run if isinstance(run, Mapping) else {}
        return run is not ... and all(_in_effect(x, known.get(k, _DEFAULTS.get(k, ...))) for k, x in value.items())
    return run is not ... and (run == value or not (run or value))  # 0, None and False are all off


def _corrects(preset: Preset, run: Mapping[str, Any]) -> bool:
    """Whether a run corrects for as much as a preset. In place of the default one, any correction will do."""
    return Window({}, run).corrects and (preset == DEFAULT or PRESETS[preset].items() <= run.items())


def as_text(diagnosis: Diagnosis) -> str:
    """What is printed."""
    lines = [f"{headline(diagnosis)}.", detail(diagnosis)]
    for place, finding in enumerate(diagnosis.findings, 1):
        cause, advice = finding.cause, advise(diagnosis, finding)
        lines += [
            "",
            f"{place}. {cause.title[:1].upper()}{cause.title[1:]} ({finding.name})",
            f"   {sure(finding)} ({percent(round(finding.certainty, 2))}), explains {percent(round(finding.share, 2))} of d^2",
            f"   Seen: {evidence(finding)}.",
            f"   What to do: {advice.text}",
        ]
        lines += [f"     {line}" for line in yaml_lines(advice.settings).splitlines()]
    return "\n".join(lines) + "\n"


def as_json(diagnosis: Diagnosis, more: Mapping[str, Any] | None = None) -> str:
    """The same for machines, and what else there is."""
    document: Mapping[str, Any] = {
        "verdict": diagnosis.verdict,
        "healthy": diagnosis.healthy,
        "rms_log_ratio": diagnosis.size,
        "k3_kl": diagnosis.k3,
        "multiple_of_noise_floor": diagnosis.floor,
        "tokens": diagnosis.n_tokens,
        "sequences": diagnosis.n_sequences,
        "causes": [
            {
                "cause": finding.name,
                "title": finding.cause.title,
                "certainty": round(finding.certainty, 3),
                "share_of_squared_log_ratio": round(finding.share, 4),
                "evidence": dict(finding.seen.numbers),
                "remedy": advice.text,
                "settings": advice.settings,
                "preset": finding.cause.preset,
            }
            for finding, advice in ((finding, advise(diagnosis, finding)) for finding in diagnosis.findings)
        ],
        **(more or {}),
    }
    return json.dumps(document, indent=2) + "\n"
