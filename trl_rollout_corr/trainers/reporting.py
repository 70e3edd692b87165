"""The histogram of the log-ratio, for the reporting backends that draw one. Scalars go through `Trainer.log`."""

from itertools import accumulate

import numpy as np
from transformers import Trainer
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

from ..metrics import PREFIX, SIDE_BINS


# A picture needs no more than two bins per octave; W&B takes 512 at most.
_MERGED = 16


def coarser(counts: list[float], edges: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """
    Merge bins of the histogram on either side of 0.

    Args:
        counts (`list[float]`):
            Counts of [`~trl_rollout_corr.metrics.Statistics.histogram`].
        edges (`list[float]`):
            Its edges, in nats.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: counts and edges, one more of these.
    """
    cumulative = [0.0, *accumulate(counts)]
    middle = range(SIDE_BINS, SIDE_BINS + 2)
    kept = [*range(0, SIDE_BINS, _MERGED), *middle, *range(SIDE_BINS + 1 + _MERGED, len(edges), _MERGED)]
    return np.diff([cumulative[i] for i in kept]), np.array([edges[i] for i in kept])


def report_histogram(trainer: Trainer, counts: list[float], edges: list[float], mode: str):
    """
    Send the histogram of the log-ratio to W&B, trackio and TensorBoard, whichever the run reports to.

    Args:
        trainer ([`~transformers.Trainer`]):
            Trainer, on the main process.
        counts (`list[float]`):
            Counts of the histogram.
        edges (`list[float]`):
            Its edges, in nats.
        mode (`str`):
            `"train"` or `"eval"`.
    """
    counts, edges = coarser(counts, edges)
    key = f"{mode}/{PREFIX}log_ratio"
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, WandbCallback) and callback._initialized:
            histogram = callback._wandb.Histogram(np_histogram=(counts, edges))
            callback._wandb.log({key: histogram}, commit=False)  # the scalars of this step follow
        elif isinstance(callback, TrackioCallback) and callback._initialized:
            callback._trackio.log({key: callback._trackio.Histogram(np_histogram=(counts, edges))})
        elif isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            _add_to_tensorboard(callback.tb_writer, key, counts, edges, trainer.state.global_step)


def _add_to_tensorboard(writer, key: str, counts: np.ndarray, edges: np.ndarray, step: int):
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
