"""
How old the data is: optimizer steps between the weights that sampled and those that train, and what part of the gap to the
sampler they explain. Sums until they are logged, as in `metrics.py`. Torch only.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from ..messages import PREFIX
from .functional import LARGEST_POWER, accumulation_dtype, k3, select_tokens
from .metrics import Statistics
from .sums import SegmentedSums, Segments


_DRIFT = ("tokens", "d", "k3")


class Staleness(SegmentedSums):
    """Sums about the age of the data, of those parts of a run that know it."""

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "engine": tuple(f"engine/{name}" for name in _DRIFT),
        "update": tuple(f"update/{name}" for name in _DRIFT),
        "age": ("age/rows", "age/sum"),
        "lag": ("lag/rows", "lag/sum"),
    }
    MAXIMA: ClassVar[tuple[str, ...]] = ("age/largest",)

    def finish(self) -> dict[str, float]:
        """
        Turn the sums into named numbers. Waits for the device.

        Returns:
            `dict[str, float]`: metrics by key (`rollout_corr/...`), of what is known.
        """
        s = self.by_name()
        metrics = {}
        for part in ("engine", "update"):
            if tokens := s[f"{part}/tokens"]:
                metrics[f"{part}_kl"] = -s[f"{part}/d"] / tokens
                metrics[f"{part}_k3_kl"] = s[f"{part}/k3"] / tokens
        if rows := s["age/rows"]:
            metrics["staleness_mean"] = s["age/sum"] / rows
            metrics["staleness_max"] = s["age/largest"]
        if rows := s["lag/rows"]:
            metrics["sampler_lag"] = s["lag/sum"] / rows
        return {PREFIX + key: value for key, value in metrics.items()}


def engine_drift(statistics: Statistics) -> Segments:
    """
    Count the divergence of a batch as that of the old policy from the sampler.

    Args:
        statistics ([`~trl_rollout_corr.correction.metrics.Statistics`]):
            Statistics of the batch, whose training policy is the old one.

    Returns:
        `dict[str, torch.Tensor]`: sums for [`Staleness.of`].
    """
    return {"engine": torch.stack([statistics[name] for name in _DRIFT])}


def update_drift(old_logps: torch.Tensor, current_logps: torch.Tensor, mask: torch.Tensor) -> Segments:
    """
    Add up the divergence of the current policy from the old one, which is due to the updates between the two.

    Args:
        old_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities when the batch was generated, in nats.
        current_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities now, in nats.
        mask (`torch.Tensor` of shape `(B, T)`):
            Non-zero on the tokens of the loss.

    Returns:
        `dict[str, torch.Tensor]`: sums for [`Staleness.of`].
    """
    tokens = select_tokens(current_logps, old_logps, mask)
    d = tokens.log_ratio
    dtype = accumulation_dtype(d.device)
    divergence = k3(d.clamp(max=LARGEST_POWER))
    return {"update": torch.stack([x.sum(dtype=dtype) for x in (tokens.lengths, d, divergence)])}


def age(steps: torch.Tensor) -> Segments:
    """
    Add up the ages of completions that are trained on.

    Args:
        steps (`torch.Tensor` of shape `(B,)`):
            Optimizer steps between the weights that sampled and those that train; NaN where that is not known.

    Returns:
        `dict[str, torch.Tensor]`: sums for [`Staleness.of`].
    """
    steps = steps.to(accumulation_dtype(steps.device))
    known = steps.isfinite()
    number_and_sum = torch.stack([known.sum(dtype=steps.dtype), steps.nan_to_num(0.0).sum()])
    return {"age": number_and_sum, "age/largest": steps.masked_fill(~known, -torch.inf).max()}


def lag(steps: torch.Tensor) -> Segments:
    """
    Add up how far the sampler was behind the trainer when it sampled.

    Args:
        steps (`torch.Tensor` of shape `(B,)`):
            Optimizer steps between the weights that sampled and those the trainer had at that time.

    Returns:
        `dict[str, torch.Tensor]`: sums for [`Staleness.of`].
    """
    return {"lag": _number_and_sum(steps.to(accumulation_dtype(steps.device)))}


def _number_and_sum(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.ones_like(x).sum(), x.sum()])
