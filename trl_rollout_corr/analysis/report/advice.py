"""The settings of a run, and those to try."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from ...dumps.reading import Sequences
from ...settings.config import RolloutCorrectionConfig
from ...settings.formatting import yaml_lines
from ..phase import healthy_phase
from ..replay import batch_of
from ..run import Run
from ..spread import Spread, measure, suggest, suggest_bounds


_NO_BOUNDS = (
    "No bounds are made of these steps: an alarm was raised at step {} (`{}`), and nothing was dumped before it. They would "
    "keep what they ought to reject. Do what the findings say first; `trl-rollout-corr compare` shows what every "
    "preset would do."
)


class Advice(NamedTuple):
    """Settings in YAML, and what to know about them."""

    title: str
    text: str
    yaml: str


def advise(run: Run) -> list[Advice]:
    """Settings of the run, and those to try."""
    if run.dump is None:
        text = (
            "Bounds that fit this run are computed from its tokens. Set `rollout_dump_dir`, train some steps, and report on "
            "the folder of the run."
        )
        return [Advice("A dump first", text, "rollout_dump_dir: dump\nrollout_dump_steps: 10\n")]
    text = "Its settings, without those of the monitor and the dump."
    own = Advice("This run", text, yaml_lines(_own(run.dump.config)))
    phase = healthy_phase(run.logs, run.dump.config)
    rows = run.dump.sequences.represents
    if phase.alarm is not None and phase.last_step is not None:
        rows = rows & (run.dump.sequences.step <= phase.last_step)
        if not rows.any():
            return [own, Advice("To try", _NO_BOUNDS.format(phase.alarm.step, phase.alarm.rule), "")]
    spread = _spread(run.dump.sequences, rows)
    if spread is None:
        return [own]
    suggestion = suggest(spread, suggest_bounds(spread), run.dump.config)
    if suggestion.get("rollout_rs_threshold", [1.0])[0] == 0.0:  # the drift leaves no bound below
        return [own, Advice("To try", "None: the policies have nothing to do with each other. Find out why.", "")]
    if suggestion["rollout_correction"] == "disabled":
        text = "The policies agree on every token: nothing to correct."
        return [own, Advice("To try", text, yaml_lines(suggestion))]
    text = (
        "Bounds from the spread of these tokens, which reject at most 5 percent of them. "
        "`trl-rollout-corr compare` shows what they and every preset would do to this dump."
    )
    if phase.alarm is not None:
        text += f" Only steps to {phase.last_step} are counted, before the alarm at step {phase.alarm.step}."
    return [own, Advice("To try", text, yaml_lines(suggestion))]


def _spread(sequences: Sequences, rows: np.ndarray) -> Spread | None:
    """That of which `compare` makes its suggestion."""
    if not (sequences.counted & rows[sequences.row]).any():
        return None
    tokens = batch_of(sequences, rows).tokens(RolloutCorrectionConfig())
    return measure(tokens.log_ratio, tokens.valid > 0) if tokens.lengths.any() else None


def _own(config: RolloutCorrectionConfig) -> dict[str, Any]:
    """Fields that differ from their default, beside the preset."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(RolloutCorrectionConfig)}
    default = dataclasses.asdict(RolloutCorrectionConfig())
    left_out = ("rollout_monitor", "rollout_dump", "rollout_correction_resolved")
    about_loss = [name for name in fields if not name.startswith(left_out)]
    return {name: fields[name] for name in about_loss if fields[name] != default[name] or name == "rollout_is"}
