"""
State while TRL generates and scores one batch: its old pass, log-probabilities and rewards, which TRL would discard.

`B` completions, `T` completion tokens.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


Logprobs = list[list[float | None]]


class OldPass:
    """
    TRL's first forward pass while it scores a batch, which computes the log-probabilities of the old policy.

    `answer` takes `input_ids` and `logits_to_keep`, and returns log-probabilities, `(B, T)`, in place of the forward pass.
    """

    def __init__(self, answer: Callable[[torch.Tensor, int], torch.Tensor] | None = None) -> None:
        self.answer = answer
        self.calls = 0
        # known after the first call, each (B, T)
        self.logps: torch.Tensor
        self.completion_mask: torch.Tensor

    def __call__(
        self,
        forward: Callable,
        model: Any,
        input_ids: Any,
        attention_mask: Any,
        logits_to_keep: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple:
        self.calls += 1
        if self.calls == 1 and self.answer is not None:
            outputs = (self.answer(input_ids, logits_to_keep), None, None)
        else:
            outputs = forward(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        if self.calls == 1:
            self.logps, self.completion_mask = outputs[0], attention_mask[:, -logits_to_keep:]
        return outputs


class Scoring:
    """State of one batch while TRL generates and scores it. Without `old_pass`, TRL's is unchanged."""

    def __init__(self, old_pass: OldPass | None) -> None:
        self.old_pass = old_pass
        self.paused = False  # True while forward passes are the user's, not TRL's
        self.logprobs: Logprobs | None = None  # of the sampled tokens, per completion
        self.read: list[list[int]] | None = None  # prompts that vLLM has read in the first turn, per completion
        self.kept: list[list[list[int]]] | None = None  # ids that truncated sampling kept, per completion and token
        self.tool_mask: list[list[int]] | None = None  # 0 on tokens of tools, per completion
        self.turn_ids: list[list[int]] | None = None  # turn of each token, per completion
        self.rewards: torch.Tensor | None = None  # (B,)

    def restart(self) -> None:
        """Start again: TRL generates a batch, and scores it afterwards."""
        if self.old_pass is not None:
            self.old_pass.calls = 0
        self.read = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Ignore forward passes while code of the user runs."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def rollout_logps(self, like: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the sampler, padded to the shape `(B, T)` of `like`."""
        rows = [[math.nan if x is None else x for x in row] for row in self.logprobs or []]
        padded = [row + [0.0] * (like.shape[1] - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.float32, device=like.device)

    def other_prompt(self, batch: Mapping[str, torch.Tensor]) -> tuple[list[int], list[int]] | None:
        """The first prompt that vLLM has read otherwise than the trainer, and the trainer's; `None` if all are the same."""
        for read, ids, mask in zip(self.read or [], batch["prompt_ids"], batch["prompt_mask"].bool(), strict=False):
            if list(read) != (own := ids[mask].tolist()):
                return list(read), own
        return None

    def padded_turn_ids(self, like: torch.Tensor) -> torch.Tensor | None:
        """Turn of each token, padded to the shape `(B, T)` of `like`; `None` without turns of a rollout function."""
        if self.turn_ids is None:
            return None
        rows = [[*row, *[0] * (like.shape[1] - len(row))] for row in self.turn_ids]
        return torch.tensor(rows, device=like.device)

    def loss_mask(self, completion_mask: torch.Tensor) -> torch.Tensor:
        """Mask of the tokens of the loss, `(B, T)`, from the mask of the completions."""
        if self.tool_mask is None:
            return completion_mask
        rows = [[*row, *[1] * (completion_mask.shape[1] - len(row))] for row in self.tool_mask]
        return completion_mask * torch.tensor(rows, device=completion_mask.device)
