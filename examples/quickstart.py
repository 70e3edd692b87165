"""
Watch a stale sampler ruin a run, and rollout correction rescue it. A few minutes on a laptop's CPU, nothing to download.

    make quickstart                                            # corrected
    make quickstart ARGS="--rollout_correction disabled"       # TRL's loss, with the same sampler
    make quickstart ARGS="--trainer rloo --rollout_correction bypass_pg_is"
    make quickstart ARGS="--trainer async_grpo"                # a sampler that is behind by itself (`async_sorting.py`)

A small model sorts digits (`sorting.py`). GRPO or RLOO improves it with a real vLLM that is always eight optimizer steps
behind, as a sampler in an asynchronous run would be. Every option of `RolloutCorrectedGRPOConfig` or
`RolloutCorrectedRLOOConfig` can be given. The runs of several options are drawn into one picture.
"""

import json
import os
from argparse import SUPPRESS, ArgumentParser
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


# A small key-value cache, and vLLM's engine in this process. Read when vLLM is imported.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from sorting import DIGITS, accuracy, exact_answer, make_prompts, warm_start
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils import logging
from trl import TrlParser

from trl_rollout_corr import (
    RolloutCorrectedGRPOConfig,
    RolloutCorrectedGRPOTrainer,
    RolloutCorrectedRLOOConfig,
    RolloutCorrectedRLOOTrainer,
)


# Token weights, and sequences whose average ratio leaves [0.95, 1.05] are rejected
CORRECTION = {"rollout_correction": "decoupled_geo_rs_token_tis", "rollout_rs_threshold": [0.95, 1.05]}

TRAINERS = {
    "grpo": (RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig),
    "rloo": (RolloutCorrectedRLOOTrainer, RolloutCorrectedRLOOConfig),
}
TRAINING = {
    "output_dir": "outputs/quickstart",
    "use_cpu": True,
    "bf16": False,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_max_model_length": 64,
    "max_completion_length": DIGITS + 1,
    "per_device_train_batch_size": 64,  # 8 prompts, 8 completions each
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "max_steps": 120,
    "beta": 0.0,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}


@dataclass
class QuickstartArguments:
    """
    Arguments of this example.

    Args:
        trainer (`str`, *optional*, defaults to `"grpo"`):
            `"grpo"` or `"rloo"`.
        lag (`int`, *optional*, defaults to `8`):
            How many optimizer steps the sampler is behind the trainer.
        model_folder (`str`, *optional*, defaults to `".cache/quickstart/model"`):
            Where the warmed-up model is kept for the next run.
        eval_every (`int`, *optional*, defaults to `20`):
            Optimizer steps between two looks at the held-out prompts.
    """

    trainer: Literal["grpo", "rloo"] = field(default="grpo", metadata={"help": "Which trainer to use."})
    lag: int = field(default=8, metadata={"help": "Optimizer steps that the sampler is behind the trainer."})
    model_folder: str = field(
        default=".cache/quickstart/model", metadata={"help": "Where the warmed-up model is kept for the next run."}
    )
    eval_every: int = field(
        default=20, metadata={"help": "Optimizer steps between two looks at the held-out prompts."}
    )


class Lag:
    """Stands in for the trainer's weights when they are pushed to vLLM: yields those of some pushes ago."""

    def __init__(self, trainer, steps: int):
        self.trainer, self.current = trainer, trainer.vllm_generation._iter_named_params
        self.history = deque(maxlen=steps + 1)
        trainer.vllm_generation._iter_named_params = self

    def __call__(self):
        weights = [(name, weight.detach().clone()) for name, weight in self.current()]
        self.history.append((self.trainer.state.global_step, weights))
        self.trainer.rollout_step, oldest = self.history[0]  # so that staleness is logged as it is
        yield from oldest


class Progress(TrainerCallback):
    """Prints a line per look at the held-out prompts, and keeps what the picture needs."""

    def __init__(self, tokenizer, every: int):
        self.tokenizer, self.every = tokenizer, every
        self.steps, self.accuracy = [], []

    def look(self, step: int, model, log: dict):
        self.steps.append(step)
        self.accuracy.append(accuracy(model, self.tokenizer))
        columns = [f"{self.accuracy[-1]:>10.2f}"]
        for key in ("k3_kl", "rollout_is_eff_sample_size", "rollout_rs_masked_fraction"):
            value = log.get(f"rollout_corr/{key}")
            columns.append(f"{value:>12.3f}" if value is not None else f"{'-':>12}")
        print(f"{step:>6} {' '.join(columns)}", flush=True)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        print(f"\n{'step':>6} {'held-out':>10} {'KL (k3)':>12} {'sample size':>12} {'rejected':>12}")
        self.look(0, model, {})

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if state.global_step % self.every == 0 and "loss" in logs:
            self.look(state.global_step, model, logs)


def main():
    chosen = ArgumentParser(add_help=False, argument_default=SUPPRESS)
    chosen.add_argument("--trainer", choices=[*TRAINERS, "async_grpo"], default="grpo")
    chosen.add_argument("--rollout_correction")
    chosen = vars(chosen.parse_known_args()[0])
    defaults = {} if "rollout_correction" in chosen else CORRECTION
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # the model is so small that threads only wait for each other
    if chosen["trainer"] == "async_grpo":
        import async_sorting

        result, folder = async_sorting.run(defaults)
    else:
        result, folder = run(chosen["trainer"], defaults)
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / f"{result['arm'].replace(' ', '_')}.json"
    metrics.write_text(json.dumps(result))
    print_table(result)
    draw(folder)
    print(f"\nMetrics: {metrics}   Picture: {folder / 'quickstart.png'}")


def run(trainer_name: str, defaults: dict) -> tuple[dict, Path]:
    """Train with GRPO or RLOO, and return what came out and the folder for it."""
    trainer_class, config_class = TRAINERS[trainer_name]
    parser = TrlParser((QuickstartArguments, config_class))
    parser.set_defaults_with_config(**TRAINING, **defaults)
    script_args, args = parser.parse_args_and_config()
    arm = f"{script_args.trainer} {args.rollout_correction or 'custom'}"

    model_folder = warm_start(Path(script_args.model_folder))
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    print(f"{arm}, with a sampler {script_args.lag} steps behind. Starting vLLM ...")
    progress = Progress(tokenizer, script_args.eval_every)
    trainer = trainer_class(
        model=str(model_folder),
        reward_funcs=exact_answer,
        args=args,
        train_dataset=make_prompts(4096, seed=args.seed),
        processing_class=tokenizer,
        callbacks=[progress],
    )
    trainer.remove_callback(PrinterCallback)
    Lag(trainer, script_args.lag)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "rollout_corr/kl" in entry]
    return {"arm": arm, "steps": progress.steps, "accuracy": progress.accuracy, "history": history}, Path(
        args.output_dir
    )


def average(history: list[dict], key: str) -> float | None:
    """Mean of a metric over the last quarter of the run."""
    values = [entry[f"rollout_corr/{key}"] for entry in history if f"rollout_corr/{key}" in entry]
    values = values[-max(len(values) // 4, 1) :]
    return sum(values) / len(values) if values else None


def print_table(result: dict):
    history, before = result["history"], result["accuracy"][0]
    after = sum(result["accuracy"][-3:]) / len(result["accuracy"][-3:])
    size, rejected = average(history, "rollout_is_eff_sample_size"), average(history, "rollout_rs_masked_fraction")
    rows = {
        "held-out accuracy before": f"{before:.2f}",
        "held-out accuracy after": f"{after:.2f}   (mean of the last three looks)",
        "KL from sampler to trainer": f"{average(history, 'k3_kl'):.3f}   (nats per token; 0 if both are the same policy)",
        "effective sample size": "-" if size is None else f"{size:.2f}   (share of the batch that the weights leave)",
        "tokens kept": "1.00" if rejected is None else f"{1 - rejected:.2f}",
    }
    width = max(map(len, rows))
    print("\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items()))
    if after > before + 0.05:
        verdict = "The sampler was never the policy being trained, and correcting for that let the policy improve."
    elif after < before - 0.05:
        verdict = (
            "The sampler is another policy than the one being trained; uncorrected, its data made the policy worse."
        )
    else:
        verdict = "The policy neither improved nor collapsed; try another `--rollout_correction`."
    print(f"\n{verdict}")


def draw(folder: Path):
    """Draw every run in the folder into one picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        left.plot(result["steps"], result["accuracy"], marker="o", label=result["arm"])
        steps = [entry["step"] for entry in result["history"]]
        right.plot(steps, [entry["rollout_corr/k3_kl"] for entry in result["history"]], label=result["arm"])
    left.set(xlabel="optimizer step", ylabel="exact answers on held-out prompts", ylim=(0, 1))
    right.set(xlabel="optimizer step", ylabel="KL from sampler to trainer (nats per token)", yscale="log")
    left.legend()
    figure.savefig(folder / "quickstart.png", dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
