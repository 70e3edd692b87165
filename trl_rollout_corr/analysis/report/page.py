"""A page as data: sections, cards, tables and charts, without a line of HTML and without drawing code."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from ...messages import number
from .completions import Completions
from .token_tables import Lost, Worst


Numbers: TypeAlias = Sequence[float] | np.ndarray | pd.Series


def ends_of(values: pd.Series) -> str:
    """The first and the last value of a curve, with the step or the name in its index."""
    values = values.dropna()
    names = [
        name if isinstance(name, str) else f"step {number(round(name))}"
        for name in (values.index[0], values.index[-1])
    ]
    ends = (f"{number(float(values.iloc[i]))} at {name}" for i, name in zip((0, -1), names, strict=True))
    return ", ".join(dict.fromkeys(ends))


class Axis(NamedTuple):
    """An axis of a chart."""

    label: str = ""  # quantity and unit
    log: bool = False
    whole: bool = False  # ticks at whole numbers only
    limits: tuple[float, float] | None = None  # by default those of the data
    names: Sequence[str] = ()  # of categories at 0, 1, 2, ..., in place of numbers


class Series(NamedTuple):
    """One curve, one set of bars, or one area."""

    name: str  # in the legend; empty for none
    x: Numbers  # one more than `y` where the mark is "steps": the edges of the steps
    y: Numbers  # the upper end where the mark is "area"
    mark: str = "line"  # "line", "dashed", "joined" (points on a line), "bars", "steps" or "area"
    color: str = "line"  # its role, a key of `COLORS` in `drawing`
    low: Numbers = ()  # the lower end of an area


class Chart(NamedTuple):
    """A chart."""

    name: str  # identifier, unique on the page
    title: str
    note: str  # the main numbers in a sentence, also for readers who cannot see the chart
    x: Axis
    y: Axis
    series: Sequence[Series]  # in the order in which they are drawn
    table: pd.DataFrame  # the plotted numbers
    band: tuple[float | None, float | None] = (None, None)  # healthy values
    alarms: Sequence[tuple[int, str]] = ()  # steps of first alarms, in order, and the numbers of their findings


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
    """A section: its identifier and title, and the parts that it has."""

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
    The state of a run in a word and in a sentence, its main numbers, facts (labels and values), damaged parts, and a sentence
    about texts that account for most rejections.
    """

    title: str
    level: str  # "critical", "warning", "healthy", or "unknown" without metrics
    headline: str
    detail: str
    numbers: Sequence[Card]
    about: Sequence[tuple[str, str]]
    damage: Sequence[str]
    spot: str = ""


class Page(NamedTuple):
    """A page: title, a banner per run, and sections."""

    title: str
    banners: Sequence[Banner]
    sections: Sequence[Section]
