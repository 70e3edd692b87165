"""What is looked at during a run, and changes nothing in it."""

from typing import Any

import torch

from trl_rollout_corr.trainers.keys import ROLLOUT_LOGPS


class ForceWitness:
    """
    How much of the gradient comes from bad tokens that the trainer likes more than the sampler did.

    Sums over windows of ten steps: of tokens, of bad tokens, of *grown* ones (bad tokens with a ratio above 1), and of their
    pulls. The pull of a token is its coefficient times the size of its advantage.
    """

    WINDOW = 10

    def __init__(self, trainer: Any):
        self.steps: list[dict[str, float]] = []
        if hasattr(trainer, "_compute_correction"):  # not TRL's own trainer
            self.correct, trainer._compute_correction = trainer._compute_correction, self.correct_and_sum

    def correct_and_sum(self, train_logps: torch.Tensor, batch: dict[str, Any]) -> Any:
        correction = self.correct(train_logps, batch)
        advantages = batch["advantages"].unsqueeze(1)
        valid = correction.valid.bool()
        factors = correction.keep.to(torch.float32)
        if correction.weights is not None and correction.applies_weights:
            factors = factors * correction.weights
        pull = torch.where(valid, factors.detach() * advantages.abs(), 0.0)
        bad = valid & (advantages < 0)
        grown = bad & (train_logps.detach() > batch[ROLLOUT_LOGPS])
        found = {
            "tokens": valid,
            "bad": bad,
            "grown": grown,
            "pull": pull,
            "bad_pull": pull * bad,
            "grown_pull": pull * grown,
        }
        self.steps.append({name: float(values.sum()) for name, values in found.items()})
        return correction

    def windows(self) -> list[dict[str, float]]:
        """Sums of windows of steps."""
        found = []
        for first in range(0, len(self.steps), self.WINDOW):
            own = self.steps[first : first + self.WINDOW]
            found.append({name: float(f"{sum(step[name] for step in own):.5g}") for name in own[0]})
        return found


class MovedNumbers:
    """Share of the sampler's numbers of 8 bits that change at a push, of every push but the first."""

    def __init__(self, generation: Any):
        self.shares: list[float] = []
        self.llm, self.push, self.before = generation.llm, generation.sync_weights, None
        generation.sync_weights = self.push_and_compare

    def push_and_compare(self, *args: Any, **kwargs: Any) -> None:
        self.push(*args, **kwargs)
        model = self.llm.llm_engine.model_executor.driver_worker.get_model()
        now = [x.data.view(torch.int8).flatten() for x in model.parameters() if x.dtype == torch.float8_e4m3fn]
        numbers = torch.cat(now)  # a copy
        if self.before is not None:
            self.shares.append((numbers != self.before).float().mean().item())
        self.before = numbers
