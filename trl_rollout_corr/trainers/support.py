"""
Log-probabilities over the tokens that truncated sampling kept: `rollout_support: replay`.

With `top_p`, `top_k` or `min_p`, vLLM draws a token from a kept set `S`, and its log-probability is normalised over `S`. So is
the trainer's here:

    log p(token) = logit(token) - log sum_{k in S} exp(logit(k))

The kept sets come from vLLM as candidates: a token that sampling cut has a log-probability of minus infinity. The trainer
needs the logits of kept tokens alone, from the hidden states below the head and the rows of the head.

`B` completions, `T` completion tokens, `K` tokens of the largest kept set, `H` the size of a hidden state, `N` tokens.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import DistributedType
from accelerate.utils import is_peft_model
from torch.utils.checkpoint import checkpoint

from .scoring import Logprobs


Kept = list[list[list[int]]]  # ids of kept tokens, per completion and token

# Largest kept set without `top_k`, which vLLM then gets
LARGEST = 512
# Candidates above `top_k`: vLLM keeps all tokens whose logit is that of the last one
_TIES = 8
# Elements of the rows of the head that are in memory at once
_ELEMENTS = 2**24

# Settings of models that change logits above the head
_SCALES = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")


def check_replay(trainer: Any) -> None:
    """Refuse trainers whose kept sets or logits are not known."""
    config, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=True)
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
            f"`rollout_support` is {config.rollout_support!r}, but {reason}. Set `rollout_support` to None."
        )


class Candidates:
    """
    Asks a colocated vLLM for candidates, and reads the kept sets from them.

    Without `top_k`, sampling gets a `top_k` of [`LARGEST`], so that the candidates hold every kept set.
    """

    def __init__(self, generation: Any) -> None:
        engine = generation.llm.llm_engine
        self.vocabulary = engine.model_config.get_vocab_size()
        overrides = generation.generation_kwargs
        top_k = overrides.get("top_k", generation.top_k) or 0
        if top_k <= 0:
            overrides.pop("top_k", None)
            top_k = generation.top_k = min(LARGEST, self.vocabulary)
        generation.logprobs = number = min(top_k + _TIES, self.vocabulary)
        for config in (engine.model_config, engine.vllm_config.model_config):
            if 0 <= config.max_logprobs < number:  # vLLM reads it with every request
                config.max_logprobs = number

    def read(
        self, completion_ids: Sequence[Sequence[int]], logprobs: list[Logprobs], token_ids: Kept
    ) -> tuple[Logprobs, Kept]:
        """
        Log-probabilities of the sampled tokens, and the kept sets. A token whose set is larger than the candidates has no
        log-probability: `rollout_nan_policy` treats it.
        """
        sampled, kept = Logprobs(), Kept()
        for ids, rows, candidates in zip(completion_ids, logprobs, token_ids, strict=True):
            sampled.append([])
            kept.append([])
            for token, row, tokens in zip(ids, rows, candidates, strict=True):
                inside = [k for k, logp in zip(tokens, row, strict=True) if logp is not None and logp > -math.inf]
                complete = len(inside) < len(tokens) or len(tokens) >= self.vocabulary
                sampled[-1].append(row[tokens.index(token)] if complete else None)
                kept[-1].append(inside)
        return sampled, kept


def pad_kept(kept: Kept, length: int, device: torch.device) -> torch.Tensor:
    """Kept sets as a tensor, `(B, T, K)`, for `length` tokens of a completion."""
    width = max((len(tokens) for row in kept for tokens in row), default=1)
    rows = [[tokens + [-1] * (width - len(tokens)) for tokens in row] for row in kept]
    padded = [row + [[-1] * width] * (length - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int32, device=device)


class Head(NamedTuple):
    """Head of a model: rows `(V, H)`, an optional bias `(V,)`, and the temperature that logits are divided by."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    temperature: float

    def logps(self, states: torch.Tensor, tokens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of `tokens`, `(N,)`, over `kept`, `(N, K)`, from hidden states, `(N, H)`; in float32."""
        rows = kept.clamp(min=0)
        logits = torch.einsum("nh,nkh->nk", states.float(), self.weight[rows].float())
        if self.bias is not None:
            logits = logits + self.bias[rows].float()
        logits = (logits / self.temperature).masked_fill(kept < 0, -math.inf)
        own = torch.where(kept == tokens.unsqueeze(1), logits, 0.0).sum(1)
        # log p(token) = logit(token) - log sum_{k in S} exp(logit(k))
        return own - logits.logsumexp(1)

    def in_parts(self, states: torch.Tensor, tokens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """[`Head.logps`] of a part of the tokens at a time. The rows of the head are not kept for the gradient."""
        number = max(1, _ELEMENTS // (kept.shape[1] * states.shape[1]))
        parts = zip(*(x.split(number) for x in (states, tokens, kept)), strict=True)
        return torch.cat([checkpoint(self.logps, *part, use_reentrant=False) for part in parts])


def over_support(
    forward: Callable[..., tuple],
    support: torch.Tensor,
    temperature: float,
    unwrapped: Any,
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    *args: Any,
    **kwargs: Any,
) -> tuple:
    """
    TRL's forward pass with log-probabilities over the kept sets `support`, `(B, T, K)`. Tokens without a set keep TRL's, and
    entropies are TRL's, of the whole vocabulary. `unwrapped` is the `model` without wrappers.
    """
    base = unwrapped.get_base_model() if is_peft_model(unwrapped) else unwrapped
    states: list[torch.Tensor] = []  # of each part of the batch
    hook = base.base_model.register_forward_hook(
        lambda module, inputs, output: states.append(output.last_hidden_state[:, -logits_to_keep - 1 : -1])
    )
    try:
        logps, *others = forward(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
    finally:
        hook.remove()
    tokens, head = input_ids[:, -logits_to_keep:], base.get_output_embeddings()
    known = (support == tokens.unsqueeze(2)).any(2)
    if known.any():
        found = Head(head.weight, head.bias, temperature).in_parts(
            torch.cat(states)[known], tokens[known], support[known]
        )
        logps = logps.masked_scatter(known, found.to(logps.dtype))
    return logps, *others
