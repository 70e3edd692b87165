"""Default of a field that the user has not set."""

from typing import Any


class Unset:
    """
    Default of a field that a preset fills in. A value of the user replaces it, even one equal to `shown`, and is then kept.

    `shown` is for `--help`. No subclass of `str` or `float`: argparse converts only text, so the object reaches the
    configuration unchanged.
    """

    def __init__(self, shown: Any):
        self.shown = shown

    def __str__(self) -> str:
        return str(self.shown)

    __repr__ = __str__


def unset(shown: Any) -> Any:
    """Return an [`Unset`], typed as a value of the field."""
    return Unset(shown)
