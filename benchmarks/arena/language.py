"""
The pretrained language model as a task of the arena: sums of numbers of one or two digits, after one solved example.

LoRA of rank 16 on all linear layers is trained in autocast to bfloat16, and added to the weights when they are pushed to vLLM.
"""

import sys
from pathlib import Path
from typing import Any


sys.path.append(str(Path(__file__).parents[2] / "examples"))

from addition import HELD_OUT, HELD_OUT_SEED, LONGEST, NEWLINE, accuracy, exact_answer, problems
from cells import Run, Setup
from datasets import Dataset
from peft import LoraConfig
from smollm2 import make_model
from transformers import AutoTokenizer


PROMPTS, COMPLETIONS = 4, 8  # of a step, and of a prompt


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
