"""
Named sums in one vector. Torch only.

To combine two micro-batches, logging steps or ranks, sums are added and the larger maxima taken. So a metric does not
depend on the split of the data.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar, NamedTuple, Self

import torch

from ..messages import PREFIX


class Applied(NamedTuple):
    """Parts of the correction in use. Metrics of the other parts are left out."""

    rejects: bool = True  # criteria reject tokens
    weighs: bool = True  # importance weights multiply the policy gradient


@dataclass(frozen=True)
class Sums:
    """Named sums and maxima in one vector. A minimum is stored as the maximum of its negative."""

    sum_names: tuple[str, ...]  # of the leading entries, which add up
    max_names: tuple[str, ...]  # of the trailing entries, maxima
    vector: torch.Tensor  # (N,): the sums and the maxima

    def combine(self, vectors: torch.Tensor) -> Self:
        """Combine vectors of this layout, `(K, N)`, such as one per rank, without this one."""
        n_additive = vectors.shape[1] - len(self.max_names)
        combined = torch.cat([vectors[:, :n_additive].sum(0), vectors[:, n_additive:].amax(0)])
        return replace(self, vector=combined)

    def fits(self, other: Self) -> bool:
        """True if both share the layout."""
        return (self.sum_names, self.max_names) == (other.sum_names, other.max_names)

    def __add__(self, other: Self) -> Self:
        if not self.fits(other):
            raise ValueError("Statistics of different configurations cannot be combined.")
        return self.combine(torch.stack([self.vector, other.vector]))

    def __getitem__(self, name: str) -> torch.Tensor:
        """One of the sums, of shape `()`."""
        return self.vector[self.sum_names.index(name)]

    def by_name(self) -> dict[str, float]:
        """The sums and the maxima as numbers. Waits for the device."""
        values = self.vector.tolist()
        maxima = values[len(values) - len(self.max_names) :]
        return dict(zip(self.sum_names, values, strict=False)) | dict(zip(self.max_names, maxima, strict=True))

    def finish(self, **applied: bool) -> dict[str, float]:
        """Metrics by key, given the fields of [`Applied`]. Waits for the device."""
        metrics = self._metrics(self.by_name(), Applied(**applied))
        return {PREFIX + key: value for key, value in metrics.items()}

    def _metrics(self, s: dict[str, float], applied: Applied) -> dict[str, float]:
        """Metrics without prefix, from the sums and maxima by name."""
        raise NotImplementedError


# Sums of a part of a [`SegmentedSums`], by name of the segment
Segments = Mapping[str, torch.Tensor]


class SegmentedSums(Sums):
    """Sums of one layout: segments of fixed length. A batch may fill some of them only."""

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]]
    MAXIMA: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of(cls, segments: Segments) -> Self:
        """Vector with the values of at least one segment or maximum. All other sums are 0."""
        nothing = next(iter(segments.values())).new_zeros(())
        parts = [
            segments[name].flatten() if name in segments else nothing.expand(len(names))
            for name, names in cls.SEGMENTS.items()
        ]
        maxima = [segments.get(name, nothing - math.inf).reshape(1) for name in cls.MAXIMA]
        return cls(tuple(chain(*cls.SEGMENTS.values())), cls.MAXIMA, torch.cat([*parts, *maxima]))


# Numbers -------------------------------------------------------------------------------------------------------------


def divide(total: float, count: float) -> float:
    """A mean; NaN for a count of 0."""
    return total / count if count else math.nan


def maximum(value: float) -> float:
    """A maximum; NaN without a value."""
    return value if math.isfinite(value) else math.nan


def std(total: float, squares: float, count: float) -> float:
    """Standard deviation from a sum and a sum of squares."""
    if not count:
        return math.nan
    if count == 1:
        return 0.0
    variance = squares / count - (total / count) ** 2
    if variance < 1e-14 * squares / count:  # rounding error of a difference of equal numbers
        return 0.0
    return math.sqrt(variance)
