"""
Age, reward and layout of samples on their way from the queue of the rollout worker to the micro-batch, on the main
process.

TRL takes a sample from the queue, drops it if it is stale, packs the others into rows, and sends row `i` to rank `i`.
It drops the version of the weights and the rewards. Three wrappers keep them:

- [`WatchedQueue`], around the queue, remembers the last sample and the samples that TRL drops;
- [`AnnotatedSamples`], around the data set, adds the reward and the optimizer step to each sample;
- [`LayoutCollator`], around the collator, adds the keys below to the batch.

`R` rows, one per rank; `B` completions of a row, `T` tokens from the first of the loss to the last of a completion;
both of the largest row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..trainers.completions import sampled_logps
from ..trainers.keys import REWARDS, ROLLOUT_STEP
from .trl_parts import RolloutSample, TreeRow


TERMS = "rollout_corr_terms"  # (R, B, T), index of the loss term of a token, -1 for none
ADVANTAGES = "rollout_corr_advantages"  # (R, B)
TOOLS = "rollout_corr_tools"  # (R,), present if tool results lie between tokens of the loss
TEXT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")  # for a dump or a diagnosis
TEXT_PREFIX = "rollout_corr_"


class WatchedQueue:
    """Queue of the rollout worker that remembers the last sample, and the samples that TRL dropped."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._last: RolloutSample | None = None
        self._n_dropped = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def get(self, *args: Any, **kwargs: Any) -> RolloutSample:
        if self._last is not None:  # TRL dropped it
            self._n_dropped += bool(self._last.completion_mask.any())
            self._last = None
        sample = self._queue.get(*args, **kwargs)
        self._last = validate_sample(sample)
        return self._last

    def take_last(self) -> RolloutSample:
        """Last sample, which TRL passes on to training."""
        sample, self._last = self._last, None
        if sample is None:
            raise RuntimeError(
                "TRL trains on a sample that it did not take from the queue of the rollout worker. This version of "
                "TRL is not supported: install a version of trl that this release was tested with."
            )
        return sample

    def take_dropped(self) -> int:
        """Number of samples with a token of the loss that TRL dropped since the last call."""
        n_dropped, self._n_dropped = self._n_dropped, 0
        return n_dropped


def validate_sample(sample: RolloutSample) -> RolloutSample:
    """Check the log-probabilities of a sample, and bring them into one form in place."""
    if sample.old_log_probs is None:
        raise ValueError(
            "The rollout worker returned a sample without log-probabilities (`old_log_probs` is None), which rollout "
            "correction needs. Ask the sampler for the log-probability of every sampled token, after temperature: "
            "`logprobs=0` for vLLM."
        )
    if np.shape(sample.old_log_probs) != np.shape(sample.input_ids):
        raise ValueError(
            "`old_log_probs` of a sample must have one entry per token of `input_ids`, got "
            f"{np.shape(sample.old_log_probs)} for {np.shape(sample.input_ids)}. Set 0 for tokens without one, such "
            "as the prompt."
        )
    sampled = np.asarray(sample.completion_mask) != 0
    sample.old_log_probs = sampled_logps("old_log_probs", sample.old_log_probs, sampled)
    return sample


class AnnotatedSamples(torch.utils.data.IterableDataset):
    """
    TRL's data set over the queue, with reward and optimizer step of each sample. `step_of` maps each version of the
    weights to its optimizer step.
    """

    def __init__(
        self, dataset: torch.utils.data.IterableDataset, queue: WatchedQueue, step_of: Mapping[int, int]
    ) -> None:
        self._dataset, self._queue, self._step_of = dataset, queue, step_of

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for item in self._dataset:
            sample = self._queue.take_last()
            step = self._step_of.get(sample.model_version, np.nan)
            reward = (sample.metrics or {}).get("reward", np.nan)
            yield {**item, REWARDS: float(reward), ROLLOUT_STEP: step}


class LayoutCollator:
    """
    Collator that adds the layout of loss terms in completions, advantages, rewards and steps to TRL's batch;
    `with_text` also prompts and completions, for a dump or a diagnosis.
    """

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]], with_text: bool, pad_token_id: int) -> None:
        self._collator, self._with_text, self._pad_token_id = collator, with_text, pad_token_id

    def __call__(self, examples: list[list[TreeRow]]) -> dict[str, Any]:
        batch = self._collator(examples)
        (rows,) = examples
        samples = [row.samples for row in rows]
        terms = [list(_number_terms(of_row)) for of_row in samples]
        _check_order(batch, terms)
        batch[TERMS] = _padded(terms, -1, torch.int32)
        # padded completions contain no token of the loss
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
        """Prompts and completions with their masks, each `(R, B, ...)`."""
        pairs = [[np.split(np.asarray(x["input_ids"]), [_start(x)]) for x in of_row] for of_row in samples]
        text = {}
        for part, name in enumerate(("prompt", "completion")):
            parts = [[pair[part] for pair in of_row] for of_row in pairs]
            text[f"{name}_ids"] = _padded(parts, self._pad_token_id, torch.long)
            text[f"{name}_mask"] = _padded([[np.ones_like(x) for x in of_row] for of_row in parts], 0, torch.long)
        return text


def _start(sample: Mapping[str, Any]) -> int:
    """
    Index of the first token of the loss, where the completion begins. Nothing predicts the first token of a sample.
    """
    trained = np.flatnonzero(np.asarray(sample["completion_mask"])[1:])
    return int(trained[0]) + 1 if len(trained) else len(sample["input_ids"])


def _number_terms(samples: Sequence[Mapping[str, Any]]) -> Iterator[np.ndarray]:
    """Index of the loss term of each token of each completion, in TRL's order; -1 without one."""
    n = 0
    for sample in samples:
        trained = np.asarray(sample["completion_mask"])[_start(sample) :] != 0
        yield np.where(trained, n + trained.cumsum() - 1, -1)
        n += int(trained.sum())


def _check_order(batch: Mapping[str, Any], terms: list[list[np.ndarray]]) -> None:
    for segments, index, of_row in zip(batch["segment_id"], batch["token_index"], terms, strict=True):
        expected = np.repeat(np.arange(len(of_row)), [(numbers >= 0).sum() for numbers in of_row])
        if not np.array_equal(segments[index >= 0].numpy(), expected):
            raise RuntimeError(
                "TRL packed the loss terms of a row in another order than the samples and their tokens. This version "
                "of TRL is not supported: install a version of trl that this release was tested with."
            )


def _padded(values: Sequence[Sequence[Any]], padding: float, dtype: torch.dtype) -> torch.Tensor:
    """Padded tensor, `(R, B, T)` with at least one token, from the numbers of each completion of each row."""
    n_completions = max(len(of_row) for of_row in values)
    length = max([1, *(len(x) for of_row in values for x in of_row)])
    padded = torch.full((len(values), n_completions, length), padding, dtype=dtype)
    for row, of_row in zip(padded, values, strict=True):
        for completion, x in zip(row, of_row, strict=False):
            completion[: len(x)] = torch.as_tensor(x, dtype=dtype)
    return padded
