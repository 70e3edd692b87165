"""
From a request to a trainer with its sampler, which begin as in the run, with a batch of their own. A request is the
`run` of `probe` (`tools/probe/probe.py`) with `output` (a folder), `changes` (fields that differ from the run), and
perhaps `tokens` (a file of another process).
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from ...settings.resolve import Settings
from ...trainers.grpo import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer
from ...trainers.rloo import RolloutCorrectedRLOOConfig, RolloutCorrectedRLOOTrainer


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
_CONTEXT = 1024  # longest text of the engine in tokens; the prompts take less
# A run without a recipe: TRL's defaults with a colocated engine, also where there is no accelerator
_DEFAULTS = ["--use_vllm", "true", "--vllm_mode", "colocate"]
_ON_CPU = ["--use_cpu", "true", "--bf16", "false"]
CONTINUED = 1  # token that vLLM must sample behind a text that it scores


def read_request(request: Mapping[str, Any]) -> tuple[type[Trainer], Config, Settings, ModelConfig]:
    """
    Trainer class, configuration of the trainer, its settings in effect, and configuration of the model of a request. A
    `ValueError` if unusable.
    """
    trainer_class, config_class = _TRAINERS[request["trainer"]]
    parser = TrlParser((ScriptArguments, config_class, ModelConfig))
    line = [*request["options"], "--model_name_or_path", request["model"], "--output_dir", request["output"]]
    without_recipe = _DEFAULTS if torch.accelerator.is_available() else [*_DEFAULTS, *_ON_CPU]
    given = ["--config", request["config"]] if request["config"] else without_recipe
    _, args, model_args = parser.parse_args_and_config([*given, *line])
    if not args.use_vllm:
        raise ValueError("`use_vllm` is False, so there is no sampler to probe. Set it to true.")
    if args.vllm_mode != "colocate":
        raise ValueError(
            f"`vllm_mode` is {args.vllm_mode!r}, and a probe changes settings and sends weights, so it starts vLLM "
            "itself. Add `--vllm_mode colocate`, and the options of your server as `--rollout_engine_kwargs '{...}'`."
        )
    settings = args.settings
    if settings.rollout_support is not None:
        raise ValueError(
            f"`rollout_support` is {settings.rollout_support!r}: the trainer then scores over the tokens that "
            "sampling kept, and vLLM over all. Remove it, and `top_p`, `top_k` and `min_p`, which it makes up for."
        )
    args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(args.model_init_kwargs or {}),
    }
    return trainer_class, args, settings, model_args


def shortened(args: Config, settings: Settings, completions: int, length: int, changes: Mapping[str, Any]) -> Config:
    """
    The run, whose `settings` are in effect, with one batch of at least `completions`, of at most `length` tokens, and
    with other fields: `changes`.
    """
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
        # nothing else contributes to the gap
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
        "rollout_dump_dir": None,
        "rollout_diagnose": False,
    }
    on_cpu = {"enforce_eager": True} if args.device.type == "cpu" else {}
    engine = changes.get("rollout_engine_kwargs", settings.rollout_engine_kwargs) or {}
    wanted |= changes
    wanted["rollout_engine_kwargs"] = {**on_cpu, **engine} or None
    wanted["model_init_kwargs"] = {**(args.model_init_kwargs or {}), **changes.get("model_init_kwargs", {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the run were shown when it was read
        return dataclasses.replace(args, **wanted)


def context_of(config: Any) -> int | None:
    """The longest text of a model in tokens; `None` if its configuration does not say."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


def tokens_in(tokenizer: Any, prompt: Any) -> int:
    """Number of tokens of a prompt, as TRL makes it."""
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    return len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False))


def fit(args: Config, lengths: Sequence[int], context: int | None, source: str) -> None:
    """
    Shorten the engine's texts to the context of the model, and the completions to what the prompts of these `lengths`
    leave. Raises a `ValueError` about prompts that are empty or leave nothing.
    """
    if min(lengths) == 0:
        raise ValueError(
            "The tokenizer of this model turns a prompt into no tokens, so that vLLM has nothing to continue "
            f"({source}). Name a file with prompts that the model knows, one in each line: `--prompts FILE`."
        )
    if context is not None:
        args.vllm_max_model_length = min(args.vllm_max_model_length, context)
    left = args.vllm_max_model_length - max(lengths) - CONTINUED
    if left < 1:
        raise ValueError(
            f"A prompt has {max(lengths)} tokens ({source}), and the engine takes texts of "
            f"{args.vllm_max_model_length} tokens, of which a probe needs {CONTINUED + 1} after the prompt. Name a "
            "file with shorter prompts, one in each line: `--prompts FILE`, or set `--vllm_max_model_length` higher "
            "if the model has a longer context."
        )
    args.max_completion_length = min(args.max_completion_length, left)


def build_trainer(request: Mapping[str, Any]) -> tuple[Trainer, Config, Settings]:
    """
    The trainer of a request with its sampler, and the configuration of the run before it was shortened for a probe,
    with its settings in effect.
    """
    trainer_class, run, settings, model_args = read_request(request)
    source = {"revision": model_args.model_revision, "trust_remote_code": run.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(request["model"], **source, padding_side="left")
    args = shortened(run, settings, request["completions"], request["length"], request["changes"])
    n = args.per_device_train_batch_size * args.steps_per_generation // args.num_generations
    lines = Path(file).read_text(encoding="utf-8").splitlines() if (file := request["prompts"]) else PROMPTS
    if not any(map(str.strip, lines)):
        raise ValueError(f"{file} (`--prompts`) contains no line with text. Write a prompt into each line.")
    prompts: list[Any] = list(islice(cycle(filter(str.strip, lines)), n))
    if tokenizer.chat_template is not None:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    context = context_of(AutoConfig.from_pretrained(request["model"], **source))
    fit(args, [tokens_in(tokenizer, prompt) for prompt in prompts], context, file or "the built-in prompts")
    trainer = trainer_class(
        model=request["model"],
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    return trainer, run, settings
