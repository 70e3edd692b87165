"""
Choices of the sampler that a trainer makes again in its own forward passes: `rollout_routing` and `rollout_support`.

They are kept when the sampler generates, travel as columns of the batch, which TRL shuffles and splits like all
columns, and return in each forward pass over the batch.

`B` sequences of `S` tokens with padding, `T` of them of the completion.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import DistributedType

from ..settings.effects import truncations
from ..settings.resolve import Settings
from ..trainers.forward_pass import ForwardPass
from .experts import ROUTES, Experts
from .kept_tokens import KeptTokens
from .router_hooks import Flips
from .seam import Replay


Unwrap = Callable[[Any], Any]  # returns a model without its wrappers
# Settings of models that change logits above the head
_SCALES = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")


class Replays(Replay):
    """Replay of experts and of kept tokens for a trainer; each is `None` where it is not replayed."""

    def __init__(self, experts: Experts | None, kept_tokens: KeptTokens | None) -> None:
        self.experts, self.kept_tokens = experts, kept_tokens

    @property
    def _all(self) -> list[Any]:
        return [replay for replay in (self.experts, self.kept_tokens) if replay is not None]

    def clear(self) -> None:
        """Forget the choices, before a batch is generated and after its columns are made."""
        for replay in self._all:
            replay.clear()

    def place(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
    ) -> dict[str, torch.Tensor]:
        """
        Columns for a padded batch of prompts and completions that was just generated. Tokens and mask are `(B, S)`.
        """
        columns: dict[str, torch.Tensor] = {}
        for replay in self._all:
            columns |= replay.place(input_ids, attention_mask, logits_to_keep)
        return columns

    def check(self, batch: Mapping[str, torch.Tensor], loss_mask: torch.Tensor) -> None:
        """Check the columns of a new batch. `loss_mask`, `(B, T)`, is non-zero on tokens of the loss."""
        if self.experts is not None:
            self.experts.check(batch, loss_mask)

    def alone(self, batch: Mapping[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
        """Columns for sequence `i` of a batch, alone and without padding."""
        return {key: value for replay in self._all for key, value in replay.alone(batch, i).items()}

    def forward(
        self,
        under_way: ForwardPass,
        forward: Callable[..., tuple],
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple:
        """Run TRL's `forward` with the choices that the current pass makes again."""
        sequences = (input_ids, attention_mask, logits_to_keep)
        columns = under_way.columns(partial(self.place, *sequences))
        if self.kept_tokens is not None:
            forward = self.kept_tokens.within(forward, columns)
        if self.experts is None:
            return forward(model, *sequences, *args, **kwargs)
        trains = torch.is_grad_enabled() and self.experts.unwrap(model) is under_way.policy
        with self.experts.over(model, columns.get(ROUTES), trains=trains) as flipped:
            outputs = forward(model, *sequences, *args, **kwargs)
        if flipped and trains:
            # the experts of a token decide the log-probability of the next one
            here = torch.cat(flipped).view(input_ids.shape)[:, -logits_to_keep - 1 : -1]
            assert under_way.loss_mask is not None  # as in every pass that trains a policy
            under_way.count(Flips.count(here, under_way.loss_mask))
        return outputs

    def end(self) -> None:
        """Release the experts after a training step."""
        if self.experts is not None:
            self.experts.end()


def kept_tokens_of(trainer: Any, settings: Settings, unwrap: Unwrap) -> KeptTokens | None:
    """Replay of the tokens that a trainer's sampler keeps; `None` without replay."""
    if settings.rollout_support is None:
        return None
    check_kept_tokens(trainer, settings, unwrap)
    if not trainer.use_vllm or not truncations(vars(trainer.args)):
        return None
    return KeptTokens(trainer.vllm_generation, trainer.temperature, unwrap)


def check_kept_tokens(trainer: Any, settings: Settings, unwrap: Unwrap) -> None:
    """Refuse trainers whose kept tokens or logits are unknown."""
    model = unwrap(trainer.model)
    text_config = model.config.get_text_config()
    scaled = [name for name in _SCALES if getattr(text_config, name, None) not in (None, 1.0)]
    parts = ("rollout_func", "tools", "environments")
    several_turns = [name for name in parts if getattr(trainer, name, None)]
    sharded = trainer.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    reason = (
        (several_turns and f"`{several_turns[0]}` is set: the kept tokens of several turns are not joined")
        or (hasattr(model.get_output_embeddings(), "base_layer") and "the adapter changes the head of the model")
        or (scaled and f"the model uses `{scaled[0]}`, which changes logits above the head")
        or (sharded and "the head of the model is sharded by FSDP or DeepSpeed")
    )
    if reason:
        raise ValueError(
            f"`rollout_support` is {settings.rollout_support!r}, but {reason}. Set `rollout_support` to None."
        )


def experts_of(trainer: Any, settings: Settings, unwrap: Unwrap) -> Experts | None:
    """Replay of the experts that a trainer's sampler chooses, recorded from now on; `None` without replay."""
    if settings.rollout_routing is None:
        return None
    models: Sequence[Any] = (trainer.model, getattr(trainer, "ref_model", None))
    experts = Experts([unwrap(model) for model in models if model is not None], unwrap)
    if trainer.use_vllm:
        trainer.vllm_generation.llm = experts.recording(trainer.vllm_generation.llm)
    return experts
