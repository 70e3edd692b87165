"""
What the first visit of a batch settles for later ones.

With several iterations TRL trains on a micro-batch again and again. The policy of the first visit is the old policy of all
others, and the coefficients found then stay. Both live in tensors that travel with the batch: they are made when it is
generated, and filled in place. So it does not matter what becomes of the dictionary around them.
"""

from typing import Any

import torch


class Iterations:
    """
    Tells the first visit of a micro-batch from later ones.

    Args:
        per_generation (`int`):
            Micro-batches of a generation.
        iterations (`int`):
            Number of times that each is visited.
    """

    def __init__(self, per_generation: int, iterations: int):
        self.per_generation, self.iterations = per_generation, iterations
        self._visited: set[int] = set()
        self._copies = 0

    def generated(self, output: dict[str, Any], *keys: str):
        """Make room in a generation batch for what its first visits will settle. Forgets the batch before."""
        self._visited, self._copies = set(), 0
        for key in keys:
            output[key] = torch.full(output["completion_ids"].shape, torch.nan, device=output["completion_ids"].device)

    def is_first(self, tensor: torch.Tensor, kept: list[torch.Tensor]) -> bool:
        """
        Say whether a micro-batch is visited for the first time, and take note of the visit.

        Args:
            tensor (`torch.Tensor` of shape `(B, T)`):
                One of the tensors that [`Iterations.generated`] made room with, as it is in the micro-batch.
            kept (`list[torch.Tensor]`):
                The same tensor of all micro-batches that the trainer keeps.

        Returns:
            `bool`: whether it is the first visit.

        Raises:
            `RuntimeError`: if the tensor is a copy, so that what the first visit settled is lost.
        """
        place = tensor.data_ptr()
        if any(place == other.data_ptr() for other in kept):
            first = place not in self._visited
            self._visited.add(place)
            return first
        if self.iterations == 1:
            return True
        # Somebody copies tensors. That is fine as long as what the first visit filled in is copied, too
        self._copies += 1
        empty = bool(tensor.isnan().all())  # waits for the device
        if empty and self._copies > self.per_generation:
            raise RuntimeError(
                "A micro-batch is trained on again, but the log-probabilities that its first visit kept for it are gone: the "
                "tensors of the batch are copied before each visit, and what was kept in the copy is lost. In "
                "`_prepare_inputs` or `compute_loss`, copy the dictionary (`dict(inputs)`) and not its tensors, or copy them "
                "once for all iterations."
            )
        return empty
