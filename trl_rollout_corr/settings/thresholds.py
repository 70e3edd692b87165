"""
Strict parsing of thresholds in Python, YAML, JSON and on a command line.

Text is accepted in verl's form (`"0.5_2.0"`, `"0.6_1.6,2.5"`) and as a bracketed list (`"[[0.6, 1.6], 2.5]"`).
Python's `float` would read `"0.5_2"` as 0.52, and so does YAML without quotes, hence the number grammar below.
"""

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..messages import SettingError, nearest
from .criteria import CRITERIA, DIRECTED, FIRST_NAMES


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|\+?\.?inf", re.IGNORECASE)
_REJECTION = "rollout_rs_threshold"

_TV_REASON = "a difference of probabilities is at most 1, so such a bound rejects nothing"

Bounds = float | list[float]
WeightBounds = Bounds | list[list[float]]


# As YAML reads them
TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def parse_truth(value: object, field: str) -> bool:
    """The truth value that is given, or that YAML reads in a text."""
    truth = TRUTH.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(truth, bool):
        raise SettingError(field, value, allowed="true or false")
    return truth


def none_if_null(value: object) -> Any:
    """Turn the text "none" or "null", from a command line or another tool, into `None`."""
    return None if isinstance(value, str) and value.strip().lower() in ("none", "null") else value


def parse_number(value: object, field: str, part: str = "") -> float:
    """A number or its text, possibly infinite."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        number = float(value.strip().lower().replace(".inf", "inf"))
        if math.isfinite(number) or "inf" in value.lower():
            return number
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer larger than all floats
            if not math.isnan(value):
                return float(value)
    allowed = "made of numbers" if field.endswith("_threshold") else "a number"
    remedy = "Write a pair as [0.5, 2.0]." if isinstance(value, str) and "_" in value else ""
    raise SettingError(field, value, allowed=allowed, remedy=remedy, part=part)


def _underscore_hint(number: float) -> str:
    """A sentence if YAML may have read a pair as a longer number, such as `0.5_2` as 0.52."""
    if not 0.1 <= number < 1 or len(repr(number)) < len("0.52"):
        return ""
    return " YAML and Python read an unquoted 0.5_2 as the number 0.52: write the pair as [0.5, 2.0], or quote it."


def parse_structure(value: object, field: str) -> Any:
    """Turn text such as `"0.6_1.6,2.5"` or `"[[0.6, 1.6], 2.5]"`, and tuples, into lists."""
    if isinstance(value, list | tuple):
        if value and all(isinstance(part, str) for part in value):
            return parse_structure(",".join(value), field)  # the command line passes a list of text
        return [list(part) if isinstance(part, tuple) else part for part in value]
    if not isinstance(value, str):
        return value
    if value.strip().startswith("["):
        try:
            return json.loads(re.sub(r"[^\[\],\s]+", lambda match: json.dumps(match.group()), value))
        except json.JSONDecodeError as error:
            raise SettingError(field, value, "which is not a list of numbers and pairs of numbers") from error
    split = [part.strip().split("_") for part in value.split(",")]
    if any(len(part) > 1 and "" in part for part in split):  # such as "0.0001_"
        raise SettingError(field, value, "which lacks a bound", remedy="Write both, such as 0.0001_inf.")
    parts = [part[0] if len(part) == 1 else part for part in split]
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts


def is_by_sign(threshold: object) -> bool:
    """`True` for two pairs: bounds for negative and for positive advantages."""
    return isinstance(threshold, list) and len(threshold) == 2 and all(isinstance(pair, list) for pair in threshold)


def parse_weight_threshold(value: object, field: str = "rollout_is_threshold") -> WeightBounds:
    """Parse bounds of weights: a number (truncation), a pair around 1, or a pair per sign."""
    parsed = parse_structure(value, field)
    if is_by_sign(parsed):
        return [_parse_pair(pair, field) for pair in parsed]
    if isinstance(parsed, list):
        return _parse_pair(parsed[0] if len(parsed) == 1 and isinstance(parsed[0], list) else parsed, field)
    upper = parse_number(parsed, field)
    if upper < 1:
        raise SettingError(
            field,
            upper,
            "a lower bound would shrink the weight of tokens on which both policies agree",
            "at least 1 when it is one number (a truncation bound)",
            f"Set a number such as 2.0, or a pair such as [0.5, 5.0].{_underscore_hint(upper)}",
        )
    return upper


def parse_criteria(value: object) -> list[str] | None:
    """Parse names of criteria, as a list or as comma-separated text; `None` for none."""
    names = [value] if isinstance(value, str) else value
    if names is None:
        return None
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        remedy = f"Allowed names: {', '.join(CRITERIA)}."
        raise SettingError("rollout_rs", value, allowed="a list of names", remedy=remedy)
    if len(names) == 1:
        names = names[0].split(",")  # the command line passes one element with commas
    names = [name.strip() for name in names]
    if not names or names in (["none"], ["null"], ["None"]):
        return None
    for name in names:
        if name not in CRITERIA:
            today = f"verl calls it {FIRST_NAMES[name]!r} today." if name in FIRST_NAMES else nearest(name, CRITERIA)
            remedy = f"{today} Allowed names: {', '.join(CRITERIA)}.".strip()
            raise SettingError("rollout_rs", names, f"and {name!r} is not a criterion", remedy=remedy)
    if len(set(names)) < len(names):
        raise SettingError("rollout_rs", names, "which names a criterion twice", remedy="List each criterion once.")
    return names


def parse_numbers(value: object, field: str) -> Any:
    """Parse all numbers in lists, whose length and order is not known yet."""

    def parsed(part: object) -> Any:
        return [*map(parsed, part)] if isinstance(part, list | tuple) else parse_number(part, field)

    return parsed(parse_structure(value, field))


def parse_rejection_thresholds(value: object, criteria: Sequence[str] | None) -> list[Bounds]:
    """Parse `rollout_rs_threshold`: one entry per criterion, one for all, or a single pair."""
    if criteria is None:
        return []
    if value is None:
        remedy = (
            "Give one entry per criterion: bounds on the ratio such as [0.5, 2.0] for k1, an upper bound such as 0.01 "
            "for k2 and k3."
        )
        raise SettingError("rollout_rs", criteria, f"but `{_REJECTION}` is not set", remedy=remedy)
    parsed = parse_structure(value, _REJECTION)
    if len(criteria) == 1 and isinstance(parsed, list) and len(parsed) == 2:
        parsed = [parsed]  # the pair of the only criterion
    entries = parsed if isinstance(parsed, list) else [parsed]
    if len(entries) == 1 < len(criteria):
        entries = entries * len(criteria)
    if len(entries) != len(criteria):
        allowed = (
            f"one entry for each of the {len(criteria)} criteria in `rollout_rs` ({', '.join(criteria)}), or one for "
            "all"
        )
        raise SettingError(_REJECTION, value, f"{len(entries)} entries", allowed)
    return [_parse_entry(entry, name) for entry, name in zip(entries, criteria, strict=True)]


def _parse_entry(entry: Any, name: str) -> Bounds:
    part = f"for `{name}`"
    if name.removeprefix("token_") in DIRECTED:
        bounds = _parse_directed(entry, part)
        if name == "token_tv" and (min(bounds) >= 1 or any(1 <= bound < math.inf for bound in bounds)):
            remedy = "Set one such as 0.2, or a pair with inf on the side without a bound."
            raise SettingError(_REJECTION, entry, _TV_REASON, "below 1", remedy, part)
        return bounds
    if name.endswith("k1") and isinstance(entry, list):
        return _parse_pair(entry, _REJECTION, part)
    if isinstance(entry, list):
        remedy = (
            "A pair [lower, upper] is for k1 criteria; `token_tv` and `token_kl` have one for the signs of the "
            "advantage."
        )
        raise SettingError(_REJECTION, entry, allowed="one upper bound", remedy=remedy, part=part)
    upper = parse_number(entry, _REJECTION, part)
    if not name.endswith("k1"):
        if upper <= 0:
            raise SettingError(_REJECTION, upper, allowed="a positive upper bound", part=part)
        if name.endswith("_tv") and 1 <= upper < math.inf:
            raise SettingError(_REJECTION, upper, _TV_REASON, "below 1", "Set one such as 0.2.", part)
        return upper
    if upper < 1:
        allowed = (
            "a pair of bounds on the ratio such as [0.5, 2.0], or a number u of at least 1 that stands for [1/u, u]"
        )
        remedy = f"With several criteria, one pair each is written [[0.5, 2.0], [0.5, 2.0]].{_underscore_hint(upper)}"
        raise SettingError(_REJECTION, upper, allowed=allowed, remedy=remedy, part=part)
    return [1 / upper, upper]


def _parse_directed(entry: Any, part: str) -> list[float]:
    """Largest change of a token with negative and with positive advantage. One number sets both."""
    pair = entry if isinstance(entry, list) else [entry, entry]
    if len(pair) != 2 or any(isinstance(bound, list) for bound in pair):
        allowed = "a number, or a pair for negative and positive advantages"
        raise SettingError(_REJECTION, entry, allowed=allowed, part=part)
    bounds = [parse_number(bound, _REJECTION, part) for bound in pair]
    if min(bounds) <= 0:
        reason = "the bounds are on the size of the change"
        raise SettingError(_REJECTION, entry, reason, "made of positive bounds", part=part)
    return bounds


def _parse_pair(pair: list, field: str, part: str = "") -> list[float]:
    """Bounds around 1 on a ratio. A lower one of 0 or an upper one of infinity means none."""
    if len(pair) != 2 or any(isinstance(bound, list) for bound in pair):
        raise SettingError(field, pair, allowed="a number or a pair [lower, upper]", part=part)
    lower, upper = (parse_number(bound, field, part) for bound in pair)
    if not 0 <= lower <= 1 <= upper:
        reason = "bounds that exclude a ratio of 1 drop the tokens on which both policies agree"
        raise SettingError(field, [lower, upper], reason, "a pair with 0 <= lower <= 1 <= upper", part=part)
    return [lower, upper]
