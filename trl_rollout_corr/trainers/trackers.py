"""Output to trackers: the metrics that are tracked."""

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import CallbackHandler

from ..health.bands import ESSENTIAL
from ..messages import PREFIX


# Callbacks of `report_to`
_TRACKERS = tuple(INTEGRATION_TO_CALLBACK.values())


def choose_metrics(handler: CallbackHandler) -> None:
    """
    Make the trackers among the callbacks follow `rollout_tracked_metrics`, which is read at every log.

    The choice is made in each tracker, as the log of the trainer and the other callbacks keep all metrics.
    """
    for callback in handler.callbacks:
        chooses = getattr(callback.on_log, "func", None) is _log_tracked
        if isinstance(callback, _TRACKERS) and not chooses:
            callback.on_log = partial(_log_tracked, callback.on_log)


def _log_tracked(
    on_log: Callable[..., Any],
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
    logs: dict[str, float] | None = None,
    **kwargs: object,
) -> Any:
    """`on_log` of a tracker, with the metrics that are tracked."""
    if logs is not None and getattr(args, "rollout_tracked_metrics", "all") == "essential":
        logs = {key: value for key, value in logs.items() if _is_essential(key)}
    return on_log(args, state, control, logs=logs, **kwargs)


def _is_essential(key: str) -> bool:
    """True of an essential metric of training or evaluation, and of metrics that are not of rollout correction."""
    _, ours, name = key.partition(PREFIX)
    return not ours or name in ESSENTIAL
