"""Replays, whose code is imported only for a setting that asks for one, or for a model with experts."""

from contextlib import suppress
from typing import Any

from .seam import Replay


def replays_of(trainer: Any) -> Replay:
    """Choices of its sampler that a trainer makes again, by its settings. The sampler is recorded from now on."""
    if trainer._settings.rollout_support is None and trainer._settings.rollout_routing is None:
        return Replay()
    from .choices import Replays, experts_of, kept_tokens_of

    return Replays(experts_of(trainer), kept_tokens_of(trainer))


def knows_routers(model: Any) -> bool:
    """True if the trainer can replay the experts of a model, see `rollout_routing`."""
    from .routers import find_routers

    with suppress(ValueError):
        return bool(find_routers(model))
    return False
