"""The command `trl-rollout-corr diagnose`: a dump, or the log of a run without one, as text or JSON."""

from pathlib import Path

from ...messages import warn
from ..dump.claims import find_dump
from ..logs.log_files import first_readable, is_log, logs_of, merge, refuse_unknown, split_source
from . import trl_log
from .of_dump import open_for_diagnosis, tokens_of
from .ranking import diagnose
from .text import write_json, write_text


def diagnose_dump(path: str | Path, *, as_json: bool = False) -> tuple[str, bool]:
    """
    The diagnosis of a dump as text or as JSON, and whether nothing needs to be done. A run without a dump gets the
    suspicion from the log of its trainer.
    """
    log, run = split_source(str(path))
    if logs := _without_dump(log):
        return _suspect(logs, run, as_json=as_json)
    dump = open_for_diagnosis(path)
    diagnosis = diagnose(tokens_of(dump))
    if as_json:
        return write_json(diagnosis, {"sample": dump.sample} if dump.sample else None), diagnosis.healthy
    note = f"\n{dump.sample}.\n" if dump.sample else ""
    return write_text(diagnosis) + note, diagnosis.healthy


def _without_dump(path: Path) -> list[Path]:
    """The logs of a run without a dump, the best first; empty if there is a dump."""
    if path.is_file():
        refuse_unknown(path)
        return [path] if is_log(path) else []
    try:
        return logs_of(path) if path.is_dir() and find_dump(path) is None else []
    except OSError:  # the reader of the dump reports it
        return []


def _suspect(logs: list[Path], run: str, *, as_json: bool) -> tuple[str, bool]:
    """The suspicion from the log of a trainer as text or JSON, and whether there is none."""
    damage: list[str] = []
    entries = merge(first_readable(logs, damage, needed=True, run=run))
    for sentence in damage:
        warn(f"{logs[0].parent}: {sentence}.")
    course = trl_log.course_of(entries)
    if course is None:
        raise ValueError(
            "this log contains no ratio of TRL, and a diagnosis needs tokens: set `rollout_dump_dir`, train a few "
            "steps, and name the dump. `trl-rollout-corr report` shows the curves of the log"
        )
    write = trl_log.suspicions_as_json if as_json else trl_log.suspicions_as_text
    return write(course), not trl_log.suspicions(course)
