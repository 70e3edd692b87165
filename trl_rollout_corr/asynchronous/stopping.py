"""End of the rollout worker, and of a run whose sampler or server has failed."""

from contextlib import suppress
from queue import Empty
from threading import Event, Thread
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


def drain_at_stop(worker: Any) -> None:
    """
    Empty the queues of TRL's rollout worker while it stops.

    A process ends only when all that it has put into a queue was taken out of its pipe. Nobody takes samples after the last
    step, so TRL would wait for 15 seconds, warn, and kill the process of the worker.
    """
    stop = worker.stop
    queues = [getattr(worker, name) for name in ("rollout_buffer", "metrics_queue") if hasattr(worker, name)]

    def stop_and_drain() -> None:
        stopped = Event()
        Thread(target=_drain, args=(queues, stopped), daemon=True).start()
        try:
            stop()
        finally:
            stopped.set()

    worker.stop = stop_and_drain


def _drain(queues: list[Any], stopped: Event) -> None:
    while not stopped.wait(0.05):
        for queue in queues:
            with suppress(Empty):
                while True:
                    queue.get_nowait()


class OrderlyEnd(TrainerCallback):
    """
    Ends a run with a checkpoint if the main process has an `error`.

    `message`, type and text of the error, is on all ranks after [`OrderlyEnd.agree`]. `running` is true once the training loop
    has begun; `saved_at` is the optimizer step of the last checkpoint, or of the start.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.error: Exception | None = None
        self.message: str | None = None
        self.running, self.saved_at = False, 0

    def agree(self, control: TrainerControl, state: TrainerState) -> bool:
        """Broadcast the error, if any, and end the run. All ranks must call it. Returns `True` if the run ends."""
        message = [None if self.error is None else f"{type(self.error).__name__}: {self.error}"]
        broadcast_object_list(message, from_process=0)
        self.message = message[0]
        if self.message is not None:
            control.should_training_stop = True
            control.should_save = state.global_step > self.saved_at
        return self.message is not None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.error = self.message = None
        self.running, self.saved_at = True, state.global_step

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.agree(control, state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.saved_at = state.global_step
