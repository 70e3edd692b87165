"""
The command `trl-rollout-corr diagnose`: the cause of the gap between trainer and sampler, its certainty and share, and
the remedy. It works on arrays of numpy and needs no TRL.

`observed` holds the tokens. `causes` lists one record per cause, and `other_causes` those of harm without a gap. The
tests of the causes are in `single_tokens`, `scored_pushes`, `changes`, `drift`, `sampling` and `precision`, and use
the statistics in `evidence` and `growth`. `location` finds the completions, turns and prompts that cause the whole
gap. `ranking` searches, and `text` writes the answer. For a run without a dump, `trl_log` reads the log of its
trainer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...messages import PREFIX, warn
from ...settings.resolve import Settings
from ..bands import HEALTHY
from ..decision import Decision, decide, gap_of
from ..dump.claims import find_dump
from ..dump.folder import read_logs
from ..dump.in_effect import settings_of_run
from ..dump.reading import Dump, open_dump
from ..logs.log_files import first_readable, is_log, logs_of, merge, refuse_unknown, split_source
from ..monitor.examine import alarms_of_log, is_small
from ..monitor.rule import Alarm
from ..monitor.rules import BOUNDS
from ..monitor.stock import value_of
from ..run_facts import iterations_of
from . import trl_log
from .observed import DumpedTokens
from .ranking import Diagnosis, Finding, diagnose
from .text import write_json, write_text
from .trl_log import course_of


# Columns of a dump that a diagnosis needs; it quotes a few words of the text in `tokens` and `prompt`
COLUMNS = (
    *("step", "sampled", "mask", "train_logps", "rollout_logps", "again_logps", "turn_ids", "tokens", "token_ids"),
    *("prompt", "prompt_ids", "padding", "staleness", "advantage", "advantages", "coefficients"),
)

__all__ = ["Diagnosis", "DumpedTokens", "Finding", "diagnose", "diagnose_dump", "read_tokens"]


def read_tokens(path: str | Path) -> DumpedTokens:
    """
    Read the tokens of a dump (folder or file), or of a run that contains one. Raises a `ValueError` of one line
    without a dump.
    """
    return _tokens_of(_opened(path))


def _opened(path: str | Path) -> Dump:
    """The parts of a dump that a diagnosis needs. Warns about damage."""
    dump = open_dump(path, COLUMNS, worst=False)
    for damage in dump.damage:
        warn(f"{path}: {damage}.")
    return dump


def _tokens_of(dump: Dump) -> DumpedTokens:
    logs = read_logs(dump.path)
    settings = settings_of_run(dump.settings)
    alarms = alarms_of_log(logs, settings, num_iterations=iterations_of(dump.settings), fields=dump.settings)
    return observe_dump(dump, settings, alarms, small=is_small(logs))


def observe_dump(dump: Dump, settings: Settings | None, alarms: Sequence[Alarm], *, small: bool) -> DumpedTokens:
    """
    The tokens of an opened dump, with the settings in effect and the alarms of its run. `small` says that the log of
    the run shows only small gaps.
    """
    logs = read_logs(dump.path)
    rates, scored = _rates(logs), _scored_again(logs, int(dump.sequences.step.max()))
    movement = _movement(rates, dump.sequences.step)
    harmed = any(BOUNDS[alarm.bound].asks_for_correction for alarm in alarms) or _loses_gradient(dump, settings)
    quiet = small and not alarms
    return DumpedTokens(
        dump.sequences,
        settings,
        dump.settings,
        dump.about,
        movement,
        quiet=quiet,
        harmed=harmed,
        age=dump.age,
        scored_again=scored,
        texts_off=_texts_off(logs, int(dump.sequences.step.max())),
        entropy=_entropy(logs, dump.sequences.step),
        rates=rates,
    )


def _loses_gradient(dump: Dump, settings: Settings | None) -> bool:
    """True if the mean factor of the policy gradient, over tokens of the loss, is unhealthy in the dump."""
    here = dump.sequences.counted
    if settings is None or not settings.corrects or settings.clips_around_sampler or not here.any():
        return False
    low, high = HEALTHY["effective_lr"]
    assert low is not None
    assert high is not None
    return not low <= float(dump.sequences.coefficients[here].mean()) <= high


def decision_of(dump: Dump) -> Decision:
    """The correction to set, by the tokens of an opened dump and the log of its run."""
    tokens = _tokens_of(dump)
    try:
        return diagnose(tokens).decision
    except ValueError:  # too few tokens
        return decide(tokens.settings, tokens.fields, gap=gap_of(tokens.size), is_harmed=tokens.harmed)


def _entropy(logs: list[dict[str, Any]], steps: np.ndarray) -> dict[int, float]:
    """
    TRL's `entropy` by the optimizer step of the dump: an entry of the log covers the steps since the one before it.
    """
    known = sorted((int(entry["step"]), x) for entry in logs if (x := value_of(entry, "entropy")) is not None)
    until = np.array([step for step, _ in known])
    places = {int(step): int(np.searchsorted(until, step)) for step in np.unique(steps)}
    return {step: known[place][1] for step, place in places.items() if place < len(known)}


def _scored_again(logs: list[dict[str, Any]], last: int) -> list[tuple[int, float, float]]:
    """Step, `fresh_k3_kl` and `age_k3_kl` of each score after a push, in order, up to step `last`; NaN if unknown."""
    found = []
    for entry in logs:
        fresh, age = (value_of(entry, f"{PREFIX}{name}_k3_kl") for name in ("fresh", "age"))
        if fresh is not None and entry["step"] <= last:
            found.append((int(entry["step"]), fresh, np.nan if age is None else age))
    return found


def _texts_off(logs: list[dict[str, Any]], last: int) -> tuple[float, float] | None:
    """`fresh_texts_off` and `fresh_texts` of the latest score after a push up to step `last`; `None` if unknown."""
    found = None
    for entry in logs:
        off, n = (value_of(entry, f"{PREFIX}{name}") for name in ("fresh_texts_off", "fresh_texts"))
        if off is not None and n is not None and entry["step"] <= last:
            found = off, n
    return found


def _rates(logs: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """
    Step and learning rate of each entry of the log that has one, in order. It covers the steps since the one before
    it.
    """
    return sorted(
        (int(x["step"]), float(x["learning_rate"])) for x in logs if isinstance(x.get("learning_rate"), float | int)
    )


def _movement(rates: Sequence[tuple[int, float]], steps: np.ndarray) -> float:
    """Sum of the learning rates of the steps after the first of the dump; NaN if the log lacks any of them."""
    first, last = int(steps.min()), int(steps.max())
    known, total = first, 0.0
    for step, rate in rates:
        until = min(step, last)
        total += max(until - known, 0) * rate
        known = max(known, until)
    return total if known == last > first else np.nan


def diagnose_dump(path: str | Path, *, as_json: bool = False) -> tuple[str, bool]:
    """
    The diagnosis of a dump as text or as JSON, and whether nothing needs to be done. A run without a dump gets the
    suspicion from the log of its trainer.
    """
    log, run = split_source(str(path))
    if logs := _without_dump(log):
        return _suspect(logs, run, as_json=as_json)
    dump = _opened(path)
    diagnosis = diagnose(_tokens_of(dump))
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
    course = course_of(entries)
    if course is None:
        raise ValueError(
            "this log contains no ratio of TRL, and a diagnosis needs tokens: set `rollout_dump_dir`, train a few "
            "steps, and name the dump. `trl-rollout-corr report` shows the curves of the log"
        )
    write = trl_log.suspicions_as_json if as_json else trl_log.suspicions_as_text
    return write(course), not trl_log.suspicions(course)
