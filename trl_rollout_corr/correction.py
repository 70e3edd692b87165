"""Log-probabilities, a mask and a configuration in; weights, a keep-mask and statistics out. Torch only."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .config import RolloutCorrectionConfig
from .functional import (
    Rejection,
    accumulation_dtype,
    bound_weights,
    importance_ratio,
    masked_log_ratio,
    normalize_weights,
    reject,
    renormalization,
    weight_sums,
)
from .metrics import Statistics, WeightTensors, collect


@dataclass(frozen=True)
class RolloutCorrection:
    """
    Correction of one batch. `B` completions of `T` tokens.

    Args:
        weights (`torch.Tensor` of shape `(B, T)` or `None`):
            Detached importance weights after bounding and batch normalisation, 0 outside the valid tokens. `None` without
            `rollout_is`.
        keep (`torch.Tensor` of shape `(B, T)`):
            Boolean mask: valid tokens that every criterion keeps.
        coefficients (`torch.Tensor` of shape `(B, T)`):
            What multiplies the policy gradient of each token: weights (where the mode applies them), times `keep`, times
            the renormalisation factor.
        rollout_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the rollout policy, replaced by those of the training policy wherever they do not count
            (outside the mask, or not finite).
        statistics ([`~trl_rollout_corr.metrics.Statistics`]):
            Sums from which the metrics are made.
    """

    weights: torch.Tensor | None
    keep: torch.Tensor
    coefficients: torch.Tensor
    rollout_logps: torch.Tensor
    statistics: Statistics

    def metrics(self) -> dict[str, float]:
        """Metrics of this batch alone, by key (`rollout_corr/...`, see `docs/metrics.md`)."""
        return self.statistics.finish()


def compute_rollout_correction(
    train_logps: torch.Tensor,
    rollout_logps: torch.Tensor,
    mask: torch.Tensor,
    config: RolloutCorrectionConfig,
    *,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> RolloutCorrection:
    """
    Correct a batch for the mismatch between the policy that sampled it and the policy that trains on it.

    Args:
        train_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the sampled tokens under the training policy, in nats: the *old* policy in decoupled mode,
            the *current* one in bypass mode. Gradients are not followed.
        rollout_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the same tokens under the policy that sampled them, in nats.
        mask (`torch.Tensor` of shape `(B, T)`):
            Non-zero on the tokens of the loss. Log-probabilities elsewhere may hold anything, NaN included.
        config ([`RolloutCorrectionConfig`]):
            What to compute.
        sum_over_ranks (`Callable[[torch.Tensor], torch.Tensor]`, *optional*):
            Returns the sum of a tensor over all ranks. Called once with a tensor of shape `(4,)`, and only if
            `rollout_is_batch_normalize` or `rollout_rs_renormalize` needs the whole batch. By default the batch at hand is
            the whole batch.

    Returns:
        [`RolloutCorrection`]: detached; gradients are finite whatever the inputs.

    Raises:
        `ValueError`: if the shapes differ, if there is no token, or if a log-probability of the loss is not finite and
            `rollout_nan_policy` is `"raise"`.

    Example:

    ```python
    >>> import torch
    >>> from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction

    >>> train, rollout = torch.tensor([[-1.0, -0.5]]), torch.tensor([[-1.0, -2.5]])
    >>> config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)
    >>> compute_rollout_correction(train, rollout, torch.ones(1, 2), config).weights
    tensor([[1., 2.]])
    ```
    """
    _check_shapes(train_logps, rollout_logps, mask)
    mask = mask.bool()
    log_ratio, valid, nonfinite = _valid_log_ratio(train_logps, rollout_logps, mask, config.rollout_nan_policy)

    rejections = [(criterion, reject(log_ratio, valid, criterion)) for criterion in config.criteria]
    keep = _keep(valid, [rejection for _, rejection in rejections])
    weights = tensors = None
    if config.rollout_is is not None:
        lower, upper = config.weight_bounds
        ratio = importance_ratio(log_ratio, valid, level=config.rollout_is)
        weights = bound_weights(ratio, lower=lower, upper=upper)
        tensors = WeightTensors(config.rollout_is, ratio, weights, lower, upper, config.rollout_is_batch_normalize)

    coefficients = keep.to(log_ratio.dtype)
    if config.needs_whole_batch:
        totals = _batch_totals(weights, keep, valid, config.rollout_is)
        totals = totals if sum_over_ranks is None else sum_over_ranks(totals)
        if config.rollout_is_batch_normalize and config.applies_weights:
            weights = normalize_weights(weights, totals[:2])
        if config.rollout_rs_renormalize:
            coefficients = coefficients * renormalization(totals[2:])
    if config.applies_weights:
        coefficients = coefficients * weights

    clean_rollout_logps = torch.where(valid & ~nonfinite, rollout_logps.to(log_ratio.dtype), train_logps.detach())
    statistics = collect(
        train_logps.detach(),
        clean_rollout_logps,
        log_ratio,
        valid,
        nonfinite=nonfinite,
        mask=mask,
        coefficients=coefficients,
        weights=tensors,
        keep=keep if rejections else None,
        rejections=rejections,
    )
    return RolloutCorrection(weights, keep, coefficients, clean_rollout_logps, statistics)


def keep_mask(
    train_logps: torch.Tensor, rollout_logps: torch.Tensor, mask: torch.Tensor, config: RolloutCorrectionConfig
) -> torch.Tensor:
    """
    The keep-mask of [`compute_rollout_correction`] alone.

    Args:
        train_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the training policy, in nats.
        rollout_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the rollout policy, in nats.
        mask (`torch.Tensor` of shape `(B, T)`):
            Non-zero on the tokens of the loss.
        config ([`RolloutCorrectionConfig`]):
            The rejection criteria.

    Returns:
        `torch.Tensor` of shape `(B, T)`: boolean mask of the tokens that count and that every criterion keeps.
    """
    log_ratio, valid, _ = _valid_log_ratio(train_logps, rollout_logps, mask.bool(), config.rollout_nan_policy)
    return _keep(valid, [reject(log_ratio, valid, criterion) for criterion in config.criteria])


def _check_shapes(train_logps: torch.Tensor, rollout_logps: torch.Tensor, mask: torch.Tensor):
    shapes = {
        "train_logps": tuple(train_logps.shape),
        "rollout_logps": tuple(rollout_logps.shape),
        "mask": tuple(mask.shape),
    }
    if len(set(shapes.values())) > 1 or train_logps.dim() != 2 or not train_logps.numel():
        got = ", ".join(f"`{name}` {shape}" for name, shape in shapes.items())
        raise ValueError(f"The inputs must have one shape (B, T) with at least one token, got {got}.")


def _valid_log_ratio(
    train_logps: torch.Tensor, rollout_logps: torch.Tensor, mask: torch.Tensor, policy: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-ratio, the tokens that count, and the tokens of the loss whose log-ratio is not finite; each `(B, T)`."""
    log_ratio = masked_log_ratio(train_logps, rollout_logps, mask)
    nonfinite = ~log_ratio.isfinite()
    if policy == "raise" and nonfinite.any():  # the one host synchronisation, asked for by the user
        raise ValueError(
            f"{int(nonfinite.sum())} of {int(mask.sum())} tokens have a log-probability that is not finite, and "
            "`rollout_nan_policy` is 'raise'. A NaN from the sampler means that a whole row of its logits is broken. Look "
            "for the cause there, or set `rollout_nan_policy` to 'drop' (the token leaves the loss) or 'neutralize' (its "
            "ratio is taken as 1)."
        )
    # a ratio can be taken as 1 only where the trainer's own log-probability is there
    valid = mask & (train_logps.isfinite() if policy == "neutralize" else ~nonfinite)
    return log_ratio.masked_fill(nonfinite, 0.0), valid, nonfinite


def _keep(valid: torch.Tensor, rejections: list[Rejection]) -> torch.Tensor:
    for rejection in rejections:
        valid = valid & rejection.keep
    return valid


def _batch_totals(
    weights: torch.Tensor | None, keep: torch.Tensor, valid: torch.Tensor, level: str | None
) -> torch.Tensor:
    """`(4,)`: sum and count of the weights, valid tokens, kept tokens. One vector, hence one collective."""
    dtype = accumulation_dtype(valid.device)
    sums = valid.new_zeros(2, dtype=dtype) if weights is None else weight_sums(weights, valid, level=level)
    return torch.cat([sums, torch.stack([valid.sum(), keep.sum()]).to(dtype)])
