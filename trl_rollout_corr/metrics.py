"""
Metrics as sums: what is added up on the device, and how the sums become numbers.

A batch is described by one float64 vector of sums, counts, histogram bins and maxima ([`Statistics`]). Vectors of two
micro-batches, two logging steps or two ranks combine by adding the sums and taking the larger maxima, so a reported value
does not depend on how the data was split. Nothing touches the host until [`Statistics.finish`].

Names inside a vector are internal; the metric keys, their formulas and healthy ranges are listed in `docs/metrics.md`.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch

from .functional import (
    LOG_RATIO_BOUND,
    MIN_MEAN_WEIGHT,
    Criterion,
    Rejection,
    Tokens,
    above,
    accumulation_dtype,
    below,
)


PREFIX = "rollout_corr/"
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)

# Histogram of the log-ratio d: 32 bins per octave of |d| from 2^-23 to 2^7 on either side, and one bin for what is smaller,
# which is rounding noise. A bin spans at most 3.1 percent of its value, so a percentile is within 1.6 percent.
_MANTISSA_BITS = 5
SMALLEST_EXPONENT, LARGEST_EXPONENT = -23, 7
SIDE_BINS = (LARGEST_EXPONENT - SMALLEST_EXPONENT) * 2**_MANTISSA_BITS
BINS = 2 * SIDE_BINS + 1
_FIRST_BIN = (127 + SMALLEST_EXPONENT) * 2**_MANTISSA_BITS  # leading bits of the smallest magnitude

# Perplexities and k3 stay finite: sums over a long row of exp(60) still fit in float32.
LARGEST_POWER = 60.0


@dataclass(frozen=True)
class Sums:
    """
    Named sums and maxima in one vector.

    Args:
        sum_names (`tuple[str, ...]`):
            Names of the leading entries, which add up.
        max_names (`tuple[str, ...]`):
            Names of the trailing entries, of which the largest counts. A minimum is stored as the maximum of its negative.
        vector (`torch.Tensor` of shape `(N,)`):
            The sums, any sums without a name, and the maxima.
    """

    sum_names: tuple[str, ...]
    max_names: tuple[str, ...]
    vector: torch.Tensor

    def combine(self, vectors: torch.Tensor):
        """
        Combine vectors of the same layout, for instance one per rank.

        Args:
            vectors (`torch.Tensor` of shape `(K, N)`):
                Vectors to combine.

        Returns:
            Their combination, of the type of `self`, which only lends its layout.
        """
        n_additive = vectors.shape[1] - len(self.max_names)
        combined = torch.cat([vectors[:, :n_additive].sum(0), vectors[:, n_additive:].amax(0)])
        return type(self)(self.sum_names, self.max_names, combined)

    def __add__(self, other):
        if (self.sum_names, self.max_names) != (other.sum_names, other.max_names):
            raise ValueError("Statistics of different configurations cannot be combined.")
        return self.combine(torch.stack([self.vector, other.vector]))

    def __getitem__(self, name: str) -> torch.Tensor:
        """One of the sums, of shape `()`."""
        return self.vector[self.sum_names.index(name)]


class Statistics(Sums):
    """
    Sums that describe a batch, in one vector of shape `(len(sum_names) + BINS + len(max_names),)`: the sums, the histogram of
    the log-ratio, and the maxima.
    """

    def with_sum(self, name: str, value: torch.Tensor) -> "Statistics":
        """The same with another value of one of the sums, for what is only known when the whole batch has been seen."""
        vector = self.vector.clone()
        vector[self.sum_names.index(name)] = value
        return Statistics(self.sum_names, self.max_names, vector)

    def histogram(self) -> tuple[list[float], tuple[float, ...]]:
        """
        Histogram of the log-ratio over the valid tokens.

        Returns:
            `tuple[list[float], tuple[float, ...]]`: the `BINS` counts and the `BINS + 1` edges, in nats.
        """
        start = len(self.sum_names)
        return self.vector[start : start + BINS].tolist(), _bin_edges()

    def finish(self) -> dict[str, float]:
        """
        Turn the sums into named numbers. This is the only place that waits for the device.

        Returns:
            `dict[str, float]`: metrics by key (`rollout_corr/...`). A value that is undefined, because the batch has no
            valid token, is NaN; every other value is finite.
        """
        values = self.vector.tolist()
        n_sums = len(self.sum_names)
        s = dict(zip(self.sum_names, values[:n_sums], strict=True))
        s |= dict(zip(self.max_names, values[n_sums + BINS :], strict=True))
        metrics = _policy_metrics(s) | _percentiles(values[n_sums : n_sums + BINS], s)
        if "is/sum" in s:
            metrics |= _weight_metrics(s)
        for name in dict.fromkeys(key.split("/")[1] for key in s if key.startswith("rs/")):
            metrics |= _rejection_metrics(s, name)
        if "rs_tokens" in s:
            metrics["rollout_rs_masked_fraction"] = _divide(s["rs_tokens"], s["tokens"])
            metrics["rollout_rs_seq_masked_fraction"] = _divide(s["rs_rows"], s["rows"])
        return {PREFIX + key: value for key, value in metrics.items()}


class _Columns:
    """One column per name, of what each row of a block adds to it. Added up over the rows when the block is done."""

    def __init__(self, tokens: Tokens):
        self.dtype = accumulation_dtype(tokens.valid.device)
        self.lengths = tokens.lengths.to(self.dtype)  # (B, 1)
        self.rows = above(self.lengths, 0.0)  # (B, 1), 1 for rows with a token
        self.no_rows = self.rows.reciprocal() - 1.0  # (B, 1), infinity for the others
        self.sums: dict[str, torch.Tensor] = {}
        self.maxima: dict[str, torch.Tensor] = {}

    def add(self, name: str, x: torch.Tensor):
        """Add up `x`, of shape `(B, T)` or `(B, 1)`, which is 0 where it does not count."""
        self.sums[name] = x if x.shape[-1] == 1 else x.sum(-1, keepdim=True)

    def row_mean(self, name: str) -> torch.Tensor:
        """Mean over the tokens of each row of what was added under a name."""
        return self.sums[name].to(self.dtype) / self.lengths.clamp(min=1)

    def add_extremes(self, name: str, x: torch.Tensor, outside: torch.Tensor):
        """Largest and (negated) smallest entry of `x` where `outside` is 0 and not infinity."""
        self.maxima[f"{name}_max"] = (x - outside).amax(-1, keepdim=True)
        self.maxima[f"{name}_negated_min"] = -(x + outside).amin(-1, keepdim=True)

    def statistics(self, histogram: torch.Tensor) -> Statistics:
        sum_names, sums = self._joined(self.sums)
        max_names, maxima = self._joined(self.maxima)
        vector = torch.cat([sums.sum(0), histogram.to(self.dtype), maxima.amax(0)])
        return Statistics(sum_names, max_names, vector)

    def _joined(self, columns: dict[str, torch.Tensor]) -> tuple[tuple[str, ...], torch.Tensor]:
        """Names and columns, `(B, N)`. Those of one type first: converting them together is one operation, not N."""
        narrow = [name for name, column in columns.items() if column.dtype != self.dtype]
        wide = [name for name in columns if name not in narrow]
        joined = [torch.cat([columns[name] for name in names], 1).to(self.dtype) for names in (narrow, wide) if names]
        return (*narrow, *wide), torch.cat(joined, 1)


def collect(
    tokens: Tokens,
    keep: torch.Tensor,
    coefficients: torch.Tensor,
    weights: "WeightTensors | None" = None,
    rejections: Sequence[tuple[Criterion, Rejection]] = (),
) -> Statistics:
    """
    Add up everything that is reported about some rows of a batch.

    Args:
        tokens ([`~trl_rollout_corr.functional.Tokens`]):
            The tokens that count.
        keep (`torch.Tensor` of shape `(B, T)`):
            1 on tokens that count and that every criterion keeps, else 0.
        coefficients (`torch.Tensor` of shape `(B, T)`):
            What multiplies the policy gradient of each token.
        weights ([`WeightTensors`], *optional*):
            Importance weights, if there are any.
        rejections (`Sequence[tuple[Criterion, Rejection]]`, *optional*):
            The criteria and what each said.

    Returns:
        [`Statistics`]: sums of the rows. No host synchronisation, no collective.
    """
    c = _Columns(tokens)
    c.add("tokens", tokens.lengths)
    c.add("rows", c.rows)
    c.add("mask_tokens", tokens.mask_lengths)
    c.add("nonfinite", tokens.broken)
    c.add("coefficients", coefficients)
    _collect_policies(c, tokens)
    if weights is not None:
        _collect_weights(c, weights, tokens)
    for criterion, rejection in rejections:
        _collect_rejection(c, criterion, rejection, tokens)
    if rejections:
        rejected = tokens.lengths - keep.sum(-1, keepdim=True)
        c.add("rs_tokens", rejected)
        c.add("rs_rows", above(rejected, 0.0))
    return c.statistics(_histogram(tokens))


# Off-policy diagnostics -----------------------------------------------------------------------------------------------


def _collect_policies(c: _Columns, tokens: Tokens):
    d = tokens.log_ratio
    c.add("d", d)
    c.add("train_logps", tokens.train_logps)
    row_d, train_nll = c.row_mean("d"), -c.row_mean("train_logps")
    for name, nll in (("train", train_nll), ("rollout", train_nll + row_d)):
        c.add(f"{name}_nll", nll)
        c.add(f"{name}_ppl", nll.clamp(max=LARGEST_POWER).exp() * c.rows)
    gap = -row_d
    c.add("gap", gap)
    c.add("abs_gap", gap.abs())
    c.add("ppl_ratio", gap.clamp(max=LARGEST_POWER).exp() * c.rows)
    excess = d.clamp(max=LARGEST_POWER).expm1_()  # r - 1; exp(d) - 1 would lose every digit of a small d
    c.add("k3", excess - d)
    # E[r^2] - 1, summed as r^2 - 1 so that a small divergence is not lost in a sum of ones
    excess.clamp_(max=math.expm1(LOG_RATIO_BOUND))
    c.add("chi2_token", (excess + 2.0).mul_(excess))
    sequence = (row_d * c.lengths).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    c.add("chi2_seq", torch.expm1(2 * sequence))
    c.add_extremes("gap", gap, c.no_rows)
    c.add_extremes("d", d, tokens.outside)


def _policy_metrics(s: dict[str, float]) -> dict[str, float]:
    tokens, rows = s["tokens"], s["rows"]
    return {
        "training_log_ppl": _divide(s["train_nll"], rows),
        "training_ppl": _divide(s["train_ppl"], rows),
        "rollout_log_ppl": _divide(s["rollout_nll"], rows),
        "rollout_ppl": _divide(s["rollout_ppl"], rows),
        "log_ppl_diff": _divide(s["gap"], rows),
        "log_ppl_abs_diff": _divide(s["abs_gap"], rows),
        "log_ppl_diff_max": _maximum(s["gap_max"]),
        "log_ppl_diff_min": -_maximum(s["gap_negated_min"]),
        "ppl_ratio": _divide(s["ppl_ratio"], rows),
        "kl": -_divide(s["d"], tokens),
        "k3_kl": _divide(s["k3"], tokens),
        "chi2_token": _divide(s["chi2_token"], tokens),
        "chi2_seq": _divide(s["chi2_seq"], rows),
        "effective_lr": _divide(s["coefficients"], tokens),
        "nonfinite_fraction": _divide(s["nonfinite"], s["mask_tokens"]),
    }


# Histogram and percentiles of the log-ratio ---------------------------------------------------------------------------


def _histogram(tokens: Tokens) -> torch.Tensor:
    """Counts of the log-ratio, `(BINS,)`. The bin of a float32 is its sign, its exponent and the start of its mantissa."""
    leading = 9 + _MANTISSA_BITS  # bits of a float32 that are kept
    bits = tokens.log_ratio.float().view(torch.int32)
    index = (bits >> (32 - leading)).bitwise_and_(2**leading - 1).flatten().long()
    counts = tokens.valid.new_zeros(2**leading)
    counts.scatter_add_(0, index, tokens.valid.flatten())  # whole numbers, so the order does not matter
    positive, negative = counts.view(2, -1)  # by magnitude
    last = _FIRST_BIN + SIDE_BINS - 1
    sides = [torch.cat([side[_FIRST_BIN:last], side[last:].sum(0, keepdim=True)]) for side in (negative, positive)]
    small = counts.view(2, -1)[:, :_FIRST_BIN].sum().reshape(1)
    return torch.cat([sides[0].flip(0), small, sides[1]])


@cache
def _bin_edges() -> tuple[float, ...]:
    octave = 2**_MANTISSA_BITS
    side = [2.0 ** (SMALLEST_EXPONENT + i // octave) * (1 + i % octave / octave) for i in range(SIDE_BINS + 1)]
    return (*(-edge for edge in reversed(side)), *side)


def _percentiles(counts: list[float], s: dict[str, float]) -> dict[str, float]:
    metrics = {f"log_ratio_p{percent}": _percentile(counts, s, percent / 100) for percent in PERCENTILES}
    return metrics | {"log_ratio_min": -_maximum(s["d_negated_min"]), "log_ratio_max": _maximum(s["d_max"])}


def _percentile(counts: list[float], s: dict[str, float], fraction: float) -> float:
    """Smallest bin that at least `fraction` of the tokens do not exceed, as the geometric middle of its edges."""
    cumulative = list(accumulate(counts))
    if not cumulative[-1]:
        return math.nan
    side = bisect_left(cumulative, math.ceil(fraction * cumulative[-1] - 1e-6)) - SIDE_BINS
    if side == 0:
        return 0.0
    edges = _bin_edges()[SIDE_BINS + abs(side) : SIDE_BINS + abs(side) + 2]
    middle = math.copysign(math.sqrt(edges[0] * edges[1]), side)
    return min(max(middle, -s["d_negated_min"]), s["d_max"])  # the outermost bins hold everything beyond them


# Importance weights ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightTensors:
    """
    Importance weights before and after bounding, for the metrics.

    Args:
        level (`str`):
            `"token"`, `"sequence"` or `"geometric"`.
        ratio (`torch.Tensor` of shape `(B, T)` at token level, otherwise `(B, 1)`):
            Raw ratio, 0 where it does not count.
        bounded (`torch.Tensor` of the same shape):
            Bounded weight, before batch normalisation.
        lower (`float` or `None`):
            Lower IcePop bound, `None` for truncation.
        upper (`float`):
            Upper bound.
        normalized (`bool`):
            Whether the weights are then divided by their mean.
    """

    level: str
    ratio: torch.Tensor
    bounded: torch.Tensor
    lower: float | None
    upper: float
    normalized: bool


def _collect_weights(c: _Columns, w: WeightTensors, tokens: Tokens):
    lower = 1 / w.upper if w.lower is None else w.lower
    token_level = w.level == "token"
    # sums of w - 1 rather than w: a variance of 1e-8 around a mean of 1 keeps its digits
    if token_level:
        excess = w.bounded - tokens.valid
        c.add("is/sum", excess)
        c.add("is/ratio", w.ratio)
        row_excess, row_ratio = c.row_mean("is/sum"), c.row_mean("is/ratio")
        c.add("is/squares", excess.square())
        high, low = above(w.ratio, w.upper), below(w.ratio, lower).mul_(tokens.valid)
        _add_weight_extremes(c, w, tokens)
    else:
        row_excess, row_ratio = (w.bounded.to(c.dtype) - 1.0) * c.rows, w.ratio.to(c.dtype)
        c.add("is/sum", row_excess * c.lengths)
        c.add("is/squares", row_excess.square() * c.lengths)
        high, low = above(w.ratio, w.upper), below(w.ratio, lower) * c.rows
        c.add_extremes("is/weight", row_ratio, c.no_rows)  # as in verl, the raw ratio
    c.add("is/high", high)
    c.add("is/low", low)
    c.sums["is/units"] = tokens.lengths if token_level else c.rows
    c.add("is/row_sum", row_excess)
    c.add("is/row_squares", row_excess.square())
    c.add("is/row_high", above(row_ratio, w.upper))
    c.add("is/row_low", below(row_ratio, lower) * c.rows)
    c.add_extremes("is/row", row_excess + 1.0, c.no_rows)
    c.maxima["is/deviation"] = row_excess.abs() - c.no_rows
    if w.lower is not None:
        c.add("is/outside", high + low if token_level else (high + low) * c.lengths)
    if w.normalized:
        c.add("is/norm_sum", w.bounded)
        c.sums["is/norm_count"] = c.sums["is/units"]


def _add_weight_extremes(c: _Columns, w: WeightTensors, tokens: Tokens):
    if w.lower is not None:
        c.add_extremes("is/weight", w.bounded, tokens.outside)
        return
    # truncated weights grow with the log-ratio, so that their extremes are found already
    for suffix, sign in (("max", 1.0), ("negated_min", -1.0)):
        ratio = (sign * c.maxima[f"d_{suffix}"]).clamp(max=LOG_RATIO_BOUND).exp()
        c.maxima[f"is/weight_{suffix}"] = sign * ratio.clamp(max=w.upper) - c.no_rows.to(ratio.dtype)


def _weight_metrics(s: dict[str, float]) -> dict[str, float]:
    n, rows = s["tokens"], s["rows"]
    total, squares = n + s["is/sum"], n + 2 * s["is/sum"] + s["is/squares"]
    metrics = {
        "rollout_is_mean": _divide(total, n),
        "rollout_is_max": _maximum(s["is/weight_max"]),
        "rollout_is_min": -_maximum(s["is/weight_negated_min"]),
        "rollout_is_std": _std(s["is/sum"], s["is/squares"], n),
        "rollout_is_eff_sample_size": total**2 / (n * squares) if n and squares > 0 else (0.0 if n else math.nan),
        "rollout_is_ratio_fraction_high": _divide(s["is/high"], s["is/units"]),
        "rollout_is_ratio_fraction_low": _divide(s["is/low"], s["is/units"]),
        "rollout_is_seq_mean": _divide(rows + s["is/row_sum"], rows),
        "rollout_is_seq_std": _std(s["is/row_sum"], s["is/row_squares"], rows, sample=True),
        "rollout_is_seq_max": _maximum(s["is/row_max"]),
        "rollout_is_seq_min": -_maximum(s["is/row_negated_min"]),
        "rollout_is_seq_max_deviation": _maximum(s["is/deviation"]),
        "rollout_is_seq_fraction_high": _divide(s["is/row_high"], rows),
        "rollout_is_seq_fraction_low": _divide(s["is/row_low"], rows),
    }
    if "is/outside" in s:
        metrics["rollout_is_oob_ratio"] = _divide(s["is/outside"], n)
    if "is/norm_sum" in s:
        mean = _divide(s["is/norm_sum"], s["is/norm_count"])
        metrics["rollout_is_batch_norm_factor"] = 1.0 if mean <= MIN_MEAN_WEIGHT else mean
    return metrics


# Rejection criteria ---------------------------------------------------------------------------------------------------


def _collect_rejection(c: _Columns, criterion: Criterion, rejection: Rejection, tokens: Tokens):
    statistic, floor = rejection.statistic, criterion.lower if criterion.divergence == "k1" else 0.0
    token_level = criterion.scope == "token"
    name = f"rs/{criterion.name}"
    if token_level:
        bounded = statistic.clamp(floor, criterion.upper).mul_(tokens.valid)
        c.add(f"{name}/sum", statistic)
        row = c.row_mean(f"{name}/sum")
        c.add(f"{name}/bounded", bounded)
        c.add(f"{name}/bounded_squares", bounded.square())
        masked = rejection.rejected.sum(-1, keepdim=True)
        row_high, row_low = above(row, criterion.upper) * c.rows, below(row, criterion.lower) * c.rows
        if criterion.divergence == "k1":  # its extremes are those of d, with the other sign
            c.maxima[f"{name}/statistic_max"] = c.maxima["d_negated_min"]
            c.maxima[f"{name}/statistic_negated_min"] = c.maxima["d_max"]
        else:
            c.add_extremes(f"{name}/statistic", statistic, tokens.outside)
    else:
        row = statistic.to(c.dtype) * c.rows
        bounded = row.clamp(floor, criterion.upper)
        c.add(f"{name}/sum", row * c.lengths)
        c.add(f"{name}/bounded", bounded * c.lengths)
        c.add(f"{name}/bounded_squares", bounded.square() * c.lengths)
        masked = rejection.rejected * tokens.lengths
        row_high, row_low = rejection.high, rejection.low
        c.add_extremes(f"{name}/statistic", row, c.no_rows)
    c.add(f"{name}/high", rejection.high)
    c.add(f"{name}/low", rejection.low)
    c.sums[f"{name}/units"] = tokens.lengths if token_level else c.rows
    c.add(f"{name}/row_sum", row)
    c.add(f"{name}/row_squares", row.square())
    c.add(f"{name}/row_high", row_high)
    c.add(f"{name}/row_low", row_low)
    c.add(f"{name}/masked", masked)
    c.add(f"{name}/masked_rows", above(masked, 0.0))
    c.add_extremes(f"{name}/row", row, c.no_rows)
    c.maxima[f"{name}/deviation"] = row.abs() - c.no_rows
    if criterion.name == "seq_max_k1":  # its lower ratio bound is the veto of verl's first releases
        c.add(f"{name}/veto_tokens", below(tokens.log_ratio, -criterion.upper).mul_(tokens.valid))
        c.add(f"{name}/veto_rows", rejection.high)


def _rejection_metrics(s: dict[str, float], name: str) -> dict[str, float]:
    def get(key: str) -> float:
        return s[f"rs/{name}/{key}"]

    tokens, rows = s["tokens"], s["rows"]
    metrics = {
        "mean": _divide(get("sum"), tokens),
        "max": _maximum(get("statistic_max")),
        "min": -_maximum(get("statistic_negated_min")),
        "fraction_high": _divide(get("high"), get("units")),
        "fraction_low": _divide(get("low"), get("units")),
        "std": _std(get("bounded"), get("bounded_squares"), tokens),
        "seq_mean": _divide(get("row_sum"), rows),
        "seq_std": _std(get("row_sum"), get("row_squares"), rows, sample=True),
        "seq_max": _maximum(get("row_max")),
        "seq_min": -_maximum(get("row_negated_min")),
        "seq_max_deviation": _maximum(get("deviation")),
        "seq_fraction_high": _divide(get("row_high"), rows),
        "masked_fraction": _divide(get("masked"), tokens),
        "seq_masked_fraction": _divide(get("masked_rows"), rows),
    }
    if name.endswith("k1"):
        metrics["seq_fraction_low"] = _divide(get("row_low"), rows)
    metrics = {f"rollout_rs_{name}_{key}": value for key, value in metrics.items()}
    if name == "seq_max_k1":
        metrics["rollout_is_catastrophic_token_fraction"] = _divide(get("veto_tokens"), tokens)
        metrics["rollout_is_veto_fraction"] = _divide(get("veto_rows"), rows)
    return metrics


# Finishing ------------------------------------------------------------------------------------------------------------


def _divide(total: float, count: float) -> float:
    return total / count if count else math.nan


def _maximum(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _std(total: float, squares: float, count: float, *, sample: bool = False) -> float:
    """Standard deviation from a sum and a sum of squares; with `sample`, the unbiased one (divided by n - 1)."""
    if not count:
        return math.nan
    if count == 1:
        return 0.0
    variance = squares / count - (total / count) ** 2
    if variance < 1e-14 * squares / count:  # what is left of a difference of equal numbers
        return 0.0
    return math.sqrt(variance * count / (count - 1)) if sample else math.sqrt(variance)
