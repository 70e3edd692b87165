"""
Size of what rounding alone does to a probability and to a ratio. Torch only.

A sampler with the trainer's own weights still gives other probabilities: other kernels, other precision, weights of 8
bits. This part of the gap stays where it is while the policy moves, because a push brings the new weights and rounds
them again. It is measured on completions that were sampled with the weights of the training policy, as the 99th
percentile of its size over their tokens.
"""

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from .functional import Tokens, accumulation_dtype, below, probability_divergence, row_blocks, select_tokens
from .sums import Applied, SegmentedSums, Segments


# Sizes are counted in bins, each a tenth wider than the one before, from 0.00001 on. What is smaller counts as
# nothing.
_SMALLEST, _WIDTH, _BINS = 1e-5, 0.1, 150

MOST = 0.99  # quantile of the sizes
KEPT = 0.9  # share of the former value in the moving mean, per optimizer step
# A token that is a thousand times less likely for one of the two is broken, and nothing that rounding does
BROKEN = math.log(1000.0)  # nats
# A sampler whose weights do not arrive, but are announced, must not count as one that rounds: what it rounds at the
# first step may grow as the policy becomes surer, but not without limit.
GROWTH = 4.0  # times the first value, at most
WIDEST = 0.4  # of a probability, at most


def count_sizes(sizes: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """
    Histogram, `(151,)`, of sizes that count where `counts` is 1 and not 0; both are `(B, T)`. The first bin holds what
    is too small.
    """
    bins = (sizes.clamp(min=_SMALLEST / 2).log() - math.log(_SMALLEST)).div_(_WIDTH).floor_().add_(1.0)
    bins = bins.clamp_(0, _BINS).long().flatten()
    dtype = accumulation_dtype(sizes.device)
    return torch.zeros(_BINS + 1, dtype=dtype, device=sizes.device).scatter_add_(0, bins, counts.flatten().to(dtype))


def quantile(histogram: torch.Tensor) -> torch.Tensor:
    """Quantile `MOST`, `()`, of sizes in a histogram of [`count_sizes`]; NaN without any."""
    total, up_to = histogram.sum(), histogram.cumsum(0)
    wanted = MOST * total
    bin_of_it = (up_to < wanted).sum().clamp(max=_BINS)
    at = bin_of_it.unsqueeze(0)  # `gather`, because an index of a device would wait for it
    in_bin = histogram.gather(0, at).squeeze(0)
    inside = 1.0 - (up_to.gather(0, at).squeeze(0) - wanted) / in_bin.clamp(min=1)
    size = _SMALLEST * ((bin_of_it - 1 + inside) * _WIDTH).exp()
    return torch.where(total > 0, torch.where(bin_of_it > 0, size, 0.0), torch.nan)


def measure_rounding(
    train_logps: torch.Tensor, rollout_logps: torch.Tensor, mask: torch.Tensor, fresh: torch.Tensor
) -> torch.Tensor:
    """
    Count how far trainer and sampler are apart in completions that both wrote with equal weights.

    Args:
        train_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the sampled tokens in the trainer, in nats.
        rollout_logps (`torch.Tensor` of shape `(B, T)`):
            Those of the sampler.
        mask (`torch.Tensor` of shape `(B, T)`):
            Non-zero on the tokens of the loss.
        fresh (`torch.Tensor` of shape `(B,)`):
            Completions that were sampled with the weights of the training policy.

    Returns:
        `torch.Tensor` of shape `(2, 151)`: histograms of the sizes of the differences of probabilities and of
        log-probabilities.
    """
    counted = mask.bool() & fresh.bool().unsqueeze(1)
    found = [
        _count_rows(select_tokens(train_logps[rows], rollout_logps[rows], counted[rows])) for rows in row_blocks(mask)
    ]
    return torch.stack(found).sum(0)


def _count_rows(tokens: Tokens) -> torch.Tensor:
    log_ratios = tokens.log_ratio.abs()
    counts = below(log_ratios, BROKEN).mul_(tokens.valid)
    return torch.stack(
        [count_sizes(size, counts) for size in (probability_divergence(tokens, "tv").abs_(), log_ratios)]
    )


class Rounding:
    """
    Moving mean of what rounding alone does, on the device: `value`, `(2,)`, is the size of a difference of
    probabilities, and in nats of a log-ratio; NaN until completions of equal weights were seen.

    Histograms of this rank wait in `add` until `settle`, so that all ranks use one number. All ranks must call
    `preview` and `settle` equally often.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        device = torch.device("cpu") if device is None else device
        dtype = accumulation_dtype(device)
        self.value = self._first = torch.full((2,), torch.nan, dtype=dtype, device=device)
        self._nothing = self._waiting = torch.zeros(2, _BINS + 1, dtype=dtype, device=device)
        self.is_settled = False

    def add(self, histograms: torch.Tensor) -> None:
        """Add histograms of [`measure_rounding`]."""
        self._waiting = self._waiting + histograms.to(self._waiting)

    def preview(self, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Use what waits so far on all ranks, until it is settled."""
        self.value = self._measured(sum_over_ranks(self._waiting))

    def settle(self, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Move the mean by what waits on all ranks."""
        now, self._waiting = self._measured(sum_over_ranks(self._waiting)), self._nothing
        before = self.value if self.is_settled else self._first  # a preview is part of what waited
        self._first = torch.where(self._first.isnan(), now, self._first)
        moved = torch.where(before.isnan(), now, KEPT * before + (1.0 - KEPT) * now)
        self.value = torch.where(now.isnan(), before, torch.minimum(moved, GROWTH * self._first))
        self.is_settled = True

    @staticmethod
    def _measured(histograms: torch.Tensor) -> torch.Tensor:
        sizes = torch.stack([quantile(histogram) for histogram in histograms])
        sizes[0].clamp_(max=WIDEST)
        return sizes

    @property
    def used(self) -> torch.Tensor:
        """The value, `(2,)`, with 0 for what is unknown."""
        return self.value.nan_to_num(0.0)


class RoundingInUse(SegmentedSums):
    """The largest value that was used in a logging window."""

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    MAXIMA: ClassVar[tuple[str, ...]] = ("rounding/tv", "rounding/log_ratio")

    @classmethod
    def used(cls, value: torch.Tensor) -> "RoundingInUse":
        """The value of [`Rounding.used`] as sums."""
        segments: Segments = dict(zip(cls.MAXIMA, value, strict=True))
        return cls.of(segments)

    def _metrics(self, s: dict[str, float], applied: Applied) -> dict[str, float]:
        return {"rounding_tv": s["rounding/tv"], "rounding_log_ratio": s["rounding/log_ratio"]}
