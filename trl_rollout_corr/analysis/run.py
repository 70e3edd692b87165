"""The reader of a run: the log of its trainer, its dumped sequences, or both."""

import json
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import yaml

from ..correction.compute import compute_rollout_correction
from ..dumps.reading import find_dump, open_dump
from ..dumps.sequences import Sequences
from ..dumps.writing import files_of, read_logs
from ..health.windows import is_training_window
from ..messages import PREFIX
from ..settings.config import RolloutCorrectionConfig
from ..settings.files import config_of_run


STATE = "trainer_state.json"


class Dump(NamedTuple):
    """
    The dump of a run.

    Args:
        sequences ([`~trl_rollout_corr.dumps.sequences.Sequences`]):
            Its sequences.
        config ([`RolloutCorrectionConfig`]):
            Its configuration.
        settings (`dict`), about (`dict[str, str]`):
            Settings in effect at the last step, and facts about the run, as in its files.
    """

    sequences: Sequences
    config: RolloutCorrectionConfig
    settings: dict[str, Any]
    about: dict[str, str]


class About(NamedTuple):
    """Model, trainer and correction of a run, and the day on which it began or was last written to; empty if unknown."""

    model: str = ""
    trainer: str = ""
    correction: str = ""
    date: str = ""


class Run(NamedTuple):
    """
    The files of a run, read.

    Args:
        name (`str`):
            Name of its folder.
        log (`pd.DataFrame`):
            Metrics of training: a row per logging window, its optimizer step as index `step`, and a column per metric. NaN
            where a metric was not logged.
        logged_by (`str`):
            Source of the log: `"trainer"`, or `"dump"` if it was computed from the dumped sequences.
        dump ([`Dump`] or `None`):
            Its dump.
        about ([`About`]):
            Its model, trainer, correction and date.
        planned (`int` or `None`):
            Optimizer steps that it was to make, if known.
        damage (`list[str]`):
            A sentence about each file or part that could not be read, or is missing.
    """

    name: str
    log: pd.DataFrame
    logged_by: str
    dump: Dump | None
    about: About
    planned: int | None
    damage: list[str]


def read_run(path: Path) -> Run:
    """
    Read a run or a dump.

    Args:
        path (`Path`):
            A dump (folder or file), a `trainer_state.json`, or a folder that holds either or both.

    Returns:
        [`Run`].

    Raises:
        `ValueError`: in one line, if there is neither, or a file is damaged or of another tool.
    """
    try:
        return _read(path, *_find(path))
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None


def _read(path: Path, states: list[Path], folder: Path | None) -> Run:
    dump, entries, state, about = None, [], {}, About()
    damage: list[str] = []
    if folder is not None:
        opened = open_dump(folder, text=True)
        config = config_of_run(opened.settings, "the settings in the dump cannot be read")
        dump = Dump(opened.sequences, config, opened.settings, opened.about)
        known = {name: str(value) for name, value in opened.about.items() if name in About._fields}
        about = About(**{**known, "correction": dump.config.description})
        damage += opened.damage
        entries += read_logs(folder, damage.append)
    if states:
        state = _read_states(states, damage, needed=folder is None)
        entries += state.get("log_history", [])
        about = _fill_in(about, _about_run(path if path.is_dir() else path.parent, states[0]))
    log, logged_by = _merge(entries), "trainer"
    if log.empty:
        if dump is None:
            raise ValueError(f"{(states[0] if states else path).name} has no log entry with a step and metrics")
        log, logged_by = _merge(_metrics_of(dump.sequences, dump.config)), "dump"
    elif dump is not None:
        damage += _cut_short(log, dump.sequences)
    name = (path.parent if path.is_file() else path).resolve().name
    if folder is not None and folder.parent == path and len([*path.glob("*/step-*.parquet")]) > len(files_of(folder)):
        name = f"{name}/{folder.name}"  # one of several
    planned = state.get("max_steps")
    return Run(name, log, logged_by, dump, about, planned if isinstance(planned, int) else None, damage)


def log_of_dump(path: Path, sequences: Sequences, config: RolloutCorrectionConfig) -> pd.DataFrame:
    """The log of a dump; without one, metrics of its sequences."""
    logged = _merge(read_logs(path))
    return _merge(_metrics_of(sequences, config)) if logged.empty else logged


def entries_of(log: pd.DataFrame) -> list[dict[str, Any]]:
    """Log entries as a trainer writes them: a dictionary per step, without the metrics that were not logged."""
    rows = zip(log.index, log.to_dict("records"), strict=True)
    return [
        {**{key: value for key, value in row.items() if not pd.isna(value)}, "step": int(step)} for step, row in rows
    ]


def _cut_short(log: pd.DataFrame, sequences: Sequences) -> list[str]:
    """A complaint about a log that ends before the sequences do, by more than a logging window."""
    logged, dumped = int(log.index[-1]), int(sequences.step.max())
    window = np.median(np.diff(log.index, prepend=0))
    if dumped - logged <= window:
        return []
    return [
        f"the log ends at step {logged}, and the sequences go on to step {dumped}: the steps between were not logged"
    ]


# Where things are ---------------------------------------------------------------------------------------------------------


def _find(path: Path) -> tuple[list[Path], Path | None]:
    """The states of the trainer, the latest first, and the dump, as far as they are there."""
    if not path.exists():
        raise ValueError("no such file or folder")
    if path.is_file():
        return ([path], None) if path.suffix == ".json" else ([], path)
    states, folder = _find_states(path), find_dump(path)
    if not states and folder is None:
        raise ValueError(f"neither a dump (files step-*.parquet) nor a run ({STATE}) is here")
    return states, folder


def _find_states(folder: Path) -> list[Path]:
    """The state in this folder, and those of its checkpoints, the latest first."""
    here = [folder / STATE] if (folder / STATE).exists() else []
    checkpoints = [path for path in folder.glob(f"checkpoint-*/{STATE}") if _number(path).isdigit()]
    return here + sorted(checkpoints, key=lambda path: int(_number(path)), reverse=True)


def _number(path: Path) -> str:
    return path.parent.name.removeprefix("checkpoint-")


# Logs ---------------------------------------------------------------------------------------------------------------------


def _read_states(paths: list[Path], damage: list[str], *, needed: bool) -> dict[str, Any]:
    """The first that can be read. If none can, a `ValueError` about the first says so, where a state is needed."""
    errors = []
    for path in paths:
        try:
            return _read_state(path)
        except ValueError as error:
            errors.append(error)
            damage.append(f"{error}. It is left out")
    if needed:
        raise errors[0]
    return {}


def _read_state(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is damaged or not JSON: {error}") from None
    state: dict[str, Any] = found if isinstance(found, dict) else {}
    entries = state.get("log_history")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path.name} is JSON, but not the state of a trainer: it has no `log_history`")
    if not entries:
        raise ValueError(f"{path.name} holds no log entries yet")
    if not any(str(key).startswith(PREFIX) for entry in entries for key in entry):
        raise ValueError(f"{path.name} has no `{PREFIX}` metrics: the run did not use a trainer of this package")
    return state


def _about_run(folder: Path, state: Path) -> About:
    """From the metadata of the model card beside the checkpoints, and the day on which the state was written."""
    cards = [card for card in (folder / "README.md", folder.parent / "README.md") if card.is_file()]
    card = _metadata(cards[0].read_text(encoding="utf-8", errors="replace")) if cards else {}
    tags = card["tags"] if isinstance(card.get("tags"), list) else []
    trainer = next((str(tag).upper() for tag in tags if tag in ("grpo", "rloo")), "")
    ours = card["trl_rollout_corr"] if isinstance(card.get("trl_rollout_corr"), dict) else {}
    date = datetime.fromtimestamp(state.stat().st_mtime, UTC).date().isoformat()
    # the base model is the one on the hub, which a model of this machine does not have
    model = card.get("base_model") or ours.get("model", "")
    return About(str(model), trainer, str(ours.get("correction", "")), date)


def _metadata(card: str) -> dict[str, Any]:
    """The metadata at the beginning of a model card; empty if there is none or it is no YAML."""
    head, end, _ = card.removeprefix("---\n").partition("\n---\n")
    try:
        metadata = yaml.safe_load(head) if end and card.startswith("---\n") else None
    except (yaml.YAMLError, RecursionError):
        metadata = None
    return metadata if isinstance(metadata, dict) else {}


def _fill_in(about: About, more: About) -> About:
    return About(*(first or second for first, second in zip(about, more, strict=True)))


def _merge(entries: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Numbers of the training windows, a row per step. Of two entries for one step, the later one counts, key by key."""
    numbers = pd.DataFrame(
        [{key: value for key, value in entry.items() if _is_number(value, key)} for entry in entries]
    )
    if "step" not in numbers:
        return pd.DataFrame()
    numbers = numbers[np.isfinite(numbers["step"])].astype({"step": int})
    merged = numbers.groupby("step").last()
    return merged.dropna(how="all", subset=[key for key in merged if is_training_window({key: None})])


def _is_number(value: Any, key: str) -> bool:
    if isinstance(value, int) and abs(value) >= 2**63:  # JSON has integers of any length, and numpy has not
        raise ValueError(f"the log has an integer of {len(str(value))} digits under `{key}`, which no trainer logs")
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _metrics_of(sequences: Sequences, config: RolloutCorrectionConfig) -> Iterator[dict[str, Any]]:
    """Metrics as the trainer logs them, from the sequences that represent its batches."""
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
