"""
Methods of TRL that this package overrides or calls, checked before training.

Most of them are private in TRL or change without notice. If one is gone, training could go on without correction, so
the trainers refuse to start, and name the change. Additional parameters at the end do no harm.
[`~trl_rollout_corr.trainers.gradient_check.GradientCheck`] finds changes inside a method at the first step.
`tests/test_contract.py` lists attributes and keys.
"""

import inspect
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any, TypeVar

from trl import GRPOTrainer, RLOOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from ..messages import warn
from .versions import NEWEST_TESTED, OLDEST, TESTED, is_untested, outside_window, release


# Leading parameters, passed or read by position or by name.
_FORWARD = ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]
SHARED = {
    "_get_per_token_logps_and_entropies": _FORWARD,
    "_generate": ["self", "prompts"],
    "_generate_and_score_completions": ["self", "inputs"],
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "_compute_loss": ["self", "model", "inputs"],
    "log": ["self", "logs", "start_time"],
    "train": ["self", "resume_from_checkpoint"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
}
METHODS = {
    GRPOTrainer: SHARED,
    RLOOTrainer: SHARED,
    VLLMGeneration: {
        "generate": ["self", "prompts", "images", "num_generations", "profiler"],
        "sync_weights": ["self"],
        "_iter_named_params": ["self"],
    },
}


def changes(owner: type, methods: dict[str, list[str]] | None = None) -> list[str]:
    """Sentences about changed or missing methods of a class of TRL, by default in `METHODS`."""
    sentences = [_change_of_method(owner, name, expected) for name, expected in (methods or METHODS[owner]).items()]
    return [change for change in sentences if change]


def _change_of_method(owner: type, name: str, expected: list[str]) -> str | None:
    method = inspect.getattr_static(owner, name, None)
    if method is None:
        return f"`{owner.__name__}.{name}` is gone."
    parameters = list(inspect.signature(method).parameters.values())
    names = [parameter.name for parameter in parameters]
    for i, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:  # it takes all parameters
            names[i:] = expected[i:]
            break
    if names[: len(expected)] != expected:
        return f"`{owner.__name__}.{name}` starts with parameters {names[: len(expected)]} instead of {expected}."
    return None


def refusal(trainers: Iterable[type], methods: dict[str, list[str]] | None = None) -> str | None:
    """
    Reason why some trainers of the installed TRL cannot be corrected; `None` if all can. `methods` lists the methods
    of a trainer outside `METHODS`.
    """
    installed = version("trl")
    outside = outside_window(release(), installed)
    if outside:
        return outside
    trainers = tuple(trainers)
    if of_unsloth := next((trainer for trainer in trainers if _is_of_unsloth(trainer)), None):
        return (
            f"`{of_unsloth.__name__}` is Unsloth's: `import unsloth` replaces the trainers of trl, and its loss "
            "computes log-probabilities in a kernel of its own, which rollout correction does not reach. Train "
            "without `import unsloth`. With Unsloth, `trl-rollout-corr diagnose` and `compare` work on dumps of "
            "sequences."
        )
    owners = trainers if methods else (*trainers, VLLMGeneration)
    moved = [change for owner in owners for change in changes(owner, methods)]
    if moved:
        return (
            f"trl {installed} has changed methods that rollout correction uses: {' '.join(moved)} Install a newer "
            f"trl-rollout-corr, or {TESTED}."
        )
    return None


def _is_of_unsloth(trainer: type) -> bool:
    return any("unsloth" in f"{cls.__module__} {cls.__name__}".lower() for cls in trainer.__mro__)


_warned: set[str] = set()  # one warning per process


def check_trl(trainer: type, methods: dict[str, list[str]] | None = None) -> None:
    """Refuse a TRL that is unsupported or changed a method in use. Warn about an untested one."""
    problem = refusal([trainer], methods)
    if problem:
        raise ImportError(problem)
    installed = version("trl")
    if is_untested(release()) and installed not in _warned:
        _warned.add(installed)
        warn(
            f"trl {installed} is newer than the releases that trl-rollout-corr was tested with ({OLDEST} to "
            f"{NEWEST_TESTED}). All methods that it needs exist, and the first step will show whether the correction "
            f"reaches the loss. `constraints.txt` lists {TESTED}."
        )


def definer(trainer: type, method: str, after: type | None = None) -> type:
    """Class that defines a method, among the classes behind `after` in `__mro__`."""
    order = trainer.__mro__
    return next(cls for cls in order[order.index(after) + 1 if after else 0 :] if method in vars(cls))


def check_bases(trainer: type, mixin: type, trl_class: type, method: str = "_compute_loss") -> None:
    """Refuse trainers with another loss than TRL's, which the mixin would not correct."""
    owner = definer(trainer, method, after=mixin)
    if owner is not trl_class:
        raise TypeError(
            f"`{trainer.__name__}` inherits `{method}` from `{owner.__name__}`, and rollout correction supports the "
            f"loss of `{trl_class.__name__}` only. Derive from the corrected trainer alone, or train with "
            f"`{owner.__name__}`."
        )


def check_config_class(args: object, config_class: type) -> None:
    """Refuse the configuration of another trainer."""
    if not isinstance(args, config_class):
        raise TypeError(
            f"`args` must be a `{config_class.__name__}`, got a `{type(args).__name__}`. Build it "
            "with the same arguments; it also accepts the fields of rollout correction."
        )


F = TypeVar("F", bound=Callable[..., None])


def with_parameters_of(theirs: F) -> Callable[[Callable[..., None]], F]:
    """Make `help` and editors show TRL's arguments for a constructor that passes them on."""

    def decorate(ours: Any) -> F:
        ours.__signature__ = inspect.signature(theirs)
        return ours  # type: ignore[no-any-return]

    return decorate
