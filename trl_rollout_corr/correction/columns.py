"""Columns of sums: each row of a batch adds to a sum by name. Torch only. `B` rows, `T` tokens."""

from collections.abc import Sequence

import torch

from .functional import Tokens, above, accumulation_dtype


class Columns:
    """Columns of a block of rows by name, `(B, 1)` each: summands of the sums, and candidates for the maxima."""

    def __init__(self, tokens: Tokens) -> None:
        self.dtype = accumulation_dtype(tokens.valid.device)
        self.lengths = tokens.lengths.to(self.dtype)  # (B, 1)
        self.rows = above(self.lengths, 0.0)  # (B, 1), 1 for rows with a token
        self.no_rows = self.rows.reciprocal() - 1.0  # (B, 1), infinity for the others
        self.divisors = self.lengths.clamp(min=1)
        self.sums: dict[str, torch.Tensor] = {}
        self.maxima: dict[str, torch.Tensor] = {}

    def add(self, name: str, x: torch.Tensor) -> None:
        """Add up `x`, of shape `(B, T)` or `(B, 1)`. It is 0 on tokens and rows that do not count."""
        self.sums[name] = x if x.shape[-1] == 1 else x.sum(-1, keepdim=True)

    def add_columns(self, names: Sequence[str], x: torch.Tensor) -> None:
        """Add up the columns of `x`, of shape `(B, len(names))`, each under its name."""
        self.sums |= zip(names, x.split(1, -1), strict=True)

    def row_mean(self, name: str) -> torch.Tensor:
        """Mean over the tokens of each row of the column of a name."""
        return self.sums[name] / self.divisors

    def add_extremes(self, name: str, x: torch.Tensor, outside: torch.Tensor) -> None:
        """Largest and (negated) smallest entry of `x` where `outside` is 0 and not infinity."""
        high, low = x - outside, x + outside
        if x.shape[-1] > 1:
            high, low = high.amax(-1, keepdim=True), low.amin(-1, keepdim=True)
        self.maxima[f"{name}_max"], self.maxima[f"{name}_negated_min"] = high, -low

    def add_rows(self, name: str, x: torch.Tensor) -> None:
        """Add up a statistic of each row, `(B, 1)`: its sum, its squares, and its largest distance from 0."""
        self.add(f"{name}/row_sum", x)
        self.add(f"{name}/row_squares", x.square())
        self.maxima[f"{name}/deviation"] = x.abs() - self.no_rows

    def joined(self) -> tuple[tuple[str, ...], torch.Tensor, tuple[str, ...], torch.Tensor]:
        """Names and values of the sums, and of the maxima."""
        sum_names, sums = self._joined(self.sums)
        max_names, maxima = self._joined(self.maxima)
        return sum_names, sums.sum(0), max_names, maxima.amax(0)

    def _joined(self, columns: dict[str, torch.Tensor]) -> tuple[tuple[str, ...], torch.Tensor]:
        """Names and columns, `(B, N)`. Columns of a narrower type come first, because they are converted in one operation."""
        narrow = [name for name, column in columns.items() if column.dtype != self.dtype]
        wide = [name for name in columns if name not in narrow]
        joined = [torch.cat([columns[name] for name in names], 1).to(self.dtype) for names in (narrow, wide) if names]
        return (*narrow, *wide), torch.cat(joined, 1)


def row_squares(x: torch.Tensor) -> torch.Tensor:
    """`(B, 1)`: squares added up over each row, without a tensor of them."""
    norms: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norms.square_()
