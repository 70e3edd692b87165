"""
Sequences on disk: what a row of a dump holds, how it is written, and how it is read back.

A dump is a folder of Parquet files, one per optimizer step and process that had something to write. A file appears under its
name only when it is complete, so that a crash loses at most the file being written. No TRL here.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq


# Bumped when a column changes its meaning; readers refuse what they do not know.
FORMAT, VERSION = "trl_rollout_corr.dump", 1

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),  # optimizer steps made when the sequence was trained on
        ("rank", pa.int32()),
        ("sampled", pa.bool_()),  # drawn at random: these rows represent the batch
        ("worst", pa.bool_()),  # among those with the largest |log-ratio| of a token
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("tokens", pa.list_(pa.string())),  # text of each token of the completion; all lists have this length
        ("token_ids", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.bool_())),  # tokens of the loss
        ("train_logps", pa.list_(pa.float32())),  # nats; NaN and infinity as they came
        ("rollout_logps", pa.list_(pa.float32())),
        (
            "weights",
            pa.list_(pa.float32()),
        ),  # importance weights after bounding and normalisation; null without weights
        ("keep", pa.list_(pa.bool_())),  # what no criterion rejects
        ("coefficients", pa.list_(pa.float32())),  # what multiplies the policy gradient
        ("reward", pa.float32()),
        ("advantage", pa.float32()),
        ("staleness", pa.int32()),  # optimizer steps since the weights that sampled; null if unknown
    ]
)

_LOGS = "logs.jsonl"
_NAME = re.compile(r"step-(\d+)-rank-(\d+)\.parquet")


class Dump(NamedTuple):
    """
    What a dump holds.

    Args:
        rows (`list[dict]`):
            One per sequence, with the columns of `SCHEMA`, in order of steps.
        settings (`dict`):
            Fields of [`RolloutCorrectionConfig`] in effect at the last step.
        logs (`list[dict]`):
            What the trainer logged, one entry per logging step. Empty for a dump without them.
    """

    rows: list[dict[str, Any]]
    settings: dict[str, Any]
    logs: list[dict[str, Any]]


def write_rows(
    folder: Path, step: int, rank: int, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> Path:
    """
    Write the rows of one step and process.

    Args:
        folder (`Path`):
            Folder of the dump; made if it is not there.
        step (`int`):
            Optimizer steps made so far.
        rank (`int`):
            Process that writes.
        rows (`Sequence[Mapping]`):
            Rows, with the columns of `SCHEMA`.
        settings (`Mapping`):
            Fields of [`RolloutCorrectionConfig`] in effect.

    Returns:
        `Path`: the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {FORMAT: str(VERSION), "settings": json.dumps(dict(settings))}
    table = pa.Table.from_pylist(list(rows), schema=SCHEMA.with_metadata(metadata))
    path = folder / f"step-{step:08d}-rank-{rank:05d}.parquet"
    partial = path.with_suffix(".partial")
    pq.write_table(table, partial, compression="zstd")
    os.replace(partial, path)
    return path


def append_log(folder: Path, entry: Mapping[str, Any]):
    """Add what the trainer logged to the dump, as one line of JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOGS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(dict(entry)) + "\n")


def remove_oldest(folder: Path, max_bytes: float):
    """
    Delete the files of the oldest steps until the others fit. The first step stays, to compare with, and the latest.

    Args:
        folder (`Path`):
            Folder of the dump.
        max_bytes (`float`):
            Bytes that its Parquet files may take.
    """
    sizes = {path: _size(path) for path in files_of(folder)}
    total = sum(sizes.values())
    steps = sorted({_step(path) for path in sizes})
    for step in steps[1:-1]:
        if total <= max_bytes:
            return
        for path in [path for path in sizes if _step(path) == step]:
            total -= sizes[path]
            path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # a process of another machine, which writes to the same disk, was faster
        return 0


def rewind(folder: Path, step: int, *, logs: bool = True):
    """
    Forget what came after a step, because the run goes on from there.

    Args:
        folder (`Path`):
            Folder of the dump.
        step (`int`):
            Optimizer step of the checkpoint.
        logs (`bool`, *optional*, defaults to `True`):
            Rewind the log, too. One process does that.
    """
    for path in files_of(folder):
        if _step(path) > step:
            path.unlink(missing_ok=True)
    path = folder / _LOGS
    if logs and path.exists():
        kept = [entry for entry in read_logs(folder) if entry["step"] <= step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
        os.replace(partial, path)


def files_of(folder: Path) -> list[Path]:
    """Complete files of a dump, in order of steps."""
    return sorted(path for path in folder.glob("step-*.parquet") if _NAME.fullmatch(path.name))


def read_dump(path: str | Path) -> Dump:
    """
    Read a dump.

    Args:
        path (`str` or `Path`):
            Its folder, or one of its files.

    Returns:
        [`Dump`]: its rows, and the settings it was made with.

    Raises:
        `ValueError`: in one line, if there is no dump, or a file is damaged or of another tool.
    """
    table, settings = read_table(path)
    folder = Path(path)
    return Dump(table.to_pylist(), settings, read_logs(folder))


def read_table(path: str | Path, columns: list[str] | None = None) -> tuple[pa.Table, dict[str, Any]]:
    """
    Read the rows of a dump as one Arrow table, which takes a tenth of the memory of lists.

    Args:
        path (`str` or `Path`):
            Folder of the dump, or one of its files.
        columns (`list[str]`, *optional*):
            Columns of `SCHEMA` to read. All by default.

    Returns:
        `tuple[pa.Table, dict]`: the rows in order of steps, and the settings in effect at the last step.

    Raises:
        `ValueError`: in one line, if there is no dump, or a file is damaged or of another tool.
    """
    path = Path(path)
    try:
        files = files_of(path) if path.is_dir() else [path] if path.exists() else None
    except OSError as error:
        raise ValueError(error.strerror) from None
    if files is None:
        raise ValueError("no such file or folder")
    if not files:
        raise ValueError("no dump here: a folder that `rollout_dump_dir` named holds files step-*.parquet")
    tables, settings = [], {}
    for file in files:
        table, settings = _read_file(file, columns)
        tables.append(table)
    table = pa.concat_tables(tables)
    if not table.num_rows:
        raise ValueError("the dump holds no sequences")
    return table, settings


def _read_file(path: Path, columns: list[str] | None = None) -> tuple[pa.Table, dict[str, Any]]:
    try:
        # not `read_table`, which takes a folder named lr=1e-6 for a column
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


def read_logs(path: Path) -> list[dict[str, Any]]:
    """What the trainer logged, from the folder of a dump. Empty if there is none, or for a single file."""
    logs = path / _LOGS
    return list(_complete(logs.read_text(encoding="utf-8", errors="replace").splitlines())) if logs.is_file() else []


def _complete(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    """Entries with a step. A crash may have cut a line short."""
    for line in lines:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int | float):
            yield entry


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else -1
