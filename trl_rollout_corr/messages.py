"""How the user is spoken to."""

import difflib
import os
import warnings
from collections.abc import Iterable


def warn(message: str):
    """Warn the user, once per run rather than once per rank."""
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(message, UserWarning, stacklevel=2)


def nearest(name: object, names: Iterable[str]) -> str:
    """ " Did you mean 'x'?", or nothing if no name is close."""
    found = difflib.get_close_matches(str(name), list(names), n=1)
    return f" Did you mean {found[0]!r}?" if found else ""
