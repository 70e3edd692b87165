"""Sequences of a dump as arrays of numpy, and from those to padded tensors."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray


# Columns with a number for each sequence, and those with a number for each token. What is null is NaN
OF_SEQUENCES: dict[str, DTypeLike] = {
    "step": np.int32,
    "sampled": np.bool_,
    "worst": np.bool_,
    "reward": np.float32,
    "advantage": np.float32,
    "staleness": np.float64,
    "padding": np.float64,
}
OF_TOKENS: dict[str, DTypeLike] = {
    "mask": np.bool_,
    "keep": np.bool_,
    "token_ids": np.int32,
    "train_logps": np.float32,
    "rollout_logps": np.float32,
    "coefficients": np.float32,
    "again_logps": np.float32,
    "turn_ids": np.float64,
    "token_staleness": np.float64,
}


class Sequences:
    """
    `B` sequences of a dump with `N` tokens.

    Args:
        lengths (`np.ndarray` of shape `(B,)`):
            Tokens of each completion.
        columns (`Mapping[str, np.ndarray]`):
            The columns of `OF_SEQUENCES` with `B` entries, and those of `OF_TOKENS` with `N` entries, sequence after
            sequence.
        prompts (`Sequence[np.ndarray]` of `B` arrays):
            Token ids of each prompt; empty where they are not known.
        text (`Mapping[str, Any]`, *optional*):
            Columns `prompt` and `tokens` of PyArrow.

    Attributes:
        step, sampled, worst, reward, advantage, staleness, padding (`np.ndarray` of shape `(B,)`):
            As in the dump; `staleness` and `padding` are NaN where they are not known.
        mask, keep, token_ids, train_logps, rollout_logps, coefficients, again_logps, turn_ids, token_staleness
            (`np.ndarray` of shape `(N,)`):
            As in the dump; `again_logps` is NaN where the sequence was not scored alone, `turn_ids` without turns, and
            `token_staleness` where it is not known.
        starts (`np.ndarray` of shape `(B + 1,)`):
            Index of the first token of each sequence, and `N`.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        columns: Mapping[str, np.ndarray],
        prompts: Sequence[np.ndarray],
        text: Any = None,
    ):
        self.lengths, self.prompts, self._text = lengths, prompts, text
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        self.mask: NDArray[np.bool_]
        self.train_logps: NDArray[np.float32]
        self.rollout_logps: NDArray[np.float32]
        self.step, self.sampled, self.worst = (columns[name] for name in ("step", "sampled", "worst"))
        self.reward, self.advantage = columns["reward"], columns["advantage"]
        self.staleness, self.padding = columns["staleness"], columns["padding"]
        self.mask, self.keep, self.token_ids = (columns[name] for name in ("mask", "keep", "token_ids"))
        self.train_logps, self.rollout_logps = columns["train_logps"], columns["rollout_logps"]
        self.coefficients, self.again_logps = columns["coefficients"], columns["again_logps"]
        self.turn_ids, self.token_staleness = columns["turn_ids"], columns["token_staleness"]

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]]) -> "Sequences":
        """Sequences of rows that are not written, of [`~trl_rollout_corr.dumps.rows.make_row`], without text."""
        lengths = np.array([len(row["token_ids"]) for row in rows])

        def end_to_end(name: str) -> np.ndarray:
            lists = ([np.nan] * n if row[name] is None else row[name] for row, n in zip(rows, lengths, strict=True))
            return np.concatenate([np.asarray(x, OF_TOKENS[name]) for x in lists])

        of_sequences = {name: np.array([row[name] for row in rows], dtype) for name, dtype in OF_SEQUENCES.items()}
        columns = {**of_sequences, **{name: end_to_end(name) for name in OF_TOKENS}}
        return cls(lengths, columns, [np.array(row["prompt_ids"], np.int32) for row in rows])

    def __len__(self) -> int:
        return len(self.step)

    # Of each token ----------------------------------------------------------------------------------------------------

    @cached_property
    def log_ratio(self) -> NDArray[np.float32]:
        with np.errstate(invalid="ignore"):
            return self.train_logps - self.rollout_logps

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
    def turn(self) -> NDArray[np.int64]:
        """Turn of each token, counted over all sequences: as in the dump, or else a run of tokens of the loss."""
        first = self.starts[:-1][self.lengths > 0]
        before = np.concatenate([[False], self.mask[:-1]])
        before[first] = False
        begins = np.where(np.isnan(self.turn_ids), self.mask & ~before, np.diff(self.turn_ids, prepend=0) != 0)
        begins[first] = True
        return np.cumsum(begins)

    # Of each sequence -------------------------------------------------------------------------------------------------

    @cached_property
    def represents(self) -> NDArray[np.bool_]:
        """Sequences that represent the batch: those that were drawn at random, or all if none were."""
        return self.sampled if self.sampled.any() else np.ones(len(self), bool)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums over the tokens of each sequence."""
        return np.bincount(self.row, weights=values, minlength=len(self))

    # Of some sequences ------------------------------------------------------------------------------------------------

    def slice(self, row: int) -> slice:
        """Slice of the tokens of a sequence."""
        return slice(int(self.starts[row]), int(self.starts[row + 1]))

    @property
    def has_text(self) -> bool:
        """True if the text of the tokens was read."""
        return self._text is not None

    def text(self, row: int, place: int) -> str:
        """Text of one token of a sequence."""
        return self._text["tokens"][int(row)].values[place].as_py() or ""

    def texts(self, row: int) -> list[str]:
        """Text of the tokens of a sequence."""
        return [text or "" for text in self._text["tokens"][int(row)].as_py()]

    def prompt(self, row: int) -> str:
        """Prompt of a sequence."""
        return self._text["prompt"][int(row)].as_py() or ""


def pad(values: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
    """Sequences that lie end to end, below each other: `(B, T)` with zeros after the end of each, and `T` at least 1."""
    inside = torch.arange(max(int(lengths.max()), 1)) < torch.from_numpy(lengths)[:, None]
    flat = torch.from_numpy(values)
    padded = flat.new_zeros(inside.shape)
    padded[inside] = flat
    return padded
