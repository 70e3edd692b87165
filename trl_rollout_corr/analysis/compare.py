"""`python -m trl_rollout_corr compare`: what every preset would do to the sequences of a dump. No TRL here."""

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..config import RolloutCorrectionConfig
from ..presets import PRESETS
from ..rules import HEALTHY
from .replay import Outcome, Rows, read_rows, replay
from .spread import Prediction, Spread, measure, predict, suggest, suggest_bounds


FIELDS = [field.name for field in dataclasses.fields(RolloutCorrectionConfig)]
# Of the first releases of verl. A boolean `rollout_is` is theirs, too.
_LEGACY_KEYS = ("rollout_is_level", "rollout_is_mode", "rollout_is_threshold_lower", "rollout_is_veto_threshold")
_CONVERT = "translate it with `python -m trl_rollout_corr convert`"


class Candidate(NamedTuple):
    """
    Settings to compare.

    Args:
        name (`str`):
            What the table calls them.
        config ([`RolloutCorrectionConfig`]):
            The settings.
        as_dumped (`bool`):
            Whether they are those of the run.
    """

    name: str
    config: RolloutCorrectionConfig
    as_dumped: bool = False


class Comparison(NamedTuple):
    """
    All that is printed.

    Args:
        rows ([`~trl_rollout_corr.analysis.replay.Rows`]):
            The sequences.
        run ([`RolloutCorrectionConfig`]):
            Settings of the run.
        outcomes (`list[tuple[Candidate, Outcome]]`):
            What each candidate does.
        spread ([`~trl_rollout_corr.analysis.spread.Spread`]):
            Spread of the log-ratio.
        predictions (`list[Prediction]`):
            What it predicts.
        suggestion (`dict`):
            Fields that it suggests.
        notes (`list[str]`):
            What to know about it all.
    """

    rows: Rows
    run: RolloutCorrectionConfig
    outcomes: list[tuple[Candidate, Outcome]]
    spread: Spread
    predictions: list[Prediction]
    suggestion: dict[str, Any]
    notes: list[str]


def compare_dump(
    path: str,
    files: list[str],
    *,
    worst: bool = False,
    steps: tuple[int, int] | None = None,
    epsilon: float = 0.2,
    epsilon_high: float = 0.2,
    as_json: bool = False,
) -> str:
    """
    Compare the settings of a run, every preset and other settings on the sequences of a dump.

    Args:
        path (`str`):
            The dump: a folder, or one of its files.
        files (`list[str]`):
            YAML files with other settings.
        worst (`bool`, *optional*, defaults to `False`):
            Whether to take the sequences that were chosen because they are the worst, too.
        steps (`tuple[int, int]`, *optional*):
            First and last optimizer step to take. All by default.
        epsilon (`float`, *optional*, defaults to `0.2`):
            PPO's clipping, for settings in bypass mode.
        epsilon_high (`float`, *optional*, defaults to `0.2`):
            Its upper side.
        as_json (`bool`, *optional*, defaults to `False`):
            Whether to return JSON.

    Returns:
        `str`: Markdown, or JSON.

    Raises:
        `ValueError`: in one line, if the dump or a configuration cannot be used.
    """
    rows, settings = read_rows(path, worst=worst, steps=steps)
    given = [Candidate(file, read_config(file)) for file in files]
    comparison = compare(rows, run_config(settings), given, epsilon=epsilon, epsilon_high=epsilon_high)
    return _as_json(comparison) if as_json else _as_markdown(comparison)


def compare(
    rows: Rows,
    run: RolloutCorrectionConfig,
    given: list[Candidate],
    *,
    epsilon: float = 0.2,
    epsilon_high: float = 0.2,
) -> Comparison:
    """
    Compare the settings of a run, every preset and other settings on the sequences of a dump.

    Args:
        rows ([`~trl_rollout_corr.analysis.replay.Rows`]):
            The sequences.
        run ([`RolloutCorrectionConfig`]):
            Settings of the run.
        given (`list[Candidate]`):
            Other settings.
        epsilon (`float`, *optional*, defaults to `0.2`):
            PPO's clipping, for presets in bypass mode.
        epsilon_high (`float`, *optional*, defaults to `0.2`):
            Its upper side.

    Returns:
        [`Comparison`]: the numbers.

    Raises:
        `ValueError`: if no token has finite log-probabilities.
    """
    tokens = rows.tokens(RolloutCorrectionConfig())
    if not tokens.lengths.any():
        raise ValueError("no token of the loss has a log-probability of both policies that is finite")
    broken, outcomes, notes = int(tokens.broken.sum()), [], []
    for candidate in (Candidate("this run", run, as_dumped=True), *_presets(), *given):
        if broken and candidate.config.rollout_nan_policy == "raise":
            outcomes.append((candidate, Outcome()))
            notes.append(f"{candidate.name}: `rollout_nan_policy: raise` ends the run at these sequences.")
            continue
        outcome = replay(
            rows, candidate.config, epsilon=epsilon, epsilon_high=epsilon_high, as_dumped=candidate.as_dumped
        )
        outcomes.append((candidate, outcome))
    if broken:
        notes.insert(0, f"{broken} of {int(rows.mask.sum())} tokens have a log-probability that is not finite.")
    if run.rollout_metrics_only:
        notes.append("This run only measured: its row is what its settings would have done.")
    if not rows.advantages.any():
        notes.append("Every advantage is 0, so there is no gradient to compare.")
    spread = measure(tokens.log_ratio, tokens.valid > 0)
    mode = run.rollout_loss_type if run.bypass_mode else "decoupled"
    suggestion, bounds = suggest(spread, mode), suggest_bounds(spread)
    return Comparison(rows, run, outcomes, spread, predict(spread, bounds), suggestion, notes)


# Settings -----------------------------------------------------------------------------------------------------------------


def run_config(settings: Mapping[str, Any]) -> RolloutCorrectionConfig:
    """
    Build the configuration that a dump was made with.

    Args:
        settings (`Mapping`):
            Settings in the dump.

    Returns:
        [`RolloutCorrectionConfig`]: the configuration.

    Raises:
        `ValueError`: in one line, if they are not those of this release.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run has warned already
        return _build(settings, "the settings in the dump")


def read_config(path: str) -> RolloutCorrectionConfig:
    """
    Read settings from a YAML file, such as a recipe. Keys that are not ours are ignored.

    Args:
        path (`str`):
            The file.

    Returns:
        [`RolloutCorrectionConfig`]: the configuration.

    Raises:
        `ValueError`: in one line that names the file, if it cannot be read, is of another tool, or is not valid.
    """
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(document, Mapping):
        raise ValueError(f"{path}: no settings, which would be lines such as `rollout_correction: decoupled_token_is`")
    tool = _other_tool(document)
    if tool:
        raise ValueError(f"{path}: a configuration of {tool}; {_CONVERT}")
    unknown = [key for key in document if str(key).startswith("rollout_") and key not in FIELDS]
    if unknown:
        raise ValueError(f"{path}: `{unknown[0]}` is not a field of rollout correction")
    fields = {key: value for key, value in document.items() if key in FIELDS}
    if not fields:
        raise ValueError(f"{path}: no field of rollout correction in it, such as `rollout_correction`")
    return _build(fields, path)


def _other_tool(document: Mapping[str, Any]) -> str | None:
    """Whose configuration it is, if not ours."""
    if isinstance(document.get("algorithm"), Mapping) or isinstance(document.get("rollout_correction"), Mapping):
        return "verl"
    if any(key in document for key in _LEGACY_KEYS) or isinstance(document.get("rollout_is"), bool):
        return "verl's first releases"
    ours = any(key in FIELDS for key in document)
    trl = any(str(key).startswith("vllm_importance_sampling_") for key in document)
    return "TRL's own correction" if trl and not ours else None


def _build(fields: Mapping[str, Any], name: str) -> RolloutCorrectionConfig:
    try:
        return RolloutCorrectionConfig(**fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {' '.join(str(error).split())}") from None


def _presets() -> list[Candidate]:
    """One candidate for all presets that say the same."""
    names: dict[str, list[str]] = {}
    for name in PRESETS:
        config = dataclasses.replace(RolloutCorrectionConfig.from_preset(name), rollout_correction=None)
        names.setdefault(repr(config), []).append(name)
    return [Candidate(", ".join(same), RolloutCorrectionConfig.from_preset(same[0])) for same in names.values()]


# What is printed ----------------------------------------------------------------------------------------------------------


def _as_markdown(c: Comparison) -> str:
    rows = [[candidate.name, *map(_three_digits, outcome)] for candidate, outcome in c.outcomes]
    mode = f"bypass, {c.run.rollout_loss_type}" if c.run.bypass_mode else "decoupled"
    policy = "current" if c.run.bypass_mode else "old"
    spread, s = c.spread, c.spread.s
    lengths = f"{_number(spread.lengths.min().item())} to {_number(spread.lengths.max().item())}"
    half = f"{math.log(2) / s**2:.0f} tokens" if s else "any length"
    predictions = [
        [p.quantity, _number(p.predicted), _number(p.at_mean_length), _number(p.measured)] for p in c.predictions
    ]
    return "\n".join(
        [
            f"{len(c.rows.mask)} sequences of steps {c.rows.steps[0]} to {c.rows.steps[-1]}, {int(c.rows.mask.sum())} tokens.",
            f"The run: {mode}; the trainer's log-probabilities are those of the {policy} policy.",
            *c.notes,
            "",
            *_table(["settings", "rejected", "ESS", "effective lr", "cosine", "norm"], rows),
            "",
            f"Spread s = {s:.4g}, without tails {spread.s_robust:.4g}. Mean length {_number(spread.mean_length)} ({lengths}).",
            f"v = s^2 * length = {_number(s * s * spread.mean_length)}. Sequence weights keep half of their ESS up to {half}.",
            *_remarks(c),
            "",
            *_table(["quantity", "predicted", "at mean length", "measured"], predictions),
            "",
            f"Suggested, to reject at most 5 percent of tokens ({c.suggestion['rollout_correction']}):",
            "",
            "```yaml",
            *(f"{key}: {value}" for key, value in c.suggestion.items()),
            "```",
            "",
        ]
    )


def _remarks(c: Comparison) -> list[str]:
    remarks = []
    if c.spread.s**2 / 2 > HEALTHY["k3_kl"][1]:
        remarks.append(
            "The policies are far apart here, and bounds from this phase describe the disease: choose healthy steps with "
            "`--steps`, or bring the policies together first."
        )
    if c.spread.s > 2 * c.spread.s_robust:
        remarks.append("A few tokens are far off: most of the spread is theirs.")
    if c.predictions[-2].measured > 0.05:
        remarks.append("More completions are far off than noise explains; the suggested bounds reject them.")
    return remarks


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table whose columns also stand below each other in a terminal."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    first, *others = widths
    lines = [
        " | ".join([row[0].ljust(first), *(cell.rjust(w) for cell, w in zip(row[1:], others, strict=True))])
        for row in (header, *rows)
    ]
    rule = " | ".join(["-" * first, *("-" * (w - 1) + ":" for w in others)])
    return [f"| {line} |" for line in (lines[0], rule, *lines[1:])]


def _three_digits(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _as_json(c: Comparison) -> str:
    document = {
        "sequences": len(c.rows.mask),
        "tokens": int(c.rows.mask.sum()),
        "steps": c.rows.steps,
        "notes": c.notes,
        "settings": [
            {"name": candidate.name, **outcome._asdict(), "fields": dataclasses.asdict(candidate.config)}
            for candidate, outcome in c.outcomes
        ],
        "spread": {"s": c.spread.s, "s_robust": c.spread.s_robust, "mean_length": c.spread.mean_length},
        "predictions": [prediction._asdict() for prediction in c.predictions],
        "suggestion": c.suggestion,
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
