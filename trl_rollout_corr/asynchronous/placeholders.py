"""
Placeholders in TRL's asynchronous loss, for two tensors of the batch and for the model.

The loss takes its terms from the batch before it runs the model, and the correction knows their values only
afterwards. So a [`Placeholder`] stands for each tensor, and [`CorrectedPolicy`] stands for the model, whose output
fills the placeholders.

`M` loss terms of a row.
"""

from typing import Any

import torch


class Placeholder:
    """
    Stands for a tensor of a batch whose values are known only after the forward pass.

    TRL takes its loss terms (`tensor[selected]`) before the forward pass, and uses them afterwards. They hold NaN
    until then, so that an earlier use shows in the loss.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._filled = tensor, False
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        terms = self._tensor[index]
        if not self._filled:
            self._taken.append((index, terms.fill_(torch.nan)))
        return terms

    def fill(self, selected: torch.Tensor, terms: torch.Tensor) -> None:
        """Set the loss terms, `(M,)`, at a mask or indices of the tensor, also where they were taken before."""
        self._tensor = self._tensor.clone()
        self._tensor[selected] = terms.to(self._tensor.dtype)
        self._filled = True
        for index, taken in self._taken:
            taken.copy_(self._tensor[index])

    @property
    def was_taken(self) -> bool:
        """True if loss terms were taken before they were filled in."""
        return self._filled and bool(self._taken)


class CorrectedPolicy:
    """Replaces the model in one call of the loss: runs it, and passes `correct` its output."""

    def __init__(self, model: Any, correct: Any) -> None:
        self._model, self._correct = model, correct
        self.forwards = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._model(*args, **kwargs)
        self.forwards += 1
        self._correct(output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
