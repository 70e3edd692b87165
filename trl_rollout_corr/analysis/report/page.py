"""The report as one HTML file: no script, nothing from the network, right in light and dark, wide and narrow."""

import math
from collections.abc import Sequence

from ...messages import number
from .advice import Advice
from .banner import banner, cards, words
from .content import Report, Section
from .diagnosis import cards as cards_of_diagnosis
from .drawing import Chart
from .markup import code, document, escaped, figure, figure_of_story, table_of_rows, visible
from .tokens import Excerpt, Token, Worst


# Classes of a token by |d|: what the style sheet colours
LEVELS = (0.1, 0.5, 2.0)


def page(report: Report) -> str:
    """The report as HTML."""
    title = f"Rollout report: {escaped(report.name)}"
    facts = "".join(f"<dt>{escaped(label)}</dt><dd>{escaped(value)}</dd>" for label, value in report.facts)
    story = figure_of_story(report.story) if report.story else ""
    diagnosis = cards_of_diagnosis(*report.diagnosis) if report.diagnosis else ""
    parts = [
        *([("diagnosis", "Diagnosis", words() + diagnosis)] if diagnosis else []),
        ("story", "What happened", story if diagnosis else words() + story),
        ("findings", "Findings", cards(report)),
        ("settings", "Settings to try", f'<div class="settings">{"".join(map(_advice, report.advice))}</div>'),
        *((section.name, section.title, _section(section)) for section in report.sections),
    ]
    if report.worst is not None:
        parts.append(("worst", "The worst tokens", _worst(report.worst)))
    parts.append(("made-of", "What this report is made of", f"<dl>{facts}</dl>"))
    return document(title, banner(report), parts)


def _advice(advice: Advice) -> str:
    yaml = f"<pre>{escaped(advice.yaml)}</pre>" if advice.yaml else ""
    return f'<article class="setting"><h3>{escaped(advice.title)}</h3><p>{code(advice.text)}</p>{yaml}</article>'


# Charts -------------------------------------------------------------------------------------------------------------------


def _section(section: Section) -> str:
    charts = "".join(figure(chart) for chart in section.charts if not chart.flat)
    grid = f'<div class="grid">\n{charts}</div>\n' if charts else ""
    return f'<p class="intro">{code(section.text)}</p>\n{grid}{_flat(section.charts)}'


def _flat(charts: Sequence[Chart]) -> str:
    """A line in place of a chart that would show nothing but a straight one."""
    flat = "".join(f"<li><strong>{escaped(c.title)}</strong>: {escaped(c.flat)}</li>" for c in charts if c.flat)
    return f'<ul class="flat">{flat}</ul>\n' if flat else ""


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
        '<p class="intro">The largest |d| in the dump, over all its sequences: one row for each text and sign of d, with its '
        f"furthest token marked in its context, and at most three of one completion. <em>Times</em> says how many of the "
        f"{worst.among:,} furthest tokens are alike, p is the probability under the trainer and the sampler, and positions "
        "count from 1.</p>"
    )
    nothing = "<p>None: no token of the loss has a finite log-ratio other than 0.</p>"
    parts.append(_legend() + _tokens(worst.tokens, times=True) if worst.tokens else nothing)
    if worst.excerpts:
        parts.append(f"<h3>Where they stand</h3>\n{''.join(map(_excerpt, worst.excerpts))}")
    return "".join(parts)


def _tokens(tokens: list[Token], *, times: bool = False) -> str:
    counted = ("times",) if times else ()
    columns = ("token", "d", *counted, "p trainer", "p sampler", "step", "position", "kept", "reward", "drawn")
    return table_of_rows(columns, (_token(token, times) for token in tokens), left=' class="left"') + "\n"


def _token(token: Token, times: bool) -> str:
    before, word, after = (visible(part, wrap=False) for part in (token.before, token.text, token.after))
    text = f'{before}<mark class="{_shade(token.d) or "broken"}">{word or "&nbsp;"}</mark>{after}'
    counted = (token.times,) if times else ()
    numbers = (token.d, *counted, token.train, token.rollout, token.step, token.position)
    kept, drawn = "yes" if token.kept else "no", "at random" if token.sampled else "as worst"
    cells = [*map(number, numbers), kept, number(token.reward), drawn]
    return f'<tr><td class="text">{text}</td>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>\n'


def _legend() -> str:
    names = [f"{level:g}" for level in LEVELS]
    up = "".join(f'<span class="u{i + 1}">{name}</span>' for i, name in enumerate(names))
    down = "".join(f'<span class="d{i + 1}">-{name}</span>' for i, name in enumerate(names))
    return (
        f'<p class="legend">More likely under the trainer, d at least: {up} less: {down} '
        '<span class="rejected">rejected</span><span class="tool">of a tool or outside the loss</span>'
        '<span class="broken">not finite</span></p>\n'
    )


def _shade(d: float) -> str:
    """The class of the colour of a log-ratio; empty if it is small or none."""
    level = sum(abs(d) >= bound for bound in LEVELS)
    return f"{'u' if d > 0 else 'd'}{level}" if level else ""


def _excerpt(excerpt: Excerpt) -> str:
    last = excerpt.first + len(excerpt.tokens) - 1
    reward = "" if math.isnan(excerpt.reward) else f", reward {number(excerpt.reward)}"
    return (
        f'<article class="excerpt"><p class="meta">Step {excerpt.step}{reward}, tokens {excerpt.first} to {last} of '
        f'{excerpt.length}</p><div class="text" tabindex="0"><span class="prompt">{visible(excerpt.prompt)}</span>\n'
        f"{''.join(_colored(*token) for token in excerpt.tokens)}</div></article>\n"
    )


def _colored(text: str, state: str, d: float) -> str:
    classes = [state] if state != "kept" else []
    if state in ("kept", "rejected") and _shade(d):
        classes.append(_shade(d))
    if not classes:
        return visible(text)
    title = f' title="d {number(d)}"' if math.isfinite(d) and state != "tool" else ""
    return f'<span class="{" ".join(classes)}"{title}>{visible(text)}</span>'
