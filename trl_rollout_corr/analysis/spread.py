"""
The spread of the log-ratio, the bounds that fit it, and their effect: predicted from the spread, and measured.

Log-ratios are taken as independent and normal, with variance `s^2` and the mean `-s^2 / 2` at which a ratio has mean 1. The
log-weight of `T` tokens is then normal with variance `v = s^2 T` and mean `-v / 2` (`docs/theory.md`).
"""

import math
from typing import NamedTuple

import torch

from ..correction.functional import LOG_RATIO_BOUND, expected_share_outside, normal_cdf
from ..settings.config import RolloutCorrectionConfig
from .replay import Batch


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


class Prediction(NamedTuple):
    """A share or mean over tokens, as it is logged: by the model, for the lengths at hand, and on the completions."""

    quantity: str
    predicted: float
    measured: float


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


# Closed forms, for weights whose logarithm is normal with variance `v` and mean `-v / 2` -----------------------------------


def effective_sample_size(v: torch.Tensor) -> torch.Tensor:
    """Effective sample size before any bound: `exp(-v)`."""
    return torch.exp(-v)


def truncated_mean(v: torch.Tensor, upper: float) -> torch.Tensor:
    """Mean of `min(w, upper)`."""
    return icepop_mean(v, upper) + upper * normal_cdf(-math.log(upper) - v / 2, v.sqrt())


def icepop_mean(v: torch.Tensor, upper: float) -> torch.Tensor:
    """Mean of `w` where `w <= upper`, and 0 elsewhere."""
    return normal_cdf(math.log(upper) - v / 2, v.sqrt())


def predict(spread: Spread, bounds: tuple[float, float] | None) -> list[Prediction]:
    """Predict and measure the effect of sequence weights, and of `bounds` of `seq_mean_k1` if there are any."""
    v, w = spread.s**2 * spread.lengths, spread.sums.clamp(max=LOG_RATIO_BOUND).exp()
    square = spread.share(w.square())
    predictions = [
        # weights of all lengths have mean 1; their second moments add up
        Prediction(
            "sequence weights: ESS",
            1 / spread.share(1 / effective_sample_size(v)),
            spread.share(w) ** 2 / square if square else 0.0,
        ),
        Prediction(
            "sequence weights truncated at 2: mean",
            spread.share(truncated_mean(v, 2.0)),
            spread.share(w.clamp(max=2.0)),
        ),
        Prediction(
            "sequence weights dropped above 3: mean", spread.share(icepop_mean(v, 3.0)), spread.share(w * (w <= 3.0))
        ),
    ]
    if bounds is not None:
        lower, upper = bounds
        geometric = (spread.sums / spread.lengths).exp()
        predictions += [
            Prediction(
                f"seq_mean_k1 [{lower:g}, {upper:g}]: rejected",
                spread.share(expected_share_outside(spread.s, spread.lengths, lower, upper)),
                spread.share(((geometric < lower) | (geometric > upper)).double()),
            )
        ]
    return predictions


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
    kept = spread.lengths[order].cumsum(0) / spread.lengths.sum()
    return needed[int((kept < 1 - TARGET).sum())].item()


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
