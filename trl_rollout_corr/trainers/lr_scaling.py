"""
Learning rate scaled by the effective sample size of each optimizer step: `rollout_lr_scaling`.

Adam divides the gradient by its root mean square, so a scaled loss would change nothing. Instead the learning rate is scaled
for one step, and restored before a scheduler or a checkpoint can read it.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..correction.step_size import StepSize, ess_sqrt, ratio_sums
from ..settings.config import RolloutCorrectionConfig


def check_scalable(args: TrainingArguments) -> None:
    """Refuse optimizers whose learning rate cannot be scaled for one step."""
    if args.rollout_lr_scaling is None:
        return
    reason, optim = None, str(getattr(args.optim, "value", args.optim))
    if args.deepspeed_plugin is not None:
        reason = "DeepSpeed steps by itself, within the backward pass. Use FSDP2 (recipes/accelerate/fsdp2.yaml)"
    elif "layerwise" in optim or "lomo" in optim:
        reason = f"`optim` is {optim!r}, which steps within the backward pass. Use another, such as adamw_torch_fused"
    if reason is not None:
        raise ValueError(f"`rollout_lr_scaling` is set, but {reason}, or set `rollout_lr_scaling` to None.")


class LearningRateScaling(TrainerCallback):
    """Scales the learning rate of each optimizer step. With `rollout_metrics_only` the factor is reported and not applied."""

    def __init__(
        self, args: RolloutCorrectionConfig, accelerator: Accelerator, add: Callable[[StepSize], None]
    ) -> None:
        self.args, self.accelerator, self.add = args, accelerator, add
        self._sums: torch.Tensor | None = None  # (3,), of the micro-batches of this step on this rank
        self._own: list[tuple[dict[str, Any], Any]] = []  # groups of parameters, and their learning rate

    def visited(self, log_ratio: torch.Tensor, valid: torch.Tensor) -> None:
        """Count a micro-batch: log-ratio of the current policy to the sampler, in nats, and valid tokens; both `(B, T)`."""
        sums = ratio_sums(log_ratio, valid)
        self._sums = sums if self._sums is None else self._sums + sums

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: object,
    ) -> None:
        self._restore()  # after a step that failed
        self._sums = None
        if any(group.get("lr") is None or group.get("relative_step") for group in optimizer.param_groups):
            raise ValueError(
                f"`rollout_lr_scaling` is {self.args.rollout_lr_scaling!r}, but the optimizer chooses its own learning rate. "
                "Give it a learning rate, or set `rollout_lr_scaling` to None."
            )

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: object,
    ) -> None:
        if self._sums is None:
            return
        scale = ess_sqrt(self.accelerator.reduce(self._sums, reduction="sum"))
        self._sums = None
        self.add(StepSize.of({"scale": torch.stack([torch.ones_like(scale), scale])}))
        if self.args.rollout_metrics_only:
            return
        self._own = [(group, group["lr"]) for group in optimizer.param_groups]
        factor = scale.float() if _takes_tensors(optimizer) else scale.item()  # the latter waits for the device
        for group, rate in self._own:
            group["lr"] = rate * factor

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for group, rate in self._own:
            group["lr"] = rate
        self._own = []


def _takes_tensors(optimizer: Any) -> bool:
    """True if the learning rate may be a tensor on the device, as with fused Adam, the default of `Trainer`."""
    inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's around torch's
    adam = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
    return adam and all(group.get("fused") for group in inner.param_groups)
