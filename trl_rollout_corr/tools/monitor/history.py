"""
The history of a run as a trainer or a tracker keeps it, in the keys of the trainer. No torch.

Transformers gives trackers (W&B, TensorBoard, Trackio) every metric with a prefix: `train/`, and `eval/` for an
evaluation. Trackers count calls, so that the optimizer step is a metric of its own.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ...messages import PREFIX, plain
from .stock import OF_TRL, is_stock_window, value_of
from .windows import is_training_window


WITHOUT_METRICS = (
    "contains no `rollout_corr/` metrics, and none of TRL's `sampling/*`: the run used no trainer of this package, "
    "and TRL logged no ratio between vLLM and the trainer"
)
# Keys of the optimizer step, and then of the x-axis of a tracker, which counts something else where a key above is
# there
STEPS = ("step", "train/global_step", "global_step", "training/global_step", "Step", "_step")
_TRAIN, _EVALUATION = "train/", "eval/"
# Beginnings of keys of which each entry of training has at least one number
_OF_TRAINING = ("loss", "learning_rate", "grad_norm", PREFIX, OF_TRL)
_NO_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # as JSON of trackers has them


def is_window(entry: Mapping[str, object]) -> bool:
    """True if a log entry of training shows metrics of this package, or of TRL's own correction."""
    return is_training_window(entry) or is_stock_window(entry)


def as_logged(history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """
    Rows of a history with the keys that the trainer logged: without the prefixes of trackers, and with the optimizer
    step as `step`, where it is known. A missing value is left out: `None`, or NaN in a row of something else than
    training, because a table has a cell for every metric in each row.
    """
    rows = [{str(key): _value(value) for key, value in row.items() if value is not None} for row in history]
    renamed = [_without_missing({_key(key): value for key, value in row.items()}) for row in rows]
    windows = [row for row, entry in zip(rows, renamed, strict=True) if is_window(entry)]
    counted = next((key for key in STEPS if any(value_of(row, key) is not None for row in windows)), "step")
    for row, entry in zip(rows, renamed, strict=True):
        entry.pop("step", None)
        if value_of(row, counted) is not None:
            entry["step"] = row[counted]
    return renamed


def _without_missing(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry whose NaN are results: all of them in training, and none elsewhere."""
    if any(key.startswith(_OF_TRAINING) and value_of(entry, key) is not None for key in entry):
        return entry
    return {key: value for key, value in entry.items() if not (isinstance(value, float) and math.isnan(value))}


def _key(name: str) -> str:
    if name.startswith(_EVALUATION):
        return f"eval_{name.removeprefix(_EVALUATION)}"
    return name.removeprefix(_TRAIN)


def _value(value: Any) -> Any:
    return _NO_NUMBERS.get(value, value) if isinstance(value, str) else plain(value)
