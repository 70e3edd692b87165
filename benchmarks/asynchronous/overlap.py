"""Seconds of a step of a language model, with a sampler that takes turns with the trainer, or works beside it."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import async_sorting
import torch
from datasets import Dataset
from serving import vllm_server
from transformers import AutoTokenizer, TrainerCallback

from trl_rollout_corr import (
    DiskWeightTransfer,
    RolloutCorrectedAsyncGRPOConfig,
    RolloutCorrectedAsyncGRPOTrainer,
    RolloutCorrectedGRPOConfig,
    RolloutCorrectedGRPOTrainer,
)


ROWS = 32  # completions of a step
ASYNCHRONOUS = {"token_budget": 0, "max_staleness": 8, "queue_maxsize": 2 * ROWS}


def different_words(completions: list, **kwargs: Any) -> list[float]:
    """Reward. It runs in the process of the rollout worker."""
    return [len(set(completion[-1]["content"].split())) / 100 for completion in completions]


class Clock(TrainerCallback):
    """Notes when steps end."""

    def __init__(self):
        self.times: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def measure(model: str, texts: Sequence[str], folder: Path, server_gpu: str | None, **fields: Any) -> dict[str, Any]:
    """
    Train some steps.

    Args:
        model (`str`):
            Folder of the model.
        texts (`Sequence[str]`):
            What it is asked.
        folder (`Path`):
            Where the server's log and the weights go.
        server_gpu (`str`, *optional*):
            The GPU of the server, `"cpu"`, or `None` for a colocated engine that takes turns.
        fields:
            Fields of the configuration; `max_steps` and `max_completion_length` among them.

    Returns:
        `dict[str, Any]`: median seconds of a step, mean length of completions in tokens, and mean age in versions.
    """
    tokenizer, clock = AutoTokenizer.from_pretrained(model, padding_side="left"), Clock()
    if tokenizer.chat_template is None:  # then the text is all there is, and the answer follows the question mark
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        content = {"close": tokenizer.eos_token, "content": "text"}
        parsed = {"defaults": {"role": "assistant"}, "start_anchor": "?", "fields": {"content": content}}
        tokenizer.response_template = parsed
    context = fields["max_completion_length"] + 256
    chats = [[{"role": "user", "content": texts[i % len(texts)]}] for i in range(ROWS * fields["max_steps"])]
    parts = {"reward_funcs": different_words, "train_dataset": Dataset.from_dict({"prompt": chats})}
    parts |= {"processing_class": tokenizer}
    fields |= {
        "per_device_train_batch_size": ROWS,
        "num_generations": 8,
        "learning_rate": 1e-6,
        "rollout_monitor": None,
    }
    if server_gpu is None:
        engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
        args = RolloutCorrectedGRPOConfig(**fields, **engine, vllm_max_model_length=context)
        trainer = RolloutCorrectedGRPOTrainer(model, args=args, callbacks=[clock], **parts)
        trainer.train()
    else:
        options = ["--max-model-len", str(context), "--gpu-memory-utilization", "0.35"]
        environment = {"CUDA_VISIBLE_DEVICES": server_gpu}
        if server_gpu == "cpu":
            options = [*async_sorting.SERVER_OPTIONS[2:], "--max-model-len", str(context)]
            environment = async_sorting.SERVER_ENVIRONMENT
        with vllm_server(model, folder / "server.log", options, environment) as url:
            args = RolloutCorrectedAsyncGRPOConfig(**fields, **ASYNCHRONOUS, vllm_server_base_url=url)
            transfer = DiskWeightTransfer(url, folder / "weights")
            trainer = RolloutCorrectedAsyncGRPOTrainer(model, args=args, weight_transfer=transfer, **parts)
            trainer.add_callback(clock)
            trainer.train()

    def mean(key: str) -> float | None:
        found = [entry[key] for entry in trainer.state.log_history if key in entry]
        return fmean(found) if found else None

    steps = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    ages = mean("rollout_corr/staleness_mean")
    return {"seconds_per_step": median(steps), "tokens": mean("completions/mean_length"), "age": ages}
