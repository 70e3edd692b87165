"""
Watch a stale sampler ruin a run, and rollout correction rescue it. Minutes on a laptop's CPU, nothing to download.

    make quickstart                                            # corrected
    make quickstart ARGS="--rollout_correction disabled"       # no correction, with the same sampler
    make quickstart ARGS="--compare"                           # both, one after the other
    make quickstart ARGS="--trainer rloo --rollout_correction bypass_pg_is"
    make quickstart ARGS="--trainer async_grpo"                # a sampler that is behind by itself (`async_sorting.py`)
    make quickstart ARGS="--model smollm2"                     # a pretrained model: its gap, the cause, a few steps

A small model sorts digits (`sorting.py`). GRPO or RLOO improves it with a real vLLM that is always eight optimizer steps
behind, as a sampler in an asynchronous run would be. Every option of `RolloutCorrectedGRPOConfig` or
`RolloutCorrectedRLOOConfig` can be given. Each run has a folder of its own below `--output_dir`, and all are drawn into
one picture.
"""

import before_imports  # noqa: F401

import os
import re
import subprocess
import sys
import time
import warnings
from argparse import SUPPRESS, ArgumentParser
from collections import deque
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from types import ModuleType
from typing import Literal

import sorting
import torch
from quickstart_output import IS_COMPARED, RESULT, Progress, conclude
from transformers import AutoTokenizer, PrinterCallback
from transformers.utils import logging
from trl import TrlParser

from trl_rollout_corr import (
    RolloutCorrectedAsyncGRPOConfig,
    RolloutCorrectedGRPOConfig,
    RolloutCorrectedGRPOTrainer,
    RolloutCorrectedRLOOConfig,
    RolloutCorrectedRLOOTrainer,
)


CORRECTION = {"rollout_correction": "auto"}

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
    "rollout_engine_kwargs": {"use_tqdm_on_load": False},
    "max_completion_length": sorting.DIGITS + 1,
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
        model (`str`, *optional*, defaults to `"sorting"`):
            `"sorting"`, or `"smollm2"`: a pretrained model that learns sums (`pretrained.py`).
        lag (`int`, *optional*, defaults to `8`):
            How many optimizer steps the sampler is behind the trainer.
        model_folder (`str`, *optional*, defaults to `".cache/quickstart/model"`):
            Where the warmed-up model is kept for the next run.
        eval_every (`int`, *optional*, defaults to `20`):
            Optimizer steps between two looks at the held-out prompts.
        compare (`bool`, *optional*, defaults to `False`):
            Make the same run without correction first.
    """

    trainer: Literal["grpo", "rloo"] = field(default="grpo", metadata={"help": "Which trainer to use."})
    model: Literal["sorting", "smollm2"] = field(default="sorting", metadata={"help": "Which model and task."})
    lag: int = field(default=8, metadata={"help": "Optimizer steps that the sampler is behind the trainer."})
    model_folder: str = field(
        default=".cache/quickstart/model", metadata={"help": "Where the warmed-up model is kept for the next run."}
    )
    eval_every: int = field(
        default=20, metadata={"help": "Optimizer steps between two looks at the held-out prompts."}
    )
    compare: bool = field(default=False, metadata={"help": "Make the same run without correction first."})


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


def preview(arguments: list[str]) -> tuple[dict, list[str]]:
    """Options for the parser, the correction and the folder of a run, and all others, which are in its name."""
    parser = ArgumentParser(add_help=False, argument_default=SUPPRESS, allow_abbrev=False)
    parser.add_argument("--trainer", choices=[*TRAINERS, "async_grpo"], default="grpo")
    parser.add_argument("--model", choices=["sorting", "smollm2"])
    for name in (
        "rollout_correction",
        "output_dir",
        "model_folder",
        "rollout_dump_dir",
        "rollout_dump_steps",
        "eval_every",
    ):
        parser.add_argument(f"--{name}")
    parser.add_argument("--compare", nargs="?")
    chosen, others = parser.parse_known_args(arguments)
    return vars(chosen), others


def name_of(chosen: dict, others: list[str]) -> str:
    """Name of a run: trainer, preset, and the options beside them."""
    model = [chosen["model"]] if "model" in chosen else []
    return " ".join([chosen["trainer"], chosen.get("rollout_correction", "corrected"), *model, *others])


def folder_of(name: str, output_dir: str) -> Path:
    return Path(output_dir) / re.sub(r"[^\w.-]+", "_", name.replace("--", ""))


def take_folder(folder: Path) -> Path:
    """Make a folder for the run and its dump: this one, or the first with a number if runs were there."""
    numbered = (folder.with_name(f"{folder.name}-{n}") for n in count(2))
    free = next(path for path in chain([folder], numbered) if not path.exists() or not any(path.iterdir()))
    free.mkdir(parents=True, exist_ok=True)
    (free / RESULT).touch()  # ours from now on, even if the run is interrupted
    return free


def run_without_correction(arguments: list[str], output_dir: str) -> Path:
    """Make the same run without correction, in a process of its own, as a process has one vLLM. Returns its folder."""
    print("First the run without correction, in a process of its own.", flush=True)
    kept, ours = [], False  # whether a word is, or follows, an option of the correction
    for word in arguments:
        ours = word.startswith(("--rollout_", "--compare")) if word.startswith("--") else ours
        kept += [] if ours else [word]
    kept += ["--rollout_correction", "disabled"]
    environment = {**os.environ, IS_COMPARED: "1"}
    code = subprocess.run([sys.executable, __file__, *kept], env=environment, check=False).returncode
    if code:
        sys.exit(code)
    print("\nNow the run with correction.", flush=True)
    return max(Path(output_dir).glob(f"*/{RESULT}"), key=lambda path: path.stat().st_mtime).parent


def task_of(chosen: dict) -> ModuleType:
    """The module with model, prompts, reward and accuracy."""
    if chosen.get("model", "sorting") == "sorting":
        return sorting
    if chosen["trainer"] == "async_grpo":
        sys.exit("`--model smollm2` goes with `--trainer grpo` or `--trainer rloo`.")
    import pretrained

    return pretrained


def main():
    began = time.monotonic()
    chosen, others = preview(sys.argv[1:])
    arguments, training, train_it, task = QuickstartArguments, TRAINING, train, task_of(chosen)
    if chosen["trainer"] == "async_grpo":
        import async_sorting

        arguments, training, train_it = (
            async_sorting.AsyncSortingArguments,
            async_sorting.TRAINING,
            async_sorting.train,
        )
        config_class = RolloutCorrectedAsyncGRPOConfig
    else:
        config_class = TRAINERS[chosen["trainer"]][1]
        training = {**TRAINING, **getattr(task, "TRAINING", {})}
    parser = TrlParser((arguments, config_class))
    parser.set_defaults_with_config(**training, **({} if "rollout_correction" in chosen else CORRECTION))
    script_args, args = parser.parse_args_and_config()
    name = name_of(chosen, others)
    before = [run_without_correction(sys.argv[1:], args.output_dir)] if script_args.compare else []
    asked = Path(args.rollout_dump_dir or folder_of(name, args.output_dir))
    folder = take_folder(asked)
    name += folder.name.removeprefix(asked.name)
    args.rollout_dump_dir = str(folder)

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # the model is so small that threads only wait for each other
    model_folder = task.warm_start(Path(script_args.model_folder))
    if hasattr(task, "probe") and not before:
        task.probe(model_folder)
    print(f"Run: {name}, in {folder}", flush=True)
    progress, log_history = train_it(model_folder, args, script_args)
    folders, family, seconds = [*before, folder], Path(args.output_dir), time.monotonic() - began
    conclude(name, args.rollout_correction, progress, log_history, folders, family, seconds)


def train(model_folder: Path, args, script_args: QuickstartArguments) -> tuple[Progress, list[dict]]:
    """Train with GRPO or RLOO, and return held-out results and the log."""
    behind = f"whose weights will be {script_args.lag} optimizer steps old"
    print(f"Starting vLLM, {behind}. This takes about half a minute ...", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    task = task_of(vars(script_args))
    progress = Progress(tokenizer, script_args.eval_every, task.accuracy)
    with warnings.catch_warnings():
        # True and wanted: the sampler is to differ, by its age and by bfloat16, which vLLM computes in on float32 weights
        warnings.filterwarnings("ignore", message="The trainer computes in")
        trainer = TRAINERS[script_args.trainer][0](
            model=str(model_folder),
            reward_funcs=task.exact_answer,
            args=args,
            train_dataset=task.make_prompts(4096, seed=args.seed),
            processing_class=tokenizer,
            callbacks=[progress],
            peft_config=task.adapter() if hasattr(task, "adapter") else None,
        )
    trainer.remove_callback(PrinterCallback)
    Lag(trainer, script_args.lag)
    trainer.train()
    return progress, trainer.state.log_history


if __name__ == "__main__":
    main()
