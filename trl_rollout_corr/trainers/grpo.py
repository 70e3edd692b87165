"""GRPO with rollout correction."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from trl import GRPOConfig, GRPOTrainer

from ..settings.config import RolloutCorrectionConfig
from ..settings.effects import shares_gradient
from .batches import TAGS
from .completions import read_logprobs, validated
from .forward_pass import Generation
from .keys import NOT_GIVEN, OLD_LOGPS, ROLLOUT_LOGPS
from .mixin import RolloutCorrectionMixin
from .trl_checks import CHECKS_OF_GRPO, WarnIfUnreadMixin, check_loss_type
from .trl_interface import with_parameters_of


DIFFERENCE = "sampling/sampling_logp_difference"  # TRL's metrics of its own correction


@dataclass
class RolloutCorrectedGRPOConfig(RolloutCorrectionConfig, WarnIfUnreadMixin, GRPOConfig):
    r"""
    Configuration class for the [`RolloutCorrectedGRPOTrainer`].

    It takes all parameters of [`~trl.GRPOConfig`] and of [`RolloutCorrectionConfig`]. The trainer switches TRL's own
    correction (`vllm_importance_sampling_correction`) off, unless `rollout_correction` is `"trl"`, which is the
    default if one of TRL's fields of it differs from its own default.

    Raises:
        `ValueError`: also if `loss_type` is `"vespo"`, which applies its own importance weights, if
            `rollout_loss_type="reinforce"` is combined with `importance_sampling_level="sequence"`, or if the mean of
            batch normalisation would be over a single sequence.
    """

    _checks_of_trainer = CHECKS_OF_GRPO

    def __post_init__(self) -> None:
        RolloutCorrectionConfig.__post_init__(self)
        check_loss_type(self)  # before TRL refuses the value for another reason
        GRPOConfig.__post_init__(self)
        self.check()


class RolloutCorrectedGRPOTrainer(RolloutCorrectionMixin, GRPOTrainer):
    r"""
    [`~trl.GRPOTrainer`] that corrects for the mismatch between the policy that samples (vLLM) and the policy that
    trains.

    The trainer takes the arguments of [`~trl.GRPOTrainer`], with a [`RolloutCorrectedGRPOConfig`] as `args`. With
    `rollout_metrics_only=True`, or with neither weights nor rejection nor bypass, losses and gradients are
    `GRPOTrainer`'s with `vllm_importance_sampling_correction=False`, bit for bit.

    [`~trl_rollout_corr.trainers.mixin.RolloutCorrectionMixin`] lists the differences from TRL.

    Example:

    ```python
    from datasets import load_dataset
    from trl.rewards import accuracy_reward
    from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer

    trainer = RolloutCorrectedGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=RolloutCorrectedGRPOConfig("output", use_vllm=True),
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    )
    trainer.train()
    ```
    """

    _trl_class = GRPOTrainer
    _config_class = RolloutCorrectedGRPOConfig
    _anchor_key = OLD_LOGPS
    num_iterations: int  # TRL's
    rollout_func: Any
    top_entropy_quantile: float
    _tag_names = [*GRPOTrainer._tag_names, *TAGS]

    @with_parameters_of(GRPOTrainer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def _check_sampler(self) -> None:
        if self.rollout_func is None:  # a rollout function returns its own log-probabilities
            super()._check_sampler()

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        if self.rollout_func is None:
            return super()._generate(*args, **kwargs)
        warned = self.__dict__.setdefault("_named_masks", set())  # keys that a warning named
        requests = self._pushes.noting_requests() if self.use_vllm else nullcontext()
        # for this call only, because it is the user's
        with patch.object(self, "rollout_func", validated(self.rollout_func, warned)), requests:
            return super()._generate(*args, **kwargs)

    def _read_generated(self, generated: tuple, generation: Generation) -> tuple:
        prompt_ids, completion_ids, tool_mask, completions, logprobs, *others = generated
        # with tools or a rollout function, of several turns
        none = math.nan if self.rollout_func is None else NOT_GIVEN  # vLLM's NaN becomes None on its way through TRL
        generation.logprobs = read_logprobs(logprobs, [len(ids) for ids in completion_ids], tool_mask, none=none)
        generation.tool_mask = tool_mask
        of_function = next((x for x in others if isinstance(x, dict)), {})  # further fields of a rollout function
        generation.turn_ids = of_function.get("turn_ids")
        # TRL gets what the sampler returned, because its own correction bounds the ratio of minus infinity
        of_trl = [[math.nan if x is None else x for x in row] for row in logprobs]
        return prompt_ids, completion_ids, tool_mask, completions, of_trl, *others

    def _generate_and_score_completions(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs, *args, **kwargs)
        if self._settings.by_trl:
            self._leave_out_infinity(output)
        return output

    def _leave_out_infinity(self, batch: Mapping[str, torch.Tensor]) -> None:
        """
        Replace TRL's metrics of the difference between trainer and sampler if they are infinite, which is known on all
        ranks, by those of the other tokens.
        """
        mean, largest = (self._metrics[self._now.mode].get(f"{DIFFERENCE}/{name}") for name in ("mean", "max"))
        if not mean or not largest or math.isfinite(mean[-1]):
            return
        difference = (batch[OLD_LOGPS] - batch[ROLLOUT_LOGPS]).abs()
        finite = difference[self._loss_mask(batch).bool() & difference.isfinite()]
        of_rank = torch.stack([finite.sum() / max(len(finite), 1), finite.amax() if len(finite) else finite.sum()])
        of_ranks = self.accelerator.gather(of_rank[None])
        mean[-1], largest[-1] = of_ranks[:, 0].mean().item(), of_ranks[:, 1].max().item()

    def _asking_for_old_pass(self) -> AbstractContextManager:
        # TRL makes its old pass if `gradient_accumulation_steps` is not a multiple of
        # `steps_per_generation * num_iterations`. With `num_iterations = gradient_accumulation_steps + 1` it never is,
        # so the first forward pass while scoring is the old pass, and not the reference pass.
        return patch.object(self, "num_iterations", self.args.gradient_accumulation_steps + 1)

    def _bounding_the_ratio(self) -> AbstractContextManager:
        clips = self._settings.changes_loss and self._settings.clips_around_sampler
        if clips and self.args.delta is None:  # the user set no bound
            return patch.object(self.args, "delta", self._settings.rollout_clip_ratio_c)
        return nullcontext()

    def _loss_mask(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        mask = batch["completion_mask"]
        return mask * batch["tool_mask"] if "tool_mask" in batch else mask

    def _enter_loss(
        self, inputs: dict[str, Any], logps: torch.Tensor, anchor: torch.Tensor, coefficients: torch.Tensor
    ) -> torch.Tensor:
        # With A = c * advantage and c >= 0, -min(r A, clip(r) A) is c times TRL's loss of the token, as for all loss
        # types. Masks, denominators, KL and entropy terms stay TRL's.
        advantages = inputs["advantages"]
        every_token = self.top_entropy_quantile == 1.0  # otherwise TRL takes the mean, over the tokens that it keeps
        if shares_gradient(vars(self.args)) and every_token and advantages.dim() == 1:
            # all tokens of a completion share one gradient, so the mean coefficient acts. TRL counts clipped
            # completions from (B, 1)
            lengths = self._loss_mask(inputs).sum(1, keepdim=True)
            coefficients = coefficients.sum(1, keepdim=True) / lengths.clamp(min=1)  # which are 0 outside the mask
        inputs["advantages"] = (advantages if advantages.dim() == 2 else advantages.unsqueeze(1)) * coefficients
        inputs[OLD_LOGPS] = anchor
        return logps
