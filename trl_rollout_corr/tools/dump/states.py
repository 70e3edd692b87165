"""The states that a trainer of Transformers saves for a run and its checkpoints, with their log."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..monitor.stock import is_stock_window
from ..monitor.windows import is_training_window
from .folder import log_entries


STATE = "trainer_state.json"


def states_of(folder: Path) -> list[Path]:
    """The state in a folder, then the states of its checkpoints, the latest first."""
    checkpoints = sorted(
        folder.glob(f"checkpoint-*/{STATE}"), key=lambda path: (len(path.parent.name), path), reverse=True
    )
    return [path for path in (folder / STATE, *checkpoints) if path.is_file()]


def first_readable(paths: list[Path], damage: list[str], *, needed: bool) -> list[dict[str, Any]]:
    """
    The log of the first readable state. Without one, raises a `ValueError` about the first if
    `needed`.
    """
    errors = []
    for path in paths:
        try:
            return _entries(path)
        except ValueError as error:
            errors.append(error)
            damage.append(f"{error}. It is left out")
    if needed:
        raise errors[0]
    return []


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is damaged or not JSON: {error}") from None
    entries = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path.name} is JSON, but not the state of a trainer: it contains no `log_history`")
    if not entries:
        raise ValueError(f"{path.name} holds no log entries yet")
    if not any(is_training_window(entry) or is_stock_window(entry) for entry in entries):
        raise ValueError(
            f"{path.name} contains no `rollout_corr/` metrics, and none of TRL's `sampling/*`: the run used no trainer of "
            "this package, and TRL logged no ratio between vLLM and the trainer"
        )
    return entries


def merge(entries: Iterable[Mapping[str, object]]) -> list[dict[str, object]]:
    """
    Entries of training windows, one per step. Keys of a later entry replace keys of an earlier one.
    """
    merged: dict[int, dict[str, object]] = {}
    for entry in log_entries(entries):
        if is_training_window(entry) or is_stock_window(entry):
            step = int(entry["step"])
            merged.setdefault(step, {}).update(entry, step=step)
    return [merged[step] for step in sorted(merged)]
