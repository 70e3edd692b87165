"""Selection of the sequences for the dump: some at random, and the worst, over all ranks."""

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedTokenizerBase, TrainerControl, TrainerState, TrainingArguments

from ...messages import notify, reason_of, warn, warn_idle
from ...settings.config import RolloutCorrectionConfig
from ...settings.resolve import Settings
from ...trainers.keys import AGAIN_LOGPS, PADDING, REWARDS, ROLLOUT_LOGPS, TURN_IDS
from ...trainers.observer import CorrectedBatch, Moment
from ...trainers.watcher import Watcher
from .claims import check_folder, claim
from .folder import append_log, remove_oldest, rewind, write_rows
from .in_effect import settings_in_effect
from .rows import Decoder, make_row, on_host, tokens_of


def columns_of(corrected: CorrectedBatch) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor | None]]:
    """Columns of the dump: tokens and masks as in TRL's batch, and tensors, `(B, T)` or `(B,)`, by column."""
    batch, advantages = corrected.batch, corrected.batch["advantages"]
    return tokens_of(batch), {
        "mask": corrected.mask.bool(),
        "train_logps": corrected.train_logps,
        "rollout_logps": batch[ROLLOUT_LOGPS],
        "weights": corrected.correction.weights,
        "keep": corrected.correction.keep,
        "coefficients": corrected.coefficients,
        "reward": batch[REWARDS],
        "advantage": advantages if advantages.dim() == 1 else _mean_over(corrected.mask, advantages),
        "advantages": advantages if advantages.shape == corrected.mask.shape else None,
        "staleness": corrected.ages,
        "again_logps": batch.get(AGAIN_LOGPS),
        "turn_ids": batch.get(TURN_IDS),
        "padding": batch.get(PADDING),
        "lag": corrected.lags,
    }


def _mean_over(mask: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """
    Mean advantage of each completion, `(B,)`, over its tokens of the loss, where each token has its own, `(B, T)`.
    """
    of_loss = mask.bool()
    return advantages.masked_fill(~of_loss, 0.0).sum(1) / of_loss.sum(1).clamp(min=1)


class Offered(NamedTuple):
    """A sequence that may go to the dump."""

    distance: float  # largest absolute log-ratio of its tokens; infinite without a finite log-probability
    chance: float  # random number in [0, 1); the sequences with the largest ones are drawn
    step: int  # optimizer step that trains on it
    sequence: dict[str, torch.Tensor | None]


class SequenceDump(Watcher):
    """
    Collects sequences during a step, and writes the drawn and the worst ones at its end. `about` describes the run.
    """

    def __init__(
        self,
        args: RolloutCorrectionConfig,
        settings: Settings,
        accelerator: Accelerator,
        tokenizer: PreTrainedTokenizerBase,
        seed: int = 0,
        about: dict[str, str] | None = None,
    ) -> None:
        self.args, self.accelerator = args, accelerator
        self.decoder = Decoder(tokenizer.decode)
        self.settings = settings
        self.seed = seed
        self.about = {} if about is None else about  # shared, because a server tells its types later
        self.folder = Path(self.settings.rollout_dump_dir or "")  # until training begins
        self.checkpoint: object = None  # path, or True for the latest, from which training resumes
        self.offered: list[Offered] = []
        self.n_batches = 0  # in this step
        self.next_step = self.settings.rollout_dump_steps
        self.unchecked = 0  # bytes written since the last look at the size of the folder
        self.gave_up = False

    reads_text = True

    @classmethod
    def check(cls, settings: Settings) -> None:
        check_folder(Path(settings.rollout_dump_dir or ""))

    @classmethod
    def of(cls, trainer: Any) -> Self:
        settings: Settings = trainer._settings
        if settings.rollout_dump_sampled == settings.rollout_dump_worst == 0:
            reason = (
                "`rollout_dump_sampled` and `rollout_dump_worst` are 0, so the folder gets the log and no sequence"
            )
            warn_idle("rollout_dump_dir", settings.rollout_dump_dir, reason)
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        return cls(trainer.args, settings, trainer.accelerator, tokenizer, trainer.args.seed, trainer._about)

    def begins(self, trainer: Any, checkpoint: object, *, everywhere: bool) -> None:
        self.checkpoint = checkpoint

    def on_batch_corrected(self, now: Moment, batch: CorrectedBatch) -> None:
        step = now.step + 1  # the optimizer step that trains on the batch
        if now.mode == "train" and self.wants(step):
            self._unless_it_fails(lambda: self.offer(step, *columns_of(batch)))

    def wants(self, step: int) -> bool:
        """True if an optimizer step is dumped: the due step, or the next one that corrects a batch."""
        return step >= self.next_step

    def offer(self, step: int, batch: dict[str, torch.Tensor], columns: dict[str, Any]) -> None:
        """Consider the sequences of a batch, with TRL's tokens and masks, `(B, T)`, and columns of the dump."""
        mask = columns["mask"]
        distance = (columns["train_logps"] - columns["rollout_logps"]).abs().nan_to_num(torch.inf, torch.inf)
        # a completion without a token of the loss, such as a truncated one that TRL masks, shows nothing
        distance = distance.masked_fill(~mask, 0.0).amax(1).masked_fill(~mask.any(1), -1.0).cpu()
        # separate random numbers, so that training draws the same ones with and without a dump
        seed = hash((self.seed, self.accelerator.process_index, step, self.n_batches))
        chance = torch.rand(len(distance), generator=torch.Generator().manual_seed(seed % 2**63))
        chance[distance < 0] = -1.0
        self.n_batches += 1
        chosen = self._chosen(distance, chance)
        for index, sequence in zip(chosen.tolist(), on_host({**batch, **columns}, chosen), strict=True):
            self.offered.append(Offered(distance[index].item(), chance[index].item(), step, sequence))
        self._thin_out()

    def _chosen(self, distance: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
        """Indices of the sequences of a batch that may be drawn or among the worst."""
        counts = (self.settings.rollout_dump_worst, self.settings.rollout_dump_sampled)
        top = [x.topk(min(k, len(x))).indices for x, k in zip((distance, chance), counts, strict=True)]
        chosen: torch.Tensor = torch.cat(top).unique()
        return chosen[chance[chosen] >= 0]

    def _thin_out(self) -> None:
        """Forget candidates that cannot be written any more."""
        if self.offered:
            self.offered = [self.offered[i] for i in self._chosen(*self._scores().unbind(1)).tolist()]

    def _scores(self) -> torch.Tensor:
        """`(N, 2)`: distance and chance of each candidate."""
        return torch.tensor([(offered.distance, offered.chance) for offered in self.offered])

    # Events ----------------------------------------------------------------------------------------------------------

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: object,
    ) -> None:
        self.offered, self.n_batches, self.gave_up = [], 0, False  # what an interrupted run left behind
        self.next_step = state.global_step + self.settings.rollout_dump_steps
        if self.next_step > state.max_steps:
            reason = (
                f"the run ends at step {state.max_steps} and begins at step {state.global_step}, so no sequence is "
                "dumped"
            )
            warn_idle("rollout_dump_steps", self.settings.rollout_dump_steps, reason)
        name = str(getattr(getattr(model, "config", None), "_name_or_path", ""))
        # the folder of a local model means nothing on other machines
        self.about["model"] = Path(name).name if os.path.isdir(name) else name
        self.about["date"] = datetime.now(UTC).date().isoformat()
        self.folder = self._claim(args.output_dir, state)
        if state.global_step and self.accelerator.is_local_main_process:
            # steps after the checkpoint are trained again
            rewind(self.folder, state.global_step, logs=state.is_world_process_zero)

    def _claim(self, output_dir: str, state: TrainerState) -> Path:
        """The folder of the dump, which the main process claims for all ranks."""
        elsewhere = (
            isinstance(self.checkpoint, str | Path)
            and Path(self.checkpoint).resolve().parent != Path(output_dir).resolve()
        )
        answer = ["", ""]  # folder, and error
        if state.is_world_process_zero:
            try:
                resumes = state.global_step > 0 and not elsewhere
                folder, sentence = claim(Path(self.settings.rollout_dump_dir or ""), output_dir, resumes=resumes)
                answer[0] = str(folder)
                if sentence:
                    notify(sentence)
            except (OSError, ValueError) as error:
                answer[1] = str(error)
        broadcast_object_list(answer)
        if answer[1]:
            raise ValueError(answer[1])
        return Path(answer[0])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if not self.wants(state.global_step):
            return
        drawn, worst, anywhere = self._among_all_ranks()
        offered, self.offered, self.n_batches = self.offered, [], 0
        if anywhere:  # the same on all ranks
            self.next_step = state.global_step + self.settings.rollout_dump_steps
        if drawn | worst:
            self._unless_it_fails(lambda: self._write(state.global_step, offered, drawn, worst))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if state.is_world_process_zero and logs:
            self._unless_it_fails(lambda: append_log(self.folder, {**logs, "step": state.global_step}))

    def _write(self, step: int, offered: list[Offered], drawn: set[int], worst: set[int]) -> None:
        rows = [self._row(offered[i], sampled=i in drawn, worst=i in worst) for i in sorted(drawn | worst)]
        written = settings_in_effect(self.args, self.settings)
        path = write_rows(self.folder, step, self.accelerator.process_index, rows, written, self.about)
        self.unchecked += path.stat().st_size
        limit = self.settings.rollout_dump_max_gb * 1e9
        # looking at every file at every step would take seconds on a network disk
        if self.unchecked * self.accelerator.num_processes > limit / 100:
            remove_oldest(self.folder, limit)
            self.unchecked = 0

    def _unless_it_fails(self, write: Callable[[], object]) -> None:
        """
        Write, but let no full disk and no other error end the run. Whatever happens, this rank still takes part in
        the gathers.
        """
        if self.gave_up:
            return
        try:
            write()
        except Exception as error:
            self.gave_up = True
            # on any rank, because it may happen on one only
            warn(
                f"The dump in {str(self.folder)!r} ends here: {reason_of(error).rstrip('.')}.",
                "rollout_dump_dir",
                on_any_rank=True,
            )

    def _among_all_ranks(self) -> tuple[set[int], set[int], bool]:
        """Indices on this rank of the drawn and the worst sequences of all ranks, and whether there are any."""
        size = self.settings.rollout_dump_worst + self.settings.rollout_dump_sampled
        scores = torch.full((1, size, 2), -1.0)
        if self.offered:
            scores[0, : len(self.offered)] = self._scores()
        # (ranks * size, 2)
        everywhere = self.accelerator.gather(scores.to(self.accelerator.device)).cpu().flatten(0, 1)
        first = self.accelerator.process_index * size
        chosen = []
        for column, count in ((1, self.settings.rollout_dump_sampled), (0, self.settings.rollout_dump_worst)):
            best = everywhere[:, column].topk(min(count, len(everywhere))).indices - first
            chosen.append({i for i in best.tolist() if 0 <= i < len(self.offered)})
        return chosen[0], chosen[1], bool((everywhere >= 0).any())

    def _row(self, offered: Offered, **chosen: bool) -> dict[str, Any]:
        rank = self.accelerator.process_index
        return make_row(offered.sequence, offered.step, rank=rank, decoder=self.decoder, **chosen)
