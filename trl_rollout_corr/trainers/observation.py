"""
What the trainers see of the correction: metrics, staleness, the monitor and the dump. Nothing here changes the loss.

`B` completions, `T` completion tokens.
"""

from typing import Any

import torch

from ..accounting import Segments, account, age, engine_drift, policy_drift, turns_of
from ..correction import RolloutCorrection
from ..sampler import announce_sync
from .dumping import SequenceDump
from .monitor import RolloutCorrectionMonitor
from .reporting import report_histogram
from .windows import LoggingWindow


# Keys of the batch that TRL shuffles and splits with everything else. The first two are TRL's names in GRPO.
OLD_LOGPS = "old_per_token_logps"
ROLLOUT_LOGPS = "sampling_per_token_logps"
COEFFICIENTS = "rollout_corr_coefficients"
FIRST_LOGPS = "rollout_corr_first_logps"
REWARDS = "rollout_corr_rewards"
ROLLOUT_STEP = "rollout_corr_step"


class ObservationMixin:
    """
    Observes what [`~trl_rollout_corr.trainers.mixin.RolloutCorrectionMixin`] does.

    Attributes:
        rollout_step (`int`, *optional*):
            Optimizer step of the weights that sample. Set when they are pushed to vLLM. Whoever samples with others (a
            `rollout_func`, an asynchronous sampler) sets it to theirs.
    """

    rollout_step: int | None = None

    def _start_observing(self):
        self._windows = {mode: LoggingWindow(self.accelerator) for mode in ("train", "eval")}
        if self.use_vllm:
            announce_sync(self.vllm_generation, self._mark_sync)
        self._add_monitor()
        self._dump = self._add_dump()

    def _add_monitor(self):
        """Add the monitor of the configuration, unless the user brings one."""
        handler, args = self.callback_handler, self.args
        if args.rollout_monitor is not None and not any(
            isinstance(callback, RolloutCorrectionMonitor) for callback in handler.callbacks
        ):
            monitor = RolloutCorrectionMonitor(
                args.rollout_monitor, args.rollout_monitor_preset, args.rollout_monitor_thresholds
            )
            handler.callbacks.insert(0, monitor)  # before those that report what it adds to the log

    def _add_dump(self) -> SequenceDump | None:
        """Add the dump, if there is one, and return it."""
        if self.args.rollout_dump_dir is None:
            return None
        dump = SequenceDump(
            self.args, self.accelerator, getattr(self.processing_class, "tokenizer", self.processing_class)
        )
        self.add_callback(dump)
        return dump

    def _mark_sync(self):
        self.rollout_step = self.state.global_step

    def _record_rewards(self, rewards: torch.Tensor, n: int):
        """Keep the rewards of the `n` completions of this rank, `(n,)`, from those of all ranks and reward functions."""
        weights = self.reward_weights.to(rewards.device)
        total = (rewards * weights).nansum(1).masked_fill(rewards.isnan().all(1), torch.nan)
        first = self.accelerator.process_index * n
        self._recorded_rewards = total[first : first + n]

    def _record(
        self,
        train_logps: torch.Tensor,
        batch: dict[str, Any],
        correction: RolloutCorrection,
        coefficients: torch.Tensor,
    ):
        """
        Add a batch to what is reported and dumped.

        Args:
            train_logps (`torch.Tensor` of shape `(B, T)`):
                Log-probabilities of the policy that was corrected for.
            batch (`dict`):
                The batch.
            correction ([`~trl_rollout_corr.correction.RolloutCorrection`]):
                Its correction.
            coefficients (`torch.Tensor` of shape `(B, T)`):
                What multiplies the policy gradient of each token.
        """
        mask = self._loss_mask(batch)
        turns = turns_of(mask) if "tool_mask" in batch else None
        segments = account(correction.valid, correction.keep, coefficients, batch["advantages"], batch[REWARDS], turns)
        if self._is_old(train_logps, batch):
            segments |= engine_drift(correction.statistics)
        self._window.add(correction.statistics, segments)
        if self._dump is not None and self.model.training:
            self._offer_to_dump(train_logps, batch, correction, coefficients)

    def _is_old(self, train_logps: torch.Tensor, batch: dict[str, Any]) -> bool:
        """Whether log-probabilities are those of the policy that the trainer had when the batch was generated."""
        return not self.args.bypass_mode or batch.get(FIRST_LOGPS) is train_logps

    def _record_staleness(self, current: torch.Tensor, batch: dict[str, Any]):
        """Count optimizer steps since the weights that sampled, and the divergence of the policy since generation."""
        segments: Segments = {}
        if ROLLOUT_STEP in batch:
            segments |= age("steps", self.state.global_step - batch[ROLLOUT_STEP])
        if self._visited_before_update or not self.model.training:
            old = batch.setdefault(FIRST_LOGPS, current)
        else:
            old = batch.get(OLD_LOGPS)
        if old is not None and old is not current:
            segments |= policy_drift(old, current, self._loss_mask(batch))
        self._window.add(None, segments)

    def _note_origin(self, output: dict[str, Any]):
        """Note the rewards of a batch, and which weights sampled it, for as long as it is trained on."""
        output[REWARDS] = self._recorded_rewards
        if self.rollout_step is not None:
            steps = torch.full_like(output["advantages"], self.rollout_step, dtype=torch.long)
            output[ROLLOUT_STEP] = steps if steps.dim() == 1 else steps[:, 0]
            self._window.add(None, age("lag", self.state.global_step - output[ROLLOUT_STEP]))

    def _offer_to_dump(
        self,
        train_logps: torch.Tensor,
        batch: dict[str, Any],
        correction: RolloutCorrection,
        coefficients: torch.Tensor,
    ):
        step = self.state.global_step + 1
        if not self._dump.wants(step):
            return
        advantages = batch["advantages"]
        columns = {
            "mask": self._loss_mask(batch).bool(),
            "train_logps": train_logps,
            "rollout_logps": batch[ROLLOUT_LOGPS],
            "weights": correction.weights,
            "keep": correction.keep,
            "coefficients": coefficients,
            "reward": batch[REWARDS],
            "advantage": advantages if advantages.dim() == 1 else advantages.mean(1),
            "staleness": self.state.global_step - batch[ROLLOUT_STEP] if ROLLOUT_STEP in batch else None,
        }
        tokens = {name: batch[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
        self._dump.offer(step, tokens, columns)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Trainer reports losses and runtimes on every rank; anything else may come from user code on one rank, where the
        # gather below would wait forever.
        if "loss" in logs or any(key.endswith("_runtime") for key in logs):
            self._metrics[self._mode].update({key: [value] for key, value in self._close_window().items()})
        super().log(logs, start_time)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _window(self) -> LoggingWindow:
        return self._windows[self._mode]

    def _close_window(self) -> dict[str, float]:
        """Metrics of the logging window that ends, of all ranks."""
        statistics, accounts = self._window.close()
        metrics = {}
        if statistics is not None:
            metrics |= statistics.finish()
            if self.is_world_process_zero():
                report_histogram(self, *statistics.histogram(), self._mode)
        if accounts is not None:
            metrics |= accounts.finish(rejects=self.args.rollout_rs is not None, weighs=self.args.applies_weights)
        return metrics
