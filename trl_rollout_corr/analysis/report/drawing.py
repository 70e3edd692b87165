"""Charts, and how they become pictures: SVG that takes its colours from the page, and one PNG with all of them."""

import html
import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib import image, style, ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from ...messages import number, percent


# In light and in dark mode. Data is in Okabe and Ito's colours, which colour-blind readers tell apart
_COLORS = {
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
LIGHT, DARK = ({role: colors[i] for role, colors in _COLORS.items()} for i in (0, 1))
# What is drawn for the page: one colour per role that occurs nowhere else, which becomes a variable of the style sheet
_MARKS = {role: f"#0a0b{i:02x}" for i, role in enumerate(LIGHT)}
_WIDE = 12.0  # inches
_DPI = 110
_SIZE = (5.0, 3.1)  # inches, of 72 units: on a phone, a unit is about a pixel
_STYLE = {
    "font.size": 11,
    "axes.labelsize": 11,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "legend.fontsize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
}
_STEPS = [1, 2, 2.5, 5, 10]  # between ticks, times powers of ten

Colors = dict[str, str]
Numbers = Sequence[float] | np.ndarray


class Chart(NamedTuple):
    """
    One chart.

    Args:
        name (`str`):
            Name, unique in the report and fit for an identifier.
        title (`str`):
            What it shows, in a few words.
        alt (`str`):
            What is to be seen, for those who cannot.
        draw (`Callable[[Axes, dict[str, str]], None]`):
            Draws it into axes, in colours by role.
        columns (`Sequence[str]`):
            Head of the table of plotted numbers.
        rows (`Sequence[Sequence]`):
            Its rows.
        note (`str`, *optional*, defaults to `""`):
            What else there is to know.
        flat (`str`, *optional*, defaults to `""`):
            Says all there is to see, of a chart that would show nothing but a straight line.
    """

    name: str
    title: str
    alt: str
    draw: Callable[[Axes, Colors], None]
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    flat: str = ""


class Story(NamedTuple):
    """
    Charts below each other over the same steps, with lines through all of them.

    Args:
        title (`str`):
            What they show together.
        alt (`str`):
            What is to be seen, for those who cannot.
        panels (`Sequence[Chart]`):
            The charts. Flat ones are drawn lower.
        alarms (`Sequence[tuple[int, Sequence[str]]]`):
            Steps at which there is a line, in order, and the names that are written at it.
        columns (`Sequence[str]`):
            Head of the table of plotted numbers.
        rows (`Sequence[Sequence]`):
            Its rows.
        note (`str`):
            What else there is to know.
        runs (`Sequence[str]`, *optional*, defaults to `()`):
            Names of the curves, where they are the same in all charts.
    """

    title: str
    alt: str
    panels: Sequence[Chart]
    alarms: Sequence[tuple[int, Sequence[str]]]
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str
    runs: Sequence[str] = ()


# Parts of charts ----------------------------------------------------------------------------------------------------------


def draw_line(
    axes: Axes, steps: Numbers, values: Numbers, color: str, label: str | None = None, *, under: bool = False
):
    """
    A curve over optimizer steps, with dots if they are few. One under another is broad and pale, so that both are seen where
    they meet.
    """
    broad = {"linewidth": 6.0, "alpha": 0.4, "solid_capstyle": "round"} if under else {"zorder": 3}
    axes.plot(steps, values, color=color, marker="o" if len(steps) <= 12 else None, markersize=4, label=label, **broad)


def draw_band(axes: Axes, colors: Colors, band: tuple[float | None, float | None]):
    """A healthy band, `(lower, upper)` with `None` for no bound, in axes whose limits are set."""
    ends = (end if edge is None else edge for edge, end in zip(band, axes.get_ylim(), strict=True))
    axes.axhspan(*ends, color=colors["band"], alpha=0.13, linewidth=0)
    for edge in band:
        if edge is not None:
            axes.axhline(edge, color=colors["band"], linewidth=1.0, alpha=0.8)


def label_steps(axes: Axes):
    """An axis of optimizer steps."""
    axes.set_xlabel("optimizer step")
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True, steps=_STEPS))


def label_whole_numbers(axis: Axis):
    """An axis of counts."""
    axis.set_major_locator(ticker.MaxNLocator(5, integer=True))


def label_percent(axis: Axis):
    """An axis of shares."""
    axis.set_major_locator(ticker.MaxNLocator(5, steps=_STEPS))
    axis.set_major_formatter(ticker.FuncFormatter(lambda share, _: percent(share)))


# Pictures -----------------------------------------------------------------------------------------------------------------


def svg(chart: Chart) -> str:
    """A chart as an element of a page."""
    with _style(_MARKS):
        figure = Figure(figsize=_SIZE, layout="constrained")
        _draw(chart, figure.add_subplot(), _MARKS)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    return _for_page(file.getvalue(), chart.name, chart.alt)


def svg_of_story(story: Story, *, wide: bool) -> str:
    """The story as an element of a page, wide or as narrow as a phone."""
    size = (_WIDE, 0.25 + _height(story)) if wide else (_SIZE[0], 0.35 + 1.15 * _height(story))
    with _style(_MARKS):
        figure = Figure(figsize=size, layout="constrained")
        _draw_story(story, figure, _MARKS, labels=16 if wide else 6)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    return _for_page(file.getvalue(), "story-wide" if wide else "story-narrow", story.alt)


def png(title: str, lines: Sequence[str], story: Story | None, charts: Sequence[Chart]) -> bytes:
    """A title, lines of text, the story, and charts in two columns, on white."""
    wide = 2 * _SIZE[0] + 0.4
    with _style(LIGHT):
        rows = [[_text([(title, 14.0, "bold"), *((line, 11.0, "normal") for line in lines)], wide)]]
        if story is not None:
            rows.append([_picture((wide, _height(story)), partial(_draw_story, story, colors=LIGHT, labels=14))])
        pictures = [_picture((wide / 2, _SIZE[1] + 0.3), partial(_draw_titled, chart)) for chart in charts]
        rows += [pictures[i : i + 2] for i in range(0, len(pictures), 2)]
    # put together here: one layout for all of them comes out differently from time to time, by a pixel
    canvas = np.full((sum(len(row[0]) for row in rows), rows[0][0].shape[1], 4), 255, np.uint8)
    top = 0
    for row in rows:
        left = 0
        for picture in row:
            height, width = picture.shape[:2]
            canvas[top : top + height, left : left + width] = picture[:, : canvas.shape[1] - left]
            left += width
        top += len(row[0])
    file = io.BytesIO()
    image.imsave(file, canvas, format="png", dpi=_DPI, metadata={"Software": "trl-rollout-corr"})
    return file.getvalue()


def _picture(size: tuple[float, float], draw: Callable[[Figure], object]) -> np.ndarray:
    """Pixels of a figure of some inches."""
    room = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.07)
    figure = Figure(figsize=size, layout=room, dpi=_DPI, facecolor="white")
    draw(figure)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def _text(lines: Sequence[tuple[str, float, str]], width: float) -> np.ndarray:
    """Lines of text, each with its size and weight."""
    height = 0.2 + 0.27 * len(lines)

    def write(figure: Figure):
        for i, (text, size, weight) in enumerate(lines):
            at = 1 - (0.3 + 0.27 * i) / height
            figure.text(0.015, at, text, fontsize=size, fontweight=weight, color=LIGHT["text"], parse_math=False)

    return _picture((width, height), write)


def _draw_titled(chart: Chart, figure: Figure):
    figure.suptitle(chart.title, x=0.02, ha="left", fontsize=12, color=LIGHT["text"])
    _draw(chart, figure.add_subplot(), LIGHT)


def _height(story: Story) -> float:
    """Inches."""
    return sum(map(_height_of_panel, story.panels)) + 0.35 + (0.3 if story.runs else 0.0)


def _height_of_panel(panel: Chart) -> float:
    return 0.75 if panel.flat else 1.5


def _draw_story(story: Story, figure: Figure, colors: Colors, *, labels: int):
    """Draw charts above each other. So many labels of alarms fit next to each other."""
    ratios = [*map(_height_of_panel, story.panels)]
    rows = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    for i, (panel, axes) in enumerate(zip(story.panels, rows, strict=True)):
        _draw(panel, axes, colors, legend_right=True)
        if story.runs and (legend := axes.get_legend()):
            legend.remove()
        axes.set_title(panel.title, loc="left", fontsize=11, color=colors["text"], pad=4.0)
        for step, _ in story.alarms:
            axes.axvline(step, color=colors["alarm"], linewidth=1.3, linestyle="--")
        if i < len(rows) - 1:
            axes.set_xlabel("")
    # in the first chart, for its title is above it
    for step, name in _labels(story.alarms, apart=np.ptp(rows[0].get_xlim()) / labels):
        at = {"textcoords": "offset points", "xytext": (3, -2), "va": "top"}
        rows[0].annotate(name, (step, 1.0), xycoords=("data", "axes fraction"), color=colors["alarm"], **at)
    if story.runs:
        named = {label: line for axes in rows for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(
            [named[name] for name in story.runs if name in named], [name for name in story.runs if name in named],
            loc="outside upper left", ncols=2, frameon=False, handlelength=1.3, columnspacing=1.0, handletextpad=0.5,
            labelcolor=colors["text"], borderpad=0.1,
        )  # fmt: skip


def _labels(alarms: Sequence[tuple[int, Sequence[str]]], apart: float) -> list[tuple[int, str]]:
    """What is written at each line. Of lines that are too close to write between, the last has the names of all."""
    labels: list[tuple[int, list[str]]] = []
    for step, names in alarms:
        here = [*names]
        if labels and step - labels[-1][0] < apart:
            before, others = labels[-1]
            labels[-1], here = (before, []), [*others, *names]
        labels.append((step, here))
    return [(step, ", ".join(names[:3]) + ("..." if len(names) > 3 else "")) for step, names in labels]


def _draw(chart: Chart, axes: Axes, colors: Colors, *, legend_right: bool = False):
    axes.grid(axis="y", linewidth=0.6)
    chart.draw(axes, colors)
    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if isinstance(
            axis.get_major_formatter(), (ticker.ScalarFormatter, ticker.LogFormatter)
        ):  # the chart has set no other
            _tick(axis, scale)
    handles, labels = axes.get_legend_handles_labels()
    if handles:  # above the axes, where no data is
        legend = axes.legend(
            handles, labels, bbox_to_anchor=(1.0, 0.97) if legend_right else (-0.02, 1.0), ncols=4, frameon=False,
            borderpad=0.2, handlelength=1.3, columnspacing=1.0, handletextpad=0.5, labelcolor=colors["text"],
        )  # fmt: skip
        legend.set_loc("lower right" if legend_right else "lower left")


def _tick(axis: Axis, scale: str):
    """A few ticks, with numbers as one would write them."""
    if scale == "log":
        low, high = axis.get_view_interval()
        decades = math.log10(high / low)
        axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2 else (1.0,), numticks=7))
        axis.set_minor_locator(ticker.NullLocator())
    elif isinstance(axis.get_major_locator(), ticker.AutoLocator):
        axis.set_major_locator(ticker.MaxNLocator(5, steps=_STEPS))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: number(value)))


@contextmanager
def _style(colors: Colors):
    """Our style, whatever the user's is, and no warning about a sign of a name that the font does not have."""
    with style.context(["default", {**_STYLE, **_ink(colors)}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def _ink(colors: Colors) -> dict[str, Any]:
    keys = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")
    lines = ("axes.edgecolor", "xtick.color", "ytick.color")
    return dict.fromkeys(keys, colors["text"]) | dict.fromkeys(lines, colors["muted"]) | {"grid.color": colors["grid"]}


def _for_page(text: str, name: str, alt: str) -> str:
    """Without what belongs in a file of its own, with identifiers of its own, and colours of the page."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r' id="(?!m|p|h)[^"]*"', "", text)  # only markers, clips and hatches are referred to
    text = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = text.replace("xlink:href", "href").replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
    text = text.replace(' xmlns="http://www.w3.org/2000/svg"', "")
    text = re.sub(r"<svg width=\"[^\"]*\" height=\"[^\"]*\"", "<svg", text)
    for role, mark in _MARKS.items():
        text = text.replace(mark, f"var(--{role})")
    # a hundredth of a pixel is enough
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
    text = re.sub(r"\s*\n\s*", "\n", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1)
