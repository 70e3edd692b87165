"""Sequences of a dump as arrays: one entry per row, or one per token with all rows end to end."""

from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch


class Table:
    """
    Sequences of a dump, column by column.

    Args:
        rows (`pa.Table`):
            Its rows, with the columns of [`~trl_rollout_corr.dump.SCHEMA`].

    Raises:
        `ValueError`: if the lists of a row differ in length.
    """

    def __init__(self, rows: pa.Table):
        self._rows = rows
        self.step, self.staleness = self._per_row("step"), self._per_row("staleness")
        self.sampled, self.worst = self._per_row("sampled").astype(bool), self._per_row("worst").astype(bool)
        self.reward, self.advantage = self._per_row("reward"), self._per_row("advantage")
        lengths = self._lengths("train_logps")
        for name in ("tokens", "mask", "rollout_logps", "keep", "coefficients"):
            if not np.array_equal(lengths, self._lengths(name)):
                raise ValueError("a row of the dump has lists of different lengths")
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        self.train, self.rollout = self._per_token("train_logps"), self._per_token("rollout_logps")
        self.coefficients = self._per_token("coefficients")
        self.mask, self.keep = self._per_token("mask").astype(bool), self._per_token("keep").astype(bool)
        with np.errstate(invalid="ignore"):
            self.d = self.train - self.rollout
        self.broken = self.mask & ~np.isfinite(self.d)
        self.valid = self.mask & np.isfinite(self.d)

    def __len__(self) -> int:
        return len(self.step)

    @cached_property
    def row(self) -> np.ndarray:
        """Row of each token."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.starts))

    @cached_property
    def position(self) -> np.ndarray:
        """Place of each token in its completion, from 1."""
        return (np.arange(len(self.row)) - self.starts[self.row] + 1).astype(np.int32)

    @cached_property
    def represents(self) -> np.ndarray:
        """Rows that represent the batch: those that were drawn at random, or all if none were."""
        return self.sampled if self.sampled.any() else np.ones(len(self), bool)

    @cached_property
    def batch(self) -> np.ndarray:
        """Tokens of the loss, with a finite log-ratio, in rows that represent the batch."""
        return self.valid & self.represents[self.row]

    def per_row(self, values: np.ndarray) -> np.ndarray:
        """Sums over the tokens of each row."""
        return np.bincount(self.row, weights=values, minlength=len(self))

    def slice(self, row: int) -> slice:
        """Where the tokens of a row are."""
        return slice(int(self.starts[row]), int(self.starts[row + 1]))

    def texts(self, row: int) -> list[str]:
        """Text of the tokens of a row."""
        return [text or "" for text in self._rows.column("tokens")[int(row)].as_py()]

    def prompt(self, row: int) -> str:
        """Prompt of a row."""
        return self._rows.column("prompt")[int(row)].as_py() or ""

    def padded(self, column: np.ndarray, rows: np.ndarray, width: int) -> torch.Tensor:
        """Some rows of a column of tokens as a tensor, with zeros after the end of each."""
        values = np.zeros((len(rows), width), column.dtype)
        for i, row in enumerate(rows):
            values[i, : self.starts[row + 1] - self.starts[row]] = column[self.slice(row)]
        return torch.from_numpy(values)

    def _per_row(self, name: str) -> np.ndarray:
        """Numbers, with NaN for null."""
        column = self._rows.column(name)
        if column.null_count:
            column = column.cast(pa.float64())
        return column.to_numpy()

    def _lengths(self, name: str) -> np.ndarray:
        return pc.fill_null(pc.list_value_length(self._rows.column(name)), 0).to_numpy()

    def _per_token(self, name: str) -> np.ndarray:
        chunks = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in self._rows.column(name).chunks]
        return np.concatenate(chunks) if chunks else np.zeros(0, np.float32)
