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
    given = {name: x for name, x in batch.items() if x is not None}
    if chosen is not None:
        places = {device: chosen.to(device) for device in {x.device for x in given.values()}}
        given = {name: x[places[x.device]] for name, x in given.items()}
    copied = in_one_copy(given)
    for i in range(len(copied["mask"])):
        yield {name: copied[name][i] if name in copied else None for name in batch}


def in_one_copy(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors on the CPU. All of a device are copied at once, because each copy waits for the device."""
    copied: dict[str, torch.Tensor] = {}
    for device in {x.device for x in tensors.values()}:
        here = {name: x.detach() for name, x in tensors.items() if x.device == device}
        # wide types first, so that each tensor begins at a multiple of its width
        names = sorted(here, key=lambda name: -here[name].element_size())
        flat = [here[name].contiguous().flatten().view(torch.uint8) for name in names]
        parts = torch.cat(flat).cpu().split([len(x) for x in flat])
        copied |= {name: x.view(here[name].dtype).view(here[name].shape) for name, x in zip(names, parts, strict=True)}
    return copied


class Decoder:
    """Text of tokens by the `decode` of a tokenizer. That of a single token is decoded once."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.text = decode
        self._of_token: dict[int, str] = {}

    def decode_each(self, ids: Sequence[int]) -> list[str]:
        """Text of each of the tokens alone."""
        for token in {*ids} - self._of_token.keys():
            self._of_token[token] = self.text([token])
        return [self._of_token[token] for token in ids]


_NO_TEXT = Decoder(lambda ids: "")


def make_row(
    sequence: Mapping[str, Any],
    step: int,
    *,
    rank: int = 0,
    sampled: bool = True,
    worst: bool = False,
    decoder: Decoder = _NO_TEXT,
) -> dict[str, Any]:
    """
    Make the row of one sequence of [`on_host`]: TRL's tokens and masks, and tensors of shape `(T,)` or `()` by column.
    Without a `decoder`, all text is empty.
    """
    n = int(sequence["completion_mask"].sum())
    in_prompt, padding = sequence["prompt_mask"].bool(), sequence.get("padding")
    prompt_ids, token_ids = sequence["prompt_ids"][in_prompt].tolist(), sequence["completion_ids"][:n].tolist()
    row: dict[str, Any] = {
        "step": step,
        "rank": rank,
        "sampled": sampled,
        "worst": worst,
        "prompt": decoder.text(prompt_ids),
        "completion": decoder.text(token_ids),
        "tokens": decoder.decode_each(token_ids),
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
