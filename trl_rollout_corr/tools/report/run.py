"""The reader of a run: the log of its trainer, its dumped sequences, or both."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from ...messages import SelfContainedError, warn
from ...settings.resolve import Settings
from ...settings.words import settings_in_words
from ..dump.columns import SCHEMA
from ..dump.folder import files_of, read_logs
from ..dump.reading import Dump, open_dump
from ..logs.log_files import first_readable, merge, parts_of, split_source


# Columns of a dump, without the ones that no page shows
_COLUMNS = [name for name in SCHEMA.names if name not in ("rank", "completion", "weights")]


class Run(NamedTuple):
    """The contents of the files of a run."""

    entries: list[dict[str, object]]  # log of training: one entry per logging window, with the optimizer `step`
    log: pd.DataFrame  # its numbers: a row per entry, `step` as index, NaN where a metric is missing
    dump: Dump | None
    settings: Settings | None  # in effect, from the dump
    about: Mapping[str, str]  # its model, trainer, correction and date, where known
    damage: list[str]  # a sentence about each unreadable or missing file or part


def read_run(source: str) -> Run:
    """Read a run, a dump, or a folder with either or both. Warns about damaged parts; errors name the source."""
    try:
        run = _read(*split_source(source))
    except OSError as error:
        raise SelfContainedError(f"{source}: {error.strerror or error}") from None
    except ValueError as error:
        raise SelfContainedError(f"{source}: {error}") from None
    for sentence in run.damage:
        warn(f"{source}: {sentence}.")
    return run


def _read(path: Path, name: str) -> Run:
    logs, folder = parts_of(path)
    dump, settings = None, None
    damage: list[str] = []
    entries: list[dict[str, Any]] = []
    about: dict[str, str] = {}
    if logs:
        entries = first_readable(logs, damage, needed=folder is None, run=name)
    if folder is not None:
        dump = open_dump(path, _COLUMNS)
        settings = dump.settings
        if settings is not None:
            about["correction"] = settings_in_words(settings, dump.fields)
        damage += dump.complaints
        if others := [] if folder == path else _other_dumps(path, folder):
            damage.append(f"it also contains the dumps {', '.join(others)}. Name two of them to see both")
        about = {name: dump.about[name] for name in ("model", "trainer", "date") if name in dump.about} | about
        entries = [*read_logs(folder), *entries]
    merged = merge(entries)
    if not merged and dump is None:
        raise ValueError(f"{logs[0].name} contains no log entry with a step and metrics")
    return Run(merged, _table_of(merged), dump, settings, about, damage)


def _table_of(log: list[dict[str, Any]]) -> pd.DataFrame:
    """The numbers of a log, a row for each step."""
    numbers = [{key: x for key, x in entry.items() if type(x) in (int, float)} for entry in log]
    return pd.DataFrame(numbers).set_index("step") if log else pd.DataFrame()


def _other_dumps(folder: Path, chosen: Path) -> list[str]:
    return [
        f"`{path.name}`" for path in sorted(folder.iterdir()) if path != chosen and path.is_dir() and files_of(path)
    ]
