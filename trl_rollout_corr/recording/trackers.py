"""Output to trackers: the metrics that are tracked, and a histogram of the log-ratio."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import (
    INTEGRATION_TO_CALLBACK,
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
)
from transformers.trainer_callback import CallbackHandler

from ..correction.histogram import SIDE_BINS
from ..health.bands import ESSENTIAL
from ..messages import PREFIX


# Callbacks of `report_to`
_TRACKERS = tuple(INTEGRATION_TO_CALLBACK.values())
# Bins merged into one: two bins per octave are enough for a picture, and W&B takes at most 512.
_MERGED = 16


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


def coarser(counts: Sequence[float], edges: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Merge bins of the histogram on either side of 0: `n` counts and `n + 1` edges, in nats."""
    cumulative = [0.0, *accumulate(counts)]
    middle = range(SIDE_BINS, SIDE_BINS + 2)
    places = [*range(0, SIDE_BINS, _MERGED), *middle, *range(SIDE_BINS + 1 + _MERGED, len(edges), _MERGED)]
    return np.diff([cumulative[i] for i in places]), np.array([edges[i] for i in places])


def send_histogram(
    handler: CallbackHandler, counts: Sequence[float], edges: Sequence[float], mode: str, step: int
) -> None:
    """Send the histogram of the log-ratio, with edges in nats, to the trackers that can show one."""
    merged = coarser(counts, edges)
    key = f"{mode}/{PREFIX}log_ratio"
    for callback in handler.callbacks:
        if isinstance(callback, WandbCallback) and callback._initialized:
            histogram = callback._wandb.Histogram(np_histogram=merged)
            callback._wandb.log({key: histogram}, commit=False)  # the scalars of this step follow
        elif isinstance(callback, TrackioCallback) and callback._initialized:
            callback._trackio.log({key: callback._trackio.Histogram(np_histogram=merged)})
        elif isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            _add_to_tensorboard(callback.tb_writer, key, *merged, step)


def _add_to_tensorboard(writer: Any, key: str, counts: np.ndarray, edges: np.ndarray, step: int) -> None:
    centers = (edges[:-1] + edges[1:]) / 2
    writer.add_histogram_raw(
        key,
        min=edges[0],
        max=edges[-1],
        num=counts.sum(),
        sum=(counts * centers).sum(),
        sum_squares=(counts * centers**2).sum(),
        bucket_limits=edges[1:].tolist(),
        bucket_counts=counts.tolist(),
        global_step=step,
    )
