"""Sums of numbers of one or two digits, three of them with their answers before each: what the model learns."""

import random
from typing import Any

import torch


NEWLINE = 198  # the token that ends an answer
LONGEST = 8  # tokens of a completion: a space, three digits, a newline, and room to go wrong
HELD_OUT_SEED, HELD_OUT = 10**6, 256


def line(dice: random.Random) -> tuple[str, str]:
    """A sum without its answer, and the answer. Half of the sums have one digit, the others two."""
    low, high = (0, 10) if dice.random() < 0.5 else (10, 100)
    a, b = dice.randrange(low, high), dice.randrange(low, high)
    return f"{a} + {b} =", f"{a + b}"


def problems(n: int, seed: int) -> list[tuple[str, str]]:
    """Prompts with three solved sums, and the answers to their last lines."""
    dice = random.Random(f"sums {seed}")
    found = []
    for _ in range(n):
        solved = "".join(f"{text} {answer}\n" for text, answer in (line(dice) for _ in range(3)))
        text, answer = line(dice)
        found.append((solved + text, answer))
    return found


def exact_answer(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Reward: 1 for the right number and nothing behind it."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, held_out: list[tuple[str, str]], rows: int = 32) -> float:
    """
    Accuracy of a policy that samples at temperature 1, without sampling: the mean probability of the right answer.

    Args:
        model (`PreTrainedModel`):
            The policy.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer.
        held_out (`list[tuple[str, str]]`):
            Prompts and answers.
        rows (`int`, *optional*, defaults to `32`):
            Sequences of a forward pass.

    Returns:
        `float`: between 0 and 1.
    """
    was_training = model.training
    model.eval()
    total = 0.0
    for first in range(0, len(held_out), rows):
        part = held_out[first : first + rows]
        answers = [tokenizer(f" {answer}\n").input_ids for _, answer in part]
        width = max(map(len, answers))
        sequences = [tokenizer(text).input_ids + ids for (text, _), ids in zip(part, answers, strict=True)]
        length = max(map(len, sequences))
        ids, attention = (
            torch.zeros(len(part), length, dtype=torch.long),
            torch.zeros(len(part), length, dtype=torch.long),
        )
        for row, sequence in enumerate(sequences):
            ids[row, length - len(sequence) :] = torch.tensor(sequence)
            attention[row, length - len(sequence) :] = 1
        logits = model(input_ids=ids, attention_mask=attention, logits_to_keep=width + 1).logits[:, :-1].float()
        logps = logits.log_softmax(-1).gather(-1, ids[:, -width:, None])[..., 0]
        mine = torch.tensor([[place >= width - len(answer) for place in range(width)] for answer in answers])
        total += float(logps.masked_fill(~mine, 0).sum(-1).exp().sum())
    model.train(was_training)
    return total / len(held_out)
