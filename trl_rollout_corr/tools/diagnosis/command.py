"""The command `trl-rollout-corr diagnose`: a dump, or the log of a run without one, as text or JSON."""

from ..logs.log_files import merge, parts_of, split_source
from . import trl_log
from .loading import log_of_trainer, observe_dump, open_for_diagnosis
from .ranking import diagnose
from .text import write_json, write_text


def diagnose_source(source: str, *, as_json: bool = False) -> tuple[str, bool]:
    """
    The diagnosis of a run or a dump as text or as JSON, and whether nothing needs to be done. A run without a dump
    gets the suspicion from the log of its trainer.
    """
    path, _ = split_source(source)
    _, folder = parts_of(path)
    if folder is None:
        return _suspect(source, as_json=as_json)
    dump = open_for_diagnosis(path)
    diagnosis = diagnose(observe_dump(dump, log_of_trainer(source)))
    if as_json:
        return write_json(diagnosis, {"sample": dump.sample} if dump.sample else None), diagnosis.healthy
    note = f"\n{dump.sample}.\n" if dump.sample else ""
    return write_text(diagnosis) + note, diagnosis.healthy


def _suspect(source: str, *, as_json: bool) -> tuple[str, bool]:
    """The suspicion from the log of a trainer as text or JSON, and whether there is none."""
    course = trl_log.course_of(merge(log_of_trainer(source, needed=True)))
    if course is None:
        raise ValueError(
            "this log contains no ratio of TRL (a run with `auto` logs none), and a diagnosis needs tokens: set "
            "`rollout_dump_dir`, train a few steps, and name the dump. `trl-rollout-corr report` shows the curves of "
            "the log"
        )
    write = trl_log.suspicions_as_json if as_json else trl_log.suspicions_as_text
    return write(course), not trl_log.suspicions(course)
