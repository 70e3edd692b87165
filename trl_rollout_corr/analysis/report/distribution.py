"""Charts of the log-ratio over the tokens of a dump."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...correction.histogram import PERCENTILES
from ...messages import PREFIX, number, percent
from .drawing import Axes, Chart, Colors, draw_band, draw_line, label_steps, label_whole_numbers
from .summary import PROBABILITIES, Bound, Bucket, Completions, Histogram, Summary, Window


_POINTS = 1000  # of a scatter plot


def distribution(summary: Summary) -> list[Chart]:
    """Charts of a dump."""
    return [
        _histogram(summary.histogram, summary.bounds),
        _by_probability(summary.by_probability),
        _by_position(summary.by_position),
        _by_length(summary.completions, summary.spread, summary.bounds),
        _effective_sample_sizes(summary.effective_sample_sizes),
    ]


# Histogram ----------------------------------------------------------------------------------------------------------------


def _histogram(histogram: Histogram, bounds: list[Bound]) -> Chart:
    edges, counts = histogram
    on_tokens = [bound for bound in bounds if bound.scope in ("token", "seq_max")]
    middle = counts[np.abs(edges[:-1] + edges[1:]) / 2 < 0.1].sum()
    says = f"{percent(float(middle / max(counts.sum(), 1)))} of {counts.sum():,} tokens lie within 0.1 of 0"
    return Chart(
        "histogram",
        "Histogram of d",
        f"Histogram of the log-ratio d, counts on a logarithmic axis: {says}.",
        partial(_draw_histogram, histogram=histogram, bounds=on_tokens),
        ("from", "to", "tokens"),
        [(float(a), float(b), int(n)) for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True) if n],
        f"{says.capitalize()}. The outermost bars hold everything beyond them.{_named(on_tokens)}",
    )


def _named(bounds: list[Bound]) -> str:
    return f" Bounds: {', '.join(f'{bound.name} at {number(bound.d)}' for bound in bounds)}." if bounds else ""


def _draw_histogram(axes: Axes, colors: Colors, *, histogram: Histogram, bounds: list[Bound]):
    edges, counts = histogram
    axes.stairs(counts, edges, fill=True, color=colors["line"], alpha=0.75, baseline=0.5)
    axes.set_yscale("log")
    axes.set_ylim(0.5, 2 * max(counts.max(), 10))
    axes.set_xlim(edges[0], edges[-1])
    label: str | None = "bound of the settings"
    for bound in bounds:
        if edges[0] < bound.d < edges[-1]:
            axes.axvline(bound.d, color=colors["bound"], linestyle="--", linewidth=1.5, label=label)
            label = None
    axes.set(xlabel="d = log p of trainer - log p of sampler, nats", ylabel="tokens")


def logged_histogram(logs: Sequence[Mapping[str, Any]]) -> Chart | None:
    """What the percentiles say about the histogram, where there are no tokens to count."""
    keys = [f"{PREFIX}log_ratio_{name}" for name in ("min", *(f"p{p}" for p in PERCENTILES), "max")]
    entries = [entry for entry in logs if all(np.isfinite(entry.get(key, np.nan)) for key in keys)][-20:]
    if not entries:
        return None
    edges = np.maximum.accumulate([np.mean([entry[key] for entry in entries]) for key in keys])
    shares = np.diff([0, *PERCENTILES, 100]) / 100
    density = [share / max(width, 1e-9) for share, width in zip(shares, np.diff(edges), strict=True)]
    first, last = entries[0]["step"], entries[-1]["step"]
    says = f"98 percent of tokens lie between {number(float(edges[1]))} and {number(float(edges[-2]))}"
    return Chart(
        "histogram",
        "Distribution of d",
        f"Density of the log-ratio d, from logged percentiles: {says}.",
        partial(_draw_density, edges=edges, density=density),
        ("from", "to", "share of tokens"),
        [(float(a), float(b), float(share)) for a, b, share in zip(edges[:-1], edges[1:], shares, strict=True)],
        f"{says.capitalize()}. From the percentiles logged at steps {first} to {last}, even within each bar.",
    )


def _draw_density(axes: Axes, colors: Colors, *, edges: np.ndarray, density: list[float]):
    axes.stairs(density, edges, fill=True, color=colors["line"], alpha=0.75, baseline=min(density) / 2)
    axes.set_yscale("log")
    axes.set_ylim(min(density) / 2, max(density) * 2)
    axes.set(xlabel="d = log p of trainer - log p of sampler, nats", ylabel="density, per nat")


# The size of d ------------------------------------------------------------------------------------------------------------


def _by_probability(buckets: list[Bucket]) -> Chart:
    of_bucket = {low: value for low, _, value in PROBABILITIES}
    names, reference = [_probability(b) for b in buckets], [of_bucket[b.low] for b in buckets]
    says = ", ".join(f"{number(b.mean)} at p {name}" for b, name in zip(buckets, names, strict=True))
    return Chart(
        "probability",
        "|d| by probability under the sampler",
        f"Mean of |d| by probability of the token under the sampler: {says}.",
        partial(_draw_by_probability, names=names, means=[b.mean for b in buckets], reference=reference),
        ("p", "tokens", "mean |d|", "median", "99th percentile", "reference"),
        [(name, *b[2:], value) for name, b, value in zip(names, buckets, reference, strict=True)],
        "Reference: Qwen3-8B in bfloat16 with vLLM 0.12, from the study at github.com/AknA13/train-infer-mismatch. "
        "Unlikely tokens disagree more; a gap at likely ones is not rounding.",
    )


def _probability(bucket: Bucket) -> str:
    if bucket.low == 0:
        return f"< {number(bucket.high)}"
    return f"> {number(bucket.low)}" if math.isinf(bucket.high) else f"{number(bucket.low)}-{number(bucket.high)}"


def _draw_by_probability(axes: Axes, colors: Colors, *, names: list[str], means: list[float], reference: list[float]):
    places = np.arange(len(names))
    axes.bar(places, means, width=0.6, color=colors["line"], alpha=0.8, label="this dump")
    axes.plot(places, reference, "D", color=colors["second"], markersize=6, label="Qwen3-8B, bfloat16")
    axes.set_yscale("log")
    low = min(x for x in (*means, *reference, 1.0) if x > 0)
    axes.set_ylim(low / 2, 2 * max(*means, *reference, low))
    axes.set_xticks(places, names)
    axes.set(xlabel="probability under the sampler", ylabel="mean |d|, nats")


def _by_position(buckets: list[Bucket]) -> Chart:
    ends = ", ".join(f"{number(b.mean)} at {_positions(b)}" for b in (buckets[:1] + buckets[-1:]))
    return Chart(
        "position",
        "|d| by position in the completion",
        f"Mean, median and 99th percentile of |d| by position of the token: mean {ends}.",
        partial(_draw_by_position, buckets=buckets),
        ("position", "tokens", "mean |d|", "median", "99th percentile"),
        [(_positions(b), *b[2:]) for b in buckets],
        "A mild growth is usual. A gap at the first token alone points to the template, a steep growth to a cache.",
    )


def _positions(bucket: Bucket) -> str:
    return f"{bucket.low}" if bucket.high == bucket.low + 1 else f"{bucket.low}-{bucket.high - 1}"


def _draw_by_position(axes: Axes, colors: Colors, *, buckets: list[Bucket]):
    middles = [math.sqrt(bucket.low * (bucket.high - 1)) for bucket in buckets]
    for role, name, label in (("second", "p99", "99 %"), ("line", "mean", "mean"), ("third", "median", "median")):
        values = [getattr(bucket, name) or math.nan for bucket in buckets]
        axes.plot(middles, values, marker="o", markersize=4, color=colors[role], label=label)
    axes.set_xscale("log", base=10)
    if any(bucket.mean > 0 for bucket in buckets):
        axes.set_yscale("log")
    axes.set(xlabel="position of the token", ylabel="|d|, nats")


# Completions --------------------------------------------------------------------------------------------------------------


def _by_length(of: Completions, spread: float, bounds: list[Bound]) -> Chart:
    shown = _thin(of)
    low, high = (float(x) for x in np.quantile(of.log_weight, [0.05, 0.95]))
    says = f"90 percent of {len(of.length):,} completions have a log-weight between {number(low)} and {number(high)}"
    some = f" {len(shown.length):,} are drawn, the furthest among them." if len(shown.length) < len(of.length) else ""
    on_sequences = [bound for bound in bounds if bound.scope in ("sequence", "geometric", "seq_sum", "seq_mean")]
    return Chart(
        "length",
        "Sequence log-weight by length",
        f"Sum of the log-ratio over each completion, against its length: {says}.",
        partial(_draw_by_length, of=shown, spread=spread, bounds=on_sequences),
        ("tokens", "completions", "mean", "lowest", "highest", "with a rejected token"),
        _length_rows(of),
        f"{says.capitalize()}.{some} Dotted: twice the spread of independent tokens.{_named(on_sequences)}",
    )


def _thin(of: Completions) -> Completions:
    """Some completions: the furthest, and others at random."""
    if len(of.length) <= _POINTS:
        return of
    order = np.argsort(-np.abs(of.log_weight), kind="stable")
    others = np.random.default_rng(0).permutation(order[_POINTS // 5 :])[: _POINTS - _POINTS // 5]
    chosen = np.sort(np.concatenate([order[: _POINTS // 5], others]))
    return Completions(*(column[chosen] for column in of))


def _length_rows(of: Completions) -> list[tuple[str, int, float, float, float, int]]:
    rows = []
    octave = np.floor(np.log2(of.length)).astype(int)
    for i in np.unique(octave):
        here = octave == i
        values = of.log_weight[here]
        numbers = (float(values.mean()), float(values.min()), float(values.max()), int(of.rejected[here].sum()))
        rows.append((f"{2**i}-{2 ** (i + 1) - 1}", int(here.sum()), *numbers))
    return rows


def _draw_by_length(axes: Axes, colors: Colors, *, of: Completions, spread: float, bounds: list[Bound]):
    wide = of.length.max() > 8 * of.length.min()
    if wide:
        axes.set_xscale("log", base=10)
    groups = (("line", "o", "kept", ~of.rejected), ("second", "x", "rejected tokens", of.rejected))
    for role, marker, name, chosen in groups:
        if chosen.any():
            x, y = of.length[chosen], of.log_weight[chosen]
            axes.plot(x, y, marker, color=colors[role], markersize=4, alpha=0.6, label=name)
    low, high = axes.get_ylim()
    lengths = np.geomspace(of.length.min(), of.length.max(), 40)
    for sign in (-1, 1):
        axes.plot(lengths, sign * 2 * spread * np.sqrt(lengths), ":", color=colors["muted"], linewidth=1.4)
    label: str | None = "bound"
    for bound in bounds:
        at = bound.d * lengths if bound.scope in ("geometric", "seq_mean") else np.full_like(lengths, bound.d)
        if np.any((at > 3 * low) & (at < 3 * high)):
            axes.plot(lengths, at, "--", color=colors["bound"], linewidth=1.4, label=label)
            label = None
    axes.set(xlabel="tokens of the completion", ylabel="sum of d, nats")
    if not wide:
        label_whole_numbers(axes.xaxis)


def _effective_sample_sizes(windows: list[Window]) -> Chart:
    step, rows, tokens, sequences = windows[-1]
    says = f"{number(tokens)} of token weights and {number(sequences)} of sequence weights at step {step}"
    return Chart(
        "sizes",
        "Effective sample size without bounds",
        f"Effective sample size over steps, as a share: {says}.",
        partial(_draw_effective_sample_sizes, windows=windows),
        ("from step", "completions", "token weights", "sequence weights"),
        windows,
        f"{says.capitalize()}, over {rows} completions. Few completions flatter sequence weights. Healthy: above 0.5.",
    )


def _draw_effective_sample_sizes(axes: Axes, colors: Colors, *, windows: list[Window]):
    steps, _, tokens, sequences = zip(*windows, strict=True)
    axes.set_ylim(0, 1.05)
    draw_band(axes, colors, (0.5, None))
    draw_line(axes, steps, tokens, colors["line"], "token weights")
    draw_line(axes, steps, sequences, colors["second"], "sequence weights")
    label_steps(axes)
