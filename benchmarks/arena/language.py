"""
The pretrained language model as a task of the arena: sums of numbers of one or two digits, after one solved example.

LoRA of rank 16 on all linear layers is trained in autocast to bfloat16, and added to the weights when they are pushed to vLLM.
"""

import random
import sys
from pathlib import Path
from typing import Any


sys.path.append(str(Path(__file__).parents[1] / "language_model"))

import torch
from cells import Run, Setup
from datasets import Dataset
from model import make_model
from peft import LoraConfig
from transformers import AutoTokenizer


NEWLINE = 198  # the token that ends an answer
LONGEST = 6  # tokens of a completion: a space, three digits, a newline, and one to spare
PROMPTS, COMPLETIONS = 4, 8  # of a step, and of a prompt
HELD_OUT, HELD_OUT_SEED = 256, 10**6


def problems(n: int, seed: int) -> list[tuple[str, str]]:
    """Prompts with a solved sum before the sum in question, and the answers. Half of the sums have one digit."""
    dice = random.Random(f"sums {seed}")

    def line() -> tuple[str, str]:
        low, high = (0, 10) if dice.random() < 0.5 else (10, 100)
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
        width = int(lengths.max())
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**batch, logits_to_keep=width + 1).logits[:, :-1].float()
        logps = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, -width:, None])[..., 0]
        of_prompt = torch.arange(width) < width - lengths[:, None]
        total += float(logps.masked_fill(of_prompt, 0).sum(-1).exp().sum())
    model.train(was_training)
    return total / len(held_out)


def setup(run: Run) -> Setup:
    """
    Set up a run.

    Args:
        run ([`Run`]):
            The run.

    Returns:
        [`Setup`].
    """
    folder = make_model()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    kept = problems(HELD_OUT, HELD_OUT_SEED)
    drawn = problems(PROMPTS * run.steps, run.seed)
    return Setup(
        {
            "model": str(folder),
            "reward_funcs": exact_answer,
            "train_dataset": Dataset.from_list([{"prompt": text, "answer": answer} for text, answer in drawn]),
            "processing_class": tokenizer,
            "peft_config": LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        },
        {
            "bf16": True,
            "model_init_kwargs": {"dtype": "float32"},
            "generation_kwargs": {"stop_token_ids": [NEWLINE]},
            "max_completion_length": LONGEST,
            "per_device_train_batch_size": PROMPTS * COMPLETIONS,
            "num_generations": COMPLETIONS,
        },
        lambda model: accuracy(model, tokenizer, kept),
        tied=True,
    )


def push_in_bfloat16(trainer: Any):
    """Round weights before they are kept and pushed. The sampler does so anyway, and old weights take half of the memory."""
    generation = trainer.vllm_generation
    exact = generation._iter_named_params
    generation._iter_named_params = lambda: ((name, weight.bfloat16()) for name, weight in exact())
