"""
The folder that a run writes its dump to. A run claims a folder by a file that only one process can create, so two runs
never write to the same folder: the second takes `dump-2`, the next `dump-3`. No run moves or deletes the rows of
another.
"""

import glob
import json
import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from .folder import files_of, read_logs


CLAIM = "run.json"


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written to. Creates a missing folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it is not writable")
    except OSError as error:
        raise ValueError(f"`rollout_dump_dir` is {str(folder)!r}, which cannot be used: {error}.") from None


def claim(asked: Path, output_dir: str | Path, *, resumes: bool) -> tuple[Path, str]:
    """
    Claim the folder that was asked for, or the first free one with a number behind its name. A run that `resumes` from
    a checkpoint in its `output_dir` takes its own folder again. Returns the folder, and a sentence if it differs from
    the one that was asked for.
    """
    run, asked = str(Path(output_dir).resolve()), asked.resolve()  # `.` and `sub/..` have no name for a number
    own = [folder for folder in _numbered(asked) if owner(folder).get("output_dir") == run]
    if resumes and own:
        return max(own, key=lambda folder: owner(folder).get("date", "")), ""
    mine = {
        "date": datetime.now(UTC).isoformat(),
        "process": os.getpid(),
        "host": socket.gethostname(),
        "output_dir": run,
    }
    mine["rollout_dump_dir"] = str(asked)
    for number in count(1):
        folder = asked if number == 1 else asked.with_name(f"{asked.name}-{number}")
        check_folder(folder)
        if files_of(folder) or read_logs(folder):
            continue
        try:
            with (folder / CLAIM).open("x", encoding="utf-8") as file:
                file.write(json.dumps(mine))
        except FileExistsError:
            continue
        return folder, "" if folder == asked else f"The dump of this run goes to {str(folder)!r}: {_taken(asked)}"
    raise AssertionError


def _taken(asked: Path) -> str:
    run = "another run"
    if before := owner(asked):
        run = f"the run that began at {before.get('date', '')[:16]} with `output_dir` {before.get('output_dir')!r}"
    return f"{str(asked)!r} (`rollout_dump_dir`) contains the dump of {run}."


def owner(folder: Path) -> Mapping[str, str]:
    """Facts about the run that claimed a folder; empty without such a run or if another tool wrote the file."""
    path = folder / CLAIM
    try:
        written = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError):  # a run may be starting at this moment
        return {}
    return (
        {key: value for key, value in written.items() if isinstance(value, str)} if isinstance(written, dict) else {}
    )


def find_dump(folder: Path) -> Path | None:
    """
    The dump of a folder; `None` without one. It is the folder itself, or else the latest dump of the run with this
    `output_dir`, below it or next to it, or else the latest dump below it or in a folder with its name and a number.
    """
    if files_of(folder):
        return folder
    run = str(folder.resolve())
    beside = [path.parent for path in sorted(folder.resolve().parent.glob(f"*/{CLAIM}"))]
    below = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    own = [path for path in (*below, *beside) if owner(path).get("output_dir") == run]
    return latest(own) or latest([*below, *_numbered(folder)])


def later_dump(folder: Path) -> Path | None:
    """The dump of a later run that asked for the same folder; `None` without one."""
    found = latest(_numbered(folder))
    return None if found is None or found == folder else found


def latest(folders: list[Path]) -> Path | None:
    """The folder with the most recently written dump; `None` without any dump."""
    last = {folder: files[-1].stat().st_mtime_ns for folder in folders if (files := files_of(folder))}
    return max(last, key=lambda folder: last[folder], default=None)


def _numbered(asked: Path) -> list[Path]:
    """A folder, and the numbered folders that later runs took instead."""
    named = asked.resolve()
    instead = sorted(named.parent.glob(f"{glob.escape(named.name)}-*/{CLAIM}"))
    return [asked, *(path.parent for path in instead if owner(path.parent).get("rollout_dump_dir") == str(named))]
