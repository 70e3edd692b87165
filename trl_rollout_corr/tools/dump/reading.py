"""The reader of a dump: [`open_dump`] returns what a command needs of its files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...settings.resolve import FIELDS, Settings
from .claims import find_dump, later_dump
from .columns import COLUMNS, FORMAT, SCHEMA, VERSION
from .folder import files_of
from .in_effect import read_settings
from .sample import MOST_TOKENS, RowFacts, choose_rows
from .sequences import Sequences


_SCANNED = ("step", "sampled", "mask", "train_logps", "rollout_logps")
_FRESH = "fresh"  # column of version 8
_AT_ONCE = 500_000  # tokens decoded together
_LARGEST = 100_000_000  # a file with more tokens is none of ours


class Dump(NamedTuple):
    """A dump."""

    path: Path  # folder with the files, or the only file that was read
    sequences: Sequences  # in order of steps
    fields: dict[str, Any]  # of this package and of TRL at the last step, by name
    settings: Settings | None  # in effect by these fields; `None` if they name none, or cannot be read
    about: dict[str, str]  # `model`, `trainer`, `date`, types and adapter, where known
    damage: list[str]  # a sentence about each unreadable file, and about the dump of a later run next to it
    sample: str = ""  # a sentence about the rows, if they are a sample
    refused: str = ""  # why the settings cannot be read, such as those of another release

    @property
    def complaints(self) -> list[str]:
        """A sentence about each part of the dump that cannot be read."""
        unknown = f"the settings in the dump count as unknown (they cannot be read: {self.refused.rstrip('.')})"
        return [*self.damage, *([unknown] if self.refused else [])]


class _File(NamedTuple):
    """A file of a dump after reading its footer."""

    path: Path
    groups: list[tuple[int, int]]  # rows and tokens of each row group
    fields: dict[str, Any]
    about: dict[str, str]

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.groups)


def open_dump(path: str | Path, columns: Sequence[str] = SCHEMA.names, *, worst: bool = True) -> Dump:
    """
    Read some columns of a dump, given its folder, one of its files, or the folder of a run that contains it. A large
    dump is sampled, with the `worst` rows if needed. Damaged files are left out, because the other files are still a
    sample of the run. Raises a `ValueError` of one line if nothing can be read.
    """
    try:
        path = Path(path)
        dump = (find_dump(path) if path.is_dir() else None) or path
        later = later_dump(dump) if dump == path and path.is_dir() else None
    except OSError as error:
        raise ValueError(error.strerror) from None
    damage: list[str] = []
    files = _look_at(dump, damage)
    table, sample = _read_some(files, columns, damage, worst=worst)
    if later is not None:
        damage.append(f"{str(later)!r} contains the dump of a later run")
    fields, settings, refused = files[-1].fields, None, ""
    try:
        settings = read_settings(fields)
    except ValueError as error:
        refused = str(error)
    return Dump(dump, Sequences(table), fields, settings, _about_of(files), damage, sample, refused)


def _about_of(files: list[_File]) -> dict[str, str]:
    """Facts about a run, from its first file and completed by later ones."""
    return {**files[-1].about, **files[0].about}


# Files ---------------------------------------------------------------------------------------------------------------


def _look_at(path: Path, damage: list[str]) -> list[_File]:
    """The files of a dump that look sound. Adds a sentence about each other file to `damage`."""
    if not path.exists():
        raise ValueError("no such file or folder")
    if not path.is_dir() and not path.is_file():
        raise ValueError("this is neither a file nor a folder")
    paths = files_of(path) if path.is_dir() else [path]
    if not paths:
        raise ValueError(
            "this folder does not contain a dump. Name the folder of `rollout_dump_dir`, which contains files "
            "step-*.parquet"
        )
    return _without_damage(paths, _footer, damage)


def _without_damage(items: Sequence[Any], read: Any, damage: list[str]) -> list[Any]:
    """The result of `read` for each item that it can read. Adds a sentence about each failure; raises if all fail."""
    found, error = [], None
    for item in items:
        try:
            found.append(read(item))
        except ValueError as problem:
            error = problem
            damage.append(f"{problem}. It is left out")
    if error is not None and not found:
        raise error
    return found


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Context with a Parquet file. Errors while reading become a `ValueError` of one line with its name."""
    try:
        # not `read_table` of PyArrow, which takes a folder named lr=1e-6 for a column
        with pq.ParquetFile(path, pre_buffer=False) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path.name} is damaged, or it is not a Parquet file: {reason}") from None


def _footer(path: Path) -> _File:
    """The footer of a file. Raises a `ValueError` if the file is damaged or of another format."""
    with _opened(path) as file:
        schema, metadata = file.schema_arrow, file.schema_arrow.metadata or {}
        version = metadata.get(FORMAT.encode())
        if version is None:
            raise ValueError(f"{path.name} is a Parquet file, but `rollout_dump_dir` did not write it")
        earlier = _is_earlier(path, version.decode(errors="replace"))
        _check_schema(path, schema, earlier=earlier)
        groups = [_size(file.metadata.row_group(i)) for i in range(file.num_row_groups)]
        fields, about = (_object(path, metadata, key) for key in ("settings", "about"))
        if earlier:  # a field that no longer exists would make all settings unreadable
            fields = {name: x for name, x in fields.items() if name in FIELDS or not name.startswith("rollout_")}
    found_file = _File(path, groups, fields, {key: str(value) for key, value in about.items()})
    if found_file.tokens > _LARGEST:
        raise ValueError(f"{path.name} contains {found_file.tokens:,} tokens, more than a command can read")
    return found_file


def _is_earlier(path: Path, version: str) -> bool:
    """
    True if an earlier release wrote a file. Each version of the format added columns that may be null, or dropped one
    that nothing reads, so that its files are valid. Raises a `ValueError` for a version that this release does not
    know.
    """
    if version.isdecimal() and 1 <= int(version) <= VERSION:
        return int(version) < VERSION
    raise ValueError(
        f"{path.name} is in version {version} of the dump format, and this release reads versions 1 to {VERSION}. "
        "Read it with the release of trl-rollout-corr that wrote it, or a later one"
    )


def _check_schema(path: Path, schema: pa.Schema, *, earlier: bool) -> None:
    """Refuse a file that lacks a column of a dump, or where its type differs. An earlier release may not know one."""
    unknown = {column.name for column in COLUMNS if column.null} if earlier else set()
    for field in SCHEMA:
        if field.name not in schema.names:
            if field.name in unknown:
                continue
            raise ValueError(f"{path.name} lacks the column `{field.name}`, which every dump contains")
        found = schema.field(field.name).type
        if str(found).replace("element: ", "item: ") != str(field.type):
            raise ValueError(
                f"{path.name} stores the column `{field.name}` as {found}, and a dump stores {field.type}"
            )


def _size(group: pq.RowGroupMetaData) -> tuple[int, int]:
    """Rows and tokens of a row group."""
    columns = (group.column(i) for i in range(group.num_columns))
    tokens = max(column.num_values for column in columns if column.path_in_schema.split(".")[0] == "mask")
    return group.num_rows, tokens


def _object(path: Path, metadata: Mapping[bytes, bytes], key: str) -> dict[str, Any]:
    """A JSON object in the metadata of a file."""
    try:
        content = json.loads(metadata.get(key.encode(), b"{}").decode())
    except ValueError as error:
        raise ValueError(f"{path.name} contains damaged metadata, `{key}` is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} contains damaged metadata: `{key}` is not a JSON object")
    return content


# Rows ----------------------------------------------------------------------------------------------------------------


def _read_some(files: list[_File], columns: Sequence[str], damage: list[str], *, worst: bool) -> tuple[pa.Table, str]:
    """The rows of a dump, and a sentence about them if they are a sample."""
    total = sum(file.tokens for file in files)
    if total <= MOST_TOKENS:
        return _read_whole(files, columns, damage), ""
    scanned = _without_damage(files, lambda file: (file, _scan(file)), damage)
    rows = RowFacts(*(np.concatenate(parts) for parts in zip(*(found for _, found in scanned), strict=True)))
    if not len(rows.step):
        raise ValueError(". ".join(["the dump holds no sequences", *damage]))
    sample = choose_rows(rows, MOST_TOKENS, worst=worst)
    ends = np.cumsum([len(found.step) for _, found in scanned])
    parts = [
        (file, sample.read[end - len(found.step) : end], sample.sampled[end - len(found.step) : end])
        for (file, found), end in zip(scanned, ends.tolist(), strict=True)
    ]
    tables = _without_damage(
        [part for part in parts if part[1].any()], lambda part: _read_rows(part[0], columns, *part[1:]), damage
    )
    table = pa.concat_tables(tables)
    drawn = int(rows.sampled.sum())
    if int(sample.sampled.sum()) == drawn > 0 and not worst:
        return table, ""  # the command gets all that it uses
    read = int(rows.tokens[sample.read].sum())
    sentence = (
        f"A sample of the dump was read, because all of it would need too much memory: {int(sample.read.sum()):,} of "
        f"{len(rows.step):,} sequences, with {read / 1e6:.2g} of {total / 1e6:.2g} million tokens. They are spread "
        f"evenly over the steps, and {', '.join(sample.kept)} were kept. To read a step as a whole, name its file "
        "(step-*.parquet)"
    )
    return table, sentence


def _read_whole(files: list[_File], columns: Sequence[str], damage: list[str]) -> pa.Table:
    table = pa.concat_tables(_without_damage(files, lambda file: _read_rows(file, columns), damage))
    if not table.num_rows:
        raise ValueError(". ".join(["the dump holds no sequences", *damage]))
    return table


def _read_rows(
    file: _File, columns: Sequence[str], chosen: np.ndarray | None = None, sampled: np.ndarray | None = None
) -> pa.Table:
    """Columns of all rows of a file, or of the `chosen` ones, where the `sampled` ones represent the batch."""
    names = [name for name in SCHEMA.names if name in columns]
    batches = [*_batches(file, [*names, _FRESH], chosen)]
    schema = batches[0].schema if batches else pa.schema([SCHEMA.field(name) for name in names])
    table = pa.Table.from_batches(batches, schema).replace_schema_metadata()
    for name in [name for name in names if name not in table.column_names]:
        table = table.append_column(name, _missing_column(table, name))
    table = _checked(file.path, table.select(names))
    if chosen is not None and sampled is not None:
        place = table.schema.get_field_index("sampled")
        table = table.set_column(place, table.schema.field(place), pa.array(sampled[chosen]))
    return table


def _missing_column(table: pa.Table, name: str) -> pa.Array | pa.ChunkedArray:
    """A column that a file of an earlier version lacks: null, but for the lag of what version 8 calls fresh."""
    unknown = pa.nulls(len(table), SCHEMA.field(name).type)
    if name != "lag" or _FRESH not in table.column_names:
        return unknown
    return pc.if_else(table[_FRESH], pa.scalar(0, unknown.type), unknown)


def _scan(file: _File) -> RowFacts:
    """The facts about each row of a file that the choice of rows needs."""
    parts = []
    for batch in _batches(file, _SCANNED):
        sequences = Sequences(_checked(file.path, pa.Table.from_batches([batch])))
        distance = np.zeros(len(sequences))
        np.maximum.at(distance, sequences.row, sequences.distance)
        parts.append(RowFacts(sequences.step, sequences.sampled, sequences.lengths, distance))
    nothing = RowFacts(np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.int32), np.zeros(0))
    return RowFacts(*(np.concatenate(columns) for columns in zip(nothing, *parts, strict=True)))


def _batches(file: _File, columns: Sequence[str], chosen: np.ndarray | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of a file, or the `chosen` ones, in small batches that need little memory."""
    with _opened(file.path) as opened:
        start = 0
        for group, (n_rows, n_tokens) in enumerate(file.groups):
            end = start + n_rows
            if chosen is None or chosen[start:end].any():
                size = max(_AT_ONCE * n_rows // max(n_tokens, 1), 1)
                for batch in opened.iter_batches(size, row_groups=[group], columns=list(columns)):
                    rows = batch if chosen is None else batch.filter(pa.array(chosen[start : start + len(batch)]))
                    if len(rows):
                        yield rows
                    start += len(batch)
            start = end


def _checked(path: Path, table: pa.Table) -> pa.Table:
    """The table, or a `ValueError` if values are missing or lists differ in length."""
    try:
        table.validate(full=True)
    except pa.ArrowException as error:
        raise ValueError(f"{path.name} is damaged: {str(error).splitlines()[0]}") from None
    lengths = pc.list_value_length(table["mask"])
    for column in COLUMNS:
        if column.name not in table.column_names:
            continue
        values = table[column.name]
        if values.null_count and not column.null:
            raise ValueError(f"{path.name} is damaged: a row lacks `{column.name}`")
        if not column.per_token:
            continue
        if not pc.all(pc.equal(pc.list_value_length(values), lengths), min_count=0).as_py():
            raise ValueError(
                f"{path.name} is damaged: a row contains lists of different lengths, `mask` and `{column.name}`"
            )
        if pc.list_flatten(values).null_count and not column.gaps:
            raise ValueError(f"{path.name} is damaged: a token lacks `{column.name}`")
    return table
