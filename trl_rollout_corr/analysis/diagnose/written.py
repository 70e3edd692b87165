"""A diagnosis as text and as JSON."""

import json
import re
from collections.abc import Mapping
from typing import Any

from ..text import number, percent, yaml_lines
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
        parts.append(
            "See docs/diagnose.md for tests that need a model, and `rollout_diagnose: true` for more to look at."
        )
    return " ".join(parts)


def evidence(finding: Finding) -> str:
    """What was seen, with its numbers."""
    return re.sub(r"\{(\w+)\}", lambda match: number(finding.seen.numbers[match[1]]), finding.seen.said)


def sure(finding: Finding) -> str:
    """How sure, in a word."""
    return "certain" if finding.certainty > 0.9 else "likely" if finding.certainty > 0.7 else "possible"


def settings(finding: Finding) -> dict[str, Any]:
    """Settings to paste: what removes the cause, and the preset for what is left."""
    cause = finding.cause
    preset = {} if cause.preset is None else {"rollout_correction": cause.preset}
    return {**cause.settings, **preset}


def as_text(diagnosis: Diagnosis) -> str:
    """What is printed."""
    lines = [f"{headline(diagnosis)}.", detail(diagnosis)]
    for place, finding in enumerate(diagnosis.findings, 1):
        cause = finding.cause
        lines += [
            "",
            f"{place}. {cause.title[:1].upper()}{cause.title[1:]} ({finding.name})",
            f"   {sure(finding)} ({percent(round(finding.certainty, 2))}), explains {percent(round(finding.share, 2))} of d^2",
            f"   Seen: {evidence(finding)}.",
            f"   What to do: {cause.remedy}",
        ]
        lines += [f"     {line}" for line in yaml_lines(settings(finding)).splitlines()]
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
                "remedy": finding.cause.remedy,
                "settings": settings(finding),
                "preset": finding.cause.preset,
            }
            for finding in diagnosis.findings
        ],
        **(more or {}),
    }
    return json.dumps(document, indent=2) + "\n"
