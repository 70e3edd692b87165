"""
Factor of the learning rate from the effective sample size of whole completions. Sums until they are logged, as in
`metrics.py`. Torch only.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from .functional import LOG_RATIO_BOUND, accumulation_dtype
from .sums import Applied, SegmentedSums


class StepSize(SegmentedSums):
    """Factors of the learning rate, summed over optimizer steps."""

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {"scale": ("steps", "lr_scale")}

    def _metrics(self, s: dict[str, float], applied: Applied) -> dict[str, float]:
        return {"lr_scale": s["lr_scale"] / s["steps"]}


def ratio_sums(log_ratio: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """
    Sums for [`ess_sqrt`] over some completions. The sums of two micro-batches, or of two ranks, add up.

    Args:
        log_ratio (`torch.Tensor` of shape `(B, T)`):
            Log-ratio of the current policy to the sampler, in nats, 0 outside the valid tokens.
        valid (`torch.Tensor` of shape `(B, T)`):
            Non-zero on the tokens of the loss whose log-ratio is finite.

    Returns:
        `torch.Tensor` of shape `(3,)`: number of completions with a valid token, sum of their ratios `w = exp(sum d)` and sum
        of the squares. No host synchronisation, no collective.
    """
    dtype = accumulation_dtype(valid.device)
    counts = valid.any(-1, keepdim=True).to(dtype)
    # w = exp(sum d) within [exp(-40), exp(20)]: a bound of exp(-20) would make all unlikely completions equal, and squares of
    # exp(-40) fit in float32
    total = log_ratio.sum(-1, keepdim=True, dtype=dtype).clamp(-2 * LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = total.exp() * counts
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
