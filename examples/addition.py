"""Sums of numbers of one or two digits after one solved example: the task that the model is trained on."""

import random
from typing import Any

import torch


NEWLINE = 198  # the token that ends an answer
LONGEST = 6  # tokens of a completion: a space, three digits, a newline, and one to spare
HELD_OUT, HELD_OUT_SEED = 256, 10**6


def problems(n: int, seed: int, limit: int = 100) -> list[tuple[str, str]]:
    """Prompts with a solved sum before the sum in question, and the answers. Numbers are below 10, or below `limit`."""
    dice = random.Random(f"sums {seed}")

    def line() -> tuple[str, str]:
        low, high = (0, 10) if dice.random() < 0.5 else (10, limit)
        a, b = dice.randrange(low, high), dice.randrange(low, high)
        return f"{a} + {b} =", f"{a + b}"

    found = []
    for _ in range(n):
        (solved, result), (text, answer) = line(), line()
        found.append((f"{solved} {result}\n{text}", answer))
    return found


def exact_answer(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Reward: 1 for the right number and nothing behind it."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, held_out: list[tuple[str, str]], rows: int = 64) -> float:
    """
    Accuracy of a policy that samples at temperature 1, without sampling: the mean probability of the right answer.

    Args:
        model (`PreTrainedModel`):
            The policy.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer, which pads on the left.
        held_out (`list[tuple[str, str]]`):
            Prompts and answers.
        rows (`int`, *optional*, defaults to `64`):
            Sequences of a forward pass.

    Returns:
        `float`: between 0 and 1.
    """
    was_training = model.training
    model.eval()
    total = 0.0
    for first in range(0, len(held_out), rows):
        part = held_out[first : first + rows]
        lengths = torch.tensor([len(tokenizer(f" {answer}\n").input_ids) for _, answer in part])
        batch = tokenizer([f"{text} {answer}\n" for text, answer in part], return_tensors="pt", padding=True)
        batch, lengths, width = batch.to(model.device), lengths.to(model.device), int(lengths.max())
        with torch.autocast(model.device.type, torch.bfloat16):
            logits = model(**batch, logits_to_keep=width + 1).logits[:, :-1].float()
        logps = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, -width:, None])[..., 0]
        of_prompt = torch.arange(width, device=model.device) < width - lengths[:, None]
        total += float(logps.masked_fill(of_prompt, 0).sum(-1).exp().sum())
    model.train(was_training)
    return total / len(held_out)
