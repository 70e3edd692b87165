"""
The spread of the log-ratio, and the bounds that fit it.

Log-ratios are taken as independent and normal, with variance `s^2` and the mean `-s^2 / 2` at which
a ratio has mean 1 (`docs/method.md`).
"""

import math
from typing import NamedTuple

import torch

from ...correction.functional import LOG_RATIO_BOUND
from .recompute import Batch


# The bounds that fit are not closer to 1 than the narrowest of the presets': below is rounding.
_NARROWEST = 0.001


class Spread(NamedTuple):
    """Log-ratios of `B` completions that have tokens."""

    lengths: torch.Tensor  # tokens of each, `(B,)`
    s: float  # root mean square of the log-ratio of a token


def spread_of(batch: Batch) -> Spread:
    """Spread of the log-ratio over tokens with a finite log-probability of both policies; a `ValueError` without any."""
    lengths, d = [], []
    for block in batch.blocks:
        tokens = block.tokens(neutralize=False)
        valid = tokens.valid > 0
        lengths.append(valid.sum(1).double())
        d.append(tokens.log_ratio[valid].double())
    if not any(of_block.any() for of_block in lengths):
        raise ValueError("no token of the loss has a finite log-probability under both policies")
    return _spread(torch.cat(lengths), torch.cat(d))


def measure(log_ratio: torch.Tensor, valid: torch.Tensor) -> Spread:
    """Spread of log-ratios over the tokens that are valid, at least one; both of shape `(B, T)`."""
    return _spread(valid.sum(1).double(), log_ratio[valid].double())


def _spread(lengths: torch.Tensor, log_ratio: torch.Tensor) -> Spread:
    """Spread of the log-ratios of all tokens that are valid, of completions with so many of them."""
    return Spread(lengths[lengths > 0], log_ratio.square().mean().sqrt().item())


def suggest_bounds(spread: Spread) -> tuple[float, float]:
    """
    Bounds of `seq_mean_k1` that keep at least 95 percent of completions of the mean length `T`, by
    the model.

    They lie two standard deviations `s / sqrt(T)` of the mean log-ratio around 1, with the lower
    one moved out by the drift `s^2 / 2`. They are rounded outwards.
    """
    drift = spread.s**2 / 2
    width = max(2 * spread.s / spread.lengths.mean().sqrt().item(), _NARROWEST)
    digits = max(1 - math.floor(math.log10(width)), 1)  # two of the width, however narrow
    unit = 10.0**digits
    lower = math.floor(math.exp(-drift - width) * unit) / unit
    upper = math.ceil(math.exp(min(width, LOG_RATIO_BOUND)) * unit) / unit
    return round(lower, digits), round(upper, digits)
