"""`trl-rollout-corr compare`: what every preset would do to the sequences of a dump. No TRL here."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..dumps.reading import Sequences, read_sequences
from ..health.rules import HEALTHY
from ..messages import warn
from ..settings.config import RolloutCorrectionConfig
from ..settings.files import config_of_run, read_config
from ..settings.formatting import percent, rounded, three_decimals, yaml_lines
from ..settings.formatting import steps as steps_in_words
from ..settings.presets import PRESETS, Preset, settings_of
from .exact import given_up
from .phase import Phase, healthy_phase
from .replay import Batch, Outcome, batch_of, replay
from .run import find_dump, logs_of_dump
from .spread import TARGET, Spread, measure, predict, suggest, suggest_bounds


# What needs no bounds made of the sequences, by the mode of the run
_WITHOUT_BOUNDS: dict[str, Preset] = {
    "decoupled": "auto",
    "ppo_clip": "bypass_ppo_clip",
    "reinforce": "bypass_pg_token_icepop",
}
_SUGGESTED = "suggested"
_REFERENCE: Preset = "disabled"


class Setting(NamedTuple):
    """A configuration to compare: what the table calls it, and whether what it did is in the dump."""

    name: str
    config: RolloutCorrectionConfig
    as_dumped: bool = False


class Recommendation(NamedTuple):
    """The setting to try first: the row of the table that has it, why, and its fields."""

    row: str
    why: str
    fields: dict[str, Any]


class Comparison(NamedTuple):
    """
    All that is printed.

    Args:
        batch ([`~trl_rollout_corr.analysis.replay.Batch`]):
            The sequences.
        config ([`RolloutCorrectionConfig`]):
            Configuration of the run.
        outcomes (`list[tuple[Setting, Outcome]]`):
            What each setting does.
        spread ([`~trl_rollout_corr.analysis.spread.Spread`]):
            Spread of the log-ratio.
        bounds (`tuple[float, float]`):
            Bounds of `seq_mean_k1` that it suggests.
        notes (`list[str]`):
            What to know about it all.
        suggestion (`dict` or `None`):
            Settings with these bounds; `None` if there are no steps to make them of.
        recommendation ([`Recommendation`]):
            What to try first.
    """

    batch: Batch
    config: RolloutCorrectionConfig
    outcomes: list[tuple[Setting, Outcome]]
    spread: Spread
    bounds: tuple[float, float]
    notes: list[str]
    suggestion: dict[str, Any] | None
    recommendation: Recommendation


def compare(
    path: str,
    files: list[str],
    *,
    clip: tuple[float, float],
    worst: bool = False,
    steps: tuple[int, int] | None = None,
) -> Comparison:
    """
    Compare the settings of a run, every preset and other settings on the sequences of a dump.

    Args:
        path (`str`):
            The dump: a folder, or one of its files.
        files (`list[str]`):
            YAML files with other settings.
        clip (`tuple[float, float]`):
            Ratios below and above which PPO clips, for settings in bypass mode.
        worst (`bool`, *optional*, defaults to `False`):
            Whether to take the sequences that were chosen because they are the worst, too.
        steps (`tuple[int, int]`, *optional*):
            First and last optimizer step to take. By default those before the first alarm about the policies, or all if
            there are none.

    Returns:
        [`Comparison`]: the numbers.

    Raises:
        `ValueError`: in one line, if the dump or a configuration cannot be used.
    """
    folder = Path(path)
    found = find_dump(folder) if folder.is_dir() else None
    sequences, written = read_sequences(found or folder, sampled_only=not worst, steps=steps)
    for damage in written.damage:
        warn(f"{path}: {damage}.")
    config = config_of_run(written.settings, "the settings in the dump")
    notes: list[str] = []
    rows, fit = None, True
    if steps is None:
        phase = healthy_phase(logs_of_dump(found or folder, sequences, config), config)
        rows, fit = _healthy_rows(sequences, phase, notes)
    batch = batch_of(sequences, rows)
    tokens = batch.tokens(RolloutCorrectionConfig())
    if not tokens.lengths.any():
        raise ValueError("no token of the loss has a log-probability of both policies that is finite")
    spread = measure(tokens.log_ratio, tokens.valid > 0)
    bounds = suggest_bounds(spread)
    suggestion = suggest(spread, bounds, config) if fit else None
    settings = [Setting("this run", config, as_dumped=True)]
    if suggestion is not None and spread.s:
        settings.append(Setting(_SUGGESTED, RolloutCorrectionConfig(**suggestion)))
    settings += [*_presets(), *(Setting(file, read_config(file)) for file in files)]
    outcomes = _outcomes(batch, settings, clip, int(tokens.broken.sum()), notes)
    if config.rollout_metrics_only:
        notes.append("This run only measured: its row is what its settings would have done.")
    if not batch.advantages.any():
        notes.append("Every advantage is 0, so there is no gradient to compare.")
    recommendation = _recommend(config, outcomes, suggestion, spread)
    return Comparison(batch, config, outcomes, spread, bounds, notes, suggestion, recommendation)


def _healthy_rows(sequences: Sequences, phase: Phase, notes: list[str]) -> tuple[np.ndarray | None, bool]:
    """Which sequences to take, and whether they are fit to make bounds of. Notes what is left out, and why."""
    if phase.alarm is None or phase.last_step is None:
        return None, True
    rows = sequences.step <= phase.last_step
    alarm = f"an alarm was raised at step {phase.alarm.step} (`{phase.alarm.rule}`)"
    if not rows.any():
        notes.append(f"All steps are taken, and no bounds are made of them: {alarm}, and none was dumped before that.")
        return None, False
    if not rows.all():
        left_out = sequences.step[~rows]
        where = steps_in_words(int(left_out.min()), int(left_out.max()))
        notes.append(f"Without {where}: {alarm}. `--steps` takes others.")
    return rows, True


def _outcomes(
    batch: Batch, settings: list[Setting], clip: tuple[float, float], broken: int, notes: list[str]
) -> list[tuple[Setting, Outcome]]:
    """What each setting does."""
    outcomes = []
    if broken:
        notes.append(f"{broken} of {batch.n_tokens} tokens have a log-probability that is not finite.")
    for setting in settings:
        if broken and setting.config.rollout_nan_policy == "raise":
            outcomes.append((setting, Outcome()))
            notes.append(f"{setting.name}: `rollout_nan_policy: raise` ends the run at these sequences.")
        else:
            outcomes.append((setting, replay(batch, setting.config, clip=clip, as_dumped=setting.as_dumped)))
    return outcomes


def _recommend(
    config: RolloutCorrectionConfig,
    outcomes: list[tuple[Setting, Outcome]],
    suggestion: dict[str, Any] | None,
    spread: Spread,
) -> Recommendation:
    """One row, in the mode of the run, and the reason in numbers of the table."""
    if not spread.s:
        why = "the policies agree on every token, so that there is nothing to correct"
        return Recommendation(_REFERENCE, why, {"rollout_correction": _REFERENCE})
    if suggestion is None:
        preset = _WITHOUT_BOUNDS[config.rollout_loss_type if config.bypass_mode else "decoupled"]
        row = next(setting.name for setting, _ in outcomes if preset in setting.name.split(", "))
        why = (
            "it needs no bounds from the steps at hand, which are unhealthy and would make bounds that keep what they ought "
            "to reject. Find the cause of the alarm first; `--steps` makes bounds of the steps that it names, all the same"
        )
        return Recommendation(row, why, {"rollout_correction": preset})
    outcome = next(outcome for setting, outcome in outcomes if setting.name == _SUGGESTED)
    lower, upper = suggestion["rollout_rs_threshold"]
    parts = [
        f"bounds of {lower:g} and {upper:g} reject completions beyond noise, here {percent(outcome.rejected)} of tokens"
    ]
    if outcome.effective_sample_size is not None:
        parts.append(f"its weights leave {percent(outcome.effective_sample_size)} of the sample")
    if outcome.cosine is not None:
        parts.append(f"the gradient has a cosine of {outcome.cosine:.3f} with that of the reference")
    if not config.bypass_mode:
        lost = given_up(spread.s)
        parts.append(
            f"and at a gap of s = {spread.s:.2g} the token weights beneath give up at most {lost.token_weights:g} of the best "
            f"direction there is, no correction {lost.nothing:g} (benchmarks/exact)"
        )
    return Recommendation(_SUGGESTED, ", ".join(parts), suggestion)


def _presets() -> list[Setting]:
    """One setting for all presets that say the same, and first the one without a correction."""
    names: dict[str, list[Preset]] = {repr(settings_of(_REFERENCE)): []}
    for name in PRESETS:
        names.setdefault(repr(settings_of(name)), []).append(name)
    return [Setting(", ".join(same), RolloutCorrectionConfig.from_preset(same[0])) for same in names.values()]


# What is printed ----------------------------------------------------------------------------------------------------------


def as_markdown(c: Comparison) -> str:
    """What the command prints."""
    mode = f"bypass, {c.config.rollout_loss_type}" if c.config.bypass_mode else "decoupled"
    policy = "current" if c.config.bypass_mode else "old"
    spread, s, best = c.spread, c.spread.s, c.recommendation
    lengths = f"{rounded(spread.lengths.min().item())} to {rounded(spread.lengths.max().item())}"
    whole = (
        f"{len(c.batch.mask)} sequences of steps {c.batch.steps[0]} to {c.batch.steps[-1]}, {c.batch.n_tokens} tokens."
    )
    half = f"{math.log(2) / s**2:.0f} tokens" if s else "any length"
    outcomes = [[_marked(setting.name, best.row), *map(three_decimals, outcome)] for setting, outcome in c.outcomes]
    predictions = [[quantity, *map(rounded, numbers)] for quantity, *numbers in predict(spread, c.bounds)]
    return "\n".join(
        [
            whole,
            f"The run: {mode}; the trainer's log-probabilities are those of the {policy} policy.",
            *c.notes,
            "",
            *_table(["settings", "rejected", "ESS", "effective lr", "cosine", "norm"], outcomes),
            "",
            f"Spread s = {s:.4g}, without tails {spread.s_robust:.4g}. Mean length {rounded(spread.mean_length)} ({lengths}).",
            f"v = s^2 * length = {rounded(s * s * spread.mean_length)}. Sequence weights keep half of their ESS up to {half}.",
            *_remarks(c),
            "",
            *_table(["quantity", "predicted", "at mean length", "measured"], predictions),
            "",
            f"Recommended: {best.row}, because {best.why}.",
            "",
            "```yaml",
            f"{yaml_lines(best.fields)}```",
            "",
        ]
    )


def _marked(row: str, recommended: str) -> str:
    """The name of a row, with what sets it apart."""
    marks = ["reference"] if row == _REFERENCE else []
    marks += ["recommended"] if row == recommended else []
    return f"{row} ({', '.join(marks)})" if marks else row


def _remarks(c: Comparison) -> list[str]:
    remarks = []
    _, healthy = HEALTHY["k3_kl"]
    if c.suggestion is not None and healthy is not None and c.spread.s**2 / 2 > healthy:
        remarks.append(
            "The policies are far apart in these steps: bounds made of them keep what alarms are raised for."
        )
    if c.spread.s > 2 * c.spread.s_robust:
        remarks.append("A few tokens are far off: most of the spread is theirs.")
    if c.suggestion is not None and c.spread.share_outside(*c.bounds) > TARGET:
        remarks.append("More completions are far off than noise explains; the suggested bounds reject them.")
    return remarks


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table whose columns also stand below each other in a terminal."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    first, *others = widths
    lines = [
        " | ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, others, strict=True))])
        for name, *cells in (header, *rows)
    ]
    rule = " | ".join(["-" * first, *("-" * (width - 1) + ":" for width in others)])
    return [f"| {line} |" for line in (lines[0], rule, *lines[1:])]


def as_json(c: Comparison) -> str:
    """What it prints with `--json`."""
    document = {
        "sequences": len(c.batch.mask),
        "tokens": c.batch.n_tokens,
        "steps": c.batch.steps,
        "notes": c.notes,
        "settings": [
            {
                "name": setting.name,
                "reference": setting.name == _REFERENCE,
                "rejected": outcome.rejected,
                "sample_size": outcome.effective_sample_size,
                "effective_lr": outcome.effective_lr,
                "cosine": outcome.cosine,
                "norm": outcome.norm,
                "fields": dataclasses.asdict(setting.config),
            }
            for setting, outcome in c.outcomes
        ],
        "spread": {"s": c.spread.s, "s_robust": c.spread.s_robust, "mean_length": c.spread.mean_length},
        "predictions": [prediction._asdict() for prediction in predict(c.spread, c.bounds)],
        "suggestion": c.suggestion,
        "recommendation": c.recommendation._asdict(),
    }
    return json.dumps(_finite(document), indent=2) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no word for infinity, which our settings take as text, nor for NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
