"""
Age of the data: metrics by age, and the part of the gap to the sampler that updates of the policy explain. Sums until they
are logged, as in `metrics.py`. Torch only.

The age of a token is the number of optimizer steps between the weights that sampled it and the weights that train on it. The
age of a completion is the age of its oldest token. In the metrics of a whole batch it is called staleness.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from .accounting import add_up, bucket_of
from .functional import LARGEST_POWER, accumulation_dtype, k3, select_tokens
from .metrics import Statistics
from .sums import Applied, SegmentedSums, Segments


# Age in every trainer -------------------------------------------------------------------------------------------------


_GAP = ("tokens", "d", "k3")


class Staleness(SegmentedSums):
    """Sums of ages, and of the two parts of the gap to the sampler. A segment that is unknown stays 0."""

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "engine": tuple(f"engine/{name}" for name in _GAP),
        "update": tuple(f"update/{name}" for name in _GAP),
        "age": ("age/rows", "age/sum"),
    }
    MAXIMA: ClassVar[tuple[str, ...]] = ("age/largest",)

    def _metrics(self, s: dict[str, float], applied: Applied) -> dict[str, float]:
        metrics = {}
        for part in ("engine", "update"):
            if tokens := s[f"{part}/tokens"]:
                metrics[f"{part}_kl"] = -s[f"{part}/d"] / tokens
                metrics[f"{part}_k3_kl"] = s[f"{part}/k3"] / tokens
        if rows := s["age/rows"]:
            metrics["staleness_mean"] = s["age/sum"] / rows
            metrics["staleness_max"] = s["age/largest"]
        return metrics


def engine_gap(statistics: Statistics) -> Segments:
    """
    Gap of the old policy to the sampler, which has the same weights: it is due to the two engines. For [`Staleness.of`]. The
    training policy of `statistics` is the old policy.
    """
    return {"engine": torch.stack([statistics[name] for name in _GAP])}


def update_gap(old_logps: torch.Tensor, current_logps: torch.Tensor, mask: torch.Tensor) -> Segments:
    """
    Gap of the current policy to the old policy, which is due to the optimizer steps between the two. For [`Staleness.of`].
    Log-probabilities, in nats, and mask are of shape `(B, T)`.
    """
    tokens = select_tokens(current_logps, old_logps, mask)
    # d = log pi_current - log pi_old, with KL estimates -d and k3 = exp(d) - 1 - d
    d = tokens.log_ratio
    dtype = accumulation_dtype(d.device)
    return {"update": torch.stack([x.sum(dtype=dtype) for x in (tokens.lengths, d, k3(d.clamp(max=LARGEST_POWER)))])}


def count_ages(ages: torch.Tensor) -> Segments:
    """Number, sum and maximum of the ages of completions, `(B,)` in optimizer steps, NaN if unknown. For [`Staleness.of`]."""
    ages = ages.to(accumulation_dtype(ages.device))
    number_and_sum = torch.stack([ages.isfinite().sum(dtype=ages.dtype), ages.nan_to_num(0.0).sum()])
    return {"age": number_and_sum, "age/largest": ages.masked_fill(~ages.isfinite(), -torch.inf).max()}


# Metrics by age, of the asynchronous trainer --------------------------------------------------------------------------


# Smallest age of each bin, in optimizer steps
AGES = (0, 1, 2, 4, 8, 16)
AGE_NAMES = ("0", "1", "2_3", "4_7", "8_15", "16_or_more")
_MEASURES = ("tokens", "k3", "kept")
_COMPLETIONS = ("rows", "tokens", "scored", "reward")


class ByAge(SegmentedSums):
    """
    Sums over the tokens of each age, and over the completions that were trained on and those that were dropped as too old.
    """

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "bins": tuple(f"{name}/{measure}" for name in AGE_NAMES for measure in _MEASURES),
        **{part: tuple(f"{part}/{name}" for name in _COMPLETIONS) for part in ("trained", "stale_dropped")},
    }

    def _metrics(self, s: dict[str, float], applied: Applied) -> dict[str, float]:
        metrics = _completion_metrics(s)
        total = sum(s[f"{name}/tokens"] for name in AGE_NAMES)
        for name in AGE_NAMES:
            if tokens := s[f"{name}/tokens"]:
                metrics[f"age_{name}/token_share"] = tokens / total
                metrics[f"age_{name}/k3_kl"] = s[f"{name}/k3"] / tokens
                if applied.rejects:
                    metrics[f"age_{name}/rejected"] = 1 - s[f"{name}/kept"] / tokens
        return metrics


def by_age(
    train_logps: torch.Tensor,
    rollout_logps: torch.Tensor,
    valid: torch.Tensor,
    keep: torch.Tensor,
    ages: torch.Tensor,
) -> Segments:
    """
    Add up a batch by the age of its tokens. For [`ByAge.of`]. No host synchronisation, no collective.

    Args:
        train_logps, rollout_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the current policy and of the policy that sampled, in nats.
        valid (`torch.Tensor` of shape `(B, T)`):
            Boolean mask of the tokens that count. A log-ratio among them that is not finite is taken as 0.
        keep (`torch.Tensor` of shape `(B, T)`):
            Boolean mask of the tokens that no criterion rejects.
        ages (`torch.Tensor` of shape `(B,)` or `(B, T)`):
            Ages of completions or of tokens, in optimizer steps. Tokens of unknown age, NaN, are left out.
    """
    ages = (ages if ages.dim() == 2 else ages.unsqueeze(1)).expand_as(valid)
    counted = valid & ages.isfinite()
    # d = log pi_train - log pi_rollout; 0 for tokens that do not count and where it is not finite
    d = torch.where(counted, train_logps - rollout_logps, 0.0).nan_to_num_(0.0, 0.0, 0.0)
    measures = torch.stack([counted, k3(d.clamp(max=LARGEST_POWER)), keep & counted], -1)  # as in `_MEASURES`
    bucket = bucket_of(ages.nan_to_num(0.0), AGES)
    return {"bins": add_up(measures.to(accumulation_dtype(d.device)).flatten(0, 1), bucket.flatten(), len(AGES))}


def count_completions(lengths: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """
    Segment `trained` or `stale_dropped` of [`ByAge`], `(4,)`, from the tokens of the loss, `(B,)`, and the rewards, `(B,)`. A
    completion without a token does not count; the reward of one that was not scored is NaN.
    """
    dtype = accumulation_dtype(lengths.device)
    lengths, rewards = lengths.to(dtype), rewards.to(dtype)
    rows = (lengths > 0).to(dtype)
    scored = rewards.isfinite().to(dtype) * rows
    return torch.stack([x.sum() for x in (rows, lengths, scored, rewards.nan_to_num(0.0) * scored)])


def _completion_metrics(s: Mapping[str, float]) -> dict[str, float]:
    dropped, trained = s["stale_dropped/rows"], s["trained/rows"]
    metrics = {"stale_dropped/fraction": dropped / (dropped + trained)} if dropped + trained else {}
    return metrics | _means(s, "trained", "trained") | _means(s, "stale_dropped", "stale_dropped")


def _means(s: Mapping[str, float], part: str, name: str) -> dict[str, float]:
    """Mean length and reward of completions."""
    rows, scored = s[f"{part}/rows"], s[f"{part}/scored"]
    metrics = {f"{name}/length_mean": s[f"{part}/tokens"] / rows} if rows else {}
    return metrics | ({f"{name}/reward_mean": s[f"{part}/reward"] / scored} if scored else {})
