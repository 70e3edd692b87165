"""The diagnosis of the first step, for `rollout_diagnose`."""

from collections.abc import Callable
from typing import Any, Self

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from ...messages import tell
from ...settings.config import RolloutCorrectionConfig
from ...settings.resolve import Settings
from ...trainers.keys import AGAIN_LOGPS
from ...trainers.observer import CorrectedBatch, Moment
from ...trainers.watcher import Watcher
from ..dump.in_effect import settings_in_effect
from ..dump.rows import make_row, on_host
from ..dump.sequences import Sequences
from ..dump.writing import columns_of
from . import DumpedTokens, diagnose
from .text import write_text


ROWS = 64  # sequences of a diagnosis


class FirstStepDiagnosis(Watcher):
    """
    Collects sequences of the first optimizer step of a run, and prints their `diagnosis` on the main process at its
    end. With `score_alone`, some sequences of the first batch are scored a second time, one by one.
    """

    reads_text = True

    def __init__(
        self,
        args: RolloutCorrectionConfig,
        settings: Settings,
        about: dict[str, str],
        score_alone: Callable[[dict[str, Any]], torch.Tensor] | None = None,
    ) -> None:
        self._score_alone = score_alone
        self.args, self.settings, self.about = args, settings, about
        self.rows: list[dict[str, Any]] = []
        self.looked = False  # True once sequences were scored a second time
        self.done = False
        self.diagnosis: Any = None

    @classmethod
    def of(cls, trainer: Any) -> Self:
        # Sequences are scored one by one, which is impossible with images. This looks for a processor, because it is
        # the same on all ranks, and images may be on some.
        images = hasattr(trainer.processing_class, "image_processor")
        score_alone = None if images else getattr(trainer, "_score_alone", None)
        return cls(trainer.args, trainer._settings, trainer._about, score_alone)

    def on_batch_corrected(self, now: Moment, batch: CorrectedBatch) -> None:
        if now.mode != "train":
            return
        if self.looks_twice() and self._score_alone is not None:  # all ranks score
            batch.batch[AGAIN_LOGPS] = self._score_alone(batch.batch)  # for the dump as well
        if not self.done and len(self.rows) < ROWS:
            with self.outlived("No diagnosis of the first step"):
                self.offer(now.step + 1, *columns_of(batch))  # the optimizer step that trains on the batch

    def looks_twice(self) -> bool:
        """True for the first batch, whose sequences are scored a second time. All ranks get the same answer."""
        first, self.looked = not self.looked and not self.done, True
        return first

    def offer(self, step: int, batch: dict[str, torch.Tensor], columns: dict[str, Any]) -> None:
        """Take the sequences of a batch, as [`~trl_rollout_corr.tools.dump.writing.SequenceDump.offer`] does."""
        mask = columns["mask"]
        taken = torch.arange(min(len(mask), ROWS - len(self.rows)), device=mask.device)
        self.rows += [make_row(sequence, step) for sequence in on_host({**batch, **columns}, taken)]

    def begins(self, trainer: Any, checkpoint: object, *, everywhere: bool) -> None:
        self.rows = []  # a run that was interrupted within a step leaves some
        self.looked = self.done

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        rows, self.rows = self.rows, []
        if self.done or not rows:
            return
        self.done = True
        if state.is_world_process_zero:
            with self.outlived("No diagnosis of the first step"):
                written = settings_in_effect(self.args, self.settings)
                observed = DumpedTokens(Sequences.from_rows(rows), self.settings, written, self.about)
                self.diagnosis = diagnose(observed)
                tell(f"Diagnosis of step {state.global_step}. {write_text(self.diagnosis)}".rstrip())
