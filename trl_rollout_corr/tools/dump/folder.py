"""
Files of a dump and the log next to them: writing, deleting and listing.

A dump is a folder of Parquet files, one for each optimizer step and process with something to write. A file appears
under its name only when it is complete, so that a crash loses at most the file being written.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...messages import plain
from ..formats import write_whole
from .columns import FORMAT, SCHEMA, VERSION


LOGS = "logs.jsonl"
_NAME = re.compile(r"step-(\d+)-rank-(\d+)\.parquet")
_GROUP = 64  # rows of a row group: the unit that a reader can skip


def write_rows(
    folder: Path,
    step: int,
    rank: int,
    rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    about: Mapping[str, str] | None = None,
) -> Path:
    """
    Write the rows of one step and process, with the settings in effect and facts about the run. Returns the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {
        FORMAT: str(VERSION),
        "settings": json.dumps(plain(settings)),
        "about": json.dumps(plain(about or {})),
    }
    table = pa.Table.from_pylist(list(rows), schema=SCHEMA.with_metadata(metadata))
    path = folder / f"step-{step:08d}-rank-{rank:05d}.parquet"
    write_whole(path, lambda file: pq.write_table(table, file, row_group_size=_GROUP, compression="zstd"))
    return path


def append_log(folder: Path, entry: Mapping[str, Any]) -> None:
    """Add an entry of the trainer's log to the dump, as one line of JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOGS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(plain(entry)) + "\n")


def remove_oldest(folder: Path, max_bytes: float) -> None:
    """Delete files of the oldest steps until the rest fits, except the first step, for comparison, and the latest."""
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
    except FileNotFoundError:  # a process on another machine with the same disk was faster
        return 0


def rewind(folder: Path, step: int, *, logs: bool = True) -> None:
    """
    Remove the entries after the step of the checkpoint where a run continues. One process also rewinds the `logs`.
    """
    for path in files_of(folder):
        if _step(path) > step:
            path.unlink(missing_ok=True)
    for path in folder.glob(".step-*.partial"):  # left by a killed process
        path.unlink(missing_ok=True)
    path = folder / LOGS
    if logs and path.exists():
        entries = [entry for entry in read_logs(folder) if entry["step"] <= step]
        write_whole(path, lambda file: file.write("".join(json.dumps(entry) + "\n" for entry in entries).encode()))


def files_of(folder: Path) -> list[Path]:
    """Complete files of a dump in order of steps, without pipes and broken links with such a name."""
    named = sorted(path for path in folder.glob("step-*.parquet") if _NAME.fullmatch(path.name))
    return [path for path in named if path.is_file()]


def read_logs(path: Path) -> list[dict[str, Any]]:
    """Entries of a dump's log that give a step, without lines that a crash cut short."""
    logs, entries = path / LOGS, []
    for line in logs.read_text(encoding="utf-8", errors="replace").splitlines() if logs.is_file() else ():
        with suppress(ValueError):
            entries.append(json.loads(line))
    return log_entries(entries)


def log_entries(entries: Iterable[object]) -> list[dict[str, Any]]:
    """Entries of a log that give a step."""
    return [entry for entry in entries if isinstance(entry, dict) and _is_step(entry.get("step"))]


def _is_step(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else -1
