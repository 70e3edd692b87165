"""The reader of a dump: [`open_dump`] returns everything that its files hold."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .files import files_of
from .prime_rl import exports_in, read_exports
from .schema import FORMAT, SCHEMA, VERSION
from .sequences import OF_SEQUENCES, OF_TOKENS, Sequences


_NUMBERS = [*OF_SEQUENCES, *OF_TOKENS, "prompt_ids"]
_TEXT = ["prompt", "tokens"]
# Lists with an entry for each token, and columns that may be null
_PER_TOKEN = [*OF_TOKENS, "tokens", "weights"]
_NULLABLE = {
    "prompt", "completion", "weights", "staleness", "prompt_ids", "padding", "again_logps", "turn_ids", "token_staleness"
}  # fmt: skip


class Dump(NamedTuple):
    """A dump."""

    path: Path  # folder with the files, or the only file that was read
    sequences: Sequences  # in order of steps
    settings: dict[str, Any]  # in effect at the last step
    about: dict[str, str]  # `model`, `trainer`, `date`, types and adapter, where known
    damage: list[str]  # a sentence about each file that cannot be read


def open_dump(path: str | Path, *, steps: tuple[int, int] | None = None) -> Dump:
    """
    Read a dump. Damaged files are left out: the other files are still a sample of the run.

    Args:
        path (`str` or `Path`):
            Folder of the dump, one of its files, or the folder of a run with a dump in it; or a token export of prime-rl,
            which is read as a whole.
        steps (`tuple[int, int]`, *optional*):
            First and last optimizer step to read. All by default.

    Returns:
        [`Dump`].

    Raises:
        `ValueError`: in one line, if there is no dump, if no file can be read, if another tool wrote a file, or if no sequence
        is left.
    """
    try:
        folder = Path(path)
        dump = (find_dump(folder) if folder.is_dir() else None) or folder
        if dump == folder and not files_of(folder) and (exports := exports_in(folder)):
            return Dump(folder, Sequences.from_rows(read_exports(exports)), {}, {"trainer": "prime-rl"}, [])
    except OSError as error:
        raise ValueError(error.strerror) from None
    table, settings, about, damage = read_table(dump, [*_NUMBERS, *_TEXT])
    if steps is not None:
        first, last = steps
        held = pc.min_max(table["step"])
        table = table.filter(pc.and_(pc.greater_equal(table["step"], first), pc.less_equal(table["step"], last)))
        if not table.num_rows:
            has = f"it has steps {held['min']} to {held['max']}"
            raise ValueError(f"the dump holds no sequences of steps {first} to {last}; {has}")
    return Dump(dump, _sequences(table), settings, about, damage)


def find_dump(folder: Path) -> Path | None:
    """The dump in a folder: the folder itself, or the folder below it that was written to last; `None` if there is none."""
    if files_of(folder):
        return folder
    below = {path: files[-1] for path in sorted(folder.iterdir()) if path.is_dir() and (files := files_of(path))}
    return max(below, key=lambda path: below[path].stat().st_mtime_ns, default=None)


# From Arrow to numpy ------------------------------------------------------------------------------------------------------


def _sequences(table: pa.Table) -> Sequences:
    lengths = pc.list_value_length(table["mask"]).to_numpy()
    columns = {name: table[name].to_numpy().astype(dtype) for name, dtype in OF_SEQUENCES.items()}
    columns |= {name: _end_to_end(table[name], lengths).astype(dtype) for name, dtype in OF_TOKENS.items()}
    nothing = np.zeros(0, np.int32)
    prompts = [ids.values.to_numpy() if ids.is_valid else nothing for ids in table["prompt_ids"]]
    return Sequences(lengths, columns, prompts, table.select(_TEXT))


def _end_to_end(lists: pa.ChunkedArray, lengths: np.ndarray) -> np.ndarray:
    """Lists one after the other, with NaN for those that are null."""
    values: np.ndarray = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in lists.chunks])
    if not lists.null_count:
        return values
    filled = np.full(lengths.sum(), np.nan, np.float32)
    filled[np.repeat(lists.is_valid().to_numpy().astype(bool), lengths)] = values
    return filled


# Files --------------------------------------------------------------------------------------------------------------------


class _Damaged(ValueError):
    """A file of a dump that cannot be read, as after a crash of the disk."""


def read_table(
    path: str | Path, columns: list[str] | None = None
) -> tuple[pa.Table, dict[str, Any], dict[str, str], list[str]]:
    """Columns of a dump in order of steps, its settings, the facts about the run, and a sentence for each damaged file."""
    path = Path(path)
    files = files_of(path) if path.is_dir() else [path]
    if not path.exists():
        raise ValueError("no such file or folder")
    if not files:
        raise ValueError(
            "this folder does not contain a dump. Name the folder of `rollout_dump_dir`, which contains files step-*.parquet"
        )
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
    return table, metadata[-1]["settings"], metadata[0]["about"], damage


def _read_file(path: Path, columns: list[str] | None) -> tuple[pa.Table, dict[str, dict[str, Any]]]:
    if not path.is_file():
        raise _Damaged(f"{path.name} is not a regular file")
    try:
        # not `read_table` of PyArrow, which takes a folder named lr=1e-6 for a column
        with pq.ParquetFile(path) as file:
            metadata = _metadata(file.schema_arrow, path.name)
            table = file.read(columns=columns).replace_schema_metadata()
            table.validate(full=True)
    except (OSError, pa.ArrowException) as error:
        raise _Damaged(f"{path.name} is damaged, or it is not a Parquet file: {str(error).splitlines()[0]}") from None
    if fault := _fault(table):
        raise _Damaged(f"{path.name} is damaged: {fault}")
    return table, {key: _json(metadata, key, path.name) for key in ("settings", "about")}


def _fault(table: pa.Table) -> str | None:
    """The mistake in the rows of a file, or `None`."""
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
    """Return the metadata of a file, or refuse a file that this package did not write."""
    metadata = schema.metadata or {}
    version = metadata.get(FORMAT.encode())
    if version is None:
        raise ValueError(f"{name} is a Parquet file, but `rollout_dump_dir` did not write it")
    if version != str(VERSION).encode():
        raise ValueError(
            f"{name} has version {version.decode()} of the dump format, but this release reads version {VERSION}"
        )
    if not schema.equals(SCHEMA):
        raise ValueError(f"{name} does not have the columns of a dump of version {VERSION}")
    return metadata


def _json(metadata: Mapping[bytes, bytes], key: str, name: str) -> dict[str, Any]:
    try:
        content = json.loads(metadata.get(key.encode(), b"{}"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or (key == "about" and not all(isinstance(x, str) for x in content.values())):
        raise _Damaged(f"{name} is damaged: its metadata `{key}` is not a JSON object of the kind that a run writes")
    return content
