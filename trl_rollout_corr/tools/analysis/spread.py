"""The spread of the log-ratio."""

from typing import NamedTuple

import torch

from .recompute import Batch


class Spread(NamedTuple):
    """Log-ratios of `B` completions with at least one token."""

    lengths: torch.Tensor  # tokens per completion, `(B,)`
    s: float  # root mean square of the log-ratio of a token


def spread_of(batch: Batch) -> Spread:
    """
    Spread of the log-ratio over tokens with a finite log-probability of both policies; a `ValueError` without any.
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
