"""
The seam into TRL, shared by the trainers.

TRL's trainers call one method for every forward pass of a policy, `_get_per_token_logps_and_entropies`. The mixin overrides
it:

- *in the loss*, [`RolloutCorrectionMixin._correct`] gets the log-probabilities of the current policy before TRL does. TRL
  reads the anchor of the ratio and the advantages only afterwards, so a correction needs no forward pass of its own;
- *while scoring*, TRL's first call computes the log-probabilities of the *old* policy. If they are not needed, the call
  returns without a forward pass ([`~trl_rollout_corr.trainers.scoring.OldPass`]).

`B` completions, `T` completion tokens.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel

from ..correction.compute import keep_mask
from ..settings.config import RolloutCorrectionConfig
from .batch import (
    AGAIN_LOGPS,
    COEFFICIENTS,
    FIRST_COEFFICIENTS,
    FIRST_LOGPS,
    OLD_LOGPS,
    REWARDS,
    ROLLOUT_LOGPS,
    ROLLOUT_STEP,
    SUPPORT,
    SUPPORT_SIZES,
    TURN_IDS,
)
from .core import CorrectionCore
from .engine import engine_arguments
from .first_step import score_alone
from .gradient_check import GradientCheck
from .loss import LossCall
from .observer import Corrected
from .pushes import PushesToVLLM
from .routed import RoutingReplay
from .sampler import check_server_logprobs, observe_sampler, sync_weights_on_cpu, truncation, warn_about_images
from .scoring import Logprobs, OldPass, Scoring
from .support import Kept, Support, check_replay, over_support
from .trl_interface import check_bases, check_trl, definer
from .versions import keeps_support, take_out_weights


class RolloutCorrectionMixin(RoutingReplay, PushesToVLLM, CorrectionCore):
    """
    Rollout correction for a trainer of TRL. Comes before the trainer among the bases.

    Differences from TRL, each as `super()` with changed arguments or results: `__init__` (checks, monitor, dump), `_generate`
    and `_generate_and_score_completions` (the sampler's log-probabilities; TRL's old pass is skipped if it is not needed),
    `_calculate_rewards` (completions that are rejected before the baseline),
    `_get_per_token_logps_and_entropies` and `compute_loss` (the correction), `log` (metrics), `create_model_card` (model and
    correction), `train` (settings that were assigned after the trainer was built).

    A trainer defines the differences between TRL's trainers: `_trl_class` and `_config_class`, `_anchor_key` (key of the
    log-probabilities in the denominator of TRL's ratio), `_enter_loss`, and `_asking_for_old_pass`.

    Attributes:
        rollout_step (`int`, *optional*):
            Optimizer step of the weights that sample. Set when weights are pushed to vLLM. A `rollout_func` or a sampler
            with other weights must set it to the step of its weights.
    """

    _anchor_key: str

    rollout_step: int | None = None
    _warned_about_images = False

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: object = None,
        args: RolloutCorrectionConfig | None = None,
        *further_args: object,
        **kwargs: object,
    ) -> None:
        check_trl(self._trl_class)
        check_bases(type(self), RolloutCorrectionMixin, self._trl_class)
        args = self._checked_before_loading(model, args)
        with engine_arguments(args):
            super().__init__(model, reward_funcs, args, *further_args, **kwargs)
        self._scoring: Scoring | None = None
        self._loss_call: LossCall | None = None
        self._replayed: dict[str, Any] | None = None  # batch of a forward pass outside the loss
        self._gradient_checked = False  # True once the correction was found in the gradient of TRL's loss
        self._visited: list[torch.Tensor] = []  # log-probabilities of first visits since the last generation
        # Every sample is visited before the first optimizer step after its generation: the policy of the first visit is the
        # old policy.
        self._visited_before_update = self.args.gradient_accumulation_steps % self.args.steps_per_generation == 0
        if self.use_vllm:
            self._check_server()
            sync_weights_on_cpu(self.vllm_generation)
            replays = self.args.rollout_support is not None and bool(truncation(self.args))
            observe_sampler(self.vllm_generation, self._record_logprobs, self._pushing, replays=replays)
        self._check_sampler()
        if self.args.rollout_support is not None:
            check_replay(self)
        self._set_up_observer()
        self._set_up_push_checks()

    def _check_server(self) -> None:
        if self.vllm_mode == "server":
            info: list[Any] = [None]
            if self.accelerator.is_main_process:  # only this process has a connection to the server
                info = [self.vllm_generation.vllm_client.get_server_info()]
            broadcast_object_list(info, from_process=0)  # so that every rank raises, or none
            self._engine_config = info[0]
            check_server_logprobs(info[0]["model_config"]["logprobs_mode"], self.temperature)
        elif hasattr(self.vllm_generation, "llm"):
            self._engine_config = self.vllm_generation.llm.llm_engine.vllm_config

    def _check_sampler(self) -> None:
        if not self.use_vllm:
            other = ", pass a `rollout_func` that returns `logprobs`" if hasattr(self, "rollout_func") else ""
            raise ValueError(
                "`use_vllm` is False, so the sampler gives no log-probabilities, which the correction and its metrics need. "
                f"Set `use_vllm=True`{other}, or use `{self._trl_class.__name__}`."
            )

    # Scoring ----------------------------------------------------------------------------------------------------------

    @property
    def _needs_old_pass(self) -> bool:
        """True if the log-probabilities of the old policy must be computed when the batch is generated."""
        args = self.args
        return not args.bypass_mode and (
            not self._visited_before_update or args.needs_whole_batch or self._excludes_from_baseline
        )

    @property
    def _excludes_from_baseline(self) -> bool:
        # an evaluation has no baseline, and reports the reward of all completions
        return bool(self.args.corrects and self.args.rollout_rs_exclude_from_baseline and self.model.training)

    def _new_old_pass(self) -> OldPass | None:
        """Treatment of TRL's old pass; `None` leaves TRL unchanged."""
        if not self.args.corrects:
            return None
        return OldPass() if self._needs_old_pass else OldPass(answer=self._answer_old_pass)

    def _answer_old_pass(self, input_ids: torch.Tensor, logits_to_keep: int) -> torch.Tensor:
        return torch.zeros(input_ids.shape[0], logits_to_keep, device=input_ids.device)

    def _asking_for_old_pass(self) -> AbstractContextManager:
        return nullcontext()

    def _record_logprobs(
        self, logprobs: Logprobs, read: list[list[int]] | None = None, kept: Kept | None = None
    ) -> None:
        """
        Keep the log-probabilities of a generation, one list per completion, the prompts that vLLM has read, and the tokens
        that sampling kept.
        """
        if self._scoring is not None:
            self._scoring.logprobs = logprobs
            self._scoring.read = self._scoring.read or read
            self._scoring.kept = kept or self._scoring.kept

    def _generate_and_score_completions(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._scoring = scoring = Scoring(self._new_old_pass())
        try:
            with nullcontext() if scoring.old_pass is None else self._asking_for_old_pass():
                output = super()._generate_and_score_completions(inputs, *args, **kwargs)
        finally:
            self._scoring = None
        if scoring.old_pass is not None:
            self._settle_old_pass(scoring.old_pass, output)
        take_out_weights(output, self._metrics[self._now.mode], keeps_support(self.args, self._trl_class))
        self._check_rows(scoring, output)
        self._warned_about_images = warn_about_images(scoring, output, self._warned_about_images)
        output[ROLLOUT_LOGPS] = self._rollout_logps(output, scoring)
        output[REWARDS] = scoring.rewards
        if scoring.kept is not None:
            ids = output["completion_ids"]
            output[SUPPORT], output[SUPPORT_SIZES] = Support.of(scoring.kept, ids.shape[1], ids.device)
        if (turn_ids := scoring.padded_turn_ids(output["completion_ids"])) is not None:
            output[TURN_IDS] = turn_ids
        self._note_origin(output)
        if self.model.training:
            self._visited = []
            for key in (FIRST_LOGPS, FIRST_COEFFICIENTS):
                output[key] = torch.full_like(output["completion_ids"], torch.nan, dtype=torch.float32)
        if self.args.corrects and self.args.needs_whole_batch and not self.args.bypass_mode:
            seen = self._correct_from(output[OLD_LOGPS], output, from_old=True)
            self._report(seen)
            output[COEFFICIENTS] = seen.coefficients
        return output

    def _check_rows(self, scoring: Scoring, output: dict[str, Any]) -> None:
        """Check that log-probabilities and rewards belong to the completions of the batch."""
        lists = (scoring.logprobs, scoring.rewards, scoring.kept, scoring.turn_ids)
        rows = [len(x) for x in lists if x is not None]
        if any(n != len(output["completion_ids"]) for n in rows):
            owner = definer(type(self), "_generate_and_score_completions", after=RoutingReplay)
            raise RuntimeError(
                f"`{owner.__name__}._generate_and_score_completions` returned {len(output['completion_ids'])} completions, "
                f"but {rows[0]} were generated and scored last: the log-probabilities of the others are unknown. Join "
                "batches in a subclass of the corrected trainer, where each part has the log-probabilities of its sampler."
            )

    def _settle_old_pass(self, old_pass: OldPass, output: dict[str, Any]) -> None:
        """Put the old log-probabilities into the batch, or remove their placeholder."""
        expected = 1 + (self.beta != 0.0)  # the old pass, and the reference pass
        if old_pass.calls != expected or self._anchor_key not in output:
            raise RuntimeError(
                f"TRL made {old_pass.calls} forward passes while scoring where {expected} were expected, or did not return "
                f"`{self._anchor_key}`. This version of TRL is not supported: install a "
                "version of trl that this release was tested with."
            )
        if old_pass.answer is None:
            output[OLD_LOGPS] = old_pass.logps
        else:
            output.pop(OLD_LOGPS, None)

    def _rollout_logps(self, output: Mapping[str, torch.Tensor], scoring: Scoring) -> torch.Tensor:
        """Log-probabilities of the sampler, `(B, T)`."""
        return output[ROLLOUT_LOGPS]

    def _note_origin(self, output: dict[str, Any]) -> None:
        """Keep the optimizer step of the weights that sampled a batch, and count its age."""
        if self.rollout_step is not None:
            steps = torch.full_like(output["advantages"], self.rollout_step, dtype=torch.long)
            output[ROLLOUT_STEP] = steps if steps.dim() == 1 else steps[:, 0]
        self._observer.generated(self._now, self._ages(output))

    def _generate(self, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        scoring = self._scoring or Scoring(None)
        scoring.restart()  # a subclass may generate several times, and use the last result
        with scoring.pause():  # a rollout function may run forward passes of its own
            return super()._generate(prompts, *args, **kwargs)

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any, *args: Any, **kwargs: Any
    ) -> Any:
        scoring = self._scoring
        with (scoring or Scoring(None)).pause():  # a reward function may, too
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list, *args, **kwargs)
        if scoring is not None:
            scoring.rewards = self._own_rewards(rewards, len(prompts))
        if scoring is None or scoring.old_pass is None or not self._excludes_from_baseline:
            return rewards
        # TRL leaves completions with a NaN reward out of the baseline, and sets their advantage to 0
        rejected = self.accelerator.gather(self._rejected_sequences(scoring, scoring.old_pass))
        return rewards.masked_fill(rejected.unsqueeze(1), torch.nan)

    def _own_rewards(self, rewards: torch.Tensor, n: int) -> torch.Tensor:
        """Rewards of the `n` completions of this rank, `(n,)`, from those of all ranks and reward functions."""
        total: torch.Tensor = (rewards * self.reward_weights.to(rewards.device)).nansum(1)
        first = self.accelerator.process_index * n
        return total.masked_fill(rewards.isnan().all(1), torch.nan)[first : first + n]

    def _rejected_sequences(self, scoring: Scoring, old_pass: OldPass) -> torch.Tensor:
        """Completions of the batch being scored that have all tokens rejected, boolean, `(B,)`."""
        mask = scoring.loss_mask(old_pass.completion_mask).bool()
        turn_ids = scoring.padded_turn_ids(mask)
        keep = keep_mask(old_pass.logps, scoring.rollout_logps(mask), mask, self.args, turn_ids)
        return mask.any(1) & ~keep.any(1)

    # The loss ---------------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        forward = self._forward_over_support
        if self._scoring is not None and self._scoring.old_pass is not None and not self._scoring.paused:
            return self._scoring.old_pass(forward, model, *args, **kwargs)
        logps, *others = forward(model, *args, **kwargs)
        if self._loss_call is not None and self._is_policy(model, logps, self._loss_call):
            self._loss_call.take_forward()
            if self.use_vllm and self.vllm_mode == "server":
                self._keep_text(
                    self._loss_call.batch, partial(self._forward_again, self._loss_call.batch, *args, **kwargs)
                )
            logps = self._correct(logps, self._loss_call.batch, self._loss_call.inputs)
            self._loss_call.inputs.read.clear()  # only reads after the correction count
        return logps, *others

    def _forward_over_support(self, model: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's forward pass, of a batch whose sampler replays its support: over the tokens that it kept."""
        forward, support = super()._get_per_token_logps_and_entropies, None
        if (batch := self._batch_of_pass) is not None:
            support = Support(batch[SUPPORT], batch[SUPPORT_SIZES]) if SUPPORT in batch else None
        elif self._scoring is not None and self._scoring.kept is not None and not self._scoring.paused:
            logits_to_keep = args[1] if len(args) > 1 else kwargs["logits_to_keep"]
            support = Support.of(self._scoring.kept, logits_to_keep, input_ids.device)
        if support is None:
            return forward(model, input_ids, *args, **kwargs)
        unwrapped = self.accelerator.unwrap_model(model, keep_fp32_wrapper=True)
        return over_support(forward, support, self.temperature, unwrapped, model, input_ids, *args, **kwargs)

    @property
    def _batch_of_pass(self) -> dict[str, Any] | None:
        """Batch that a forward pass is over; `None` while TRL scores one."""
        loss_call = self._loss_call
        return loss_call.batch if self._replayed is None and loss_call is not None else self._replayed

    @contextmanager
    def _replaying(self, batch: dict[str, Any]) -> Iterator[None]:
        """Forward passes over a batch outside its loss, with its kept tokens and experts."""
        before, self._replayed = self._replayed, batch
        try:
            yield
        finally:
            self._replayed = before

    def _forward_again(self, batch: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._replaying(batch):
            logps: torch.Tensor = self._forward_over_support(self.model, *args, **kwargs)[0]
        return logps

    def _score_alone(self, batch: dict[str, Any], **most: int) -> torch.Tensor:
        """Score sequences of a batch as the loss does, but one by one: `score_alone`."""

        def forward(one: dict[str, Any], *args: Any) -> tuple:
            with self._replaying({**batch, **one}):
                scored: tuple = self._forward_over_support(self.model_wrapped, *args)
            return scored

        return score_alone(forward, batch, **most)

    def _is_policy(self, model: Any, logps: torch.Tensor, call: LossCall) -> bool:
        """True for a forward pass of the policy; False for a teacher, a reference, or a pass without gradient."""
        models = [self.accelerator.unwrap_model(m, keep_fp32_wrapper=True) for m in (model, call.model)]
        return models[0] is models[1] and (logps.requires_grad or not call.with_gradient)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        *args: object,
        **kwargs: object,
    ) -> torch.Tensor:
        # The batch has no advantages until `_correct` puts them back. If TRL read them earlier, its loss would not be
        # corrected: `LossInputs` raises an error instead.
        self._loss_call = call = LossCall(model, inputs)
        try:
            with self._bounding_the_ratio():
                loss: torch.Tensor = super().compute_loss(
                    model, call.inputs, return_outputs, num_items_in_batch, *args, **kwargs
                )
        finally:
            self._loss_call = None
        self._check_arrival(call, loss)
        return loss

    def _check_arrival(self, call: LossCall, loss: torch.Tensor) -> None:
        """Check that a loss was corrected: by the keys it read, and once by its gradient."""
        own = definer(type(self), "_compute_loss") not in self._trl_class.__mro__
        call.check_corrected(type(self), set() if own or not self.args.corrects else {"advantages", self._anchor_key})
        if call.gradient_check is not None:
            per_token = getattr(self, "importance_sampling_level", "token") == "token"
            self._gradient_checked = call.gradient_check.passes(
                loss, own=own, per_token=per_token, alone=self.beta == 0.0
            )

    def _bounding_the_ratio(self) -> AbstractContextManager:
        """Bound TRL's ratio to the sampler for negative advantages, if TRL's loss has an option for it."""
        return nullcontext()

    def _correct(self, logps: torch.Tensor, batch: dict[str, Any], inputs: dict[str, Any]) -> torch.Tensor:
        """
        Correct a micro-batch on the way from the model to TRL's loss.

        `logps`, `(B, T)` with gradient, are of the current policy. Results of the first visit are kept in the tensors of
        `batch`; `inputs`, the batch for TRL's loss, is changed in place. Returns the log-probabilities for TRL's loss, `(B,
        T)`.
        """
        inputs["advantages"] = batch["advantages"]
        current = logps.detach()
        first = self._is_first_visit(current, batch)
        old: Any = self._old_logps(current, batch, first)
        self._observer.visited(self._now, self._ages(batch), self._loss_mask(batch), current, old)
        if self.args.bypass_mode:
            seen = self._correct_from(current, batch, from_old=old is current)
            self._weigh_step(current, batch, seen)
            anchor, seen = self._bypass(seen) if self.args.corrects else (current, seen)
            self._report(seen)
            coefficients = seen.coefficients
        else:
            anchor = batch.get(OLD_LOGPS, old)
            coefficients = self._decoupled(current, anchor, batch, first)
        if not self.args.corrects:
            return logps
        if self._loss_call is not None and not self._gradient_checked and logps.requires_grad:
            check = self._loss_call.gradient_check = GradientCheck(logps)
            logps, coefficients = check.logps, coefficients * check.factor
        return self._enter_loss(inputs, logps, anchor, coefficients)

    def _report(self, seen: Corrected) -> None:
        """Count a corrected batch. With `rollout_diagnose`, sequences of the first batch are scored a second time."""
        # Sequences are scored one by one, which is not possible with images or the kept tokens of a newer TRL. A processor is
        # the same on all ranks; images may be on some.
        more = hasattr(self.processing_class, "image_processor")
        if not (more or keeps_support(self.args, self._trl_class)) and self._observer.looks_twice(self._now):
            seen = seen._replace(batch={**seen.batch, AGAIN_LOGPS: self._score_alone(seen.batch)})
        self._observer.corrected(self._now, seen)

    def _is_first_visit(self, current: torch.Tensor, batch: dict[str, Any]) -> bool:
        """Count a visit. The first one keeps its log-probabilities, `(B, T)`, in the batch."""
        if self.num_iterations == 1 or FIRST_LOGPS not in batch:  # an evaluation visits every batch once
            return True
        kept = batch[FIRST_LOGPS]
        if any(kept.data_ptr() == visited.data_ptr() for visited in self._visited):
            return False
        self._visited.append(kept)  # the tensor, so that no other gets its address
        if len(self._visited) <= self.args.steps_per_generation:
            kept.copy_(current)
            return True
        # The tensors were copied, which is allowed after the first visit filled them
        if bool(kept.isnan().all()):  # waits for the device
            raise RuntimeError(
                "A micro-batch is visited again, but the log-probabilities of its first visit are lost: the tensors of the "
                "batch are copied before each visit, and the first visit filled a copy. In "
                "`_prepare_inputs` or `compute_loss`, copy the dictionary (`dict(inputs)`) and not its tensors, or copy them "
                "once for all iterations."
            )
        return False

    def _old_logps(self, current: torch.Tensor, batch: dict[str, Any], first: bool) -> torch.Tensor | None:
        """Log-probabilities of the old policy, `(B, T)`; `None` if they are unknown."""
        if self._visited_before_update or not self.model.training:
            return current if first else batch[FIRST_LOGPS].to(current.dtype)
        return batch.get(OLD_LOGPS)

    def _decoupled(
        self, current: torch.Tensor, old: torch.Tensor, batch: dict[str, torch.Tensor], first: bool
    ) -> torch.Tensor:
        """Coefficients in decoupled mode, `(B, T)`."""
        if COEFFICIENTS in batch or not first:
            self._weigh_step(current, batch, None)
            return batch[COEFFICIENTS] if COEFFICIENTS in batch else batch[FIRST_COEFFICIENTS].to(old.dtype)
        seen = self._correct_from(old, batch, from_old=True)
        self._weigh_step(current, batch, seen)
        self._report(seen)
        if FIRST_COEFFICIENTS in batch:  # kept for later visits
            batch[FIRST_COEFFICIENTS].copy_(seen.coefficients)
        return seen.coefficients

    def _enter_loss(
        self, inputs: dict[str, Any], logps: torch.Tensor, anchor: torch.Tensor, coefficients: torch.Tensor
    ) -> torch.Tensor:
        """Put anchor and coefficients into TRL's batch of the loss, and return the log-probabilities for it; all `(B, T)`."""
        raise NotImplementedError
