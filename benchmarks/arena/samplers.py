"""
Faults of a sampler, put into a real vLLM: its weights lag, or differ from the trainer's, or it samples garbage.
"""

import random
from collections.abc import Iterator
from typing import Any

import quickstart
import torch
from tasks import GARBAGE

from trl_rollout_corr.trainers.keys import ROLLOUT_STEP


NEVER = 10**6  # steps


def spoil(trainer: Any, faults: dict[str, Any]) -> None:
    """
    Give the trainer's sampler its faults.

    Args:
        trainer ([`~trl.GRPOTrainer`] or [`~trl.RLOOTrainer`]):
            The trainer, changed in place.
        faults (`dict`):
            `lag` in optimizer steps, and whether it is `announced`; `mixed`, if the first half of a batch is written by the
            newest weights; `noise` on weights, a size or the sizes at the first and the last step; `lost`, if no push arrives
            and none is missed; `garbage` as share of completions.
    """
    if "noise" in faults:
        Noise(trainer, faults["noise"])
    if faults.get("mixed"):
        MixedLag(trainer, faults["lag"])
    elif faults.get("lag"):
        (quickstart.Lag if faults["announced"] else SilentLag)(trainer, faults["lag"])
    if faults.get("lost"):
        SilentLag(trainer, NEVER)
    if "garbage" in faults:
        Garbage(trainer, faults["garbage"])


def record(trainer: Any, prompts: list, logprobs: list):
    """Give the trainer the log-probabilities of a whole batch, unless it is TRL's own. RLOO takes them from here only."""
    if hasattr(trainer, "_record_logprobs"):
        trainer._record_logprobs([[ranked[0] for ranked in row] for row in logprobs], prompts)


class SilentLag(quickstart.Lag):
    """A sampler that is behind and does not say so."""

    def __call__(self):
        yield from super().__call__()
        self.trainer.rollout_step = self.trainer.state.global_step


class MixedLag(quickstart.Lag):
    """A sampler that writes the first half of a batch with the newest weights, and the other half with those of before."""

    def __init__(self, trainer: Any, steps: int):
        super().__init__(trainer, steps)
        self.behind = False
        generation = trainer.vllm_generation
        self.generate, generation.generate = generation.generate, self.generate_halves
        self.score, trainer._generate_and_score_completions = (
            trainer._generate_and_score_completions,
            self.score_halves,
        )

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if not self.behind:
            for _ in super().__call__():  # keeps the newest weights
                pass
            self.trainer.rollout_step = self.trainer.state.global_step
        yield from self.history[0 if self.behind else -1][1]

    def generate_halves(self, prompts: list, images: list | None, num_generations: int, **kwargs: Any) -> tuple:
        half = len(prompts) // 2
        first = self.generate(prompts[:half], None, num_generations, **kwargs)
        self.behind = True
        try:
            self.trainer.vllm_generation.sync_weights()
        finally:
            self.behind = False
        second = self.generate(prompts[half:], None, num_generations, **kwargs)
        prompts, completions, logprobs, *rest = (a and [*a, *b] for a, b in zip(first, second, strict=True))
        record(self.trainer, prompts, logprobs)
        return (prompts, completions, logprobs, *rest)

    def score_halves(self, inputs: Any) -> dict[str, Any]:
        batch = self.score(inputs)
        if ROLLOUT_STEP in batch:  # not TRL's own trainer
            batch[ROLLOUT_STEP][len(batch[ROLLOUT_STEP]) // 2 :] = self.history[0][0]
        return batch


class Noise:
    """
    A sampler with the newest weights, of which each differs by a share of itself. The shares are drawn once, from a normal
    distribution, and are the same in all runs. With two sizes they grow from the first to the last step. Biases and the scales
    of norms are left alone, as a quantiser does.
    """

    def __init__(self, trainer: Any, size: float | list[float]):
        self.trainer, self.current = trainer, trainer.vllm_generation._iter_named_params
        self.first, self.last = size if isinstance(size, list) else (size, None)
        self.shares: dict[str, torch.Tensor] = {}
        self.dice = torch.Generator().manual_seed(0)
        trainer.vllm_generation._iter_named_params = self

    @property
    def size(self) -> float:
        """Standard deviation of the shares at the current step."""
        if self.last is None:
            return self.first
        return self.first + (self.last - self.first) * self.trainer.state.global_step / self.trainer.args.max_steps

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self.current():
            if weight.dim() < 2:
                yield name, weight
                continue
            if name not in self.shares:
                self.shares[name] = torch.randn(weight.shape, generator=self.dice)
            yield name, weight.detach() * (1 + self.size * self.shares[name])


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


class Garbage:
    """
    Some completions have a token of garbage in place of a sampled one, and go on from there. The sampler reports that it was
    sure of the token.
    """

    REPORTED = -0.1012  # nats

    def __init__(self, trainer: Any, share: float):
        self.trainer, self.share = trainer, share
        self.generate, self.dice = trainer.vllm_generation.generate, random.Random(0)
        trainer.vllm_generation.generate = self.generate_broken

    def generate_broken(self, *args, **kwargs):
        prompts, completions, logprobs, *rest = self.generate(*args, **kwargs)
        completions, logprobs = self.broken(prompts, completions, logprobs)
        record(self.trainer, prompts, logprobs)
        return (prompts, completions, logprobs, *rest)

    def broken(self, prompts: list, completions: list, logprobs: list) -> tuple[list, list]:
        """Completions and log-probabilities with garbage."""
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
            logprobs[row] = [*logprobs[row][:place], [self.REPORTED], *of_rest[:room]]
        return completions, logprobs
