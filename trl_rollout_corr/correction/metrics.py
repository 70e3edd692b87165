"""
Metrics as sums on the device, which become numbers when they are logged. Torch only.

One float64 vector of sums, counts and maxima ([`Statistics`]) describes a batch. The host waits for the device in
[`Statistics.finish`] only. For each subject (the two policies, importance weights, rejection), the sums stand next to
the metrics computed from them.

Names inside a vector are internal. The metric keys, their formulas and healthy ranges are listed in `docs/metrics.md`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch

from ..settings.criteria import Bounding, Criterion
from .functional import (
    LARGEST_POWER,
    LOG_RATIO_BOUND,
    MIN_MEAN_WEIGHT,
    Bound,
    Rejection,
    Tokens,
    above,
    accumulation_dtype,
    below,
    excess,
)
from .sums import Applied, Sums, divide, maximum, std


@dataclass(frozen=True)
class Statistics(Sums):
    """
    Sums that describe a batch with its weights and criteria. The vector, of shape
    `(len(sum_names) + len(max_names),)`, holds the sums and the maxima.
    """

    bounding: Bounding | None = None
    criteria: tuple[Criterion, ...] = ()

    def fits(self, other: Self) -> bool:
        """True if both share the layout, the weights and the criteria, with the same bounds."""
        return super().fits(other) and (self.bounding, self.criteria) == (other.bounding, other.criteria)

    def with_sum(self, name: str, value: torch.Tensor) -> Self:
        """Copy with another value of one sum, which is known only after the whole batch."""
        vector = self.vector.clone()
        vector[self.sum_names.index(name)] = value
        return replace(self, vector=vector)

    def _metrics(self, s: dict[str, float], applied: Applied) -> dict[str, float]:
        """Metrics of the batch: NaN without a valid token, finite otherwise."""
        metrics = _policy_metrics(s)
        if self.bounding is not None:
            metrics |= _weight_metrics(s, self.bounding)
        for criterion in self.criteria:
            metrics |= _criterion_metrics(s, criterion)
        if self.criteria:
            metrics["rollout_rs_masked_fraction"] = divide(s["rejected"], s["tokens"])
        return metrics


class Collected:
    """Columns of a block of rows by name, `(B, 1)` each: summands, and candidates for maxima."""

    def __init__(self, tokens: Tokens) -> None:
        self.dtype = accumulation_dtype(tokens.valid.device)
        self.lengths = tokens.lengths.to(self.dtype)  # (B, 1)
        self.rows = above(self.lengths, 0.0)  # (B, 1), 1 for rows with a token that counts
        self.inf_where_empty = self.rows.reciprocal() - 1.0  # (B, 1), infinity for the other rows
        self.divisors = self.lengths.clamp(min=1)
        self.sums: dict[str, torch.Tensor] = {}
        self.maxima: dict[str, torch.Tensor] = {}

    def add(self, name: str, x: torch.Tensor) -> None:
        """Add up `x`, `(B, T)` or `(B, 1)`, which is 0 on tokens and rows that do not count."""
        self.sums[name] = x if x.shape[-1] == 1 else x.sum(-1, keepdim=True)

    def add_columns(self, names: Sequence[str], x: torch.Tensor) -> None:
        """Add up the columns of `x`, of shape `(B, len(names))`, each under its name."""
        self.sums |= zip(names, x.split(1, -1), strict=True)

    def add_extremes(self, name: str, x: torch.Tensor, inf_elsewhere: torch.Tensor) -> None:
        """Largest and (negated) smallest entry of `x` where `inf_elsewhere` is 0 and not infinity."""
        high, low = x - inf_elsewhere, x + inf_elsewhere
        if x.shape[-1] > 1:
            high, low = high.amax(-1, keepdim=True), low.amin(-1, keepdim=True)
        self.maxima[f"{name}_max"], self.maxima[f"{name}_negated_min"] = high, -low

    def joined(self) -> tuple[tuple[str, ...], torch.Tensor, tuple[str, ...], torch.Tensor]:
        """Names and values of the sums, and of the maxima."""
        sum_names, sums = self._joined(self.sums)
        max_names, maxima = self._joined(self.maxima)
        return sum_names, sums.sum(0), max_names, maxima.amax(0)

    def _joined(self, columns: dict[str, torch.Tensor]) -> tuple[tuple[str, ...], torch.Tensor]:
        """Names and columns, `(B, N)`, narrower types first, to convert them in one operation."""
        narrow = [name for name, column in columns.items() if column.dtype != self.dtype]
        wide = [name for name in columns if name not in narrow]
        joined = [torch.cat([columns[name] for name in names], 1).to(self.dtype) for names in (narrow, wide) if names]
        return (*narrow, *wide), torch.cat(joined, 1)


def row_squares(x: torch.Tensor) -> torch.Tensor:
    """`(B, 1)`: squares added up over each row, without storing the squares."""
    norms: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norms.square_()


class Weights(NamedTuple):
    """Importance weights of some rows: `(B, T)` at token and turn level, otherwise `(B, 1)`."""

    bounding: Bounding
    lower: Bound | None  # `None` for truncation; a tensor if the bounds depend on the sign of the advantage
    upper: Bound
    ratio: torch.Tensor  # before bounding, 0 on tokens that do not count
    bounded: torch.Tensor  # after bounding and before batch normalisation, 0 on tokens that do not count


def collect(
    tokens: Tokens,
    keep: torch.Tensor,  # (B, T), 1 on tokens that count and that no criterion rejects, else 0
    coefficients: torch.Tensor,  # (B, T), factors of the policy gradient
    weights: Weights | None = None,
    rejections: Sequence[tuple[Criterion, Rejection]] = (),
    direction: torch.Tensor | None = None,  # (B, 1) or (B, T), the advantages
) -> Statistics:
    """Add up the statistics of some rows of a batch. No host synchronisation, no collective."""
    c = Collected(tokens)
    c.add("tokens", tokens.lengths)
    c.add("rows", c.rows)
    c.add("mask_tokens", tokens.mask_lengths)
    c.add("nonfinite", tokens.broken)
    c.add("coefficients", coefficients)
    _collect_policies(c, tokens)
    if direction is not None:
        _collect_directions(c, tokens, direction)
    if weights is not None:
        _collect_weights(c, tokens, weights)
    for criterion, rejection in rejections:
        _collect_criterion(c, tokens, criterion, rejection)
    if rejections:
        c.add("rejected", tokens.lengths - keep.sum(-1, keepdim=True))
    sum_names, sums, max_names, maxima = c.joined()
    vector = torch.cat([sums, maxima])
    criteria = tuple(criterion for criterion, _ in rejections)
    return Statistics(sum_names, max_names, vector, None if weights is None else weights.bounding, criteria)


# The two policies ----------------------------------------------------------------------------------------------------


def _collect_policies(c: Collected, tokens: Tokens) -> None:
    """Sums of both policies."""
    d = tokens.log_ratio
    c.add("d", d)
    c.add("equal", tokens.valid * (d == 0))
    c.add("train", tokens.train_logps)
    gap, train_nll = -c.sums["d"] / c.divisors, -c.sums["train"] / c.divisors
    c.add("gap", gap)
    logs = torch.cat([train_nll, train_nll - gap, gap], -1).clamp_(max=LARGEST_POWER)
    c.add_columns(("train_ppl", "rollout_ppl", "ppl_ratio"), logs.exp_().mul_(c.rows))
    above_one = excess(d)
    c.add("k3", above_one - d)  # as in `k3`
    # chi^2 = E[r^2] - 1 = E[(r - 1)^2 + 2 (r - 1)]: a sum of squares r^2 would lose a small divergence
    above_one.clamp_(max=math.expm1(LOG_RATIO_BOUND))
    c.add("excess", above_one)
    c.add("chi2_token", row_squares(above_one).add_(above_one.sum(-1, keepdim=True), alpha=2.0))
    # chi^2 of sequences = E[exp(2 sum d)] - 1, where gap = -mean d
    twice = (gap * c.lengths).mul_(-2.0)
    c.add("chi2_seq", torch.expm1(twice.clamp_(-2 * LOG_RATIO_BOUND, 2 * LOG_RATIO_BOUND)))
    c.add_extremes("d", d, tokens.inf_where_invalid)


def _collect_directions(c: Collected, tokens: Tokens, direction: torch.Tensor) -> None:
    """Sums of the log-ratio and of `(r - 1) A` over tokens of positive and of negative advantage `A`."""
    for sign, chosen in (("positive", above(direction, 0.0)), ("negative", below(direction, 0.0))):
        names = f"{sign}/d", f"{sign}/tokens", f"{sign}/gain"
        if direction.shape[-1] > 1:
            above_one = torch.expm1(tokens.log_ratio.clamp(max=LOG_RATIO_BOUND))
            for name, x in zip(names, (tokens.log_ratio, tokens.valid, above_one.mul_(direction)), strict=True):
                c.add(name, x * chosen)
        else:
            columns = [c.sums["d"], tokens.lengths, c.sums["excess"] * direction]
            c.add_columns(names, torch.cat(columns, -1).mul_(chosen))


def _policy_metrics(s: dict[str, float]) -> dict[str, float]:
    tokens, rows = s["tokens"], s["rows"]
    smallest, largest = -maximum(s["d_negated_min"]), maximum(s["d_max"])
    return {
        "k3_kl": divide(s["k3"], tokens),
        "kl": -divide(s["d"], tokens),
        **{
            name: value
            for sign in ("positive", "negative")
            if (n := s.get(f"{sign}/tokens"))
            for name, value in (
                (f"kl_advantage_{sign}", -divide(s[f"{sign}/d"], n)),
                (f"gain_advantage_{sign}", divide(s[f"{sign}/gain"], n)),
            )
        },
        "chi2_token": divide(s["chi2_token"], tokens),
        "chi2_seq": divide(s["chi2_seq"], rows),
        "log_ratio_min": smallest,
        "log_ratio_max": largest,
        "surprise": -divide(s["train"], tokens),
        "training_ppl": divide(s["train_ppl"], rows),
        "rollout_ppl": divide(s["rollout_ppl"], rows),
        "ppl_ratio": divide(s["ppl_ratio"], rows),
        "log_ppl_diff": divide(s["gap"], rows),
        "nonfinite_fraction": divide(s["nonfinite"], s["mask_tokens"]),
        "bit_equal": divide(s["equal"], tokens),
        "effective_lr": divide(s["coefficients"], tokens),
    }


# Importance weights --------------------------------------------------------------------------------------------------


def _collect_weights(c: Collected, tokens: Tokens, weights: Weights) -> None:
    bounding, lower, upper, ratio, bounded = weights
    lower = 1 / upper if lower is None else lower
    high, low = above(ratio, upper), below(ratio, lower)
    normed = bounded
    if bounding.unit != "seq":
        # sums of w - 1 rather than w: a variance of 1e-8 around a mean of 1 keeps its digits
        above_one = bounded - tokens.valid
        c.add("is/sum", above_one)
        c.add("is/squares", row_squares(above_one))
        c.sums["is/units"] = tokens.lengths
        low.mul_(tokens.valid)
        if bounding.drops:
            c.add("is/outside", high + low)
        if bounding.unit == "turn":  # a turn counts once per token, as a sequence does
            part = tokens.part_of_turn()
            c.add("is/units", part)
            high, low, normed = high * part, low * part, bounded * part
        if not bounding.is_monotone:
            c.add_extremes("is/weight", ratio if bounding.unit == "turn" else bounded, tokens.inf_where_invalid)
    else:  # a sequence counts once per token
        above_one, low = (bounded.to(c.dtype) - 1.0) * c.rows, low * c.rows
        if bounding.drops:
            c.add("is/outside", (high + low) * c.lengths)
        c.add("is/sum", above_one * c.lengths)
        c.add("is/squares", above_one.square() * c.lengths)
        c.sums["is/units"] = c.rows
        c.add_extremes("is/weight", ratio.to(c.dtype), c.inf_where_empty)  # the ratio before bounding, as in verl
    c.add("is/high", high)
    c.add("is/low", low)
    if bounding.normalized:
        c.add("is/norm_sum", normed)
        c.sums["is/norm_count"] = c.sums["is/units"]


def _weight(bounding: Bounding, log_ratio: float) -> float:
    """`min(max(exp(d), lower), upper)`: weight of a token with log-ratio `d`; NaN stays NaN."""
    ratio = math.exp(min(log_ratio, LOG_RATIO_BOUND)) if math.isfinite(log_ratio) else math.nan
    return min(max(ratio, bounding.lower or 0.0), bounding.upper)


def _weight_metrics(s: dict[str, float], bounding: Bounding) -> dict[str, float]:
    n = s["tokens"]
    # effective sample size over the number of tokens: (sum w)^2 / (n sum w^2), from sums of w - 1 and (w - 1)^2
    total, squares = n + s["is/sum"], n + 2 * s["is/sum"] + s["is/squares"]
    if bounding.is_monotone:
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
    }
    if bounding.drops:
        metrics["rollout_is_oob_ratio"] = divide(s["is/outside"], n)
    if bounding.normalized:
        mean = divide(s["is/norm_sum"], s["is/norm_count"])
        metrics["rollout_is_batch_norm_factor"] = 1.0 if mean <= MIN_MEAN_WEIGHT else mean
    return metrics


# Rejection criteria --------------------------------------------------------------------------------------------------


def _collect_criterion(c: Collected, tokens: Tokens, criterion: Criterion, rejection: Rejection) -> None:
    name, statistic = f"rs/{criterion.name}", rejection.statistic
    if criterion.name == "token_k1":  # k1 = -d
        c.sums[f"{name}/sum"] = -c.sums["d"]
    elif criterion.unit != "seq":
        c.add(f"{name}/sum", statistic)
    else:  # a sequence counts once per token
        c.add(f"{name}/sum", statistic.to(c.dtype) * c.rows * c.lengths)
    rejected = rejection.rejected
    c.add(f"{name}/rejected", rejected * tokens.lengths if criterion.unit == "seq" else rejected)
    if criterion.name == "seq_max_k1":  # its lower bound on the ratio is the veto of verl's first releases
        c.add(f"{name}/veto_tokens", below(tokens.log_ratio, -criterion.upper).mul_(tokens.valid))
        c.add(f"{name}/veto_rows", rejection.high)


def _criterion_metrics(s: dict[str, float], criterion: Criterion) -> dict[str, float]:
    name, tokens = f"rs/{criterion.name}", s["tokens"]
    metrics = {
        f"rollout_rs_{criterion.name}_mean": divide(s[f"{name}/sum"], tokens),
        f"rollout_rs_{criterion.name}_masked_fraction": divide(s[f"{name}/rejected"], tokens),
    }
    if criterion.name == "seq_max_k1":
        metrics["rollout_is_catastrophic_token_fraction"] = divide(s[f"{name}/veto_tokens"], tokens)
        metrics["rollout_is_veto_fraction"] = divide(s[f"{name}/veto_rows"], s["rows"])
    return metrics
