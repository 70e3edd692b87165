"""
A training step with a real vLLM: TRL without correction, TRL with its own, and this package.

    python benchmarks/step.py
    python benchmarks/step.py --pretrained --batch_size 8 --contestants "grpo, no correction" "grpo, auto"

A model of random weights, or the pretrained one of `examples/smollm2.py`, writes completions that always have the full
length, so that everyone does the same work. The contestants train a few steps each, in turns, in one process with one vLLM
engine; medians and ratios to TRL without correction are printed, in total and for what is not sampling, in seconds of CPU
time. On a GPU, `benchmarks/gpu.py` measures the same contestants.
"""

import argparse
import functools
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


# A small key-value cache, and vLLM's engine in this process. Read when vLLM is imported.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import smollm2
import torch
import transformers
import vllm
from reloading import push_by_reload
from sorting import make_prompts, make_tokenizer
from tables import STEP, markdown
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation import vllm_generation

from trl_rollout_corr import (
    RolloutCorrectedGRPOConfig,
    RolloutCorrectedGRPOTrainer,
    RolloutCorrectedRLOOConfig,
    RolloutCorrectedRLOOTrainer,
)


GRPO, RLOO = (GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)
OUR_GRPO = (RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig)
OUR_RLOO = (RolloutCorrectedRLOOTrainer, RolloutCorrectedRLOOConfig)
VOCABULARY = 4096  # of the model; its tokenizer knows a few of them, and nobody reads the completions
BASELINE = {"grpo": "grpo, no correction", "rloo": "rloo, no correction"}
CONTESTANTS = {
    "grpo, no correction": (*GRPO, {"vllm_importance_sampling_correction": False}),
    "grpo, TRL's correction": (*GRPO, {"vllm_importance_sampling_mode": "token_truncate"}),
    "grpo, trl": (*OUR_GRPO, {"rollout_correction": "trl"}),
    "grpo, measured": (*OUR_GRPO, {"rollout_correction": "disabled"}),
    "grpo, decoupled_token_is": (*OUR_GRPO, {"rollout_correction": "decoupled_token_is"}),
    "grpo, decoupled_seq_is": (*OUR_GRPO, {"rollout_correction": "decoupled_seq_is"}),
    "grpo, auto": (*OUR_GRPO, {"rollout_correction": "auto"}),
    "grpo, trl, no monitor": (*OUR_GRPO, {"rollout_correction": "trl", "rollout_monitor": None}),
    "grpo, auto, no monitor": (*OUR_GRPO, {"rollout_correction": "auto", "rollout_monitor": None}),
    "grpo, bypass_ppo_clip": (*OUR_GRPO, {"rollout_correction": "bypass_ppo_clip"}),
    "rloo, no correction": (*RLOO, {"beta": 0.0}),
    "rloo, measured": (*OUR_RLOO, {"beta": 0.0, "rollout_correction": "disabled"}),
    "rloo, decoupled_token_is": (*OUR_RLOO, {"beta": 0.0, "rollout_correction": "decoupled_token_is"}),
    "rloo, bypass_ppo_clip": (*OUR_RLOO, {"beta": 0.0, "rollout_correction": "bypass_ppo_clip"}),
}


def make_model(folder: Path, hidden: int, layers: int, **options: Any) -> Path:
    """Write a random model, with other options of its configuration or none, and return its folder."""
    tokenizer = make_tokenizer()
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
    config = Qwen2Config(**settings | options)
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def share_one_engine(**engine):
    """All trainers of this process use the engine that the first one starts, with these arguments beside TRL's."""
    options = {"dtype": "float32", "enforce_eager": True, **engine}
    vllm_generation.LLM = functools.cache(functools.partial(vllm.LLM, **options))


class Stopwatch(TrainerCallback):
    """Seconds of each step, and of the sampling in it, by a clock: the CPU time of this process, unless another is given."""

    def __init__(self, seconds: Callable[[], float] = time.process_time):
        self.steps, self.sampling, self.start, self.sampled = [], [], 0.0, 0.0
        self.seconds = seconds

    def watch(self, generation):
        generate = generation.generate

        @functools.wraps(generate)
        def timed(*args, **kwargs):
            start = self.seconds()
            output = generate(*args, **kwargs)
            self.sampled += self.seconds() - start
            return output

        generation.generate = timed

    def on_step_begin(self, args, state, control, **kwargs):
        self.start, self.sampled = self.seconds(), 0.0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(self.seconds() - self.start)
        self.sampling.append(self.sampled)


def build(
    name: str,
    model: Path,
    completion_length: int,
    batch_size: int,
    steps: int,
    *,
    seconds: Callable[[], float] = time.process_time,
    **others: Any,
):
    """A trainer of a contestant and its stopwatch. `others` are fields of the configuration."""
    trainer_class, config_class, fields = CONTESTANTS[name]
    watch = Stopwatch(seconds)
    settings = {
        "use_cpu": True,
        "bf16": False,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": completion_length + 32,
        "vllm_gpu_memory_utilization": 0.3,
        "max_completion_length": completion_length,
        "generation_kwargs": {"ignore_eos": True, "detokenize": False},
        "per_device_train_batch_size": batch_size,
        "num_generations": 8,
        "gradient_accumulation_steps": 1,
        "max_steps": steps,
        "learning_rate": 1e-6,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    trainer = trainer_class(
        model=str(model),
        reward_funcs=lambda completion_ids, **kwargs: [float(sum(ids) % 7) for ids in completion_ids],
        args=config_class(tempfile.gettempdir(), **{**settings, **fields, **others}),
        train_dataset=make_prompts(256, seed=0),
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    push_by_reload(trainer.vllm_generation)  # TRL's own push of weights fails on a CPU
    watch.watch(trainer.vllm_generation)
    return trainer, watch


def interleaved(
    names: list[str], model: Path, length: int, batch_size: int, steps: int, rounds: int, **others: Any
) -> dict[str, dict[str, list[float]]]:
    """
    Seconds of every step but the first of each turn, per contestant, in total and without sampling. `others` are those of
    [`build`].
    """
    times = {name: {"step": [], "training": []} for name in names}
    for round_ in range(rounds):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            trainer, watch = build(name, model, length, batch_size, steps + 1, **others)
            trainer.train()
            times[name]["step"] += watch.steps[1:]
            pairs = zip(watch.steps[1:], watch.sampling[1:], strict=True)
            times[name]["training"] += [step - sampling for step, sampling in pairs]
            del trainer, watch  # they refer to each other, and to the weights
            gc.collect()
        print(f"round {round_ + 1} of {rounds} done", flush=True)
    return times


def rows_of_times(times: dict[str, dict[str, list[float]]]) -> list[dict]:
    median = {name: {key: statistics.median(values) for key, values in t.items()} for name, t in times.items()}
    return [
        {
            "contestant": name,
            **{f"{key}_s": value for key, value in m.items()},
            **{f"{key}_ratio": value / median[BASELINE[name[:4]]][key] for key, value in m.items()},
        }
        for name, m in median.items()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--pretrained", action="store_true", help="the model of `examples/smollm2.py`")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--completion_length", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2, help="Timed steps of a turn.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="Where to write the results as JSON.")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as made:
        folder = smollm2.make_model() if args.pretrained else make_model(Path(made), args.hidden, args.layers)
        share_one_engine()
        turns = (args.completion_length, args.batch_size, args.steps, args.rounds)
        rows = rows_of_times(interleaved(args.contestants, folder, *turns))
    print(markdown(rows, STEP))
    if args.output:
        setting = {key: str(value) for key, value in vars(args).items() if key != "output"}
        setting |= {"torch": torch.__version__, "vllm": vllm.__version__, "threads": torch.get_num_threads()}
        args.output.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
