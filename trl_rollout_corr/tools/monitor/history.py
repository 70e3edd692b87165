"""
The history of a run as a trainer or a tracker keeps it, in the keys of the trainer. No torch.

Transformers gives trackers (W&B, TensorBoard, Trackio) every metric with a prefix: `train/`, and `eval/` for an
evaluation. Trackers count calls, so that the optimizer step is a metric of its own.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from .stock import is_stock_window
from .windows import is_training_window


WITHOUT_METRICS = (
    "contains no `rollout_corr/` metrics, and none of TRL's `sampling/*`: the run used no trainer of this package, "
    "and TRL logged no ratio between vLLM and the trainer"
)
# Keys of the optimizer step, and then of the x-axis of a tracker, which counts something else where a key above is
# there
STEPS = ("step", "train/global_step", "global_step", "training/global_step", "Step", "_step")
_TRAIN, _EVALUATION = "train/", "eval/"
_NO_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # as JSON of trackers has them


def is_window(entry: Mapping[str, object]) -> bool:
    """True if a log entry of training shows metrics of this package, or of TRL's own correction."""
    return is_training_window(entry) or is_stock_window(entry)


def as_logged(history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """
    Rows of a history with the keys that the trainer logged: without the prefixes of trackers, and with the optimizer
    step as `step`, where it is known. A missing value (`None`) is left out.
    """
    rows = [dict(row) for row in history]
    renamed = [{_key(key): _value(value) for key, value in row.items() if value is not None} for row in rows]
    windows = [row for row, entry in zip(rows, renamed, strict=True) if is_window(entry)]
    counted = next((key for key in STEPS if any(row.get(key) is not None for row in windows)), "step")
    for row, entry in zip(rows, renamed, strict=True):
        if (step := row.get(counted)) is not None:
            entry["step"] = _value(step)
        elif counted != "step":
            entry.pop("step", None)
    return renamed


def _key(key: object) -> str:
    name = str(key)
    if name.startswith(_EVALUATION):
        return f"eval_{name.removeprefix(_EVALUATION)}"
    return name.removeprefix(_TRAIN)


def _value(value: Any) -> Any:
    return _NO_NUMBERS.get(value, value) if isinstance(value, str) else value
