"""Sequences scored alone, outside TRL's loss. `B` completions, `T` completion tokens."""

from collections.abc import Callable
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from trl.trainer import utils


AGAIN = 8  # sequences of a batch that are scored a second time


def sequences_of(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask of prompts and completions, each `(B, P + T)`."""
    ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    return ids, mask


def score_alone(forward: Callable[..., tuple], batch: dict[str, Any], most: int = AGAIN) -> torch.Tensor:
    """Log-probabilities, `(B, T)` in nats, of the first sequences without padding; else NaN."""
    logps = torch.full(batch["completion_ids"].shape, torch.nan, device=batch["completion_ids"].device)
    devices = [logps.device] if logps.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        for i in range(min(most, len(logps))):
            prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()]
            mask = batch["completion_mask"][i].bool()
            completion = batch["completion_ids"][i][mask]
            # every rank makes as many forward passes, also for a completion that TRL masks as a whole
            ids = torch.cat([prompt, completion if len(completion) else batch["completion_ids"][i][:1]])[None]
            n = max(len(completion), 1)
            scored = forward(i, ids, torch.ones_like(ids), n)[0][0].float()
            logps[i, : len(completion)] = scored[: len(completion)]
    return logps


def score_text(model: Any, accelerator: Any, args: Any, ids: torch.Tensor, n: int, **inputs: Any) -> torch.Tensor:
    """
    Log-probabilities, `(n,)`, of the last `n` tokens of `ids`, `(1, S)`, at temperature 1, whatever that of the
    trainer.

    It takes no more memory than TRL's own forward pass. From 1.16 on, TRL computes log-probabilities in tiles, with
    the temperature in the forward method of the model, so the method is replaced for the time of the pass. `model` may
    have wrappers, `args` are those of the trainer, and `inputs` further ones of the model.
    """
    bare = accelerator.unwrap_model(model)
    base = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
    add_fused_lm_head = getattr(utils, "add_fused_lm_head", None)
    if add_fused_lm_head is None:
        return _logps_of_logits(model, base, accelerator, ids, n, **inputs)
    labels = ids.clone()
    labels[:, :-n] = -100  # no log-probability is asked for
    with patch.object(base, "forward", base.forward), accelerator.autocast():
        add_fused_lm_head(base, cast_lm_head_to_fp32=getattr(args, "cast_lm_head_to_fp32", False))
        scored: torch.Tensor = model(input_ids=ids, labels=labels, fused_lm_head=True, **inputs).log_probs
    return scored[0, -n:]


def _logps_of_logits(
    model: Any, base: Any, accelerator: Any, ids: torch.Tensor, n: int, **inputs: Any
) -> torch.Tensor:
    """The same from logits, which trainers of TRL before 1.16 compute as well."""
    if "logits_to_keep" in signature(type(base).forward).parameters:  # the logits of a whole text may not fit
        inputs["logits_to_keep"] = n + 1
    with accelerator.autocast():
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, -n - 1 : -1]
    blocks = zip(logits.split(256), ids[0, -n:, None].split(256), strict=True)  # each copied to float32
    return torch.cat([rows.float().log_softmax(-1).gather(1, tokens)[:, 0] for rows, tokens in blocks])
