"""
A pretrained model (`smollm2.py`) that learns sums (`addition.py`).

As `sorting.py`, this module has the prompts, the reward and the accuracy of a task. It needs `gguf` and `peft`, which
`make setup` installs; elsewhere `pip install gguf==0.19.0 peft` does.
"""

import subprocess
import sys
from pathlib import Path

import addition
import torch
from addition import exact_answer
from datasets import Dataset
from smollm2 import make_model


__all__ = ["TRAINING", "accuracy", "adapter", "exact_answer", "make_prompts", "probe", "warm_start"]

TRAINING = {
    "bf16": True,
    "model_init_kwargs": {"dtype": "float32"},
    "gradient_checkpointing": False,
    "generation_kwargs": {"stop_token_ids": [addition.NEWLINE]},
    "max_completion_length": addition.LONGEST,
    "per_device_train_batch_size": 32,  # 4 prompts, 8 completions each
    "max_steps": 8,
    "eval_every": 4,
    "lag": 2,
    "learning_rate": 1e-4,
}


def warm_start(folder: Path) -> Path:
    """The folder of the model, made at the first call. The model needs no warm start."""
    del folder
    return make_model()


def make_prompts(n: int, seed: int) -> Dataset:
    return Dataset.from_list([{"prompt": text, "answer": answer} for text, answer in addition.problems(n, seed)])


def accuracy(model, tokenizer) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        return addition.accuracy(model, tokenizer, addition.problems(64, addition.HELD_OUT_SEED))


def adapter():
    """LoRA on all linear layers: the optimizer and the backward pass take less time than with all weights."""
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")


def probe(folder: Path):
    """Print the gap of the model before training, and its cause."""
    command = [sys.executable, "-m", "trl_rollout_corr", "probe", str(folder), "--completions", "16"]
    print(f"\nThe gap before training: trl-rollout-corr {' '.join(command[3:])}", flush=True)
    subprocess.run([*command, "--bf16", "true"], check=False)
    print(flush=True)
