"""The reader of a dump: [`open_dump`] returns everything that its files hold."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .claims import find_dump, later_dump
from .columns import FORMAT, SCHEMA, VERSION
from .files import files_of
from .sequences import READ, TEXT, Sequences


class Dump(NamedTuple):
    """A dump."""

    path: Path  # folder with the files, or the only file that was read
    sequences: Sequences  # in order of steps
    settings: dict[str, Any]  # in effect at the last step
    about: dict[str, str]  # `model`, `trainer`, `date`, types and adapter, where known
    damage: list[str]  # a sentence about each file that cannot be read, and about the dump of a later run beside it


def open_dump(path: str | Path, *, steps: tuple[int, int] | None = None) -> Dump:
    """
    Read a dump: its folder, one of its files, or the folder of a run with a dump in it. Damaged files are left out, as the
    other files are still a sample of the run. `steps` are the first and the last optimizer step to read. A `ValueError` of one
    line if nothing can be read.
    """
    try:
        path = Path(path)
        dump = (find_dump(path) if path.is_dir() else None) or path
        later = later_dump(dump) if dump == path and path.is_dir() else None
    except OSError as error:
        raise ValueError(error.strerror) from None
    table, settings, about, damage = read_table(dump, [*READ, *TEXT])
    if later is not None:
        damage.append(f"{str(later)!r} has the dump of a later run")
    if steps is not None:
        first, last = steps
        held = pc.min_max(table["step"])
        table = table.filter(pc.and_(pc.greater_equal(table["step"], first), pc.less_equal(table["step"], last)))
        if not table.num_rows:
            has = f"it has steps {held['min']} to {held['max']}"
            raise ValueError(f"the dump holds no sequences of steps {first} to {last}; {has}")
    return Dump(dump, Sequences(table), settings, about, damage)


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
    try:
        # not `read_table` of PyArrow, which takes a folder named lr=1e-6 for a column
        with pq.ParquetFile(path) as file:
            metadata = _metadata(file.schema_arrow, path.name)
            table = file.read(columns=columns).replace_schema_metadata()
            table.validate(full=True)
    except (OSError, pa.ArrowException) as error:
        raise _Damaged(f"{path.name} is damaged, or it is not a Parquet file: {str(error).splitlines()[0]}") from None
    return table, {key: json.loads(metadata.get(key.encode(), b"{}")) for key in ("settings", "about")}


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
