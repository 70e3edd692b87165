"""Replays of a trainer, as `rollout_support` and `rollout_routing` ask for them."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import DistributedType

from ..replay.experts import Experts
from ..replay.kept_tokens import KeptTokens
from .trl_checks import truncation


# Settings of models that change logits above the head
_SCALES = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")


def kept_tokens_of(trainer: Any) -> KeptTokens | None:
    """Replay of the tokens that the sampler of a trainer keeps; `None` without one."""
    if trainer._settings.rollout_support is None:
        return None
    check_kept_tokens(trainer)
    if not trainer.use_vllm or not truncation(trainer.args):
        return None
    return KeptTokens(trainer.vllm_generation, trainer.temperature, trainer._bare)


def check_kept_tokens(trainer: Any) -> None:
    """Refuse trainers whose kept tokens or logits are not known."""
    model = trainer._bare(trainer.model)
    text_config = model.config.get_text_config()
    scaled = [name for name in _SCALES if getattr(text_config, name, None) not in (None, 1.0)]
    parts = ("rollout_func", "tools", "environments")
    several_turns = [name for name in parts if getattr(trainer, name, None)]
    sharded = trainer.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    reason = (
        (several_turns and f"`{several_turns[0]}` is set: the kept tokens of several turns are not joined")
        or (hasattr(model.get_output_embeddings(), "base_layer") and "the adapter changes the head of the model")
        or (scaled and f"the model has `{scaled[0]}`, which changes logits above the head")
        or (sharded and "the head of the model is sharded by FSDP or DeepSpeed")
    )
    if reason:
        raise ValueError(
            f"`rollout_support` is {trainer._settings.rollout_support!r}, but {reason}. Set `rollout_support` to None."
        )


def experts_of(trainer: Any) -> Experts | None:
    """Replay of the experts that the sampler of a trainer chooses, which are recorded from now on; `None` without one."""
    if trainer._settings.rollout_routing is None:
        return None
    models: Sequence[Any] = (trainer.model, getattr(trainer, "ref_model", None))
    experts = Experts([trainer._bare(model) for model in models if model is not None], trainer._bare)
    if trainer.use_vllm:
        trainer.vllm_generation.llm = experts.recording(trainer.vllm_generation.llm)
    return experts


def sequences_of(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask of prompts and completions, each `(B, P + T)`."""
    ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    return ids, mask
