"""A page as data: sections, cards, tables and charts, without a line of HTML and without drawing code."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from .status import Band, Status
from .worst_tokens import Worst


Numbers = Sequence[float] | np.ndarray


class Axis(NamedTuple):
    """An axis of a chart."""

    label: str = ""  # quantity and unit
    log: bool = False
    ticks: str = "numbers"  # or "whole" (numbers), or "percent" (of shares)
    limits: tuple[float, float] | None = None  # by default those of the data
    names: Sequence[str] = ()  # of categories at 0, 1, 2, ..., in place of numbers


class Series(NamedTuple):
    """
    One curve, one set of bars or points, or one area.

    Args:
        name (`str`):
            Name in the legend; empty for none.
        x (`Sequence[float]`):
            Places. One more than `y` where the mark is `"steps"`: the edges of the steps.
        y (`Sequence[float]`):
            Values. The upper end where the mark is `"area"`.
        mark (`str`, *optional*, defaults to `"line"`):
            `"line"`, `"broad"` (a pale line under another), `"thin"`, `"dotted"`, `"dashed"`, `"joined"` (points on a line),
            `"points"`, `"crosses"`, `"diamonds"`, `"bars"`, `"rows"` (horizontal bars), `"steps"` or `"area"`.
        color (`str`, *optional*, defaults to `"line"`):
            Role of its colour, a key of `COLORS` in `drawing`.
        alpha (`float`, *optional*, defaults to `1.0`):
            Opacity.
        low (`Sequence[float]`, *optional*, defaults to `()`):
            Lower end of an area.
    """

    name: str
    x: Numbers
    y: Numbers
    mark: str = "line"
    color: str = "line"
    alpha: float = 1.0
    low: Numbers = ()


class Chart(NamedTuple):
    """A chart."""

    name: str  # identifier, unique on the page
    title: str
    alt: str  # the sentence that describes it to readers who cannot see it
    x: Axis
    y: Axis
    series: Sequence[Series]  # in the order in which they are drawn
    table: pd.DataFrame  # the plotted numbers
    note: str = ""
    band: Band = Band()  # healthy values
    alarms: Sequence[tuple[int, str]] = ()  # steps of first alarms, in order, and the numbers of their findings
    flat: bool = False  # nothing to see but a straight line, so that the note says all
    size: tuple[float, float] = (5.0, 3.1)  # inches of 72 units


class Card(NamedTuple):
    """A finding, a cause, settings, or a summary. Text in backticks is code."""

    title: str
    text: str = ""
    level: str = ""  # critical, warning, healthy or none
    number: str = ""  # of a finding in the charts
    remedy: str = ""
    yaml: str = ""
    meta: str = ""
    chart: Chart | None = None


class Group(NamedTuple):
    """Cards of one run, with a title where there are two."""

    cards: Sequence[Card]
    title: str = ""


class Section(NamedTuple):
    """A section: its identifier and title, and the parts that it has. `facts` are labels and values."""

    name: str
    title: str
    text: str = ""
    groups: Sequence[Group] = ()
    charts: Sequence[Chart] = ()
    table: pd.DataFrame | None = None
    worst: Worst | None = None
    facts: Sequence[tuple[str, str]] = ()


class Banner(NamedTuple):
    """The state of a run; its model, trainer, correction, date and steps (labels and values); damaged and missing parts."""

    title: str
    status: Status
    about: Sequence[tuple[str, str]]
    damage: Sequence[str]


class Page(NamedTuple):
    """A page: title, a sentence below it, a banner per run, and sections."""

    title: str
    sections: Sequence[Section]
    lead: str = ""
    banners: Sequence[Banner] = ()

    def section(self, name: str) -> Section | None:
        return next((section for section in self.sections if section.name == name), None)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> pd.DataFrame:
    """A table of text and numbers."""
    return pd.DataFrame(list(rows), columns=list(columns), dtype=object)
