"""How the user is spoken to."""

import difflib
import logging
import os
import warnings
from collections.abc import Iterable


# First part of every metric key
PREFIX = "rollout_corr/"

# What is said while a run goes on. Without a handler of the user's, Python writes it to standard error as it is.
logger = logging.getLogger("trl_rollout_corr")


class SelfContainedError(ValueError):
    """An error that names what it is about, such as another file than the one that a command is asked to read."""


def is_first_rank() -> bool:
    """Whether this process is the one of the job that speaks."""
    return os.environ.get("RANK", "0") == "0"


def warn(message: str):
    """Warn the user about settings, once per run rather than once per rank."""
    if is_first_rank():
        warnings.warn(message, UserWarning, stacklevel=2)


def warn_idle(name: str, value: object, reason: str):
    """Warn the user about a setting without effect."""
    warn(f"`{name}` is set to {value!r} but has no effect: {reason}.")


def report(message: str, *, error: bool = False):
    """Tell the user about the run, once rather than once per rank."""
    if is_first_rank():
        logger.log(logging.ERROR if error else logging.WARNING, "%s", message)


def nearest(name: object, names: Iterable[str]) -> str:
    """ " Did you mean 'x'?", or nothing if no name is close."""
    found = difflib.get_close_matches(str(name), list(names), n=1)
    return f" Did you mean {found[0]!r}?" if found else ""
