"""A page as one HTML file: no script, nothing from the network, readable in light and dark, wide and narrow."""

import math
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from ...messages import __version__
from ..formats import number, visible
from .drawing import COLORS, svg
from .examples import EFFECTS
from .page import Page
from .token_tables import percent_of


# Lower ends of |d| for the three shades of a token
SHADES = (0.1, 0.5, 2.0)


def render(page: Page) -> str:
    """The page as HTML."""
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    environment.filters.update(cell=_cell, number=number, shade=_shade, share=percent_of, svg=svg)
    template = environment.get_template("page.html")
    return (
        template.render(page=page, colors=COLORS, shades=SHADES, effects=EFFECTS, version=__version__).strip() + "\n"
    )


def _visible(value: Any) -> Any:
    """Text without marks that would reorder the page, such as in tokens, prompts and names of folders."""
    if isinstance(value, Markup):
        return Markup(visible(str(value)))
    return visible(value) if isinstance(value, str) else value


def _cell(value: str | float | None) -> str:
    if isinstance(value, str):
        return value
    return "-" if value is None or math.isnan(value) else number(value, 4)


def _shade(d: float) -> str:
    """The CSS class for the colour of a token; empty if its log-ratio is small."""
    if not math.isfinite(d):
        return "broken"
    level = sum(abs(d) >= bound for bound in SHADES)
    return f"{'u' if d > 0 else 'd'}{level}" if level else ""
