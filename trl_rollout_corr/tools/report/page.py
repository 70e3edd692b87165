"""A page as data: sections, cards, tables and charts, without HTML and drawing code."""

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from .examples import Completions
from .token_tables import Lost, Worst


class Curve(NamedTuple):
    """One curve of a chart."""

    name: str  # in the legend; empty for none
    values: pd.DataFrame  # columns `mean`, `min` and `max`, with optimizer steps as index
    color: str = "line"  # its role, a key of `COLORS` in `drawing`
    dashed: bool = False


class Chart(NamedTuple):
    """A metric over optimizer steps."""

    name: str  # identifier, unique on the page
    title: str  # quantity and unit
    note: str  # the main numbers in a sentence, for readers who cannot see the chart
    steps: tuple[float, float]  # ends of the axis
    log: bool
    curves: Sequence[Curve]  # in the order in which they are drawn
    table: pd.DataFrame  # the plotted numbers
    band: tuple[float | None, float | None] = (None, None)  # healthy values
    alarms: Sequence[tuple[int, str]] = ()  # steps of first alarms, in order, with the numbers of their findings


class Card(NamedTuple):
    """A finding, a cause, settings, or a summary. Text in backticks is code."""

    title: str
    text: str = ""
    level: str = ""  # critical, warning, healthy or none
    number: str = ""  # of a finding in the charts
    remedy: str = ""
    yaml: str = ""
    meta: str = ""


class Section(NamedTuple):
    """A section: its identifier, its title and its parts."""

    name: str
    title: str
    text: str = ""
    cards: Sequence[Card] = ()
    charts: Sequence[Chart] = ()
    table: pd.DataFrame | None = None
    worst: Worst | None = None
    lost: Lost | None = None
    completions: Completions | None = None


class Banner(NamedTuple):
    """
    The state of a run in a word and in a sentence, its main numbers, facts (labels and values), and damaged parts.
    """

    title: str
    level: str  # "critical", "warning", "healthy", or "unknown" without metrics
    headline: str
    detail: str
    numbers: Sequence[Card]
    about: Sequence[tuple[str, str]]
    damage: Sequence[str]


class Page(NamedTuple):
    """A page: title, a banner per run, and sections."""

    title: str
    banners: Sequence[Banner]
    sections: Sequence[Section]
