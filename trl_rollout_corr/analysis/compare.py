"""`trl-rollout-corr compare`: the effect of every preset on the sequences of a dump. No TRL here."""

import dataclasses
import json
import math
from typing import Any, NamedTuple

import numpy as np

from ..dumps.reading import open_dump
from ..dumps.sequences import Sequences
from ..health.bands import HEALTHY
from ..health.examine import examine
from ..messages import percent, rounded, three_decimals, warn, yaml_lines
from ..messages import steps as steps_in_words
from ..settings.config import RolloutCorrectionConfig
from ..settings.files import config_of_run, read_config
from ..settings.presets import PRESETS, Preset, settings_of
from .recommend import NOTHING, HealthySteps, Recommendation, healthy_steps, recommend, spread_of
from .replay import Batch, Effect, batch_of, replay
from .run import entries_of, log_of_dump
from .spread import TARGET, Spread, predict, suggest_bounds


_FITTED = "bounds that fit"


class Setting(NamedTuple):
    """A configuration to compare: its name in the table, and whether its effect is in the dump."""

    name: str
    config: RolloutCorrectionConfig
    as_dumped: bool = False


class Comparison(NamedTuple):
    """
    The numbers and sentences that are printed.

    Args:
        batch ([`~trl_rollout_corr.analysis.replay.Batch`]):
            The sequences.
        config ([`RolloutCorrectionConfig`]):
            Configuration of the run.
        effects (`list[tuple[Setting, Effect]]`):
            Effect of each setting.
        spread ([`~trl_rollout_corr.analysis.spread.Spread`]):
            Spread of the log-ratio.
        bounds (`tuple[float, float]`):
            Bounds of `seq_mean_k1` that fit this spread.
        notes (`list[str]`):
            Remarks about the sequences and the run.
        recommendation ([`~trl_rollout_corr.analysis.recommend.Recommendation`]):
            The settings to try first.
        row (`str`):
            The row of the table that has them.
    """

    batch: Batch
    config: RolloutCorrectionConfig
    effects: list[tuple[Setting, Effect]]
    spread: Spread
    bounds: tuple[float, float]
    notes: list[str]
    recommendation: Recommendation
    row: str


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
    dump = open_dump(path, sampled_only=not worst, steps=steps)
    for damage in dump.damage:
        warn(f"{path}: {damage}.")
    sequences, config = dump.sequences, config_of_run(dump.settings, "the settings in the dump")
    notes: list[str] = []
    healthy = HealthySteps(np.ones(len(sequences), bool), None, None)
    if steps is None:
        log = log_of_dump(dump.path, sequences, config)
        healthy = healthy_steps(sequences, log.index, examine(entries_of(log), config))
        notes += _notes_on_steps(sequences, healthy)
    batch = batch_of(sequences, healthy.rows if healthy.rows.any() else None)
    spread = spread_of(batch)
    if spread is None:
        raise ValueError("no token of the loss has a finite log-probability under both policies")
    best = recommend(spread if healthy.rows.any() else None, config, healthy.alarm)
    settings = [Setting("this run", config, as_dumped=True)]
    settings += [Setting(_FITTED, RolloutCorrectionConfig(**best.fitted))] if best.fitted else []
    settings += [*_presets(), *(Setting(file, read_config(file)) for file in files)]
    effects = _effects(batch, settings, clip, notes)
    if config.rollout_metrics_only:
        notes.append("This run has `rollout_metrics_only`: its row shows the settings as if they were applied.")
    if not batch.advantages.any():
        notes.append("Every advantage is 0, so there is no gradient to compare.")
    row, effect = _row_of(best, effects)
    if best.fitted:
        best = best._replace(reason=f"{best.reason}. On these sequences: {_measured(effect)}")
    return Comparison(batch, config, effects, spread, suggest_bounds(spread), notes, best, row)


def _notes_on_steps(sequences: Sequences, healthy: HealthySteps) -> list[str]:
    """The steps that are left out, and why."""
    if healthy.alarm is None or healthy.rows.all():
        return []
    alarm = f"an alarm was raised at step {healthy.alarm.step} (`{healthy.alarm.rule}`)"
    if not healthy.rows.any():
        return [
            f"All steps are taken, and no bounds are made: {alarm}, and no earlier step was dumped. To make bounds anyway, "
            "name the steps with `--steps`."
        ]
    left_out = sequences.step[~healthy.rows]
    return [
        f"Without {steps_in_words(int(left_out.min()), int(left_out.max()))}: {alarm}. To take other steps, use `--steps`."
    ]


def _effects(
    batch: Batch, settings: list[Setting], clip: tuple[float, float], notes: list[str]
) -> list[tuple[Setting, Effect]]:
    """The effect of each setting."""
    effects = []
    broken = int(batch.tokens(RolloutCorrectionConfig()).broken.sum())
    if broken:
        notes.append(f"{broken} of {batch.n_tokens} tokens have a log-probability that is not finite.")
    for setting in settings:
        if broken and setting.config.rollout_nan_policy == "raise":
            effects.append((setting, Effect()))
            notes.append(f"{setting.name}: `rollout_nan_policy: raise` ends the run at these sequences.")
        else:
            effects.append((setting, replay(batch, setting.config, clip=clip, as_dumped=setting.as_dumped)))
    return effects


def _row_of(best: Recommendation, effects: list[tuple[Setting, Effect]]) -> tuple[str, Effect]:
    """The row of the table with the recommended settings, and their effect."""
    name = best.settings["rollout_correction"]
    return next((setting.name, effect) for setting, effect in effects if name in setting.name.split(", "))


def _measured(effect: Effect) -> str:
    """The effect of settings on these sequences, in words."""
    parts = [f"{percent(effect.rejected)} of all tokens rejected"]
    if effect.effective_sample_size is not None:
        parts.append(f"effective sample size of the weights {percent(effect.effective_sample_size)}")
    if effect.cosine is not None:
        parts.append(f"cosine of the gradient with the reference {effect.cosine:.3f}")
    return ", ".join(parts)


def _presets() -> list[Setting]:
    """One setting for all presets with the same fields; first the one without a correction, the reference."""
    names: dict[str, list[Preset]] = {repr(settings_of(NOTHING)): []}
    for name in PRESETS:
        names.setdefault(repr(settings_of(name)), []).append(name)
    return [Setting(", ".join(same), RolloutCorrectionConfig.from_preset(same[0])) for same in names.values()]


# Output ------------------------------------------------------------------------------------------------------------------


def as_markdown(c: Comparison) -> str:
    """The text that the command prints."""
    mode = f"bypass, {c.config.rollout_loss_type}" if c.config.bypass_mode else "decoupled"
    policy = "current" if c.config.bypass_mode else "old"
    spread, s, best = c.spread, c.spread.s, c.recommendation
    lengths = f"{rounded(spread.lengths.min().item())} to {rounded(spread.lengths.max().item())}"
    whole = (
        f"{len(c.batch.mask)} sequences of steps {c.batch.steps[0]} to {c.batch.steps[-1]}, {c.batch.n_tokens} tokens."
    )
    half = f"{math.log(2) / s**2:.0f} tokens" if s else "any length"
    effects = [[_marked(setting.name, c.row), *map(three_decimals, effect)] for setting, effect in c.effects]
    predictions = [[quantity, *map(rounded, numbers)] for quantity, *numbers in predict(spread, c.bounds)]
    return "\n".join(
        [
            whole,
            f"The run: {mode}; the trainer's log-probabilities are those of the {policy} policy.",
            *c.notes,
            "",
            *_table(["settings", "rejected", "ESS", "effective lr", "cosine", "norm"], effects),
            "",
            f"Spread s = {s:.4g}, without tails {spread.s_robust:.4g}. Mean length {rounded(spread.mean_length)} ({lengths}).",
            f"v = s^2 * length = {rounded(s * s * spread.mean_length)}. Sequence weights keep half of their ESS up to {half}.",
            *_remarks(c),
            "",
            *_table(["quantity", "predicted", "at mean length", "measured"], predictions),
            "",
            f"Recommended: {c.row}, because {best.reason}.",
            "",
            "```yaml",
            f"{yaml_lines(dict(best.settings))}```",
            *_alternative(best),
            "",
        ]
    )


def _alternative(best: Recommendation) -> list[str]:
    """The settings whose bounds fit these sequences."""
    if best.fitted is None:
        return []
    text = f"{_FITTED.capitalize()} the spread of these tokens reject outliers, and at most {percent(TARGET)} of the others:"
    return ["", text, "", "```yaml", f"{yaml_lines(best.fitted)}```"]


def _marked(row: str, recommended: str) -> str:
    """The name of a row, marked if it is the reference or recommended."""
    marks = ["reference"] if row == NOTHING else []
    marks += ["recommended"] if row == recommended else []
    return f"{row} ({', '.join(marks)})" if marks else row


def _remarks(c: Comparison) -> list[str]:
    remarks = []
    _, healthy = HEALTHY["k3_kl"]
    if c.recommendation.fitted and healthy is not None and c.spread.s**2 / 2 > healthy:
        remarks.append(
            "The policies are far apart in these steps: bounds made of these steps keep tokens that should be rejected."
        )
    if c.spread.s > 2 * c.spread.s_robust:
        remarks.append("Most of the spread comes from a few tokens with a large log-ratio.")
    if c.recommendation.fitted and c.spread.share_outside(*c.bounds) > TARGET:
        remarks.append(
            "More completions have a large mean log-ratio than noise explains; the bounds that fit reject these "
            "completions."
        )
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
    """The text that it prints with `--json`."""
    document = {
        "sequences": len(c.batch.mask),
        "tokens": c.batch.n_tokens,
        "steps": c.batch.steps,
        "notes": c.notes,
        "settings": [
            {
                "name": setting.name,
                "reference": setting.name == NOTHING,
                "rejected": effect.rejected,
                "sample_size": effect.effective_sample_size,
                "effective_lr": effect.effective_lr,
                "cosine": effect.cosine,
                "norm": effect.norm,
                "fields": dataclasses.asdict(setting.config),
            }
            for setting, effect in c.effects
        ],
        "spread": {"s": c.spread.s, "s_robust": c.spread.s_robust, "mean_length": c.spread.mean_length},
        "predictions": [prediction._asdict() for prediction in predict(c.spread, c.bounds)],
        "suggestion": c.recommendation.fitted,
        "recommendation": {"row": c.row, "why": c.recommendation.reason, "fields": c.recommendation.settings},
    }
    return json.dumps(_finite(document), indent=2) + "\n"


def _finite(value: Any) -> Any:
    """JSON has neither infinity, which our settings take as text, nor NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
