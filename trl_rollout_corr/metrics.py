"""
Metrics as sums: what is added up on the device, and how the sums become numbers.

A batch is described by one float64 vector of sums, counts, histogram bins and maxima ([`Statistics`]). Vectors of two
micro-batches, two logging steps or two ranks combine by adding the sums and taking the larger maxima, so a reported value
does not depend on how the data was split. Nothing touches the host until [`Statistics.finish`].

Names inside a vector are internal; the metric keys, their formulas and healthy ranges are listed in `docs/metrics.md`.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

import torch

from .functional import LOG_RATIO_BOUND, MIN_MEAN_WEIGHT, Criterion, Rejection, accumulation_dtype, weight_sums


PREFIX = "rollout_corr/"
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)

# Histogram of the log-ratio d: 64 bins per decade of |d| from 1e-7 to 100 on either side, and one bin for |d| < 1e-7,
# which is rounding noise. A bin spans 3.7 percent of its value, so a percentile is within 1.9 percent of the exact one.
BINS_PER_DECADE = 64
SMALLEST_EXPONENT, LARGEST_EXPONENT = -7, 2
SIDE_BINS = BINS_PER_DECADE * (LARGEST_EXPONENT - SMALLEST_EXPONENT)
BINS = 2 * SIDE_BINS + 1

# Perplexities and k3 stay finite: exp(88) is the largest power that float32 holds.
_LARGEST_POWER = 88.0


@dataclass(frozen=True)
class Statistics:
    """
    Sums that describe a batch, in one vector.

    Args:
        sum_names (`tuple[str, ...]`):
            Names of the leading entries, which add up.
        max_names (`tuple[str, ...]`):
            Names of the trailing entries, of which the largest counts. A minimum is stored as the maximum of its negative.
        vector (`torch.Tensor` of shape `(len(sum_names) + BINS + len(max_names),)`):
            The sums, the histogram of the log-ratio, and the maxima.
    """

    sum_names: tuple[str, ...]
    max_names: tuple[str, ...]
    vector: torch.Tensor

    def combine(self, vectors: torch.Tensor) -> "Statistics":
        """
        Combine vectors of the same layout, for instance one per rank.

        Args:
            vectors (`torch.Tensor` of shape `(K, N)`):
                Vectors to combine.

        Returns:
            [`Statistics`]: their combination. `self` only lends its layout.
        """
        n_additive = len(self.sum_names) + BINS
        combined = torch.cat([vectors[:, :n_additive].sum(0), vectors[:, n_additive:].amax(0)])
        return Statistics(self.sum_names, self.max_names, combined)

    def __add__(self, other: "Statistics") -> "Statistics":
        if (self.sum_names, self.max_names) != (other.sum_names, other.max_names):
            raise ValueError("Statistics of different configurations cannot be combined.")
        return self.combine(torch.stack([self.vector, other.vector]))

    def histogram(self) -> tuple[list[float], list[float]]:
        """
        Histogram of the log-ratio over the valid tokens.

        Returns:
            `tuple[list[float], list[float]]`: the `BINS` counts and the `BINS + 1` edges, in nats.
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


class _Collector:
    """Adds up tensors under names over the valid tokens or over the non-empty rows of a batch."""

    def __init__(self, valid: torch.Tensor):
        self.valid = valid  # (B, T)
        self.rows = valid.any(-1, keepdim=True)  # (B, 1)
        self.dtype = accumulation_dtype(valid.device)
        self.lengths = valid.sum(-1, keepdim=True).clamp(min=1).to(self.dtype)  # (B, 1)
        self.sums: dict[str, torch.Tensor] = {}
        self.maxima: dict[str, torch.Tensor] = {}

    def _where(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows if x.shape[-1] == 1 and self.valid.shape[-1] != 1 else self.valid

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """`x` in float64, 0 where it does not count."""
        return x.to(self.dtype).masked_fill(~self._where(x), 0.0)

    def row_mean(self, x: torch.Tensor) -> torch.Tensor:
        """Mean over the valid tokens of each row, `(B, 1)`."""
        return self.wide(x).sum(-1, keepdim=True) / self.lengths

    def add(self, name: str, x: torch.Tensor):
        self.sums[name] = self.wide(x).sum()

    def add_extremes(self, name: str, x: torch.Tensor, low: torch.Tensor | None = None):
        """Largest and (negated) smallest entry; `low` is the tensor to take the smallest from, if it is another one."""
        for suffix, values in (("max", x), ("negated_min", -(x if low is None else low))):
            values = values.to(self.dtype).masked_fill(~self._where(values), -torch.inf)
            self.maxima[f"{name}_{suffix}"] = values.amax() if values.numel() else values.new_full((), -torch.inf)

    def statistics(self, histogram: torch.Tensor) -> Statistics:
        vector = torch.cat([torch.stack([*self.sums.values()]), histogram, torch.stack([*self.maxima.values()])])
        return Statistics(tuple(self.sums), tuple(self.maxima), vector)


def collect(
    train_logps: torch.Tensor,
    rollout_logps: torch.Tensor,
    log_ratio: torch.Tensor,
    valid: torch.Tensor,
    *,
    nonfinite: torch.Tensor,
    mask: torch.Tensor,
    coefficients: torch.Tensor,
    weights: "WeightTensors | None" = None,
    keep: torch.Tensor | None = None,
    rejections: list[tuple[Criterion, Rejection]] = (),
) -> Statistics:
    """
    Add up everything that is reported about a batch.

    Args:
        train_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the training policy, finite on `valid`.
        rollout_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the rollout policy, finite on `valid`.
        log_ratio (`torch.Tensor` of shape `(B, T)`):
            Their difference, 0 outside `valid`.
        valid (`torch.Tensor` of shape `(B, T)`):
            Boolean mask of the tokens that count.
        nonfinite (`torch.Tensor` of shape `(B, T)`):
            `True` on tokens of the loss whose log-ratio was not finite.
        mask (`torch.Tensor` of shape `(B, T)`):
            Boolean mask of the tokens of the loss.
        coefficients (`torch.Tensor` of shape `(B, T)`):
            What multiplies the policy gradient of each token.
        weights ([`WeightTensors`], *optional*):
            Importance weights, if there are any.
        keep (`torch.Tensor` of shape `(B, T)`, *optional*):
            Tokens that every criterion keeps, if there is any criterion.
        rejections (`list[tuple[Criterion, Rejection]]`, *optional*):
            The criteria and what each said.

    Returns:
        [`Statistics`]: sums of the batch. No host synchronisation, no collective.
    """
    c = _Collector(valid)
    _collect_policies(c, train_logps, rollout_logps, log_ratio)
    c.sums["mask_tokens"] = mask.sum().to(c.dtype)
    c.sums["nonfinite"] = nonfinite.sum().to(c.dtype)
    c.add("coefficients", coefficients)
    if weights is not None:
        _collect_weights(c, weights)
    for criterion, rejection in rejections:
        _collect_rejection(c, criterion, rejection, log_ratio)
    if keep is not None:
        c.add("rs_tokens", ~keep)
        c.add("rs_rows", (valid & ~keep).any(-1, keepdim=True))
    return c.statistics(_histogram(c, log_ratio))


# Off-policy diagnostics -----------------------------------------------------------------------------------------------


def _collect_policies(c: _Collector, train_logps, rollout_logps, log_ratio):
    d = c.wide(log_ratio)
    train_nll, rollout_nll = -c.row_mean(train_logps), -c.row_mean(rollout_logps)
    gap = train_nll - rollout_nll
    c.add("tokens", torch.ones_like(d))
    c.add("rows", torch.ones_like(gap))
    for name, nll in (("train", train_nll), ("rollout", rollout_nll)):
        c.add(f"{name}_nll", nll)
        c.add(f"{name}_ppl", nll.clamp(max=_LARGEST_POWER).exp())
    c.add("gap", gap)
    c.add("abs_gap", gap.abs())
    c.add("ppl_ratio", gap.clamp(max=_LARGEST_POWER).exp())
    c.add("d", d)
    c.add("k3", torch.expm1(d.clamp(max=_LARGEST_POWER)) - d)
    # E[r^2] - 1, summed as r^2 - 1 so that a small divergence is not lost in a sum of ones
    c.add("chi2_token", torch.expm1(2 * d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)))
    sequence = d.sum(-1, keepdim=True).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    c.add("chi2_seq", torch.expm1(2 * sequence))
    c.add_extremes("gap", gap)
    c.add_extremes("d", log_ratio)


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


def _histogram(c: _Collector, log_ratio: torch.Tensor) -> torch.Tensor:
    """Counts of the log-ratio over the valid tokens, `(BINS,)`. The bin is computed, not searched: no edges to upload."""
    magnitude = log_ratio.abs().to(c.dtype)
    index = ((magnitude.log10() - SMALLEST_EXPONENT) * BINS_PER_DECADE).floor().clamp(-1, SIDE_BINS - 1) + 1
    index = (SIDE_BINS + index * log_ratio.sign()).long().flatten()
    counts = magnitude.new_zeros(BINS)
    return counts.scatter_add_(0, index, c.valid.flatten().to(c.dtype))  # whole numbers, so the order does not matter


def _bin_edges() -> list[float]:
    exponents = [SMALLEST_EXPONENT + i / BINS_PER_DECADE for i in range(SIDE_BINS + 1)]
    side = [10**exponent for exponent in exponents]
    return [-edge for edge in reversed(side)] + side


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
    middle = math.copysign(10 ** (SMALLEST_EXPONENT + (abs(side) - 0.5) / BINS_PER_DECADE), side)
    return min(max(middle, -s["d_negated_min"]), s["d_max"])  # the outermost bins hold everything beyond them


# Importance weights ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightTensors:
    """
    Importance weights before and after bounding, for the metrics.

    Args:
        level (`str`):
            `"token"`, `"sequence"` or `"geometric"`.
        ratio (`torch.Tensor` of shape `(B, T)`):
            Raw ratio, 0 outside the valid tokens.
        bounded (`torch.Tensor` of shape `(B, T)`):
            Bounded weight, before batch normalisation, 0 outside the valid tokens.
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


def _collect_weights(c: _Collector, w: WeightTensors):
    lower = 1 / w.upper if w.lower is None else w.lower
    row_weight, row_ratio = c.row_mean(w.bounded), c.row_mean(w.ratio)
    # sums of w - 1 rather than w: a variance of 1e-8 around a mean of 1 keeps its digits
    c.add("is/sum", w.bounded - 1)
    c.add("is/squares", (c.wide(w.bounded) - 1).square())
    c.add("is/row_sum", row_weight - 1)
    c.add("is/row_squares", (row_weight - 1).square())
    ratio = w.ratio if w.level == "token" else row_ratio
    c.add("is/high", ratio > w.upper)
    c.add("is/low", ratio < lower)
    c.add("is/row_high", row_ratio > w.upper)
    c.add("is/row_low", row_ratio < lower)
    c.sums["is/units"] = c.sums["tokens"] if w.level == "token" else c.sums["rows"]
    # verl reports the applied weight at token level and the raw ratio at sequence level
    c.add_extremes("is/weight", w.bounded if w.level == "token" else row_ratio)
    c.add_extremes("is/row", row_weight)
    c.maxima["is/deviation"] = (row_weight - 1).abs().masked_fill(~c.rows, -torch.inf).amax()
    if w.lower is not None:
        c.add("is/outside", (w.ratio < w.lower) | (w.ratio > w.upper))
    if w.normalized:
        c.sums["is/norm_sum"], c.sums["is/norm_count"] = weight_sums(
            c.wide(w.bounded), c.valid, level=w.level
        ).unbind()


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


def _collect_rejection(c: _Collector, criterion: Criterion, rejection: Rejection, log_ratio: torch.Tensor):
    name, statistic = f"rs/{criterion.name}", rejection.statistic
    per_token = statistic.expand_as(c.valid)
    row = c.row_mean(per_token)
    floor = criterion.lower if criterion.divergence == "k1" else 0.0
    bounded = per_token.clamp(floor, criterion.upper)
    c.add(f"{name}/sum", per_token)
    c.add(f"{name}/bounded", bounded)
    c.add(f"{name}/bounded_squares", c.wide(bounded).square())
    c.add(f"{name}/high", rejection.high)
    c.add(f"{name}/low", rejection.low)
    c.sums[f"{name}/units"] = c.sums["tokens"] if criterion.scope == "token" else c.sums["rows"]
    c.add(f"{name}/row_sum", row)
    c.add(f"{name}/row_squares", row.square())
    c.add(f"{name}/row_high", row > criterion.upper if criterion.scope == "token" else rejection.high)
    c.add(f"{name}/row_low", row < criterion.lower if criterion.scope == "token" else rejection.low)
    c.add(f"{name}/masked", ~rejection.keep)
    c.add(f"{name}/masked_rows", (c.valid & ~rejection.keep).any(-1, keepdim=True))
    c.add_extremes(f"{name}/statistic", statistic)
    c.add_extremes(f"{name}/row", row)
    c.maxima[f"{name}/deviation"] = row.abs().masked_fill(~c.rows, -torch.inf).amax()
    if criterion.name == "seq_max_k1":  # its lower ratio bound is the veto of verl's first releases
        c.add(f"{name}/veto_tokens", -log_ratio > criterion.upper)
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
    variance = max(squares / count - (total / count) ** 2, 0.0)
    return math.sqrt(variance * count / (count - 1)) if sample else math.sqrt(variance)
