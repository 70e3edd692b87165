"""
Histories in files of trackers: an offline run of W&B, TensorBoard and Trackio. Their libraries are imported when
needed.
"""

import json
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from .tables import History, Runs, by_run


EVENTS = "events.out.tfevents"  # in the name of a file of TensorBoard
# A file of W&B is a log of LevelDB: blocks of records, whose header holds a checksum, a length and a type
_BLOCK, _HEADER = 32768, struct.Struct("<IHB")
_BEGINNING = b":W&B"
_WHOLE, _FIRST, _LAST = 1, 2, 4  # types of a record or of its parts


def from_tensorboard(path: Path) -> Runs:
    """Scalars of TensorBoard by step, from a file of events or a folder with such files."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    events = EventAccumulator(str(path), size_guidance={SCALARS: 0})  # all of them
    events.Reload()
    rows: dict[int, dict[str, Any]] = {}
    for tag in events.Tags()[SCALARS]:
        for event in events.Scalars(tag):
            rows.setdefault(event.step, {"step": event.step})[tag] = event.value
    return {"": [rows[step] for step in sorted(rows)]}


def from_trackio(path: Path) -> Runs:
    """Runs of a project of Trackio, from its database."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            columns = [row[1] for row in database.execute("PRAGMA table_info(metrics)")]
            if not {"run_name", "step", "metrics"} <= {*columns}:
                raise ValueError(f"{path.name} is a database, but not one of Trackio: it has no table `metrics`")
            identity = "run_id" if "run_id" in columns else "run_name"
            found = database.execute(f"SELECT {identity}, run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    except sqlite3.Error as error:
        raise ValueError(f"{path.name} is damaged, or it is no database of Trackio: {error}") from None
    rows = []
    for identity, name, step, written in found:
        metrics = json.loads(written)
        if isinstance(metrics, dict):
            rows.append({**metrics, "_step": step, "run_id": identity, "run_name": name})
    return by_run(rows)


def from_wandb(path: Path) -> Runs:
    """
    The history of a run that W&B kept on disk (`run-*.wandb`), also of an offline run. W&B's library defines the
    records; it offers no reader, so that the frame around them is read here.
    """
    from wandb.proto import wandb_internal_pb2

    rows: History = []
    for record in _records(path):
        message = wandb_internal_pb2.Record()  # type: ignore[attr-defined]  # made of a description at run time
        message.ParseFromString(record)
        if message.WhichOneof("record_type") == "history":
            items = message.history.item
            rows.append({item.key or ".".join(item.nested_key): _content(item.value_json) for item in items})
    return {"": rows}


def _content(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _records(path: Path) -> Iterator[bytes]:
    """Records of a log of LevelDB, up to the first one that is damaged or cut short."""
    content = path.read_bytes()
    if not content.startswith(_BEGINNING):
        raise ValueError(f"{path.name} is no run of W&B: it does not begin with {_BEGINNING.decode()!r}")
    place, parts = len(_BEGINNING) + 3, b""  # the beginning, a number of two bytes, and a version
    while place + _HEADER.size <= len(content):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER.size:  # padding at the end of a block
            place += left
            continue
        _, length, kind = _HEADER.unpack_from(content, place)
        place += _HEADER.size
        part = content[place : place + length]
        place += length
        if len(part) < length or not 1 <= kind <= _LAST:
            return
        parts = part if kind in (_WHOLE, _FIRST) else parts + part
        if kind in (_WHOLE, _LAST):
            yield parts
