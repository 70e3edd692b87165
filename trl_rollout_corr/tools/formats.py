"""Numbers and settings as text, and files that appear only when complete."""

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import yaml


# Marks of direction reorder the text around them, control characters may not be in a page, and no file can contain
# halves of characters
_UNSEEN = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def visible(text: str) -> str:
    """Text with marks of direction and control characters written out, such as `\\u202e`."""
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def number(value: float | None, digits: int = 3) -> str:
    """A number in a sentence, with a few digits, and a power of ten only to spare counting zeros."""
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


def number_beyond(value: float, limit: float) -> str:
    """A number that has passed a limit, with two digits, or as many as it takes to be beyond the limit as text."""
    texts = (number(value, digits) for digits in range(2, 18))
    return next((text for text in texts if (float(text) - limit) * (value - limit) > 0), number(value))


def percent(share: float | None) -> str:
    """A share in percent."""
    return "" if share is None else f"{number(100 * share)} %"


def three_decimals(value: float | None) -> str:
    """A number in a column of shares and ratios."""
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def steps(first: int, last: int) -> str:
    """One optimizer step, or a range of them, as text."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def yaml_lines(fields: Mapping[str, object]) -> str:
    """Fields as YAML, one a line."""
    return "".join(f"{key}: {_in_one_line(value)}\n" for key, value in fields.items())


def _in_one_line(value: object) -> str:
    return str(yaml.safe_dump([value], default_flow_style=True, width=1000)).strip()[1:-1]


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file that appears under its name only when it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
