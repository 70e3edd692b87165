"""One run of one arm."""

import sys
import tempfile
import time
from contextlib import ExitStack
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import async_sorting
import quickstart  # first: it sets the environment of vLLM and transformers
import torch
from sorting import exact_answer, make_prompts, warm_start
from transformers import AutoTokenizer, PrinterCallback
from transformers.utils import logging

from trl_rollout_corr import RolloutCorrectedAsyncGRPOConfig, RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer


MODEL_FOLDER = Path(__file__).parents[2] / quickstart.QuickstartArguments.model_folder


_until_the_end = ExitStack()


def prepare():
    """Warm up the model, unless the quickstart has."""
    torch.set_num_threads(1)  # the model is so small that threads only wait for each other
    logging.disable_progress_bar()
    warm_start(MODEL_FOLDER)


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """
    Train one seed of one arm.

    Args:
        settings (`dict[str, Any]`):
            `trainer`, `seed`, `steps`, `every` (steps between two copies of the model, which are tried when training is over),
            and fields of the trainer's configuration.

    Returns:
        `dict[str, Any]`: settings, accuracy, seconds and steps of the copies, and history; can be stored as JSON.
    """
    options = dict(settings)
    trainer, every = options.pop("trainer"), options.pop("every")
    options["max_steps"] = options.pop("steps")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options["output_dir"] = folder
        result = (asynchronous if trainer == "async_grpo" else synchronous)(options, every)
    found = {key: result[key] for key in ("steps", "accuracy", "history")}
    return {**found, "seconds_at": result["seconds"], "seconds": time.perf_counter() - start, "settings": settings}


@cache
def server() -> str:
    """
    Start the server that all asynchronous runs of this process share: each of them begins by sending its weights there.
    """
    Finalize(None, _until_the_end.close, exitpriority=0)  # `atexit` does nothing in a process of multiprocessing
    log = Path(_until_the_end.enter_context(tempfile.TemporaryDirectory())) / "server.log"
    return _until_the_end.enter_context(async_sorting.serve(MODEL_FOLDER, log))


def asynchronous(options: dict[str, Any], every: int) -> dict[str, Any]:
    args = RolloutCorrectedAsyncGRPOConfig(**{**async_sorting.TRAINING, **options})
    script_args = async_sorting.AsyncSortingArguments(eval_every=every)
    return result_of(*async_sorting.train(MODEL_FOLDER, args, script_args, server()))


def synchronous(options: dict[str, Any], every: int) -> dict[str, Any]:
    tokenizer, snapshots = AutoTokenizer.from_pretrained(MODEL_FOLDER), async_sorting.Snapshots(every)
    trainer = RolloutCorrectedGRPOTrainer(
        model=str(MODEL_FOLDER),
        reward_funcs=exact_answer,
        args=RolloutCorrectedGRPOConfig(**{**quickstart.TRAINING, "report_to": "none", **options}),
        train_dataset=make_prompts(4096, seed=options["seed"]),
        processing_class=tokenizer,
        callbacks=[snapshots],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    snapshots.try_all(MODEL_FOLDER, tokenizer)
    return result_of(snapshots, trainer.state.log_history)


def result_of(snapshots: async_sorting.Snapshots, log_history: list[dict]) -> dict[str, Any]:
    return {
        "steps": snapshots.steps,
        "seconds": snapshots.seconds,
        "accuracy": snapshots.accuracy,
        "history": [entry for entry in log_history if "rollout_corr/kl" in entry],
    }
