"""
Choices and parsers of fields. A parser takes the value that the user gave and the name of the field. No torch.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml

from ..messages import SettingError, nearest
from .criteria import Level
from .presets import PRESETS
from .thresholds import none_if_null, parse_criteria, parse_number


Parser = Callable[[Any, str], Any]
WeightLevel = Literal[Level, "preset"]
LossType = Literal["ppo_clip", "reinforce"]
NanPolicy = Literal["drop", "raise", "neutralize"]
MonitorAction = Literal["warn"]
ReplayMode = Literal["replay"]
Truth = bool
LOSS_TYPES: tuple[str, ...] = get_args(LossType)
NAN_POLICIES: tuple[str, ...] = get_args(NanPolicy)
MONITOR_ACTIONS: tuple[str, ...] = get_args(MonitorAction)
if not TYPE_CHECKING:  # see `criteria`
    WeightLevel = LossType = NanPolicy = MonitorAction = ReplayMode = Truth = str

_COMMON = (
    "Common presets are auto, decoupled_token_is, decoupled_token_icepop, bypass_ppo_clip and disabled; "
    "`trl-rollout-corr docs presets#presets` has all."
)
_OFF = ("none", "null", "false", "off", "no")
_LARGEST = 1e300  # still a float after conversion to bytes


def one_of(*allowed: str | None) -> Parser:
    """Parser of a field with these values."""
    names = [choice for choice in allowed if choice is not None]
    choices = f"one of {', '.join(names)}{' or None' if None in allowed else ''}"

    def parse(value: object, field: str) -> Any:
        value = none_if_null(value) if None in allowed else value
        if value not in allowed:
            raise SettingError(field, value, allowed=choices, remedy=nearest(value, names).strip())
        return value

    return parse


def at_least(smallest: int) -> Parser:
    """Parser of an integer."""

    def parse(value: object, field: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise SettingError(field, value, allowed=f"an integer of {smallest} or more")
        return value

    return parse


def or_none(parse: Parser) -> Parser:
    """A parser that keeps `None`, its text, and a list of the text from a command line."""

    def parse_unless_none(value: object, field: str) -> Any:
        alone = value[0] if isinstance(value, list) and len(value) == 1 else value
        return None if none_if_null(alone) is None else parse(value, field)

    return parse_unless_none


def parse_preset(value: object, field: str) -> str | None:
    """Name of a preset, `"default"`, or `None` for no correction."""
    if value is None or value is False or (isinstance(value, str) and value.strip().lower() in _OFF):
        return None
    if not isinstance(value, str) or not value.strip():
        remedy = "`trl-rollout-corr convert` translates a section of verl." if isinstance(value, Mapping) else ""
        allowed = "the name of a preset, or None for no correction"
        raise SettingError(field, value, allowed=allowed, remedy=remedy)
    if value not in PRESETS and value != "default":
        remedy = nearest(value, PRESETS).strip() or _COMMON
        raise SettingError(field, value, "which is not a preset", remedy=remedy)
    return value


def parse_criteria_or_preset(value: object, field: str) -> Any:
    return "preset" if value in ("preset", ["preset"]) else parse_criteria(value)


def parse_folder(value: object, field: str) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value).strip():
        remedy = (
            "The current folder is '.'. A variable of the script may not be set." if isinstance(value, str) else ""
        )
        raise SettingError(field, value, allowed="the path of a folder, or None", remedy=remedy)
    return os.path.expanduser(os.fspath(value))


def parse_gigabytes(value: Any, field: str) -> Any:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (0 < value <= _LARGEST or value == float("inf"))
    ):
        raise SettingError(field, value, allowed="a number above 0", remedy="1.0 is one gigabyte.")
    return value


def parse_clip_ratio(value: object, field: str) -> float:
    bound = parse_number(value, field)
    if bound <= 1:
        remedy = "verl's default is 3.0; None means no bound."
        raise SettingError(field, bound, "equal policies have a ratio of 1", "above 1", remedy)
    return bound


def _parse_mapping(value: object, field: str, allowed: str) -> dict[str, Any]:
    """A mapping by name, also from the text of a command line, in JSON or YAML."""
    mapping = value
    if isinstance(value, str):
        try:
            mapping = json.loads(value)  # which YAML reads in another way: 1e-3 and Infinity as text
        except json.JSONDecodeError:
            with suppress(yaml.YAMLError):
                mapping = yaml.safe_load(value)
    if isinstance(mapping, Mapping) and all(isinstance(name, str) for name in mapping):
        return dict(mapping)
    raise SettingError(field, value, allowed=allowed)


def parse_engine_kwargs(value: object, field: str) -> dict[str, Any]:
    allowed = "a mapping from arguments of vLLM's engine to their values, such as {'dtype': 'float16'}"
    return _parse_mapping(value, field, allowed)


def parse_limits(value: object, field: str) -> Any:
    """Other limits of the monitor, by name of a bound; only the monitor knows these names."""
    if none_if_null(value) is None:
        return None
    limits = _parse_mapping(value, field, 'numbers, or None, by name of a bound, such as {"staleness": 32}')
    for name, limit in limits.items():
        if limit is not None and not _is_number(limit):
            raise SettingError(field, limit, allowed="a number, or None to switch the bound off", part=f"for {name!r}")
    return limits or None


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    except OverflowError:  # an integer larger than all floats
        return False
