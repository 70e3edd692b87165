"""
The seam where a trainer makes choices of the sampler again: for `rollout_routing` and `rollout_support`.

`B` sequences of `S` tokens with padding, `T` of them of the completion.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..trainers.forward_pass import ForwardPass


class Replay:
    """A trainer without replay; [`~trl_rollout_corr.replay.choices.Replays`] replays."""

    experts: Any = None
    kept_tokens: Any = None

    def clear(self) -> None:
        """Forget the choices, before a batch is generated and after its columns are made."""

    def place(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
    ) -> dict[str, torch.Tensor]:
        """Columns for a padded batch that was just generated. Tokens and mask are `(B, S)`."""
        return {}

    def check(self, batch: Mapping[str, torch.Tensor], loss_mask: torch.Tensor) -> None:
        """Check the columns of a new batch. `loss_mask`, `(B, T)`, marks tokens of the loss."""

    def alone(self, batch: Mapping[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
        """Columns for sequence `i` of a batch, alone and without padding."""
        return {}

    def forward(self, under_way: ForwardPass, forward: Callable[..., tuple], *args: Any, **kwargs: Any) -> tuple:
        """Run TRL's `forward` with the choices that the current pass makes again."""
        return forward(*args, **kwargs)

    def end(self) -> None:
        """Release the choices after a training step."""
