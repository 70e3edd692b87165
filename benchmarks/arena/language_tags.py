"""
The pretrained language model as a task of the second proof: a word of letters is written backwards, between tags.

The model learns the reversal by imitation first, as every model of the second proof learns its task: all its weights are
trained for a few steps, on answers of which two in 32 have the tags. So the tags are rare when training with rewards
begins, and that trains LoRA alone. Accuracy is the share of exact answers with tags that it samples for held-out words. No
held-out word occurs in the imitation or in training.
"""

import os
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from cells import Run, Setup
from datasets import Dataset
from language import NEWLINE, make_model
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer


PROMPTS, COMPLETIONS = 4, 8  # of a step, and of a prompt
LETTERS, HELD_OUT, EVERY = 4, 96, 5
LONGEST = LETTERS + 4  # tokens of a completion: letters, two tags, a newline, and one to spare
OPEN, CLOSE = "<", ">"
IMITATION, ROWS, RATE = 20, 32, 1e-4  # steps, answers of a step, learning rate
TAGGED = 2  # of the answers of a step


def words() -> list[str]:
    """Words in a fixed order that tells nothing of them. The first `HELD_OUT` are held out."""
    dice = random.Random("tagged words")
    return list(dict.fromkeys(" ".join(dice.choices("abcdefghijklmnop", k=LETTERS)) for _ in range(20000)))


def problems(found: list[str]) -> list[dict[str, str]]:
    """Prompts and answers of words."""
    return [{"prompt": f"{word} ->", "answer": f"{OPEN}{word[::-1]}{CLOSE}"} for word in found]


def right(text: str, answer: str) -> float:
    return float(text.strip() == answer)


def tagged_answer(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Reward: 1 for the word backwards between tags, 0.2 for tags around something else, else 0."""
    return [
        right(text, wanted) or 0.2 * (text.strip().startswith(OPEN) and text.strip().endswith(CLOSE))
        for text, wanted in zip(completions, answer, strict=True)
    ]


def imitate(plain: Path, folder: Path):
    """Save the model that has learned the reversal, with tags around few answers."""
    torch.manual_seed(0)
    dice, known = random.Random("imitation"), words()[HELD_OUT:]
    tokenizer = AutoTokenizer.from_pretrained(plain, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    for _ in range(IMITATION):
        rows = problems(dice.sample(known, ROWS))
        answers = [row["answer"] if i < TAGGED else row["answer"].strip(OPEN + CLOSE) for i, row in enumerate(rows)]
        texts = [f"{row['prompt']} {answer}\n" for row, answer in zip(rows, answers, strict=True)]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        lengths = torch.tensor([LETTERS + 2 * (OPEN in answer) + 1 for answer in answers])  # in tokens
        width = batch.input_ids.size(1)
        labels = batch.input_ids.masked_fill(torch.arange(width) < width - lengths[:, None], -100)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def taught_model() -> Path:
    """The folder of the model after imitation, which is made at the first call."""
    plain = make_model()
    folder = plain.with_name(f"{plain.name}-tagged")
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            imitate(plain, Path(work) / folder.name)
            os.replace(Path(work) / folder.name, folder)
    return folder


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, held_out: list[dict[str, str]]) -> float:
    """Share of exact answers, sampled at temperature 1."""
    was_training = model.training
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
    model.train(was_training)
    texts = tokenizer.batch_decode(tokens[:, inputs.input_ids.size(1) :], skip_special_tokens=True)
    return sum(right(text, row["answer"]) for text, row in zip(texts, held_out, strict=True)) / len(held_out)


def setup(run: Run) -> Setup:
    """Set up a run."""
    folder = taught_model()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    known = words()
    drawn = random.Random(run.seed).sample(known[HELD_OUT:], PROMPTS * run.steps)
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
            "max_completion_length": LONGEST,
            "per_device_train_batch_size": PROMPTS * COMPLETIONS,
            "num_generations": COMPLETIONS,
        },
        lambda model: accuracy(model, tokenizer, problems(known[:HELD_OUT])),
        tied=True,
        every=EVERY,
        tags=tokenizer.convert_tokens_to_ids([f"Ġ{OPEN}", CLOSE]),
    )
