"""Sequences of a batch scored alone, outside TRL's loss. `B` completions, `T` completion tokens."""

from collections.abc import Callable
from typing import Any

import torch


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
            # every rank makes as many forward passes, also for a completion that TRL masks as a
            # whole
            ids = torch.cat([prompt, completion if len(completion) else batch["completion_ids"][i][:1]])[None]
            n = max(len(completion), 1)
            scored = forward(i, ids, torch.ones_like(ids), n)[0][0].float()
            logps[i, : len(completion)] = scored[: len(completion)]
    return logps
