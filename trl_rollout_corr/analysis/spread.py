"""
Predictions from the spread of the log-ratio, and the values measured on a dump.

Log-ratios are taken as independent and normal, with variance `s^2` and the mean `-s^2 / 2` at which a ratio has mean 1. The
log-weight of `T` tokens is then normal with variance `v = s^2 T` and mean `-v / 2` (`docs/theory.md`).
"""

import math
from typing import NamedTuple

import torch

from ..correction.functional import LOG_RATIO_BOUND, expected_share_outside, normal_cdf


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
        log_ratio (`torch.Tensor` of shape `(N,)`):
            Log-ratio of each token, in nats.
        sums (`torch.Tensor` of shape `(B,)`):
            Sum over each completion.
        lengths (`torch.Tensor` of shape `(B,)`):
            Tokens of each completion.
        s (`float`):
            Root mean square of the log-ratio.
        s_robust (`float`):
            The same without the tails: the distance of percentiles 5 and 95 over that of a standard normal.
    """

    log_ratio: torch.Tensor
    sums: torch.Tensor
    lengths: torch.Tensor
    s: float
    s_robust: float

    @property
    def mean_length(self) -> float:
        return self.lengths.mean().item()

    def share(self, of_rows: torch.Tensor) -> float:
        """Mean over tokens of a value per completion."""
        return ((of_rows * self.lengths).sum() / self.lengths.sum()).item()

    def share_outside(self, lower: float, upper: float) -> float:
        """Share of the tokens in completions whose geometric mean of the ratio leaves `[lower, upper]`."""
        geometric = (self.sums / self.lengths).exp()
        return self.share(((geometric < lower) | (geometric > upper)).double())


class Prediction(NamedTuple):
    """
    A number that the model predicts.

    Args:
        quantity (`str`):
            Its name.
        predicted (`float`):
            The model's value, for the lengths that the completions have.
        at_mean_length (`float`):
            The model's value if all had the mean length.
        measured (`float`):
            The value on the dump.
    """

    quantity: str
    predicted: float
    at_mean_length: float
    measured: float


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
    return Spread(tokens, sums, lengths[lengths > 0], s.item(), s_robust.item())


# Closed forms -------------------------------------------------------------------------------------------------------------


def effective_sample_size(v: torch.Tensor) -> torch.Tensor:
    """Effective sample size of weights whose logarithm has variance `v`, before any bound."""
    return torch.exp(-v)


def truncated_mean(v: torch.Tensor, upper: float) -> torch.Tensor:
    """Mean of `min(w, upper)`."""
    return icepop_mean(v, upper) + upper * normal_cdf(-math.log(upper) - v / 2, v.sqrt())


def icepop_mean(v: torch.Tensor, upper: float) -> torch.Tensor:
    """Mean of `w` where `w <= upper`, and 0 elsewhere."""
    return normal_cdf(math.log(upper) - v / 2, v.sqrt())


# Predicted against measured -----------------------------------------------------------------------------------------------


def predict(spread: Spread, bounds: tuple[float, float]) -> list[Prediction]:
    """
    Predict and measure the effect of weights and bounds.

    Args:
        spread ([`Spread`]):
            The completions.
        bounds (`tuple[float, float]`):
            Bounds of `seq_mean_k1` to look at, beside usual ones.

    Returns:
        `list[Prediction]`: shares and means over tokens, as they are logged.
    """
    s, mean_length = spread.s, torch.tensor(spread.mean_length, dtype=torch.float64)
    far = min(5 * s, _LARGEST)
    lower, upper = math.exp(-far), math.exp(far)
    of_tokens = expected_share_outside(s, torch.ones_like(mean_length), lower, upper).item()
    measured = (spread.log_ratio.abs() > far).double().mean().item()
    return [
        Prediction("mean log-ratio", -s * s / 2, -s * s / 2, spread.log_ratio.mean().item()),
        *_of_weights(spread, s * s * spread.lengths, s * s * mean_length),
        *(
            Prediction(
                f"seq_mean_k1 [{low:g}, {high:g}]: rejected",
                spread.share(expected_share_outside(s, spread.lengths, low, high)),
                expected_share_outside(s, mean_length, low, high).item(),
                spread.share_outside(low, high),
            )
            for low, high in ((0.999, 1.001), (0.99, 1.01), bounds)
        ),
        Prediction(f"token_k1 [{lower:.3g}, {upper:.3g}] (5 s): rejected", of_tokens, of_tokens, measured),
    ]


def _of_weights(spread: Spread, v: torch.Tensor, v_mean: torch.Tensor) -> list[Prediction]:
    """Predictions for sequence weights, from the variance of the log-weight of each completion and of one of mean length."""
    w = spread.sums.clamp(max=LOG_RATIO_BOUND).exp()
    square = spread.share(w.square())
    return [
        Prediction(
            "sequence weights: ESS",
            # weights of all lengths have mean 1; their second moments add up
            1 / spread.share(1 / effective_sample_size(v)),
            effective_sample_size(v_mean).item(),
            spread.share(w) ** 2 / square if square else 0.0,  # as it is logged if every weight is 0
        ),
        Prediction(
            "sequence weights truncated at 2: mean",
            spread.share(truncated_mean(v, 2.0)),
            truncated_mean(v_mean, 2.0).item(),
            spread.share(w.clamp(max=2.0)),
        ),
        Prediction(
            "sequence weights dropped above 3: mean",
            spread.share(icepop_mean(v, 3.0)),
            icepop_mean(v_mean, 3.0).item(),
            spread.share(w * (w <= 3.0)),
        ),
    ]


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
