"""Visits of the micro-batches of a generation, which `num_iterations` repeats."""

import torch


class Visits:
    """
    Tells the first visit of a micro-batch from later ones.

    A micro-batch is known by the tensor that holds the log-probabilities of its first visit: TRL may copy the dictionary of a
    batch, but it keeps the tensors. `most` is the number of micro-batches of a generation.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._visited: list[torch.Tensor] = []  # the tensors themselves, so that no other gets the address of one

    def restart(self) -> None:
        """Forget all visits, as a new generation begins."""
        self._visited = []

    def is_first(self, first_logps: torch.Tensor, current: torch.Tensor) -> bool:
        """
        True for the first visit of a micro-batch, which fills `first_logps` with the log-probabilities `current`, both
        `(B, T)`.

        Raises:
            `RuntimeError`: if the log-probabilities of the first visit are lost.
        """
        if any(first_logps.data_ptr() == visited.data_ptr() for visited in self._visited):
            return False
        self._visited.append(first_logps)
        if len(self._visited) <= self._most:
            first_logps.copy_(current)
            return True
        # The tensors were copied, which is allowed after the first visit filled them
        if bool(first_logps.isnan().all()):  # waits for the device
            raise RuntimeError(
                "A micro-batch is visited again, but the log-probabilities of its first visit are lost: the tensors of the "
                "batch are copied before each visit, and the first visit filled a copy. In "
                "`_prepare_inputs` or `compute_loss`, copy the dictionary (`dict(inputs)`) and not its tensors, or copy them "
                "once for all iterations."
            )
        return False
