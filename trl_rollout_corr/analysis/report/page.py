"""The report as one HTML file: no script, nothing from the network, right in light and dark, wide and narrow."""

import html
import math
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from ... import __version__
from ...health import Finding
from ..text import number, printable, steps
from .advice import Advice
from .content import Report, Section
from .drawing import DARK, LIGHT, Chart, svg
from .tokens import Excerpt, Token, Worst


# Classes of a token by |d|: what the style sheet colours
LEVELS = (0.1, 0.5, 2.0)


def page(report: Report) -> str:
    """The report as HTML."""
    title = f"Rollout report: {_text(report.name)}"
    parts = [
        ("findings", "Findings", _findings(report)),
        ("settings", "Settings to try", f'<div class="settings">{"".join(map(_advice, report.advice))}</div>'),
        *((section.name, section.title, _section(section)) for section in report.sections),
    ]
    if report.worst is not None:
        parts.append(("worst", "The worst tokens", _worst(report.worst)))
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading, _ in parts)
    body = "".join(
        f'<section id="{name}"><h2>{heading}</h2>\n{content}</section>\n' for name, heading, content in parts
    )
    facts = "".join(f"<dt>{_text(label)}</dt><dd>{_text(value)}</dd>" for label, value in report.facts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="robots" content="noindex">\n<style>\n{_style()}</style>\n</head>\n<body>\n'
        f"<header><h1>{title}</h1>\n<dl>{facts}</dl>\n<nav><ul>{links}</ul></nav></header>\n<main>\n{body}</main>\n"
        f"<footer>Made by trl-rollout-corr {__version__}.</footer>\n</body>\n</html>\n"
    )


def _style() -> str:
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    for mode, colors in (("light", LIGHT), ("dark", DARK)):
        variables = " ".join(f"--{role}: {color};" for role, color in colors.items())
        style = style.replace(f"/* colors: {mode} */", variables)
    return style


# Findings and settings ----------------------------------------------------------------------------------------------------


def _findings(report: Report) -> str:
    if not report.findings:
        kind = "finding" if report.outside else "healthy"
        return f'<p class="{kind}">{_code(" ".join([report.nothing, report.outside]))}</p>\n'
    return f'<div class="findings">{"".join(map(_finding, report.findings))}</div>\n'


def _finding(finding: Finding) -> str:
    when = steps(finding.step, finding.last_step)
    return (
        f'<article class="finding {_text(finding.severity)}"><h3><span class="severity">{_text(finding.severity)}</span>'
        f"{_code(finding.seen)}</h3>\n<p>{_code(finding.why)}</p>\n"
        f"<p><strong>What to do.</strong> {_code(finding.advice)}</p>\n"
        f'<p class="meta">{_text(finding.rule)}: <code>{_text(finding.key)}</code> {number(finding.value)}, {when}</p>'
        "</article>\n"
    )


def _advice(advice: Advice) -> str:
    yaml = f"<pre>{_text(advice.yaml)}</pre>" if advice.yaml else ""
    return f'<article class="setting"><h3>{_text(advice.title)}</h3><p>{_code(advice.text)}</p>{yaml}</article>'


# Charts -------------------------------------------------------------------------------------------------------------------


def _section(section: Section) -> str:
    charts = "".join(map(_figure, section.charts))
    grid = f'<div class="grid">\n{charts}</div>\n' if charts else ""
    return f'<p class="intro">{_code(section.text)}</p>\n{grid}'


def _figure(chart: Chart) -> str:
    return (
        f"<figure><figcaption>{_text(chart.title)}</figcaption>\n{svg(chart)}\n"
        f'<p class="note">{_text(chart.note)}</p>\n'
        f"<details><summary>Numbers</summary>{_table(chart.columns, chart.rows)}</details></figure>\n"
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    return _rows(columns, (f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>\n" for row in rows))


def _rows(columns: Sequence[str], rows: Iterable[str], left: str = "") -> str:
    """A table of rows that are HTML already. `left` is an attribute of the first head."""
    first, *others = (f">{_text(column)}</th>" for column in columns)
    head = "".join(f'<th scope="col"{cell}' for cell in (left + first, *others))
    table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    return "-" if value is None or math.isnan(value) else number(value, 4)


# Tokens -------------------------------------------------------------------------------------------------------------------


def _worst(worst: Worst) -> str:
    parts = []
    if worst.broken:
        shown = "" if len(worst.broken) == worst.n_broken else f" The first {len(worst.broken)} of them:"
        parts.append(
            f"<h3>Not finite</h3>\n<p>{worst.n_broken:,} tokens of the loss have a log-probability that is NaN or infinite. "
            f"They are in no chart.{shown}</p>{_tokens(worst.broken)}"
        )
    parts.append(
        '<p class="intro">The largest |d| in the dump, over all its sequences, at most three of one. p is the probability '
        "under the trainer and the sampler, position counts from 1, and the token is marked in its context.</p>"
    )
    nothing = "<p>None: no token of the loss has a finite log-ratio other than 0.</p>"
    parts.append(_tokens(worst.tokens) if worst.tokens else nothing)
    if worst.excerpts:
        parts.append(_legend() + "".join(map(_excerpt, worst.excerpts)))
    return "".join(parts)


def _tokens(tokens: list[Token]) -> str:
    columns = ("token", "d", "p trainer", "p sampler", "step", "position", "kept", "reward", "drawn")
    return _rows(columns, map(_token, tokens), left=' class="left"') + "\n"


def _token(token: Token) -> str:
    before, word, after = (_visible(part, wrap=False) for part in (token.before, token.text, token.after))
    text = f"{before}<mark>{word or '&nbsp;'}</mark>{after}"
    numbers = (token.d, token.train, token.rollout, token.step, token.position)
    kept, drawn = "yes" if token.kept else "no", "at random" if token.sampled else "as worst"
    cells = [*map(number, numbers), kept, number(token.reward), drawn]
    return f'<tr><td class="text">{text}</td>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>\n'


def _legend() -> str:
    names = [f"{level:g}" for level in LEVELS]
    up = "".join(f'<span class="u{i + 1}">{name}</span>' for i, name in enumerate(names))
    down = "".join(f'<span class="d{i + 1}">-{name}</span>' for i, name in enumerate(names))
    return (
        "<h3>Where they stand</h3>\n"
        f'<p class="legend">d at least {up} or at most {down} <span class="rejected">rejected</span>'
        '<span class="tool">of a tool or outside the loss</span><span class="broken">not finite</span></p>\n'
    )


def _excerpt(excerpt: Excerpt) -> str:
    last = excerpt.first + len(excerpt.tokens) - 1
    reward = "" if math.isnan(excerpt.reward) else f", reward {number(excerpt.reward)}"
    return (
        f'<article class="excerpt"><p class="meta">Step {excerpt.step}{reward}, tokens {excerpt.first} to {last} of '
        f'{excerpt.length}</p><div class="text" tabindex="0"><span class="prompt">{_visible(excerpt.prompt)}</span>\n'
        f"{''.join(_colored(*token) for token in excerpt.tokens)}</div></article>\n"
    )


def _colored(text: str, state: str, d: float) -> str:
    classes = [state] if state != "kept" else []
    if state in ("kept", "rejected") and (level := sum(abs(d) >= bound for bound in LEVELS)):
        classes.append(f"{'u' if d > 0 else 'd'}{level}")
    if not classes:
        return _visible(text)
    title = f' title="d {number(d)}"' if math.isfinite(d) and state != "tool" else ""
    return f'<span class="{" ".join(classes)}"{title}>{_visible(text)}</span>'


# Text ---------------------------------------------------------------------------------------------------------------------


def _text(text: str) -> str:
    return html.escape(printable(str(text)))


def _code(text: str) -> str:
    """Text of ours, in which backticks mean code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", _text(text))


def _visible(text: str, wrap: bool = True) -> str:
    """Text of a dump. A line break is shown as a sign, and made."""
    return html.escape(printable(text).replace("\n", "↵\n" if wrap else "↵"))
