"""The interface of the tools that observe a trainer: a monitor, a diagnosis, a dump."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, Self

from transformers import TrainerCallback

from ..messages import notify, reason_of
from ..settings.resolve import Settings
from .observer import CorrectedBatch, Moment


class Watcher(TrainerCallback):
    """
    A callback that also sees each corrected batch. Nothing that it does reaches the loss.

    Methods are called on all ranks, so that a watcher may gather.
    """

    reads_text: ClassVar[bool] = False  # True if it needs the tokens of completions
    reads_steps: ClassVar[bool] = False  # True if it reads the sums of each optimizer step

    @classmethod
    def check(cls, settings: Settings) -> None:
        """Refuse settings before vLLM starts, which takes long."""

    @classmethod
    def of(cls, trainer: Any) -> Self | None:
        """The watcher that a trainer's settings ask for; `None` if there is nothing to watch."""
        raise NotImplementedError

    def begins(self, trainer: Any, checkpoint: object, *, everywhere: bool) -> None:
        """
        See training begin, perhaps from a checkpoint (a path, or True for the latest). `everywhere` is True if a
        watcher on every rank reads the sums of steps, which are gathered.
        """

    def on_batch_corrected(self, now: Moment, batch: CorrectedBatch) -> None:
        """See a corrected batch: once in decoupled mode, at every visit in bypass mode."""

    @contextmanager
    def outlived(self, loss: str) -> Iterator[None]:
        """
        Let no error end the run: say once what is lost, as the beginning of a sentence, and why. Nothing inside may
        gather, because the other ranks would wait for this one.
        """
        try:
            yield
        except Exception as error:
            reason = reason_of(error)
            if reason not in self._reasons:
                self._reasons.add(reason)
                notify(f"{loss}: {reason.rstrip('.')}.")

    @cached_property
    def _reasons(self) -> set[str]:
        """Errors that were told."""
        return set()


def watchers_among(callbacks: Iterable[Any]) -> list[Watcher]:
    """The watchers among the callbacks of a trainer."""
    return [callback for callback in callbacks if isinstance(callback, Watcher)]
