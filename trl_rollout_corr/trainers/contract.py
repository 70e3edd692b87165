"""
What this package relies on in TRL, checked before training.

TRL keeps the methods below private or changes them without notice. Should one of them move, the correction could vanish
while training goes on; so the trainers refuse to start, and say what moved.
"""

import inspect
from importlib.metadata import version

from packaging.version import Version
from trl import GRPOTrainer, RLOOTrainer
from trl.generation.vllm_generation import VLLMGeneration


OLDEST, FIRST_UNSUPPORTED = "1.16", "2"

# Leading parameters that are passed or read by position or by name.
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
}
METHODS = {
    GRPOTrainer: _SHARED,
    RLOOTrainer: _SHARED,
    VLLMGeneration: {
        "generate": ["self", "prompts", "images", "num_generations", "profiler"],
        "sync_weights": ["self"],
        "_iter_named_params": ["self"],
    },
}

# Of TRL's asynchronous trainer
ASYNCHRONOUS = {
    "compute_loss": _SHARED["compute_loss"],
    "get_train_dataloader": ["self"],
    "_sync_weight": ["self"],
    "train": ["self", "resume_from_checkpoint"],
    **{name: _SHARED[name] for name in ("log", "add_callback", "create_model_card")},
}


def moved(owner: type, methods: dict[str, list[str]]) -> list[str]:
    """
    List what has changed.

    Args:
        owner (`type`):
            Class of TRL.
        methods (`dict[str, list[str]]`):
            Leading parameters of its methods.

    Returns:
        `list[str]`: one sentence per method that is missing or has other leading parameters.
    """
    changes = []
    for name, expected in methods.items():
        method = inspect.getattr_static(owner, name, None)
        if method is None:
            changes.append(f"`{owner.__name__}.{name}` is gone.")
            continue
        found = list(inspect.signature(method).parameters)[: len(expected)]
        if found != expected:
            changes.append(f"`{owner.__name__}.{name}` starts with parameters {found} instead of {expected}.")
    return changes


def check_trl(trainer: type, methods: dict[type, dict[str, list[str]]] | None = None):
    """
    Refuse to run on a TRL that this package does not know.

    Args:
        trainer (`type`):
            TRL's trainer class that is extended.
        methods (`dict[type, dict[str, list[str]]]`, *optional*):
            What is touched, by class. By default that of the trainer and of its sampler in `METHODS`.

    Raises:
        `ImportError`: if the version is outside the supported range, or a method that is touched has moved.
    """
    installed = version("trl")
    release = Version(Version(installed).base_version)  # 2.0.0.dev0 sorts before 2, but is not a 1.x
    if not Version(OLDEST) <= release < Version(FIRST_UNSUPPORTED):
        raise ImportError(
            f"trl-rollout-corr works with trl>={OLDEST},<{FIRST_UNSUPPORTED}, got trl {installed}. "
            f"Run `pip install 'trl>={OLDEST},<{FIRST_UNSUPPORTED}'`."
        )
    touched = methods or {owner: METHODS[owner] for owner in (trainer, VLLMGeneration)}
    changes = [change for owner, names in touched.items() for change in moved(owner, names)]
    if changes:
        raise ImportError(
            f"trl {installed} has changed where rollout correction attaches: {' '.join(changes)} Install a version of trl "
            "that this release of trl-rollout-corr was tested with, or a newer trl-rollout-corr."
        )
