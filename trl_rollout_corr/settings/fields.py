"""Choices and parsers of the fields of a configuration. It needs neither TRL nor torch."""

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml

from ..messages import SettingError, nearest
from .criteria import LEVELS, Level
from .presets import PRESETS
from .thresholds import none_if_null, numbers_in, parse_criteria, parse_number, parse_truth, parse_weight_threshold


WeightLevel = Literal[Level, "preset"]
LossType = Literal["ppo_clip", "reinforce"]
NanPolicy = Literal["drop", "raise", "neutralize"]
MonitorAction = Literal["warn"]
Replay = Literal["replay"]
Truth = bool
LOSS_TYPES: tuple[str, ...] = get_args(LossType)
NAN_POLICIES: tuple[str, ...] = get_args(NanPolicy)
MONITOR_ACTIONS: tuple[str, ...] = get_args(MonitorAction)
if not TYPE_CHECKING:  # see `criteria`
    WeightLevel = LossType = NanPolicy = MonitorAction = Replay = Truth = str

_COMMON = (
    "Common presets are auto, decoupled_token_is, decoupled_token_icepop, bypass_ppo_clip and disabled; "
    "`trl-rollout-corr docs presets#presets` has all."
)
_OFF = ("none", "null", "false", "off", "no")
_LARGEST = 1e300  # still a float after conversion to bytes


def _choice(name: str, allowed: tuple[str | None, ...], value: object) -> Any:
    value = none_if_null(value) if None in allowed else value
    if value in allowed:
        return value
    names = [choice for choice in allowed if choice is not None]
    choices = f"one of {', '.join(names)}{' or None' if None in allowed else ''}"
    raise SettingError(name, value, allowed=choices, remedy=nearest(value, names).strip())


def _count(name: str, smallest: int, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise SettingError(name, value, allowed=f"an integer of {smallest} or more")
    return value


def _unless_none(parse: Callable[[Any], Any], value: object) -> Any:
    """Parse a value, but keep `None`, its text, and a list of the text from a command line."""
    alone = value[0] if isinstance(value, list) and len(value) == 1 else value
    return None if none_if_null(alone) is None else parse(value)


def _preset(value: object) -> str | None:
    """Name of a preset, `"default"`, or `None` for no correction."""
    if value is None or value is False or (isinstance(value, str) and value.strip().lower() in _OFF):
        return None
    if not isinstance(value, str) or not value.strip():
        remedy = "`trl-rollout-corr convert` translates a section of verl." if isinstance(value, Mapping) else ""
        allowed = "the name of a preset, or None for no correction"
        raise SettingError("rollout_correction", value, allowed=allowed, remedy=remedy)
    if value not in PRESETS and value != "default":
        remedy = nearest(value, PRESETS).strip() or _COMMON
        raise SettingError("rollout_correction", value, "which is not a preset", remedy=remedy)
    return value


def _criteria(value: object) -> Any:
    return "preset" if value in ("preset", ["preset"]) else parse_criteria(value)


def _folder(value: object) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value).strip():
        remedy = (
            "The current folder is '.'. A variable of the script may not be set." if isinstance(value, str) else ""
        )
        raise SettingError("rollout_dump_dir", value, allowed="the path of a folder, or None", remedy=remedy)
    return os.path.expanduser(os.fspath(value))


def _gigabytes(value: Any) -> Any:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (0 < value <= _LARGEST or value == float("inf"))
    ):
        raise SettingError("rollout_dump_max_gb", value, allowed="a number above 0", remedy="1.0 is one gigabyte.")
    return value


def _clip_ratio(value: object) -> float:
    bound = parse_number(value, "rollout_clip_ratio_c")
    if bound <= 1:
        remedy = "verl's default is 3.0; None means no bound."
        raise SettingError("rollout_clip_ratio_c", bound, "equal policies have a ratio of 1", "above 1", remedy)
    return bound


def _engine_kwargs(value: object) -> dict[str, Any]:
    if isinstance(value, str):  # from a command line, in JSON or YAML
        with suppress(yaml.YAMLError):
            value = yaml.safe_load(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    allowed = "a mapping from arguments of vLLM's engine to their values, such as {'dtype': 'float16'}"
    raise SettingError("rollout_engine_kwargs", value, allowed=allowed)


def _bounds(value: object) -> Any:
    """Other limits of the monitor, by name of a bound; only the monitor knows these names."""
    field, value = "rollout_monitor_bounds", none_if_null(value)
    if isinstance(value, str):  # from a command line
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise SettingError(field, value, allowed='numbers, or None, by name of a bound, such as {"staleness": 32}')
    for name, limit in value.items():
        if limit is not None and not _is_number(limit):
            raise SettingError(field, limit, allowed="a number, or None to switch the bound off", part=f"for {name!r}")
    return dict(value) or None


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    except OverflowError:  # an integer larger than all floats
        return False


# Parser of each field, in the order of the documentation. `None` and "preset" are values of a field that a preset
# decides
PARSERS: dict[str, Callable[[Any], Any]] = {
    "rollout_correction": _preset,
    "rollout_is": partial(_choice, "rollout_is", (*LEVELS, "preset", None)),
    "rollout_is_threshold": partial(_unless_none, parse_weight_threshold),
    "rollout_is_clamp": partial(_unless_none, partial(parse_truth, field="rollout_is_clamp")),
    "rollout_is_stale_only": partial(_unless_none, partial(parse_truth, field="rollout_is_stale_only")),
    "rollout_is_batch_normalize": partial(parse_truth, field="rollout_is_batch_normalize"),
    "rollout_rs": _criteria,
    "rollout_rs_threshold": partial(_unless_none, numbers_in),
    "rollout_rs_renormalize": partial(parse_truth, field="rollout_rs_renormalize"),
    "rollout_rs_exclude_from_baseline": partial(parse_truth, field="rollout_rs_exclude_from_baseline"),
    "bypass_mode": partial(_unless_none, partial(parse_truth, field="bypass_mode")),
    "rollout_loss_type": partial(_choice, "rollout_loss_type", (*LOSS_TYPES, None)),
    "rollout_clip_ratio_c": partial(_unless_none, _clip_ratio),
    "rollout_metrics_only": partial(parse_truth, field="rollout_metrics_only"),
    "rollout_nan_policy": partial(_choice, "rollout_nan_policy", NAN_POLICIES),
    "rollout_support": partial(_choice, "rollout_support", ("replay", None)),
    "rollout_engine_kwargs": partial(_unless_none, _engine_kwargs),
    "rollout_routing": partial(_choice, "rollout_routing", ("replay", None)),
    "rollout_monitor": partial(_choice, "rollout_monitor", (*MONITOR_ACTIONS, None)),
    "rollout_monitor_bounds": _bounds,
    "rollout_diagnose": partial(parse_truth, field="rollout_diagnose"),
    "rollout_dump_dir": partial(_unless_none, _folder),
    "rollout_dump_steps": partial(_count, "rollout_dump_steps", 1),
    "rollout_dump_sampled": partial(_count, "rollout_dump_sampled", 0),
    "rollout_dump_worst": partial(_count, "rollout_dump_worst", 0),
    "rollout_dump_max_gb": _gigabytes,
}
FIELDS = PARSERS.keys()
