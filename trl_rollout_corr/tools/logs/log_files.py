"""
Logs of a run in a folder, and files of any kind read as the trainer's log. Only the log in a dump is read elsewhere
([`~trl_rollout_corr.tools.dump.folder.read_logs`]).
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..dump.claims import find_dump
from ..dump.columns import FORMAT
from ..dump.folder import log_entries
from ..monitor.history import WITHOUT_METRICS, as_logged, is_window
from .tables import Runs, from_csv, from_json, from_parquet
from .trackers import EVENTS, from_tensorboard, from_trackio, from_wandb


STATE = "trainer_state.json"
_READERS: dict[str, Callable[[Path], Runs]] = {
    ".json": from_json,
    ".jsonl": from_json,
    ".ndjson": from_json,
    ".csv": from_csv,
    ".tsv": from_csv,
    ".parquet": from_parquet,
    ".wandb": from_wandb,
    ".db": from_trackio,
}
KINDS = (
    f"{STATE}, a history of W&B (JSON, lines of JSON, CSV, Parquet, or the folder of an offline run), files of events "
    "of TensorBoard, or a database of Trackio"
)
# Where trackers keep a run below its `output_dir`, or in the folder that they are given, the best first
_PLACES = (
    ("*.wandb", "files/*.wandb", "*run-*/*.wandb", "wandb/*run-*/*.wandb"),
    (f"{EVENTS}*", f"*/{EVENTS}*", f"runs/*/{EVENTS}*"),
    ("*.db",),
)


# Where logs are ------------------------------------------------------------------------------------------------------


def split_source(source: str) -> tuple[Path, str]:
    """The path of a source, and the name of a run in it: `project.db#run` names one of several."""
    path, mark, run = source.rpartition("#")
    return (Path(path), run) if mark and not Path(source).exists() else (Path(source), "")


def logs_of(folder: Path) -> list[Path]:
    """
    Logs in the folder of a run, the best first: the state of its trainer, the states of its checkpoints, or what a
    tracker has written there.
    """
    checkpoints = sorted(
        folder.glob(f"checkpoint-*/{STATE}"), key=lambda path: (len(path.parent.name), path), reverse=True
    )
    if states := [path for path in (folder / STATE, *checkpoints) if path.is_file()]:
        return states
    for patterns in _PLACES:
        for pattern in patterns:
            found = [path for path in folder.glob(pattern) if path.is_file()]
            if found:
                parents = [path.parent for path in found] if EVENTS in pattern else found
                return sorted(dict.fromkeys(parents), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return []


def parts_of(path: Path) -> tuple[list[Path], Path | None]:
    """Logs of a run, the best first, and the dump (folder or file), in or at a path."""
    if path.is_dir():
        logs, dump = logs_of(path), find_dump(path)
        if not logs and dump is None:
            raise ValueError(f"it contains neither a dump (files step-*.parquet) nor a log ({KINDS})")
        return logs, dump
    if path.is_file():
        if is_log(path):
            return [path], None
        if path.suffix == ".parquet":
            return [], path
        raise ValueError(f"this is neither a file of a dump (step-*.parquet) nor a log that can be read ({KINDS})")
    if path.exists():
        raise ValueError("this is neither a file nor a folder")
    raise ValueError("no such file or folder")


def is_log(path: Path) -> bool:
    """True for a file that is a log, and not one of a dump."""
    if path.suffix == ".parquet":
        try:
            return FORMAT.encode() not in (pq.read_schema(path).metadata or {}) and _looks_like_history(
                pq.read_schema(path)
            )
        except (OSError, pa.ArrowException):
            return False  # the reader of a dump says what is wrong
    return EVENTS in path.name or path.suffix in _READERS


def refuse_log(source: str) -> None:
    """Raise a `ValueError` of one line for a log where the completions of a dump are needed."""
    path, _ = split_source(source)
    only_logs = path.is_dir() and find_dump(path) is None and bool(logs_of(path))
    if only_logs or (path.is_file() and is_log(path)):
        what = "this folder contains a log and no dump" if only_logs else f"{path.name} is a log"
        raise ValueError(
            f"{what}, and `compare` needs the completions of a dump: set `rollout_dump_dir`, and train a few steps "
            "with a trainer of this package. `trl-rollout-corr diagnose` and `report` read the log"
        )


def _looks_like_history(schema: pa.Schema) -> bool:
    return bool({"_step", "run_name", "run_id", "train/global_step"} & {*schema.names})


# Reading -------------------------------------------------------------------------------------------------------------


def first_readable(paths: list[Path], damage: list[str], *, needed: bool, run: str = "") -> list[dict[str, Any]]:
    """
    The log of the first readable path. Adds a sentence to `damage` about each other one, and about further runs.
    Without a readable log, raises a `ValueError` about the first if `needed`.
    """
    errors = []
    for i, path in enumerate(paths):
        try:
            entries = read_log(path, damage, run)
        except ValueError as error:
            errors.append(error)
            damage.append(f"{error}. It is left out")
        else:
            others = [one.parent.name if one.suffix == ".wandb" else one.name for one in paths[i + 1 :]]
            if others and path.name != STATE:
                damage.append(
                    f"it also contains the logs {', '.join(others)}, and the latest one, {path.name}, is read"
                )
            return entries
    if needed:
        raise errors[0]
    return []


def read_log(path: Path, damage: list[str], run: str = "") -> list[dict[str, Any]]:
    """
    Entries of a log as the trainer logged them. Adds a sentence to `damage` if the file contains further runs. Raises
    a `ValueError` of one line for a file without metrics that can be used.
    """
    runs = _read(path)
    name, rows = _chosen(path, runs, run)
    if len(runs) > 1 and not run:
        others = ", ".join(f"`{other}`" for other in runs if other != name)
        damage.append(
            f"{path.name} also contains the runs {others}, and the latest, `{name}`, is read. `{path.name}#NAME` "
            "names one"
        )
    if not rows:
        raise ValueError(f"{path.name} holds no log entries yet")
    entries = as_logged(rows)
    if not any(map(is_window, entries)):
        raise ValueError(f"{path.name} {WITHOUT_METRICS}")
    if not any(is_window(entry) and "step" in entry for entry in entries):
        raise ValueError(
            f"{path.name} does not tell the optimizer step: it needs a column `train/global_step` or `step`"
        )
    return entries


def _read(path: Path) -> Runs:
    try:
        if path.is_dir() or EVENTS in path.name:
            return from_tensorboard(path)
        return _READERS[path.suffix](path)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        raise ValueError(
            f"{path.name} can be read by the library {library}, which is missing: pip install {library}"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is damaged or not text: {error}") from None
    except (ValueError, OSError):
        raise
    except Exception as error:  # of a library, about a file that is damaged
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path.name} cannot be read: {reason}") from None


def _chosen(path: Path, runs: Runs, run: str) -> tuple[str, list[dict[str, Any]]]:
    """The named run, or else the last one that has metrics."""
    if run and run not in runs:
        raise ValueError(
            f"{path.name} has no run {run!r}. Its runs are "
            f"{', '.join(map(repr, filter(None, runs))) or 'without a name'}"
        )
    if run:
        return run, runs[run]
    useful = [name for name, rows in runs.items() if any(map(is_window, as_logged(rows)))] or [*runs]
    return (useful[-1], runs[useful[-1]]) if useful else ("", [])


def merge(entries: Iterable[Mapping[str, object]]) -> list[dict[str, object]]:
    """Entries of training windows, one per step. Keys of a later entry replace keys of an earlier one."""
    merged: dict[int, dict[str, object]] = {}
    for entry in log_entries(entries):
        if is_window(entry):
            step = int(entry["step"])
            merged.setdefault(step, {}).update(entry, step=step)
    return [merged[step] for step in sorted(merged)]
