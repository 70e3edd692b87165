"""
Several visits of a micro-batch, if `num_iterations` is 2 or more.

The policy of the first visit is the old policy of later visits, and the coefficients of the first visit stay in use. Both are
kept in tensors of the batch, which are made at generation and filled in place at the first visit. So TRL may copy the
dictionary around them.
"""

from typing import Any

import torch


class Iterations:
    """
    Distinguishes the first visit of a micro-batch from later visits.

    Args:
        per_generation (`int`):
            Micro-batches of a generation.
        iterations (`int`):
            Number of visits of each.
    """

    def __init__(self, per_generation: int, iterations: int) -> None:
        self.per_generation, self.iterations = per_generation, iterations
        self._visited: set[int] = set()
        self._copies = 0

    def generated(self, output: dict[str, Any], *keys: str) -> None:
        """Add tensors of NaN to a generation batch, for the results of first visits. Forgets the previous batch."""
        self._visited, self._copies = set(), 0
        for key in keys:
            output[key] = torch.full(output["completion_ids"].shape, torch.nan, device=output["completion_ids"].device)

    def is_first(self, tensor: torch.Tensor, kept: list[torch.Tensor]) -> bool:
        """
        Count a visit, and tell if it is the first of its micro-batch.

        Args:
            tensor (`torch.Tensor` of shape `(B, T)`):
                A tensor of the micro-batch that [`Iterations.generated`] added.
            kept (`list[torch.Tensor]`):
                The same tensor of all micro-batches that the trainer keeps.

        Returns:
            `bool`: `True` at the first visit.

        Raises:
            `RuntimeError`: if the tensor is a copy, so that the results of the first visit are lost.
        """
        place = tensor.data_ptr()
        if any(place == other.data_ptr() for other in kept):
            first = place not in self._visited
            self._visited.add(place)
            return first
        if self.iterations == 1:
            return True
        # The tensors were copied. This is allowed if the copy was made after the first visit filled them
        self._copies += 1
        empty = bool(tensor.isnan().all())  # waits for the device
        if empty and self._copies > self.per_generation:
            raise RuntimeError(
                "A micro-batch is visited again, but the log-probabilities of its first visit are lost: the tensors of the "
                "batch are copied before each visit, and the first visit filled a copy. In "
                "`_prepare_inputs` or `compute_loss`, copy the dictionary (`dict(inputs)`) and not its tensors, or copy them "
                "once for all iterations."
            )
        return empty
