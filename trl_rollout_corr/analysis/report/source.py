"""What to report on: a dump, a run of a trainer, or both."""

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ... import dump
from ...config import RolloutCorrectionConfig
from ...correction import compute_rollout_correction
from ...metrics import PREFIX
from ...rules import is_training_window
from .table import Table


STATE = "trainer_state.json"


class Source(NamedTuple):
    """
    What a report is made of.

    Args:
        name (`str`):
            Name of the run or dump.
        logs (`list[dict]`):
            Log entries with metrics of rollout correction, in order of steps.
        logged_by (`str`):
            Where they are from: `"trainer"`, or `"dump"` if they were computed from its rows.
        table ([`Table`] or `None`):
            Rows of the dump.
        config ([`RolloutCorrectionConfig`] or `None`):
            Settings, where a dump says them.
    """

    name: str
    logs: list[dict[str, Any]]
    logged_by: str
    table: Table | None
    config: RolloutCorrectionConfig | None


def load(path: Path) -> Source:
    """
    Read a run or a dump.

    Args:
        path (`Path`):
            A dump (folder or file), a `trainer_state.json`, or a folder that holds either or both.

    Returns:
        [`Source`]: what was found.

    Raises:
        `ValueError`: in one line, if there is neither, or a file is damaged or of another tool.
    """
    try:
        state, folder = _find(path)
        if state is None and folder is None:
            raise ValueError(f"neither a dump (files step-*.parquet) nor a run ({STATE}) is here")
        return _load(path, state, folder)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None


def _load(path: Path, state: Path | None, folder: Path | None) -> Source:
    logs, table, config = [], None, None
    if folder is not None:
        table, config, logs = _read_dump(folder)
    if state is not None:
        logs = _merge(logs, _read_state(state))
    logs = [entry for entry in logs if is_training_window(entry)]
    if not logs and table is None:
        raise ValueError(f"{state.name} has no log entry with a step and metrics")
    name = (path.parent if path.is_file() else path).resolve().name
    if logs or table is None:
        return Source(name, logs, "trainer", table, config)
    return Source(name, list(_metrics_of(table, config)), "dump", table, config)


# Where things are ---------------------------------------------------------------------------------------------------------


def _find(path: Path) -> tuple[Path | None, Path | None]:
    """The state of the trainer and the dump, as far as they are there."""
    if not path.exists():
        raise ValueError("no such file or folder")
    if path.is_file():
        return (path, None) if path.suffix == ".json" else (None, path)
    return _find_state(path), _find_dump(path)


def _find_state(folder: Path) -> Path | None:
    """That of the latest checkpoint, unless one lies here."""
    if (folder / STATE).exists():
        return folder / STATE
    checkpoints = [path for path in folder.glob(f"checkpoint-*/{STATE}") if _number(path).isdigit()]
    return max(checkpoints, key=lambda path: int(_number(path)), default=None)


def _number(path: Path) -> str:
    return path.parent.name.removeprefix("checkpoint-")


def _find_dump(folder: Path) -> Path | None:
    """This folder, or the one below it that was written to last."""
    if dump.files_of(folder):
        return folder
    below = [path for path in sorted(folder.iterdir()) if path.is_dir() and dump.files_of(path)]
    return max(below, key=lambda path: dump.files_of(path)[-1].name, default=None)


# Logs of a trainer --------------------------------------------------------------------------------------------------------


def _read_state(path: Path) -> list[dict[str, Any]]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path.name} is damaged or not JSON: {error}") from None
    entries = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path.name} is JSON, but not the state of a trainer: it has no `log_history`")
    if not entries:
        raise ValueError(f"{path.name} holds no log entries yet")
    if not any(str(key).startswith(PREFIX) for entry in entries for key in entry):
        raise ValueError(f"{path.name} has no `{PREFIX}` metrics: it is not of a run of this package's trainers")
    return entries


def _merge(*histories: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per step, of what is a number. Of two for one step, the later one counts, key by key."""
    merged: dict[int, dict[str, Any]] = {}
    for entry in (entry for history in histories for entry in history):
        step = entry.get("step")
        if not _is_number(step) or not math.isfinite(step):
            continue
        numbers = {key: value for key, value in entry.items() if isinstance(key, str) and _is_number(value)}
        merged.setdefault(int(step), {}).update(numbers)
    return [merged[step] for step in sorted(merged)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# Dumps --------------------------------------------------------------------------------------------------------------------


def _read_dump(path: Path) -> tuple[Table, RolloutCorrectionConfig, list[dict[str, Any]]]:
    """Columns rather than [`~trl_rollout_corr.dump.Dump`], whose rows of Python numbers take twenty times the memory."""
    table, settings = dump.read_table(path)
    logs = dump.read_logs(path)
    return Table(table), _config(settings), _merge(entry for entry in logs if isinstance(entry, dict))


def _config(settings: dict[str, Any]) -> RolloutCorrectionConfig:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about settings without effect: the run has said so
            return RolloutCorrectionConfig(**settings)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the settings in the dump cannot be read: {str(error).splitlines()[0]}") from None


def _metrics_of(table: Table, config: RolloutCorrectionConfig) -> Iterable[dict[str, Any]]:
    """What the trainer would have logged, from the rows that represent its batches."""
    policy = config.rollout_nan_policy
    config.rollout_nan_policy = "drop" if policy == "raise" else policy  # the run ended there; the report should not
    for step in np.unique(table.step[table.represents]):
        rows = np.flatnonzero((table.step == step) & table.represents)
        width = int(np.diff(table.starts)[rows].max())
        if not width:
            continue
        tensors = [table.padded(column, rows, width) for column in (table.train, table.rollout, table.mask)]
        metrics = compute_rollout_correction(*tensors, config).metrics()
        rewards = table.reward[rows]
        reward = {"reward": float(rewards.mean())} if np.isfinite(rewards).all() else {}
        yield {**metrics, **reward, "step": int(step)}
    config.rollout_nan_policy = policy
