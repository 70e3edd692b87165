"""
Metrics as sums on the device, which become numbers when they are logged. Torch only.

A batch is described by one float64 vector of sums, counts, histogram bins and maxima ([`Statistics`]). The host waits for the
device in [`Statistics.finish`] only. For each subject (the two policies, importance weights, rejection), the sums and the
metrics made of them stand next to each other.

Names inside a vector are internal. The metric keys, their formulas and healthy ranges are listed in `docs/metrics.md`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch

from ..settings.criteria import Bounding, Criterion
from . import histogram
from .columns import Columns, row_squares
from .functional import (
    LARGEST_POWER,
    LOG_RATIO_BOUND,
    MIN_MEAN_WEIGHT,
    Bound,
    Rejection,
    Tokens,
    above,
    below,
)
from .probabilities import collect_probabilities, probability_metrics
from .sums import Applied, Sums, divide, maximum, std


@dataclass(frozen=True)
class Statistics(Sums):
    """
    Sums that describe a batch with its weights and criteria. The vector, of shape `(len(sum_names) + BINS + len(max_names),)`,
    holds the sums, the histogram of the log-ratio, and the maxima.
    """

    bounding: Bounding | None = None
    criteria: tuple[Criterion, ...] = ()

    def fits(self, other: Self) -> bool:
        """True if both have the same layout, weights and criteria, with the same bounds."""
        return super().fits(other) and (self.bounding, self.criteria) == (other.bounding, other.criteria)

    def with_sum(self, name: str, value: torch.Tensor) -> Self:
        """Copy with another value of one sum, which is known only when the whole batch has been seen."""
        vector = self.vector.clone()
        vector[self.sum_names.index(name)] = value
        return replace(self, vector=vector)

    def histogram(self) -> tuple[list[float], tuple[float, ...]]:
        """`BINS` counts and `BINS + 1` edges, in nats, of the log-ratio over the valid tokens. Waits for the device."""
        start = len(self.sum_names)
        return self.vector[start : start + histogram.BINS].tolist(), histogram.bin_edges()

    def _metrics(self, s: dict[str, float], applied: Applied) -> dict[str, float]:
        """Metrics of the batch: NaN if it has no valid token, finite otherwise."""
        metrics = _policy_metrics(s, self.histogram()[0])
        if self.bounding is not None:
            metrics |= _weight_metrics(s, self.bounding)
        for criterion in self.criteria:
            metrics |= _criterion_metrics(s, criterion)
        if self.criteria:
            metrics["rollout_rs_masked_fraction"] = divide(s["rejected"], s["tokens"])
            metrics["rollout_rs_seq_masked_fraction"] = divide(s["rejected_rows"], s["rows"])
            metrics |= _gap_of_rejected(s)
        return metrics


class Weights(NamedTuple):
    """Importance weights of some rows. `ratio` and `bounded` are `(B, T)` at token and turn level, otherwise `(B, 1)`."""

    bounding: Bounding
    lower: Bound | None  # `None` for truncation; a tensor if the bounds depend on the sign of the advantage
    upper: Bound
    ratio: torch.Tensor  # before bounding, 0 on tokens that do not count
    bounded: torch.Tensor  # after bounding and before batch normalisation, 0 on tokens that do not count


def collect(
    tokens: Tokens,
    keep: torch.Tensor,
    coefficients: torch.Tensor,
    weights: Weights | None = None,
    rejections: Sequence[tuple[Criterion, Rejection]] = (),
    direction: torch.Tensor | None = None,
) -> Statistics:
    """
    Add up the statistics of some rows of a batch. No host synchronisation, no collective.

    Args:
        tokens ([`~trl_rollout_corr.correction.functional.Tokens`]):
            The tokens that count.
        keep (`torch.Tensor` of shape `(B, T)`):
            1 on tokens that count and that no criterion rejects, else 0.
        coefficients (`torch.Tensor` of shape `(B, T)`):
            Factor of the policy gradient of each token.
        weights ([`Weights`], *optional*):
            Importance weights, if there are any.
        rejections (`Sequence[tuple[Criterion, Rejection]]`, *optional*):
            Criteria and their results.
        direction (`torch.Tensor` of shape `(B, 1)` or `(B, T)`, *optional*):
            Sign of the advantages.
    """
    c = Columns(tokens)
    c.add("tokens", tokens.lengths)
    c.add("rows", c.rows)
    c.add("mask_tokens", tokens.mask_lengths)
    c.add("nonfinite", tokens.broken)
    c.add("coefficients", coefficients)
    _collect_policies(c, tokens, keep if rejections else None)
    if direction is not None:
        _collect_directions(c, tokens, direction)
    if weights is not None:
        _collect_weights(c, tokens, weights)
    for criterion, rejection in rejections:
        _collect_criterion(c, tokens, criterion, rejection)
    if rejections:
        rejected = tokens.lengths - keep.sum(-1, keepdim=True)
        c.add("rejected", rejected)
        c.add("rejected_rows", above(rejected, 0.0))
    sum_names, sums, max_names, maxima = c.joined()
    vector = torch.cat([sums, histogram.count(tokens).to(c.dtype), maxima])
    criteria = tuple(criterion for criterion, _ in rejections)
    return Statistics(sum_names, max_names, vector, None if weights is None else weights.bounding, criteria)


# The two policies -----------------------------------------------------------------------------------------------------


def _collect_policies(c: Columns, tokens: Tokens, keep: torch.Tensor | None) -> None:
    """Sums of both policies. `keep` is given if there are criteria."""
    d = tokens.log_ratio
    c.add("d", d)
    c.add("train_logps", tokens.train_logps)
    gap, train_nll = -c.row_mean("d"), -c.row_mean("train_logps")
    c.add("abs_gap", gap.abs())
    logs = torch.cat([train_nll, train_nll - gap, gap], -1)
    c.add_columns(("train_nll", "rollout_nll", "gap"), logs)
    c.add_columns(("train_ppl", "rollout_ppl", "ppl_ratio"), logs.clamp(max=LARGEST_POWER).exp_().mul_(c.rows))
    # k3 = r - 1 - d with r = exp(d). `expm1` keeps the digits of a small d
    bounded = d.clamp(max=LARGEST_POWER)
    excess = torch.expm1(bounded)
    gaps = excess - d
    c.add("k3", gaps)
    if keep is not None:
        c.add("kept/k3", gaps * keep)
    collect_probabilities(c, tokens, bounded, excess)
    # chi^2 = E[r^2] - 1 = E[(r - 1)^2 + 2 (r - 1)]: a sum of squares r^2 would lose a small divergence
    excess.clamp_(max=math.expm1(LOG_RATIO_BOUND))
    c.add("chi2_token", row_squares(excess).add_(excess.sum(-1, keepdim=True), alpha=2.0))
    # chi^2 of sequences = E[exp(2 sum d)] - 1, where gap = -mean d
    twice = (gap * c.lengths).mul_(-2.0)
    c.add("chi2_seq", torch.expm1(twice.clamp_(-2 * LOG_RATIO_BOUND, 2 * LOG_RATIO_BOUND)))
    c.add_extremes("gap", gap, c.no_rows)
    c.add_extremes("d", d, tokens.outside)


def _collect_directions(c: Columns, tokens: Tokens, direction: torch.Tensor) -> None:
    """Sums of the log-ratio over tokens of positive and of negative advantage."""
    positive, negative = direction.clamp(min=0.0), direction.clamp(max=0.0).neg_()
    for sign, chosen in (("positive", positive), ("negative", negative)):
        names = f"{sign}/d", f"{sign}/tokens"
        if direction.shape[-1] > 1:
            for name, x in zip(names, (tokens.log_ratio, tokens.valid), strict=True):
                c.add(name, x * chosen)
        else:
            c.add_columns(names, torch.cat([c.sums["d"], tokens.lengths], -1).mul_(chosen))


def _policy_metrics(s: dict[str, float], counts: list[float]) -> dict[str, float]:
    tokens, rows = s["tokens"], s["rows"]
    percentiles = histogram.percentiles(counts, -s["d_negated_min"], s["d_max"])
    return {
        "training_log_ppl": divide(s["train_nll"], rows),
        "training_ppl": divide(s["train_ppl"], rows),
        "rollout_log_ppl": divide(s["rollout_nll"], rows),
        "rollout_ppl": divide(s["rollout_ppl"], rows),
        "log_ppl_diff": divide(s["gap"], rows),
        "log_ppl_abs_diff": divide(s["abs_gap"], rows),
        "log_ppl_diff_max": maximum(s["gap_max"]),
        "log_ppl_diff_min": -maximum(s["gap_negated_min"]),
        "ppl_ratio": divide(s["ppl_ratio"], rows),
        "kl": -divide(s["d"], tokens),
        "k3_kl": divide(s["k3"], tokens),
        "chi2_token": divide(s["chi2_token"], tokens),
        "chi2_seq": divide(s["chi2_seq"], rows),
        **probability_metrics(s),
        "effective_lr": divide(s["coefficients"], tokens),
        "nonfinite_fraction": divide(s["nonfinite"], s["mask_tokens"]),
        **{
            f"kl_advantage_{sign}": -divide(s[f"{sign}/d"], s[f"{sign}/tokens"])
            for sign in ("positive", "negative")
            if s.get(f"{sign}/tokens")
        },
        **{f"log_ratio_p{percent}": value for percent, value in percentiles.items()},
        "log_ratio_min": -maximum(s["d_negated_min"]),
        "log_ratio_max": maximum(s["d_max"]),
    }


def _gap_of_rejected(s: dict[str, float]) -> dict[str, float]:
    """`k3_kl` of the tokens that criteria reject, and of the others; each only if there are such tokens."""
    rejected = max(s["k3"] - s["kept/k3"], 0.0), s["rejected"]  # not below 0 by rounding
    kept = s["kept/k3"], s["tokens"] - s["rejected"]
    parts = {"rejected/k3_kl": rejected, "kept/k3_kl": kept}
    return {key: total / tokens for key, (total, tokens) in parts.items() if tokens}


# Importance weights ---------------------------------------------------------------------------------------------------


def _collect_weights(c: Columns, tokens: Tokens, weights: Weights) -> None:
    bounding, lower, upper, ratio, bounded = weights
    lower = 1 / upper if lower is None else lower
    high, low = above(ratio, upper), below(ratio, lower)
    normed = bounded
    if bounding.unit != "seq":
        # sums of w - 1 rather than w: a variance of 1e-8 around a mean of 1 keeps its digits
        excess = bounded - tokens.valid
        c.add("is/sum", excess)
        c.add("is/ratio", ratio)
        c.add("is/squares", row_squares(excess))
        c.sums["is/units"] = tokens.lengths
        row_excess, row_ratio = c.row_mean("is/sum"), c.row_mean("is/ratio")
        low.mul_(tokens.valid)
        if bounding.drops:
            c.add("is/outside", high + low)
        if bounding.unit == "turn":  # a turn counts once per token, as a sequence does
            part = tokens.part_of_turn()
            c.add("is/units", part)
            high, low, normed = high * part, low * part, bounded * part
        if not bounding.grows:
            c.add_extremes("is/weight", ratio if bounding.unit == "turn" else bounded, tokens.outside)
    else:  # a sequence counts once per token
        row_excess, row_ratio = (bounded.to(c.dtype) - 1.0) * c.rows, ratio.to(c.dtype)
        low = low * c.rows
        if bounding.drops:
            c.add("is/outside", (high + low) * c.lengths)
        c.add("is/sum", row_excess * c.lengths)
        c.add("is/squares", row_excess.square() * c.lengths)
        c.sums["is/units"] = c.rows
        c.add_extremes("is/weight", row_ratio, c.no_rows)  # the ratio before bounding, as in verl
    c.add("is/high", high)
    c.add("is/low", low)
    c.add_rows("is", row_excess)
    c.add("is/row_high", above(row_ratio, _widest(upper, torch.amax)))
    c.add("is/row_low", below(row_ratio, _widest(lower, torch.amin)) * c.rows)
    c.add_extremes("is/row", row_excess + 1.0, c.no_rows)
    if bounding.normalized:
        c.add("is/norm_sum", normed)
        c.sums["is/norm_count"] = c.sums["is/units"]


def _widest(bound: Bound, extreme: Callable[..., torch.Tensor]) -> Bound:
    """The bound of a row that is furthest from 1, `(B, 1)`, if there is one per token."""
    return extreme(bound, -1, keepdim=True) if isinstance(bound, torch.Tensor) else bound


def _weight(bounding: Bounding, log_ratio: float) -> float:
    """`min(max(exp(d), lower), upper)`: weight of a token whose log-ratio is `d`, if [`Bounding.grows`]. NaN of NaN."""
    ratio = math.exp(min(log_ratio, LOG_RATIO_BOUND)) if math.isfinite(log_ratio) else math.nan
    return min(max(ratio, bounding.lower or 0.0), bounding.upper)


def _weight_metrics(s: dict[str, float], bounding: Bounding) -> dict[str, float]:
    n, rows = s["tokens"], s["rows"]
    # effective sample size over the number of tokens: (sum w)^2 / (n sum w^2), from sums of w - 1 and (w - 1)^2
    total, squares = n + s["is/sum"], n + 2 * s["is/sum"] + s["is/squares"]
    if bounding.grows:
        smallest, largest = (_weight(bounding, d) for d in (-maximum(s["d_negated_min"]), maximum(s["d_max"])))
    else:
        smallest, largest = -maximum(s["is/weight_negated_min"]), maximum(s["is/weight_max"])
    metrics = {
        "rollout_is_mean": divide(total, n),
        "rollout_is_max": largest,
        "rollout_is_min": smallest,
        "rollout_is_std": std(s["is/sum"], s["is/squares"], n),
        "rollout_is_eff_sample_size": total**2 / (n * squares) if n and squares > 0 else (0.0 if n else math.nan),
        "rollout_is_ratio_fraction_high": divide(s["is/high"], s["is/units"]),
        "rollout_is_ratio_fraction_low": divide(s["is/low"], s["is/units"]),
        "rollout_is_seq_mean": divide(rows + s["is/row_sum"], rows),
        "rollout_is_seq_std": std(s["is/row_sum"], s["is/row_squares"], rows, sample=True),
        "rollout_is_seq_max": maximum(s["is/row_max"]),
        "rollout_is_seq_min": -maximum(s["is/row_negated_min"]),
        "rollout_is_seq_max_deviation": maximum(s["is/deviation"]),
        "rollout_is_seq_fraction_high": divide(s["is/row_high"], rows),
        "rollout_is_seq_fraction_low": divide(s["is/row_low"], rows),
    }
    if bounding.drops:
        metrics["rollout_is_oob_ratio"] = divide(s["is/outside"], n)
    if bounding.normalized:
        mean = divide(s["is/norm_sum"], s["is/norm_count"])
        metrics["rollout_is_batch_norm_factor"] = 1.0 if mean <= MIN_MEAN_WEIGHT else mean
    return metrics


# Rejection criteria ---------------------------------------------------------------------------------------------------


def _collect_criterion(c: Columns, tokens: Tokens, criterion: Criterion, rejection: Rejection) -> None:
    name, statistic = f"rs/{criterion.name}", rejection.statistic
    floor = criterion.lower if criterion.signed else 0.0
    high, low = rejection.high, rejection.low
    if criterion.unit != "seq":
        if criterion.name == "token_k1":  # k1 = -d
            c.sums[f"{name}/sum"] = -c.sums["d"]
        else:
            c.add(f"{name}/sum", statistic)
        row, bounded = c.row_mean(f"{name}/sum"), statistic.clamp(floor, criterion.upper).mul_(tokens.valid)
        c.add(f"{name}/bounded", bounded)
        c.add(f"{name}/bounded_squares", bounded.square())
        c.sums[f"{name}/units"] = tokens.lengths
        if criterion.name == "token_k1":
            c.maxima[f"{name}/statistic_max"] = c.maxima["d_negated_min"]
            c.maxima[f"{name}/statistic_negated_min"] = c.maxima["d_max"]
        else:
            c.add_extremes(f"{name}/statistic", statistic, tokens.outside)
        row_high, row_low = above(row, criterion.upper) * c.rows, below(row, criterion.lower) * c.rows
        if criterion.unit == "turn":
            part = tokens.part_of_turn()
            c.add(f"{name}/units", part)
            row_high, row_low = high.amax(-1, keepdim=True), low.amax(-1, keepdim=True)
            high, low = high * part, low * part
        rejected = rejection.rejected.sum(-1, keepdim=True)
    else:  # a sequence counts once per token
        row = statistic.to(c.dtype) * c.rows
        bounded = row.clamp(floor, criterion.upper)
        c.add(f"{name}/sum", row * c.lengths)
        c.add(f"{name}/bounded", bounded * c.lengths)
        c.add(f"{name}/bounded_squares", bounded.square() * c.lengths)
        c.sums[f"{name}/units"] = c.rows
        c.add_extremes(f"{name}/statistic", row, c.no_rows)
        row_high, row_low, rejected = high, low, rejection.rejected * tokens.lengths
    c.add(f"{name}/high", high)
    c.add(f"{name}/low", low)
    c.add_rows(name, row)
    c.add(f"{name}/row_high", row_high)
    c.add(f"{name}/row_low", row_low)
    c.add(f"{name}/rejected", rejected)
    c.add(f"{name}/rejected_rows", above(rejected, 0.0))
    c.add_extremes(f"{name}/row", row, c.no_rows)
    if criterion.name == "seq_max_k1":  # its lower bound on the ratio is the veto of verl's first releases
        c.add(f"{name}/veto_tokens", below(tokens.log_ratio, -criterion.upper).mul_(tokens.valid))
        c.add(f"{name}/veto_rows", rejection.high)


def _criterion_metrics(s: dict[str, float], criterion: Criterion) -> dict[str, float]:
    def get(key: str) -> float:
        return s[f"rs/{criterion.name}/{key}"]

    tokens, rows = s["tokens"], s["rows"]
    metrics = {
        "mean": divide(get("sum"), tokens),
        "max": maximum(get("statistic_max")),
        "min": -maximum(get("statistic_negated_min")),
        "fraction_high": divide(get("high"), get("units")),
        "fraction_low": divide(get("low"), get("units")),
        "std": std(get("bounded"), get("bounded_squares"), tokens),
        "seq_mean": divide(get("row_sum"), rows),
        "seq_std": std(get("row_sum"), get("row_squares"), rows, sample=True),
        "seq_max": maximum(get("row_max")),
        "seq_min": -maximum(get("row_negated_min")),
        "seq_max_deviation": maximum(get("deviation")),
        "seq_fraction_high": divide(get("row_high"), rows),
        "masked_fraction": divide(get("rejected"), tokens),
        "seq_masked_fraction": divide(get("rejected_rows"), rows),
    }
    if criterion.signed:
        metrics["seq_fraction_low"] = divide(get("row_low"), rows)
    metrics = {f"rollout_rs_{criterion.name}_{key}": value for key, value in metrics.items()}
    if criterion.name == "seq_max_k1":
        metrics["rollout_is_catastrophic_token_fraction"] = divide(get("veto_tokens"), tokens)
        metrics["rollout_is_veto_fraction"] = divide(get("veto_rows"), rows)
    return metrics
