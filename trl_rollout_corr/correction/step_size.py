"""
Factor of the learning rate from the effective sample size of whole completions. Sums until they are logged, as in
`metrics.py`. Torch only.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from .functional import LOG_RATIO_BOUND, accumulation_dtype, select_tokens
from .sums import Applied, SegmentedSums


class StepSize(SegmentedSums):
    """Factors of the learning rate, summed over optimizer steps."""

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {"scale": ("steps", "lr_scale")}

    def _metrics(self, s: dict[str, float], applied: Applied) -> dict[str, float]:
        return {"lr_scale": s["lr_scale"] / s["steps"]}


def ratio_sums(
    train_logps: torch.Tensor, rollout_logps: torch.Tensor, mask: torch.Tensor, *, neutralize: bool = False
) -> torch.Tensor:
    """
    Add up what [`ess_sqrt`] needs of some completions. The sums of two micro-batches, or of two ranks, add up.

    Args:
        train_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the sampled tokens under the policy that trains, in nats.
        rollout_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the same tokens under the policy that sampled them, in nats.
        mask (`torch.Tensor` of shape `(B, T)`):
            Non-zero on the tokens of the loss.
        neutralize (`bool`, *optional*, defaults to `False`):
            Take a ratio as 1 where the sampler's log-probability is not finite, instead of leaving the token out.

    Returns:
        `torch.Tensor` of shape `(3,)`: number of completions with a token that counts, sum of their ratios
        `w = exp(sum d)` and sum of the squares. No host synchronisation, no collective.
    """
    tokens = select_tokens(train_logps, rollout_logps, mask, neutralize=neutralize)
    dtype = accumulation_dtype(mask.device)
    counts = (tokens.lengths > 0).to(dtype)
    # not raised at exp(-20): completions that are all unlikely still differ. Squares of exp(-40) fit in float32
    log_ratio = tokens.log_ratio.sum(-1, keepdim=True, dtype=dtype).clamp(-2 * LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp() * counts
    return torch.stack([counts.sum(), ratio.sum(), ratio.square().sum()])


def ess_sqrt(sums: torch.Tensor) -> torch.Tensor:
    r"""
    Factor of the learning rate from the effective sample size of whole completions:
    `sqrt(ESS / B)` with `ESS = (sum w)^2 / sum w^2` ([VCPO](https://huggingface.co/papers/2602.17616)).

    The variance of a mean of weighted samples is that of `ESS` equal ones, and the learning rate of an adaptive optimizer
    is commonly scaled by the square root of the number of samples.

    Args:
        sums (`torch.Tensor` of shape `(3,)`):
            Sums of [`ratio_sums`] over all completions of a step.

    Returns:
        `torch.Tensor` of shape `()`: between `sqrt(1 / B)` and 1, and 1 if there is no completion.
    """
    count, total, squares = sums
    share = total.square() / (count * squares)
    return torch.where(count > 0, share, 1.0).clamp(max=1.0).sqrt()
