"""
Visits of the samples of a generation: with `num_iterations`, the loss sees each of them several times.

Where a sample is visited before the first optimizer step after its generation, the policy of the first visit is the
old policy, and no forward pass has to compute its log-probabilities before. `B` completions, `T` completion tokens.
"""

from typing import Any

import torch

from .keys import FIRST_COEFFICIENTS, FIRST_LOGPS, OLD_LOGPS, VISITED
from .observer import Moment


class Visits:
    """
    Visits of the samples of a trainer. `args` are those of TRL. What later visits need of the first one stays in the
    batch.

    Attributes:
        before_update (`bool`):
            True if every sample is visited before the first optimizer step after its generation: the policy of the
            first visit is then the old policy.
        generated (`int`):
            Optimizer steps made when the latest batch of a training was generated.
    """

    def __init__(self, args: Any) -> None:
        self._iterations, self._most = args.num_iterations, args.steps_per_generation
        self.before_update = args.gradient_accumulation_steps % args.steps_per_generation == 0
        self.generated = 0
        self._n_first = 0  # among the micro-batches of the generation

    def begin(self, batch: dict[str, Any], step: int) -> None:
        """Begin the visits of a batch that was generated, for training, after `step` optimizer steps."""
        self.generated = step
        if self._iterations == 1:
            return
        self._n_first = 0
        completion_ids = batch["completion_ids"]
        batch[VISITED] = torch.zeros(len(completion_ids), dtype=torch.bool)
        for key in (FIRST_LOGPS, FIRST_COEFFICIENTS):
            batch[key] = torch.zeros_like(completion_ids, dtype=torch.float32)

    def is_first(self, current: torch.Tensor, batch: dict[str, Any]) -> bool:
        """Count a visit. The first one keeps its log-probabilities, `current`, `(B, T)`, in the batch."""
        if self._iterations == 1 or FIRST_LOGPS not in batch:  # an evaluation visits every batch once
            return True
        if batch[VISITED].any():
            return False
        self._n_first += 1
        if self._n_first > self._most:
            raise RuntimeError(
                "A micro-batch is visited again, but the log-probabilities of its first visit are lost: the tensors "
                "of the batch are copied before each visit, and the first visit filled a copy. In `_prepare_inputs` "
                "or `compute_loss`, copy the dictionary (`dict(inputs)`) and not its tensors, or copy them once for "
                "all iterations."
            )
        batch[VISITED].fill_(True)
        batch[FIRST_LOGPS].copy_(current)
        return True

    def old_logps(self, current: torch.Tensor, batch: dict[str, Any], now: Moment, *, first: bool) -> Any:
        """
        Log-probabilities of the old policy, `(B, T)`; `None` if they are unknown. `current` are those of the current
        policy.
        """
        if self.before_update and not first:
            return batch[FIRST_LOGPS].to(current.dtype)
        # TRL goes on with the rest of a generation after an interrupt, and its later generations see an update
        present = self.before_update and self.generated == now.step
        # in an evaluation the old policy is the current one
        return current if present or now.mode == "eval" else batch.get(OLD_LOGPS)

    @staticmethod
    def keep_coefficients(batch: dict[str, Any], coefficients: torch.Tensor) -> None:
        """Keep coefficients of the first visit, `(B, T)`, for later ones."""
        if FIRST_COEFFICIENTS in batch:
            batch[FIRST_COEFFICIENTS].copy_(coefficients)

    @staticmethod
    def first_coefficients(batch: dict[str, Any]) -> torch.Tensor:
        """Coefficients of the first visit, `(B, T)`."""
        coefficients: torch.Tensor = batch[FIRST_COEFFICIENTS]
        return coefficients
