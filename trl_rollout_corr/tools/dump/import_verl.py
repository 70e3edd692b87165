"""
Batches that a run of verl has saved, as a dump: `python -m trl_rollout_corr.tools.dump.import_verl verl_batches dump`.
`trl-rollout-corr docs verl#dumps-of-verl` says how to save them.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from .folder import write_rows
from .rows import Tensors, make_row, on_host


def tensors_of(verl: Mapping[str, torch.Tensor]) -> Tensors:
    """
    A batch of verl's `RayPPOTrainer` under the names of a dump.

    Args:
        verl (`Mapping[str, torch.Tensor]`):
            `batch.batch` after `compute_advantage`: prompts of shape `(B, P)`, responses and numbers of their tokens
            of shape `(B, T)`, and the attention mask of both.

    Returns:
        `Mapping[str, torch.Tensor | None]`: tensors of shape `(B, ...)`.
    """
    width, loss = verl["prompts"].shape[1], verl["response_mask"].bool()
    prompt_mask, completion_mask = verl["attention_mask"].split([width, loss.shape[1]], dim=1)
    return {
        "prompt_ids": verl["prompts"],
        "prompt_mask": prompt_mask,
        "completion_ids": verl["responses"],
        "completion_mask": completion_mask,
        "train_logps": verl["old_log_probs"],
        "rollout_logps": verl["rollout_log_probs"],
        "mask": loss,
        "keep": loss,
        "coefficients": loss.float(),
        "reward": verl["token_level_scores"].sum(1),
        "advantage": (verl["advantages"] * loss).sum(1) / loss.sum(1).clamp(min=1),
        "advantages": _token_advantages(verl["advantages"], loss),
        "weights": None,
        "staleness": None,
        "again_logps": None,
    }


def _token_advantages(advantages: torch.Tensor, loss: torch.Tensor) -> torch.Tensor | None:
    """The advantages, `(B, T)`; `None` if all tokens of a completion have the same one, as in GRPO."""
    lowest = advantages.masked_fill(~loss, torch.inf).amin(1)
    largest = advantages.masked_fill(~loss, -torch.inf).amax(1)
    return advantages if (lowest < largest).any() else None


def write_batches(batches: Path, folder: Path) -> None:
    """Write a dump of the files `STEP.pt` in a folder."""
    for path in batches.glob("*.pt"):
        step = int(path.stem)
        rows = [make_row(row, step) for row in on_host(tensors_of(torch.load(path)))]
        write_rows(folder, step, 0, rows, settings={})


if __name__ == "__main__":
    write_batches(*map(Path, sys.argv[1:]))
