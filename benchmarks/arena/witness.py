"""Which tokens a correction leaves without a gradient."""

from collections import Counter
from typing import Any

import torch


def without_gradient(correction: Any) -> torch.Tensor:
    """Tokens that a correction rejects, or whose weight is 0, `(B, T)`. The latter is IcePop's way to reject."""
    if correction.weights is None or not correction.applies_weights:
        return ~correction.keep.bool()
    return ~correction.keep.bool() | (correction.weights == 0)


class TagWitness:
    """How many tokens the correction rejects, of the tags and of the text between them, by the sign of the advantage."""

    def __init__(self, trainer: Any, tags: list[int]):
        self.tags, self.counts = torch.tensor(tags), Counter()
        if hasattr(trainer, "_compute_correction"):  # not TRL's own trainer
            self.correct, trainer._compute_correction = trainer._compute_correction, self.correct_and_count

    def correct_and_count(self, train_logps: torch.Tensor, batch: dict[str, Any]) -> Any:
        correction = self.correct(train_logps, batch)
        is_tag, rejected = torch.isin(batch["completion_ids"], self.tags), without_gradient(correction)
        for sign, rows in (("positive", batch["advantages"] > 0), ("negative", batch["advantages"] < 0)):
            for name, tokens in (("tag", is_tag), ("text", ~is_tag)):
                tokens = tokens & correction.valid & rows.unsqueeze(1)
                self.counts[f"{name}_{sign}"] += int(tokens.sum())
                self.counts[f"{name}_{sign}_rejected"] += int((tokens & rejected).sum())
        return correction
