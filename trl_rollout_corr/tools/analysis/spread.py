"""
The spread of the log-ratio, and the bounds that fit it.

The model takes log-ratios as independent and normal, with variance `s^2`. Their mean is `-s^2 / 2`,
at which the mean ratio is 1 (`docs/method.md`).
"""

import math
from typing import NamedTuple

import torch

from ...correction.functional import LOG_RATIO_BOUND
from .recompute import Batch


# Fitted bounds stay as far from 1 as the narrowest bounds of a preset. Anything closer is rounding.
_NARROWEST = 0.001


class Spread(NamedTuple):
    """Log-ratios of `B` completions with at least one token."""

    lengths: torch.Tensor  # tokens per completion, `(B,)`
    s: float  # root mean square of the log-ratio of a token


def spread_of(batch: Batch) -> Spread:
    """
    Spread of the log-ratio over tokens with a finite log-probability of both policies; a
    `ValueError` without any.
    """
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
    """Spread of log-ratios over at least one valid token; both of shape `(B, T)`."""
    return _spread(valid.sum(1).double(), log_ratio[valid].double())


def _spread(lengths: torch.Tensor, log_ratio: torch.Tensor) -> Spread:
    """Spread of the log-ratios of all valid tokens, given their number per completion."""
    return Spread(lengths[lengths > 0], log_ratio.square().mean().sqrt().item())


def suggest_bounds(spread: Spread) -> tuple[float, float]:
    """
    Bounds of `seq_mean_k1` that keep at least 95 percent of completions of mean length `T` under
    the model.

    They lie two standard deviations of the mean log-ratio, `s / sqrt(T)` each, around 1. The drift
    `s^2 / 2` moves the lower bound further out. Both are rounded outwards.
    """
    drift = spread.s**2 / 2
    width = max(2 * spread.s / spread.lengths.mean().sqrt().item(), _NARROWEST)
    digits = max(1 - math.floor(math.log10(width)), 1)  # two digits of the width, however narrow
    unit = 10.0**digits
    lower = math.floor(math.exp(-drift - width) * unit) / unit
    upper = math.ceil(math.exp(min(width, LOG_RATIO_BOUND)) * unit) / unit
    return round(lower, digits), round(upper, digits)
