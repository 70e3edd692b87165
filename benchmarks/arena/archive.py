"""
The runs in one file: settings, held-out accuracy, and what the monitor's rules read of every step.

`run.py` unpacks it into its output folder, so that runs that are in it are not trained again.
"""

import json
import lzma
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.tools.monitor.rules import BOUNDS


ARCHIVE = Path(__file__).parent / "runs.jsonl.xz"
DIGITS = 4
# Beside what bounds compare: what their conditions read
CONDITIONS = ["kl", "engine_kl", "engine_k3_kl", "kl_advantage_positive", "staleness_max", "rejected/others"]
# Of rules that know what rounding does, and the mean of `(r - 1) A` by the sign of the advantage
OF_RULES = ["rounding", "log_rounding", "signed_positive", "signed_negative"]
# The same of the package
OF_AUTO = ["rounding_tv", "rounding_log_ratio", "gain_advantage_positive", "gain_advantage_negative"]
OF_TRL = [
    "step",
    "loss",
    "reward",
    "grad_norm",
    "entropy",
    "completions/clipped_ratio",
    "completions/mean_length",
    "clip_ratio/region_mean",
]
KEYS = {
    *OF_TRL,
    *(PREFIX + key for key in (*CONDITIONS, *OF_RULES, *OF_AUTO, *(bound.key for bound in BOUNDS.values()))),
}


def shortened(record: Mapping[str, Any]) -> dict[str, Any]:
    """A run with the metrics of `KEYS` alone, to four digits."""
    history = {
        key: [None if value is None else float(f"{value:.{DIGITS}g}") for value in values]
        for key, values in record["history"].items()
        if key in KEYS and any(values)
    }
    history["step"] = record["history"]["step"]
    return {**record, "history": history}


def pack(folder: Path, names: Iterable[str], archive: Path = ARCHIVE) -> None:
    """Write the runs of these names that are in the folder, a line each."""
    lines = []
    for name in sorted({*names}):
        path = folder / f"{name}.json"
        if path.exists():
            lines.append(json.dumps({"name": name, **shortened(json.loads(path.read_text()))}, separators=(",", ":")))
    archive.write_bytes(lzma.compress("\n".join(lines).encode(), preset=9))


def read(archive: Path = ARCHIVE) -> dict[str, dict[str, Any]]:
    """The runs of an archive, by name. Without an archive there are none."""
    if not archive.exists():
        return {}
    records = map(json.loads, lzma.decompress(archive.read_bytes()).decode().splitlines())
    return {record.pop("name"): record for record in records}


def unpack(folder: Path, archive: Path = ARCHIVE) -> None:
    """Write the runs of an archive that are not in the folder."""
    records = read(archive)
    if records:
        folder.mkdir(parents=True, exist_ok=True)
    for name, record in records.items():
        path = folder / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(record))
