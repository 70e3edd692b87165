"""
Asynchronous GRPO with rollout correction.

TRL's loss takes two tensors out of the batch, the advantages and the sampler's log-probabilities, runs the model once,
and combines the three. Here it gets placeholders ([`~trl_rollout_corr.asynchronous.placeholders.Placeholder`]), which
are filled after the forward pass. So the correction knows the log-probabilities of the policy without another forward
pass.

`B` completions of this rank's row, `T` tokens from the first of the loss to the last of a completion.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from ..pushes.server_api import check_served_adapter
from ..settings.config import RolloutCorrectionConfig
from ..trainers.batches import TAGS, BatchCorrectionMixin
from ..trainers.keys import NOT_GIVEN, PADDING, REWARDS, ROLLOUT_LOGPS, ROLLOUT_STEP
from ..trainers.metadata import engine_metadata
from ..trainers.model_checks import check_types
from ..trainers.observer import CorrectedBatch
from ..trainers.ranks import leaving_together
from ..trainers.trl_checks import WarnIfUnreadMixin
from ..trainers.trl_interface import check_bases, check_trl, with_parameters_of
from .checks import CHECKS
from .packing import Terms, with_a_term
from .placeholders import CorrectedPolicy, Placeholder
from .samples import ADVANTAGES, TERMS, TEXT, TEXT_PREFIX, TOOLS, AnnotatedSamples, LayoutCollator, WatchedQueue
from .server_pushes import PushesToServer
from .stopping import drain_at_stop
from .trl_parts import METHODS, AsyncGRPOConfig, AsyncGRPOTrainer, AsyncRolloutWorker


LOSS_MASK = "loss_mask"  # (B, T)


@dataclass
class RolloutCorrectedAsyncGRPOConfig(RolloutCorrectionConfig, WarnIfUnreadMixin, AsyncGRPOConfig):
    r"""
    Configuration class for the [`RolloutCorrectedAsyncGRPOTrainer`].

    It takes all parameters of TRL's `AsyncGRPOConfig` and of [`RolloutCorrectionConfig`].

    Raises:
        `ValueError`: also if batch normalisation would average over a single sequence.
    """

    _trainer = "async_grpo"
    _checks_of_trainer = CHECKS

    def __post_init__(self) -> None:
        RolloutCorrectionConfig.__post_init__(self)
        AsyncGRPOConfig.__post_init__(self)
        self.check()


class RolloutCorrectedAsyncGRPOTrainer(BatchCorrectionMixin, AsyncGRPOTrainer):
    r"""
    TRL's `AsyncGRPOTrainer` that corrects for the age of its samples and for the mismatch between vLLM and the
    trainer.

    The trainer takes the arguments of `AsyncGRPOTrainer`, with a [`RolloutCorrectedAsyncGRPOConfig`] as `args`. With
    `rollout_metrics_only=True`, or with neither weights nor rejection nor bypass, losses and gradients are TRL's, bit
    for bit: PPO clipped around the sampler, which is `bypass_ppo_clip` without the bound of `rollout_clip_ratio_c`.

    Differences from TRL, each as `super()` with changed arguments or results: `__init__` (checks, monitor, dump),
    `compute_loss` (the correction), `get_train_dataloader` (age and reward of each sample), `_sync_weight` (optimizer
    step of each version of the weights), `train` and `log`
    ([`~trl_rollout_corr.trainers.batches.BatchCorrectionMixin`]).

    TRL's trainer needs GPUs. `examples/async_on_cpu.py` shows what it takes to run on a CPU.

    Attributes:
        rollout_step (`int`, *optional*):
            Optimizer step of the server's weights, if they are older than the trainer's on purpose.

    Example:

    ```python
    from datasets import load_dataset
    from trl.rewards import accuracy_reward
    from trl_rollout_corr import RolloutCorrectedAsyncGRPOConfig, RolloutCorrectedAsyncGRPOTrainer

    # VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen2.5-0.5B-Instruct --weight-transfer-config '{"backend":"nccl"}' \
    #     --logprobs-mode processed_logprobs
    trainer = RolloutCorrectedAsyncGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=RolloutCorrectedAsyncGRPOConfig("output", rollout_correction="auto"),
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    )
    trainer.train()
    ```
    """

    rollout_step: int | None = None
    # Defaults, as in `RolloutCorrectionMixin`: TRL's own tests call methods of a trainer that was never initialised
    _watched_queue: WatchedQueue | None = None  # on the main process
    _server_checked = False

    _trl_class = AsyncGRPOTrainer
    _config_class = RolloutCorrectedAsyncGRPOConfig
    _tag_names = [*AsyncGRPOTrainer._tag_names, *TAGS]

    @with_parameters_of(AsyncGRPOTrainer.__init__)
    def __init__(
        self,
        model: str,
        reward_funcs: object = None,
        args: RolloutCorrectedAsyncGRPOConfig | None = None,
        *further_args: object,
        **kwargs: object,
    ) -> None:
        check_trl(AsyncGRPOTrainer, METHODS)
        check_bases(type(self), RolloutCorrectedAsyncGRPOTrainer, AsyncGRPOTrainer, method="compute_loss")
        config = self._read_settings(model, args)
        super().__init__(model, reward_funcs, config, *further_args, **kwargs)
        self._step_of_version: dict[int, int] = {}
        if isinstance(self.rollout_worker, AsyncRolloutWorker):  # only on the main process
            drain_at_stop(self.rollout_worker)
        self._pushes = PushesToServer(self)
        with leaving_together(self.accelerator):
            if self._pushes.is_adapter and self._pushes.server is not None:
                check_served_adapter(self._pushes.server, self._bare(self.model))
        self._set_up_observer()

    def _metadata(self) -> dict[str, str]:
        return {**super()._metadata(), "pushed": "adapter" if self._pushes.is_adapter else "weights"}

    # Samples ---------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        dataloader = super().get_train_dataloader()
        if self.accelerator.is_main_process:  # only the main process takes and packs samples
            self._wrap_samples(dataloader)
        return cast(DataLoader, dataloader)

    def _wrap_samples(self, dataloader: Any) -> None:
        """Keep age and reward of samples, and add the layout of their tokens to the batch."""
        samples, batcher = self._rollout_dataset, dataloader.dataset
        samples.queue = self._watched_queue = WatchedQueue(samples.queue)
        batcher.dataset = AnnotatedSamples(samples, self._watched_queue, self._step_of_version)
        with_text = any(watcher.reads_text for watcher in self._watchers) or bool(self._pushes.server)
        inner = dataloader.base_dataloader  # Accelerate's data loader wraps torch's
        inner.collate_fn = LayoutCollator(inner.collate_fn, with_text, self.processing_class.pad_token_id)

    def _sync_weight(self) -> None:
        if not self._server_checked:
            self._check_server()
        self._pushes.push(super()._sync_weight)
        self._step_of_version[self.model_version] = self.state.global_step

    def _check_server(self) -> None:
        self._server_checked = True
        self._read_server(self._pushes.server)
        self._about |= engine_metadata(self._engine_config)  # in place, for the dump
        check_types(self._about)

    # The loss --------------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        inputs, terms = with_a_term(inputs), Terms(inputs[TERMS][0])
        batch = self._completions_of(inputs, terms)
        self._pushes.keep(batch, terms.mask)  # may score texts, which is no part of the forward pass below
        placeholders = {key: Placeholder(inputs[key]) for key in ("advantages", "old_log_probs")}
        correct = partial(
            self._correct_micro_batch, inputs=inputs, terms=terms, batch=batch, placeholders=placeholders
        )
        policy = CorrectedPolicy(model, correct)
        loss: torch.Tensor = super().compute_loss(
            policy, {**inputs, **placeholders}, return_outputs, num_items_in_batch
        )
        if policy.forwards != 1 or not all(x.was_taken for x in placeholders.values()):
            raise RuntimeError(
                f"The loss of `{type(self).__name__}` ran the policy {policy.forwards} times instead of once, or did "
                "not take `advantages` and `old_log_probs` out of the batch before. Install the version of trl that "
                "this release was tested with."
            )
        return loss

    @torch.no_grad()
    def _correct_micro_batch(
        self,
        output: Any,
        inputs: Mapping[str, Any],
        terms: Terms,
        batch: dict[str, Any],
        placeholders: Mapping[str, Placeholder],
    ) -> None:
        """Correct a micro-batch after its forward pass, and fill the placeholders in TRL's loss."""
        selected = inputs["token_index"] >= 0
        index = inputs["token_index"][selected]
        logps = output.log_probs.detach().flatten()[index]
        anchor, corrected = self._anchor_and_correction(terms.spread(logps), batch)
        n_dropped = self._watched_queue.take_dropped() if self._watched_queue is not None else 0
        self._observer.add_completions(self._now, corrected.mask, n_dropped)
        advantages, old = inputs["advantages"][selected], inputs["old_log_probs"][selected]
        if self._settings.changes_loss:
            advantages = advantages * terms.collect(corrected.coefficients, torch.zeros_like(logps))
            old = terms.collect(anchor, logps)
        else:
            # Without a number of the sampler, a ratio is 1, as in TRL's other trainers. A ratio that is infinite is
            # beyond every clip range, and has no gradient
            ratio = (logps - old).exp()
            known = ratio.isfinite() & (old != NOT_GIVEN)
            advantages, old = advantages.masked_fill(ratio.isinf(), 0.0), torch.where(known, old, logps)
        placeholders["advantages"].fill(selected, advantages)
        placeholders["old_log_probs"].fill(selected, old)

    @staticmethod
    def _completions_of(inputs: Mapping[str, Any], terms: Terms) -> dict[str, Any]:
        """Row of this rank as completions, with the keys of the other trainers."""
        selected = inputs["token_index"] >= 0
        batch: dict[str, Any] = {
            LOSS_MASK: terms.mask,
            ROLLOUT_LOGPS: terms.spread(inputs["old_log_probs"][selected]),
            "advantages": inputs[ADVANTAGES][0],
            REWARDS: inputs[REWARDS][0],
            ROLLOUT_STEP: inputs[ROLLOUT_STEP][0],
            PADDING: torch.zeros_like(inputs[ROLLOUT_STEP][0]),  # rows are packed
        }
        if TOOLS in inputs:
            batch["tool_mask"] = terms.mask
        return batch | {key: inputs[TEXT_PREFIX + key][0] for key in TEXT if TEXT_PREFIX + key in inputs}

    def _loss_mask(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return batch[LOSS_MASK]

    def _anchor_and_correction(
        self, current: torch.Tensor, batch: dict[str, Any]
    ) -> tuple[torch.Tensor, CorrectedBatch]:
        """Anchor of the ratio, `(B, T)`, and the corrected batch."""
        # A sample is visited once. In decoupled mode the old policy is therefore the current one, and the ratio of PPO
        # is 1.
        self._observer.add_visit(self._now, self._ages(batch), batch[LOSS_MASK], current, current)
        corrected = self._correct_from(current, batch, from_old=False)  # the current policy is newer than the sampler
        anchor = current
        if self._settings.bypass_mode and self._settings.changes_loss:
            anchor, corrected = self._bypass(corrected)
        self._record(corrected)
        return anchor, corrected

    def _anchor_in_bypass(self, corrected: CorrectedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        anchor, coefficients = super()._anchor_in_bypass(corrected)
        bound = self._settings.rollout_clip_ratio_c
        if self._settings.clips_around_sampler and bound is not None:
            negative = corrected.batch["advantages"].unsqueeze(1) < 0
            coefficients = coefficients.masked_fill(negative & (corrected.train_logps - anchor > math.log(bound)), 0.0)
        return anchor, coefficients
