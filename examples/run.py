"""Common parts of `grpo.py`, `rloo.py`, `async_grpo.py` and `agent.py`: arguments, data, reward, and training."""

import before_imports  # noqa: F401

import re
from collections.abc import Callable

from datasets import Dataset, IterableDataset, load_dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config


INSTRUCTION = "Solve the problem step by step. Write the final answer as a number after ####."


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
    script_args, args, model_args = parse((ScriptArguments, config_class, ModelConfig), description, arguments)
    args.model_init_kwargs.setdefault("dtype", model_args.dtype)
    tokenizer = load_tokenizer(model_args, args.trust_remote_code)
    train_dataset = load(script_args, script_args.dataset_train_split, tokenizer)
    evaluates = args.eval_strategy != "no"
    trainer = trainer_class(
        model=model_args.model_name_or_path,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=load(script_args, script_args.dataset_test_split, tokenizer) if evaluates else None,
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


def parse(classes: tuple[type, ...], description: str, arguments: list[str] | None) -> tuple:
    """Arguments of script, trainer, model and more. What cannot be used is an error before anything is loaded."""
    parser = TrlParser(classes, description=description)
    try:
        script_args, args, model_args, *others = parser.parse_args_and_config(arguments)
    except ValueError as error:
        error.add_note("`trl-rollout-corr check FILE` names every mistake in a file of settings.")
        raise
    if model_args.model_name_or_path is None:
        raise ValueError(
            "`model_name_or_path` is missing: name a model on the Hub or a folder, in the recipe or here."
        )
    args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        **(args.model_init_kwargs or {}),
    }
    return script_args, args, model_args, *others
