"""
Packed rows of TRL's asynchronous trainer: from flat loss terms to completions, and back.

`M` loss terms of a row, `B` completions, `T` tokens from the first of the loss to the last of a completion.
"""

import torch


class Terms:
    """
    Map between the loss terms of a row and the tokens of its completions.

    `index`, `(B, T)`, gives the number of the loss term of each token, or -1 for tokens without one and after the end
    of a completion.
    """

    def __init__(self, index: torch.Tensor) -> None:
        self.mask = index >= 0  # (B, T)
        self._index = index.long()

    def spread(self, terms: torch.Tensor) -> torch.Tensor:
        """Loss terms, `(M,)`, as completions, `(B, T)`. Values of tokens without a loss term are arbitrary."""
        return terms[self._index.clamp(min=0)]

    def collect(self, tokens: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """Loss terms, `(M,)`, from completions, `(B, T)`; those of no token stay as in `otherwise`, `(M,)`."""
        n = len(otherwise)
        place = torch.where(self.mask, self._index, n)  # tokens without a loss term all go to one extra place
        terms = torch.cat([otherwise.to(tokens.dtype), tokens.new_zeros(1)])
        return terms.scatter_(0, place.flatten(), tokens.flatten())[:n]


def with_a_term(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """
    TRL's batch with a loss term in a row that has none, because TRL 1.16 raises an error there. Its advantage is 0, so
    it adds nothing to loss and gradient, and its ratio becomes 1.
    """
    if len(inputs["old_log_probs"][inputs["token_index"] >= 0]):
        return inputs
    term = {"token_index": 0, "segment_id": 0, "advantages": 0.0, "old_log_probs": torch.nan}
    return {**inputs, **{key: inputs[key].new_full((1, 1), value) for key, value in term.items()}}
