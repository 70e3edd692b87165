"""Charts, and how they become pictures: SVG that takes its colours from the page, and one PNG with all of them."""

import html
import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import AutoLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator


# Okabe and Ito's colours for data, which colour-blind readers tell apart. The page sets others in dark mode
LIGHT = {
    "text": "#1f2328",
    "muted": "#59636e",
    "grid": "#d1d9e0",
    "line": "#0072b2",
    "second": "#d55e00",
    "third": "#009e73",
    "band": "#009e74",
    "alarm": "#cf222e",
    "bound": "#8250df",
}
DARK = {
    "text": "#e6edf3",
    "muted": "#9aa4af",
    "grid": "#3d444d",
    "line": "#58a6ff",
    "second": "#f0883e",
    "third": "#56d4a4",
    "band": "#3fb950",
    "alarm": "#ff7b72",
    "bound": "#bc8cff",
}
# What is drawn for the page: one colour per role that occurs nowhere else, which becomes a variable of the style sheet
_MARKS = {role: f"#0a0b{i:02x}" for i, role in enumerate(LIGHT)}
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

Colors = dict[str, str]


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
    """

    name: str
    title: str
    alt: str
    draw: Callable[[Axes, Colors], None]
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""


def svg(chart: Chart) -> str:
    """A chart as an element of a page."""
    with _style(_MARKS):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        _draw(chart, axes, _MARKS)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    return _for_page(file.getvalue(), chart)


def png(charts: Sequence[Chart], title: str) -> bytes:
    """Charts in two columns, on white."""
    rows = math.ceil(len(charts) / 2)
    with _style(LIGHT):
        figure = Figure(figsize=(2 * _SIZE[0] + 0.4, rows * (_SIZE[1] + 0.3) + 0.5), layout="constrained")
        figure.suptitle(title, fontsize=14, fontweight="bold", color=LIGHT["text"], parse_math=False)
        parts = figure.subfigures(rows, 2, squeeze=False, wspace=0.04, hspace=0.04)
        for part, chart in zip(parts.flat, charts, strict=False):
            _draw_part(part, chart)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=110, facecolor="white", metadata={"Software": None})
    return file.getvalue()


def _draw_part(part: SubFigure, chart: Chart):
    part.suptitle(chart.title, x=0.02, ha="left", fontsize=12, color=LIGHT["text"])
    part.set_facecolor("none")
    _draw(chart, part.add_subplot(), LIGHT)


def _draw(chart: Chart, axes: Axes, colors: Colors):
    axes.grid(axis="y", linewidth=0.6)
    chart.draw(axes, colors)
    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if axis.get_major_formatter().__class__.__name__ in ("ScalarFormatter", "LogFormatterSciNotation"):
            _tick(axis, scale)
    handles, labels = axes.get_legend_handles_labels()
    if handles:  # above the axes, where no data is
        axes.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=4, frameon=False, borderpad=0.2,
            handlelength=1.3, columnspacing=1.0, handletextpad=0.5, labelcolor=colors["text"],
        )  # fmt: skip


def _tick(axis, scale: str):
    """A few ticks, with numbers as one would write them."""
    if scale == "log":
        low, high = axis.get_view_interval()
        decades = math.log10(high / low)
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2 else (1.0,), numticks=7))
        axis.set_minor_locator(NullLocator())
    elif isinstance(axis.get_major_locator(), AutoLocator):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def whole_steps(axes: Axes):
    """An axis of optimizer steps."""
    axes.set_xlabel("optimizer step")
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]))


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


def _for_page(text: str, chart: Chart) -> str:
    """Without what belongs in a file of its own, with identifiers of its own, and colours of the page."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(r' id="(?!m|p|h)[^"]*"', "", text)  # only markers, clips and hatches are referred to
    text = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{chart.name}-", text)
    text = text.replace("xlink:href", "href").replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
    text = text.replace(' xmlns="http://www.w3.org/2000/svg"', "")
    text = re.sub(r"<svg width=\"[^\"]*\" height=\"[^\"]*\"", "<svg", text)
    for role, mark in _MARKS.items():
        text = text.replace(mark, f"var(--{role})")
    # a hundredth of a pixel is enough
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
    text = re.sub(r"\s*\n\s*", "\n", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(chart.alt)}"', 1)


def number(value: float | None, digits: int = 3) -> str:
    """A number as one would write it: a few digits, and powers of ten only where zeros would have to be counted."""
    if value is None:
        return ""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e5):
        return f"{int(value)}"
    if math.isfinite(value) and not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.{digits}g}"


def percent(share: float | None) -> str:
    """A share in percent."""
    return "" if share is None else f"{number(100 * share)} %"
