"""Replays, whose code is imported only for a setting that asks for one, or for a model with experts."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..settings.resolve import Settings
from .seam import Replay


def replays_of(trainer: Any, settings: Settings, unwrap: Callable[[Any], Any]) -> Replay:
    """
    Choices of its sampler that a trainer with `settings` makes again. The sampler is recorded from now on. `unwrap`
    returns a model without its wrappers.
    """
    if settings.rollout_support is None and settings.rollout_routing is None:
        return Replay()
    from .choices import Replays, experts_of, kept_tokens_of

    return Replays(experts_of(trainer, settings, unwrap), kept_tokens_of(trainer, settings, unwrap))


def knows_routers(model: Any) -> bool:
    """True if the trainer can replay the experts of a model, see `rollout_routing`."""
    from .routers import find_routers

    with suppress(ValueError):
        return bool(find_routers(model))
    return False
