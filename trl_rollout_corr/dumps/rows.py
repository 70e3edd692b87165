"""Rows of a dump, made of the tensors of a batch. Trainers, the diagnosis of the first step and the probe make them here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch


Tensors: TypeAlias = Mapping[str, torch.Tensor | None]

# Lists with an entry for each token of the completion
_LISTS = ("mask", "train_logps", "rollout_logps", "weights", "keep", "coefficients")


def on_host(batch: Tensors, chosen: torch.Tensor | None = None) -> Iterator[dict[str, torch.Tensor | None]]:
    """Take a batch of tensors `(B, ...)`, with `mask` among them, apart on the CPU: all sequences, or those `chosen`."""
    tensors = {name: x if x is None or chosen is None else x[chosen] for name, x in batch.items()}
    tensors = {name: None if x is None else x.cpu() for name, x in tensors.items()}
    mask = tensors["mask"]
    for i in range(0 if mask is None else len(mask)):
        yield {name: None if x is None else x[i] for name, x in tensors.items()}


def make_row(
    sequence: Mapping[str, Any],
    step: int,
    *,
    rank: int = 0,
    sampled: bool = True,
    worst: bool = False,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> dict[str, Any]:
    """
    Make the row of a sequence, with the columns of [`~trl_rollout_corr.dumps.schema.SCHEMA`].

    Args:
        sequence (`Mapping[str, torch.Tensor | None]`):
            One sequence of [`on_host`]: TRL's tokens and masks, and tensors of shape `(T,)` or `()` by column.
        step (`int`):
            Optimizer steps made when the sequence is trained on.
        rank (`int`, *optional*, defaults to `0`):
            Process that has the sequence.
        sampled, worst (`bool`, *optional*, default to `True` and `False`):
            Drawn at random, and among those with the largest log-ratio.
        decode (`Callable`, *optional*):
            Turns token ids into text. Without it, all text is empty.
    """
    decode = decode or (lambda ids: "")
    n = int(sequence["completion_mask"].sum())
    in_prompt, again, age = sequence["prompt_mask"].bool(), sequence["again_logps"], sequence["staleness"]
    turn_ids, token_ages = sequence.get("turn_ids"), sequence.get("token_staleness")
    padding = sequence.get("padding")  # of packed rows; the others are as wide as the batch
    prompt_ids, token_ids = sequence["prompt_ids"][in_prompt].tolist(), sequence["completion_ids"][:n].tolist()
    return {
        "step": step,
        "rank": rank,
        "sampled": sampled,
        "worst": worst,
        "prompt": decode(prompt_ids),
        "completion": decode(token_ids),
        "tokens": [decode([token]) for token in token_ids],
        "token_ids": token_ids,
        **{name: None if sequence[name] is None else sequence[name][:n].tolist() for name in _LISTS},
        "reward": sequence["reward"].item(),
        "advantage": sequence["advantage"].item(),
        "staleness": None if age is None or age.isnan() else int(age),
        "prompt_ids": prompt_ids,
        "padding": int((~in_prompt).sum() if padding is None else padding),
        "again_logps": None if again is None or again[:n].isnan().all() else again[:n].tolist(),
        "turn_ids": None if turn_ids is None else turn_ids[:n].tolist(),
        "token_staleness": None if token_ages is None else token_ages[:n].tolist(),
    }
