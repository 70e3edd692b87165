"""Faults of a sampler, put into a real vLLM: its weights lag or are rounded, or it reports other numbers."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import quickstart
import torch

from trl_rollout_corr.trainers.keys import ROLLOUT_LOGPS


def spoil(trainer: Any, faults: dict[str, Any]) -> Callable[[], dict[str, float]]:
    """
    Give the trainer's sampler its faults.

    Args:
        trainer ([`~trl.GRPOTrainer`] or [`~trl.RLOOTrainer`]):
            The trainer, changed in place.
        faults (`dict`):
            `lag` in optimizer steps, and whether it is `announced`; `int8` for weights; `burst` as first step, last step and
            share of tokens.

    Returns:
        `Callable[[], dict[str, float]]`: after training, how many tokens were broken and sound, and how many of each the
        correction rejected. Empty without a burst.
    """
    if faults.get("int8"):
        round_weights(trainer)
    if faults.get("lag"):
        (quickstart.Lag if faults["announced"] else SilentLag)(trainer, faults["lag"])
    if "burst" not in faults:
        return dict
    burst = Burst(trainer, *faults["burst"])
    return lambda: dict(burst.counts)


class SilentLag(quickstart.Lag):
    """A sampler that is behind and does not say so."""

    def __call__(self):
        yield from super().__call__()
        self.trainer.rollout_step = self.trainer.state.global_step


def pack_tied_head(generation: Any):
    """
    Pack the head of a model with tied embeddings after each push. On a CPU vLLM does so only where the checkpoint has a head.
    """
    push = generation.sync_weights

    def push_and_pack(*args, **kwargs):
        push(*args, **kwargs)
        head = generation.llm.llm_engine.model_executor.driver_worker.model_runner.model.lm_head
        head.quant_method.process_weights_after_loading(head)

    generation.sync_weights = push_and_pack


def round_weights(trainer: Any):
    """Push weights rounded to eight bits, with a scale per row, as a quantised engine computes with them."""
    generation = trainer.vllm_generation
    exact = generation._iter_named_params

    def rounded():
        for name, weight in exact():
            scale = weight.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
            yield name, torch.round(weight.detach() / scale) * scale if weight.dim() > 1 else weight

    generation._iter_named_params = rounded


class Burst:
    """
    For some steps, every so many tokens are reported with the log-probability of another, unlikely one.

    What it reports are numbers that a model does not come up with, so that they are found again in the correction.
    """

    NUMBERS = torch.arange(2.0, 12.0, 0.5) + 0.0123  # nats

    def __init__(self, trainer: Any, first: int, last: int, share: float):
        self.trainer, self.first, self.last, self.share = trainer, first, last, share
        self.generate, self.correct = trainer.vllm_generation.generate, getattr(trainer, "_compute_correction", None)
        trainer.vllm_generation.generate = self.generate_broken
        if self.correct:
            trainer._compute_correction = self.correct_and_count
        self.dice, self.counts = random.Random(0), Counter()

    def generate_broken(self, *args, **kwargs):
        prompt_ids, completion_ids, logprobs, *rest = self.generate(*args, **kwargs)
        if self.first <= self.trainer.state.global_step < self.last:
            logprobs = [
                [self.other(value) if self.dice.random() < self.share else value for value in row] for row in logprobs
            ]
        return (prompt_ids, completion_ids, logprobs, *rest)

    def other(self, value: Any) -> Any:
        logp = -self.NUMBERS[self.dice.randrange(len(self.NUMBERS))].item()
        return [logp] if isinstance(value, list) else logp

    def correct_and_count(self, train_logps: torch.Tensor, batch: dict[str, Any]) -> Any:
        correction = self.correct(train_logps, batch)
        mask = correction.valid
        broken = torch.isin(batch[ROLLOUT_LOGPS], -self.NUMBERS) & mask
        without_gradient = ~correction.keep.bool()
        if correction.weights is not None and self.trainer.args.applies_weights:
            without_gradient |= correction.weights == 0  # IcePop's way to reject
        for name, tokens in (("broken", broken), ("sound", mask & ~broken)):
            self.counts[name] += int(tokens.sum())
            self.counts[f"{name}_rejected"] += int((tokens & without_gradient).sum())
        return correction
