"""Parts of TRL's asynchronous trainer. Its module knows all their names, wherever they are defined."""

import sys
import warnings
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ..trainers.trl_interface import SHARED
from ..trainers.versions import TESTED


_PLACES = ("trl", "trl.experimental.async_grpo")  # places of the class, the newest first
_PARTS = ("AsyncGRPOConfig", "AsyncRolloutWorker", "RolloutSample", "TreeRow")
# Methods of the trainer in use, with their parameters; `trl_interface.py` lists the methods of the other trainers
METHODS = {
    "compute_loss": SHARED["compute_loss"],
    "get_train_dataloader": ["self"],
    "_sync_weight": ["self"],
    "log": SHARED["log"],
    "train": SHARED["train"],
}


def _module(name: str) -> Any:
    """A module; `None` if it does not exist. Errors in the module itself are raised."""
    try:
        with warnings.catch_warnings():  # TRL warns about an import that the user did not write
            warnings.filterwarnings("ignore", message="You are importing from 'trl.experimental'")
            return import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(f"{error.name}"):
            raise
        return None


def find_parts() -> dict[str, Any]:
    """The asynchronous trainer of the installed TRL and its parts, by name. An `ImportError` if one is missing."""
    owners = [getattr(_module(place), "AsyncGRPOTrainer", None) for place in _PLACES]
    trainer = next((owner for owner in owners if owner is not None), None)
    if trainer is None:
        places = " or ".join(f"`{place}`" for place in _PLACES)
        raise ImportError(_refusal(f"`AsyncGRPOTrainer`, which was not found in {places}"))
    module = sys.modules[trainer.__module__]
    missing = [f"`{name}`" for name in _PARTS if not hasattr(module, name)]
    if missing:
        raise ImportError(_refusal(f"{', '.join(missing)} in `{trainer.__module__}`"))
    return {"AsyncGRPOTrainer": trainer, **{name: getattr(module, name) for name in _PARTS}}


def _refusal(missing: str) -> str:
    return (
        f"The asynchronous trainer of trl {version('trl')} lacks parts that rollout correction uses: {missing}. "
        f"Install a newer trl-rollout-corr, or {TESTED}; or train with `RolloutCorrectedGRPOTrainer`."
    )


_parts = find_parts()
if TYPE_CHECKING:  # editors show its parameters
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
else:
    AsyncGRPOConfig, AsyncGRPOTrainer = _parts["AsyncGRPOConfig"], _parts["AsyncGRPOTrainer"]
AsyncRolloutWorker, RolloutSample, TreeRow = (_parts[name] for name in _PARTS[1:])
