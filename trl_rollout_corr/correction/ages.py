"""
What age does to the data: metrics by age, how much of the gap to the sampler grows with it, and who was too old to be
trained on. Sums until they are logged, as in `metrics.py`. Torch only.

The age of a completion is the number of optimizer steps between the weights that sampled it and those that train.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from ..messages import PREFIX
from .accounting import add_up, bucket_of, edges_of
from .functional import LARGEST_POWER, LOG_RATIO_BOUND, accumulation_dtype, k3, row_blocks
from .sums import SegmentedSums


# Lower ends of the bins, in optimizer steps
AGES = (0, 1, 2, 4, 8, 16)
AGE_NAMES = ("0", "1", "2_3", "4_7", "8_15", "16_or_more")
_MEASURES = (
    "rows", "tokens", "d", "k3", "squares", "kept", "coefficients", "coefficient_squares", "scored", "reward",
)  # fmt: skip
_COMPLETIONS = ("rows", "tokens", "scored", "reward")


class Ages(SegmentedSums):
    """Sums over completions of each age, and what a line through the squared log-ratio against the age needs."""

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "bins": tuple(f"{name}/{measure}" for name in AGE_NAMES for measure in _MEASURES),
        "line": ("age", "age_squares", "squares", "age_times_squares", "tokens"),
    }

    def finish(self, *, rejects: bool, corrects: bool) -> dict[str, float]:
        """
        Turn the sums into named numbers. Waits for the device.

        Args:
            rejects (`bool`):
                Whether there is anything that rejects, so that the share of rejected tokens is reported.
            corrects (`bool`):
                Whether the loss is corrected, so that what is left of it is reported.

        Returns:
            `dict[str, float]`: metrics by key (`rollout_corr/...`), of the ages that have a token.
        """
        s = self.by_name()
        metrics = _line(s)
        for name in AGE_NAMES:
            if tokens := s[f"{name}/tokens"]:
                of_bin = {measure: s[f"{name}/{measure}"] for measure in _MEASURES}
                found = _bin_metrics(of_bin, rejects, corrects) | {"token_share": tokens / s["tokens"]}
                metrics |= {f"age_{name}/{key}": value for key, value in found.items()}
        return {PREFIX + key: value for key, value in metrics.items()}


def by_age(
    train_logps: torch.Tensor,
    rollout_logps: torch.Tensor,
    valid: torch.Tensor,
    keep: torch.Tensor,
    coefficients: torch.Tensor,
    rewards: torch.Tensor,
    ages: torch.Tensor,
) -> Ages:
    """
    Add up a batch by the age of its completions.

    Args:
        train_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the current policy, in nats.
        rollout_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the policy that sampled, in nats.
        valid (`torch.Tensor` of shape `(B, T)`):
            Boolean mask of the tokens that count. A log-ratio among them that is not finite is taken as 0.
        keep (`torch.Tensor` of shape `(B, T)`):
            Boolean mask of those that every criterion keeps.
        coefficients (`torch.Tensor` of shape `(B, T)`):
            What multiplies the policy gradient of each token.
        rewards (`torch.Tensor` of shape `(B,)`):
            Rewards; NaN for a completion that was not scored.
        ages (`torch.Tensor` of shape `(B,)`):
            Ages, in optimizer steps; NaN where unknown, which is then left out.

    Returns:
        [`Ages`]: the sums. No host synchronisation, no collective.
    """
    dtype = accumulation_dtype(valid.device)
    blocks = [
        _row_sums(train_logps[i], rollout_logps[i], valid[i], keep[i], coefficients[i]).to(dtype)
        for i in row_blocks(valid)
    ]
    tokens, *others = torch.cat(blocks).unbind(1)
    rewards, known = rewards.to(dtype), ages.isfinite() & (tokens > 0)
    scored = rewards.isfinite().to(dtype)
    rows = torch.stack([torch.ones_like(tokens), tokens, *others, scored, rewards.nan_to_num(0.0) * scored], 1)
    rows = rows * known[:, None]
    ages = ages.to(dtype).nan_to_num(0.0)
    tokens, squares = rows[:, _MEASURES.index("tokens")], rows[:, _MEASURES.index("squares")]
    line = [ages * tokens, ages.square() * tokens, squares, ages * squares, tokens]
    return Ages.of(
        {
            "bins": add_up(rows, bucket_of(ages, edges_of(AGES, ages.dtype, ages.device)), len(AGES)),
            "line": torch.stack([x.sum() for x in line]),
        }
    )


def _row_sums(
    train_logps: torch.Tensor,
    rollout_logps: torch.Tensor,
    valid: torch.Tensor,
    keep: torch.Tensor,
    coefficients: torch.Tensor,
) -> torch.Tensor:
    """`(B, 7)`: the measures of each row from `tokens` to `coefficient_squares`."""
    d = torch.where(valid, train_logps - rollout_logps, 0.0).nan_to_num_(0.0, 0.0, 0.0)
    squares = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).square_()
    measures = (valid, d, k3(d.clamp(max=LARGEST_POWER)), squares, keep, coefficients, coefficients.square())
    return torch.stack([measure.sum(1, dtype=d.dtype) for measure in measures], 1)


def _bin_metrics(s: Mapping[str, float], rejects: bool, corrects: bool) -> dict[str, float]:
    tokens = s["tokens"]
    metrics = {"kl": -s["d"] / tokens, "k3_kl": s["k3"] / tokens, "length_mean": tokens / s["rows"]}
    if s["scored"]:
        metrics["reward_mean"] = s["reward"] / s["scored"]
    if rejects:
        metrics["rejected"] = 1 - s["kept"] / tokens
    if corrects:
        squares = s["coefficient_squares"]
        metrics["effective_lr"] = s["coefficients"] / tokens
        metrics["eff_sample_size"] = s["coefficients"] ** 2 / (tokens * squares) if squares else 0.0
    return metrics


def _line(s: Mapping[str, float]) -> dict[str, float]:
    """The least-squares line through the squared log-ratio of the tokens against their age."""
    if not (tokens := s["tokens"]):
        return {}
    age, square = s["age"] / tokens, s["squares"] / tokens
    spread = s["age_squares"] / tokens - age**2
    if spread < 1e-9 * max(age, 1.0) ** 2:  # all of one age, through which no line can be drawn
        return {}
    slope = (s["age_times_squares"] / tokens - age * square) / spread
    return {
        "engine_k2_kl": (square - slope * age) / 2,
        "drift_k2_kl": slope * age / 2,
        "drift_k2_kl_per_step": slope / 2,
    }


class Intake(SegmentedSums):
    """Sums over the completions that are trained on, and over those that were too old for it."""

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        part: tuple(f"{part}/{name}" for name in _COMPLETIONS) for part in ("trained", "stale_dropped")
    }

    def finish(self) -> dict[str, float]:
        """
        Turn the sums into named numbers. Waits for the device.

        Returns:
            `dict[str, float]`: metrics by key (`rollout_corr/...`), of what there is.
        """
        s = self.by_name()
        dropped, trained = s["stale_dropped/rows"], s["trained/rows"]
        metrics = {"stale_dropped/fraction": dropped / (dropped + trained)} if dropped + trained else {}
        for part, rows in (("trained", trained), ("stale_dropped", dropped)):
            if rows:
                metrics[f"{part}/length_mean"] = s[f"{part}/tokens"] / rows
            if scored := s[f"{part}/scored"]:
                metrics[f"{part}/reward_mean"] = s[f"{part}/reward"] / scored
        return {PREFIX + key: value for key, value in metrics.items()}


def completions(lengths: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """
    Add up completions.

    Args:
        lengths (`torch.Tensor` of shape `(B,)`):
            Tokens of the loss. A completion without one does not count.
        rewards (`torch.Tensor` of shape `(B,)`):
            Rewards; NaN for a completion that was not scored.

    Returns:
        `torch.Tensor` of shape `(4,)`: a segment of [`Intake`].
    """
    dtype = accumulation_dtype(lengths.device)
    lengths, rewards = lengths.to(dtype), rewards.to(dtype)
    rows = (lengths > 0).to(dtype)
    scored = rewards.isfinite().to(dtype) * rows
    return torch.stack([x.sum() for x in (rows, lengths, scored, rewards.nan_to_num(0.0) * scored)])
