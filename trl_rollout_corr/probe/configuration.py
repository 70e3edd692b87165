"""The run that a probe is about: its configuration, shortened to a batch, and prompts."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from trl import ModelConfig, ScriptArguments, TrlParser

from ..trainers.grpo import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer
from ..trainers.rloo import RolloutCorrectedRLOOConfig, RolloutCorrectedRLOOTrainer


Trainer: TypeAlias = RolloutCorrectedGRPOTrainer | RolloutCorrectedRLOOTrainer
Config: TypeAlias = RolloutCorrectedGRPOConfig | RolloutCorrectedRLOOConfig
_TRAINERS: dict[str, tuple[type[Trainer], type[Config]]] = {
    "grpo": (RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig),
    "rloo": (RolloutCorrectedRLOOTrainer, RolloutCorrectedRLOOConfig),
}
PROMPTS = (
    "What is the capital of France?",
    "Count from one to ten.",
    "Write a sentence about rain.",
    "What is 12 times 7?",
    "Explain what a prime number is, in two sentences.",
    "Tell me a short story about a dog that is lost.",
    "Translate 'good morning' into Spanish.",
    "If I have 3 apples and eat one, how many are left? Think step by step.",
)
_CONTEXT = 1024  # tokens that the engine has room for, more than the prompts take
# A run without a recipe: TRL's defaults with a colocated engine, also where there is no accelerator
_DEFAULTS = ["--use_vllm", "true", "--vllm_mode", "colocate"]
_ON_CPU = ["--use_cpu", "true", "--bf16", "false"]


def read(request: Mapping[str, Any]) -> tuple[type[Trainer], Config, ModelConfig]:
    """The class of the trainer of a request, and the configurations of trainer and model. A `ValueError` if unusable."""
    trainer_class, config_class = _TRAINERS[request["trainer"]]
    parser = TrlParser((ScriptArguments, config_class, ModelConfig))
    line = [*request["options"], "--model_name_or_path", request["model"], "--output_dir", request["output"]]
    without_recipe = _DEFAULTS if torch.accelerator.is_available() else [*_DEFAULTS, *_ON_CPU]
    given = ["--config", request["config"]] if request["config"] else without_recipe
    _, args, model_args = parser.parse_args_and_config([*given, *line])
    if not args.use_vllm:
        raise ValueError("`use_vllm` is False, so there is no sampler to probe. Set it to true.")
    args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(args.model_init_kwargs or {}),
    }
    return trainer_class, args, model_args


def shortened(args: Config, completions: int, length: int, settings: Mapping[str, Any]) -> Config:
    """The run with one batch of at least so many completions of at most `length` tokens, and with other `settings`."""
    size = min(args.per_device_train_batch_size, completions)
    batches = -(-completions // size)
    batches += batches * size % 2  # two completions for each prompt
    wanted = {
        "per_device_train_batch_size": size,
        "generation_batch_size": None,
        "steps_per_generation": batches,
        "gradient_accumulation_steps": batches,
        "num_generations": 2,
        "num_iterations": 1,
        "max_completion_length": min(args.max_completion_length or length, length),
        # the rest has no part in the gap
        "beta": 0.0,
        "sync_ref_model": False,
        "reward_weights": None,
        "mask_truncated_completions": False,
        "report_to": [],
        "eval_strategy": "no",
        "load_best_model_at_end": False,
        "push_to_hub": False,
        "vllm_enable_sleep_mode": False,
        "vllm_max_model_length": min(args.vllm_max_model_length or _CONTEXT, _CONTEXT),
        "vllm_server_timeout": 5.0,
        "rollout_dump_dir": None,
        "rollout_diagnose": False,
    }
    if args.vllm_mode == "colocate":
        # compiling for a CPU would take longer than everything else
        eager = {"enforce_eager": True} if args.device.type == "cpu" else {}
        given = settings.get("rollout_engine_kwargs", args.settings.rollout_engine_kwargs)
        wanted["rollout_engine_kwargs"] = {**eager, **(given or {})} or None
    init = {**(args.model_init_kwargs or {}), **settings.get("model_init_kwargs", {})}
    wanted = {**settings, **wanted, "model_init_kwargs": init}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the run, and said when it was read
        return dataclasses.replace(args, **wanted)


def prompts_of(file: str | None) -> Sequence[str]:
    """Prompts of a text file, one in each line, or built-in ones."""
    lines = PROMPTS if file is None else Path(file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip()]
