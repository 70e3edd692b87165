"""Pictures of charts: SVG for a page, and one PNG of a page. The only module that imports matplotlib."""

import io
import math
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from matplotlib import style, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..formats import number, visible
from .page import Chart, Page


# Colours by role, in light and in dark mode. Data uses Okabe and Ito's colours, which colour-blind readers tell apart.
# Pictures are drawn in the light colours. Each of them plays one role only, so that the style sheet can replace it
COLORS = {
    "text": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9aa4af"),
    "grid": ("#d1d9e0", "#3d444d"),
    "line": ("#0072b2", "#58a6ff"),
    "second": ("#d55e00", "#f0883e"),
    "third": ("#009e73", "#56d4a4"),
    "band": ("#009e74", "#3fb950"),
    "alarm": ("#cf222e", "#ff7b72"),
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
_LEGEND = 50  # characters of names in one line of a legend
_WIDTH, _LINE, _DPI = 10.4, 120, 110  # of a PNG: width in inches, characters per line of text, dots per inch


def svg(chart: Chart) -> str:
    """A chart as an SVG element, with identifiers that are unique on the page."""
    with _style():
        figure = Figure(figsize=(5.0, 2.9), layout="constrained")
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
    overview = next(section for section in page.sections if section.name == "overview")
    lines = [page.title]
    for banner in page.banners:
        lines.append(
            f"{banner.title}{' - ' if banner.title else ''}{banner.headline}. {banner.detail}".replace("`", "")
        )
        lines.append("    ".join(card.title for card in banner.numbers))
        lines.append("    ".join(f"{label}: {value}" for label, value in banner.about))
    lines = [part for line in [*lines, overview.text] for part in textwrap.wrap(visible(line), _LINE)]
    n = len(overview.charts)
    with _style():
        figure = Figure(figsize=(_WIDTH, 0.6 + 0.22 * len(lines) + 1.7 * n), dpi=_DPI, layout="constrained")
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10)
        for i, chart in enumerate(overview.charts, 1):
            axes = figure.add_subplot(n, 1, i)
            draw(chart, axes)
            axes.set_title(chart.title, loc="left", fontsize=11)
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": "trl-rollout-corr"})
    return file.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    """Context with the package's style instead of the user's, and without warnings about missing glyphs."""
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield


def draw(chart: Chart, axes: Axes) -> None:
    """Draw a chart on empty axes."""
    axes.set(xlim=chart.steps, yscale="log" if chart.log else "linear")
    for curve in chart.curves:
        steps, values = curve.values.index, curve.values
        color = _LIGHT[curve.color]
        if (values["max"] > values["min"]).any():
            axes.fill_between(steps, values["min"], values["max"], color=color, linewidth=0, alpha=0.2)
        how: dict[str, Any] = {"linestyle": "--", "zorder": 4} if curve.dashed else {"zorder": 3}
        how |= {"marker": "o", "markersize": 4} if len(steps) <= 12 else {}
        axes.plot(steps, values["mean"], color=color, label=curve.name or None, **how)
    _draw_band(axes, chart)
    _place_ticks(axes, chart)
    for i, step in enumerate(dict.fromkeys(step for step, _ in chart.alarms)):
        axes.axvline(step, color=_LIGHT["alarm"], linewidth=1.3, linestyle="--")
        names = ", ".join(name for at, name in chart.alarms if at == step)
        axes.annotate(
            names, (step, 1.0), xycoords=("data", "axes fraction"), color=_LIGHT["alarm"], va="top",
            textcoords="offset points", xytext=(3, -2 - 12 * (i % 3)),  # keeps numbers of close alarms apart
        )  # fmt: skip
    axes.grid(axis="y", linewidth=0.6)
    if labels := axes.get_legend_handles_labels()[1]:  # above the axes, where it covers nothing
        columns = len(labels) if sum(map(len, labels)) < _LEGEND else 1
        place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
        axes.legend(frameon=False, handlelength=1.3, ncols=columns, columnspacing=1.2, **place)


def _place_ticks(axes: Axes, chart: Chart) -> None:
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    if chart.log:
        low, high = axes.get_ylim()
        subs = (1.0, 2.0, 5.0) if math.log10(high / low) < 2 else (1.0,)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=subs, numticks=7))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        axes.yaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: number(value)))


def _draw_band(axes: Axes, chart: Chart) -> None:
    """Draw the healthy values. The axis reaches to their ends."""
    low, high = chart.band
    if (low is None and high is None) or high == 0:
        return
    color = _LIGHT["band"]
    for edge in (low, high):
        if edge is not None:
            axes.axhline(edge, color=color, linewidth=1.0, alpha=0.8)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top)
    axes.axhspan(bottom if low is None else low, top if high is None else high, color=color, alpha=0.13, linewidth=0)
