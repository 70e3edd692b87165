"""Charts of who is rejected or down-weighted."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from ..text import percent
from .drawing import Axes, Chart, Colors, label_percent
from .shares import FAMILIES, Share


def rejected(families: Mapping[str, list[Share]]) -> list[Chart]:
    """Shares of tokens rejected and down-weighted, one chart per family of groups with at least two."""
    return [_chart(family, shares) for family, shares in families.items() if len(shares) > 1]


def _chart(family: str, shares: list[Share]) -> Chart:
    most = max(shares, key=lambda share: (share.rejected or 0.0, share.downweighted or 0.0))
    parts = [f"{percent(most.rejected)} rejected"] if most.rejected is not None else []
    parts += [f"{percent(most.downweighted)} down-weighted"] if most.downweighted is not None else []
    says = f"most at {most.label}: {' and '.join(parts)}"
    counted = shares[0].tokens is not None
    return Chart(
        f"by-{family}",
        f"{'Rejected' if most.rejected is not None else 'Down-weighted'}, {FAMILIES[family]}",
        f"Share of tokens taken away {FAMILIES[family]}, {says}.",
        partial(_draw, shares=shares),
        (family, *(["tokens"] if counted else []), "rejected", "down-weighted"),
        [share if counted else (share.label, share.rejected, share.downweighted) for share in shares],
        f"{says.capitalize()}.",
        "" if any(share.rejected or share.downweighted for share in shares) else "no group loses a token",
    )


def _draw(axes: Axes, colors: Colors, *, shares: list[Share]):
    measures = [
        (role, label, [value or 0.0 for value in values])
        for role, label, values in (
            ("second", "rejected", [share.rejected for share in shares]),
            ("line", "down-weighted", [share.downweighted for share in shares]),
        )
        if any(value is not None for value in values)
    ]
    places = np.arange(len(shares))
    height = 0.7 / len(measures)
    for i, (role, label, values) in enumerate(measures):
        offset = (i - (len(measures) - 1) / 2) * height
        axes.barh(places + offset, values, height, color=colors[role], alpha=0.85, label=label)
    axes.set_yticks(places, [share.label for share in shares])
    axes.invert_yaxis()
    largest = max(max(values) for _, _, values in measures)
    axes.set_xlim(0, min(1.0, max(1.15 * largest, 0.01)))
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", linewidth=0.6)
    label_percent(axes.xaxis)
    axes.set_xlabel("share of their tokens")
