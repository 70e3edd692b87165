"""
From the queue of the rollout worker to the micro-batch, on the main process: what TRL forgets on the way is carried along.

TRL takes a sample from the queue, drops it if it is stale, packs the others into rows, and sends row `i` to rank `i`. Three
wraps go along: [`Tap`] around the queue sees every sample, [`Carrier`] around the data set adds to what TRL hands on, and
[`Layout`] around the collator adds the keys below to the batch.

`R` rows, one per rank; `B` completions of a row, `T` tokens from the first of the loss to the last of a completion; both of
the largest row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .batch import REWARDS, ROLLOUT_STEP
from .upstream import RolloutSample, TreeRow


TERMS = "rollout_corr_terms"  # (R, B, T) number of the loss term of a token, -1 for none
ADVANTAGES = "rollout_corr_advantages"  # (R, B)
TOOLS = "rollout_corr_tools"  # (R,), there if tokens of the loss have others between them
TEXT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")  # for a dump or a diagnosis
TEXT_PREFIX = "rollout_corr_"

# vLLM's server writes this for minus infinity, which JSON does not have
_SERVER_INFINITY = -9999.0


class Tap:
    """
    A queue of samples, which keeps the last one.

    Args:
        queue (`queue.Queue` or `multiprocessing.Queue`):
            Queue of the rollout worker.
    """

    def __init__(self, queue: Any):
        self._queue = queue
        self._last: RolloutSample | None = None
        self._dropped: list[tuple[float, float]] = []  # tokens and reward

    def __getattr__(self, name: str):
        return getattr(self._queue, name)

    def get(self, *args, **kwargs) -> RolloutSample:
        if self._last is not None:  # nobody handed it on
            self._dropped.append((float(self._last.completion_mask.sum()), reward_of(self._last.metrics)))
            self._last = None
        self._last = checked(self._queue.get(*args, **kwargs))
        return self._last

    def hand_on(self) -> RolloutSample:
        """The last sample, which is trained on."""
        sample, self._last = self._last, None
        if sample is None:
            raise RuntimeError(
                "TRL handed on a sample that it did not take from the queue of the rollout worker. It has changed in a way "
                "that rollout correction does not know: install the version of trl that this release was tested with."
            )
        return sample

    def take_dropped(self) -> list[tuple[float, float]]:
        """Tokens and rewards of the samples that were not handed on since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped


def reward_of(metrics: Mapping[str, float] | None) -> float:
    """Reward of a sample, NaN without."""
    return float((metrics or {}).get("reward", np.nan))


def checked(sample: RolloutSample) -> RolloutSample:
    """
    Check the log-probabilities of a sample.

    Args:
        sample (`RolloutSample`):
            The sample. Log-probabilities that stand for minus infinity or for none are made infinite and NaN.

    Returns:
        `RolloutSample`: the sample.

    Raises:
        `ValueError`: if they are missing, or not one per token.
    """
    if sample.old_log_probs is None:
        raise ValueError(
            "The rollout worker returned a sample without log-probabilities (`old_log_probs` is None), which rollout "
            "correction needs. Ask the sampler for that of every sampled token, after temperature: `logprobs=0` for vLLM."
        )
    logps = np.asarray(sample.old_log_probs, dtype=np.float32)  # None becomes NaN
    if logps.shape != np.shape(sample.input_ids):
        raise ValueError(
            f"`old_log_probs` of a sample must have one entry per token of `input_ids`, got {logps.shape} for "
            f"{np.shape(sample.input_ids)}. Where there is none, as in the prompt, it holds 0."
        )
    sample.old_log_probs = np.where(logps <= _SERVER_INFINITY, -np.inf, logps)
    return sample


class Carrier(torch.utils.data.IterableDataset):
    """
    The data set that TRL makes of the queue, with more about each sample.

    Args:
        dataset (`torch.utils.data.IterableDataset`):
            TRL's data set, which takes its samples from `tap`.
        tap ([`Tap`]):
            The queue.
        step_of (`Callable[[int], float]`):
            Optimizer step of a version of the weights; NaN if unknown.
        failed (`Callable[[Exception], Any]`):
            Called with what ends the samples, if that is an error. It says whether the run can be brought to an end; if not,
            the error goes on.
    """

    def __init__(
        self,
        dataset: torch.utils.data.IterableDataset,
        tap: Tap,
        step_of: Callable[[int], float],
        failed: Callable[[Exception], bool],
    ):
        self._dataset, self._tap, self._step_of, self._failed = dataset, tap, step_of, failed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            for item in self._dataset:
                sample = self._tap.hand_on()
                yield {
                    **item,
                    REWARDS: reward_of(sample.metrics),
                    ROLLOUT_STEP: self._step_of(sample.model_version),
                }
        except Exception as error:
            if not self._failed(error):
                raise


class Layout:
    """
    A collator that adds to TRL's batch how its loss terms lie in completions, and what is known about these.

    Args:
        collator (`Callable`):
            TRL's collator. It gets a list with one entry, the rows of all ranks.
        with_text (`bool`):
            Whether to add the tokens, for a dump or a diagnosis.
        pad_token_id (`int`):
            What they are padded with.
    """

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]], with_text: bool, pad_token_id: int):
        self._collator, self._with_text, self._pad_token_id = collator, with_text, pad_token_id

    def __call__(self, examples: list[list[TreeRow]]) -> dict[str, Any]:
        batch = self._collator(examples)
        (rows,) = examples
        samples = [row.samples for row in rows]
        terms = [list(_number_terms(of_row)) for of_row in samples]
        _check_order(batch, terms)
        batch[TERMS] = _padded(terms, -1, torch.int32)
        # what is padded has no token of the loss
        for key, name, padding in (
            (ADVANTAGES, "advantage", 0.0),
            *((key, key, np.nan) for key in (REWARDS, ROLLOUT_STEP)),
        ):
            values = [[[sample[name]] for sample in of_row] for of_row in samples]
            batch[key] = _padded(values, padding, torch.float32)[..., 0]
        if any((numbers < 0).any() for of_row in terms for numbers in of_row):
            batch[TOOLS] = torch.ones(len(rows))
        if self._with_text:
            batch |= {f"{TEXT_PREFIX}{key}": value for key, value in self._text(samples).items()}
        return batch

    def _text(self, samples: list[list[dict[str, Any]]]) -> dict[str, torch.Tensor]:
        """Prompts and completions, each `(R, B, ...)`."""
        starts = [[_start(sample) for sample in of_row] for of_row in samples]
        ids = [
            [np.split(np.asarray(sample["input_ids"]), [start]) for sample, start in zip(*of_row, strict=True)]
            for of_row in zip(samples, starts, strict=True)
        ]
        text = {}
        for part, name in enumerate(("prompt", "completion")):
            parts = [[pair[part] for pair in of_row] for of_row in ids]
            text[f"{name}_ids"] = _padded(parts, self._pad_token_id, torch.long)
            text[f"{name}_mask"] = _padded([[np.ones_like(x) for x in of_row] for of_row in parts], 0, torch.long)
        return text


def _start(sample: Mapping[str, Any]) -> int:
    """Where the completion begins: at the first token of the loss. The first token of a sample has no prediction."""
    trained = np.flatnonzero(np.asarray(sample["completion_mask"])[1:])
    return int(trained[0]) + 1 if len(trained) else len(sample["input_ids"])


def _number_terms(samples: Sequence[Mapping[str, Any]]) -> Iterator[np.ndarray]:
    """Number of the loss term of each token of each completion, in TRL's order; -1 where there is none."""
    n = 0
    for sample in samples:
        trained = np.asarray(sample["completion_mask"])[_start(sample) :] != 0
        yield np.where(trained, n + trained.cumsum() - 1, -1)
        n += int(trained.sum())


def _check_order(batch: Mapping[str, Any], terms: list[list[np.ndarray]]):
    for segments, index, of_row in zip(batch["segment_id"], batch["token_index"], terms, strict=True):
        expected = np.repeat(np.arange(len(of_row)), [(numbers >= 0).sum() for numbers in of_row])
        if not np.array_equal(segments[index >= 0].numpy(), expected):
            raise RuntimeError(
                "TRL packed the loss terms of a row in another order than that of its samples and their tokens. It has "
                "changed in a way that rollout correction does not know: install the version of trl that this release was "
                "tested with."
            )


def _padded(values: Sequence[Sequence[Any]], padding: float, dtype: torch.dtype) -> torch.Tensor:
    """`(R, B, T)` from `T` numbers of `B` completions of `R` rows."""
    n_completions = max(len(of_row) for of_row in values)
    length = max((len(x) for of_row in values for x in of_row), default=0)
    padded = torch.full((len(values), n_completions, length), padding, dtype=dtype)
    for row, of_row in zip(padded, values, strict=True):
        for completion, x in zip(row, of_row, strict=False):
            completion[: len(x)] = torch.as_tensor(x, dtype=dtype)
    return padded
