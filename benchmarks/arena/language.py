"""
The pretrained language model as two tasks of the second comparison, which it learns by imitation before any reward.

- `tagged_words`: a word of letters is written backwards, between tags. Two of the 32 answers of an imitation step have tags,
  so that they are rare when training with rewards begins.
- `long_sums`: nine digits are added up, and the answer has every partial sum, which makes about 63 tokens.

All weights are trained on answers for a few steps, and then LoRA, or all weights, with rewards. Accuracy is the share of
answers that the policy samples right for held-out questions. No held-out question occurs in the imitation or in training.
"""

import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any


sys.path.append(str(Path(__file__).parents[2] / "examples"))

import torch
from addition import NEWLINE
from datasets import Dataset
from peft import LoraConfig
from plan import LONG_LANGUAGE, TAGGED_LANGUAGE, Run, Setup
from smollm2 import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer


COMPLETIONS = 8  # of a prompt
HELD_OUT = 96
CONTEXT = 128  # tokens of a prompt and its answer
RATE = 1e-4  # learning rate of imitation
OPEN, CLOSE = "<", ">"
TAGGED = 2  # of the answers of a step

Row = dict[str, str]  # a prompt, its answer, and the text that is taught, if it is another


def words() -> list[Row]:
    """Words of four letters and their reversals, in an order that tells nothing of them."""
    dice = random.Random("tagged words")
    found = dict.fromkeys(" ".join(dice.choices("abcdefghijklmnop", k=4)) for _ in range(20000))
    return [{"prompt": f"{word} ->", "answer": f"{OPEN}{word[::-1]}{CLOSE}"} for word in found]


def sums() -> list[Row]:
    """Rows of nine digits above 0, and their partial sums, in an order that tells nothing of them."""
    dice = random.Random("long sums")
    found = []
    for text in dict.fromkeys("".join(dice.choices("123456789", k=9)) for _ in range(20000)):
        digits = [int(digit) for digit in text]
        steps = zip(pairwise(accumulate(digits)), digits[1:], strict=True)
        answer = " ".join(f"{before}+{digit}={after}" for (before, after), digit in steps)
        # A word comes first, because the model hardly reads the first token of a text
        found.append({"prompt": f"Add {' '.join(text)} ->", "answer": answer})
    return found


def is_right(text: str, answer: str) -> bool:
    return text.strip() == answer


def ends_right(text: str, answer: str) -> bool:
    """True if the last number is right. The steps before it are not looked at."""
    return text.strip().rpartition("=")[2] == answer.rpartition("=")[2]


def tagged_answer(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Reward: 1 for the word backwards between tags, 0.2 for tags around something else, else 0."""
    return [
        float(is_right(text, wanted)) or 0.2 * (text.strip().startswith(OPEN) and text.strip().endswith(CLOSE))
        for text, wanted in zip(completions, answer, strict=True)
    ]


def right_sum(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Reward: 1 for the right sum at the end of the answer, else 0."""
    return [float(ends_right(text, wanted)) for text, wanted in zip(completions, answer, strict=True)]


@dataclass(frozen=True)
class Taught:
    """
    A task.

    Args:
        name (`str`):
            Its name.
        rows (`Callable`):
            Returns all questions. The first `HELD_OUT` are held out.
        reward (`Callable`):
            The reward function.
        is_right (`Callable`):
            Says whether a text is right, for an answer.
        imitation (`int`):
            Steps of imitation.
        answers (`int`):
            Answers of a step of imitation.
        prompts (`int`):
            Prompts of a step with rewards.
        longest (`int`):
            Tokens of a completion, with a newline and one to spare.
        every (`int`, *optional*, defaults to 5):
            Optimizer steps from one look at held-out questions to the next.
        tagged (`bool`, *optional*, defaults to `False`):
            Whether answers have tags, which are rarely taught.
    """

    name: str
    rows: Callable[[], list[Row]]
    reward: Callable[..., list[float]]
    is_right: Callable[[str, str], bool]
    imitation: int
    answers: int
    prompts: int
    longest: int
    every: int = 5
    tagged: bool = False


TASKS = {
    task.name: task
    for task in (
        Taught(
            TAGGED_LANGUAGE,
            words,
            tagged_answer,
            is_right,
            imitation=20,
            answers=32,
            prompts=4,
            longest=8,
            tagged=True,
        ),
        Taught(LONG_LANGUAGE, sums, right_sum, ends_right, imitation=25, answers=16, prompts=2, longest=66, every=10),
    )
}


def imitate(task: Taught, plain: Path, folder: Path):
    """Save the model that has learned the answers of a task."""
    torch.manual_seed(0)
    dice, known = random.Random("imitation"), task.rows()[HELD_OUT:]
    tokenizer = AutoTokenizer.from_pretrained(plain, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    for _ in range(task.imitation):
        rows = dice.sample(known, task.answers)
        answers = [
            f" {row['answer'].strip(OPEN + CLOSE) if task.tagged and i >= TAGGED else row['answer']}\n"
            for i, row in enumerate(rows)
        ]
        prompts = [row["prompt"] for row in rows]
        batch = tokenizer([a + b for a, b in zip(prompts, answers, strict=True)], return_tensors="pt", padding=True)
        lengths = torch.tensor([len(tokenizer(answer).input_ids) for answer in answers])
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


def taught_model(task: Taught) -> Path:
    """The folder of the model after imitation, which is made at the first call."""
    plain = make_model()
    folder = plain.with_name(f"{plain.name}-{task.name}")
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            imitate(task, plain, Path(work) / folder.name)
            os.replace(Path(work) / folder.name, folder)
    return folder


@torch.no_grad()
def accuracy(task: Taught, tokenizer: Any, held_out: list[Row], model: Any) -> float:
    """Share of right answers, sampled at temperature 1."""
    was_training = model.training
    model.eval()
    inputs = tokenizer([row["prompt"] for row in held_out], return_tensors="pt", padding=True)
    with torch.random.fork_rng(), torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(0)
        tokens = model.generate(
            **inputs,
            max_new_tokens=task.longest,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=[tokenizer.eos_token_id, NEWLINE],
        )
    model.train(was_training)
    texts = tokenizer.batch_decode(tokens[:, inputs.input_ids.size(1) :], skip_special_tokens=True)
    return sum(task.is_right(text, row["answer"]) for text, row in zip(texts, held_out, strict=True)) / len(held_out)


def setup(run: Run) -> Setup:
    """Set up a run."""
    task = TASKS[run.cell.task]
    folder, rows = taught_model(task), task.rows()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    drawn = random.Random(run.seed).sample(rows[HELD_OUT:], task.prompts * run.steps)
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    return Setup(
        {
            "model": str(folder),
            "reward_funcs": task.reward,
            "train_dataset": Dataset.from_list(drawn),
            "processing_class": tokenizer,
            "peft_config": None if run.cell.way == "all_weights" else adapter,
        },
        {
            "bf16": True,
            "model_init_kwargs": {"dtype": "float32"},
            "generation_kwargs": {"stop_token_ids": [NEWLINE]},
            "vllm_max_model_length": CONTEXT,
            "max_completion_length": task.longest,
            "per_device_train_batch_size": task.prompts * COMPLETIONS,
            "num_generations": COMPLETIONS,
        },
        partial(accuracy, task, tokenizer, rows[:HELD_OUT]),
        tied=True,
        every=task.every,
    )


def push_in_bfloat16(trainer: Any):
    """Round weights before they are kept and pushed. The sampler does so anyway, and old weights take half of the memory."""
    generation = trainer.vllm_generation
    exact = generation._iter_named_params
    generation._iter_named_params = lambda: ((name, weight.bfloat16()) for name, weight in exact())
