"""An orderly end of a run whose samples or weights cannot go on: a checkpoint first, and then the error, on every rank."""

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState


class OrderlyEnd(TrainerCallback):
    """
    Ends a run with a checkpoint if the main process says so.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Knows the other ranks.

    Attributes:
        error (`Exception`, *optional*):
            What ends the run. Set on the main process.
        message (`str`, *optional*):
            The same in words, on all ranks, once they agree.
        running (`bool`):
            Whether the loop of training has begun.
        saved_at (`int`):
            Optimizer step of the last checkpoint, or of the beginning.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.error: Exception | None = None
        self.message: str | None = None
        self.running, self.saved_at = False, 0

    def agree(self, control: TrainerControl, state: TrainerState) -> bool:
        """Tell all ranks whether the run ends here, which they must all ask."""
        message = [None if self.error is None else f"{type(self.error).__name__}: {self.error}"]
        broadcast_object_list(message, from_process=0)
        self.message = message[0]
        if self.message is not None:
            control.should_training_stop = True
            control.should_save = state.global_step > self.saved_at
        return self.message is not None

    def on_train_begin(self, args, state: TrainerState, control: TrainerControl, **kwargs):
        self.error = self.message = None
        self.running, self.saved_at = True, state.global_step

    def on_epoch_end(self, args, state: TrainerState, control: TrainerControl, **kwargs):
        self.agree(control, state)

    def on_save(self, args, state: TrainerState, control: TrainerControl, **kwargs):
        self.saved_at = state.global_step
