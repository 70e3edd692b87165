"""What a file that people send to others must not hold: paths, names of users and machines, addresses and tokens."""

import getpass
import math
import os
import platform
import re
import socket
import tempfile
from functools import cache
from pathlib import Path
from typing import Any


_COMMON = {"root", "user", "ubuntu", "admin", "localhost", "home", "runner"}  # names that tell nothing
_PATH = re.compile(r"(?:\b[A-Za-z]:)?(?:[/\\][\w.@+~=-]+){2,}[/\\]?")
_SECRETS = {
    r"\b(?:hf|sk|ghp)_\w{8,}": "<token>",
    r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+": "<mail>",
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b": "<address>",
}


@cache
def names_of_this_machine() -> dict[str, str]:
    """What must not be told, as patterns, and what stands for it: folders, and names of the user and the machine."""
    folders = {Path.home(), Path.cwd(), Path(tempfile.gettempdir()), Path(__file__).parents[1]}
    known = sorted((str(folder) for folder in folders if len(folder.parts) > 1), key=len, reverse=True)
    host = socket.gethostname()
    names = {host, host.split(".")[0], platform.node(), Path.home().name, getpass.getuser()}
    names |= {os.environ.get(key, "") for key in ("USER", "LOGNAME", "SUDO_USER", "USERNAME", "HOSTNAME")}
    private = sorted((name for name in names if len(name) > 2 and name.lower() not in _COMMON), key=len, reverse=True)
    words = {rf"(?i)(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])": "<name>" for name in private}
    return {**{rf"{re.escape(folder)}(?=[/\\])": "/a/b" for folder in known}, _PATH.pattern: "", **words, **_SECRETS}


def private(value: Any) -> Any:
    """
    A value for JSON without paths, names of users and machines, addresses and tokens. Of a path to a file of a program, its
    name stays. Numbers have five digits, and what is not finite becomes None.
    """
    if isinstance(value, dict):
        return {key: private(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [private(x) for x in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, str):
        for pattern, stand_in in names_of_this_machine().items():
            value = re.sub(pattern, stand_in or _file_of, value)
    return value


def _file_of(path: re.Match[str]) -> str:
    name = re.split(r"[/\\]", path[0])[-1]
    return f"<path> {name}" if re.fullmatch(r"[\w-]+\.(?:py|so|json|yaml|c|cpp|cu)", name) else "<path>"
