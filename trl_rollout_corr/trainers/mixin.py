"""
The seam into TRL, shared by the trainers of GRPO and RLOO.

TRL's trainers call one method for every forward pass, `_get_per_token_logps_and_entropies`. The mixin overrides it,
and asks the current pass what to do ([`~trl_rollout_corr.trainers.forward_pass`]):

- *in the loss*, [`RolloutCorrectionMixin._correct_micro_batch`] gets the log-probabilities of the current policy
  before TRL does. TRL reads the anchor of the ratio and the advantages only afterwards, so a correction needs no
  forward pass of its own;
- *while scoring*, TRL's first call computes the log-probabilities of the *old* policy. If they are not needed, the
  call returns without a forward pass.

`B` completions, `T` completion tokens.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel
from transformers.trainer_utils import TrainOutput

from ..pushes.to_vllm import PushesToVLLM
from ..replay.on_demand import replays_of
from ..replay.seam import Replay
from ..settings.config import RolloutCorrectionConfig
from ..settings.effects import shares_gradient
from .batches import BatchCorrectionMixin
from .completions import read_logprobs
from .engine_arguments import engine_arguments
from .forward_pass import ForwardPass, Generation, LossPass, OldPass, Rescoring, Scoring
from .gradient_check import GradientCheck, not_in_loss
from .keys import COEFFICIENTS, LOGPS_OF_TRL, OLD_LOGPS, REWARDS, ROLLOUT_LOGPS, ROLLOUT_STEP, TURN_IDS
from .scoring import score_alone, score_text, sequences_of
from .trl_interface import check_bases, check_trl, definer
from .versions import refuse_fused_loss, refuse_weights, without_trl_correction
from .visits import Visits
from .vllm_engine import IMAGES, warn_about_images, watch_sampler


class RolloutCorrectionMixin(BatchCorrectionMixin):
    """
    Rollout correction for a trainer of TRL. List it before the trainer among the bases.

    Differences from TRL, each as `super()` with changed arguments or results: `__init__` (checks), `_generate` and
    `_generate_and_score_completions` (the sampler's log-probabilities; TRL's old pass is skipped if it is not needed),
    `_calculate_rewards` (completions rejected before the baseline), `_get_per_token_logps_and_entropies` and
    `compute_loss` (the correction), `training_step` (the end of replays), and `train` (a new start after an earlier
    training). [`~trl_rollout_corr.trainers.batches.BatchCorrectionMixin`] overrides `train` and `log`.

    A trainer defines the differences between TRL's trainers: `_trl_class` and `_config_class`, `_anchor_key` (key of
    the log-probabilities in the denominator of TRL's ratio), `_enter_loss`, and `_asking_for_old_pass`.

    Attributes:
        rollout_step (`int`, *optional*):
            Optimizer step of the sampler's weights. A push to vLLM sets it, and with a `rollout_func` a push whose
            vLLM the function asks for completions. A function or a sampler with other weights must set it to the step
            of its weights. Where it is `None`, the age of the completions is unknown.
    """

    _anchor_key: str
    _step: int  # TRL's, with the next two
    _buffered_inputs: Any
    _last_loaded_step: int

    rollout_step: int | None = None
    # TRL's own tests call methods of a trainer that was never initialised. So state gets a default here, except what
    # no method can do without: the settings, the observer, the pushes and the visits.
    _pass = ForwardPass()  # the current forward pass
    _replays: Any = Replay()  # of the sampler's choices
    _other_prompts = False  # True once vLLM read another prompt than the trainer
    _gradient_checked = False  # True once the correction was found in the gradient of TRL's loss

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
        args = self._read_settings(model, args)
        refuse_fused_loss(self._trl_class, args)
        with engine_arguments(args, self._settings), without_trl_correction(args, self._settings):
            super().__init__(model, reward_funcs, args, *further_args, **kwargs)
        self._visits = Visits(self.args)
        if self.use_vllm:
            self._check_server()
        self._check_sampler()
        self._pushes = PushesToVLLM(self)
        self._replays = replays_of(self, self._settings, self._bare)
        if self.use_vllm:
            watch_sampler(self.vllm_generation, self._record_logprobs, self._replays.kept_tokens)
        self._set_up_observer()

    def _check_server(self) -> None:
        if self.vllm_mode == "server":
            main = self.accelerator.is_main_process  # only this process is connected to the server
            self._read_server(self.vllm_generation.vllm_client.base_url if main else None)
        elif hasattr(self.vllm_generation, "llm"):
            self._engine_config = self.vllm_generation.llm.llm_engine.vllm_config

    def _check_sampler(self) -> None:
        if not self.use_vllm:
            other = ", pass a `rollout_func` that returns `logprobs`" if hasattr(self, "rollout_func") else ""
            raise ValueError(
                "`use_vllm` is False, so the sampler gives no log-probabilities, which the correction and its metrics "
                f"need. Set `use_vllm=True`{other}, or use `{self._trl_class.__name__}`."
            )

    def keep_routes(self, tokens: Sequence[int], experts: Any) -> None:
        """
        Take the routes of a sequence of a `rollout_func`:
        [`~trl_rollout_corr.replay.sampled_experts.SampledRoutes`].
        """
        if self._replays.experts is None:
            raise ValueError("`rollout_routing` is None, so routes have no effect. Set it to 'replay'.")
        self._replays.experts.sampled.keep(tokens, experts)

    def train(self, *args: object, **kwargs: object) -> TrainOutput:
        # TRL keeps the step of its latest push, which may be of an earlier training with other weights
        self._last_loaded_step = -1
        if self._settings.changes_loss:
            # A training that was interrupted, as in a notebook, leaves a generation that it began. Its rest would move
            # all later ones against the optimizer steps, so that samples are visited after an update.
            self._step, self._buffered_inputs = 0, None
        for batch in self._buffered_inputs or []:  # TRL trains on its rest, and counts steps anew
            batch.pop(ROLLOUT_STEP, None)
        return super().train(*args, **kwargs)

    def _during(self, under_way: Any) -> AbstractContextManager:
        """Forward passes for a purpose, see [`~trl_rollout_corr.trainers.forward_pass`]."""
        return patch.object(self, "_pass", under_way)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        forward = partial(self._replays.forward, self._pass, super()._get_per_token_logps_and_entropies)
        return self._pass.run(forward, *args, **kwargs)

    # Scoring ---------------------------------------------------------------------------------------------------------

    @property
    def _needs_old_pass(self) -> bool:
        """True if generation must compute the log-probabilities of the old policy."""
        settings = self._settings
        return not settings.bypass_mode and (
            not self._visits.before_update or settings.needs_whole_batch or self._excludes_from_baseline
        )

    @property
    def _excludes_from_baseline(self) -> bool:
        # an evaluation uses no baseline, and reports the reward of all completions
        return bool(
            self._settings.changes_loss and self._settings.rollout_rs_exclude_from_baseline and self.model.training
        )

    def _new_old_pass(self) -> OldPass | None:
        """Treatment of TRL's old pass; `None` leaves TRL unchanged."""
        if not self._settings.changes_loss:
            return None
        return OldPass() if self._needs_old_pass else OldPass(answer=self._answer_old_pass)

    def _answer_old_pass(self, input_ids: torch.Tensor, logits_to_keep: int) -> torch.Tensor:
        return torch.zeros(input_ids.shape[0], logits_to_keep, device=input_ids.device)

    def _asking_for_old_pass(self) -> AbstractContextManager:
        return nullcontext()

    def _generate_and_score_completions(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._replays.clear()
        old_pass = self._new_old_pass()
        asking = nullcontext() if old_pass is None else self._asking_for_old_pass()
        with self._during(Scoring(old_pass)) as scoring, asking:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs, *args, **kwargs)
        self._settle(scoring, output)
        self._warn_about_images(scoring.generation, output)
        self._add_columns(scoring, output)
        self._note_origin(output)
        if self.model.training:
            self._visits.begin(output, self.state.global_step)
        if self._settings.needs_whole_batch and not self._settings.bypass_mode and OLD_LOGPS in output:
            self._correct_whole_batch(output)
        self._pushes.keep(output, self._loss_mask(output))
        return output

    def _settle(self, scoring: Scoring, output: dict[str, Any]) -> None:
        """Check that TRL scored a batch as this class expects, and settle its old log-probabilities."""
        if scoring.old_pass is not None:
            expected = 1 + (self.beta != 0.0)  # the old pass, and the reference pass
            scoring.old_pass.settle(output, expected=expected, anchor_key=self._anchor_key, trainer=type(self))
        if not self._settings.by_trl:
            refuse_weights(output)
        owner = definer(type(self), "_generate_and_score_completions", after=RolloutCorrectionMixin)
        scoring.check_rows(len(output["completion_ids"]), owner.__name__)

    def _add_columns(self, scoring: Scoring, output: dict[str, Any]) -> None:
        """Add to a batch what TRL discarded: log-probabilities and choices of the sampler, rewards and turns."""
        completion_ids = output["completion_ids"]
        if ROLLOUT_LOGPS in output:
            output[LOGPS_OF_TRL] = output[ROLLOUT_LOGPS]
        output[ROLLOUT_LOGPS] = scoring.generation.rollout_logps(completion_ids)
        output[REWARDS] = scoring.rewards
        output |= self._replays.place(*sequences_of(output), completion_ids.shape[1])
        self._replays.check(output, self._loss_mask(output))
        self._replays.clear()
        if (turn_ids := scoring.generation.padded_turn_ids(completion_ids)) is not None:
            output[TURN_IDS] = turn_ids

    def _correct_whole_batch(self, output: dict[str, Any]) -> None:
        """Correct a batch before its visits, which see parts of it."""
        corrected = self._correct_from(output[OLD_LOGPS], output, from_old=True)
        self._record(corrected)
        output[COEFFICIENTS] = corrected.coefficients

    def _warn_about_images(self, generation: Generation, output: Mapping[str, Any]) -> None:
        """Warn once about prompts with images that vLLM and the trainer read differently."""
        if self._other_prompts or not any(key in output for key in IMAGES):
            return
        if (other := generation.other_prompt(output)) is not None:
            self._other_prompts = True
            self._pushes.doubt = "vLLM has read other prompts than the trainer, because of their images."
            warn_about_images(*other)

    def _note_origin(self, output: dict[str, Any]) -> None:
        """Keep the optimizer step of the weights that sampled a batch."""
        if self.rollout_step is not None:
            steps = torch.full_like(output["advantages"], self.rollout_step, dtype=torch.long)
            output[ROLLOUT_STEP] = steps if steps.dim() == 1 else steps[:, 0]

    def _lags(self, batch: dict[str, Any], from_old: bool) -> torch.Tensor | None:
        if not from_old or not self.model.training:  # in an evaluation the old policy is the current one
            return super()._lags(batch, from_old)
        return self._visits.generated - batch[ROLLOUT_STEP] if ROLLOUT_STEP in batch else None

    def _generate(self, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        with self._during(Generation()) as generation:
            generated = super()._generate(prompts, *args, **kwargs)
        generated = self._read_generated(generated, generation)
        self._pass.take_generation(generation)
        return generated

    def _record_logprobs(self, logprobs: list[list[float | None]], prompts: list[list[int]]) -> None:
        """Keep the log-probabilities and the prompts that vLLM returned, per completion."""
        if isinstance(self._pass, Generation):
            self._pass.logprobs = logprobs
            self._pass.prompts = self._pass.prompts or prompts  # of the first turn

    def _read_generated(self, generated: tuple, generation: Generation) -> tuple:
        """Keep what TRL would discard from `_generate`, and return the result for TRL."""
        generation.logprobs = read_logprobs(generation.logprobs)
        return generated

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any, *args: Any, **kwargs: Any
    ) -> Any:
        scoring = self._pass
        with self._during(ForwardPass()):  # a reward function may run its own forward passes
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list, *args, **kwargs)
        if not isinstance(scoring, Scoring):
            return rewards
        first = self.accelerator.process_index * len(prompts)
        scoring.take_rewards(rewards, self.reward_weights, slice(first, first + len(prompts)))
        if scoring.old_pass is None or not self._excludes_from_baseline:
            return rewards
        # TRL leaves completions with a NaN reward out of the baseline and sets their advantage to 0
        rejected = self.accelerator.gather(scoring.rejected(self._settings))
        return rewards.masked_fill(rejected.unsqueeze(1), torch.nan)

    # The loss --------------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        *args: object,
        **kwargs: object,
    ) -> torch.Tensor:
        # The batch of a pass in the loss lacks advantages until `_correct_micro_batch` puts them back. If TRL read
        # them earlier, its loss would not be corrected, so `LossInputs` raises an error.
        count = partial(self._observer.add, self._now.mode)
        loss_pass = LossPass(
            self._bare(model), inputs, self._loss_mask(inputs), self._correct_micro_batch, self._bare, count
        )
        if LOGPS_OF_TRL in inputs:
            loss_pass.inputs[ROLLOUT_LOGPS] = inputs[LOGPS_OF_TRL]
        with self._during(loss_pass), self._bounding_the_ratio():
            loss: torch.Tensor = super().compute_loss(
                model, loss_pass.inputs, return_outputs, num_items_in_batch, *args, **kwargs
            )
        loss_pass.check_policy_ran(type(self).__name__)
        if loss_pass.gradient_check is not None:
            own = definer(type(self), "_compute_loss") not in self._trl_class.__mro__
            unread = [f"`{key}`" for key in ("advantages", self._anchor_key) if key not in loss_pass.inputs.read]
            if unread and not own:
                raise not_in_loss(f"it does not read {' and '.join(unread)} from the batch")
            self._gradient_checked = loss_pass.gradient_check.passes(
                loss, own=own, per_token=not shares_gradient(vars(self.args)), alone=self.beta == 0.0
            )
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._replays.end()

    def _bounding_the_ratio(self) -> AbstractContextManager:
        """Bound TRL's ratio to the sampler for negative advantages, where TRL's loss can."""
        return nullcontext()

    def _correct_micro_batch(self, loss_pass: LossPass, logps: torch.Tensor) -> torch.Tensor:
        """
        Correct a micro-batch on the way from the model to TRL's loss.

        `logps`, `(B, T)` with gradient, come from the current policy. The tensors of the batch keep results of the
        first visit; `loss_pass.inputs`, the batch for TRL's loss, is changed in place. Returns the log-probabilities
        for TRL's loss, `(B, T)`.
        """
        batch, inputs, current = loss_pass.batch, loss_pass.inputs, logps.detach()
        inputs["advantages"] = batch["advantages"]
        first = self._visits.is_first(current, batch)
        old = self._visits.old_logps(current, batch, self._now, first=first)
        self._observer.add_visit(self._now, self._ages(batch), self._loss_mask(batch), current, old)
        if self._settings.bypass_mode:
            corrected = self._correct_from(current, batch, from_old=old is current)
            anchor, corrected = self._bypass(corrected) if self._settings.changes_loss else (current, corrected)
            self._record(corrected)
            coefficients = corrected.coefficients
        else:
            known = batch.get(OLD_LOGPS, old)
            anchor = current if known is None else known
            coefficients = self._decoupled(anchor, batch, first, from_old=known is not None)
        if not self._settings.changes_loss:
            return logps
        if not self._gradient_checked and logps.requires_grad:
            check = loss_pass.gradient_check = GradientCheck(logps)
            logps, coefficients = check.logps, coefficients * check.factor
        return self._enter_loss(inputs, logps, anchor, coefficients)

    def _score_again(self, batch: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities, `(B, T)`, of a batch of text under the policy's present weights."""
        with self._during(Rescoring(batch)):
            scored = self._get_per_token_logps_and_entropies(
                self.model, *sequences_of(batch), batch["completion_ids"].shape[1]
            )
        logps: torch.Tensor = scored[0]
        return logps

    def _score_text(self, ids: torch.Tensor, n: int) -> torch.Tensor:
        """Log-probabilities, `(n,)`, of the last tokens of `ids`, `(1, S)`, at temperature 1."""
        with self._during(ForwardPass()):
            if self.temperature != 1.0:  # by which TRL's own forward pass divides
                return score_text(self.model_wrapped, self.accelerator, self.args, ids, n)
            scored = self._get_per_token_logps_and_entropies(self.model_wrapped, ids, torch.ones_like(ids), n)
        logps: torch.Tensor = scored[0][0]
        return logps

    def _score_alone(self, batch: dict[str, Any], **most: int) -> torch.Tensor:
        """Score sequences of a batch as the loss does, but one by one, with `score_alone`."""

        def forward(i: int, *args: Any) -> tuple:
            with self._during(Rescoring(self._replays.alone(batch, i))):
                scored: tuple = self._get_per_token_logps_and_entropies(self.model_wrapped, *args)
            return scored

        return score_alone(forward, batch, **most)

    def _decoupled(
        self, train_logps: torch.Tensor, batch: dict[str, torch.Tensor], first: bool, *, from_old: bool
    ) -> torch.Tensor:
        """Coefficients in decoupled mode, `(B, T)`. The policy is the old one, or the current one if it is unknown."""
        if COEFFICIENTS in batch:
            return batch[COEFFICIENTS]
        if not first:
            return self._visits.first_coefficients(batch).to(train_logps.dtype)
        corrected = self._correct_from(train_logps, batch, from_old=from_old)
        self._record(corrected)
        self._visits.keep_coefficients(batch, corrected.coefficients)
        return corrected.coefficients

    def _enter_loss(
        self, inputs: dict[str, Any], logps: torch.Tensor, anchor: torch.Tensor, coefficients: torch.Tensor
    ) -> torch.Tensor:
        """Put anchor and coefficients into TRL's batch, and return its `logps`; all `(B, T)`."""
        raise NotImplementedError
