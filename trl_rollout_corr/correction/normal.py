"""Expected shares under independent, normal log-ratios."""

import math

import torch


def normal_cdf(distance: torch.Tensor | float, spread: torch.Tensor) -> torch.Tensor:
    """Probability that a normal variable is at most `distance` above its mean. Its standard deviation `spread` may be 0."""
    probability: torch.Tensor = torch.special.ndtr(distance / spread.clamp(min=1e-300))
    return probability


def expected_share_outside(s: float, lengths: torch.Tensor, lower: float, upper: float) -> torch.Tensor:
    """
    Share of completions of `lengths` tokens whose geometric mean of the ratio is outside `[lower, upper]`. `s` is the root
    mean square of the log-ratio, in nats.

    Log-ratios are taken as independent and normal, with variance `s^2` and the mean at which a ratio has mean 1:

        mean of T log-ratios ~ N(-s^2 / 2, s^2 / T)
    """
    center, spread = -s * s / 2, s / lengths.sqrt()
    low = -math.inf if lower == 0 else math.log(lower)
    return normal_cdf(low - center, spread) + normal_cdf(center - math.log(upper), spread)
