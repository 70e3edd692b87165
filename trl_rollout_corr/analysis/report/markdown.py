"""The report as Markdown with one picture, to paste into an issue."""

import textwrap
from pathlib import Path

from ...health.examine import Finding
from ...messages import number, printable, steps
from .content import TERMS, Report
from .diagnosis import lines as lines_of_diagnosis
from .drawing import Chart, png
from .tokens import Token


# The panels of the picture, as far as they are there
_MAIN = (
    "histogram",
    "probability",
    "position",
    "length",
)
LINE = 130  # characters of a line in a picture, at most as wide as its charts
_AT_LEAST = 4  # then the picture takes others, too


def files_of_markdown(report: Report, output: Path) -> dict[Path, bytes]:
    """Content by path: the Markdown, and its picture beside it."""
    charts = _main(report)
    picture = output.with_suffix(".png")
    files = (
        {picture: png(f"Rollout report: {report.name}", [], report.story, charts)} if charts or report.story else {}
    )
    return {**files, output: markdown(report, picture.name if files else None).encode()}


def picture_of(report: Report) -> bytes:
    """The answer as a picture: the banner in lines of text, and the story."""
    lines = [report.verdict.detail.replace("`", ""), *lines_of(report), *([report.story.note] if report.story else [])]
    lines = [part for line in lines for part in textwrap.wrap(line, LINE)]
    return png(f"{report.name}: {report.verdict.headline}", lines, report.story, [])


def lines_of(report: Report) -> list[str]:
    """The banner in lines of text."""
    tiles = "    ".join(f"{tile.label}: {tile.value}" for tile in report.verdict.tiles)
    about = "    ".join(f"{label}: {value}" for label, value in report.about if label != "Correction")
    correction = dict(report.about).get("Correction", "")
    return [line for line in (tiles, correction, about) if line]


def markdown(report: Report, picture: str | None) -> str:
    """The text."""
    verdict = report.verdict
    lines = [f"# Rollout report: {plain(report.name)}", "", f"**{verdict.headline}.** {verdict.detail}", ""]
    lines += [f"- {tile.label}: {tile.value}" + (f" ({tile.note})" if tile.note else "") for tile in verdict.tiles]
    lines += [f"- {label}: {plain(value)}" for label, value in (*report.about, *report.facts)]
    lines += [f"- {sentence}." for sentence in report.damage]
    lines += ["", TERMS]
    lines += ["", "## Diagnosis", "", *lines_of_diagnosis(report.diagnosis[1])] if report.diagnosis else []
    lines += ["", "## Findings", ""]
    lines += [_finding(finding) for finding in report.findings] or [f"{report.nothing} {report.outside}".strip()]
    lines += ["", "## Settings to try"]
    for advice in report.advice:
        lines += ["", f"{advice.title}. {advice.text}"]
        lines += ["", "```yaml", advice.yaml.rstrip(), "```"] if advice.yaml else []
    if picture:
        lines += ["", "## Charts", "", f"![Charts]({picture.replace(' ', '%20')})", ""]
        lines += [report.story.note, ""] if report.story else []
        charts = [chart for section in report.sections for chart in section.charts]
        lines += [f"- {chart.title}: {chart.flat + '.' if chart.flat else chart.note}" for chart in charts]
    worst = report.worst
    if worst and worst.broken:
        lines += ["", "## Not finite", "", f"{worst.n_broken:,} tokens, of which the first are:", ""]
        lines += _tokens(worst.broken)
    if worst and worst.tokens:
        lines += [
            "",
            "## The worst tokens",
            "",
            f"One row per text and sign of d; *times*: of {worst.among:,} tokens.",
            "",
        ]
        lines += _tokens(worst.tokens[:10])
    return "\n".join(lines) + "\n"


def _main(report: Report) -> list[Chart]:
    charts = {chart.name: chart for section in report.sections for chart in section.charts if not chart.flat}
    main = [charts[name] for name in (*_MAIN, "by-length") if name in charts]
    others = [chart for chart in charts.values() if chart not in main]
    return main + others[: max(_AT_LEAST - len(main), 0)]


def _finding(finding: Finding) -> str:
    return f"- **{finding.severity}**, {steps(finding.step, finding.last_step)}: {finding}"


def _tokens(tokens: list[Token]) -> list[str]:
    lines = ["| token | d | times | p trainer | p sampler | step | position | kept | reward |", "|" + " --- |" * 9]
    for token in tokens:
        text = f"{_code(token.before)} **{_code(token.text)}** {_code(token.after)}".strip()
        numbers = (token.d, token.times, token.train, token.rollout, token.step, token.position)
        cells = [text, *map(number, numbers), "yes" if token.kept else "no", number(token.reward)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _code(text: str) -> str:
    """Text of a dump as code, in which nothing is a mark, a mention or a column."""
    text = printable(text).replace("\n", "↵").replace("\t", " ").replace("`", "\u02cb").replace("|", "¦")
    return f"`{text}`" if text else ""


def plain(text: str) -> str:
    """Text in which nothing is a mark."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in printable(text).replace("\n", " "))
