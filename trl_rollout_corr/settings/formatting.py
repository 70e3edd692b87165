"""Numbers and settings as one writes them."""

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml


def number(value: float | None, digits: int = 3) -> str:
    """A number in a sentence: a few digits, and powers of ten only where zeros would have to be counted."""
    if value is None:
        return ""
    if math.isnan(value):
        return "NaN"
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e5):
        return f"{int(value)}"
    if math.isfinite(value) and not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.{digits}g}"


def percent(share: float | None) -> str:
    """A share in percent."""
    return "" if share is None else f"{number(100 * share)} %"


def rounded(value: float) -> str:
    """A number in a column of large and small ones: three digits, or all of those before the point."""
    return "-" if math.isnan(value) else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def three_decimals(value: float | None) -> str:
    """A number in a column of shares and ratios."""
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def steps(first: int, last: int) -> str:
    """One optimizer step, or from which to which."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def yaml_lines(fields: Mapping[str, Any]) -> str:
    """Fields as YAML, one a line."""
    return "".join(f"{key}: {_in_one_line(value)}\n" for key, value in fields.items())


def _in_one_line(value: Any) -> str:
    return yaml.safe_dump([value], default_flow_style=True, width=1000).strip()[1:-1]


def printable(text: str) -> str:
    """Control characters as signs; direction marks, which could reorder what stands around them, as their names."""
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]",
        lambda match: chr(0x2400 + ord(match[0])) if ord(match[0]) < 32 else f"\\u{ord(match[0]):04x}",
        text,
    )
