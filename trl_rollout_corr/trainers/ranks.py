"""Agreement of all ranks, also before one of them leaves: the others would wait for it in the next collective."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def largest(accelerator: Any, number: int) -> int:
    """The largest number over all ranks. All ranks must call it."""
    if accelerator.num_processes == 1:
        return number
    return int(accelerator.gather(torch.tensor([number], device=accelerator.device)).max())


def smallest(accelerator: Any, number: int | None) -> int | None:
    """The smallest number over all ranks, of which some may have none. All ranks must call it."""
    if accelerator.num_processes == 1:
        return number
    none = torch.iinfo(torch.long).max
    own = torch.tensor([none if number is None else number], device=accelerator.device)
    found = int(accelerator.gather(own).min())
    return None if found == none else found


@contextmanager
def leaving_together(accelerator: Any) -> Iterator[None]:
    """Context whose error on one rank is raised on all ranks. All ranks must enter it."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if largest(accelerator, int(error is not None)):
        raise error or RuntimeError(
            "The run ends because another rank has raised an error, which its own output shows."
        )
