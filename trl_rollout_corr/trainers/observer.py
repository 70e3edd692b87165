"""
Metrics of a trainer's correction and the age of its data. Nothing here changes the loss.

`B` completions, `T` completion tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from ..correction.age import Staleness, count_ages, count_completions, count_lags, engine_gap, update_gap
from ..correction.compute import RolloutCorrection
from ..correction.functional import turns_of
from ..correction.groups import add_up_groups
from ..correction.sums import Sums
from ..settings.resolve import Settings
from .keys import REWARDS, ROLLOUT_LOGPS, TURN_IDS


class Moment(NamedTuple):
    """Mode and step of an observation."""

    mode: str  # "train" or "eval"
    step: int  # optimizer steps made so far


class CorrectedBatch(NamedTuple):
    """A batch and its correction."""

    batch: dict[str, Any]
    mask: torch.Tensor  # (B, T), non-zero on the tokens of the loss
    train_logps: torch.Tensor  # (B, T), of the policy that was corrected for, in nats
    correction: RolloutCorrection
    coefficients: torch.Tensor  # (B, T), factor of the policy gradient of each token
    from_old: bool  # `train_logps` are of the old policy: the trainer's when the batch was generated
    ages: torch.Tensor | None  # (B,), optimizer steps between the weights that sampled and that train; NaN if unknown
    lags: torch.Tensor | None  # (B,), of these the steps before the weights of `train_logps`


class Observer:
    """
    Adds up metrics until they are logged.

    Each forward pass of a micro-batch in the loss goes to [`Observer.add_visit`]. A batch goes to
    [`Observer.add_correction`] once in decoupled mode, at its first visit or before it, and in bypass mode at every
    visit, because the correction depends on the current policy.
    """

    def __init__(self, settings: Settings, accelerator: Accelerator) -> None:
        self.settings, self.accelerator = settings, accelerator
        self.restart()

    def restart(self) -> None:
        """Forget all sums."""
        self.windows = {mode: LoggingWindow(self.accelerator) for mode in ("train", "eval")}

    def add(self, mode: str, sums: Sums) -> None:
        """Add sums to the logging window of a mode, `"train"` or `"eval"`."""
        self.windows[mode].add(sums)

    def add_visit(
        self,
        now: Moment,
        ages: torch.Tensor | None,
        mask: torch.Tensor,
        current_logps: torch.Tensor,
        old_logps: torch.Tensor | None,
    ) -> None:
        """Count ages, `(B,)` in optimizer steps, and the gap of current to old policy, `(B, T)`."""
        # Also without ages, which another rank may know: all ranks gather the same kinds of sums
        known = torch.full((1,), torch.nan, device=mask.device) if ages is None else ages
        self.add(now.mode, Staleness.of(count_ages(known)))
        if old_logps is not None and old_logps is not current_logps:
            self.add(now.mode, Staleness.of(update_gap(old_logps, current_logps, mask)))

    def add_completions(self, now: Moment, mask: torch.Tensor, n_dropped: int) -> None:
        """Count a batch's completions by its mask, `(B, T)`, and `n_dropped` ones as too old."""
        self.add(now.mode, Staleness.of(count_completions(mask, n_dropped)))

    def add_correction(self, now: Moment, corrected: CorrectedBatch) -> None:
        """Count a corrected batch."""
        batch, correction = corrected.batch, corrected.correction
        turns = log_ratio = None
        if "tool_mask" in batch or TURN_IDS in batch:
            turns = turns_of(corrected.mask, batch.get(TURN_IDS))
            log_ratio = corrected.train_logps - batch[ROLLOUT_LOGPS]
        self.add(now.mode, correction.statistics)
        of_advantages = corrected.coefficients, batch["advantages"], batch[REWARDS]
        groups = add_up_groups(correction.valid, correction.keep, *of_advantages, turns, log_ratio)
        self.add(now.mode, groups)
        self.add(now.mode, Staleness.of(count_lags(corrected.lags, corrected.mask)))
        if corrected.from_old:
            self.add(now.mode, Staleness.of(engine_gap(correction.statistics)))

    def close_step(self, step: int) -> None:
        """End an optimizer step. All ranks must call it, because it gathers the sums."""
        self.windows["train"].close_step(step)

    def read_steps(self, before: int | None = None) -> list[dict[str, float]]:
        """
        Metrics of each optimizer step that was closed and not read yet, over all ranks, each with its `step`. The sums
        of a step reach the host by the end of the next step, so reading steps `before` that one waits for nothing.
        """
        window = self.windows["train"]
        now = [step for step in window.unread if before is None or step.step < before]
        window.unread = window.unread[len(now) :]
        return [{**self._finish(step.sums), "step": step.step} for step in now]

    def close_window(self, now: Moment) -> dict[str, float]:
        """Close the logging window, and return its metrics over all ranks."""
        return self._finish(self.windows[now.mode].close(now.step))

    def _finish(self, window: Sequence[Sums]) -> dict[str, float]:
        settings, metrics = self.settings, dict[str, float]()
        rejects, weighs = bool(settings.criteria), settings.applies_weights
        for sums in window:
            metrics |= sums.finish(rejects=rejects, weighs=weighs)
        return metrics


class LoggingWindow:
    """Sums of one logging window on this rank's device, and of each completed optimizer step."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.sums: dict[type[Sums], Any] = {}  # of this rank, since the last closed step
        self.total: dict[type[Sums], Any] = {}  # of all ranks and closed steps
        self.unread: list[StepSums] = []  # steps that `Observer.read_steps` did not read yet

    def add(self, sums: Sums) -> None:
        """Add the sums of one batch."""
        _add(self.sums, sums)

    def close_step(self, step: int) -> None:
        """End an optimizer step: gather its sums over all ranks, without waiting for them."""
        if everywhere := self._gather():
            self.unread.append(StepSums(step, everywhere))

    def _gather(self) -> list[Any]:
        """Sums since the last step over all ranks. They are also added to the total."""
        sums, self.sums = self.sums, {}
        if not sums:
            return []
        kinds = sorted(sums, key=lambda kind: kind.__name__)  # the same order on all ranks
        vectors = [sums[kind].vector for kind in kinds]
        parts = self.accelerator.gather(torch.cat(vectors)[None]).split([len(v) for v in vectors], dim=1)
        everywhere = [sums[kind].combine(part) for kind, part in zip(kinds, parts, strict=True)]
        for part in everywhere:
            _add(self.total, part)
        return everywhere

    def close(self, step: int) -> list[Sums]:
        """Sums of all ranks and steps, on the host. The window is empty afterwards."""
        self._gather()
        total, self.total = self.total, {}
        return StepSums(step, [*total.values()]).sums if total else []


def _add(totals: dict[type[Sums], Any], sums: Sums) -> None:
    """Add sums to the sums of the same kind."""
    before = totals.get(type(sums))
    totals[type(sums)] = sums if before is None else before + sums


class StepSums:
    """Sums of one optimizer step over all ranks, on their way from the device to the host."""

    def __init__(self, step: int, sums: Sequence[Sums]) -> None:
        self.step, self._layouts = step, sums
        self._vectors, self._copied = torch.cat([part.vector for part in sums]), None
        if self._vectors.is_cuda:
            # A copy to pinned memory does not stop the host. `sums` waits for it, but later, when it is usually done.
            host = torch.empty_like(self._vectors, device="cpu", pin_memory=True)
            self._vectors = host.copy_(self._vectors, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    @cached_property
    def sums(self) -> list[Sums]:
        """The sums, on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        vectors = self._vectors.cpu().split([len(part.vector) for part in self._layouts])
        return [replace(part, vector=vector) for part, vector in zip(self._layouts, vectors, strict=True)]
