"""Pieces of a page: text, tables, charts, and the page around them."""

import html
import math
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from ... import __version__
from ...messages import number, printable
from .drawing import DARK, LIGHT, Chart, Story, svg, svg_of_story


Part = tuple[str, str, str]  # identifier, title, content


def document(title: str, head: str, parts: Sequence[Part]) -> str:
    """A page: what is above everything, and sections with links to them."""
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading, _ in parts)
    body = "".join(
        f'<section id="{name}"><h2>{heading}</h2>\n{content}</section>\n' for name, heading, content in parts
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="robots" content="noindex">\n<style>\n{_style()}</style>\n</head>\n<body>\n'
        f"<header><h1>{title}</h1>\n{head}<nav><ul>{links}</ul></nav></header>\n<main>\n{body}</main>\n"
        f"<footer>Made by trl-rollout-corr {__version__}.</footer>\n</body>\n</html>\n"
    )


def _style() -> str:
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    for mode, colors in (("light", LIGHT), ("dark", DARK)):
        variables = " ".join(f"--{role}: {color};" for role, color in colors.items())
        style = style.replace(f"/* colors: {mode} */", variables)
    return style


# Charts -------------------------------------------------------------------------------------------------------------------


def figure(chart: Chart) -> str:
    return (
        f"<figure><figcaption>{escaped(chart.title)}</figcaption>\n{svg(chart)}\n"
        f'<p class="note">{escaped(chart.note)}</p>\n'
        f"<details><summary>Numbers</summary>{table(chart.columns, chart.rows)}</details></figure>\n"
    )


def figure_of_story(story: Story) -> str:
    """Two pictures, of which the width of the page shows one."""
    pictures = "".join(
        f'<div class="{name}">{svg_of_story(story, wide=wide)}</div>'
        for name, wide in (("wide", True), ("narrow", False))
    )
    numbers = f"<details><summary>Numbers</summary>{table(story.columns, story.rows)}</details>"
    return f'<figure class="story">{pictures}\n<p class="note">{code(story.note)}</p>\n{numbers}</figure>\n'


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    return table_of_rows(
        columns, (f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>\n" for row in rows)
    )


def table_of_rows(columns: Sequence[str], rows: Iterable[str], left: str = "") -> str:
    """A table of rows that are HTML already. `left` is an attribute of the first head."""
    first, *others = (f">{escaped(column)}</th>" for column in columns)
    head = "".join(f'<th scope="col"{cell}' for cell in (left + first, *others))
    table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return escaped(value)
    return "-" if value is None or math.isnan(value) else number(value, 4)


# Text ---------------------------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """Text for a page, whatever is in it."""
    return html.escape(printable(str(text)))


def code(text: str) -> str:
    """Text of ours, in which backticks mean code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escaped(text))


def terms(text: str) -> str:
    """Text of ours, in which stars mean a word that is explained."""
    return re.sub(r"\*([^*]+)\*", r"<dfn>\1</dfn>", escaped(text))


def visible(text: str, wrap: bool = True) -> str:
    """Text of a dump. A line break is shown as a sign, and made."""
    return html.escape(printable(text).replace("\n", "↵\n" if wrap else "↵"))
