"""The banner of a run, and cards of what was found: pieces that the page of one run and that of two have in common."""

from ...health.examine import Finding
from ...messages import number, steps
from .content import TERMS, Report
from .markup import code, escaped, terms
from .verdict import Tile


def banner(report: Report, title: str = "") -> str:
    """How the run is doing."""
    verdict = report.verdict
    about = "".join(f"<div><dt>{escaped(label)}</dt><dd>{escaped(value)}</dd></div>" for label, value in report.about)
    heading = f'<p class="name">{escaped(title)}</p>\n' if title else ""
    return (
        f'<section class="banner {verdict.level}">{heading}<p class="verdict">{escaped(verdict.headline)}</p>\n'
        f"<p>{code(verdict.detail)}</p>\n"
        f'<div class="tiles">{"".join(map(_tile, verdict.tiles))}</div>\n<dl class="about">{about}</dl>\n'
        f"{damage(report)}</section>\n"
    )


def _tile(tile: Tile) -> str:
    return (
        f'<div class="tile {tile.state}"><p class="label">{escaped(tile.label)}</p><p class="value">{escaped(tile.value)}</p>'
        f'<p class="note">{escaped(tile.note)}</p></div>'
    )


def damage(report: Report) -> str:
    """What is missing."""
    return "".join(
        f'<p class="damage">{escaped(sentence[:1].upper() + sentence[1:])}.</p>\n' for sentence in report.damage
    )


def words() -> str:
    """What the words of the page mean."""
    return f'<p class="intro">{terms(TERMS)}</p>\n'


def cards(report: Report, letter: str = "") -> str:
    """What was found, numbered as in the picture; of two runs, with the letter of the run."""
    if not report.findings:
        kind = "finding" if report.outside else "healthy"
        return f'<p class="{kind}">{code(" ".join([report.nothing, report.outside]).strip())}</p>\n'
    articles = (_card(finding, f"{letter}{i}") for i, finding in enumerate(report.findings, 1))
    return f'<div class="findings">{"".join(articles)}</div>\n'


def _card(finding: Finding, name: str) -> str:
    when = steps(finding.step, finding.last_step)
    return (
        f'<article class="finding {escaped(finding.severity)}"><h3><span class="number">{name}</span>'
        f'<span class="severity">{escaped(finding.severity)}</span>'
        f"{code(finding.seen)}</h3>\n<p>{code(finding.why)}</p>\n"
        f"<p><strong>What to do.</strong> {code(finding.advice)}</p>\n"
        f'<p class="meta">{escaped(finding.rule)}: <code>{escaped(finding.key)}</code> {number(finding.value)}, {when}</p>'
        "</article>\n"
    )
