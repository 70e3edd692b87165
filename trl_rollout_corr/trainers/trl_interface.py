"""
Methods, attributes, batch keys and fields of TRL that this package uses, checked before training.

Most of them are private in TRL or change without notice. With a changed name, training could go on without correction: the
trainers refuse to start, and name the change. Additional parameters at the end do no harm. Changes inside a method are found
at the first step ([`~trl_rollout_corr.trainers.gradient_check.GradientCheck`]).
"""

import dataclasses
import inspect
from collections.abc import Iterator
from importlib.metadata import version
from types import CodeType, FunctionType
from typing import Any

from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from ..messages import warn
from .versions import NEWEST_TESTED, OLDEST, PUSHES_WEIGHTS, is_untested, outside_window, release


# Leading parameters, passed or read by position or by name.
_FORWARD = ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]
_SHARED = {
    "_get_per_token_logps_and_entropies": _FORWARD,
    "_generate": ["self", "prompts"],
    "_generate_and_score_completions": ["self", "inputs"],
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "_compute_loss": ["self", "model", "inputs"],
    "log": ["self", "logs", "start_time"],
    "add_callback": ["self", "callback"],
    "create_model_card": ["self", "model_name"],
    "train": ["self", "resume_from_checkpoint"],
}
METHODS = {
    GRPOTrainer: _SHARED,
    RLOOTrainer: _SHARED,
    VLLMGeneration: {
        "generate": ["self", "prompts", "images", "num_generations", "profiler"],
        "sync_weights": ["self"],
        **PUSHES_WEIGHTS,
    },
}

# Methods of TRL's asynchronous trainer
ASYNCHRONOUS = {
    "compute_loss": _SHARED["compute_loss"],
    "get_train_dataloader": ["self"],
    "_sync_weight": ["self"],
    **{name: _SHARED[name] for name in ("log", "add_callback", "create_model_card", "train")},
}


# Attributes of the classes, and keys of a batch
_ATTRIBUTES = [
    *("beta", "num_iterations", "reward_weights", "temperature", "use_vllm", "vllm_generation", "vllm_mode"),
    *("_buffered_inputs", "_metrics"),
]
_KEYS = ["advantages", "completion_ids", "completion_mask", "prompt_ids", "prompt_mask"]
NAMES = {
    GRPOTrainer: {
        "attribute": [*_ATTRIBUTES, "importance_sampling_level", "rollout_func"],
        "key": [*_KEYS, "old_per_token_logps", "sampling_per_token_logps", "tool_mask"],
    },
    RLOOTrainer: {"attribute": _ATTRIBUTES, "key": [*_KEYS, "old_logps"]},
    VLLMGeneration: {"attribute": ["accelerator", "llm", "logprobs", "mode", "vllm_client"], "key": []},
}

_FIELDS = [
    *("beta", "generation_kwargs", "min_p", "num_iterations", "repetition_penalty", "steps_per_generation"),
    *("temperature", "top_k", "top_p", "use_vllm", "vllm_structured_outputs_regex"),
]
FIELDS = {
    GRPOConfig: [
        *_FIELDS,
        *("delta", "epsilon", "epsilon_high", "importance_sampling_level", "loss_type"),
        "vllm_importance_sampling_correction",
    ],
    RLOOConfig: _FIELDS,
}
CONFIGS = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig}


def look_at(owner: type, methods: dict[str, list[str]] | None = None) -> Iterator[str | None]:
    """
    Compare a class of TRL with the names that are used.

    Args:
        owner (`type`):
            Trainer, or backend of generation.
        methods (`dict[str, list[str]]`, *optional*):
            Leading parameters of the methods in use. By default those of `METHODS`.

    Yields:
        `str` or `None`: one per method, attribute, key of the batch and field of the configuration: `None` if it is
        unchanged, else a sentence about the change.
    """
    for name, expected in (METHODS[owner] if methods is None else methods).items():
        yield _change_of_method(owner, name, expected)
    found = _mentioned(owner)
    for kind, names in NAMES.get(owner, {}).items():
        for name in names:
            yield None if name in found else f"The {kind} `{name}` of `{owner.__name__}` is gone."
    config = CONFIGS.get(owner)
    if config is not None:
        fields = {field.name for field in dataclasses.fields(config)}
        for name in FIELDS[config]:
            yield None if name in fields else f"The field `{name}` of `{config.__name__}` is gone."


def _change_of_method(owner: type, name: str, expected: list[str]) -> str | None:
    method = inspect.getattr_static(owner, name, None)
    if method is None:
        return f"`{owner.__name__}.{name}` is gone."
    parameters = list(inspect.signature(method).parameters.values())
    found = [parameter.name for parameter in parameters]
    for i, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:  # takes all parameters
            found[i:] = expected[i:]
            break
    if found[: len(expected)] != expected:
        return f"`{owner.__name__}.{name}` starts with parameters {found[: len(expected)]} instead of {expected}."
    return None


def _mentioned(owner: type) -> set[str]:
    """Names and strings in the code of a class of TRL, its bases in TRL, and the functions of their modules."""
    found: set[str] = set()
    for cls in owner.__mro__:
        if cls.__module__.split(".")[0] == "trl":
            for member in [*vars(cls).values(), *vars(inspect.getmodule(cls)).values()]:
                member = inspect.unwrap(member) if callable(member) else member
                if isinstance(member, FunctionType) and member.__module__ == cls.__module__:
                    found |= _names_in(member.__code__)
    return found


def _names_in(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names_in(constant)
        else:
            found |= {x for x in (constant if isinstance(constant, tuple) else (constant,)) if isinstance(x, str)}
    return found


def changes(owner: type, methods: dict[str, list[str]] | None = None) -> list[str]:
    """Sentences about changed or missing names of a class of TRL."""
    return [change for change in look_at(owner, methods) if change]


def refusal(trainers: list[type], methods: dict[type, dict[str, list[str]]] | None = None) -> str | None:
    """Reason why some trainers of the installed TRL cannot be corrected; `None` if all can."""
    installed = version("trl")
    outside = outside_window(release(), installed)
    if outside:
        return outside
    touched = methods or {owner: METHODS[owner] for owner in (*trainers, VLLMGeneration)}
    found = [change for owner, names in touched.items() for change in changes(owner, names)]
    if found:
        return (
            f"trl {installed} has changed names that rollout correction uses: {' '.join(found)} Install a newer "
            f"trl-rollout-corr, or a TRL that this one was tested with: `pip install 'trl=={NEWEST_TESTED}.*'`."
        )
    return None


_told: set[str] = set()  # one warning per process


def check_trl(trainer: type, methods: dict[type, dict[str, list[str]]] | None = None) -> None:
    """Refuse an unsupported TRL, or one in which a name in use has changed, and warn about an untested one."""
    problem = refusal([trainer], methods)
    if problem:
        raise ImportError(problem)
    installed = version("trl")
    if is_untested(release()) and installed not in _told:
        _told.add(installed)
        warn(
            f"trl {installed} is newer than the releases that trl-rollout-corr was tested with ({OLDEST} to "
            f"{NEWEST_TESTED}). All names that it uses are there, and the first step will show whether the correction reaches "
            "the loss. `trl-rollout-corr check` lists the names."
        )


def definer(trainer: type, method: str, after: type | None = None) -> type:
    """Class that defines a method, among the classes after `after` in the order of method resolution."""
    order = trainer.__mro__
    return next(cls for cls in order[order.index(after) + 1 if after else 0 :] if method in vars(cls))


def check_bases(trainer: type, mixin: type, trl_class: type, method: str = "_compute_loss") -> None:
    """Refuse trainers whose loss is not TRL's: the mixin corrects the loss of the classes after it."""
    found = definer(trainer, method, after=mixin)
    if found is not trl_class:
        raise TypeError(
            f"`{trainer.__name__}` inherits `{method}` from `{found.__name__}`, and rollout correction supports the "
            f"loss of `{trl_class.__name__}` only. Derive from the corrected trainer alone, or train with `{found.__name__}`."
        )


def check_config_class(args: Any, config_class: type) -> None:
    """Refuse the configuration of another trainer."""
    if not isinstance(args, config_class):
        raise TypeError(
            f"`args` must be a `{config_class.__name__}`, got a `{type(args).__name__}`. It takes the same "
            "arguments and those of rollout correction."
        )
