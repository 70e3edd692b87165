"""Who is rejected or down-weighted, in charts, and by which criterion, in words."""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...messages import PREFIX, number, percent
from ...settings.config import RolloutCorrectionConfig
from .drawing import Axes, Chart, Colors, label_percent
from .shares import FAMILIES, Share


# What a criterion found in a token, by its name or its scope. Filled in with its bounds.
_FOUND = {
    "token_tv": "whose probability had moved by more than {bound} in the direction that the advantage pushes further",
    "token_kl": "that had moved by more than {bound} nats in the direction that the advantage pushes further",
    "token_binary_kl": "at which the policies were more than {bound} nats apart",
    "token_k1": "with a ratio {bound}",
    "seq_mean_k1": "of completions whose mean ratio was {bound}",
    "seq_sum_k1": "of completions whose product of ratios was {bound}",
    "seq_max_k1": "of completions with a ratio {bound} at some token",
    "token": "with a {divergence} above {bound}",
    "seq_mean": "of completions with a mean {divergence} above {bound}",
    "seq_sum": "of completions with a summed {divergence} above {bound}",
    "seq_max": "of completions with a {divergence} above {bound} at some token",
}


def reasons(logs: Iterable[Mapping[str, Any]], config: RolloutCorrectionConfig) -> str:
    """
    What each criterion rejected, in a sentence.

    Args:
        logs (`Iterable[Mapping]`):
            Log entries.
        config ([`RolloutCorrectionConfig`]):
            Configuration of the run, for the bounds.

    Returns:
        `str`: the sentence, with means over the log; empty if no criterion was logged.
    """
    entries, parts = list(logs), []
    thresholds: Any = config.rollout_rs_threshold or []  # parsed when the configuration was built
    for criterion, threshold in zip(config.criteria, thresholds, strict=True):
        key = f"{PREFIX}rollout_rs_{criterion.name}_masked_fraction"
        shares = [entry[key] for entry in entries if np.isfinite(entry.get(key, np.nan))]
        if not shares:
            continue
        found = _FOUND.get(criterion.name, _FOUND[criterion.scope])
        found = found.format(bound=_bound(threshold, criterion.directed), divergence=criterion.divergence)
        share = float(np.mean(shares))
        parts.append(f"{percent(share) if share else 'none'} of the tokens, {found} (`{criterion.name}`)")
    if not parts:
        return ""
    both = " Some by more than one criterion." if len(parts) > 1 else ""
    return f"Rejected: {'; '.join(parts)}.{both}"


def _bound(threshold: Any, directed: bool) -> str:
    if not isinstance(threshold, list):
        return number(threshold)
    if directed and threshold[0] == threshold[1]:
        return number(threshold[0])
    if directed:
        return f"{number(threshold[0])} (down) or {number(threshold[1])} (up)"
    lower, upper = threshold
    if lower == 0:
        return f"above {number(upper)}"
    return f"below {number(lower)}" if upper == math.inf else f"outside [{number(lower)}, {number(upper)}]"


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
