"""GRPO on the language model: one run, on-policy or not, with a sampler in bfloat16."""

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from datasets import Dataset
from model import make_model
from peft import LoraConfig
from task import HELD_OUT, HELD_OUT_SEED, LONGEST, NEWLINE, accuracy, exact_answer, problems
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer


@dataclass(frozen=True)
class Setting:
    """
    What a run trains, and how.

    Args:
        weights (`str`):
            `"all"` or `"lora"`.
        learning_rate (`float`):
            Learning rate.
        autocast (`bool`, *optional*, defaults to `True`):
            Compute in bfloat16 beside float32 weights, as TRL does by default where it can.
        steps (`int`, *optional*, defaults to `100`):
            Optimizer steps.
        prompts (`int`, *optional*, defaults to `8`):
            Prompts of a step, with eight completions each.
        correction (`str`, *optional*, defaults to `"disabled"`):
            Preset.
        seed (`int`, *optional*, defaults to `0`):
            Seed.
    """

    weights: str
    learning_rate: float
    autocast: bool = True
    steps: int = 100
    prompts: int = 8
    correction: str = "disabled"
    seed: int = 0


class Looks(TrainerCallback):
    """Held-out accuracy before the first step, then every so many steps; and the seconds of a core that steps take."""

    def __init__(self, measure, every: int):
        self.measure, self.every = measure, every
        self.steps, self.accuracy, self.seconds = [], [], []

    def look(self, step: int, model: Any):
        self.steps.append(step)
        self.accuracy.append(self.measure(model))
        print(f"  step {step}: accuracy {self.accuracy[-1]:.3f}", flush=True)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.look(0, model)

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.process_time()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seconds.append(round(time.process_time() - self.start, 2))
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self.look(state.global_step, model)


def train(setting: Setting, every: int = 20) -> dict[str, Any]:
    """
    Train one run.

    Args:
        setting ([`Setting`]):
            What to train.
        every (`int`, *optional*, defaults to `20`):
            Steps between two looks at the held-out sums.

    Returns:
        `dict[str, Any]`: held-out accuracy, the log, seconds of a core for each step, and the peak of memory.
    """
    torch.set_num_threads(1)
    folder = make_model()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    held_out = problems(HELD_OUT, HELD_OUT_SEED)

    def measure(model: Any) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=setting.autocast):
            return accuracy(model, tokenizer, held_out)

    looks = Looks(measure, every)
    args = RolloutCorrectedGRPOConfig(
        "outputs/language_model/training",
        rollout_correction=setting.correction,
        rollout_monitor=None,
        use_cpu=True,
        bf16=setting.autocast,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=64,
        generation_kwargs={"stop_token_ids": [NEWLINE]},
        max_completion_length=LONGEST,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=setting.prompts // 2,
        num_generations=8,
        max_steps=setting.steps,
        beta=0.0,
        learning_rate=setting.learning_rate,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=setting.seed,
    )
    drawn = problems(setting.prompts * setting.steps, setting.seed)
    trainer = RolloutCorrectedGRPOTrainer(
        model=str(folder),
        reward_funcs=exact_answer,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": text, "answer": answer} for text, answer in drawn]),
        processing_class=tokenizer,
        callbacks=[looks],
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        if setting.weights == "lora"
        else None,
    )
    trainer.remove_callback(PrinterCallback)
    transformers.set_seed(setting.seed)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "setting": vars(setting),
        "steps": looks.steps,
        "accuracy": looks.accuracy,
        "seconds": looks.seconds,
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "history": {key: [entry.get(key) for entry in history] for key in sorted({key for e in history for key in e})},
    }
