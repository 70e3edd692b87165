"""The reader of a dump: from Parquet to flat arrays, and from those to padded tensors."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from .writing import ADDED, FORMAT, SCHEMA, VERSION, files_of


# Columns with a value per sequence or per token. The text takes most of the room, and not everyone needs it.
_LISTS = ["mask", "train_logps", "rollout_logps", "keep", "coefficients"]
NUMBERS = ["step", "sampled", "worst", "reward", "advantage", *_LISTS]
TEXTS = ["prompt", "tokens"]
# What else a log-ratio could depend on, for a diagnosis
CONTEXT = ["token_ids", "staleness", "prompt_ids", "padding", "again_logps"]
# Lists with an entry per token, and what may be null
_PER_TOKEN = [*_LISTS, "tokens", "token_ids", "weights", "again_logps"]
_NULLABLE = {"prompt", "completion", "weights", "staleness", "prompt_ids", "padding", "again_logps"}


class Sequences:
    """
    `B` sequences of a dump as arrays: one entry per sequence, or one per token with all sequences end to end.

    Args:
        table (`pa.Table`):
            Columns of [`~trl_rollout_corr.dumps.writing.SCHEMA`]. The lists of a row have one length.
    """

    def __init__(self, table: pa.Table):
        self.lengths = _lengths(table["mask"])
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.step, self.reward, self.advantage = (table[name].to_numpy() for name in ("step", "reward", "advantage"))
        self.sampled, self.worst = (table[name].to_numpy().astype(bool) for name in ("sampled", "worst"))
        self.mask, self.keep = (_flat(table[name]).astype(bool) for name in ("mask", "keep"))
        self.train_logps, self.rollout_logps = _flat(table["train_logps"]), _flat(table["rollout_logps"])
        self.coefficients = _flat(table["coefficients"])
        self._texts = table.select([name for name in TEXTS if name in table.column_names])

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

    def text(self, row: int, place: int) -> str:
        """Text of one token of a sequence."""
        return self._texts["tokens"][int(row)].values[place].as_py() or ""

    def texts(self, row: int) -> list[str]:
        """Text of the tokens of a sequence."""
        return [text or "" for text in self._texts["tokens"][int(row)].as_py()]

    def prompt(self, row: int) -> str:
        """Prompt of a sequence."""
        return self._texts["prompt"][int(row)].as_py() or ""

    def padded(self, column: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        """Some sequences, by index, of an array of tokens: `(B, T)`."""
        return pad(np.concatenate([column[self.slice(row)] for row in rows]), self.lengths[rows])


def _lengths(lists: pa.ChunkedArray) -> np.ndarray:
    return pc.list_value_length(lists).to_numpy()


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


class Written(NamedTuple):
    """
    What is in the files of a dump besides sequences.

    Args:
        settings (`dict`):
            Settings in effect at the last step.
        about (`dict`):
            What the run is: its `model`, `trainer` and `date`, as far as it is known.
        damage (`list[str]`):
            A sentence about each file that could not be read.
    """

    settings: dict[str, Any]
    about: dict[str, str]
    damage: list[str]


def read_sequences(
    path: str | Path, *, sampled_only: bool = False, steps: tuple[int, int] | None = None
) -> tuple[Sequences, Written]:
    """
    Read the sequences of a dump, without their text. Of its files, those that are damaged are left out; the rest is still a
    sample of the run.

    Args:
        path (`str` or `Path`):
            Folder of the dump, or one of its files.
        sampled_only (`bool`, *optional*, defaults to `False`):
            Whether to leave out sequences that were chosen because they are the worst.
        steps (`tuple[int, int]`, *optional*):
            First and last optimizer step to take. All by default.

    Returns:
        `tuple[Sequences, Written]`: the sequences in order of steps, and what else the files say.

    Raises:
        `ValueError`: in one line, if there is no dump, no file can be read, a file is of another tool, or nothing in it is
            asked for.
    """
    table, written = read_table(path, NUMBERS)
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
    return Sequences(table), written


# Files --------------------------------------------------------------------------------------------------------------------


def find_dump(folder: Path) -> Path | None:
    """The dump in a folder: the folder itself, or the folder below it that was written to last; `None` if there is none."""
    if files_of(folder):
        return folder
    below = [path for path in sorted(folder.iterdir()) if path.is_dir() and files_of(path)]
    return max(below, key=lambda path: files_of(path)[-1].stat().st_mtime_ns, default=None)


class _Damaged(ValueError):
    """A file of a dump that cannot be read, as after a crash of the disk."""


def read_table(path: str | Path, columns: list[str] | None = None) -> tuple[pa.Table, Written]:
    """Columns of a dump in order of steps, as one Arrow table, and what else its files say."""
    path = Path(path)
    try:
        files = files_of(path) if path.is_dir() else [path] if path.exists() else None
    except OSError as error:
        raise ValueError(error.strerror) from None
    if files is None:
        raise ValueError("no such file or folder")
    if not files:
        raise ValueError("no dump here: a folder that `rollout_dump_dir` named holds files step-*.parquet")
    tables, metadata, damage = [], [], []
    for file in files:
        try:
            table, of_file = _read_file(file, columns)
            tables.append(table)
            metadata.append(of_file)
        except _Damaged as error:
            damage.append(f"{error}. It is left out")
            if len(damage) == len(files):
                raise ValueError(str(error)) from None
    table = pa.concat_tables(tables)
    if not table.num_rows:
        raise ValueError("the dump holds no sequences")
    return table, Written(metadata[-1]["settings"], metadata[0]["about"], damage)


def _read_file(path: Path, columns: list[str] | None) -> tuple[pa.Table, dict[str, dict[str, Any]]]:
    try:
        # not `read_table` of PyArrow, which takes a folder named lr=1e-6 for a column
        with pq.ParquetFile(path) as file:
            metadata = _metadata(file.schema_arrow, path.name)
            table = _filled_in(file.read(columns=columns).replace_schema_metadata(), columns)
            table.validate(full=True)
    except (OSError, pa.ArrowException) as error:
        raise _Damaged(f"{path.name} is damaged or not Parquet: {str(error).splitlines()[0]}") from None
    if fault := _fault(table):
        raise _Damaged(f"{path.name} is damaged: {fault}")
    return table, {key: _json(metadata, key, path.name) for key in ("settings", "about")}


def _fault(table: pa.Table) -> str | None:
    """What is wrong with the rows of a file, if anything is."""
    for name in table.column_names:
        column = table[name]
        if column.null_count and name not in _NULLABLE:
            return f"`{name}` of a row is null"
        if pa.types.is_list(column.type) and name != "tokens" and pc.list_flatten(column).null_count:
            return f"`{name}` of a row has an entry that is null"
    lists = [table[name] for name in _PER_TOKEN if name in table.column_names]
    lengths = [pc.list_value_length(x).to_numpy() for x in lists]  # NaN for null
    if any((np.isfinite(x) & (x != lengths[0])).any() for x in lengths):
        return "a row has lists of different lengths"
    return None


def _metadata(schema: pa.Schema, name: str) -> dict[bytes, bytes]:
    """Metadata of a file, once it is known to be one of ours."""
    metadata = schema.metadata or {}
    version = metadata.get(FORMAT.encode())
    if version is None:
        raise ValueError(f"{name} is Parquet, but not of a dump that `rollout_dump_dir` writes")
    known = {str(number).encode(): number for number in range(1, VERSION + 1)}
    if version not in known:
        raise ValueError(
            f"{name} is of version {version.decode()} of the dump, and this release reads versions up to {VERSION}"
        )
    later = {column for number, columns in ADDED.items() if number > known[version] for column in columns}
    if not schema.equals(pa.schema([column for column in SCHEMA if column.name not in later])):
        raise ValueError(f"{name} does not have the columns of a dump of version {known[version]}")
    return metadata


def _filled_in(table: pa.Table, columns: list[str] | None) -> pa.Table:
    """A table with the columns that are asked for, all by default; those that an old version lacks are null."""
    for column in SCHEMA:
        if column.name not in table.column_names and (columns is None or column.name in columns):
            table = table.append_column(column, pa.nulls(table.num_rows, column.type))
    return table.select(columns or SCHEMA.names)


def _json(metadata: Mapping[bytes, bytes], key: str, name: str) -> dict[str, Any]:
    try:
        found = json.loads(metadata.get(key.encode(), b"{}"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or (key == "about" and not all(isinstance(x, str) for x in found.values())):
        raise _Damaged(f"{name} is damaged: its metadata `{key}` is not a JSON object of the kind that a run writes")
    return found
