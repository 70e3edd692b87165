"""
Packed rows of TRL's asynchronous trainer: from flat loss terms to completions, and back.

`M` loss terms of a row, `B` completions, `T` tokens from the first of the loss to the last of a
completion.
"""

import torch


class Terms:
    """
    Map between the loss terms of a row and the tokens of its completions.

    `index`, `(B, T)`, gives the number of the loss term of each token, or -1 for tokens without one
    and after the end of a completion.
    """

    def __init__(self, index: torch.Tensor) -> None:
        self.mask = index >= 0  # (B, T)
        self._index = index.long()

    def spread(self, terms: torch.Tensor) -> torch.Tensor:
        """
        Loss terms, `(M,)`, as completions, `(B, T)`. Values of tokens without a loss term are
        arbitrary.
        """
        return terms[self._index.clamp(min=0)]

    def collect(self, tokens: torch.Tensor, n: int) -> torch.Tensor:
        """The `n` loss terms, `(M,)`, from completions, `(B, T)`."""
        place = torch.where(self.mask, self._index, n)  # tokens without a loss term all go to one extra place
        return tokens.new_zeros(n + 1).scatter_(0, place.flatten(), tokens.flatten())[:n]
