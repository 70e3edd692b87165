"""One call of TRL's loss, with a check that it was corrected, and checks of settings for losses."""

from collections.abc import Mapping
from typing import Any

import torch
from trl import GRPOConfig, RLOOConfig

from ..messages import warn
from .gradient_check import GradientCheck, not_in_loss


class LossInputs(dict):
    """
    Batch for TRL's loss, which remembers the keys that were read. It has no advantages until the correction, after the forward
    pass of the policy, adds them.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        super().__init__(batch)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __missing__(self, key: str) -> None:
        if key != "advantages":
            raise KeyError(key)
        raise RuntimeError(
            "`advantages` are read before the forward pass of the policy, after which the batch has the corrected ones. In "
            "`_compute_loss`, call `self._get_per_token_logps_and_entropies` with the policy first, and read `advantages`, "
            "`old_per_token_logps` and `old_logps` after it, as TRL does."
        )

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self or key == "advantages" else default


class LossCall:
    """One call of `compute_loss` on a micro-batch."""

    def __init__(self, model: Any, batch: Mapping[str, Any]) -> None:
        self.model, self.batch = model, dict(batch)
        self.inputs = LossInputs({key: value for key, value in batch.items() if key != "advantages"})
        self.with_gradient = torch.is_grad_enabled()
        self.forwards = 0
        self.gradient_check: GradientCheck | None = None  # at the first step

    def take_forward(self) -> None:
        """Count a forward pass of the policy. Only one can be corrected."""
        self.forwards += 1
        if self.forwards > 1:
            raise RuntimeError(
                "The loss ran the policy twice through `_get_per_token_logps_and_entropies`, and rollout correction cannot "
                "know which of the two forward passes to correct. Run the other one under `torch.no_grad()`, or call the "
                "model itself."
            )

    def check_corrected(self, trainer: type, keys: set[str]) -> None:
        """Check that the loss ran the policy, and read the keys of corrected values."""
        if not self.forwards:
            raise RuntimeError(
                f"The loss of `{trainer.__name__}` did not run the policy through `_get_per_token_logps_and_entropies`, which "
                "rollout correction overrides. If `_compute_loss` is your own, run it there; otherwise install the version of "
                "trl that this release was tested with."
            )
        unread = [f"`{key}`" for key in sorted(keys - self.inputs.read)]
        if unread:
            raise not_in_loss(f"it does not read {' and '.join(unread)} from the batch")


def check_batch_normalization(config: GRPOConfig | RLOOConfig) -> None:
    """Refuse batch normalisation over a micro-batch of one sequence, which would set its weight to 1; of one turn, warn."""
    if not config.bypass_mode or config.per_device_train_batch_size * config.world_size > 1:
        return
    message = (
        "`rollout_is_batch_normalize` is True with `bypass_mode`, where the mean is over the micro-batch of all ranks, which "
        "is one sequence: its weight would always be 1{of_turns}. Set `per_device_train_batch_size` to 2 or more (and divide "
        "`gradient_accumulation_steps` accordingly), or use `bypass_mode=False`, which normalises over the generation batch."
    )
    if normalizes_over(config, "sequence", "geometric"):
        raise ValueError(message.format(of_turns=""))
    if normalizes_over(config, "turn"):
        warn(message.format(of_turns=" if it has one turn"))


def normalizes_over(config: Any, *levels: str) -> bool:
    """True if weights of one of the levels are divided by their mean."""
    normalizes = config.corrects and config.applies_weights and config.rollout_is_batch_normalize
    return bool(normalizes and config.rollout_is in levels)


def warn_about_iterations(config: GRPOConfig | RLOOConfig) -> None:
    """Warn about several visits of completions by a loss without a bound on the step."""
    clips = not config.bypass_mode or config.rollout_loss_type != "reinforce"
    if not config.corrects or clips or config.num_iterations == 1:
        return
    if not any(criterion.directed for criterion in config.criteria):  # a trust region
        warn(
            f"`num_iterations` is {config.num_iterations} with `rollout_loss_type='reinforce'`, which has no clipping: only "
            "the bound of the weights limits the steps, and each visit of a completion moves the policy further. Set "
            "`rollout_loss_type` to 'ppo_clip', `num_iterations` to 1, or add a trust region: 'token_tv' in `rollout_rs`."
        )
