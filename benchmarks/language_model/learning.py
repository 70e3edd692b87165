"""
What one way to correct does to the training of a language model: a run with a sampler that is some optimizer steps behind.

LoRA of rank 16 on all linear layers. The task is drawn here, sums as hard as the model needs them, or is GSM8K from the hub.
"""

import sys
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # before this folder, which has a `run`, too

import sums
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from quickstart import Lag
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer


LIMITS = (10**2, 10**3, 10**4, 10**6, 10**8)  # of the numbers of sums
EASY = 0.7  # accuracy from which on sums are made harder
PROMPTS, COMPLETIONS = 8, 8  # of a step, and of a prompt


def train(model: str, task: str, preset: str | None, age: int, **fields: Any) -> tuple[dict[str, Any], list[float]]:
    """
    Train one run.

    Args:
        model (`str`):
            Folder of the model.
        task (`str`):
            `"sums"` or `"gsm8k"`.
        preset (`str`, *optional*):
            `rollout_correction`, or `None` for TRL's trainer with its own correction.
        age (`int`):
            Optimizer steps that the sampler is behind.
        fields:
            Fields of the configuration; `max_steps` and `seed` among them.

    Returns:
        `tuple[dict[str, Any], list[float]]`: accuracy on held-out sums before and after, the mean reward of the last tenth of
        all steps, and the limit of the sums; and the reward of each step.
    """
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    n, seed = fields["max_steps"], fields["seed"]
    if task == "sums":
        limit, held_out = how_hard(model, tokenizer, on_cpu=fields.get("use_cpu", False))
        drawn = sums.problems(PROMPTS * n, seed, limit)
        dataset = Dataset.from_list([{"prompt": text, "answer": answer} for text, answer in drawn])
        end = tokenizer("\n", add_special_tokens=False).input_ids[-1:]
        settings = {"max_completion_length": len(str(2 * limit)) + 3, "vllm_max_model_length": 256}
        settings |= {"generation_kwargs": {"stop_token_ids": end}, "learning_rate": 2e-4}
        reward = sums.exact_answer
    else:
        from run import load_questions, right_answer

        limit, held_out, reward = None, [], right_answer
        asked = SimpleNamespace(dataset_name=None, dataset_config=None, dataset_streaming=False)
        dataset = load_questions(asked, "train", tokenizer).shuffle(seed=seed)
        settings = {"max_completion_length": 512, "vllm_max_model_length": 1024, "learning_rate": 5e-5}
    settings |= {"per_device_train_batch_size": PROMPTS * COMPLETIONS // 4, "gradient_accumulation_steps": 4}
    settings |= {"num_generations": COMPLETIONS, "use_vllm": True, "vllm_mode": "colocate", "temperature": 1.0}
    settings |= {"vllm_gpu_memory_utilization": 0.3, "lr_scheduler_type": "constant", **fields}
    if preset is None:
        trainer_class, args = GRPOTrainer, GRPOConfig(**settings)
    else:
        own = {"rollout_correction": preset, "rollout_monitor": None}
        trainer_class, args = RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig(**settings, **own)
    trainer = trainer_class(
        model=model,
        args=args,
        reward_funcs=reward,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    generation = trainer.vllm_generation
    exact = (
        generation._iter_named_params
    )  # vLLM rounds weights to bfloat16 anyway; old ones then take half of the memory
    generation._iter_named_params = lambda: ((name, weight.bfloat16()) for name, weight in exact())
    if age:
        Lag(trainer, age)
    transformers.set_seed(seed)
    before = sums.accuracy(trainer.model, tokenizer, held_out) if held_out else None
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    after = sums.accuracy(trainer.model, tokenizer, held_out) if held_out else None
    row = {"before": before, "after": after, "last_reward": fmean(rewards[-max(1, n // 10) :]), "limit": limit}
    return row, rewards


def how_hard(model: str, tokenizer: Any, on_cpu: bool) -> tuple[int, list[tuple[str, str]]]:
    """Limit of the numbers of sums that leave something to learn, and held-out sums."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to("cpu" if on_cpu else "cuda")
    for limit in LIMITS:
        held_out = sums.problems(sums.HELD_OUT, sums.HELD_OUT_SEED, limit)
        if sums.accuracy(policy, tokenizer, held_out) < EASY:
            break
    return limit, held_out
