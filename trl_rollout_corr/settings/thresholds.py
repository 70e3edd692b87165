"""
Strict parsing of the thresholds that users write, in Python, YAML, JSON or on a command line.

Text is accepted in verl's form (`"0.5_2.0"`, `"0.6_1.6,2.5"`) and as a bracketed list (`"[[0.6, 1.6], 2.5]"`). Python's
`float` would read `"0.5_2"` as 0.52, and so does YAML without quotes, hence the number grammar below.
"""

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..messages import nearest
from .criteria import CRITERIA, DIRECTED, FIRST_NAMES


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|\+?\.?inf", re.IGNORECASE)
_UNDERSCORE_HINT = (
    "(YAML and Python read an unquoted 0.5_2 as the number 0.52: write the pair as [0.5, 2.0], or quote it.)"
)

Bounds = float | list[float]


def parse_number(value: Any, field: str) -> float:
    """
    Parse one number.

    Args:
        value (`Any`):
            A number, or its text.
        field (`str`):
            Field that the error names.

    Returns:
        `float`: the number, possibly infinite.

    Raises:
        `ValueError`: if it is not a number, or NaN.
    """
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        return float(value.strip().lower().replace(".inf", "inf"))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(OverflowError):  # of an integer beyond all floats
            if not math.isnan(value):
                return float(value)
    raise ValueError(f"`{field}` must be made of numbers, got {value!r}. {_UNDERSCORE_HINT}")


def parse_structure(value: Any, field: str) -> Any:
    """
    Turn text into nested lists of still unparsed numbers: `"0.6_1.6,2.5"` and `"[[0.6, 1.6], 2.5]"` both give
    `[["0.6", "1.6"], "2.5"]`, `"0.6_1.6"` gives `[["0.6", "1.6"]]` and `"2.5"` gives `"2.5"`. Anything but text is
    returned as it is.

    Args:
        value (`Any`):
            What the user wrote.
        field (`str`):
            Field that the error names.

    Returns:
        `Any`: a scalar, or a list of scalars and pairs.

    Raises:
        `ValueError`: if brackets do not match.
    """
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
        value = ",".join(value)  # the command line passes a list of text
    if isinstance(value, tuple):
        return list(value)
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith("["):
        try:
            return json.loads(re.sub(r"[^\[\],\s]+", lambda match: json.dumps(match.group()), text))
        except json.JSONDecodeError as error:
            raise ValueError(f"`{field}` is not a list of numbers and pairs of numbers, got {value!r}.") from error
    split = [part.strip().split("_") for part in text.split(",")]
    parts = [part[0] if len(part) == 1 else part for part in split]
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts


def parse_weight_threshold(value: Any) -> Bounds:
    """
    Parse `rollout_is_threshold`.

    Args:
        value (`Any`):
            One number `C` (truncation) or a pair `[lower, upper]` (IcePop).

    Returns:
        `float` or `list[float]`: the bound, or the pair.

    Raises:
        `ValueError`: if it is neither, or if the bounds exclude a ratio of 1.
    """
    field = "rollout_is_threshold"
    if value is None:
        raise ValueError(
            f"`{field}` must be a number or a pair [lower, upper], got None. For weights without a bound set it to inf; for "
            "no weights set `rollout_is` to None."
        )
    parsed = parse_structure(value, field)
    if isinstance(parsed, list):
        return _parse_pair(parsed[0] if len(parsed) == 1 and isinstance(parsed[0], list) else parsed, field)
    upper = parse_number(parsed, field)
    if upper < 1:
        raise ValueError(
            f"`{field}` must be at least 1 when it is one number (a truncation bound), got {upper}: a lower bound would "
            f"shrink the weight of tokens on which both policies agree. Set a number such as 2.0, or a pair such as "
            f"[0.5, 5.0]. {_UNDERSCORE_HINT}"
        )
    return upper


def parse_criteria(value: Any) -> list[str] | None:
    """
    Parse `rollout_rs`.

    Args:
        value (`Any`):
            Names of criteria, as a list or as comma-separated text, or `None`.

    Returns:
        `list[str]` or `None`: the names.

    Raises:
        `ValueError`: if a name is unknown or given twice.
    """
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, (list, tuple)) and len(names) == 1 and isinstance(names[0], str):
        names = names[0].split(",")  # the command line passes one element with commas
    if names is None:
        return None
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"`rollout_rs` must be a list of names, got {value!r}. Allowed names: {', '.join(CRITERIA)}.")
    names = [name.strip() for name in names]
    if names in (["none"], ["null"], ["None"], []):
        return None
    for name in names:
        if name not in CRITERIA:
            hint = f" Did you mean {FIRST_NAMES[name]!r}, its name today?" if name in FIRST_NAMES else None
            raise ValueError(
                f"`rollout_rs` contains {name!r}.{hint or nearest(name, CRITERIA)} Allowed names: {', '.join(CRITERIA)}."
            )
    if len(set(names)) < len(names):
        raise ValueError(f"`rollout_rs` names a criterion twice, got {names}. List each once.")
    return names


def parse_rejection_thresholds(value: Any, criteria: Sequence[str]) -> list[Bounds]:
    """
    Parse `rollout_rs_threshold`.

    Args:
        value (`Any`):
            One entry per criterion, or a single entry for all of them. For k1, an entry is a pair of bounds on the
            ratio, or a number `u` that stands for `[1/u, u]`. For `tv` and `kl` it is a bound for negative and one for
            positive advantages, or one number for both. For the others it is an upper bound. The pair of the only
            criterion may stand alone: `[0.5, 2.0]`.
        criteria (`Sequence[str]`):
            Names of the criteria.

    Returns:
        `list[float | list[float]]`: one entry per criterion, a pair for k1, `tv` and `kl`.

    Raises:
        `ValueError`: if the number of entries is wrong, or an entry does not fit its criterion.
    """
    field = "rollout_rs_threshold"
    parsed = parse_structure(value, field)
    if len(criteria) == 1 and isinstance(parsed, list) and len(parsed) == 2:
        parsed = [parsed]  # the pair of the only criterion
    entries = parsed if isinstance(parsed, list) else [parsed]
    if len(entries) == 1:
        entries = entries * len(criteria)
    if len(entries) != len(criteria):
        raise ValueError(
            f"`{field}` must have one entry for each of the {len(criteria)} criteria in `rollout_rs` "
            f"({', '.join(criteria)}), or one entry for all of them; got {len(entries)} in {value!r}."
        )
    return [_parse_entry(entry, name) for entry, name in zip(entries, criteria, strict=True)]


def _parse_entry(entry: Any, name: str) -> Bounds:
    field = "rollout_rs_threshold"
    if isinstance(entry, tuple):
        entry = list(entry)
    if name.endswith("k1"):
        if isinstance(entry, list):
            return _parse_pair(entry, f"{field}` for `{name}")
        upper = parse_number(entry, f"{field}` for `{name}")
        if upper < 1:
            raise ValueError(
                f"`{field}` for `{name}` must be a pair of bounds on the ratio such as [0.5, 2.0], or a number u of at "
                f"least 1 that stands for [1/u, u]; got {upper}. With several criteria, one pair each is written "
                f"[[0.5, 2.0], [0.5, 2.0]]. {_UNDERSCORE_HINT}"
            )
        return [1 / upper, upper]
    if name.removeprefix("token_") in DIRECTED:
        bounds = _parse_directed(entry, f"{field}` for `{name}")
        if name == "token_tv" and (min(bounds) >= 1 or any(1 <= bound < math.inf for bound in bounds)):
            raise ValueError(
                f"`{field}` for `token_tv` must be below 1, got {entry!r}: a difference of probabilities is at most 1, so "
                "that such a bound rejects nothing. Set one such as 0.2, or a pair with inf on the side without a bound."
            )
        return bounds
    if isinstance(entry, list):
        raise ValueError(
            f"`{field}` for `{name}` must be one upper bound, got {entry!r}. Only k1 criteria take a pair [lower, upper]."
        )
    upper = parse_number(entry, f"{field}` for `{name}")
    if upper <= 0:
        raise ValueError(f"`{field}` for `{name}` must be a positive upper bound, got {upper}.")
    return upper


def _parse_directed(entry: Any, field: str) -> list[float]:
    """Largest change against a negative advantage, and with a positive one. One number stands for both."""
    pair = entry if isinstance(entry, list) else [entry, entry]
    if len(pair) != 2 or any(isinstance(bound, list) for bound in pair):
        raise ValueError(f"`{field}` must be a number, or a pair for negative and positive advantages, got {entry!r}.")
    bounds = [parse_number(bound, field) for bound in pair]
    if min(bounds) <= 0:
        raise ValueError(
            f"`{field}` must be made of positive bounds, got {entry!r}: they are on the size of the change."
        )
    return bounds


def _parse_pair(pair: list, field: str) -> list[float]:
    """Two numbers around 1, as bounds on a ratio. A lower bound of 0 or an upper bound of infinity is no bound."""
    if len(pair) != 2 or any(isinstance(bound, list) for bound in pair):
        raise ValueError(f"`{field}` must be a number or a pair [lower, upper], got {pair!r}.")
    lower, upper = (parse_number(bound, field) for bound in pair)
    if not 0 <= lower <= 1 <= upper:
        raise ValueError(
            f"`{field}` must be a pair with 0 <= lower <= 1 <= upper, got [{lower}, {upper}]: bounds that exclude a ratio "
            "of 1 drop the tokens on which both policies agree."
        )
    return [lower, upper]
