"""
What a trainer sees of its correction: metrics, the age of the data, a histogram and the dump. Nothing here changes the loss.

`B` completions, `T` completion tokens.
"""

from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from transformers.trainer_callback import CallbackHandler

from ..correction.accounting import Accounts, account, turns_of
from ..correction.ages import Ages, Intake
from ..correction.compute import RolloutCorrection
from ..correction.metrics import Statistics
from ..correction.staleness import Staleness, age, engine_drift, lag, update_drift
from ..correction.step_size import StepSize
from ..correction.sums import Segments, Sums
from ..settings.config import RolloutCorrectionConfig
from .batch import AGAIN_LOGPS, REWARDS, ROLLOUT_LOGPS, ROLLOUT_STEP
from .dumping import SequenceDump
from .preflight import Preflight
from .reporting import report_histogram


class Moment(NamedTuple):
    """
    When something is observed.

    Args:
        mode (`str`):
            `"train"` or `"eval"`.
        step (`int`):
            Optimizer steps made so far.
    """

    mode: str
    step: int


class Corrected(NamedTuple):
    """
    A batch and its correction.

    Args:
        batch (`dict`):
            TRL's batch.
        mask (`torch.Tensor` of shape `(B, T)`):
            Non-zero on the tokens of the loss.
        train_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the policy that was corrected for, in nats.
        correction ([`~trl_rollout_corr.correction.compute.RolloutCorrection`]):
            Its correction.
        coefficients (`torch.Tensor` of shape `(B, T)`):
            What multiplies the policy gradient of each token.
        from_old (`bool`):
            Whether the policy that was corrected for is the one that the trainer had when the batch was generated.
    """

    batch: dict[str, Any]
    mask: torch.Tensor
    train_logps: torch.Tensor
    correction: RolloutCorrection
    coefficients: torch.Tensor
    from_old: bool


class Observer:
    """
    Adds up what is reported, until it is logged.

    Args:
        args ([`RolloutCorrectionConfig`]):
            Configuration of the trainer.
        accelerator ([`~accelerate.Accelerator`]):
            Knows the other ranks.
        callbacks ([`~transformers.trainer_callback.CallbackHandler`]):
            Callbacks of the trainer, some of which report.
        dump ([`~trl_rollout_corr.trainers.dumping.SequenceDump`], *optional*):
            Where sequences are written to.
        preflight ([`~trl_rollout_corr.trainers.preflight.Preflight`], *optional*):
            Where those of the first step are diagnosed.
    """

    def __init__(
        self,
        args: RolloutCorrectionConfig,
        accelerator: Accelerator,
        callbacks: CallbackHandler,
        dump: SequenceDump | None = None,
        preflight: Preflight | None = None,
    ):
        self.args, self.accelerator, self.callbacks = args, accelerator, callbacks
        self.dump, self.preflight = dump, preflight
        self.windows = {mode: LoggingWindow(accelerator) for mode in ("train", "eval")}

    def generated(self, now: Moment, rollout_steps: torch.Tensor):
        """Count how far the sampler was behind. `rollout_steps` of shape `(B,)`: optimizer steps of its weights."""
        self._add_ages(now, lag(now.step - rollout_steps))

    def visited(
        self,
        now: Moment,
        batch: dict[str, Any],
        mask: torch.Tensor,
        current_logps: torch.Tensor,
        old_logps: torch.Tensor | None,
    ):
        """
        Count optimizer steps since the weights that sampled, and the divergence of the policy since generation.

        Args:
            now ([`Moment`]):
                When the batch is trained on.
            batch (`dict`):
                The batch.
            mask (`torch.Tensor` of shape `(B, T)`):
                Non-zero on the tokens of the loss.
            current_logps (`torch.Tensor` of shape `(B, T)`):
                Log-probabilities of the current policy.
            old_logps (`torch.Tensor` of shape `(B, T)`, *optional*):
                Log-probabilities of the policy that the trainer had when the batch was generated, if they are known.
        """
        if ROLLOUT_STEP in batch:
            self._add_ages(now, age(now.step - batch[ROLLOUT_STEP]))
        if old_logps is not None and old_logps is not current_logps:
            self._add_ages(now, update_drift(old_logps, current_logps, mask))

    def corrected(self, now: Moment, seen: Corrected):
        """Count a batch that was corrected, and offer it to the dump."""
        batch, correction = seen.batch, seen.correction
        turns = turns_of(seen.mask) if "tool_mask" in batch else None
        window = self.windows[now.mode]
        window.add(correction.statistics)
        window.add(
            account(
                correction.valid,
                correction.keep,
                seen.coefficients,
                batch["advantages"],
                batch[REWARDS],
                turns,
            )
        )
        if seen.from_old:
            self._add_ages(now, engine_drift(correction.statistics))
        step = now.step + 1  # the one that trains on it
        collectors = (self.dump, self.preflight) if now.mode == "train" else ()
        for collector in collectors:
            if collector is not None and collector.wants(step):
                collector.offer(step, *_columns(seen, now.step))

    def looks_twice(self, now: Moment) -> bool:
        """Whether some sequences of the batch at hand are to be scored a second time."""
        return now.mode == "train" and self.preflight is not None and self.preflight.looks_twice()

    def close_window(self, now: Moment) -> dict[str, float]:
        """
        Metrics of the logging window that ends, of all ranks. Its histogram goes to the trackers that draw one.

        Args:
            now ([`Moment`]):
                When it ends.

        Returns:
            `dict[str, float]`: metrics by key (`rollout_corr/...`).
        """
        sums = self.windows[now.mode].close()
        metrics: dict[str, float] = {}
        if (statistics := sums.get(Statistics)) is not None:
            metrics |= statistics.finish()
            if self.accelerator.is_main_process:
                counts, edges = statistics.histogram()
                report_histogram(self.callbacks, counts, edges, now.mode, now.step)
        if (staleness := sums.get(Staleness)) is not None:
            metrics |= staleness.finish()
        if (accounts := sums.get(Accounts)) is not None:
            metrics |= accounts.finish(rejects=self.args.rollout_rs is not None, weighs=self.args.applies_weights)
        if (ages := sums.get(Ages)) is not None:
            metrics |= ages.finish(rejects=self.args.rollout_rs is not None, corrects=self.args.corrects)
        if (intake := sums.get(Intake)) is not None:
            metrics |= intake.finish()
        if (step_size := sums.get(StepSize)) is not None:
            metrics |= step_size.finish()
        return metrics

    def _add_ages(self, now: Moment, segments: Segments):
        self.windows[now.mode].add(Staleness.of(segments))


class LoggingWindow:
    """
    Sums of one logging window, on the device of this rank.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Knows the other ranks.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.sums: dict[type[Sums], Any] = {}

    def add(self, sums: Sums):
        """Add what one batch contributes. If settings have changed since the window began, it begins anew."""
        kind, before = type(sums), self.sums.get(type(sums))
        self.sums[kind] = sums if before is None or not before.fits(sums) else before + sums

    def close(self) -> dict[type[Sums], Any]:
        """Sums of all ranks by their kind, in one gather, on the host. The window is empty afterwards."""
        window, self.sums = self.sums, {}
        if not window:
            return {}
        kinds = sorted(window, key=lambda kind: kind.__name__)  # the same order on all ranks
        vectors = [window[kind].vector for kind in kinds]
        everywhere = self.accelerator.gather(torch.cat(vectors)[None]).cpu()
        parts = everywhere.split([len(vector) for vector in vectors], dim=1)
        return {kind: window[kind].combine(part) for kind, part in zip(kinds, parts, strict=True)}


def _columns(seen: Corrected, step: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor | None]]:
    """What the dump holds of a batch: tokens as TRL has them, and tensors of shape `(B, T)` or `(B,)` by column."""
    batch, advantages = seen.batch, seen.batch["advantages"]
    tokens = {name: batch[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    return tokens, {
        "mask": seen.mask.bool(),
        "train_logps": seen.train_logps,
        "rollout_logps": batch[ROLLOUT_LOGPS],
        "weights": seen.correction.weights,
        "keep": seen.correction.keep,
        "coefficients": seen.coefficients,
        "reward": batch[REWARDS],
        "advantage": advantages if advantages.dim() == 1 else advantages.mean(1),
        "staleness": step - batch[ROLLOUT_STEP] if ROLLOUT_STEP in batch else None,
        "again_logps": batch.get(AGAIN_LOGPS),
    }
