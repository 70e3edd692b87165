"""Fields of the configuration by subject, and a parser for each. Neither TRL nor torch here."""
# ruff: noqa: RUF009 (`_option` returns a field of a dataclass)

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..health.examine import parse_bounds
from ..messages import SettingError, candidates, nearest
from .criteria import LEVELS, CriterionName, Level
from .legacy import FirstPresets
from .presets import DEFAULT, PRESETS
from .thresholds import none_if_null, parse_criteria, parse_number, parse_weight_threshold


LossType = Literal["ppo_clip", "reinforce"]
NanPolicy = Literal["drop", "raise", "neutralize"]
MonitorAction = Literal["warn", "stop"]
Routing = Literal["replay"]
TrackedMetrics = Literal["essential", "all"]
LOSS_TYPES: tuple[str, ...] = get_args(LossType)
NAN_POLICIES: tuple[str, ...] = get_args(NanPolicy)
MONITOR_ACTIONS: tuple[str, ...] = get_args(MonitorAction)
TRACKED_METRICS: tuple[str, ...] = get_args(TrackedMetrics)
if not TYPE_CHECKING:  # see `criteria`
    LossType = NanPolicy = MonitorAction = Routing = TrackedMetrics = str


class Unset:
    """
    Default of a field that a preset fills in. A value of the user replaces it, even one equal to `shown`, and is then kept.

    `shown` is for `--help`. No subclass of `str` or `float`: argparse converts only text, so the object reaches the
    configuration unchanged.
    """

    def __init__(self, shown: object) -> None:
        self.shown = shown

    def __str__(self) -> str:
        return str(self.shown)

    __repr__ = __str__


def unset(shown: object) -> Any:
    """Return an [`Unset`], typed as a value of the field."""
    return Unset(shown)


def _option(help: str, default: Any = None, **metadata: Any) -> Any:
    """Field of a dataclass, with its line of `--help`."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass
class CorrectionFields:
    """Fields of [`RolloutCorrectionConfig`] about the correction itself."""

    rollout_correction: Mapping[str, object] | str | None = _option(
        "Name of a preset, or none. Fields that are set beside it override it.", unset(DEFAULT)
    )
    rollout_correction_resolved: str | None = _option("Not for users: the preset whose fields are in effect.")
    rollout_is: Level | None = _option(
        "Level of the importance weights: token, turn, sequence, geometric, or none.", unset("token")
    )
    rollout_is_threshold: float | str | list[float | list[float]] | None = _option(
        "Upper bound of the weights, or a pair: lower upper, outside which they are 0 (IcePop), or pairs for negative and for "
        "positive advantages (0_1,1_1).",
        unset(2.0),
        nargs="+",
    )
    rollout_is_clamp: bool = _option(
        "With a pair of bounds, move weights outside it to the nearest bound instead of setting them to 0.",
        unset(False),
    )
    rollout_is_batch_normalize: bool = _option("Divide the weights by their mean over the batch of all ranks.", False)
    rollout_rs: list[CriterionName] | None = field(
        default_factory=lambda: unset(None),
        metadata={
            "help": "Rejection criteria: {token,turn_sum,turn_mean,turn_max,seq_sum,seq_mean,seq_max}_{k1,k2,k3}, "
            "token_{tv,kl,binary_kl}, or none."
        },
    )
    rollout_rs_threshold: float | str | list[float | list[float]] | None = _option(
        "One entry per criterion: for k1 bounds on the ratio (0.9_1.1; for a single criterion also 0.9 1.1), otherwise an "
        "upper bound.",
        nargs="+",
    )
    rollout_rs_renormalize: bool = _option("Multiply the loss by valid tokens over kept tokens.", False)
    rollout_rs_exclude_from_baseline: bool = _option(
        "Do not count completions that are rejected as a whole in the mean reward of their group.", False
    )
    bypass_mode: bool = _option("Use the log-probabilities of the sampler in place of the old policy's.", unset(False))
    rollout_loss_type: LossType = _option("Loss in bypass mode: ppo_clip or reinforce.", unset("ppo_clip"))
    rollout_clip_ratio_c: float | str | None = _option(
        "In bypass mode with ppo_clip: tokens with a negative advantage and a larger ratio get no gradient; none for no "
        "bound.",
        3.0,
    )
    rollout_metrics_only: bool = _option("Compute and report the correction without changing the loss.", False)
    rollout_nan_policy: NanPolicy = _option(
        "Treatment of a token whose log-ratio is not finite: drop, raise or neutralize.", "drop"
    )


@dataclass
class EngineFields:
    """Fields of [`RolloutCorrectionConfig`] for the engine of the sampler."""

    rollout_support: str | None = _option(
        "Truncated sampling: replay, log-probabilities of the trainer over the tokens that the sampler kept, or none."
    )
    rollout_engine_kwargs: Mapping[str, object] | str | None = _option(
        "Arguments of vLLM's engine that TRL has no field for, as a mapping."
    )
    rollout_routing: Routing | None = _option(
        "In a mixture of experts: replay, to take the experts that the sampler chose, or none."
    )


@dataclass
class MonitorFields:
    """Fields of [`RolloutCorrectionConfig`] for the monitor, for trackers and for the diagnosis of the first step."""

    rollout_monitor: MonitorAction | None = _option(
        "Reaction to unhealthy metrics: warn, stop, or none for no monitor.", "warn"
    )
    rollout_monitor_bounds: Mapping[str, float | None] | str | None = _option(
        "Limits of the monitor by name of the bound; null switches a bound off."
    )
    rollout_tracked_metrics: TrackedMetrics = _option(
        "Metrics of rollout correction that trackers such as W&B get: essential, or all.", "essential"
    )
    rollout_diagnose: bool = _option("Look for the cause of the gap at the first step, and print it.", False)


@dataclass
class DumpFields:
    """Fields of [`RolloutCorrectionConfig`] for the dump."""

    rollout_dump_dir: str | None = _option("Folder for sampled and worst sequences, as Parquet.")
    rollout_dump_steps: int = _option("Optimizer steps between two dumps.", 1)
    rollout_dump_sampled: int = _option("Sequences drawn at random per dump.", 8)
    rollout_dump_worst: int = _option("Sequences with the largest log-ratio per dump.", 8)
    rollout_dump_max_gb: float = _option("Size of the dump in GB above which its oldest steps are deleted.", 1.0)


_ALL = [
    field
    for mixin in (CorrectionFields, EngineFields, MonitorFields, DumpFields)
    for field in dataclasses.fields(mixin)
]
# Defaults of all fields. Those that a preset decides are in `presets.py`
DEFAULTS = {field.name: field.default for field in _ALL}
FIELDS = frozenset(DEFAULTS)


# Parsers of single fields ---------------------------------------------------------------------------------------------


def _choice(name: str, allowed: tuple[str | None, ...], value: object) -> Any:
    value = none_if_null(value) if None in allowed else value
    if value in allowed:
        return value
    names = [choice for choice in allowed if choice is not None]
    choices = f"one of {', '.join(names)}{' or None' if None in allowed else ''}"
    raise SettingError(name, value, allowed=choices, remedy=nearest(value, names).strip())


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SettingError(name, value, allowed="true or false")
    return value


def preset_name(name: str) -> str:
    """Refuse a name that is not a preset."""
    if name in PRESETS:
        return name
    raise SettingError("rollout_correction", name, "which is not a preset", remedy=preset_remedy(name))


def preset_remedy(name: object) -> str:
    """Sentences with the presets that may be meant."""
    first = [other for other in vars(FirstPresets) if not other.startswith("_")]  # which are translated
    close = " or ".join(map(repr, candidates(name, [*first, *PRESETS])))
    if close:
        return f"Did you mean {close}?"
    common = f"{DEFAULT}, decoupled_token_is, decoupled_token_icepop, bypass_ppo_clip and disabled"
    return f"Common presets are {common}; `trl-rollout-corr docs presets` has all {len(PRESETS)}."


def _folder(value: object) -> str | None:
    path = none_if_null(value)
    if not isinstance(path, str | os.PathLike | None):
        raise SettingError("rollout_dump_dir", path, allowed="the path of a folder, or None")
    return None if path is None else os.path.expanduser(os.fspath(path))


def _count(name: str, smallest: int, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise SettingError(name, value, allowed=f"an integer of {smallest} or more")
    return value


def _gigabytes(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise SettingError("rollout_dump_max_gb", value, allowed="a number above 0", remedy="1.0 is one gigabyte.")
    return value


def _clip_ratio(value: object) -> float | None:
    if none_if_null(value) is None:
        return None
    bound = parse_number(value, "rollout_clip_ratio_c")
    if bound <= 1:
        remedy = "verl's default is 3.0; None means no bound."
        raise SettingError("rollout_clip_ratio_c", bound, "equal policies have a ratio of 1", "above 1", remedy)
    return bound


def _engine_kwargs(value: object) -> dict[str, Any] | None:
    value = none_if_null(value)
    if isinstance(value, str):  # of a command line
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
    if value is None:
        return None
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    allowed = "a mapping from arguments of vLLM's engine to their values, such as {'dtype': 'float16'}"
    raise SettingError("rollout_engine_kwargs", value, allowed=allowed)


PARSERS: dict[str, Callable[[Any], Any]] = {
    "rollout_is": partial(_choice, "rollout_is", (*LEVELS, None)),
    "rollout_is_threshold": parse_weight_threshold,
    "rollout_rs": parse_criteria,
    "rollout_loss_type": partial(_choice, "rollout_loss_type", LOSS_TYPES),
    "rollout_nan_policy": partial(_choice, "rollout_nan_policy", NAN_POLICIES),
    "rollout_clip_ratio_c": _clip_ratio,
    "rollout_engine_kwargs": _engine_kwargs,
    "rollout_support": partial(_choice, "rollout_support", ("replay", None)),
    "rollout_routing": partial(_choice, "rollout_routing", ("replay", None)),
    "rollout_monitor": partial(_choice, "rollout_monitor", (*MONITOR_ACTIONS, None)),
    "rollout_monitor_bounds": lambda value: parse_bounds(none_if_null(value)) or None,
    "rollout_tracked_metrics": partial(_choice, "rollout_tracked_metrics", TRACKED_METRICS),
    "rollout_dump_dir": _folder,
    "rollout_dump_steps": partial(_count, "rollout_dump_steps", 1),
    "rollout_dump_sampled": partial(_count, "rollout_dump_sampled", 0),
    "rollout_dump_worst": partial(_count, "rollout_dump_worst", 0),
    "rollout_dump_max_gb": _gigabytes,
    **{field.name: partial(_boolean, field.name) for field in _ALL if field.type is bool},
}
