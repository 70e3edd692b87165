"""
The spread of the log-ratio, and the bounds that fit it.

Log-ratios are taken as independent and normal, with variance `s^2` and the mean `-s^2 / 2` at which a ratio has mean 1
(`docs/theory.md`).
"""

import math
from typing import NamedTuple

import torch

from ..correction.normal import expected_share_outside
from ..settings.config import RolloutCorrectionConfig
from .recompute import Batch


# Share of the tokens that the bounds that fit may reject.
TARGET = 0.05

# A log-ratio whose exponential is still a number.
_LARGEST = 300.0

# The bounds that fit are not closer to 1 than the narrowest of the presets': below is rounding.
_NARROWEST = 0.001

# Completions that need bounds so much wider than the model's are not noise, and widen nothing.
_OUTLIERS = 2.0


class Spread(NamedTuple):
    """
    Log-ratios of `B` completions that have tokens.

    Args:
        sums (`torch.Tensor` of shape `(B,)`):
            Sum of the log-ratio over each completion, in nats.
        lengths (`torch.Tensor` of shape `(B,)`):
            Tokens of each completion.
        s (`float`):
            Root mean square of the log-ratio of a token.
        s_robust (`float`):
            The same without the tails: the distance of percentiles 5 and 95 over that of a standard normal.
    """

    sums: torch.Tensor
    lengths: torch.Tensor
    s: float
    s_robust: float

    def share(self, of_rows: torch.Tensor) -> float:
        """Mean over tokens of a value per completion, of shape `(B,)`."""
        return ((of_rows * self.lengths).sum() / self.lengths.sum()).item()


def spread_of(batch: Batch) -> Spread:
    """Spread of the log-ratio over tokens with a finite log-probability of both policies; a `ValueError` without any."""
    tokens = batch.tokens(RolloutCorrectionConfig())
    if not tokens.lengths.any():
        raise ValueError("no token of the loss has a finite log-probability under both policies")
    return measure(tokens.log_ratio, tokens.valid > 0)


def measure(log_ratio: torch.Tensor, valid: torch.Tensor) -> Spread:
    """
    Measure the spread.

    Args:
        log_ratio (`torch.Tensor` of shape `(B, T)`):
            Log-ratio, 0 where it does not count.
        valid (`torch.Tensor` of shape `(B, T)`):
            True for tokens that count. At least one.

    Returns:
        [`Spread`]: in float64.
    """
    tokens = log_ratio[valid].double().sort().values
    lengths = valid.sum(1).double()
    sums = log_ratio.sum(1, dtype=torch.float64)[lengths > 0]
    low, high = (tokens[round(p * (len(tokens) - 1))] for p in (0.05, 0.95))
    of_normal = 2 * torch.special.ndtri(torch.tensor(0.95, dtype=torch.float64))
    s, s_robust = tokens.square().mean().sqrt(), (high - low) / of_normal
    return Spread(sums, lengths[lengths > 0], s.item(), s_robust.item())


# Suggestion ---------------------------------------------------------------------------------------------------------------


def suggest_bounds(spread: Spread) -> tuple[float, float]:
    """
    Bounds of `seq_mean_k1` that reject at most 5 percent of the tokens, by the model and on the dump.

    They lie symmetrically around 1, with the lower one moved out by the drift `s^2 / 2`. Single completions that are
    much further off than the model allows do not count.

    Args:
        spread ([`Spread`]):
            The completions.

    Returns:
        `tuple[float, float]`: bounds on the ratio, rounded outwards.
    """
    drift = spread.s**2 / 2
    measured, model = _measured_width(spread, drift), _modelled_width(spread, drift)
    width = max(model, measured if measured <= _OUTLIERS * model else 0.0, _NARROWEST)
    digits = max(1 - math.floor(math.log10(width)), 1)  # two of the width, however narrow
    unit = 10.0**digits
    lower, upper = math.floor(math.exp(-drift - width) * unit) / unit, math.ceil(math.exp(width) * unit) / unit
    return round(lower, digits), round(upper, digits)


def _measured_width(spread: Spread, drift: float) -> float:
    """Smallest width `h` with which bounds `exp(-drift - h)` and `exp(h)` reject at most the target of these completions."""
    mean = spread.sums / spread.lengths
    needed, order = torch.maximum(mean, -mean - drift).clamp(min=0.0).sort()
    covered = spread.lengths[order].cumsum(0) / spread.lengths.sum()
    return needed[int((covered < 1 - TARGET).sum())].item()


def _modelled_width(spread: Spread, drift: float) -> float:
    """The same by the model."""
    below, above = 0.0, min(10 * spread.s + 1e-12, _LARGEST)
    for _ in range(60):
        middle = (below + above) / 2
        share = spread.share(
            expected_share_outside(spread.s, spread.lengths, math.exp(-drift - middle), math.exp(middle))
        )
        below, above = (below, middle) if share <= TARGET else (middle, above)
    return above
