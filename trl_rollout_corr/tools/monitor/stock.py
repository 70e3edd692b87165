"""The log of TRL's own trainer, without this package: its keys, and its windows for the rules."""

import math
from collections.abc import Iterable, Mapping

from ...messages import PREFIX


OF_TRL = "sampling/"  # begins the keys of TRL's own correction
_RATIO, _GAP = f"{OF_TRL}importance_sampling_ratio", f"{OF_TRL}sampling_logp_difference"
# Keys of TRL, as `GRPOTrainer` logs them
RATIO, RATIO_MIN, RATIO_MAX = f"{_RATIO}/mean", f"{_RATIO}/min", f"{_RATIO}/max"  # after truncation or masking
GAP, GAP_MAX = f"{_GAP}/mean", f"{_GAP}/max"  # absolute difference of log-probabilities, in nats per token
LENGTH, CLIPPED = "completions/mean_length", "completions/clipped_ratio"


def is_stock_window(entry: Mapping[str, object]) -> bool:
    """True if a log entry of training shows metrics of TRL's own correction."""
    return RATIO in entry or GAP in entry


def value_of(entry: Mapping[str, object], key: str) -> float | None:
    """A number of a log entry; `None` if it is missing or not finite."""
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def windows_of_stock(history: Iterable[Mapping[str, object]]) -> list[dict[str, object]]:
    """Entries of TRL's log, translated to the metric of this package that means the same."""
    found = []
    for entry in history:
        if is_stock_window(entry):
            ratio = value_of(entry, RATIO)
            found.append({**entry, **({} if ratio is None else {f"{PREFIX}rollout_is_mean": ratio})})
    return found
