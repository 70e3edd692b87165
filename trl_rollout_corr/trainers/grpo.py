"""GRPO with rollout correction."""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from ..messages import warn, warn_idle
from ..settings.config import RolloutCorrectionConfig
from ..settings.fields import LOSS_TYPES
from .batch import OLD_LOGPS
from .core import check_bounds_of_means
from .loss import check_batch_normalization, warn_about_iterations
from .mixin import RolloutCorrectionMixin
from .monitor import check_tightened
from .sampler import check_logprobs, check_sampling, checked_turn_ids
from .trl_interface import with_parameters_of
from .versions import check_passes_by, replace_trl_correction, without_none


def check_loss(config: GRPOConfig) -> None:
    """
    Refuse losses that have importance weights of their own, are values of `rollout_loss_type`, or break the ratio of 1 of
    `rollout_loss_type="reinforce"`.
    """
    if config.loss_type in LOSS_TYPES:
        raise ValueError(
            f"`loss_type` is {config.loss_type!r}, which is a loss of `bypass_mode`: set `rollout_loss_type` to it, and "
            "`loss_type` to a loss of TRL: grpo, dr_grpo, dapo, ..."
        )
    if not config.corrects:
        return
    if config.loss_type == "vespo":
        raise ValueError(
            "`loss_type` is 'vespo', which has importance weights of its own, so no other weight or rejection can be "
            "applied to it. Choose another `loss_type`, or only measure with "
            "`rollout_metrics_only=True`."
        )
    if not config.bypass_mode or config.rollout_loss_type != "reinforce":
        return
    cap = config.epsilon_high or config.epsilon
    if config.loss_type == "cispo" and cap < 1.0:
        raise ValueError(
            f"`epsilon_high` is {cap} with `loss_type='cispo'`, where it is the upper bound of the ratio, and "
            f"with `rollout_loss_type='reinforce'`, whose ratio is 1: every gradient would be multiplied by {cap}. Set "
            "`epsilon_high` to 1 or more."
        )
    if config.importance_sampling_level != "token":
        raise ValueError(
            f"`importance_sampling_level` is {config.importance_sampling_level!r} with `rollout_loss_type='reinforce'`, "
            "whose loss is a sum over tokens. Set it to 'token'; for weights of sequences set `rollout_is` to "
            "'sequence' or 'geometric'."
        )


def check_sequence_level_ratio(config: GRPOConfig) -> None:
    """Warn about weights and rejection of tokens and turns in a loss with one ratio per completion."""
    if not config.corrects or config.importance_sampling_level != "sequence":
        return
    settings = [f"`{name}`" for name in config.rollout_rs or [] if name.startswith(("token_", "turn_"))]
    if config.rollout_is in ("token", "turn") and config.applies_weights:
        settings.append(f"`rollout_is={config.rollout_is!r}`")
    if settings:
        warn(
            f"{', '.join(settings)} act on single tokens or turns, but with `importance_sampling_level='sequence'` all tokens "
            "of a completion have the same gradient: their mean acts on the completion, as in TRL's own correction. To weight "
            "or reject completions, use `rollout_is='sequence'` or 'geometric', and criteria that start with `seq_`."
        )


def warn_about_clip_ratio(config: GRPOConfig) -> None:
    """Warn if TRL's loss does not bound the ratio to the sampler by `rollout_clip_ratio_c`."""
    if not (config.corrects and config.clips_around_sampler) or config.rollout_clip_ratio_c in (None, 3.0):
        return
    if config.loss_type in ("cispo", "sapo"):
        reason = f"`loss_type` is {config.loss_type!r}, which has its own bound on the ratio"
    elif config.delta is not None:
        reason = f"`delta` is {config.delta}, which is the same bound and takes precedence"
    else:
        return
    warn_idle("rollout_clip_ratio_c", config.rollout_clip_ratio_c, reason)


@dataclass
class RolloutCorrectedGRPOConfig(RolloutCorrectionConfig, GRPOConfig):
    r"""
    Configuration class for the [`RolloutCorrectedGRPOTrainer`].

    It has the parameters of [`~trl.GRPOConfig`] and those of [`RolloutCorrectionConfig`]. TRL's own correction
    (`vllm_importance_sampling_correction`) is switched off.

    Raises:
        `ValueError`: also if `loss_type` is `"vespo"`, which has importance weights of its own, if
            `rollout_loss_type="reinforce"` is combined with `importance_sampling_level="sequence"`, or if the mean of batch
            normalisation would be over a single sequence.
    """

    def __post_init__(self) -> None:
        RolloutCorrectionConfig.__post_init__(self)
        check_loss(self)
        check_passes_by(self)
        replace_trl_correction(self)
        GRPOConfig.__post_init__(self)
        check_sampling(self, GRPOTrainer)
        self.check(warns=True)

    def check(self, *, warns: bool = False) -> None:
        super().check()
        check_loss(self)
        check_batch_normalization(self)
        if warns:
            check_bounds_of_means(self)
            check_sequence_level_ratio(self)
            warn_about_clip_ratio(self)
            warn_about_iterations(self)
        check_tightened(self, warns=warns)


class RolloutCorrectedGRPOTrainer(RolloutCorrectionMixin, GRPOTrainer):
    r"""
    [`~trl.GRPOTrainer`] that corrects for the mismatch between the policy that samples (vLLM) and the policy that trains.

    Takes the arguments of [`~trl.GRPOTrainer`], with a [`RolloutCorrectedGRPOConfig`] as `args`. With
    `rollout_metrics_only=True`, or with neither weights nor rejection nor bypass, losses and gradients are those of
    `GRPOTrainer` with `vllm_importance_sampling_correction=False`, bit for bit.

    What differs from TRL is listed in [`~trl_rollout_corr.trainers.mixin.RolloutCorrectionMixin`].

    Example:

    ```python
    from datasets import load_dataset
    from trl.rewards import accuracy_reward
    from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer

    trainer = RolloutCorrectedGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=RolloutCorrectedGRPOConfig("output", use_vllm=True, rollout_correction="auto"),
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    )
    trainer.train()
    ```
    """

    _trl_class = GRPOTrainer
    _config_class = RolloutCorrectedGRPOConfig
    _anchor_key = OLD_LOGPS
    num_iterations: int  # TRL's
    _tag_names = [*GRPOTrainer._tag_names, "rollout-correction"]

    @with_parameters_of(GRPOTrainer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def _check_sampler(self) -> None:
        if self.rollout_func is None:  # a rollout function brings its own log-probabilities
            super()._check_sampler()

    def _doubt_sampler(self) -> str:
        return "Completions come from `rollout_func`, which may use another sampler." if self.rollout_func else ""

    def _generate_and_score_completions(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._generate_and_score_completions(inputs, *args, **kwargs)
        except Exception as error:
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            for i, environment in enumerate(getattr(self, "environments", None) or ()):
                if any(frame.f_locals.get("self") is environment for frame in frames):
                    error.add_note(
                        f"Raised by the environment `{type(environment).__name__}` of completion {i} of this rank, after "
                        f"optimizer step {self.state.global_step}. An error of a tool is an answer to the model, but one of "
                        "`reset` or `get_reward` ends the run: catch it there, or resume from the last checkpoint."
                    )
            raise

    def _generate(self, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        generated = super()._generate(prompts, *args, **kwargs)
        prompt_ids, completion_ids, tool_mask, completions, logprobs, *others = generated
        check_logprobs(completion_ids, logprobs)
        self._record_logprobs(logprobs)  # with tools or a rollout function, of several turns
        if self._scoring is not None:
            self._scoring.tool_mask = tool_mask
            of_function = next((x for x in others if isinstance(x, dict)), {})  # further fields of a rollout function
            self._scoring.turn_ids = checked_turn_ids(completion_ids, of_function.get("turn_ids"))
        return prompt_ids, completion_ids, tool_mask, completions, without_none(logprobs), *others

    @contextmanager
    def _asking_for_old_pass(self) -> Iterator[None]:
        # TRL makes its old pass if `gradient_accumulation_steps` is not a multiple of `steps_per_generation * num_iterations`.
        # With `num_iterations = gradient_accumulation_steps + 1` it never is: the first forward pass while scoring is then the
        # old pass, and not the reference pass.
        num_iterations = self.num_iterations
        self.num_iterations = self.args.gradient_accumulation_steps + 1
        try:
            yield
        finally:
            self.num_iterations = num_iterations

    @contextmanager
    def _bounding_the_ratio(self) -> Iterator[None]:
        args, delta = self.args, self.args.delta
        if args.corrects and args.clips_around_sampler and delta is None:
            args.delta = args.rollout_clip_ratio_c  # for this call only, as it is not a setting of the user
        try:
            yield
        finally:
            args.delta = delta

    def _loss_mask(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        mask = batch["completion_mask"]
        return mask * batch["tool_mask"] if "tool_mask" in batch else mask

    def _enter_loss(
        self, inputs: dict[str, Any], logps: torch.Tensor, anchor: torch.Tensor, coefficients: torch.Tensor
    ) -> torch.Tensor:
        # With A = c * advantage and c >= 0, -min(r A, clip(r) A) is c times TRL's loss of the token; so are all loss types.
        # Masks, denominators, KL and entropy terms stay TRL's.
        advantages = inputs["advantages"]
        if self.importance_sampling_level == "sequence" and advantages.dim() == 1:
            # all tokens of a completion have the same gradient, so their mean acts. TRL counts clipped completions from (B, 1)
            mask = self._loss_mask(inputs)
            coefficients = (coefficients * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        inputs["advantages"] = (advantages if advantages.dim() == 2 else advantages.unsqueeze(1)) * coefficients
        inputs[OLD_LOGPS] = anchor
        return logps
