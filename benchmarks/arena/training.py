"""One run: a task, a sampler with a fault, and an arm. All runs of a process share a vLLM engine."""

import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import quickstart  # first: it sets the environment of vLLM and transformers
import samplers
import torch
import transformers
import vllm
from eight_bits import keep_weights_in_float32
from plan import LONG_LANGUAGE, RATES, TAGGED_LANGUAGE, WAYS, Run, Setup
from reloading import push_by_reload
from rules import with_rule
from tasks import TASKS, accuracy, dense_answer, exact_answer, forgiving_answer, warm_start
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation import vllm_generation
from witness import ForceWitness, MovedNumbers

from trl_rollout_corr.messages import PREFIX


MODELS = Path(__file__).parents[2] / ".cache/arena"
PRETRAINED = (TAGGED_LANGUAGE, LONG_LANGUAGE)  # tasks of the language model
TRL = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
LOOKS = 30  # at held-out accuracy, at most
# What costs a fifth of the time, and changes no number
CHEAPER = {"gradient_checkpointing": False, "generation_kwargs": {"detokenize": False}}


class HeldOut(TrainerCallback):
    """Looks at the held-out prompts before the first step, then every so many steps, and after the last one."""

    def __init__(self, measure: Callable[[Any], float], every: int):
        self.measure, self.every = measure, every
        self.steps, self.accuracy = [], []

    def look(self, step: int, model: Any):
        self.steps.append(step)
        self.accuracy.append(self.measure(model))

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.look(0, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self.look(state.global_step, model)


def prepare(engine: str):
    """Warm up the model, unless it is there, and make every trainer of this process use one vLLM engine."""
    keep_weights_in_float32()
    torch.set_num_threads(1)  # the models are so small that threads only wait for each other
    transformers.utils.logging.disable_progress_bar()
    task = engine.split()[0]
    if task in PRETRAINED:
        import language  # needs the package of the model

        language.taught_model(language.TASKS[task])
    else:
        warm_start(TASKS[task], MODELS)
    engines: dict[str, vllm.LLM] = {}

    def shared(**options: Any) -> vllm.LLM:
        key = str(sorted(options.items()))
        if key not in engines:
            engines[key] = vllm.LLM(**options)
        return engines[key]

    vllm_generation.LLM = shared


def set_up(run: Run) -> Setup:
    """Model, data and settings of a run."""
    if run.cell.task in PRETRAINED:
        import language

        return language.setup(run)
    task = TASKS[run.cell.task]
    folder = MODELS / task.name
    reward = dense_answer if task.dense else forgiving_answer if "garbage" in run.sampler else exact_answer
    # not AutoTokenizer, which makes it a Qwen2Tokenizer
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return Setup(
        {
            "model": str(folder),
            "reward_funcs": reward,
            "train_dataset": task.dataset(4096, run.seed),
            "processing_class": tokenizer,
        },
        {
            "vllm_max_model_length": task.context,
            "max_completion_length": task.room,
            "per_device_train_batch_size": task.batch,
        },
        lambda model: accuracy(task, model, tokenizer),
        task.tied,
        task.every,
    )


def settings_of(run: Run, setup: Setup) -> dict[str, Any]:
    """What the configuration of a run is made of."""
    settings = {
        **quickstart.TRAINING,
        **CHEAPER,
        **setup.settings,
        "learning_rate": RATES[run.cell.rung.rate],
        "max_steps": run.steps,
        "seed": run.seed,
        **WAYS.get(run.cell.way, {}),
        "rollout_monitor": None,
        **run.arm.options,
    }
    if scheme := run.sampler.get("quantization"):
        settings["rollout_engine_kwargs"] = {**settings["rollout_engine_kwargs"], "quantization": scheme}
    if run.arm.trl:  # fields that TRL's own trainers do not have; they only change what is printed
        del settings["rollout_monitor"], settings["rollout_engine_kwargs"]
    return settings


def train(run: Run) -> dict[str, Any]:
    """
    Train one run.

    Args:
        run ([`Run`]):
            What to train.

    Returns:
        `dict`: settings, held-out accuracy, and what was logged, of every step; can be stored as JSON.
    """
    setup = set_up(run)
    held_out = HeldOut(setup.measure, max(setup.every, run.steps // LOOKS))
    trainer_class, config_class = (TRL if run.arm.trl else quickstart.TRAINERS)[run.cell.algorithm]
    trainer_class = trainer_class if run.arm.rule is None else with_rule(trainer_class, run.arm.rule)
    trainer = trainer_class(args=config_class(**settings_of(run, setup)), callbacks=[held_out], **setup.parts)
    trainer.remove_callback(PrinterCallback)
    if run.arm.trl:
        push_by_reload(trainer.vllm_generation)  # ours does so itself; TRL's own push fails on a CPU
    if setup.tied:
        samplers.pack_tied_head(trainer.vllm_generation)
    if run.cell.task in PRETRAINED:
        import language

        language.push_in_bfloat16(trainer)
    samplers.spoil(trainer, run.sampler)
    force = ForceWitness(trainer)
    moved = MovedNumbers(trainer.vllm_generation) if "quantization" in run.sampler else None
    transformers.set_seed(run.seed)  # vLLM samples with torch's generator
    start, worked = time.perf_counter(), time.process_time()
    trainer.train()
    return {
        "arm": run.arm.name,
        "cell": run.at.name,
        "seed": run.seed,
        "settings": run.settings,
        "steps": held_out.steps,
        "accuracy": held_out.accuracy,
        "history": columns(trainer.state.log_history),
        **({"force": force.windows()} if force.steps else {}),
        **({"moved": float(f"{mean(moved.shares):.4g}")} if moved else {}),
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - worked, 1),
        "versions": {"vllm": vllm.__version__, **{name: version(name) for name in ("torch", "trl", "transformers")}},
        "cores": os.cpu_count(),
    }


def columns(log_history: list[dict[str, float]]) -> dict[str, list[float | None]]:
    """The numbers of the log of the steps, a list per metric, with `None` where it was not reported."""
    entries = [entry for entry in log_history if "loss" in entry]
    kept = (PREFIX, "clip_ratio/", "completions/", "rewards/")
    keys = {key for entry in entries for key in entry if key.startswith(kept) or "/" not in key}
    return {
        key: [float(f"{entry[key]:.5g}") if key in entry else None for entry in entries]
        for key in sorted(keys)
        if all(isinstance(entry.get(key, 0.0), int | float) for entry in entries)
    }
