"""Sequences of a dump as arrays of numpy and as padded tensors."""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from .columns import COLUMNS, SCHEMA


_TEXT = ["prompt", "tokens"]
_LONGEST = 100  # characters of a token


class Sequences:
    """
    `B` sequences of a dump with `N` tokens, from a table with the columns of a dump.

    Each column of numbers of the table is an attribute: `(B,)` with a number for each sequence (`step`, `reward`, ...)
    or `(N,)` with a number for each token, sequence after sequence (`mask`, `train_logps`, ...). It is NaN where the
    column is null.
    """

    if TYPE_CHECKING:

        def __getattr__(self, column: str) -> np.ndarray: ...

    def __init__(self, table: pa.Table) -> None:
        self.lengths = pc.list_value_length(table["mask"]).to_numpy()
        # First token of each sequence, and `N`
        self.starts = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        for column in COLUMNS:
            if column.dtype is not None and column.name in table.column_names:
                values = table[column.name]
                array = _end_to_end(values, self.lengths) if column.per_token else values.to_numpy()
                setattr(self, column.name, array.astype(column.dtype, copy=False))
        if "rollout_logps" in table.column_names:
            chunks = table["rollout_logps"].chunks
            # (N,), tokens of which the sampler has returned None
            self.missing = np.concatenate(
                [chunk.flatten().is_null().to_numpy(zero_copy_only=False) for chunk in chunks]
            )
        self._prompt_ids = table["prompt_ids"] if "prompt_ids" in table.column_names else None
        self._text: Any = table.select(_TEXT) if set(_TEXT) <= {*table.column_names} else None

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]]) -> "Sequences":
        """Sequences from rows in memory, made by [`~trl_rollout_corr.tools.dump.rows.make_row`], without text."""
        return cls(pa.Table.from_pylist(list(rows), schema=SCHEMA).drop_columns(_TEXT))

    def only(self, rows: np.ndarray, tokens: np.ndarray | None = None) -> "Sequences":
        """
        The same sequences, of which only `rows` represent the batch, a boolean mask, `(B,)`, and of these only the
        tokens with the indices `tokens` are counted.
        """
        part = copy(self)
        for derived in ("represents", "counted"):
            part.__dict__.pop(derived, None)
        part.__dict__["sampled"] = self.represents & rows
        if tokens is not None:
            chosen = np.zeros(len(self.row), bool)
            chosen[tokens] = True
            part.__dict__["counted"] = part.counted & chosen
        return part

    def __len__(self) -> int:
        return len(self.step)

    # Of each token ---------------------------------------------------------------------------------------------------

    @cached_property
    def log_ratio(self) -> NDArray[np.float32]:
        with np.errstate(invalid="ignore"):
            difference: NDArray[np.float32] = self.train_logps - self.rollout_logps
        return difference

    @property
    def distance(self) -> np.ndarray:
        """Absolute log-ratio of each token of the loss, infinite where it is not finite; 0 for other tokens."""
        size = np.abs(self.log_ratio)
        return np.where(self.mask, np.where(np.isnan(size), np.inf, size), 0.0)

    @cached_property
    def valid(self) -> NDArray[np.bool_]:
        """Tokens of the loss with a finite log-ratio."""
        finite: NDArray[np.bool_] = np.isfinite(self.log_ratio)
        return self.mask & finite

    @cached_property
    def broken(self) -> np.ndarray:
        """Tokens of the loss without a finite log-ratio."""
        return self.mask & ~self.valid

    @cached_property
    def counted(self) -> np.ndarray:
        """Valid tokens of the sequences that represent the batch."""
        return self.valid & self.represents[self.row]

    @cached_property
    def row(self) -> NDArray[np.int32]:
        """Index of the sequence of each token."""
        return np.repeat(np.arange(len(self), dtype=np.int32), self.lengths)

    @cached_property
    def advantage_of_token(self) -> NDArray[np.float32]:
        """Advantage of each token, which is that of its sequence unless the token has its own."""
        of_row: NDArray[np.float32] = self.advantage[self.row]
        return np.where(np.isnan(self.advantages), of_row, self.advantages)

    @cached_property
    def turn(self) -> NDArray[np.int64]:
        """Turn of each token, counted over all sequences. By default a turn is a run of tokens of the loss."""
        first = self.starts[:-1][self.lengths > 0]
        before = np.concatenate([[False], self.mask[:-1]])
        before[first] = False
        begins = np.where(np.isnan(self.turn_ids), self.mask & ~before, np.diff(self.turn_ids, prepend=0) != 0)
        begins[first] = True
        return np.cumsum(begins)

    # Of each sequence ------------------------------------------------------------------------------------------------

    @cached_property
    def represents(self) -> NDArray[np.bool_]:
        """Sequences that represent the batch: the ones drawn at random, or all if none were."""
        return self.sampled if self.sampled.any() else np.ones(len(self), bool)

    @property
    def age(self) -> NDArray[np.float64]:
        """Age of the weights that sampled, as far as it is in the log-ratio; all of it in a dump without `lag`."""
        age: NDArray[np.float64] = np.where(np.isnan(self.lag), self.staleness, self.lag)
        return age

    @property
    def is_fresh(self) -> NDArray[np.bool_]:
        """
        Sequences that the weights of `train_logps` are known to have sampled. In decoupled mode these may be weights
        before some updates, and `staleness` counts the updates.
        """
        return np.equal(self.age, 0)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums over the tokens of each sequence, `(B,)`."""
        return np.bincount(self.row, weights=values, minlength=len(self))

    @cached_property
    def prompts(self) -> list[np.ndarray]:
        """Token ids of each prompt; empty where unknown."""
        nothing = np.zeros(0, np.int32)
        if self._prompt_ids is None:
            return [nothing] * len(self)
        return [ids.values.to_numpy() if ids.is_valid else nothing for ids in self._prompt_ids]

    # Of some sequences -----------------------------------------------------------------------------------------------

    def slice(self, row: int) -> slice:
        """Slice of the tokens of a sequence."""
        return slice(int(self.starts[row]), int(self.starts[row + 1]))

    @property
    def has_text(self) -> bool:
        """True if the text of the tokens was read."""
        return self._text is not None

    def text(self, row: int, place: int) -> str:
        """Text of one token of a sequence, cut after `_LONGEST` characters."""
        text = self._text["tokens"][row].values[place].as_py() or ""
        return f"{text[:_LONGEST]}\u2026" if len(text) > _LONGEST else text

    def prompt(self, row: int) -> str:
        """Prompt of a sequence."""
        return self._text["prompt"][int(row)].as_py() or ""


def _end_to_end(lists: pa.ChunkedArray, lengths: np.ndarray) -> np.ndarray:
    """Lists end to end, with NaN where a list is null."""
    values: np.ndarray = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in lists.chunks])
    if not lists.null_count and len(values) != lengths.sum():
        raise ValueError("a row of the dump contains lists of different lengths")
    if not lists.null_count:
        return values
    filled = np.full(lengths.sum(), np.nan, np.float32)
    filled[np.repeat(lists.is_valid().to_numpy().astype(bool), lengths)] = values
    return filled


def pad(values: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
    """Sequences that lie end to end as rows, `(B, T)`, with zeros after the end of each and `T` at least 1."""
    inside = torch.arange(max(int(lengths.max()), 1)) < torch.from_numpy(lengths)[:, None]
    flat = torch.from_numpy(values)
    padded = flat.new_zeros(inside.shape)
    padded[inside] = flat
    return padded
