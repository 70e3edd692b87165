"""`python -m trl_rollout_corr compare`: what every preset would do to the sequences of a dump. No TRL here."""

import dataclasses
import json
import math
from typing import Any, NamedTuple

from ..config import RolloutCorrectionConfig
from ..presets import PRESETS, Preset, settings_of
from ..rules import HEALTHY
from .reading import read_sequences
from .replay import Batch, Outcome, batch_of, replay
from .settings import config_of_run, read_config
from .spread import TARGET, Spread, measure, predict, suggest, suggest_bounds
from .text import rounded, three_decimals, yaml_lines


class Setting(NamedTuple):
    """A configuration to compare: what the table calls it, and whether what it did is in the dump."""

    name: str
    config: RolloutCorrectionConfig
    as_dumped: bool = False


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
    """

    batch: Batch
    config: RolloutCorrectionConfig
    outcomes: list[tuple[Setting, Outcome]]
    spread: Spread
    bounds: tuple[float, float]
    notes: list[str]


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
            First and last optimizer step to take. All by default.

    Returns:
        [`Comparison`]: the numbers.

    Raises:
        `ValueError`: in one line, if the dump or a configuration cannot be used.
    """
    sequences, fields = read_sequences(path, sampled_only=not worst, steps=steps)
    batch, config = batch_of(sequences), config_of_run(fields, "the settings in the dump")
    settings = [Setting("this run", config, as_dumped=True), *_presets(), *(Setting(f, read_config(f)) for f in files)]
    tokens = batch.tokens(RolloutCorrectionConfig())
    if not tokens.lengths.any():
        raise ValueError("no token of the loss has a log-probability of both policies that is finite")
    broken, outcomes, notes = int(tokens.broken.sum()), [], []
    if broken:
        notes.append(f"{broken} of {batch.n_tokens} tokens have a log-probability that is not finite.")
    for setting in settings:
        if broken and setting.config.rollout_nan_policy == "raise":
            outcomes.append((setting, Outcome()))
            notes.append(f"{setting.name}: `rollout_nan_policy: raise` ends the run at these sequences.")
        else:
            outcomes.append((setting, replay(batch, setting.config, clip=clip, as_dumped=setting.as_dumped)))
    if config.rollout_metrics_only:
        notes.append("This run only measured: its row is what its settings would have done.")
    if not batch.advantages.any():
        notes.append("Every advantage is 0, so there is no gradient to compare.")
    spread = measure(tokens.log_ratio, tokens.valid > 0)
    return Comparison(batch, config, outcomes, spread, suggest_bounds(spread), notes)


def _presets() -> list[Setting]:
    """One setting for all presets that say the same."""
    names: dict[str, list[Preset]] = {}
    for name in PRESETS:
        names.setdefault(repr(settings_of(name)), []).append(name)
    return [Setting(", ".join(same), RolloutCorrectionConfig.from_preset(same[0])) for same in names.values()]


# What is printed ----------------------------------------------------------------------------------------------------------


def as_markdown(c: Comparison) -> str:
    """What the command prints."""
    mode = f"bypass, {c.config.rollout_loss_type}" if c.config.bypass_mode else "decoupled"
    policy = "current" if c.config.bypass_mode else "old"
    spread, s, suggestion = c.spread, c.spread.s, suggest(c.spread, c.bounds, c.config)
    lengths = f"{rounded(spread.lengths.min().item())} to {rounded(spread.lengths.max().item())}"
    whole = (
        f"{len(c.batch.mask)} sequences of steps {c.batch.steps[0]} to {c.batch.steps[-1]}, {c.batch.n_tokens} tokens."
    )
    half = f"{math.log(2) / s**2:.0f} tokens" if s else "any length"
    outcomes = [[setting.name, *map(three_decimals, outcome)] for setting, outcome in c.outcomes]
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
            f"Suggested, to reject at most 5 percent of tokens ({suggestion['rollout_correction']}):",
            "",
            "```yaml",
            f"{yaml_lines(suggestion)}```",
            "",
        ]
    )


def _remarks(c: Comparison) -> list[str]:
    remarks = []
    _, healthy = HEALTHY["k3_kl"]
    if healthy is not None and c.spread.s**2 / 2 > healthy:
        remarks.append(
            "The policies are far apart here, and bounds from this phase describe the disease: choose healthy steps with "
            "`--steps`, or bring the policies together first."
        )
    if c.spread.s > 2 * c.spread.s_robust:
        remarks.append("A few tokens are far off: most of the spread is theirs.")
    if c.spread.share_outside(*c.bounds) > TARGET:
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
        "suggestion": suggest(c.spread, c.bounds, c.config),
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
