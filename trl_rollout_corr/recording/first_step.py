"""The diagnosis of the first step: `rollout_diagnose`."""

from collections.abc import Callable
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..diagnosis import DumpedTokens, diagnose
from ..diagnosis.text import write_text
from ..dumps.rows import make_row, on_host
from ..dumps.sequences import Sequences
from ..settings.config import RolloutCorrectionConfig
from .run_metadata import settings_in_effect


ROWS = 64  # sequences of a diagnosis
AGAIN = 8  # sequences that are scored a second time


class FirstStepDiagnosis(TrainerCallback):
    """Collects sequences of the first optimizer step of a run, and prints their `diagnosis` on the main process at its end."""

    def __init__(self, args: RolloutCorrectionConfig, about: dict[str, str]) -> None:
        self.args, self.about = args, about
        self.rows: list[dict[str, Any]] = []
        self.looked = False  # True once sequences were scored a second time
        self.done = False
        self.diagnosis: Any = None

    def wants(self, step: int) -> bool:
        """True if sequences of an optimizer step are collected."""
        return not self.done and len(self.rows) < ROWS

    def looks_twice(self) -> bool:
        """True for the first batch, whose sequences are scored a second time. The same on all ranks."""
        first, self.looked = not self.looked and not self.done, True
        return first

    def offer(self, step: int, batch: dict[str, torch.Tensor], columns: dict[str, Any]) -> None:
        """Take the sequences of a batch, as [`~trl_rollout_corr.recording.dumping.SequenceDump.offer`] does."""
        mask = columns["mask"]
        missing = torch.arange(min(len(mask), ROWS - len(self.rows)), device=mask.device)
        self.rows += [make_row(sequence, step) for sequence in on_host({**batch, **columns}, missing)]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        rows, self.rows = self.rows, []
        if self.done or not rows:
            return
        self.done = True
        if state.is_world_process_zero:
            try:
                observed = DumpedTokens(Sequences.from_rows(rows), settings_in_effect(self.args), self.about)
                self.diagnosis = diagnose(observed)
                text = write_text(self.diagnosis)
            except Exception as error:  # an error of the diagnosis must not end the run
                text = f"No diagnosis of the first step: {error}.\n"
            tqdm.write(f"Diagnosis of step {state.global_step}. {text}".rstrip())


def score_alone(forward: Callable[..., tuple], batch: dict[str, Any], most: int = AGAIN) -> torch.Tensor:
    """Log-probabilities `(B, T)` in nats of the first sequences of a batch, one by one without padding; else NaN."""
    logps = torch.full(batch["completion_ids"].shape, torch.nan, device=batch["completion_ids"].device)
    devices = [logps.device] if logps.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        for i in range(min(most, len(logps))):
            prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()]
            mask = batch["completion_mask"][i].bool()
            completion = batch["completion_ids"][i][mask]
            # every rank makes as many forward passes, also for a completion that TRL masks as a whole
            ids = torch.cat([prompt, completion if len(completion) else batch["completion_ids"][i][:1]])[None]
            n = max(len(completion), 1)
            scored = forward(i, ids, torch.ones_like(ids), n)[0][0].float()
            logps[i, : len(completion)] = scored[: len(completion)]
    return logps
