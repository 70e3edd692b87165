"""
From a dump and the log of its run to the tokens that `ranking` diagnoses. Whoever diagnoses a dump begins here: the
commands `diagnose` and `compare`, the report, and the benchmarks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...messages import PREFIX, warn
from ..bands import HEALTHY
from ..decision import Decision, decide, gap_of
from ..dump.folder import log_entries, read_logs
from ..dump.reading import Dump, open_dump
from ..logs.log_files import first_readable, parts_of, split_source
from ..monitor.examine import alarms_of_log, is_small
from ..monitor.rule import Alarm
from ..monitor.rules import BOUNDS
from ..monitor.stock import value_of
from .observed import DumpedTokens, LogFacts
from .ranking import diagnose


Log = Sequence[Mapping[str, Any]]  # entries of the log of a run, each with a `step`

# Columns of a dump that a diagnosis needs; it quotes a few words of the text in `tokens` and `prompt`
COLUMNS = (
    *("step", "sampled", "mask", "train_logps", "rollout_logps", "again_logps", "turn_ids", "tokens", "token_ids"),
    *("prompt", "prompt_ids", "padding", "staleness", "lag", "advantage", "advantages", "coefficients"),
)


def open_for_diagnosis(path: str | Path) -> Dump:
    """
    The parts of a dump (folder or file), or of a run that contains one, that a diagnosis needs. Warns about damage
    and unreadable settings. Raises a `ValueError` of one line without a dump.
    """
    dump = open_dump(path, COLUMNS, worst=False)
    for complaint in dump.complaints:
        warn(f"{path}: {complaint}.")
    return dump


def read_tokens(path: str | Path) -> DumpedTokens:
    """The tokens of a dump, given as in [`open_for_diagnosis`]."""
    return observe_dump(open_for_diagnosis(path))


def log_of_trainer(source: str, *, needed: bool = False) -> Log:
    """
    Entries that the trainer of the run at a source logged, none without such a log unless it is `needed`. Warns about
    logs that cannot be read.
    """
    path, name = split_source(source)
    logs, _ = parts_of(path)
    damage: list[str] = []
    entries = first_readable(logs, damage, needed=needed, run=name)
    for sentence in damage:
        warn(f"{logs[0].parent}: {sentence}.")
    return entries


def alarms_of_run(log: Log, dump: Dump | None) -> list[Alarm]:
    """The alarms in the log of a run, of which there may be a dump."""
    return alarms_of_log(log, None, {}) if dump is None else alarms_of_log(log, dump.settings, dump.fields)


def observe_dump(dump: Dump, others: Log = ()) -> DumpedTokens:
    """
    The tokens of an opened dump, and what the log of its run says: the one in the dump, and entries of `others` for
    steps that it lacks.
    """
    own = read_logs(dump.path)
    logged = {entry["step"] for entry in own}
    lacking = [entry for entry in log_entries(others) if entry["step"] not in logged]
    log = sorted([*own, *lacking], key=lambda entry: float(entry["step"]))
    alarms, steps = alarms_of_run(log, dump), dump.sequences.step
    until = [entry for entry in log if entry["step"] <= steps.max()]
    scored_texts = _logged(until, f"{PREFIX}fresh_texts_off", f"{PREFIX}fresh_texts")
    rates = sorted(_logged(log, "learning_rate"))
    asks = any(BOUNDS[alarm.bound].asks_for_correction for alarm in alarms)
    facts = LogFacts(
        movement=_movement(rates, steps),
        quiet=is_small(log) and not alarms,
        harmed=asks or _loses_gradient(dump),
        scored_again=_logged(until, f"{PREFIX}fresh_k3_kl", f"{PREFIX}age_k3_kl"),
        texts_off=scored_texts[-1][1:] if scored_texts else None,
        entropy=_entropy(log, steps),
        rates=rates,
    )
    return DumpedTokens(dump.sequences, dump.settings, dump.fields, dump.about, facts)


def decision_of(dump: Dump, others: Log) -> Decision:
    """The correction to set, by the tokens of an opened dump and the log of its run, as in [`observe_dump`]."""
    tokens = observe_dump(dump, others)
    try:
        return diagnose(tokens).decision
    except ValueError:  # too few tokens
        return decide(tokens.settings, tokens.fields, gap=gap_of(tokens.size), is_harmed=tokens.log.harmed)


# What the dump and the log say about the run -------------------------------------------------------------------------


def _loses_gradient(dump: Dump) -> bool:
    """True if the mean factor of the policy gradient, over tokens of the loss, is unhealthy in the dump."""
    here, settings = dump.sequences.counted, dump.settings
    if settings is None or not settings.corrects or settings.clips_around_sampler or not here.any():
        return False
    low, high = HEALTHY["effective_lr"]
    assert low is not None
    assert high is not None
    return not low <= float(dump.sequences.coefficients[here].mean()) <= high


def _logged(log: Log, key: str, *others: str) -> list[tuple[Any, ...]]:
    """Step and metrics of each entry that has the first of them; NaN where it lacks another one."""
    rows = [(int(entry["step"]), *(value_of(entry, name) for name in (key, *others))) for entry in log]
    return [tuple(np.nan if x is None else x for x in row) for row in rows if row[1] is not None]


def _entropy(log: Log, steps: np.ndarray) -> dict[int, float]:
    """
    TRL's `entropy` by the optimizer step of the dump: an entry of the log covers the steps since the one before it.
    """
    known = sorted(_logged(log, "entropy"))
    until = np.array([step for step, _ in known])
    places = {int(step): int(np.searchsorted(until, step)) for step in np.unique(steps)}
    return {step: known[place][1] for step, place in places.items() if place < len(known)}


def _movement(rates: Sequence[tuple[int, float]], steps: np.ndarray) -> float:
    """Sum of the learning rates of the steps after the first of the dump; NaN if the log lacks any of them."""
    first, last = int(steps.min()), int(steps.max())
    known, total = first, 0.0
    for step, rate in rates:
        until = min(step, last)
        total += max(until - known, 0) * rate
        known = max(known, until)
    return total if known == last > first else np.nan
