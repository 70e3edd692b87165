"""
Packed rows: how the flat loss terms of TRL's asynchronous trainer become completions, and how corrections get back to it.

`M` loss terms of a row, `B` completions, `T` tokens from the first of the loss to the last of a completion.
"""

from functools import partial
from typing import Any

import torch


class Terms:
    """
    Which loss term is which token of which completion.

    Args:
        index (`torch.Tensor` of shape `(B, T)`):
            Number of the loss term of each token, -1 for a token that is none, and beyond the end of a completion.
    """

    def __init__(self, index: torch.Tensor):
        self.mask = index >= 0  # (B, T)
        self._index = index.long()

    def spread(self, terms: torch.Tensor) -> torch.Tensor:
        """Lay loss terms, `(M,)`, out as completions, `(B, T)`. Tokens that are none hold anything."""
        return terms[self._index.clamp(min=0)]

    def collect(self, tokens: torch.Tensor, n: int) -> torch.Tensor:
        """The `n` loss terms, `(M,)`, of tokens laid out as completions, `(B, T)`."""
        place = torch.where(self.mask, self._index, n)  # the others all go to one place more
        return tokens.new_zeros(n + 1).scatter_(0, place.flatten(), tokens.flatten())[:n]


class Awaited:
    """
    A tensor of a batch that is known only after the forward pass.

    TRL takes its loss terms out of it (`tensor[selected]`) before the forward pass, and uses them after it. What was taken
    holds NaN until then, so that nothing can be made of it too early without being seen.

    Args:
        tensor (`torch.Tensor`):
            What the batch held.
    """

    def __init__(self, tensor: torch.Tensor):
        self._tensor, self._known = tensor, False
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        terms = self._tensor[index]
        if not self._known:
            self._taken.append((index, terms.fill_(torch.nan)))
        return terms

    def fill(self, selected: torch.Tensor, terms: torch.Tensor):
        """
        Say what the loss terms are.

        Args:
            selected (`torch.Tensor`):
                Where the loss terms are in the tensor.
            terms (`torch.Tensor` of shape `(M,)`):
                The loss terms.
        """
        self._tensor = self._tensor.clone()
        self._tensor[selected] = terms.to(self._tensor.dtype)
        self._known = True
        for index, taken in self._taken:
            taken.copy_(self._tensor[index])

    @property
    def was_taken(self) -> bool:
        """Whether somebody has asked for it."""
        return self._known and bool(self._taken)


class Policy:
    """
    Stands in for the model in one call of the loss: runs it, and shows its output to the correction.

    Args:
        model (`torch.nn.Module`):
            The policy, possibly wrapped.
        correct (`Callable`):
            Called with the output of a forward pass, and with what makes the same pass again.
    """

    def __init__(self, model: Any, correct: Any):
        self._model, self._correct = model, correct
        self.forwards = 0

    def __call__(self, *args, **kwargs):
        forward = partial(self._model, *args, **kwargs)
        output = forward()
        self.forwards += 1
        self._correct(output, forward)
        return output

    def __getattr__(self, name: str):
        return getattr(self._model, name)
