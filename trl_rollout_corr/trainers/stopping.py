"""End of a run whose sampler or server has failed: a checkpoint, and then the error on every rank."""

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


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
