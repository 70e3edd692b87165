"""Messages to the user: errors, warnings, and messages about a run."""

import difflib
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from enum import Enum
from types import FrameType
from typing import Any

from tqdm import tqdm


__version__ = "0.1.0"

# First part of every metric key
PREFIX = "rollout_corr/"

# Messages during a run. Without a handler they go unchanged to standard error.
logger = logging.getLogger("trl_rollout_corr")
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


class SelfContainedError(ValueError):
    """An error that names the file in its message, for commands that read several files."""


class SettingError(ValueError):
    """
    An error about the value of one setting. With `allowed`, such as "above 1", the message begins "`field` must be
    above 1, got 0.5", otherwise "`field` is 0.5". `part` says which part of the setting the value is for, such as "for
    `token_k1`".
    """

    def __init__(
        self, field: str, value: object, reason: str = "", allowed: str = "", remedy: str = "", part: str = ""
    ) -> None:
        super().__init__(field, value, reason, allowed, remedy, part)  # pickle needs all arguments
        self.field, self.value, self.reason = field, value, reason
        self.allowed, self.remedy, self.part = allowed, remedy, part

    def __str__(self) -> str:
        name = f"`{self.field}` {self.part}".strip()
        if self.allowed:
            text = f"{name} must be {self.allowed}, got {self.value!r}" + (f": {self.reason}" if self.reason else "")
        else:
            text = f"{name} is {self.value!r}" + (f", {self.reason}" if self.reason else "")
        return f"{text}. {self.remedy}".rstrip()


class SettingWarning(UserWarning):
    """A warning about one setting, with its name."""

    def __init__(self, message: str, field: str | None = None):
        super().__init__(message)
        self.field = field


def is_first_rank() -> bool:
    """Return `True` on the rank that writes messages."""
    return os.environ.get("RANK", "0") == "0"


def warn(message: str, field: str | None = None, *, on_any_rank: bool = False) -> None:
    """Warn about settings, on one rank only unless `on_any_rank`. `field` names the setting, if there is one."""
    if on_any_rank or is_first_rank():
        show(SettingWarning(message, field))


def show(warning: Warning | str) -> None:
    """Show a warning at the line of the first caller outside this package, which is the user's."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_own(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(warning, stacklevel=level)


def _is_own(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0] == __package__
    # of a data class, perhaps of the user, whose source is no file
    return package or (frame.f_code.co_name == "__init__" and frame.f_code.co_filename == "<string>")


def warn_idle(name: str, value: object, reason: str) -> None:
    """Warn about a setting without effect."""
    warn(f"`{name}` is set to {value!r} but has no effect: {reason}.", name)


def tell(message: str) -> None:
    """Log what a run does, on one rank only."""
    _log(logging.INFO, message)


def notify(message: str, *, error: bool = False) -> None:
    """Log that something in the run needs attention, on one rank only."""
    _log(logging.ERROR if error else logging.WARNING, message)


def _log(level: int, message: str) -> None:
    """Log a message, above the progress bars. Without a handler, Python would show warnings and errors only."""
    if not is_first_rank() or not logger.isEnabledFor(level):
        return
    with tqdm.external_write_mode(file=sys.stderr):
        if logger.hasHandlers():
            logger.log(level, "%s", message)
        else:
            print(message, file=sys.stderr)  # noqa: T201


def progress(message: str) -> None:
    """Show what a command does at the moment. Its answer alone goes to standard output."""
    print(message, file=sys.stderr, flush=True)  # noqa: T201


def reason_of(error: Exception) -> str:
    """What an error says, with its type if that is not known to go with a sentence."""
    text = " ".join(str(error).split())
    return text if text and isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"


def capitalized(text: str) -> str:
    """The text with a capital first letter, to begin a sentence."""
    return text[:1].upper() + text[1:]


def uncapitalized(text: str) -> str:
    """The text with a small first letter, to follow a colon."""
    return text[:1].lower() + text[1:]


def nearest(name: object, names: Iterable[str]) -> str:
    """The question " Did you mean 'x'?" with the nearest name; empty if no name is close."""
    matches = difflib.get_close_matches(str(name), list(names), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


# Values --------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """
    A value in types of JSON, whatever its type, because no setting and no logged value may end a run.

    Numbers of numpy and torch become Python's, a `torch.dtype` becomes its name in configurations (`"float16"`), and
    everything else its text.
    """
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    try:
        number = value.item()
    except Exception:  # of any type
        number = None
    return number if isinstance(number, bool | int | float) else str(value).removeprefix("torch.")
