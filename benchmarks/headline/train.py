"""One run of one arm. All runs of a process share a vLLM engine, which takes half a minute to start."""

import functools
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import quickstart  # first: it sets the environment of vLLM and transformers
import torch
import transformers
import trl
import vllm
from arms import Run
from sorting import accuracy, exact_answer, make_prompts, warm_start
from transformers import AutoTokenizer, PreTrainedModel, PrinterCallback, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer
from trl_rollout_corr.correction.compute import RolloutCorrection
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.trainers.logprobs import sync_weights_on_cpu
from trl_rollout_corr.recording.observer import Moment


ROOT = Path(__file__).parents[2]
MODEL_FOLDER = ROOT / quickstart.QuickstartArguments.model_folder
EVAL_EVERY = quickstart.QuickstartArguments.eval_every
KEPT_AT_RANDOM = 0.75

# What is kept of the log, of every step
LOGGED = [
    "loss",
    "grad_norm",
    "reward",
    "entropy",
    "clip_ratio/region_mean",
    f"{PREFIX}kl",
    f"{PREFIX}k3_kl",
    f"{PREFIX}effective_lr",
    f"{PREFIX}rollout_is_eff_sample_size",
    f"{PREFIX}rollout_rs_masked_fraction",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
]


class RandomRejectionTrainer(RolloutCorrectedGRPOTrainer):
    """Control: rejects whole completions, like the rule of its configuration, but any. So it has as little data."""

    def _compute_correction(self, train_logps: torch.Tensor, batch: dict[str, Any]) -> RolloutCorrection:
        correction = super()._compute_correction(train_logps, batch)
        lucky = torch.rand(train_logps.shape[0], 1) < KEPT_AT_RANDOM
        mask = self._loss_mask(batch).bool()
        keep = mask & lucky
        self._kept_share = (keep.sum() / mask.sum()).item()
        return replace(correction, keep=keep)

    def _close_window(self, now: Moment) -> dict[str, float]:
        # the statistics are about the rule; here is what happened in its place
        happened = {"rollout_rs_masked_fraction": 1 - self._kept_share, "effective_lr": self._kept_share}
        return {**super()._close_window(now), **{f"{PREFIX}{key}": value for key, value in happened.items()}}


TRAINERS = {
    **quickstart.TRAINERS,
    "random": (RandomRejectionTrainer, RolloutCorrectedGRPOConfig),
    "trl": (GRPOTrainer, GRPOConfig),
}


class HeldOut(TrainerCallback):
    """Looks at the held-out prompts before the first step, then every so many steps, and after the last one."""

    def __init__(self, measure: Callable[[PreTrainedModel], float], every: int):
        self.measure, self.every = measure, every
        self.steps, self.accuracy = [], []

    def look(self, step: int, model: PreTrainedModel):
        self.steps.append(step)
        self.accuracy.append(self.measure(model))

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.look(0, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self.look(state.global_step, model)


def prepare(kv_cache_dtype: str):
    """Warm up the model, unless the quickstart has, and make every trainer of this process use one vLLM engine."""
    torch.set_num_threads(1)  # the model is so small that threads only wait for each other
    logging.disable_progress_bar()
    warm_start(MODEL_FOLDER)
    share_engines(kv_cache_dtype)


def share_engines(kv_cache_dtype: str):
    """Make every trainer of this process with the same model use the same vLLM engine."""
    vllm_generation.LLM = functools.cache(functools.partial(vllm.LLM, kv_cache_dtype=kv_cache_dtype))


def train(run: Run) -> dict[str, Any]:
    """
    Train one seed of one arm.

    Args:
        run ([`Run`]):
            What to train.

    Returns:
        `dict[str, Any]`: settings, held-out accuracy, history and versions; can be stored as JSON.
    """
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    held_out = HeldOut(lambda model: accuracy(model, tokenizer), EVAL_EVERY)
    trainer_class, config_class = TRAINERS[run.arm.trainer]
    training = {**quickstart.TRAINING}
    del training["max_steps"]  # the arm's
    del training["rollout_engine_kwargs"]  # less output, which TRL's own trainers do not offer
    folder = training.pop("output_dir")  # where nothing is saved
    trainer = trainer_class(
        model=str(MODEL_FOLDER),
        reward_funcs=exact_answer,
        args=config_class(folder, seed=run.seed, max_steps=run.arm.steps, **training, **run.arm.options),
        train_dataset=make_prompts(4096, seed=run.seed),
        processing_class=tokenizer,
        callbacks=[held_out],
    )
    trainer.remove_callback(PrinterCallback)
    if run.arm.trainer == "trl":
        sync_weights_on_cpu(trainer.vllm_generation)  # ours does so itself; TRL's own push fails on a CPU
    if run.arm.lag:
        quickstart.Lag(trainer, run.arm.lag)
    # vLLM samples with torch's generator, which it seeds with 0 when it starts. Seeded here, a run is the same whether
    # or not it is the first of its process.
    transformers.set_seed(run.seed)
    start = time.perf_counter()
    trainer.train()
    return {
        "arm": run.arm.name,
        "seed": run.seed,
        "settings": run.arm.settings,
        "training": training,
        "steps": held_out.steps,
        "accuracy": held_out.accuracy,
        "greedy_accuracy": accuracy(trainer.model, tokenizer, greedy=True),
        "history": columns(trainer.state.log_history),
        "seconds": round(time.perf_counter() - start, 1),
        "versions": versions(),
        "machine": machine(),
    }


def columns(log_history: list[dict[str, float]]) -> dict[str, list[float]]:
    """The log of the steps, a list per metric."""
    entries = [entry for entry in log_history if "loss" in entry]
    keys = ["step", *(key for key in LOGGED if key in entries[0])]
    return {key: [float(f"{entry[key]:.5g}") for entry in entries] for key in keys}


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trl": trl.__version__,
        "vllm": vllm.__version__,
        "transformers": transformers.__version__,
        "accelerate": version("accelerate"),
        "trl-rollout-corr": version("trl-rollout-corr"),
    }


def machine() -> str:
    """Model of the CPU and number of cores."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores"
