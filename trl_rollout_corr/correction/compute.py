"""Log-probabilities, mask and settings in; weights, keep-mask and statistics out. Torch only."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch

from ..settings.resolve import Settings
from .functional import (
    Rejection,
    Tokens,
    as_numbers,
    bound_weights,
    bounds_by_sign,
    counting,
    importance_ratio,
    mean_weight,
    reject,
    renormalization,
    row_blocks,
    select_tokens,
    turns_of,
)
from .metrics import Statistics, Weights, collect


if TYPE_CHECKING:
    from ..settings.config import RolloutCorrectionConfig


@dataclass(frozen=True)
class RolloutCorrection:
    """
    Correction of one batch. `B` completions of `T` tokens.

    Args:
        weights (`torch.Tensor` of shape `(B, T)` or `None`):
            Detached importance weights after bounding and batch normalisation, 0 outside the valid tokens. `None`
            without weights.
        keep (`torch.Tensor` of shape `(B, T)`):
            Boolean mask of the valid tokens that every criterion keeps.
        valid (`torch.Tensor` of shape `(B, T)`):
            Boolean mask of the tokens of the loss with a finite log-ratio.
        scale (`torch.Tensor` of shape `()`):
            Factor of `rollout_rs_renormalize`, or 1.
        applies_weights (`bool`):
            True if the mode applies the weights; False if it only reports them.
        log_ratio (`torch.Tensor` of shape `(B, T)` or `None`):
            Log-ratio to the sampler, in nats, 0 outside the valid tokens. `None` in decoupled mode, where nothing
            reads it.
        statistics ([`~trl_rollout_corr.correction.metrics.Statistics`]):
            Sums that the metrics are computed from.
    """

    weights: torch.Tensor | None
    keep: torch.Tensor
    valid: torch.Tensor
    scale: torch.Tensor
    applies_weights: bool
    log_ratio: torch.Tensor | None
    statistics: Statistics

    @property
    def coefficients(self) -> torch.Tensor:
        """
        Factor of the policy gradient of each token, `(B, T)`: `weights * keep * scale`, without the weights where the
        mode does not apply them. Each access computes it again.
        """
        coefficients = as_numbers(self.keep, self.scale.dtype).mul_(self.scale)
        return coefficients if self.weights is None or not self.applies_weights else coefficients.mul_(self.weights)

    def adjusted(self, *, keep: torch.Tensor | None = None, weights: torch.Tensor | None = None) -> Self:
        """
        Copy with your own criterion or weights, for a trainer that overrides `_compute_correction`.

        Args:
            keep (`torch.Tensor` of shape `(B, T)` or `(B, 1)`, *optional*):
                Boolean mask of the tokens that your criterion keeps. Tokens that the settings reject stay rejected.
            weights (`torch.Tensor` of shape `(B, T)`, *optional*):
                Weights that replace the ones of the settings.

        Raises:
            `ValueError`: if the shape of a tensor differs.

        Returns:
            [`RolloutCorrection`]: the copy. Its metric `effective_lr` describes the copy. Metrics with `rollout_is` or
            `rollout_rs` in their name still describe the settings.
        """
        shape = tuple(self.keep.shape)
        for name, given, allowed in (("keep", keep, (shape, (shape[0], 1))), ("weights", weights, (shape,))):
            if given is not None and tuple(given.shape) not in allowed:
                raise ValueError(
                    f"`{name}` must have the shape {' or '.join(map(str, dict.fromkeys(allowed)))}, got "
                    f"{tuple(given.shape)}."
                )
        kept = self.keep if keep is None else self.keep & keep.bool()
        adjusted = replace(self, keep=kept)
        if weights is not None:
            adjusted = replace(adjusted, weights=weights.detach().where(self.valid, 0.0), applies_weights=True)
        statistics = self.statistics.with_sum("coefficients", adjusted.coefficients.sum())
        return replace(adjusted, statistics=statistics)

    def metrics(self) -> dict[str, float]:
        """Metrics of this batch alone, by key: see `trl-rollout-corr docs metrics`."""
        return self.statistics.finish()


def compute_rollout_correction(
    train_logps: torch.Tensor,
    rollout_logps: torch.Tensor,
    mask: torch.Tensor,
    config: "RolloutCorrectionConfig | Settings",
    *,
    advantages: torch.Tensor | None = None,
    turn_ids: torch.Tensor | None = None,
    fresh: torch.Tensor | None = None,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> RolloutCorrection:
    """
    Correct a batch for the mismatch between the policy that sampled it and the policy that trains on it.

    Args:
        train_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the sampled tokens under the training policy, in nats: the *old* policy in decoupled
            mode, the *current* one in bypass mode. They are detached.
        rollout_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the same tokens under the policy that sampled them, in nats.
        mask (`torch.Tensor` of shape `(B, T)`):
            Non-zero on the tokens of the loss. Elsewhere the log-probabilities may be anything, NaN included.
        config ([`RolloutCorrectionConfig`] or [`~trl_rollout_corr.settings.resolve.Settings`]):
            Settings, or the result of resolving them.
        advantages (`torch.Tensor` of shape `(B,)` or `(B, T)`, *optional*):
            Advantages, for criteria that depend on their sign, and for the divergence by sign of the advantage.
        turn_ids (`torch.Tensor` of shape `(B, T)`, *optional*):
            Turn of each token, for weights and criteria per turn: numbers of 0 or more that never decrease. By default
            a turn is a run of tokens of the mask.
        fresh (`torch.Tensor` of shape `(B,)`, *optional*):
            True for completions that were sampled with the weights of the training policy. With
            `rollout_is_stale_only` their ratio counts as 1. By default no completion counts as fresh.
        sum_over_ranks (`Callable[[torch.Tensor], torch.Tensor]`, *optional*):
            Sums a tensor over all ranks. It is called once, with a tensor of shape `(4,)`, and only if
            `rollout_is_batch_normalize` or `rollout_rs_renormalize` needs the whole batch. By default the batch at
            hand is the whole batch.

    Returns:
        [`RolloutCorrection`]: detached from the graph; gradients stay finite for all inputs.

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
    settings = config if isinstance(config, Settings) else config.settings
    _check_shapes(train_logps, rollout_logps, mask, turn_ids)
    if fresh is not None and fresh.shape != mask.shape[:1]:
        raise ValueError(f"`fresh` must have the shape {tuple(mask.shape[:1])}, got {tuple(fresh.shape)}.")
    direction = _direction(advantages, mask, settings)
    blocks = (
        _correct_rows(
            _tokens(
                train_logps[rows],
                rollout_logps[rows],
                mask[rows],
                settings,
                None if turn_ids is None else turn_ids[rows],
            ),
            settings,
            None if direction is None else direction[rows],
            None if fresh is None else fresh[rows].unsqueeze(1),
        )
        for rows in row_blocks(mask)
    )
    corrected = _joined(blocks, mask.shape)
    weights, statistics = corrected.weights, corrected.statistics
    if settings.rollout_nan_policy == "raise":
        _check_finite(statistics)
    if not settings.needs_whole_batch:
        return corrected

    scale, coefficients = corrected.scale, statistics["coefficients"]
    totals = _batch_totals(statistics, settings)
    totals = totals if sum_over_ranks is None else sum_over_ranks(totals)
    if settings.normalizes:
        mean = mean_weight(totals[:2])
        weights = None if weights is None else weights.div_(mean)
        coefficients = coefficients / mean
    if settings.rollout_rs_renormalize:
        factor = renormalization(totals[2:])
        scale, coefficients = factor.to(scale.dtype), coefficients * factor
    return replace(
        corrected, weights=weights, scale=scale, statistics=statistics.with_sum("coefficients", coefficients)
    )


def keep_mask(
    train_logps: torch.Tensor,
    rollout_logps: torch.Tensor,
    mask: torch.Tensor,
    settings: Settings,
    turn_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Boolean mask, `(B, T)`, of the valid tokens that every criterion keeps."""
    tokens = _tokens(train_logps, rollout_logps, mask, settings, turn_ids)
    return _keep(tokens, [reject(tokens, criterion) for criterion in settings.criteria]) > 0


def _tokens(
    train_logps: torch.Tensor,
    rollout_logps: torch.Tensor,
    mask: torch.Tensor,
    settings: Settings,
    turn_ids: torch.Tensor | None,
) -> Tokens:
    """Select the tokens that count, with their turns if the settings need turns."""
    tokens = select_tokens(train_logps, rollout_logps, mask, neutralize=settings.rollout_nan_policy == "neutralize")
    return tokens._replace(turn=(turns_of(mask, turn_ids) - 1).clamp(min=0)) if settings.uses_turns else tokens


def _check_shapes(
    train_logps: torch.Tensor, rollout_logps: torch.Tensor, mask: torch.Tensor, turn_ids: torch.Tensor | None
) -> None:
    given = {"train_logps": train_logps, "rollout_logps": rollout_logps, "mask": mask, "turn_ids": turn_ids}
    shapes = {name: tuple(x.shape) for name, x in given.items() if x is not None}
    if len(set(shapes.values())) > 1 or train_logps.dim() != 2 or not train_logps.numel():
        got = ", ".join(f"`{name}` {shape}" for name, shape in shapes.items())
        raise ValueError(f"The inputs must have one shape (B, T) with at least one token, got {got}.")


def _check_finite(statistics: Statistics) -> None:
    """Refuse log-probabilities that are not finite. This waits for the device."""
    if broken := int(statistics["nonfinite"]):
        raise ValueError(
            f"{broken} of {int(statistics['mask_tokens'])} tokens lack a finite log-probability, and "
            "`rollout_nan_policy` is 'raise'. NaN from vLLM, or None from TRL, means that a whole row of logits is "
            "broken. Look for the cause there, or set `rollout_nan_policy` to 'drop' (the token leaves the loss) or "
            "'neutralize' (its ratio is taken as 1)."
        )


def _direction(advantages: torch.Tensor | None, mask: torch.Tensor, settings: Settings) -> torch.Tensor | None:
    """The advantages, whose sign decides about bounds, `(B, 1)` or `(B, T)`; `None` without advantages."""
    directed = [f"`rollout_rs` contains {c.name!r}, which depends" for c in settings.criteria if c.directed]
    by_sign = settings.bounding if settings.bounding is not None and settings.bounding.directed else None
    directed += ["`rollout_is_threshold` contains bounds that depend"] if by_sign else []
    if advantages is None and not directed:
        return None
    one, each = mask.shape[:1], mask.shape
    allowed = [one, (*one, 1), *([each] if by_sign is None or by_sign.unit == "token" else [])]
    if advantages is not None and advantages.shape in allowed:
        return (advantages if advantages.dim() == 2 else advantages.unsqueeze(1)).detach().float()
    needs = f"{directed[0]} on the sign of the advantages: pass `advantages`" if directed else "`advantages` must be"
    got = None if advantages is None else tuple(advantages.shape)
    raise ValueError(f"{needs} of shape {' or '.join(str(tuple(shape)) for shape in (one, *allowed[2:]))}, got {got}.")


def _correct_rows(
    tokens: Tokens, settings: Settings, direction: torch.Tensor | None, fresh: torch.Tensor | None
) -> RolloutCorrection:
    """Correction of some rows, before batch normalisation."""
    rejections = [(criterion, reject(tokens, criterion, direction)) for criterion in settings.criteria]
    keep = _keep(tokens, [rejection for _, rejection in rejections])
    weights = weighed = None
    if (bounding := settings.bounding) is not None:
        ratio = importance_ratio(tokens, level=bounding.level)
        lower, upper = bounds_by_sign(bounding, direction, ratio.dtype)
        counts = counting(tokens, bounding.unit)
        if fresh is not None and bounding.stale_only:
            ratio = torch.where(fresh.bool(), counts, ratio)
        bounded = bound_weights(ratio, counts, lower=lower, upper=upper, clamp=bounding.clamps)
        weighed = Weights(bounding, lower, upper, ratio, bounded)
        weights = bounded * tokens.valid if bounding.unit == "seq" else bounded
    coefficients = keep
    if weights is not None and settings.applies_weights:
        coefficients = keep * weights if rejections else weights  # weights are 0 where a token is not valid
    statistics = collect(tokens, keep, coefficients, weighed, rejections, direction)
    return RolloutCorrection(
        weights,
        keep.bool(),
        tokens.valid.bool(),
        scale=keep.new_ones(()),
        applies_weights=settings.applies_weights,
        log_ratio=tokens.log_ratio if settings.bypass_mode else None,
        statistics=statistics,
    )


def _joined(blocks: Iterable[RolloutCorrection], shape: torch.Size) -> RolloutCorrection:
    """Join corrections of blocks of rows into one of shape `shape`. A single block is not copied."""
    whole: dict[str, Any] = {}
    sums, done = [], 0
    for block in blocks:
        if block.keep.shape == shape:
            return block
        rows = slice(done, done + len(block.keep))
        done = rows.stop
        for name in ("weights", "keep", "valid", "log_ratio"):
            part = getattr(block, name)
            if part is None:
                continue
            if name not in whole:
                whole[name] = part.new_empty(shape)
            whole[name][rows] = part
        sums.append(block.statistics.vector)
    return replace(block, statistics=block.statistics.combine(torch.stack(sums)), **whole)


def _keep(tokens: Tokens, rejections: list[Rejection]) -> torch.Tensor:
    """1 on valid tokens that every criterion keeps, else 0."""
    keep = tokens.valid
    for rejection in rejections:
        keep = keep * (1.0 - rejection.rejected)
    return keep


def _batch_totals(statistics: Statistics, settings: Settings) -> torch.Tensor:
    """`(4,)`, for one collective: sum and number of the weights, valid tokens, kept tokens."""
    nothing = statistics.vector.new_zeros(())
    weights = [statistics[name] if settings.normalizes else nothing for name in ("is/norm_sum", "is/norm_count")]
    tokens, rejected = statistics["tokens"], statistics["rejected"] if settings.criteria else nothing
    return torch.stack([*weights, tokens, tokens - rejected])
