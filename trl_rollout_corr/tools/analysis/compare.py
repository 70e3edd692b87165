"""`trl-rollout-corr compare`: the effect of every preset on the sequences of a dump. It needs no TRL."""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...messages import warn
from ...settings.config import settings_of_preset
from ...settings.presets import DEFAULT, PRESETS
from ...settings.resolve import Settings
from ...settings.trl_correction import given_to_trl
from ..decision import Decision, as_document, in_words
from ..diagnosis.loading import COLUMNS, decision_of, log_of_trainer
from ..dump.reading import Dump, open_dump
from ..formats import number, steps, three_decimals, yaml_lines
from ..logs.log_files import refuse_log
from ..run_facts import trl_corrects
from ..translation.own_settings import read_config
from .recompute import Batch, Outcome, Spread, batch_of, recompute, spread_of


_COLUMNS = (*COLUMNS, "keep")  # of a dump
_THIS_RUN = "this run"
_REFERENCE = "disabled"


# Printed below the table
_EXPLAINED = (
    "ESS: effective sample size of the weights, a share of the tokens; 1 if all weights are equal, - without weights.",
    "cosine: of the angle between the gradient with and without the correction; 1 if it points the same way.",
    "norm: length of the gradient with the correction, divided by its length without; below 1 is a smaller step.",
)


class Comparison(NamedTuple):
    """The numbers and sentences that are printed."""

    batch: Batch  # the sequences
    run: Settings  # in effect in the run
    outcomes: list[tuple[str, Settings, Outcome]]  # for each row of the table, with its name and settings
    left_out: int  # presets without a row
    spread: Spread  # of the log-ratio
    notes: list[str]  # sentences about the sequences and the run
    decision: Decision  # the correction to set
    row: str  # the row of the table with these settings


def compare(path: str, files: list[str], *, as_json: bool = False) -> str:
    """
    Compare the settings of a run, the presets and the settings of `files` on the sequences of a dump, and return the
    text to print. JSON contains every preset.
    """
    refuse_log(path)
    dump = open_dump(path, _COLUMNS, worst=False)
    for damage in dump.damage:
        warn(f"{path}: {damage}.")
    if not dump.sequences.sampled.any():
        raise ValueError(
            "no sequence was drawn at random, and the worst sequences alone do not represent the batch. Set "
            "`rollout_dump_sampled` to 1 or more, and train again"
        )
    if dump.refused:
        raise ValueError(
            "the settings in the dump cannot be read, perhaps because another release wrote it. Compare it with that "
            f"release; `report` and `diagnose` read the rest of it with this one: {dump.refused}"
        )
    run = dump.settings or settings_of_preset(DEFAULT)
    batch = batch_of(dump.sequences, dump.sequences.sampled)
    spread = spread_of(batch)
    decision = decision_of(dump, log_of_trainer(path))
    presets = _presets(dump.fields)
    shown = presets if as_json else {name: presets[name] for name in _main_presets(run, presets)}
    row = str(decision.set.get("rollout_correction", _THIS_RUN))
    settings = {_THIS_RUN: run, **shown, **{file: read_config(file).settings for file in files}}
    notes = _notes(dump, run)
    outcomes = _outcomes(batch, settings, _clip_range(dump.fields), notes)
    comparison = Comparison(batch, run, outcomes, len(presets) - len(shown), spread, notes, decision, row)
    return _as_json(comparison) if as_json else _as_markdown(comparison)


def _presets(of_trl: Mapping[str, Any]) -> dict[str, Settings]:
    """The settings of each preset that a run with these fields of TRL may take."""
    presets = {name: settings_of_preset(name) for name in (_REFERENCE, *PRESETS)}
    if "per_device_train_batch_size" in of_trl and not trl_corrects(of_trl):
        del presets["trl"]  # which stands for TRL's correction of GRPO with vLLM
    return presets


def _notes(dump: Dump, run: Settings) -> list[str]:
    """Sentences about a dump, and TRL's own correction in the run."""
    notes = [f"{dump.sample}."] if dump.sample else []
    if dump.settings is None:
        notes.append(
            f"The dump does not say with which settings it was written: `{_THIS_RUN}` assumes the default, "
            f"`rollout_correction: {DEFAULT}`."
        )
    if run.by_trl and (of_trl := given_to_trl(dump.fields)):
        lines = ", ".join(f"`{line}`" for line in yaml_lines(of_trl).splitlines())
        notes.append(f"This run uses `rollout_correction: trl` with {lines}. The row of `trl` is TRL's default.")
    return notes


def _clip_range(fields: Mapping[str, Any]) -> tuple[float, float]:
    """Lower and upper ratio at which TRL's PPO clips in a run with these fields."""
    below, above = (fields.get(name) for name in ("epsilon", "epsilon_high"))
    lower = float(below) if isinstance(below, int | float) and below else 0.2
    return 1 - lower, 1 + (float(above) if isinstance(above, int | float) and above else lower)


def _outcomes(
    batch: Batch, settings: dict[str, Settings], clip: tuple[float, float], notes: list[str]
) -> list[tuple[str, Settings, Outcome]]:
    """What each setting does to the sequences, by the name of its row."""
    outcomes = []
    broken = sum(int(block.tokens(neutralize=False).broken.sum()) for block in batch.blocks)
    if broken:
        notes.append(f"{broken} of {batch.n_tokens} tokens lack a finite log-probability.")
    for name, tried in settings.items():
        outcome = Outcome()
        if broken and tried.rollout_nan_policy == "raise":
            notes.append(f"{name}: `rollout_nan_policy: raise` ends the run at these sequences.")
        else:
            outcome = recompute(batch, tried, clip=clip, as_dumped=name == _THIS_RUN)
        outcomes.append((name, tried, outcome))
    if settings[_THIS_RUN].rollout_metrics_only:
        notes.append(
            "This run only measures (`rollout_metrics_only`): its row shows the settings as if they were applied."
        )
    if not any(block.advantages.any() for block in batch.blocks):
        notes.append("Every advantage is 0, so there is no gradient to compare.")
    return outcomes


def _main_presets(run: Settings, presets: Mapping[str, Settings]) -> list[str]:
    """
    The presets that matter for a run: its own, the reference, the one to set, and the presets in the mode of the run.
    In decoupled mode, which offers many, only presets that either weight or reject count.
    """
    named = {_REFERENCE, DEFAULT, str(run.rollout_correction)}
    return [
        name
        for name, preset in presets.items()
        if name in named
        or (
            preset.mode == run.mode and (run.mode != "decoupled" or (preset.bounding is None) != (not preset.criteria))
        )
    ]


# Output --------------------------------------------------------------------------------------------------------------


def _as_markdown(c: Comparison) -> str:
    bypasses = c.run.bypass_mode
    mode = f"bypass, {c.run.mode}" if bypasses else "decoupled"
    policy = "current" if bypasses else "old"
    left_out = (
        [f"`--json` prints {c.left_out} more presets, in other modes or with both weights and rejection."]
        if c.left_out
        else []
    )
    header = ["settings", "rejected", "ESS", "effective lr", "cosine", "norm"]
    rows = [[_marked(name, c.row), *map(three_decimals, outcome)] for name, _, outcome in c.outcomes]
    when = steps(c.batch.steps[0], c.batch.steps[-1])
    lines = [
        f"{c.batch.n_sequences} completions of {when}, {c.batch.n_tokens} tokens.",
        f"The run: {mode}; the trainer's log-probabilities come from the {policy} policy.",
        *c.notes,
        "",
        *_table(header, rows),
        "",
        *_EXPLAINED,
        *left_out,
        "",
        f"Typical log-ratio (spread s) {c.spread.s:.4g}, mean length {number(c.spread.lengths.mean().item())} tokens: "
        "for bounds of your own, see `trl-rollout-corr docs presets#bounds-from-the-spread`.",
        "",
        f"Recommended: {c.row}. {in_words(c.decision)}",
    ]
    if c.decision.set:
        lines += ["", "```yaml", f"{yaml_lines(c.decision.set)}```"]
    return "\n".join([*lines, ""])


def _marked(row: str, recommended: str) -> str:
    """The name of a row, marked if it is the reference or recommended."""
    marks = [mark for mark, name in (("reference", _REFERENCE), ("recommended", recommended)) if name == row]
    return f"{row} ({', '.join(marks)})" if marks else row


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table with columns that also line up in a terminal."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    first, *others = widths
    lines = [
        " | ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, others, strict=True))])
        for name, *cells in (header, *rows)
    ]
    rule = " | ".join(["-" * first, *("-" * (width - 1) + ":" for width in others)])
    return [f"| {line} |" for line in (lines[0], rule, *lines[1:])]


def _as_json(c: Comparison) -> str:
    document = {
        "sequences": c.batch.n_sequences,
        "tokens": c.batch.n_tokens,
        "steps": c.batch.steps,
        "notes": c.notes,
        "settings": [
            {
                "name": name,
                "reference": name == _REFERENCE,
                **outcome._asdict(),
                "fields": settings.fields,
            }
            for name, settings, outcome in c.outcomes
        ],
        "spread": {"s": c.spread.s, "mean_length": c.spread.lengths.mean().item()},
        "recommendation": {"row": c.row, **as_document(c.decision)},
    }
    return json.dumps(_finite(document), indent=2) + "\n"


def _finite(value: object) -> object:
    """A value without infinity, which our settings take as text, and NaN, because JSON allows neither."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
