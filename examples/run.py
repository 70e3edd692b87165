"""Common parts of `grpo.py`, `rloo.py`, `async_grpo.py` and `agent.py`: arguments, data, reward, and training."""

import before_imports  # noqa: F401

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path

from datasets import Dataset, IterableDataset, load_dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config

from trl_rollout_corr import (
    RolloutCorrectionConfig,
    ScriptParser,
    check_dump_folder,
    model_config,
    model_init_kwargs,
    one_line_errors,
)


INSTRUCTION = "Solve the problem step by step. Write the final answer as a number after ####."

# Options that `--help` lists besides those of rollout correction; the others are TRL's and are all accepted.
# fmt: off
SHOWN = (
    "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "model_name_or_path",
    "model_revision", "dtype", "attn_implementation", "use_peft", "lora_r", "lora_alpha", "lora_target_modules",
    "load_in_4bit", "output_dir", "max_steps", "num_train_epochs", "learning_rate", "per_device_train_batch_size",
    "gradient_accumulation_steps", "steps_per_generation", "num_iterations", "num_generations",
    "max_completion_length", "temperature", "beta", "loss_type", "use_vllm", "vllm_mode", "vllm_server_base_url",
    "logging_steps", "report_to", "eval_strategy", "save_steps", "resume_from_checkpoint",
)
# fmt: on


def make_parser(config_class: type, description: str, *more: type) -> ScriptParser:
    """A parser for scripts, trainer, model and more, whose `--help` fits on a few screens."""
    parser = ScriptParser(
        (ScriptArguments, config_class, model_config(config_class), *more),
        description=description,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=119),
        usage="%(prog)s [--config RECIPE] [options]",
        epilog=f"All options of {config_class.__mro__[2].__name__} are accepted as well, in a recipe and here.",
    )
    ours = {field.name for field in dataclasses.fields(RolloutCorrectionConfig)}
    shown = {*SHOWN, *ours, *(field.name for own in more for field in dataclasses.fields(own))}
    for action in parser._actions:
        if action.dest in shown:
            action.option_strings, action.metavar = action.option_strings[:1], "VALUE"
        elif action.dest != "help":
            action.help = argparse.SUPPRESS
    return parser


def load_questions(args: ScriptArguments, split: str, tokenizer: PreTrainedTokenizerBase) -> Dataset | IterableDataset:
    """
    Load questions with an answer that can be checked.

    Args:
        args ([`~trl.ScriptArguments`]):
            Dataset to load, by default GSM8K. It has a column `prompt`, or a column `question`; and a column `answer` whose
            last number is the solution.
        split (`str`):
            Split to load.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer; prompts are conversations if it has a chat template, and text otherwise.

    Returns:
        [`~datasets.Dataset`] or [`~datasets.IterableDataset`]: columns `prompt` and `answer`.
    """
    name, config = args.dataset_name, args.dataset_config
    if name is None:
        name, config = "openai/gsm8k", "main"
    dataset = load_dataset(name, name=config, split=split, streaming=args.dataset_streaming)

    def to_prompt(example: dict) -> dict:
        if "prompt" in example:
            return example
        if tokenizer.chat_template is None:
            return {"prompt": f"{INSTRUCTION}\n\nProblem: {example['question']}\nSolution:"}
        return {"prompt": [{"role": "user", "content": f"{example['question']}\n\n{INSTRUCTION}"}]}

    return dataset.map(to_prompt)


def last_number(text: str) -> float | None:
    """The number after the last `####`, or else the last number of the text."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.rsplit("####", 1)[-1].replace(",", ""))
    return float(numbers[-1] if "####" not in text else numbers[0]) if numbers else None


def right_answer(completions: list, answer: list[str], **kwargs) -> list[float]:
    """Reward: 1 if the completion ends in the number that the answer ends in, else 0."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [float(last_number(text) == last_number(solution)) for text, solution in zip(texts, answer, strict=True)]


def train(
    trainer_class: type,
    config_class: type,
    description: str,
    arguments: list[str] | None = None,
    load: Callable = load_questions,
    **of_trainer: object,
):
    """
    Train from a recipe and a command line.

    Args:
        trainer_class (`type`):
            Trainer.
        config_class (`type`):
            Its configuration.
        description (`str`):
            What `--help` says first.
        arguments (`list[str]`, *optional*):
            Command line; that of the process by default.
        load (`Callable`, *optional*, defaults to [`load_questions`]):
            Loads a split.
        of_trainer:
            Other arguments of the trainer, such as a reward or an environment.

    Returns:
        The trainer, after training.
    """
    with one_line_errors():
        script_args, args, model_args = parse(
            config_class, description, sys.argv[1:] if arguments is None else arguments
        )
        tokenizer = load_tokenizer(model_args, args.trust_remote_code)
        train_dataset = load(script_args, script_args.dataset_train_split, tokenizer)
        evaluates = args.eval_strategy != "no"
        eval_dataset = load(script_args, script_args.dataset_test_split, tokenizer) if evaluates else None
    with one_line_errors(of_package=True):
        trainer = trainer_class(
            model=model_args.model_name_or_path,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
            **{"reward_funcs": right_answer, **of_trainer},
        )
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    return save(trainer)


def load_tokenizer(model_args: ModelConfig, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        padding_side="left",
        trust_remote_code=trust_remote_code,
    )


def save(trainer):
    """Save the model, unless saving is off, and return the trainer."""
    if trainer.args.save_strategy != "no":
        trainer.save_model(trainer.args.output_dir)
        trainer.save_state()  # with the log, for `trl-rollout-corr report`
    return trainer


def parse(config_class: type, description: str, arguments: list[str], *more: type) -> tuple:
    """Arguments of script, trainer, model and more. What cannot be used is an error before anything is loaded."""
    parser = make_parser(config_class, description, *more)
    script_args, args, model_args, *others = parser.parse_args_and_config(arguments)
    if model_args.model_name_or_path is None:
        raise ValueError(
            "`model_name_or_path` is missing: name a model on the Hub or a folder, in the recipe or here."
        )
    if args.settings.rollout_dump_dir is not None:
        check_dump_folder(Path(args.settings.rollout_dump_dir), new_run=not args.resume_from_checkpoint)
    args.model_init_kwargs = model_init_kwargs(args, model_args)
    return script_args, args, model_args, *others
