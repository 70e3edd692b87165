"""
The protocol of a replay: a choice of the sampler that the trainer makes again in its own forward passes.

`B` sequences of `S` tokens with padding, `T` of them of the completion.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch


Logprobs = list[list[float | None]]  # of sampled tokens, per completion


class Pass(Protocol):
    """A forward pass, as far as a replay asks for it: [`~trl_rollout_corr.trainers.forward_pass.ForwardPass`]."""

    loss_mask: torch.Tensor | None  # (B, T), tokens of the loss; `None` outside the loss
    policy: torch.nn.Module | None  # without wrappers, the model that the loss trains; `None` outside the loss

    def columns(
        self, replay: "Replay", input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
    ) -> Mapping[str, Any]: ...

    def count(self, sums: Any) -> None: ...


class Replay(Protocol):
    """A choice of the sampler, kept when it generates and made again in forward passes."""

    def clear(self) -> None:
        """Forget the choices, before a batch is generated and after its columns are made."""

    def place(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
    ) -> dict[str, torch.Tensor]:
        """
        Columns with the choices for a padded batch, which TRL shuffles and splits with the others.

        Args:
            input_ids, attention_mask (`torch.Tensor` of shape `(B, S)`):
                Prompts and completions.
            logits_to_keep (`int`):
                Tokens of the completions, `T`.
        """

    def check(self, batch: Mapping[str, torch.Tensor], loss_mask: torch.Tensor) -> None:
        """Check the columns of a batch that was just generated. `loss_mask`, `(B, T)`, is non-zero on tokens of the loss."""

    def alone(self, batch: Mapping[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
        """Columns for sequence `i` of a batch by itself and without padding."""

    def around(self, under_way: Pass, forward: Callable[..., tuple]) -> Callable[..., tuple]:
        """TRL's method of the forward pass, with the choices of the pass that is under way."""

    def end(self) -> None:
        """Let go of the choices, after a training step."""
