"""Who is rejected or down-weighted: shares by group of tokens, as logged or counted over a dump."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ... import accounting
from ...config import RolloutCorrectionConfig
from ...metrics import PREFIX
from .drawing import Chart, Colors, number, percent
from .table import Table


MEASURES = ("rejected", "downweighted")
FAMILIES = {
    "length": "by length of the completion",
    "position": "by position in the completion",
    "advantage": "by sign of the advantage",
    "reward": "by reward",
    "turn": "by turn",
    "long": "of long completions with a positive advantage",
}
_NAMES = {"long_positive": "long_long, positive", "others": "long_all others"}
_ROWS_AT_ONCE = 256


class Share(NamedTuple):
    """What is taken from a group of tokens. `tokens` is `None` for a share that was logged."""

    label: str
    tokens: int | None
    rejected: float | None
    downweighted: float | None


def logged_shares(logs: Iterable[Mapping[str, Any]]) -> dict[str, list[Share]]:
    """Means over the log entries, by family of groups."""
    values: dict[str, dict[str, list[float]]] = {}
    for entry in logs:
        for measure in MEASURES:
            start = f"{PREFIX}{measure}/"
            for key, value in entry.items():
                if key.startswith(start) and np.isfinite(value):
                    values.setdefault(key.removeprefix(start), {}).setdefault(measure, []).append(value)
    means = {
        group: {measure: float(np.mean(found)) for measure, found in measures.items()}
        for group, measures in values.items()
    }
    return _families({group: Share("", None, *(m.get(name) for name in MEASURES)) for group, m in means.items()})


def counted_shares(table: Table, config: RolloutCorrectionConfig) -> dict[str, list[Share]]:
    """Over the tokens that represent the batch, by family of groups."""
    total = None
    rows = np.flatnonzero(table.represents)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        accounts = _account(table, rows[start : start + _ROWS_AT_ONCE])
        total = accounts if total is None else total + accounts
    if total is None:
        return {}
    shares = {}
    for group, counts in total.groups().items():
        if tokens := counts["tokens"]:
            rejected = counts["rejected"] / tokens if config.criteria else None
            downweighted = counts["removed"] / tokens if config.applies_weights else None
            shares[group] = Share("", int(tokens), rejected, downweighted)
    return _families(shares)


def _account(table: Table, rows: np.ndarray) -> accounting.Accounts:
    width = max(int(np.diff(table.starts)[rows].max()), 1)
    columns = (table.valid, table.valid & table.keep, table.coefficients, table.mask)
    valid, keep, coefficients, mask = (table.padded(column, rows, width) for column in columns)
    rewards = torch.from_numpy(table.reward[rows].astype(np.float64))
    advantages = torch.from_numpy(np.nan_to_num(table.advantage[rows].astype(np.float64)))
    turns = accounting.turns_of(mask)
    segments = accounting.account(valid, keep, coefficients.double(), advantages, rewards, turns)
    return accounting.Accounts.of(segments)


def _families(shares: Mapping[str, Share]) -> dict[str, list[Share]]:
    families: dict[str, list[tuple[float, Share]]] = {}
    for group, share in shares.items():
        family, _, bucket = _NAMES.get(group, group).partition("_")
        if family in FAMILIES and bucket != "mean" and (share.rejected, share.downweighted) != (None, None):
            families.setdefault(family, []).append((_order(bucket), share._replace(label=_label(bucket))))
    ordered = {family: sorted(families[family], key=lambda pair: pair[0]) for family in FAMILIES if family in families}
    return {family: [share for _, share in pairs] for family, pairs in ordered.items()}


def _order(bucket: str) -> float:
    names = {"negative": -1.0, "zero": 0.0, "positive": 1.0, "below_0": -1.0, "long, positive": 0.0}
    try:
        return names[bucket] if bucket in names else float(bucket.split("_")[0])
    except ValueError:
        return np.inf


def _label(bucket: str) -> str:
    """`16_63` becomes 16-63, `0.25_to_0.5` 0.25 to 0.5."""
    low, _, high = bucket.partition("_")
    return f"{low}-{high}" if low.isdigit() and high.isdigit() else bucket.replace("_", " ")


# Charts -------------------------------------------------------------------------------------------------------------------


def shares(families: Mapping[str, list[Share]]) -> list[Chart]:
    """Shares of tokens rejected and down-weighted, one chart per family of groups with at least two."""
    return [_shares(family, found) for family, found in families.items() if len(found) > 1]


def _shares(family: str, found: list[Share]) -> Chart:
    most = max(found, key=lambda share: (share.rejected or 0.0, share.downweighted or 0.0))
    taken = [f"{percent(most.rejected)} rejected"] if most.rejected is not None else []
    taken += [f"{percent(most.downweighted)} down-weighted"] if most.downweighted is not None else []
    says = f"most at {most.label}: {' and '.join(taken)}"
    what = "Rejected" if most.rejected is not None else "Down-weighted"
    counted = found[0].tokens is not None
    return Chart(
        f"by-{family}",
        f"{what}, {FAMILIES[family]}",
        f"Share of tokens taken away {FAMILIES[family]}, {says}.",
        partial(_draw_shares, found=found),
        (family, *(["tokens"] if counted else []), "rejected", "down-weighted"),
        [(s.label, *([s.tokens] if counted else []), s.rejected, s.downweighted) for s in found],
        f"{says.capitalize()}.",
    )


def _draw_shares(axes: Axes, colors: Colors, *, found: list[Share]):
    measures = [
        (role, label, [getattr(share, name) for share in found])
        for role, label, name in (("second", "rejected", "rejected"), ("line", "down-weighted", "downweighted"))
        if any(getattr(share, name) is not None for share in found)
    ]
    places = np.arange(len(found))
    height = 0.7 / len(measures)
    for i, (role, label, values) in enumerate(measures):
        offset = (i - (len(measures) - 1) / 2) * height
        axes.barh(
            places + offset, [value or 0.0 for value in values], height, color=colors[role], alpha=0.85, label=label
        )
    axes.set_yticks(places, [share.label for share in found])
    axes.invert_yaxis()
    largest = max(value or 0.0 for _, _, values in measures for value in values)
    axes.set_xlim(0, min(1.0, max(1.15 * largest, 0.01)))
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{number(100 * share)} %"))
    axes.set_xlabel("share of their tokens")
