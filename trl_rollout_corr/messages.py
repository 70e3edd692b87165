"""How the user is spoken to."""

import os
import warnings


def warn(message: str):
    """Warn the user, once per run rather than once per rank."""
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(message, UserWarning, stacklevel=2)
