"""
Age of the data, and the part of the gap to the sampler that updates of the policy explain. All values stay sums until
they are logged, as in `metrics.py`. Torch only.

The age of a token is the number of optimizer steps between the weights that sampled it and the weights that train on
it. The age of a completion is the age of its oldest token. In the metrics of a whole batch it is called staleness.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from .functional import accumulation_dtype, k3, select_tokens
from .metrics import Statistics
from .sums import Applied, SegmentedSums, Segments


_GAP = ("tokens", "d", "k3")


class Staleness(SegmentedSums):
    """
    Sums of ages, of the two parts of the gap to the sampler, and the completions that the asynchronous trainer trained
    on or dropped as too old. An unknown segment stays 0.
    """

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "engine": tuple(f"engine/{name}" for name in _GAP),
        "update": ("update/tokens", "update/k3"),
        "age": ("age/rows", "age/sum"),
        "weights": ("weights/rows", "weights/older", "weights/known"),
        "completions": ("trained", "stale_dropped"),
    }
    MAXIMA: ClassVar[tuple[str, ...]] = ("age/largest", "lag/largest")

    def _metrics(self, s: dict[str, float], applied: Applied) -> dict[str, float]:
        metrics = {}
        if tokens := s["engine/tokens"]:
            metrics["engine_kl"] = -s["engine/d"] / tokens
            metrics["engine_k3_kl"] = s["engine/k3"] / tokens
        if tokens := s["update/tokens"]:
            metrics["update_k3_kl"] = s["update/k3"] / tokens
        if rows := s["age/rows"]:
            metrics["staleness_mean"] = s["age/sum"] / rows
            metrics["staleness_max"] = s["age/largest"]
        if s["weights/known"]:
            metrics["stale_fraction"] = s["weights/older"] / s["weights/rows"]
            if s["lag/largest"] > 0:
                metrics["lag_max"] = s["lag/largest"]
        if rows := s["trained"] + s["stale_dropped"]:
            metrics["stale_dropped/fraction"] = s["stale_dropped"] / rows
        return metrics


def engine_gap(statistics: Statistics) -> Segments:
    """
    Gap of the old policy to the sampler, for [`Staleness.of`]. Both hold the same weights, so the gap comes from the
    two engines. The training policy of `statistics` is the old policy.
    """
    return {"engine": torch.stack([statistics[name] for name in _GAP])}


def update_gap(old_logps: torch.Tensor, current_logps: torch.Tensor, mask: torch.Tensor) -> Segments:
    """
    Gap of the current policy to the old policy, for [`Staleness.of`]. It comes from the optimizer steps between the
    two. Log-probabilities, in nats, and the mask are of shape `(B, T)`.
    """
    tokens = select_tokens(current_logps, old_logps, mask)
    # d = log pi_current - log pi_old, with the KL estimate k3 = exp(d) - 1 - d
    gaps = k3(tokens.log_ratio)
    dtype = accumulation_dtype(gaps.device)
    return {"update": torch.stack([x.sum(dtype=dtype) for x in (tokens.lengths, gaps)])}


def count_ages(ages: torch.Tensor) -> Segments:
    """Number, sum and maximum of ages, `(B,)` in optimizer steps or NaN, for [`Staleness.of`]."""
    ages = ages.to(accumulation_dtype(ages.device))
    number_and_sum = torch.stack([ages.isfinite().sum(dtype=ages.dtype), ages.nan_to_num(0.0).sum()])
    return {"age": number_and_sum, "age/largest": ages.masked_fill(~ages.isfinite(), -torch.inf).max()}


def count_lags(lags: torch.Tensor | None, mask: torch.Tensor) -> Segments:
    """
    Number of completions with a token in the mask, `(B, T)`, of those of them with a lag other than 0, and of those
    whose lag may be known, and the largest lag, for [`Staleness.of`]. Lags, `(B,)` in optimizer steps or NaN, are
    between the weights that sampled and those of the ratio; without them, all completions count as older.
    """
    dtype = accumulation_dtype(mask.device)
    rows = (mask != 0).any(1)
    known = rows if lags is not None else torch.zeros_like(rows)
    lags = torch.full(rows.shape, torch.nan, device=mask.device) if lags is None else lags
    counts = torch.stack([rows, rows & (lags != 0), known])
    largest = lags.to(dtype).masked_fill(~rows | ~lags.isfinite(), -torch.inf).max()
    return {"weights": counts.sum(1, dtype=dtype), "lag/largest": largest}


def count_completions(mask: torch.Tensor, n_dropped: int) -> Segments:
    """
    Number of completions with a token in the mask, `(B, T)`, which are trained on, and number of completions dropped
    as too old, for [`Staleness.of`].
    """
    trained = (mask != 0).any(1).sum(dtype=accumulation_dtype(mask.device))
    return {"completions": torch.stack([trained, torch.full_like(trained, n_dropped)])}
