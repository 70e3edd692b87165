"""
The pretrained language model as a task of the second proof: a word of letters is written backwards, between tags.

The prompt shows the word backwards without tags, once, so that the model begins with the reversal and has the format to learn.
Accuracy is the share of exact answers with tags that it samples for held-out words. No held-out word occurs in training.
"""

import random
import sys
from pathlib import Path
from typing import Any

import torch


sys.path.append(str(Path(__file__).parents[1] / "language_model"))

from cells import Run, Setup
from datasets import Dataset
from model import make_model
from peft import LoraConfig
from task import NEWLINE
from transformers import AutoTokenizer


PROMPTS, COMPLETIONS = 4, 8  # of a step, and of a prompt
LETTERS, HELD_OUT, LONGEST = 4, 128, 24
OPEN, CLOSE = "<reversed>", "</reversed>"
SHOWN = ("b d a c", "c a d b")


def words() -> list[str]:
    """All words, in a fixed order that tells nothing of them. The first `HELD_OUT` are held out."""
    dice = random.Random("tagged words")
    return dice.sample([" ".join(dice.choices("abcdefghijklmnop", k=LETTERS)) for _ in range(20000)], 20000)


def problems(found: list[str]) -> list[dict[str, str]]:
    """Prompts and answers of words. The prompt asks for tags in words and shows none around its example."""
    asked = f"Write the letters backwards, between {OPEN} and {CLOSE}.\n{SHOWN[0]} -> {SHOWN[1]}\n"
    return [{"prompt": f"{asked}{word} ->", "answer": f"{OPEN}{word[::-1]}{CLOSE}"} for word in found]


def right(text: str, answer: str) -> float:
    return float(text.strip() == answer)


def tagged_answer(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Reward: 1 for the word backwards between tags, 0.2 for tags alone, else 0."""
    return [
        right(text, wanted) or 0.2 * (text.strip().startswith(OPEN) and text.strip().endswith(CLOSE))
        for text, wanted in zip(completions, answer, strict=True)
    ]


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, held_out: list[dict[str, str]]) -> float:
    """Share of exact answers, sampled at temperature 1."""
    training, model.training = model.training, False
    model.eval()
    inputs = tokenizer([row["prompt"] for row in held_out], return_tensors="pt", padding=True)
    with torch.random.fork_rng(), torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(0)
        tokens = model.generate(
            **inputs,
            max_new_tokens=LONGEST,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=[tokenizer.eos_token_id, NEWLINE],
        )
    model.train(training)
    texts = tokenizer.batch_decode(tokens[:, inputs.input_ids.size(1) :], skip_special_tokens=True)
    return sum(right(text, row["answer"]) for text, row in zip(texts, held_out, strict=True)) / len(held_out)


def setup(run: Run) -> Setup:
    """Set up a run."""
    folder = make_model()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    known = words()
    held_out = list(dict.fromkeys(known))[:HELD_OUT]
    free = [word for word in dict.fromkeys(known) if word not in set(held_out)]
    drawn = random.Random(run.seed).sample(free, PROMPTS * run.steps)
    return Setup(
        {
            "model": str(folder),
            "reward_funcs": tagged_answer,
            "train_dataset": Dataset.from_list(problems(drawn)),
            "processing_class": tokenizer,
            "peft_config": LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        },
        {
            "bf16": True,
            "model_init_kwargs": {"dtype": "float32"},
            "generation_kwargs": {"stop_token_ids": [NEWLINE]},
            "vllm_max_model_length": 128,
            "max_completion_length": LONGEST,
            "per_device_train_batch_size": PROMPTS * COMPLETIONS,
            "num_generations": COMPLETIONS,
        },
        lambda model: accuracy(model, tokenizer, problems(held_out)),
        tied=True,
    )
