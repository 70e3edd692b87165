"""The run that a probe is about: its configuration, shortened to a batch, and its prompts."""

import dataclasses
import urllib.request
import warnings
from collections.abc import Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from trl import ScriptArguments
from trl.import_utils import is_vllm_available

from ..trainers.script import ScriptParser, model_config, model_init_kwargs


PROMPTS = (
    "What is the capital of France?",
    "Name three colors.",
    "Count from one to ten.",
    "Why is the sky blue?",
    "Write a sentence about rain.",
    "What is 12 times 7?",
    "Explain what a prime number is, in two sentences.",
    "Say hello.",
    "List five animals that can fly.",
    "Which is larger, 0.8 or 0.75?",
    "Tell me a short story about a dog that is lost.",
    "How do you boil an egg?",
    "Translate 'good morning' into Spanish.",
    "What comes after Tuesday?",
    "Give a reason to read books.",
    "If I have 3 apples and eat one, how many are left? Think step by step.",
)
_LENGTH = 128  # tokens of a completion, unless the run has shorter ones
_CONTEXT = 1024  # tokens that the engine has room for, if there is no recipe
_SERVE = (
    """VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}' """
    "--logprobs-mode processed_logprobs"
)
_PATIENCE = 5  # seconds in which a server that is there answers


def read(request: Mapping[str, Any]) -> tuple[type, Any, Any, Any]:
    """
    Read the configuration of the run.

    Args:
        request (`Mapping[str, Any]`):
            `model`, `trainer` (`"grpo"` or `"rloo"`), `config` (a file or `None`) and `options` (a command line).

    Returns:
        `tuple`: the class of the trainer, and the configurations of trainer, model and script.

    Raises:
        `ValueError`: if it cannot be used.
    """
    from ..trainers import grpo, rloo

    trainer_class, config_class = {
        "grpo": (grpo.RolloutCorrectedGRPOTrainer, grpo.RolloutCorrectedGRPOConfig),
        "rloo": (rloo.RolloutCorrectedRLOOTrainer, rloo.RolloutCorrectedRLOOConfig),
    }[request["trainer"]]
    parser = ScriptParser((ScriptArguments, config_class, model_config(config_class)))
    line = [*request["options"], "--model_name_or_path", request["model"], "--output_dir", request["output"]]
    given = ["--config", request["config"]]
    if not request["config"]:
        known = parser.parse_known_args(line)[0]
        source = {"revision": known.model_revision, "trust_remote_code": known.trust_remote_code}
        given = _without_recipe(load(AutoConfig, request["model"], **source))
    script_args, args, model_args = parser.parse_args_and_config([*given, *line])
    if not args.use_vllm:
        raise ValueError("`use_vllm` is False, so that there is no sampler to probe. Set it to true.")
    if not is_vllm_available():
        raise ValueError("vLLM, the sampler, is not installed: pip install 'trl-rollout-corr[vllm]'.")
    args.model_init_kwargs = model_init_kwargs(args, model_args)
    return trainer_class, args, model_args, script_args


def _without_recipe(config: Any) -> list[str]:
    """Options of a run with TRL's defaults and a colocated engine, also where there is no accelerator."""
    length = min(getattr(config.get_text_config(), "max_position_embeddings", None) or _CONTEXT, _CONTEXT)
    options = ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_max_model_length", str(length)]
    return [*options, *([] if torch.accelerator.is_available() else ["--use_cpu", "true", "--bf16", "false"])]


def load(kind: Any, model: str, **kwargs: Any) -> Any:
    """A configuration or a tokenizer of a model. Code of the model that is not trusted is an error, and no question."""
    try:
        return kind.from_pretrained(model, **kwargs)
    except OSError as error:
        raise ValueError(
            f"{model!r} is neither a folder with a model nor a model of the Hub that you can access."
        ) from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"`trust_remote_code` is False, and {model!r} has code of its own, which would run here. Read that code, and set "
            "`trust_remote_code: true` in the recipe, or pass `--trust_remote_code true`."
        ) from error


def shortened(args: Any, completions: int, engine: Mapping[str, Any]) -> Any:
    """
    Shorten a run to its first batch.

    Args:
        args ([`RolloutCorrectedGRPOConfig`]):
            Configuration of the run.
        completions (`int`):
            Least number of completions in the first batch.
        engine (`Mapping[str, Any]`):
            Arguments of the engine besides those of the run.

    Returns:
        [`RolloutCorrectedGRPOConfig`].
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
        "max_completion_length": min(args.max_completion_length or _LENGTH, _LENGTH),
        # the rest has no part in the gap
        "max_steps": 1,
        "beta": 0.0,
        "sync_ref_model": False,
        "reward_weights": None,
        "mask_truncated_completions": False,
        "log_completions": False,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
        "eval_strategy": "no",
        "load_best_model_at_end": False,
        "push_to_hub": False,
        "resume_from_checkpoint": None,
        "dataloader_num_workers": 0,
        "rollout_dump_dir": None,
        "rollout_diagnose": False,
    }
    if args.vllm_mode == "colocate":
        # compiling for a CPU would take longer than everything else
        eager = {"enforce_eager": True} if on_cpu(args) else {}
        wanted["rollout_engine_kwargs"] = _merged({**eager, **(args.rollout_engine_kwargs or {})}, engine) or None
    known = {field.name for field in dataclasses.fields(args) if field.init}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the run, and said when it was read
        return dataclasses.replace(args, **{name: value for name, value in wanted.items() if name in known})


def _merged(kwargs: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: {**kwargs[name], **more[name]} for name in more if isinstance(kwargs.get(name), dict)}
    return {**kwargs, **more, **both}


def on_cpu(args: Any) -> bool:
    return args.device.type == "cpu"


def prompts_of(file: str | None, script_args: Any, tokenizer: Any, n: int) -> list[Any]:
    """
    Prompts of a file (one a line), or of the recipe's dataset, or some plain ones.

    Args:
        file (`str`, *optional*):
            A text file.
        script_args ([`~trl.ScriptArguments`]):
            May name a dataset, with a column `prompt` or `question`.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer. If it has a chat template, texts become messages.
        n (`int`):
            Number of prompts.

    Returns:
        `list`: prompts as TRL takes them, repeated if there are fewer.

    Raises:
        `ValueError`: if there are none.
    """
    found: list[Any] = list(PROMPTS)
    if file is not None:
        found = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
        if not found:
            raise ValueError(f"{file}: has no prompts; write one in each line.")
    elif script_args.dataset_name is not None:
        found = _of_dataset(script_args, n)
    chats = tokenizer.chat_template is not None
    found = [[{"role": "user", "content": x}] if chats and isinstance(x, str) else x for x in found]
    return list(islice(cycle(found), n))


def _of_dataset(script_args: Any, n: int) -> list[Any]:
    from datasets import load_dataset

    name, split = script_args.dataset_name, script_args.dataset_train_split
    dataset = load_dataset(name, name=script_args.dataset_config, split=split, streaming=script_args.dataset_streaming)
    rows = list(dataset.take(n))
    column = next((column for column in ("prompt", "question") if rows and column in rows[0]), None)
    if column is None:
        raise ValueError(
            f"{name}: has {'columns ' + ', '.join(rows[0]) if rows else 'no rows'}; the column of the prompts must be "
            "`prompt` or `question`."
        )
    return [row[column] for row in rows]


def check_server(args: Any) -> None:
    """Refuse a server that does not answer at once. TRL would wait for minutes."""
    url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_PATIENCE):
            return
    except (OSError, ValueError) as error:
        raise ValueError(f"no vLLM server answers at {url} ({error}). Start one with: {_SERVE}") from error
