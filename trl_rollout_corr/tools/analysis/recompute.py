"""Corrections computed again on the sequences of a dump, with other settings. No TRL here."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from ...correction.compute import compute_rollout_correction
from ...correction.functional import LOG_RATIO_BOUND, Tokens, select_tokens
from ...messages import PREFIX
from ...settings.config import RolloutCorrectionConfig
from ..dump.sequences import Sequences, pad


class Batch(NamedTuple):
    """Tokens of the loss of `B` sequences, padded to the longest: tensors of shape `(B, T)`. Tokens of tools are left out."""

    steps: list[int]  # that they are from, in order
    mask: torch.Tensor  # True for entries that are tokens
    train_logps: torch.Tensor  # nats
    rollout_logps: torch.Tensor
    turn: torch.Tensor
    keep: torch.Tensor  # tokens that the run kept
    coefficients: torch.Tensor  # factor of the policy gradient in the run
    advantages: torch.Tensor  # `(B, 1)`; 0 if it is not finite

    @property
    def n_tokens(self) -> int:
        return int(self.mask.sum())

    def tokens(self, config: RolloutCorrectionConfig) -> Tokens:
        """Tokens that count under a configuration."""
        neutralize = config.settings.rollout_nan_policy == "neutralize"
        return select_tokens(self.train_logps, self.rollout_logps, self.mask, neutralize=neutralize)


class Effect(NamedTuple):
    """Effect of settings on sequences. `None` where a number is not defined."""

    rejected: float | None = None  # share of the tokens that a criterion rejects
    sample_size: float | None = None  # effective sample size of the weights, as a share of the tokens
    effective_lr: float | None = None  # mean factor of the policy gradient
    cosine: float | None = None  # of the corrected and the uncorrected gradient, by token
    norm: float | None = None  # of the corrected gradient, divided by that of the uncorrected one


def batch_of(sequences: Sequences, rows: np.ndarray) -> Batch:
    """The tokens of the loss of some sequences, chosen by a boolean mask. A `ValueError` says that there are none."""
    of_loss = sequences.mask & rows[sequences.row]
    if not of_loss.any():
        raise ValueError("the dump holds no token of the loss")
    lengths = sequences.sums(of_loss)[rows].astype(int)
    columns = ("mask", "train_logps", "rollout_logps", "turn", "keep", "coefficients")
    padded = {name: pad(getattr(sequences, name)[of_loss], lengths) for name in columns}
    advantages = torch.from_numpy(np.nan_to_num(sequences.advantage[rows], posinf=0.0, neginf=0.0))[:, None]
    return Batch(np.unique(sequences.step[rows]).tolist(), **padded, advantages=advantages)


def rejected_by(sequences: Sequences, row: int, config: RolloutCorrectionConfig) -> dict[str, np.ndarray]:
    """
    By criterion of a configuration, the tokens of a sequence that it rejects: boolean, one for each token. Empty if together
    they reject other tokens than the run did.
    """
    settings, here = config.settings, sequences.slice(row)
    of_loss = sequences.mask[here]
    batch = batch_of(sequences, np.arange(len(sequences)) == row)
    found = {}
    for name, threshold in zip(settings.rollout_rs or [], settings.rollout_rs_threshold or [], strict=False):
        fields: dict[str, Any] = {"rollout_rs": [name], "rollout_rs_threshold": [threshold]}
        fields["rollout_nan_policy"] = settings.rollout_nan_policy
        alone = RolloutCorrectionConfig(rollout_correction=None, **fields)
        correction = compute_rollout_correction(
            batch.train_logps,
            batch.rollout_logps,
            batch.mask,
            alone,
            advantages=batch.advantages[:, 0],
            turn_ids=batch.turn,
        )
        rejected = np.zeros(len(of_loss), bool)
        rejected[of_loss] = (batch.tokens(alone).valid.bool() & ~correction.keep.bool())[0].numpy()
        found[name] = rejected
    together = np.any([*found.values()], 0) if found else np.zeros(len(of_loss), bool)
    gone = of_loss & ~sequences.keep[here] & np.isfinite(sequences.train_logps[here] - sequences.rollout_logps[here])
    return found if np.array_equal(together, gone) else {}


def recompute(
    batch: Batch,
    config: RolloutCorrectionConfig,
    *,
    clip: tuple[float, float],
    as_dumped: bool = False,
) -> Effect:
    """Correct sequences with a configuration, or `as_dumped`: with what the run itself wrote."""
    correction = compute_rollout_correction(
        batch.train_logps,
        batch.rollout_logps,
        batch.mask,
        config,
        advantages=batch.advantages[:, 0],
        turn_ids=batch.turn,
    )
    tokens = batch.tokens(config)
    keep, coefficients = (batch.keep, batch.coefficients) if as_dumped else (correction.keep, correction.coefficients)
    if config.settings.clips_around_sampler:
        coefficients = coefficients * (tokens.log_ratio.abs() <= LOG_RATIO_BOUND)  # PPO's gradient ends there
    factor = policy_factor(coefficients, tokens.log_ratio, batch.advantages, config, clip)
    count = tokens.lengths.sum(dtype=torch.float64)
    return Effect(
        None if not config.settings.criteria else (1 - keep.sum() / count).item(),
        correction.metrics().get(f"{PREFIX}rollout_is_eff_sample_size"),
        (coefficients.sum(dtype=torch.float64) / count).item(),
        *_compare_gradients(batch, factor),
    )


def policy_factor(
    coefficients: torch.Tensor,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    config: RolloutCorrectionConfig,
    clip: tuple[float, float],
) -> torch.Tensor:
    """
    Factor of `advantage * grad logp` of each token in the first optimizer step on it, `(B, T)`. Around the sampler it is PPO's
    ratio until it is clipped; in the other modes the ratio of the policy to itself is 1.
    """
    if not config.settings.clips_around_sampler:
        return coefficients
    lower, upper = clip
    largest = float(config.settings.rollout_clip_ratio_c or math.inf)
    ratio = log_ratio.clamp(max=LOG_RATIO_BOUND).exp()
    clipped = torch.where(advantages > 0, ratio > upper, (ratio < lower) | (ratio > largest))
    return coefficients * ratio * ~clipped


def _compare_gradients(batch: Batch, factor: torch.Tensor) -> tuple[float | None, float | None]:
    """Cosine, and ratio of norms, of the gradients with respect to the logit of each sampled token."""
    unlikely = -torch.expm1(batch.train_logps.clamp(max=0.0))  # 1 - p
    plain = (batch.advantages * unlikely).masked_fill(~(batch.mask & batch.train_logps.isfinite()), 0.0)
    corrected = plain * factor
    product, square, corrected_square = (
        (a * b).sum(dtype=torch.float64).item()
        for a, b in ((plain, corrected), (plain, plain), (corrected, corrected))
    )
    if not square:
        return None, None
    norm = (corrected_square / square) ** 0.5
    return (product / (square * corrected_square) ** 0.5 if corrected_square else None), norm
