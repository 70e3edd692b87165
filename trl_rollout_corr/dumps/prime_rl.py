"""
The token export of prime-rl, read as a dump: JSON lines in `token_exports/step_<n>/rank_<n>.jsonl`, one for each sequence
(`trainer.enable_token_export = true`, version 1 of its format).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


_FILES = ("rank_*.jsonl", "step_*/rank_*.jsonl", "token_exports/step_*/rank_*.jsonl")
_VERSION = 1
_NUMBERS = ("step", "token_ids", "loss_mask", "trainer_logprobs", "inference_logprobs")


def exports_in(folder: Path) -> list[Path]:
    """Files of a token export in a folder, in `token_exports` below it, or of one step."""
    return sorted(next((found for pattern in _FILES if (found := list(folder.glob(pattern)))), []))


def read_exports(files: list[Path]) -> list[dict[str, Any]]:
    """
    Rows of a dump. A completion begins with the first token of the loss; everything before is the prompt. The export has no
    age, no turns and no second score.

    Raises:
        `ValueError`: in one line, if a line is not a sequence of version 1.
    """
    rows = []
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
                complete = record["schema_version"] == _VERSION and all(name in record for name in _NUMBERS)
            except (ValueError, KeyError, TypeError):
                complete = False
            if not complete:
                raise ValueError(
                    f"line {number} of {file.name} is not a sequence of version {_VERSION} of prime-rl's export"
                )
            if any(record["loss_mask"]):
                rows.append(_row(record))
    return sorted(rows, key=lambda row: int(row["step"]))


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    mask = record["loss_mask"]
    start = mask.index(True)

    def of_completion(name: str) -> list[float]:
        return [np.nan if x is None else x for x in (record.get(name) or [None] * len(mask))[start:]]

    def mean_of(name: str) -> float:
        values = np.array(of_completion(name), float)[mask[start:]]
        return float(np.nanmean(values)) if np.isfinite(values).any() else np.nan

    return {
        "step": record["step"],
        "sampled": True,
        "worst": False,
        "reward": mean_of("rewards"),
        "advantage": mean_of("advantages"),
        "mask": mask[start:],
        "keep": [not masked for masked in (record.get("is_masked") or [None] * len(mask))[start:]],
        "token_ids": record["token_ids"][start:],
        "train_logps": of_completion("trainer_logprobs"),
        "rollout_logps": of_completion("inference_logprobs"),
        "coefficients": [1.0] * (len(mask) - start),
        "prompt_ids": record["token_ids"][:start],
        **dict.fromkeys(("staleness", "padding", "again_logps", "turn_ids", "token_staleness")),
    }
