"""Pictures of charts: SVG for a page, and one PNG of a page. The only module that imports matplotlib."""

import io
import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib import style, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...messages import number, percent
from .page import Axis, Chart, Page, Series
from .status import Band


# By role, in light and in dark mode. Data is in Okabe and Ito's colours, which colour-blind readers tell apart. Pictures are
# drawn in the colours of the light mode, each of which has one role only, so that the style sheet can replace it
COLORS = {
    "text": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9aa4af"),
    "grid": ("#d1d9e0", "#3d444d"),
    "line": ("#0072b2", "#58a6ff"),
    "second": ("#d55e00", "#f0883e"),
    "third": ("#009e73", "#56d4a4"),
    "band": ("#009e74", "#3fb950"),
    "alarm": ("#cf222e", "#ff7b72"),
    "bound": ("#8250df", "#bc8cff"),
}
_LIGHT = {role: light for role, (light, _) in COLORS.items()}
_STYLE = {
    "font.size": 11,
    "font.family": "DejaVu Sans",
    "axes.labelsize": 11,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "legend.fontsize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "lines.linewidth": 1.8,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "text.parse_math": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), _LIGHT["text"]),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), _LIGHT["muted"]),
    "grid.color": _LIGHT["grid"],
}
_MARKS: dict[str, dict[str, Any]] = {
    "line": {"zorder": 3},
    "broad": {"linewidth": 6.0, "alpha": 0.4, "solid_capstyle": "round"},
    "thin": {"linewidth": 0.8},
    "dotted": {"linestyle": ":", "linewidth": 1.4},
    "dashed": {"linestyle": "--", "linewidth": 1.4},
    "joined": {"marker": "o", "markersize": 4},
    "points": {"linestyle": "", "marker": "o", "markersize": 4},
    "crosses": {"linestyle": "", "marker": "x", "markersize": 4},
    "diamonds": {"linestyle": "", "marker": "D", "markersize": 6},
}
_STEPS = [1, 2, 2.5, 5, 10]  # between ticks, times powers of ten
_WIDTH, _LINE = 10.4, 130  # of a PNG: inches, and characters of a line of text
_DPI = 110


def svg(chart: Chart) -> str:
    """A chart as an SVG element, with identifiers that no other chart of the page has."""
    with _style():
        figure = Figure(figsize=chart.size, layout="constrained")
        draw(chart, figure.add_subplot())
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    for reference in (' id="', "url(#", 'href="#'):
        text = text.replace(reference, f"{reference}{chart.name}-")
    return text


def png(page: Page) -> bytes:
    """The banners of a page as text, and the charts of its overview below each other, on white."""
    overview = page.section("overview")
    charts = overview.charts if overview else ()
    lines = [part for line in _lines(page) for part in textwrap.wrap(line, _LINE)]
    heights = [0.9 if chart.flat else 1.5 for chart in charts]
    height = 0.75 + 0.27 * len(lines) + sum(heights) + 0.6
    with _style():
        figure = Figure(figsize=(_WIDTH, height), dpi=_DPI)
        for i, line in enumerate([page.title, *lines]):
            size, weight = (14, "bold") if i == 0 else (11, "normal")
            at = (0.2, height - 0.3 - 0.27 * i)
            figure.text(at[0] / _WIDTH, at[1] / height, line, fontsize=size, fontweight=weight)
        top = height - 0.65 - 0.27 * len(lines)
        for i, (chart, slot) in enumerate(zip(charts, heights, strict=True)):
            top -= slot
            place = (0.85 / _WIDTH, top / height, 1 - 1.05 / _WIDTH, (slot - 0.4) / height)
            axes = figure.add_axes(place)
            draw(chart, axes, legend=len(page.banners) == 1 or i == 0, beside_title=True)
            axes.set_title(chart.title, loc="left", fontsize=11, pad=4.0)
            if i < len(charts) - 1:
                axes.set_xlabel("")
                axes.tick_params(labelbottom=False)
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": "trl-rollout-corr"})
    return file.getvalue()


def _lines(page: Page) -> list[str]:
    """The banners, and the sentence about the overview, in lines of text."""
    lines = [page.lead]
    about: dict[str, str] = {}
    for banner in page.banners:
        status, about = banner.status, dict(banner.about)
        correction = about.pop("Correction", "")
        lines.append(
            f"{banner.title}{' - ' if banner.title else ''}{status.headline}. {status.detail}".replace("`", "")
        )
        lines.append("    ".join(f"{tile.label}: {tile.value}" for tile in status.tiles))
        lines.append(correction)
    lines.append("    ".join(f"{label}: {value}" for label, value in about.items()))
    overview = page.section("overview")
    return [line for line in (*lines, overview.text if overview else "") if line]


@contextmanager
def _style() -> Iterator[None]:
    """The style of the package instead of the user's, and no warning about a character that the font does not have."""
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


# Charts -------------------------------------------------------------------------------------------------------------------


def draw(chart: Chart, axes: Axes, *, legend: bool = True, beside_title: bool = False) -> None:
    """
    Draw a chart.

    Args:
        chart ([`~trl_rollout_corr.analysis.report.page.Chart`]):
            The chart.
        axes (`Axes`):
            Empty axes.
        legend (`bool`, *optional*, defaults to `True`):
            Whether to name the series.
        beside_title (`bool`, *optional*, defaults to `False`):
            Whether the names stand on the right, beside a title, instead of on the left.
    """
    for place, series in enumerate(chart.series):
        _draw_series(axes, series, chart, place)
    _dress(axes, "x", chart.x)
    _dress(axes, "y", chart.y, ticks=2 if chart.flat and beside_title else 5)
    _draw_band(axes, chart)
    _draw_alarms(axes, chart)
    horizontal = bool(chart.y.names)
    axes.grid(axis="x" if horizontal else "y", linewidth=0.6)
    if horizontal:
        axes.invert_yaxis()
    if legend and axes.get_legend_handles_labels()[0]:  # above the axes, where no data is
        drawn = axes.legend(
            bbox_to_anchor=(1.0, 0.97) if beside_title else (-0.02, 1.0), ncols=4, frameon=False, borderpad=0.2,
            handlelength=1.3, columnspacing=1.0, handletextpad=0.5,
        )  # fmt: skip
        drawn.set_loc("lower right" if beside_title else "lower left")


def _draw_series(axes: Axes, series: Series, chart: Chart, place: int) -> None:
    x, y = np.asarray(series.x), np.asarray(series.y)
    ink: dict[str, Any] = {"color": _LIGHT[series.color], "alpha": series.alpha, "label": series.name or None}
    if series.mark == "bars":
        axes.bar(x, y, 0.65, **ink)
    elif series.mark == "rows":
        height = 0.7 / len(chart.series)
        axes.barh(x + (place - (len(chart.series) - 1) / 2) * height, y, height, **ink)
    elif series.mark == "steps":
        axes.stairs(y, x, fill=True, baseline=chart.y.limits[0] if chart.y.limits else 0.0, **ink)
    elif series.mark == "area":
        axes.fill_between(x, np.asarray(series.low), y, linewidth=0, **ink)
    else:
        few = {"marker": "o", "markersize": 4} if series.mark in ("line", "broad") and len(x) <= 12 else {}
        axes.plot(x, y, **{**ink, **few, **_MARKS[series.mark]})


def _dress(axes: Axes, side: str, described: Axis, *, ticks: int = 5) -> None:
    """Scale, ends, label and about so many ticks of an axis."""
    axis = getattr(axes, f"{side}axis")
    axes.set(**{f"{side}label": described.label, f"{side}scale": "log" if described.log else "linear"})
    if described.limits is not None:
        axes.set(**{f"{side}lim": described.limits})
    if described.names:
        long = side == "x" and sum(map(len, described.names)) >= 36
        axis.set_ticks(range(len(described.names)), described.names, rotation=18 if long else 0)
        return
    if described.log:
        low, high = axis.get_view_interval()
        subs = (1.0, 2.0, 5.0) if math.log10(high / low) < 2 else (1.0,)
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=ticks + 2))
        axis.set_minor_locator(ticker.NullLocator())
    else:
        axis.set_major_locator(ticker.MaxNLocator(ticks, integer=described.ticks == "whole", steps=_STEPS))
    write = percent if described.ticks == "percent" else number
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: write(value)))


def _draw_band(axes: Axes, chart: Chart) -> None:
    if chart.band == Band() or chart.band.high == 0:
        return
    low, high = axes.get_ylim()
    color = _LIGHT["band"]
    axes.axhspan(
        low if chart.band.low is None else chart.band.low, high if chart.band.high is None else chart.band.high,
        color=color, alpha=0.13, linewidth=0,
    )  # fmt: skip
    for edge in chart.band:
        if edge is not None:
            axes.axhline(edge, color=color, linewidth=1.0, alpha=0.8)
    axes.set_ylim(low, high)


def _draw_alarms(axes: Axes, chart: Chart) -> None:
    for step in {step for step, _ in chart.alarms}:
        axes.axvline(step, color=_LIGHT["alarm"], linewidth=1.3, linestyle="--")
    left, right = axes.get_xlim()
    for step, text in _labels(chart.alarms, right, letter=0.11 * (right - left) / chart.size[0]):
        axes.annotate(
            text, (step, 1.0), xycoords=("data", "axes fraction"), color=_LIGHT["alarm"],
            textcoords="offset points", xytext=(3, -2), va="top",
        )  # fmt: skip


def _labels(alarms: Sequence[tuple[int, str]], end: float, letter: float) -> list[tuple[int, str]]:
    """
    The text at each alarm, as long as the room to the next one; `letter` is the width of a letter in steps. A number that does
    not fit is written at the next alarm.
    """
    labels: list[tuple[int, str]] = []
    waiting: list[str] = []
    for (step, name), (after, _) in pairwise([*alarms, (end, "")]):
        waiting.append(name)
        texts = [", ".join(waiting[:n]) + ("..." if n < len(waiting) else "") for n in range(len(waiting), 0, -1)]
        fits = [text for text in texts if len(text) * letter <= after - step]
        if fits or after == end:
            labels.append((int(step), [*fits, texts[-1]][0]))
            waiting = []
    return labels
