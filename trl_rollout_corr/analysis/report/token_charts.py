"""The section about the tokens of a dump, with the log-ratio `d` from several sides."""

import math

import numpy as np
import pandas as pd

from ...dumps.sequences import Sequences
from ...messages import number, percent
from .page import Axis, Chart, Section, Series, ends_of


_BINS = 80
# Lower ends of the buckets of the probability under the sampler, and the mean of |d| in each of Qwen3-8B in bfloat16 with vLLM
# 0.12, from https://github.com/AknA13/train-infer-mismatch
_REFERENCE = {0.0: 0.110, 0.01: 0.097, 0.1: 0.069, 0.5: 0.028, 0.9: 0.0008}
_D = "d = log p of trainer - log p of sampler, nats"


def distribution(sequences: Sequences) -> Section:
    """The log-ratio over the sequences that represent the batch."""
    name, title = "distribution", "How far apart the policies are"
    if not np.abs(sequences.log_ratio[sequences.counted]).any():
        return Section(name, title, "d is 0 at every token with a finite log-ratio.")
    text = "The charts count the sequences that were drawn at random, because these represent the batch."
    if not sequences.sampled.any():
        text = (
            "No sequence of this dump was drawn at random: these are the worst ones, and do not represent the batch."
        )
    return Section(name, title, text, charts=_charts(sequences))


def _charts(sequences: Sequences) -> list[Chart]:
    counted = sequences.counted
    d = sequences.log_ratio[counted]
    return [
        _histogram(d, d[~sequences.keep[counted]]),
        _by_probability(d, np.exp(sequences.rollout_logps[counted])),
    ]


def _histogram(d: np.ndarray, rejected: np.ndarray) -> Chart:
    """The range is that of nearly all tokens: a few far tokens do not squeeze the others."""
    size = np.abs(d)
    reach = min(1.5 * float(np.quantile(size, 0.999)), float(size.max()), 1e30)  # twice that is still a number
    reach = (
        float(np.float32(reach)) or 1.0
    )  # float32 as the tokens, so that none is clipped to just beyond the last edge
    edges = np.linspace(-reach, reach, _BINS + 1)
    of_all, of_rejected = (np.histogram(np.clip(x, -reach, reach), edges)[0] for x in (d, rejected))
    table = pd.DataFrame({"from": edges[:-1], "to": edges[1:], "tokens": of_all, "rejected": of_rejected})
    near = percent(float((size < 0.1).mean()))
    series = [Series("tokens", edges, of_all, "steps")]
    if rejected.size:
        series.append(Series("rejected", edges, of_rejected, "steps", "second"))
    return Chart(
        "histogram",
        "Histogram of d",
        f"{near} of {len(d):,} tokens lie within 0.1 of 0. The outermost bars hold everything beyond them.",
        Axis(_D),
        Axis("tokens", log=True, limits=(0.5, 2.0 * max(of_all.max(), 10))),
        series,
        table[of_all > 0],
    )


def _by_probability(d: np.ndarray, p: np.ndarray) -> Chart:
    sizes = pd.Series(np.abs(d), dtype=np.float64)
    buckets = sizes.groupby(pd.cut(p, [*_REFERENCE, math.inf], right=False), observed=True).agg(["size", "mean"])
    buckets = buckets.set_axis(["tokens", "mean |d|"], axis=1)
    reference = [_REFERENCE[bucket.left] for bucket in buckets.index]
    names = [
        f"< {number(b.right)}" if not b.left else f"{number(b.left)} to {number(min(b.right, 1))}"
        for b in buckets.index
    ]
    places = range(len(buckets))
    return Chart(
        "probability",
        "|d| by probability under the sampler",
        f"Mean of |d|: {ends_of(buckets['mean |d|'].set_axis(names))}. Unlikely tokens disagree more; a gap at likely "
        "ones is not rounding. Reference: Qwen3-8B in bfloat16 with vLLM 0.12, from the study at "
        "github.com/AknA13/train-infer-mismatch.",
        Axis("probability under the sampler", names=names),
        Axis("mean |d|, nats", log=True),
        [
            Series("this dump", places, buckets["mean |d|"], "bars"),
            Series("Qwen3-8B, bfloat16", places, reference, "joined", "second"),
        ],
        buckets.assign(reference=reference).set_axis(names).rename_axis("p").reset_index(),
    )
