"""The reader of a run: what its trainer logged, the sequences that it dumped, or both."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch

from ..config import RolloutCorrectionConfig
from ..correction import compute_rollout_correction
from ..dump import files_of, read_logs
from ..health import is_training_window
from ..keys import PREFIX
from .reading import Sequences, read_sequences
from .settings import config_of_run


STATE = "trainer_state.json"


class Dump(NamedTuple):
    """Sequences that a run dumped, and its configuration."""

    sequences: Sequences
    config: RolloutCorrectionConfig


class Run(NamedTuple):
    """
    What is left of a run.

    Args:
        name (`str`):
            Name of its folder.
        logs (`list[dict]`):
            Log entries with metrics of rollout correction, in order of steps.
        logged_by (`str`):
            Where they are from: `"trainer"`, or `"dump"` if they were computed from its sequences.
        dump ([`Dump`] or `None`):
            What it dumped.
    """

    name: str
    logs: list[dict[str, Any]]
    logged_by: str
    dump: Dump | None


def read_run(path: Path) -> Run:
    """
    Read a run or a dump.

    Args:
        path (`Path`):
            A dump (folder or file), a `trainer_state.json`, or a folder that holds either or both.

    Returns:
        [`Run`]: what was found.

    Raises:
        `ValueError`: in one line, if there is neither, or a file is damaged or of another tool.
    """
    try:
        return _read(path, *_find(path))
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None


def _read(path: Path, state: Path | None, folder: Path | None) -> Run:
    dump, entries = None, []
    if folder is not None:
        sequences, settings = read_sequences(folder, texts=True)
        dump = Dump(sequences, config_of_run(settings, "the settings in the dump cannot be read"))
        entries += read_logs(folder)
    if state is not None:
        entries += _read_state(state)
    logs, logged_by = [entry for entry in _merge(entries) if is_training_window(entry)], "trainer"
    if not logs:
        if dump is None:
            raise ValueError(f"{(state or path).name} has no log entry with a step and metrics")
        logs, logged_by = list(_metrics_of(*dump)), "dump"
    return Run((path.parent if path.is_file() else path).resolve().name, logs, logged_by, dump)


# Where things are ---------------------------------------------------------------------------------------------------------


def _find(path: Path) -> tuple[Path | None, Path | None]:
    """The state of the trainer and the dump, as far as they are there."""
    if not path.exists():
        raise ValueError("no such file or folder")
    if path.is_file():
        return (path, None) if path.suffix == ".json" else (None, path)
    state, folder = _find_state(path), _find_dump(path)
    if state is None and folder is None:
        raise ValueError(f"neither a dump (files step-*.parquet) nor a run ({STATE}) is here")
    return state, folder


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
    if files_of(folder):
        return folder
    below = [path for path in sorted(folder.iterdir()) if path.is_dir() and files_of(path)]
    return max(below, key=lambda path: files_of(path)[-1].name, default=None)


# Logs ---------------------------------------------------------------------------------------------------------------------


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


def _merge(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per step, of what is a number. Of two for one step, the later one counts, key by key."""
    merged: dict[int, dict[str, Any]] = {}
    for entry in entries:
        step: Any = entry.get("step")
        if _is_number(step, "step") and math.isfinite(step):
            numbers: dict[str, Any] = {k: v for k, v in entry.items() if isinstance(k, str) and _is_number(v, k)}
            merged.setdefault(int(step), {}).update(numbers)
    return [merged[step] for step in sorted(merged)]


def _is_number(value: Any, key: str) -> TypeGuard[float]:
    if isinstance(value, int) and abs(value) >= 2**63:  # JSON has integers of any length, and numpy has not
        raise ValueError(f"the log has an integer of {len(str(value))} digits under `{key}`, which no trainer logs")
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _metrics_of(sequences: Sequences, config: RolloutCorrectionConfig) -> Iterator[dict[str, Any]]:
    """What the trainer would have logged, from the sequences that represent its batches."""
    if config.rollout_nan_policy == "raise":  # the run ended there; the report should not
        config = copy(config)
        config.rollout_nan_policy = "drop"
    for step in np.unique(sequences.step[sequences.represents]):
        rows = np.flatnonzero((sequences.step == step) & sequences.represents)
        if not sequences.lengths[rows].any():
            continue
        columns = (sequences.train_logps, sequences.rollout_logps, sequences.mask)
        train_logps, rollout_logps, mask = (sequences.padded(column, rows) for column in columns)
        advantages = torch.from_numpy(np.nan_to_num(sequences.advantage[rows]))
        metrics = compute_rollout_correction(train_logps, rollout_logps, mask, config, advantages=advantages).metrics()
        rewards = sequences.reward[rows]
        reward = {"reward": float(rewards.mean())} if np.isfinite(rewards).all() else {}
        yield {**metrics, **reward, "step": int(step)}
