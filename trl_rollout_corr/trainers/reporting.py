"""Histogram of the log-ratio, for trackers. Scalars go through `Trainer.log`."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback
from transformers.trainer_callback import CallbackHandler

from ..correction.histogram import SIDE_BINS
from ..messages import PREFIX


# Bins merged into one: two bins per octave are enough for a picture, and W&B takes at most 512.
_MERGED = 16


def coarser(counts: Sequence[float], edges: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Merge bins of the histogram on either side of 0: `n` counts and `n + 1` edges, in nats."""
    cumulative = [0.0, *accumulate(counts)]
    middle = range(SIDE_BINS, SIDE_BINS + 2)
    kept = [*range(0, SIDE_BINS, _MERGED), *middle, *range(SIDE_BINS + 1 + _MERGED, len(edges), _MERGED)]
    return np.diff([cumulative[i] for i in kept]), np.array([edges[i] for i in kept])


def report_histogram(
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
