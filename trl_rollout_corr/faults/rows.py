"""
Exact changes of what was sampled: rows of a dump in, rows of a dump out. Lists of a row have one entry per token of the
completion, log-probabilities are in nats.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from ..dumps.writing import files_of, write_rows


Row = Mapping[str, Any]
Change = Callable[[Row], dict[str, Any]]


def shift_by_one(row: Row) -> dict[str, Any]:
    """Each token gets the sampler's log-probability of the token before it."""
    logps = row["rollout_logps"]
    return {**row, "rollout_logps": [*logps[:1], *logps[:-1]]}


def force_the_last_token(row: Row) -> dict[str, Any]:
    """The sampler was made to end, by a limit or a stop string, and reports the end as certain."""
    return {**row, "rollout_logps": [*row["rollout_logps"][:-1], *[0.0] * bool(row["rollout_logps"])]}


def another_first_token(row: Row) -> dict[str, Any]:
    """The sampler read another start, such as two BOS tokens: of its first token it was surer by a nat and a half."""
    first = [min(0.0, x + 1.5) if x > -1.5 else x - 1.5 for x in row["rollout_logps"][:1]]
    return {**row, "rollout_logps": [*first, *row["rollout_logps"][1:]]}


def nan_rows(row: Row) -> dict[str, Any]:
    """Whole rows of logits are NaN: the sampler has no log-probability from the middle of a completion on, in one of four."""
    n = len(row["rollout_logps"])
    broken = sum(row["token_ids"]) % 4 == 0
    return {
        **row,
        "rollout_logps": [math.nan if broken and i >= n // 2 else x for i, x in enumerate(row["rollout_logps"])],
    }


def rewrite(dump: str | Path, output: str | Path, fault: str) -> Path:
    """
    Write a dump anew, with a fault.

    Args:
        dump (`str` or `Path`):
            Folder of a dump.
        output (`str` or `Path`):
            Folder for the dump with the fault. It must not have one yet.
        fault (`str`):
            Name of a fault of `FAULTS` that changes rows: `"one_token_shift"`, `"bos"`, `"eos"` or `"nan_rows"`.

    Returns:
        `Path`: the folder with the fault.

    Raises:
        `ValueError`: if the fault does not change rows, there is no dump, or the output has one already.
    """
    from .catalog import FAULTS

    known = sorted(name for name, fault in FAULTS.items() if fault.rows is not None)
    if fault not in known:
        raise ValueError(f"`fault` is {fault!r}; a dump can be rewritten with one of {', '.join(known)}.")
    change: Any = FAULTS[fault].rows
    source, target = Path(dump), Path(output)
    if not files_of(source):
        raise ValueError(f"`dump` is {str(dump)!r}, where no file step-*.parquet is; name the folder of a dump.")
    if target.exists() and files_of(target):
        raise ValueError(f"`output` is {str(output)!r}, which holds a dump already; name another folder.")
    for file in files_of(source):
        table = pq.read_table(file)
        metadata = table.schema.metadata or {}
        rows = [change(row) for row in table.to_pylist()]
        settings, about = (json.loads(metadata.get(key, b"{}")) for key in (b"settings", b"about"))
        write_rows(target, rows[0]["step"], rows[0]["rank"], rows, settings, about)
    return target
