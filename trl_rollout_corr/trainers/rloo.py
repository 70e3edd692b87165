"""RLOO with rollout correction."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from trl import RLOOConfig, RLOOTrainer

from ..correction.functional import LOG_RATIO_BOUND
from ..settings.config import RolloutCorrectionConfig
from .batches import TAGS
from .forward_pass import OldPass, Scoring
from .mixin import RolloutCorrectionMixin
from .observer import CorrectedBatch
from .trl_checks import CHECKS_OF_RLOO, WarnIfUnreadMixin
from .trl_interface import with_parameters_of


@dataclass
class RolloutCorrectedRLOOConfig(RolloutCorrectionConfig, WarnIfUnreadMixin, RLOOConfig):
    """
    Configuration class for the [`RolloutCorrectedRLOOTrainer`].

    It takes all parameters of [`~trl.RLOOConfig`] and of [`RolloutCorrectionConfig`].
    """

    _trainer = "rloo"
    _checks_of_trainer = CHECKS_OF_RLOO

    def __post_init__(self) -> None:
        RolloutCorrectionConfig.__post_init__(self)
        RLOOConfig.__post_init__(self)
        self.check()


class RolloutAsOld(OldPass):
    """Old pass of bypass mode, which returns the sampler's log-probabilities."""

    def __call__(self, forward: Callable, *args: Any, **kwargs: Any) -> tuple:
        outputs = super().__call__(forward, *args, **kwargs)
        if self.calls == 2:
            # Reference pass. The KL penalty in the reward is the sum of `logps - reference`: equal values make it 0
            # for a token without a finite log-probability
            self.logps.copy_(torch.where(self.logps.isfinite(), self.logps, outputs[0]))
        return outputs


class RolloutCorrectedRLOOTrainer(RolloutCorrectionMixin, RLOOTrainer):
    r"""
    [`~trl.RLOOTrainer`] that corrects for the mismatch between the policy that samples (vLLM) and the policy that
    trains.

    The trainer takes the arguments of [`~trl.RLOOTrainer`], with a [`RolloutCorrectedRLOOConfig`] as `args`. With
    `rollout_metrics_only=True`, or with neither weights nor rejection nor bypass, losses and gradients are
    `RLOOTrainer`'s, bit for bit.

    [`~trl_rollout_corr.trainers.mixin.RolloutCorrectionMixin`] lists the differences from TRL.

    RLOO uses one ratio per completion. Weights and rejection therefore act on the gradient of each token. They do not
    change the value of the clipped ratio, and the logged loss does not show them.

    With `beta > 0`, RLOO subtracts the KL divergence to the reference from the reward, before it computes the
    baseline. In decoupled mode this is the divergence of the old policy, which needs TRL's old pass. In bypass mode it
    is the divergence of the sampler, as in verl.

    Example:

    ```python
    from datasets import load_dataset
    from trl.rewards import accuracy_reward
    from trl_rollout_corr import RolloutCorrectedRLOOConfig, RolloutCorrectedRLOOTrainer

    trainer = RolloutCorrectedRLOOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=RolloutCorrectedRLOOConfig("output", use_vllm=True, rollout_correction="bypass_pg_is"),
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    )
    trainer.train()
    ```
    """

    _trl_class = RLOOTrainer
    _config_class = RolloutCorrectedRLOOConfig
    _anchor_key = "old_logps"
    _tag_names = [*RLOOTrainer._tag_names, *TAGS]

    @with_parameters_of(RLOOTrainer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    @property
    def _needs_old_pass(self) -> bool:
        # with beta, the reward contains the log-probabilities of the old policy
        return super()._needs_old_pass or (self.beta != 0.0 and not self._settings.bypass_mode)

    def _new_old_pass(self) -> OldPass | None:
        if not self._settings.changes_loss:
            return OldPass()  # TRL runs it anyway, and returns only the sum over tokens
        return RolloutAsOld(self._answer_old_pass) if self._settings.bypass_mode else super()._new_old_pass()

    def _answer_old_pass(self, input_ids: torch.Tensor, logits_to_keep: int) -> torch.Tensor:
        answer = super()._answer_old_pass(input_ids, logits_to_keep)
        if not self._settings.bypass_mode:
            return answer
        assert isinstance(self._pass, Scoring)  # TRL runs its old pass only while it scores a batch
        return self._pass.generation.rollout_logps(answer)

    def _anchor_in_bypass(self, corrected: CorrectedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        current, (anchor, coefficients) = corrected.train_logps, super()._anchor_in_bypass(corrected)
        # log ratio of a completion = sum over its tokens, so it saturates before the ratio of a token
        log_ratio = (current - anchor).sum(1, keepdim=True)
        saturated = log_ratio.abs() > LOG_RATIO_BOUND
        if self._settings.clips_around_sampler and self._settings.rollout_clip_ratio_c is not None:
            negative = corrected.batch["advantages"].unsqueeze(1) < 0
            saturated |= negative & (log_ratio > math.log(self._settings.rollout_clip_ratio_c))
        return torch.where(saturated, current, anchor), coefficients.masked_fill(saturated, 0.0)

    def _enter_loss(
        self, inputs: dict[str, Any], logps: torch.Tensor, anchor: torch.Tensor, coefficients: torch.Tensor
    ) -> torch.Tensor:
        inputs["old_logps"] = (anchor * self._loss_mask(inputs)).sum(1)
        # a completion without gradient must not add a constant to the logged loss
        inputs["advantages"] = inputs["advantages"] * coefficients.any(1)
        # the value is log pi, the gradient c * grad log pi, so clipping uses the unweighted ratio
        return logps.detach() + coefficients * (logps - logps.detach())
