"""
Strict parsing of thresholds in Python, YAML, JSON and on a command line.

Text is accepted in verl's form (`"0.5_2.0"`, `"0.6_1.6,2.5"`) and as a bracketed list (`"[[0.6, 1.6], 2.5]"`). Python's
`float` would read `"0.5_2"` as 0.52, and so does YAML without quotes, hence the number grammar below.
"""

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..messages import SettingError, nearest, warn
from .criteria import CRITERIA, DIRECTED, FIRST_NAMES


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|\+?\.?inf", re.IGNORECASE)
_REJECTION = "rollout_rs_threshold"

_TV_REASON = "a difference of probabilities is at most 1, so such a bound rejects nothing"

Bounds = float | list[float]
WeightBounds = Bounds | list[list[float]]


# As YAML reads them
TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def parse_truth(value: object, field: str) -> bool:
    """A truth value, or text that YAML reads as one."""
    truth = TRUTH.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(truth, bool):
        raise SettingError(field, value, allowed="true or false")
    return truth


def none_if_null(value: object) -> Any:
    """Turn the text "none" or "null", of a command line or of another tool, into `None`."""
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
    """A sentence on a number that YAML may have made of a pair, as 0.52 of `0.5_2`. Such a number has two digits or more."""
    if not 0.1 <= number < 1 or len(repr(number)) < len("0.52"):
        return ""
    return " YAML and Python read an unquoted 0.5_2 as the number 0.52: write the pair as [0.5, 2.0], or quote it."


def parse_structure(value: object, field: str) -> Any:
    """Turn text such as `"0.6_1.6,2.5"` or `"[[0.6, 1.6], 2.5]"` into lists of text of numbers; tuples become lists."""
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
    parts = [part[0] if len(part) == 1 else part for part in split]
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts


def is_by_sign(threshold: object) -> bool:
    """`True` for two pairs: bounds for negative and for positive advantages."""
    return isinstance(threshold, list) and len(threshold) == 2 and all(isinstance(pair, list) for pair in threshold)


def parse_weight_threshold(value: object) -> WeightBounds:
    """Parse `rollout_is_threshold`: a number (truncation), a pair around 1, or two, for the signs of the advantage."""
    field = "rollout_is_threshold"
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


def numbers_in(value: object) -> Any:
    """Thresholds of rejection with all numbers parsed, in their lists, before the criteria are known."""

    def parsed(part: object) -> Any:
        return [*map(parsed, part)] if isinstance(part, list | tuple) else parse_number(part, _REJECTION)

    return parsed(parse_structure(value, _REJECTION))


def parse_rejection_thresholds(value: object, criteria: Sequence[str] | None) -> list[Bounds]:
    """Parse `rollout_rs_threshold`: one entry per criterion, or one for all; the pair of the only one may stand alone."""
    if criteria is None:
        return []
    if value is None:
        remedy = (
            "Give one entry per criterion: bounds on the ratio such as [0.5, 2.0] for k1, an upper bound such as 0.01 for "
            "k2 and k3."
        )
        raise SettingError("rollout_rs", criteria, f"but `{_REJECTION}` is not set", remedy=remedy)
    parsed = parse_structure(value, _REJECTION)
    if len(criteria) == 1 and isinstance(parsed, list) and len(parsed) == 2:
        parsed = [parsed]  # the pair of the only criterion
    entries = parsed if isinstance(parsed, list) else [parsed]
    if len(entries) == 1 < len(criteria):
        entries = entries * len(criteria)
    if len(entries) != len(criteria):
        allowed = f"one entry for each of the {len(criteria)} criteria in `rollout_rs` ({', '.join(criteria)}), or one for all"
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
        remedy = "A pair [lower, upper] is for k1 criteria; `token_tv` and `token_kl` have one for the signs of the advantage."
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
    """Largest change of a token with a negative and with a positive advantage. One number stands for both."""
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
    """Bounds around 1 on a ratio. A lower bound of 0 or an upper bound of infinity means no bound."""
    if len(pair) != 2 or any(isinstance(bound, list) for bound in pair):
        raise SettingError(field, pair, allowed="a number or a pair [lower, upper]", part=part)
    lower, upper = (parse_number(bound, field, part) for bound in pair)
    if not 0 <= lower <= 1 <= upper:
        reason = "bounds that exclude a ratio of 1 drop the tokens on which both policies agree"
        raise SettingError(field, [lower, upper], reason, "a pair with 0 <= lower <= 1 <= upper", part=part)
    return [lower, upper]


# Bounds that can hardly be meant --------------------------------------------------------------------------------------

# A weight, of which published caps end at 20; nats per token; and factors per token
_LARGEST_WEIGHT, _LARGEST_MEAN, _MEAN_RATIOS = 100.0, 1.0, (0.1, 10.0)


def warn_about_bounds(settings: Any) -> None:
    """Warn about bounds of weights and criteria of [`Settings`] that no token or completion is likely to pass."""
    field = "vllm_importance_sampling_clip_max" if settings.by_trl else "rollout_is_threshold"
    if settings.bounding is not None:
        uppers = [settings.bounding.upper, *(settings.bounding.positive or ())[1:]]
        if large := [upper for upper in uppers if _LARGEST_WEIGHT < upper < math.inf]:
            warn(
                f"`{field}` allows weights up to {large[0]:g}, so that one token or completion may count as much as "
                f"{large[0]:g} others. Common bounds are 2 to 20. Infinity, in YAML `.inf`, means no bound.",
                field,
            )
    criteria = settings.rollout_rs or []
    for name, entry in zip(criteria, settings.rollout_rs_threshold if criteria else [], strict=True):
        if reason := _hardly_meant(name, entry):
            warn(f"`{_REJECTION}` for `{name}` is {entry}: {reason}", _REJECTION)
    cap = settings.rollout_clip_ratio_c
    if settings.clips_around_sampler and cap is not None and _LARGEST_WEIGHT < cap < math.inf:
        warn(f"`rollout_clip_ratio_c` is {cap:g}. Common bounds are 2 to 20. If no bound is meant, set it to None.")


def _hardly_meant(name: str, entry: Bounds) -> str:
    """A sentence on a bound of a criterion that hardly rejects anything; empty text for others."""
    bounds = entry if isinstance(entry, list) else [entry]
    if all(bound in (0, math.inf) for bound in bounds):
        return "no bound, so that nothing is rejected. Set a bound, or remove the criterion."
    whole = "turn" if name.startswith("turn") else "completion"
    if "_mean_" in name and name.endswith(("k2", "k3", "kl")) and bounds[0] > _LARGEST_MEAN:
        return (
            f"a mean over a {whole}, in nats per token, which is about 0.001 in healthy runs. So it rejects hardly any "
            f"{whole}. A common bound is 0.01; for single tokens take `token_{name.rpartition('_mean_')[2]}`."
        )
    lowest, largest = _MEAN_RATIOS
    if "_mean_k1" in name and (0 < bounds[0] < lowest or largest < bounds[1] < math.inf):
        return (
            f"a geometric mean of ratios of a {whole}, which is about 1 in healthy runs. So it rejects hardly any {whole}. "
            f"A common pair is [0.99, 1.01]; for the worst token of a {whole} take `{name.replace('_mean_', '_max_')}`."
        )
    return ""
