"""Two runs, one against the other: what they are, what differs, and one picture of both."""

import dataclasses
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from ...health.rules import examine
from ...messages import yaml_lines
from ..run import Run
from .banner import banner, cards, words
from .content import Report, build
from .drawing import Story, png
from .markdown import LINE, lines_of, plain
from .markup import document, escaped, figure_of_story, table
from .story import story


class Versus(NamedTuple):
    """
    Two runs.

    Args:
        names (`tuple[str, str]`):
            Their names, which differ.
        reports (`tuple[Report, Report]`):
            What there is to say about each.
        story ([`~trl_rollout_corr.analysis.report.drawing.Story`] or `None`):
            Both in one picture.
        differences (`list[tuple[str, str, str]]`):
            Settings that differ: name, and the values of both. Of runs with a dump only.
    """

    names: tuple[str, str]
    reports: tuple[Report, Report]
    story: Story | None
    differences: list[tuple[str, str, str]]

    @property
    def title(self) -> str:
        return f"{self.names[0]} against {self.names[1]}"


def set_against(first: Run, second: Run, paths: tuple[Path, Path]) -> Versus:
    """
    Set one run against another.

    Args:
        first ([`~trl_rollout_corr.analysis.run.Run`]):
            The one to start from, such as an uncorrected run.
        second ([`~trl_rollout_corr.analysis.run.Run`]):
            The other, such as a corrected one.
        paths (`tuple[Path, Path]`):
            Where they were read from, for their names.

    Returns:
        [`Versus`]: both.
    """
    names = _names(paths)
    told = {
        name: (run.logs, examine(run.logs, run.dump.config if run.dump else None))
        for name, run in zip(names, (first, second), strict=True)
    }
    return Versus(names, (build(first), build(second)), story(told), _differences(first, second))


def _names(paths: tuple[Path, Path]) -> tuple[str, str]:
    """The shortest ends of the paths that differ."""
    first, second = (path.resolve().parts for path in paths)
    for n in range(1, max(len(first), len(second)) + 1):
        names = "/".join(first[-n:]), "/".join(second[-n:])
        if names[0] != names[1]:
            return names
    return f"{first[-1]} (A)", f"{second[-1]} (B)"


def _differences(first: Run, second: Run) -> list[tuple[str, str, str]]:
    if first.dump is None or second.dump is None:
        return []
    a, b = (dataclasses.asdict(run.dump.config) for run in (first, second) if run.dump)
    left_out = ("rollout_dump", "rollout_correction_resolved")
    return [(key, _value(a[key]), _value(b[key])) for key in a if a[key] != b[key] and not key.startswith(left_out)]


def _value(value: Any) -> str:
    return yaml_lines({"": value}).removeprefix(": ").strip()


def ends_with(versus: Versus) -> str:
    """The rewards of both, or their gaps, in a sentence."""
    tiles = [{tile.label: tile for tile in report.verdict.tiles} for report in versus.reports]
    for label, phrase in (("Reward", "a reward of"), ("Gap (k3_kl, nats per token)", "a gap of")):
        if all(label in of_run and of_run[label].value != "-" for of_run in tiles):
            a, b = (of_run[label].value for of_run in tiles)
            return f"{versus.names[0]} ends with {phrase} {a}, {versus.names[1]} with {b}."
    return ""


def page_of_two(versus: Versus) -> str:
    """Both as HTML."""
    reports = list(zip("AB", versus.names, versus.reports, strict=True))
    banners = "".join(banner(report, f"{letter}: {name}") for letter, name, report in reports)
    head = f'<p class="intro">{escaped(ends_with(versus))}</p><div class="versus">{banners}</div>\n'
    found = "".join(f"<div><h3>{escaped(name)}</h3>{cards(report, letter)}</div>" for letter, name, report in reports)
    picture = figure_of_story(versus.story) if versus.story else ""
    parts = [("story", "What happened", words() + picture)]
    if versus.differences:
        settings = table(("setting", *versus.names), versus.differences)
        parts.append(("settings", "Settings that differ", f'<div class="left">{settings}</div>'))
    parts.append(("findings", "Findings", f'<div class="versus">{found}</div>'))
    return document(f"Rollout report: {escaped(versus.title)}", head, parts)


def markdown_of_two(versus: Versus, output: Path) -> dict[Path, bytes]:
    """Content by path: the Markdown, and its picture beside it."""
    picture = output.with_suffix(".png")
    lines = [f"# Rollout report: {plain(versus.title)}", "", plain(ends_with(versus)), ""]
    said = [
        {**{tile.label: tile.value for tile in report.verdict.tiles}, **dict(report.about)}
        for report in versus.reports
    ]
    rows = [(label, *(of_run.get(label, "-") for of_run in said)) for label in {**said[0], **said[1]}]
    rows += versus.differences
    lines += ["|" + "".join(f" {plain(cell)} |" for cell in row) for row in (("", *versus.names),)]
    lines += ["| --- | --- | --- |", *("|" + "".join(f" {plain(cell)} |" for cell in row) for row in rows)]
    lines += (
        ["", f"![What happened]({picture.name.replace(' ', '%20')})", "", versus.story.note] if versus.story else []
    )
    for letter, name, report in zip("AB", versus.names, versus.reports, strict=True):
        lines += ["", f"## {letter}: {plain(name)}", "", f"**{report.verdict.headline}.** {report.verdict.detail}", ""]
        lines += [f"{i}. {finding}" for i, finding in enumerate(report.findings, 1)]
        lines += [f"- {sentence}." for sentence in report.damage]
    files = {picture: picture_of_two(versus)} if versus.story else {}
    return {**files, output: ("\n".join(lines) + "\n").encode()}


def picture_of_two(versus: Versus) -> bytes:
    """Both as a picture."""
    lines = [ends_with(versus)]
    for letter, name, report in zip("AB", versus.names, versus.reports, strict=True):
        lines += [f"{letter}: {name}. {report.verdict.headline}. {dict(report.about).get('Correction', '')}"]
    lines += lines_of(versus.reports[1])[-1:]
    lines += textwrap.wrap(versus.story.note, LINE) if versus.story else []
    return png(versus.title, lines, versus.story, [])
