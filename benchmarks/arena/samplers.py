"""
Faults of a sampler, put into a real vLLM: its weights lag or are rounded, it reports other numbers, or it samples garbage.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import quickstart
import torch
from tasks import GARBAGE
from witness import without_gradient

from trl_rollout_corr.recording.keys import ROLLOUT_LOGPS


def spoil(trainer: Any, faults: dict[str, Any]) -> Callable[[], dict[str, float]]:
    """
    Give the trainer's sampler its faults.

    Args:
        trainer ([`~trl.GRPOTrainer`] or [`~trl.RLOOTrainer`]):
            The trainer, changed in place.
        faults (`dict`):
            `lag` in optimizer steps, and whether it is `announced`; `int8` for weights; `burst` as first step, last step and
            share of tokens; `garbage` as share of completions.

    Returns:
        `Callable[[], dict[str, float]]`: after training, how many tokens were broken and sound, and how many of each the
        correction rejected. Empty if the sampler breaks no tokens.
    """
    if faults.get("int8"):
        round_weights(trainer)
    if faults.get("lag"):
        (quickstart.Lag if faults["announced"] else SilentLag)(trainer, faults["lag"])
    broken: list[Broken] = []
    if "burst" in faults:
        broken.append(Burst(trainer, *faults["burst"]))
    if "garbage" in faults:
        broken.append(Garbage(trainer, faults["garbage"]))

    def counts() -> dict[str, int]:
        total: Counter[str] = Counter()
        for fault in broken:
            total.update(fault.counts)  # unlike `+`, keeps counts of 0
        return dict(total)

    return counts


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


class Broken:
    """
    A sampler that reports wrong log-probabilities of some tokens.

    What it reports are numbers that a model does not come up with, so that they are found again in the correction.
    """

    NUMBERS: torch.Tensor  # nats

    def __init__(self, trainer: Any, share: float):
        self.trainer, self.share = trainer, share
        self.generate, self.correct = trainer.vllm_generation.generate, getattr(trainer, "_compute_correction", None)
        trainer.vllm_generation.generate = self.generate_broken
        if self.correct:
            trainer._compute_correction = self.correct_and_count
        self.dice, self.counts = random.Random(0), Counter()

    def generate_broken(self, *args, **kwargs):
        prompts, completions, logprobs, *rest = self.generate(*args, **kwargs)
        completions, logprobs = self.broken(prompts, completions, logprobs)
        if hasattr(self.trainer, "_record_logprobs"):  # not TRL's own trainer; RLOO takes them from the sampler only
            self.trainer._record_logprobs([[ranked[0] for ranked in row] for row in logprobs], prompts)
        return (prompts, completions, logprobs, *rest)

    def broken(self, prompts: list, completions: list, logprobs: list) -> tuple[list, list]:
        """Completions and log-probabilities with their fault."""
        raise NotImplementedError

    def number(self) -> list[float]:
        return [-self.NUMBERS[self.dice.randrange(len(self.NUMBERS))].item()]

    def correct_and_count(self, train_logps: torch.Tensor, batch: dict[str, Any]) -> Any:
        correction = self.correct(train_logps, batch)
        mask = correction.valid
        broken = torch.isin(batch[ROLLOUT_LOGPS], -self.NUMBERS) & mask
        rejected = without_gradient(correction)
        for name, tokens in (("broken", broken), ("sound", mask & ~broken)):
            self.counts[name] += int(tokens.sum())
            self.counts[f"{name}_rejected"] += int((tokens & rejected).sum())
        return correction


class Burst(Broken):
    """For some steps, every so many tokens are reported with the log-probability of another, unlikely one."""

    NUMBERS = torch.arange(2.0, 12.0, 0.5) + 0.0123

    def __init__(self, trainer: Any, first: int, last: int, share: float):
        super().__init__(trainer, share)
        self.first, self.last = first, last

    def broken(self, prompts: list, completions: list, logprobs: list) -> tuple[list, list]:
        if not self.first <= self.trainer.state.global_step < self.last:
            return completions, logprobs
        return completions, [
            [self.number() if self.dice.random() < self.share else value for value in row] for row in logprobs
        ]


class Garbage(Broken):
    """
    Some completions have a token of garbage in place of a sampled one, and go on from there. The sampler reports that it was
    sure of the token.
    """

    NUMBERS = torch.tensor([0.1012])

    def broken(self, prompts: list, completions: list, logprobs: list) -> tuple[list, list]:
        completions, logprobs = [*completions], [*logprobs]
        places = {
            row: self.dice.randrange(len(tokens) - 1)
            for row, tokens in enumerate(completions)
            if len(tokens) > 1 and self.dice.random() < self.share
        }
        if not places:
            return completions, logprobs
        begun = [[*prompts[row], *completions[row][:place], GARBAGE] for row, place in places.items()]
        _, rests, of_rests, *_ = self.generate(prompts=begun, images=None, num_generations=1)
        for (row, place), rest, of_rest in zip(places.items(), rests, of_rests, strict=True):
            room = self.trainer.max_completion_length - place - 1
            completions[row] = [*completions[row][:place], GARBAGE, *rest[:room]]
            logprobs[row] = [*logprobs[row][:place], self.number(), *of_rest[:room]]
        return completions, logprobs
