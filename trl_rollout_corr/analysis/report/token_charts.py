"""Charts of the tokens of a dump: the log-ratio from several sides, who is rejected, and the evidence of a cause."""

import math

import numpy as np
import pandas as pd

from ...correction.histogram import PERCENTILES
from ...diagnosis import Finding, Observed
from ...diagnosis.text import evidence
from ...messages import PREFIX, number, percent
from .page import Axis, Chart, Series
from .rejection import FAMILIES
from .status import Band
from .token_statistics import REFERENCE, Bound, TokenStatistics


_POINTS = 1000  # of completions
_D = "d = log p of trainer - log p of sampler, nats"


def distribution(found: TokenStatistics) -> list[Chart]:
    """Charts of the log-ratio."""
    return [
        _histogram(found.histogram, found.bounds),
        _by_probability(found.by_probability),
        _by_position(found.by_position),
        _by_length(found.completions, found.size, found.bounds),
        _sample_sizes(found.sample_sizes),
    ]


def _named(bounds: list[Bound]) -> str:
    return f" Bounds: {', '.join(f'{bound.name} at {number(bound.d)}' for bound in bounds)}." if bounds else ""


def _histogram(histogram: pd.DataFrame, bounds: list[Bound]) -> Chart:
    low, high, counts = (histogram[name].to_numpy() for name in ("from", "to", "tokens"))
    on_tokens = [bound for bound in bounds if bound.scope in ("token", "seq_max")]
    middle = counts[np.abs(low + high) / 2 < 0.1].sum()
    says = f"{percent(float(middle / max(counts.sum(), 1)))} of {counts.sum():,} tokens lie within 0.1 of 0"
    limits = (0.5, 2.0 * max(counts.max(), 10))
    drawn = [bound.d for bound in on_tokens if low[0] < bound.d < high[-1]]
    lines = [
        Series("" if i else "bound of the settings", [d, d], limits, "dashed", "bound") for i, d in enumerate(drawn)
    ]
    return Chart(
        "histogram",
        "Histogram of d",
        f"Histogram of the log-ratio d, counts on a logarithmic axis: {says}.",
        Axis(_D, limits=(low[0], high[-1])),
        Axis("tokens", log=True, limits=limits),
        [Series("", [*low, high[-1]], counts, "steps", alpha=0.75), *lines],
        histogram[counts > 0],
        f"{says.capitalize()}. The outermost bars hold everything beyond them.{_named(on_tokens)}",
    )


def logged_histogram(log: pd.DataFrame) -> Chart | None:
    """The histogram from the percentiles of a log, where there are no tokens to count."""
    keys = [f"{PREFIX}log_ratio_{name}" for name in ("min", *(f"p{p}" for p in PERCENTILES), "max")]
    if not set(keys) <= set(log):
        return None
    entries = log[keys].replace([np.inf, -np.inf], np.nan).dropna()[-20:]
    if entries.empty:
        return None
    edges = np.maximum.accumulate(entries.mean().to_numpy())
    shares = np.diff([0, *PERCENTILES, 100]) / 100
    density = shares / np.maximum(np.diff(edges), 1e-9)
    first, last = entries.index[0], entries.index[-1]
    says = f"98 percent of tokens lie between {number(float(edges[1]))} and {number(float(edges[-2]))}"
    return Chart(
        "histogram",
        "Distribution of d",
        f"Density of the log-ratio d, from logged percentiles: {says}.",
        Axis(_D),
        Axis("density, per nat", log=True, limits=(density.min() / 2, density.max() * 2)),
        [Series("", edges, density, "steps", alpha=0.75)],
        pd.DataFrame({"from": edges[:-1], "to": edges[1:], "share of tokens": shares}),
        f"{says.capitalize()}. From the percentiles logged at steps {first} to {last}, even within each bar.",
    )


# The size of d ------------------------------------------------------------------------------------------------------------


def _by_probability(buckets: pd.DataFrame) -> Chart:
    reference = [REFERENCE[bucket.left] for bucket in buckets.index]
    names = [
        f"< {number(b.right)}" if b.left == 0 else f"> {number(b.left)}" if math.isinf(b.right) else
        f"{number(b.left)}-{number(b.right)}" for b in buckets.index
    ]  # fmt: skip
    means, places = buckets["mean |d|"], range(len(buckets))
    says = ", ".join(f"{number(mean)} at p {name}" for mean, name in zip(means, names, strict=True))
    low = min(x for x in (*means, *reference, 1.0) if x > 0)
    return Chart(
        "probability",
        "|d| by probability under the sampler",
        f"Mean of |d| by probability of the token under the sampler: {says}.",
        Axis("probability under the sampler", names=names),
        Axis("mean |d|, nats", log=True, limits=(low / 2, 2 * max(*means, *reference, low))),
        [
            Series("this dump", places, means, "bars", alpha=0.8),
            Series("Qwen3-8B, bfloat16", places, reference, "diamonds", "second"),
        ],
        buckets.assign(reference=reference).set_axis(names).rename_axis("p").reset_index(),
        "Reference: Qwen3-8B in bfloat16 with vLLM 0.12, from the study at github.com/AknA13/train-infer-mismatch. "
        "Unlikely tokens disagree more; a gap at likely ones is not rounding.",
    )


def _by_position(buckets: pd.DataFrame) -> Chart:
    names = [f"{b.left}" if b.right == b.left + 1 else f"{b.left}-{b.right - 1}" for b in buckets.index]
    middles = [math.sqrt(b.left * (b.right - 1)) for b in buckets.index]
    means = buckets["mean |d|"]
    ends = [f"{number(mean)} at {name}" for mean, name in zip(means, names, strict=True)]
    return Chart(
        "position",
        "|d| by position in the completion",
        "Mean, median and 99th percentile of |d| by position of the token: "
        f"mean {', '.join(dict.fromkeys((ends[0], ends[-1])))}.",
        Axis("position of the token", log=True),
        Axis("|d|, nats", log=bool((means > 0).any())),
        [
            Series(label, middles, buckets[column].replace(0.0, np.nan), "joined", color)
            for color, column, label in (
                ("second", "99th percentile", "99 %"),
                ("line", "mean |d|", "mean"),
                ("third", "median", "median"),
            )
        ],
        buckets.set_axis(names).rename_axis("position").reset_index(),
        "Slow growth is usual. A gap at the first token alone suggests the template, steep growth a stale cache.",
    )


# Completions --------------------------------------------------------------------------------------------------------------


def _by_length(completions: pd.DataFrame, size: float, bounds: list[Bound]) -> Chart:
    shown = _thin(completions)
    low, high = completions["log_weight"].quantile([0.05, 0.95])
    n = len(completions)
    says = f"90 percent of {n:,} completions have a log-weight between {number(low)} and {number(high)}"
    some = f" {len(shown):,} are drawn, the furthest among them." if len(shown) < n else ""
    on_sequences = [bound for bound in bounds if bound.scope in ("sequence", "geometric", "seq_sum", "seq_mean")]
    wide = shown["tokens"].max() > 8 * shown["tokens"].min()
    kept, rejected = shown[~shown["rejected"]], shown[shown["rejected"]]
    points = [
        Series("kept", kept["tokens"], kept["log_weight"], "points", alpha=0.6),
        Series("rejected tokens", rejected["tokens"], rejected["log_weight"], "crosses", "second", alpha=0.6),
    ]
    return Chart(
        "length",
        "Sequence log-weight by length",
        f"Sum of the log-ratio over each completion, against its length: {says}.",
        Axis("tokens of the completion", log=wide, ticks="numbers" if wide else "whole"),
        Axis("sum of d, nats"),
        [*(series for series in points if len(series.x)), *_lines_by_length(shown, size, on_sequences)],
        _length_table(completions),
        f"{says.capitalize()}.{some} Dotted: twice the spread of independent tokens.{_named(on_sequences)}",
    )


def _thin(completions: pd.DataFrame) -> pd.DataFrame:
    """Some completions: the furthest, and others at random."""
    if len(completions) <= _POINTS:
        return completions
    ordered = completions.sort_values("log_weight", key=lambda x: -x.abs(), kind="stable")
    furthest, others = ordered[: _POINTS // 5], ordered[_POINTS // 5 :]
    return pd.concat([furthest, others.sample(_POINTS - len(furthest), random_state=0)]).sort_index()


def _lines_by_length(shown: pd.DataFrame, size: float, bounds: list[Bound]) -> list[Series]:
    """The spread of independent tokens, and the bounds near the completions."""
    lengths = np.geomspace(shown["tokens"].min(), shown["tokens"].max(), 40)
    lines = [Series("", lengths, sign * 2 * size * np.sqrt(lengths), "dotted", "muted") for sign in (-1, 1)]
    reach = 3 * max(shown["log_weight"].abs().max(), lines[1].y[-1])
    drawn: list[Series] = []
    for bound in bounds:
        at = bound.d * lengths if bound.scope in ("geometric", "seq_mean") else np.full_like(lengths, bound.d)
        if np.abs(at).min() < reach:
            near = np.abs(at) < reach
            drawn.append(Series("" if drawn else "bound", lengths[near], at[near], "dashed", "bound"))
    return [*lines, *drawn]


def _length_table(completions: pd.DataFrame) -> pd.DataFrame:
    octave = 2 ** np.floor(np.log2(completions["tokens"])).astype(int)
    groups = completions.groupby(octave)
    table = groups["log_weight"].agg(completions="size", mean="mean", lowest="min", highest="max")
    table["with a rejected token"] = groups["rejected"].sum()
    return table.set_axis([f"{low}-{2 * low - 1}" for low in table.index]).rename_axis("tokens").reset_index()


def _sample_sizes(windows: pd.DataFrame) -> Chart:
    last, steps = windows.iloc[-1], windows["from step"]
    says = (
        f"{number(last['token weights'])} of token weights and {number(last['sequence weights'])} of sequence weights at step "
        f"{int(last['from step'])}"
    )
    return Chart(
        "sizes",
        "Effective sample size without bounds",
        f"Effective sample size over steps, as a share: {says}.",
        Axis("optimizer step", ticks="whole"),
        Axis(limits=(0.0, 1.05)),
        [
            Series(name, steps, windows[name], color=color)
            for name, color in (("token weights", "line"), ("sequence weights", "second"))
        ],
        windows,
        f"{says.capitalize()}, over {int(last['completions'])} completions. "
        "With few completions, the value of sequence weights is too high. "
        "Healthy: above 0.5.",
        Band.of("rollout_is_eff_sample_size"),
    )


# Groups and causes --------------------------------------------------------------------------------------------------------


def who_is_rejected(family: str, shares: pd.DataFrame) -> Chart:
    """Shares of the tokens of each group that are rejected and down-weighted."""
    measures = [name for name in ("rejected", "down-weighted") if name in shares]
    values = shares[measures].fillna(0.0)
    most = shares.loc[values.sort_values(measures, ascending=False, kind="stable").index[0]]
    parts = [f"{percent(float(most[name]))} {name}" for name in measures if not math.isnan(most[name])]
    says = f"most at {most.name}: {' and '.join(parts)}"
    flat = not values.any(axis=None)
    colors = {"rejected": "second", "down-weighted": "line"}
    return Chart(
        f"by-{family}",
        f"{measures[0].capitalize()}, {FAMILIES[family]}",
        f"Share of tokens taken away {FAMILIES[family]}, {says}.",
        Axis("share of their tokens", ticks="percent", limits=(0, min(1.0, max(1.15 * values.max(axis=None), 0.01)))),
        Axis(names=list(shares.index)),
        [Series(name, range(len(values)), values[name], "rows", colors[name], alpha=0.85) for name in measures],
        shares.reindex(columns=[*shares.columns.intersection(["tokens"]), *colors]).rename_axis(family).reset_index(),
        "no group loses a token" if flat else f"{says.capitalize()}.",
        flat=flat,
    )


def evidence_of(observed: Observed, finding: Finding) -> Chart:
    """The evidence of a cause."""
    points = finding.picture(observed)
    names = [str(name) for name in points.at] if isinstance(points.at[0], str) else []
    places = np.arange(len(names)) if names else np.array(points.at, dtype=float)
    ends = (places[0] - 0.5, places[-1] + 0.5) if names else (places[0], places[-1])
    return Chart(
        f"cause-{finding.name}",
        points.y[:1].upper() + points.y[1:],
        f"{finding.cause.title}: {evidence(finding)}.",
        Axis(points.x, ticks="whole" if (places == np.round(places)).all() else "numbers", names=names),
        Axis(),
        [
            Series("", ends, (0.0, 0.0), "thin", "muted"),
            Series("", places, points.values, "bars" if names else "joined", alpha=0.85 if names else 1.0),
        ],
        pd.DataFrame({points.x: points.at, points.y: points.values}),
    )
