"""The reader of a dump: [`open_dump`] returns everything that its files hold."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from .claims import find_dump, later_dump
from .columns import FORMAT, VERSION
from .folder import files_of
from .sequences import Sequences


class Dump(NamedTuple):
    """A dump."""

    path: Path  # folder with the files, or the only file that was read
    sequences: Sequences  # in order of steps
    settings: dict[str, Any]  # in effect at the last step
    about: dict[str, str]  # `model`, `trainer`, `date`, types and adapter, where known
    damage: list[str]  # a sentence about each file that cannot be read, and about the dump of a later run beside it


def open_dump(path: str | Path) -> Dump:
    """
    Read a dump: its folder, one of its files, or the folder of a run with a dump in it. Damaged files are left out, as the
    other files are still a sample of the run. A `ValueError` of one line if nothing can be read.
    """
    try:
        path = Path(path)
        dump = (find_dump(path) if path.is_dir() else None) or path
        later = later_dump(dump) if dump == path and path.is_dir() else None
    except OSError as error:
        raise ValueError(error.strerror) from None
    table, settings, about, damage = read_table(dump)
    if later is not None:
        damage.append(f"{str(later)!r} has the dump of a later run")
    return Dump(dump, Sequences(table), settings, about, damage)


def read_table(path: str | Path) -> tuple[pa.Table, dict[str, Any], dict[str, str], list[str]]:
    """The rows of a dump in order of steps, its settings, the facts about the run, and a sentence for each damaged file."""
    path = Path(path)
    files = files_of(path) if path.is_dir() else [path]
    if not path.exists():
        raise ValueError("no such file or folder")
    if not files:
        raise ValueError(
            "this folder does not contain a dump. Name the folder of `rollout_dump_dir`, which contains files step-*.parquet"
        )
    read, damage = [], []
    for file in files:
        try:
            read.append(_read_file(file))
        except ValueError as error:
            damage.append(f"{error}. It is left out")
            if len(damage) == len(files):
                raise
    tables, metadata = zip(*read, strict=True)
    table = pa.concat_tables(tables)
    if not table.num_rows:
        raise ValueError("the dump holds no sequences")
    return table, metadata[-1]["settings"], metadata[0]["about"], damage


def _read_file(path: Path) -> tuple[pa.Table, dict[str, dict[str, Any]]]:
    """The rows and the metadata of a file, or a `ValueError` about a file that is damaged or not of this format."""
    try:
        # not `read_table` of PyArrow, which takes a folder named lr=1e-6 for a column
        with pq.ParquetFile(path) as file:
            metadata = file.schema_arrow.metadata or {}
            table = file.read().replace_schema_metadata()
            table.validate(full=True)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path.name} is damaged, or it is not a Parquet file: {reason}") from None
    version = metadata.get(FORMAT.encode())
    if version is None:
        raise ValueError(f"{path.name} is a Parquet file, but `rollout_dump_dir` did not write it")
    if version != str(VERSION).encode():
        raise ValueError(
            f"{path.name} has version {version.decode()} of the dump format, but this release reads version {VERSION}"
        )
    return table, {key: json.loads(metadata.get(key.encode(), b"{}")) for key in ("settings", "about")}
