"""Rows of a dump from the tensors of a batch, for the dump and the diagnosis of the first step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa
import torch

from ...trainers.keys import NOT_GIVEN
from .columns import COLUMNS, Column


Tensors: TypeAlias = Mapping[str, torch.Tensor | None]


def tokens_of(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tokens and masks of TRL's batch that a row needs."""
    return {name: batch[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}


def on_host(batch: Tensors, chosen: torch.Tensor | None = None) -> Iterator[dict[str, torch.Tensor | None]]:
    """Split a batch of tensors `(B, ...)`, `mask` among them, into sequences on the CPU: all, or the `chosen` ones."""
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
    Make the row of one sequence of [`on_host`]: TRL's tokens and masks, and tensors of shape `(T,)` or `()` by column.
    `decode` turns token ids into text; without it, all text is empty.
    """
    decode = decode or (lambda ids: "")
    n = int(sequence["completion_mask"].sum())
    in_prompt, padding = sequence["prompt_mask"].bool(), sequence.get("padding")
    prompt_ids, token_ids = sequence["prompt_ids"][in_prompt].tolist(), sequence["completion_ids"][:n].tolist()
    row: dict[str, Any] = {
        "step": step,
        "rank": rank,
        "sampled": sampled,
        "worst": worst,
        "prompt": decode(prompt_ids),
        "completion": decode(token_ids),
        "tokens": [decode([token]) for token in token_ids],
        "token_ids": token_ids,
        "prompt_ids": prompt_ids,
        # given for packed rows; the other rows are as wide as the batch
        "padding": int((~in_prompt).sum() if padding is None else padding),
    }
    return row | {column.name: _entry(column, sequence, n) for column in COLUMNS if column.name not in row}


def _entry(column: Column, sequence: Mapping[str, Any], n: int) -> Any:
    """Entry of a column: null without a tensor, or where the column may be null and the tensor is NaN."""
    values = sequence.get(column.name)
    if values is not None and column.per_token:
        values = values[:n]
    if values is None or (column.null and values.isnan().all()):
        return None
    if column.gaps:
        return [None if x == NOT_GIVEN else x for x in values.tolist()]
    return int(values) if pa.types.is_integer(column.type) and not column.per_token else values.tolist()
