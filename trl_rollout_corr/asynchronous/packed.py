"""
Packed rows of TRL's asynchronous trainer: from flat loss terms to completions, and back with the corrections.

`M` loss terms of a row, `B` completions, `T` tokens from the first of the loss to the last of a completion.
"""

from functools import partial
from typing import Any

import torch


class Terms:
    """
    Map between the loss terms of a row and the tokens of its completions.

    `index`, `(B, T)`, has the number of the loss term of each token; -1 for tokens without one and after the end of a
    completion.
    """

    def __init__(self, index: torch.Tensor) -> None:
        self.mask = index >= 0  # (B, T)
        self._index = index.long()

    def spread(self, terms: torch.Tensor) -> torch.Tensor:
        """Loss terms, `(M,)`, as completions, `(B, T)`. Values of tokens without a loss term are arbitrary."""
        return terms[self._index.clamp(min=0)]

    def collect(self, tokens: torch.Tensor, n: int) -> torch.Tensor:
        """The `n` loss terms, `(M,)`, from completions, `(B, T)`."""
        place = torch.where(self.mask, self._index, n)  # tokens without a loss term all go to one extra place
        return tokens.new_zeros(n + 1).scatter_(0, place.flatten(), tokens.flatten())[:n]


class Awaited:
    """
    Tensor of a batch whose values are known only after the forward pass.

    TRL takes its loss terms (`tensor[selected]`) before the forward pass, and uses them afterwards. They hold NaN until then,
    so that an earlier use shows in the loss.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._known = tensor, False
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        terms = self._tensor[index]
        if not self._known:
            self._taken.append((index, terms.fill_(torch.nan)))
        return terms

    def fill(self, selected: torch.Tensor, terms: torch.Tensor) -> None:
        """Set the loss terms, `(M,)`, at a mask or indices of the tensor, also those that were taken before."""
        self._tensor = self._tensor.clone()
        self._tensor[selected] = terms.to(self._tensor.dtype)
        self._known = True
        for index, taken in self._taken:
            taken.copy_(self._tensor[index])

    @property
    def was_taken(self) -> bool:
        """True if loss terms were taken before they were known."""
        return self._known and bool(self._taken)


class Policy:
    """Replaces the model in one call of the loss: runs it, and passes `correct` its output and a function that repeats it."""

    def __init__(self, model: Any, correct: Any) -> None:
        self._model, self._correct = model, correct
        self.forwards = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = partial(self._model, *args, **kwargs)
        output = forward()
        self.forwards += 1
        self._correct(output, forward)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
