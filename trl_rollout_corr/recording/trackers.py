"""Histogram of the log-ratio for trackers that can show one."""

from collections.abc import Sequence
from itertools import accumulate

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
    places = [*range(0, SIDE_BINS, _MERGED), *middle, *range(SIDE_BINS + 1 + _MERGED, len(edges), _MERGED)]
    return np.diff([cumulative[i] for i in places]), np.array([edges[i] for i in places])


def send_histogram(
    handler: CallbackHandler, counts: Sequence[float], edges: Sequence[float], mode: str, step: int
) -> None:
    """Send the histogram of the log-ratio, with edges in nats, to the trackers that can show one."""
    heights, ends = merged = coarser(counts, edges)
    key = f"{mode}/{PREFIX}log_ratio"
    for callback in handler.callbacks:
        if isinstance(callback, WandbCallback) and callback._initialized:
            histogram = callback._wandb.Histogram(np_histogram=merged)
            callback._wandb.log({key: histogram}, commit=False)  # the scalars of this step follow
        elif isinstance(callback, TrackioCallback) and callback._initialized:
            callback._trackio.log({key: callback._trackio.Histogram(np_histogram=merged)})
        elif isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            centers = (ends[:-1] + ends[1:]) / 2
            callback.tb_writer.add_histogram_raw(
                key,
                min=ends[0],
                max=ends[-1],
                num=heights.sum(),
                sum=(heights * centers).sum(),
                sum_squares=(heights * centers**2).sum(),
                bucket_limits=ends[1:].tolist(),
                bucket_counts=heights.tolist(),
                global_step=step,
            )
