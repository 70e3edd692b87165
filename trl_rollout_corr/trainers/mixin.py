"""
The seam into TRL, shared by the trainers.

TRL's trainers call one method for every forward pass of a policy, `_get_per_token_logps_and_entropies`. Everything here
hangs on it:

- *in the loss* its result passes through [`RolloutCorrectionMixin._correct`] on its way back to TRL, which reads the anchor
  of the ratio and the advantages only after it. So a correction costs no forward pass of its own;
- *while scoring* TRL's first call computes the log-probabilities of the *old* policy. It is answered without a forward
  pass where they are not needed ([`OldPass`]).

`B` completions, `T` completion tokens.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel

from ..correction import RolloutCorrection, compute_rollout_correction, keep_mask, usable_rollout_logps
from ..functional import LOG_RATIO_BOUND
from ..sampler import record_logprobs, sync_weights_on_cpu
from .contract import check_trl
from .observation import COEFFICIENTS, OLD_LOGPS, ROLLOUT_LOGPS, ObservationMixin
from .validation import check_server_logprobs


class OldPass:
    """
    TRL's first forward pass while it scores a batch, which computes the log-probabilities of the old policy.

    Args:
        answer (`Callable[[torch.Tensor, int], torch.Tensor]`, *optional*):
            Takes `input_ids` and `logits_to_keep` and returns what TRL gets in place of a forward pass, of shape `(B, T)`.
            By default the forward pass runs.
    """

    def __init__(self, answer: Callable[[torch.Tensor, int], torch.Tensor] | None = None):
        self.answer = answer
        self.calls = 0
        self.logps: torch.Tensor | None = None  # (B, T)
        self.completion_mask: torch.Tensor | None = None  # (B, T)

    @property
    def runs(self) -> bool:
        return self.answer is None

    def __call__(self, forward: Callable, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs) -> tuple:
        self.calls += 1
        if self.calls == 1 and not self.runs:
            outputs = (self.answer(input_ids, logits_to_keep), None, None)
        else:
            outputs = forward(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        if self.calls == 1:
            self.logps, self.completion_mask = outputs[0], attention_mask[:, -logits_to_keep:]
        return outputs


class RolloutCorrectionMixin(ObservationMixin):
    """
    Rollout correction for a trainer of TRL. Comes before the trainer among the bases.

    A trainer says what differs between TRL's trainers:

    - `_trl_class` and `_config_class`, TRL's trainer and the configuration that goes with it;
    - `_anchor_key`, the key under which TRL keeps what the ratio is taken against;
    - `_enter_loss`, how an anchor and coefficients enter TRL's loss;
    - `_asking_for_old_pass`, what makes TRL run its old pass while scoring.
    """

    _trl_class: type
    _config_class: type
    _anchor_key: str

    def __init__(self, model, reward_funcs=None, args=None, *further_args, **kwargs):
        check_trl(self._trl_class)
        super().__init__(model, reward_funcs, self._checked_args(model, args), *further_args, **kwargs)
        self._old_pass: OldPass | None = None
        self._loss_batch: tuple[dict, dict] | None = None
        # Every sample is visited before the first optimizer step since its generation, so that the policy of its first
        # visit is the old policy.
        self._visited_before_update = self.args.gradient_accumulation_steps % self.args.steps_per_generation == 0
        if self.use_vllm:
            self._check_server()
            record_logprobs(self.vllm_generation, keep=self._record_logprobs)
            sync_weights_on_cpu(self.vllm_generation)
        self._check_sampler()
        self._start_observing()

    def _checked_args(self, model: str | PreTrainedModel, args: Any) -> Any:
        if args is None:
            model_name = model if isinstance(model, str) else model.config._name_or_path
            return self._config_class(f"{model_name.split('/')[-1]}-{self._name}")
        if not isinstance(args, self._config_class):
            raise TypeError(
                f"`args` must be a `{self._config_class.__name__}`, got a `{type(args).__name__}`. It takes the same "
                "arguments, and those of rollout correction."
            )
        return args

    def _check_server(self):
        if self.vllm_mode == "server":
            info = [None]
            if self.accelerator.is_main_process:  # the only one that talks to the server
                info = [self.vllm_generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]]
            broadcast_object_list(info, from_process=0)  # so that every rank raises, or none
            check_server_logprobs(info[0], self.temperature)

    def _check_sampler(self):
        if not self.use_vllm:
            raise ValueError(
                "`use_vllm` is False, so there are no log-probabilities of the sampler to correct with. Set `use_vllm=True`, "
                f"or use `{self._trl_class.__name__}`."
            )

    # The sampler's log-probabilities ----------------------------------------------------------------------------------

    def _record_logprobs(self, logprobs: list[list[float | None]]):
        """Keep the log-probabilities of a generation, one list per completion."""
        self._recorded_logprobs = logprobs

    def _recorded_logps(self, like: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the latest generation, padded to the shape `(B, T)` of `like`."""
        rows = [[math.nan if x is None else x for x in row] for row in self._recorded_logprobs]
        padded = [row + [0.0] * (like.shape[1] - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.float32, device=like.device)

    # Scoring ----------------------------------------------------------------------------------------------------------

    @property
    def _needs_old_pass(self) -> bool:
        """Whether the old policy's log-probabilities must be computed when the batch is generated."""
        args = self.args
        return not args.bypass_mode and (
            not self._visited_before_update or args.needs_whole_batch or self._excludes_from_baseline
        )

    @property
    def _excludes_from_baseline(self) -> bool:
        # in evaluation there is no baseline, and the reward is that of every completion
        return self.args.corrects and self.args.rollout_rs_exclude_from_baseline and self.model.training

    def _new_old_pass(self) -> OldPass | None:
        """How to treat TRL's old pass, or `None` to leave TRL alone."""
        if not self.args.corrects:
            return None
        return OldPass() if self._needs_old_pass else OldPass(answer=self._answer_old_pass)

    def _answer_old_pass(self, input_ids: torch.Tensor, logits_to_keep: int) -> torch.Tensor:
        return torch.zeros(input_ids.shape[0], logits_to_keep, device=input_ids.device)

    def _asking_for_old_pass(self) -> AbstractContextManager:
        return nullcontext()

    def _generate_and_score_completions(self, inputs):
        self._old_pass = old_pass = self._new_old_pass()
        try:
            if old_pass is None:
                output = super()._generate_and_score_completions(inputs)
            else:
                with self._asking_for_old_pass():
                    output = super()._generate_and_score_completions(inputs)
        finally:
            self._old_pass = None
        if old_pass is not None:
            self._settle_old_pass(old_pass, output)
        output[ROLLOUT_LOGPS] = self._rollout_logps(output)
        self._note_origin(output)
        if self.args.corrects and self.args.needs_whole_batch and not self.args.bypass_mode:
            output[COEFFICIENTS] = self._correct_and_record(output[OLD_LOGPS], output)
        return output

    def _settle_old_pass(self, old_pass: OldPass, output: dict[str, Any]):
        """Put the old log-probabilities into the batch, or take what stood in for them out of it."""
        expected = 1 + (self.beta != 0.0)  # the old pass, and the reference pass
        if old_pass.calls != expected or self._anchor_key not in output:
            raise RuntimeError(
                f"TRL made {old_pass.calls} forward passes while scoring where {expected} were expected, or did not return "
                f"`{self._anchor_key}`. It has changed in a way that rollout correction does not know: install the version "
                "of trl that this release was tested with."
            )
        if old_pass.runs:
            output[OLD_LOGPS] = old_pass.logps
        else:
            output.pop(OLD_LOGPS, None)

    def _rollout_logps(self, output: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities of the sampler, `(B, T)`."""
        return output[ROLLOUT_LOGPS]

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._record_rewards(rewards, len(prompts))
        if not self._excludes_from_baseline:
            return rewards
        # TRL leaves completions without a reward out of the baseline, and gives them no advantage
        rejected = self.accelerator.gather(self._rejected_sequences())
        return rewards.masked_fill(rejected.unsqueeze(1), torch.nan)

    def _rejected_sequences(self) -> torch.Tensor:
        """Which completions of the batch being scored lose every token, `(B,)`."""
        old_pass = self._old_pass
        mask = self._mask_while_scoring(old_pass.completion_mask).bool()
        keep = keep_mask(old_pass.logps, self._recorded_logps(mask), mask, self.args)
        return mask.any(1) & ~keep.any(1)

    def _mask_while_scoring(self, completion_mask: torch.Tensor) -> torch.Tensor:
        """Tokens of the loss of the batch being scored, `(B, T)`."""
        return completion_mask

    # The loss ---------------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        forward = super()._get_per_token_logps_and_entropies
        if self._old_pass is not None:
            return self._old_pass(forward, model, *args, **kwargs)
        logps, *others = forward(model, *args, **kwargs)
        if self._loss_batch is not None:
            (batch, inputs), self._loss_batch = self._loss_batch, None
            logps = self._correct(logps, batch, inputs)
        return logps, *others

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        batch, inputs = inputs, dict(inputs)
        # TRL must not read the advantages before `_correct` has put them back. If it ever does, that is an error rather
        # than a loss without correction.
        del inputs["advantages"]
        self._loss_batch = batch, inputs
        try:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            if self._loss_batch is not None:
                raise RuntimeError(
                    "TRL's loss did not pass through `_get_per_token_logps_and_entropies`, where rollout correction attaches. "
                    "Install the version of trl that this release was tested with."
                )
            return loss
        finally:
            self._loss_batch = None

    def _correct(self, logps: torch.Tensor, batch: dict[str, Any], inputs: dict[str, Any]) -> torch.Tensor:
        """
        Correct a micro-batch on the way from the model to TRL's loss.

        Args:
            logps (`torch.Tensor` of shape `(B, T)`):
                Log-probabilities of the current policy, with gradient.
            batch (`dict`):
                The buffered micro-batch. It is the same object at every visit, so what the first visit settles is kept in
                it.
            inputs (`dict`):
                What TRL's loss reads; changed in place.

        Returns:
            `torch.Tensor` of shape `(B, T)`: the log-probabilities for TRL's loss.
        """
        inputs["advantages"] = batch["advantages"]
        current = logps.detach()
        self._record_staleness(current, batch)
        if self.args.bypass_mode:
            correction = self._compute_correction(current, batch)
            if not self.args.corrects:
                self._record(current, batch, correction, correction.coefficients)
                return logps
            anchor, coefficients = self._bypass(current, correction, batch)
            # a ratio that saturates leaves fewer tokens a gradient than the correction alone
            statistics = correction.statistics.with_sum("coefficients", coefficients.sum())
            self._record(current, batch, replace(correction, statistics=statistics), coefficients)
            return self._enter_loss(inputs, logps, anchor, coefficients)
        if COEFFICIENTS not in batch:
            old = batch.get(OLD_LOGPS, current)
            batch[COEFFICIENTS] = self._correct_and_record(old, batch)
            if self.args.corrects:
                batch[OLD_LOGPS] = old
        if not self.args.corrects:
            return logps
        return self._enter_loss(inputs, logps, batch[OLD_LOGPS], batch[COEFFICIENTS])

    def _bypass(
        self, current: torch.Tensor, correction: RolloutCorrection, batch: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Anchor and coefficients in bypass mode, each `(B, T)`."""
        if self.args.rollout_loss_type == "reinforce":
            return current, correction.coefficients  # a ratio of 1 whose gradient is that of the log-likelihood
        # PPO's gradient vanishes where the ratio saturates, while the ratio itself would overflow. And a rejected token has no
        # part in the ratio of its completion, where the loss is about that.
        rollout_logps = usable_rollout_logps(current, batch[ROLLOUT_LOGPS], self._loss_mask(batch), self.args)
        usable = correction.keep & ((current - rollout_logps).abs() <= LOG_RATIO_BOUND)
        return torch.where(usable, rollout_logps, current), correction.coefficients * usable

    def _enter_loss(
        self, inputs: dict[str, Any], logps: torch.Tensor, anchor: torch.Tensor, coefficients: torch.Tensor
    ) -> torch.Tensor:
        """
        Make TRL's loss use an anchor and coefficients.

        Args:
            inputs (`dict`):
                What TRL's loss reads; changed in place.
            logps (`torch.Tensor` of shape `(B, T)`):
                Log-probabilities of the current policy, with gradient.
            anchor (`torch.Tensor` of shape `(B, T)`):
                Log-probabilities against which the ratio is taken.
            coefficients (`torch.Tensor` of shape `(B, T)`):
                What multiplies the policy gradient of each token.

        Returns:
            `torch.Tensor` of shape `(B, T)`: the log-probabilities for TRL's loss.
        """
        raise NotImplementedError

    def _loss_mask(self, batch: dict[str, Any]) -> torch.Tensor:
        """Tokens of the loss, `(B, T)`."""
        return batch["completion_mask"]

    def _compute_correction(self, train_logps: torch.Tensor, batch: dict[str, Any]) -> RolloutCorrection:
        return compute_rollout_correction(
            train_logps,
            batch[ROLLOUT_LOGPS],
            self._loss_mask(batch),
            self.args,
            sum_over_ranks=lambda tensor: self.accelerator.reduce(tensor, reduction="sum"),
        )

    def _correct_and_record(self, train_logps: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        """Coefficients of a batch, `(B, T)`."""
        correction = self._compute_correction(train_logps, batch)
        coefficients = correction.coefficients
        self._record(train_logps, batch, correction, coefficients)
        return coefficients
