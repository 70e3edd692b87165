"""The reader of a dump: from Parquet to flat arrays, and from those to padded tensors."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from ..dump import FORMAT, SCHEMA, VERSION, files_of


# Columns with a value per sequence or per token. The text takes most of the room, and not everyone needs it.
_LISTS = ["mask", "train_logps", "rollout_logps", "keep", "coefficients"]
_NUMBERS = ["step", "sampled", "worst", "reward", "advantage", *_LISTS]
_TEXTS = ["prompt", "tokens"]


class Sequences:
    """
    `B` sequences of a dump as arrays: one entry per sequence, or one per token with all sequences end to end.

    Args:
        table (`pa.Table`):
            Columns of [`~trl_rollout_corr.dump.SCHEMA`].

    Raises:
        `ValueError`: if the lists of a row differ in length.
    """

    def __init__(self, table: pa.Table):
        lists = [name for name in (*_LISTS, "tokens") if name in table.column_names]
        self.lengths, *others = (pc.fill_null(pc.list_value_length(table[name]), 0).to_numpy() for name in lists)
        if not all(np.array_equal(self.lengths, other) for other in others):
            raise ValueError("a row of the dump has lists of different lengths")
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.step, self.reward, self.advantage = (table[name].to_numpy() for name in ("step", "reward", "advantage"))
        self.sampled, self.worst = (table[name].to_numpy().astype(bool) for name in ("sampled", "worst"))
        self.mask, self.keep = (_flat(table[name]).astype(bool) for name in ("mask", "keep"))
        self.train_logps, self.rollout_logps = _flat(table["train_logps"]), _flat(table["rollout_logps"])
        self.coefficients = _flat(table["coefficients"])
        self._texts = table.select([name for name in _TEXTS if name in table.column_names])

    def __len__(self) -> int:
        return len(self.step)

    # Of each token ----------------------------------------------------------------------------------------------------

    @cached_property
    def log_ratio(self) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return self.train_logps - self.rollout_logps

    @cached_property
    def valid(self) -> np.ndarray:
        """Tokens of the loss with a finite log-ratio."""
        return self.mask & np.isfinite(self.log_ratio)

    @cached_property
    def broken(self) -> np.ndarray:
        """Tokens of the loss without one."""
        return self.mask & ~np.isfinite(self.log_ratio)

    @cached_property
    def counted(self) -> np.ndarray:
        """Valid tokens of the sequences that represent the batch."""
        return self.valid & self.represents[self.row]

    @cached_property
    def row(self) -> np.ndarray:
        """Index of its sequence."""
        return np.repeat(np.arange(len(self), dtype=np.int32), self.lengths)

    # Of each sequence -------------------------------------------------------------------------------------------------

    @cached_property
    def represents(self) -> np.ndarray:
        """Sequences that represent the batch: those that were drawn at random, or all if none were."""
        return self.sampled if self.sampled.any() else np.ones(len(self), bool)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums over the tokens of each sequence."""
        return np.bincount(self.row, weights=values, minlength=len(self))

    # Of some sequences ------------------------------------------------------------------------------------------------

    def slice(self, row: int) -> slice:
        """Where the tokens of a sequence are."""
        return slice(int(self.starts[row]), int(self.starts[row + 1]))

    def texts(self, row: int) -> list[str]:
        """Text of the tokens of a sequence."""
        return [text or "" for text in self._texts["tokens"][int(row)].as_py()]

    def prompt(self, row: int) -> str:
        """Prompt of a sequence."""
        return self._texts["prompt"][int(row)].as_py() or ""

    def padded(self, column: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        """Some sequences, by index, of an array of tokens: `(B, T)`."""
        return pad(np.concatenate([column[self.slice(row)] for row in rows]), self.lengths[rows])


def _flat(lists: pa.ChunkedArray) -> np.ndarray:
    """Lists end to end."""
    return np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in lists.chunks])


def pad(values: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
    """Sequences that lie end to end, below each other: `(B, T)` with zeros after the end of each, and `T` at least 1."""
    inside = torch.arange(max(int(lengths.max()), 1)) < torch.from_numpy(lengths)[:, None]
    flat = torch.from_numpy(values)
    padded = flat.new_zeros(inside.shape)
    padded[inside] = flat
    return padded


def read_sequences(
    path: str | Path, *, texts: bool = False, sampled_only: bool = False, steps: tuple[int, int] | None = None
) -> tuple[Sequences, dict[str, Any]]:
    """
    Read the sequences of a dump.

    Args:
        path (`str` or `Path`):
            Folder of the dump, or one of its files.
        texts (`bool`, *optional*, defaults to `False`):
            Whether to read prompts and the text of tokens.
        sampled_only (`bool`, *optional*, defaults to `False`):
            Whether to leave out sequences that were chosen because they are the worst.
        steps (`tuple[int, int]`, *optional*):
            First and last optimizer step to take. All by default.

    Returns:
        `tuple[Sequences, dict]`: the sequences in order of steps, and the settings in effect at the last step.

    Raises:
        `ValueError`: in one line, if there is no dump, a file is damaged or of another tool, or nothing in it is asked for.
    """
    table, settings = read_table(path, _NUMBERS + _TEXTS if texts else _NUMBERS)
    if steps is not None:
        first, last = steps
        table = table.filter(pc.and_(pc.greater_equal(table["step"], first), pc.less_equal(table["step"], last)))
        if not table.num_rows:
            raise ValueError(f"the dump holds no sequences of steps {first} to {last}")
    if sampled_only:
        table = table.filter(table["sampled"])
        if not table.num_rows:
            raise ValueError(
                "no sequence was drawn at random (`rollout_dump_sampled`), and the worst ones do not represent the batch; "
                "take them with --worst"
            )
    return Sequences(table), settings


# Files --------------------------------------------------------------------------------------------------------------------


def read_table(path: str | Path, columns: list[str] | None = None) -> tuple[pa.Table, dict[str, Any]]:
    """Columns of a dump in order of steps, as one Arrow table, and the settings in effect at the last step."""
    path = Path(path)
    try:
        files = files_of(path) if path.is_dir() else [path] if path.exists() else None
    except OSError as error:
        raise ValueError(error.strerror) from None
    if files is None:
        raise ValueError("no such file or folder")
    if not files:
        raise ValueError("no dump here: a folder that `rollout_dump_dir` named holds files step-*.parquet")
    tables, settings = zip(*(_read_file(file, columns) for file in files), strict=True)
    table = pa.concat_tables(tables)
    if not table.num_rows:
        raise ValueError("the dump holds no sequences")
    return table, settings[-1]


def _read_file(path: Path, columns: list[str] | None) -> tuple[pa.Table, dict[str, Any]]:
    try:
        # not `read_table` of PyArrow, which takes a folder named lr=1e-6 for a column
        with pq.ParquetFile(path) as file:
            settings = _settings(file.schema_arrow, path.name)
            return file.read(columns=columns).replace_schema_metadata(), settings
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path.name} is damaged or not Parquet: {str(error).splitlines()[0]}") from None


def _settings(schema: pa.Schema, name: str) -> dict[str, Any]:
    """Settings from the metadata of a file, once it is known to be one of ours."""
    metadata = schema.metadata or {}
    version = metadata.get(FORMAT.encode())
    if version is None:
        raise ValueError(f"{name} is Parquet, but not of a dump that `rollout_dump_dir` writes")
    if version != str(VERSION).encode():
        raise ValueError(
            f"{name} is of version {version.decode()} of the dump, and this release reads version {VERSION}"
        )
    if not schema.equals(SCHEMA):
        raise ValueError(f"{name} does not have the columns of a dump of version {VERSION}")
    return json.loads(metadata[b"settings"])
