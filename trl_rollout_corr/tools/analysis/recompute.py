"""Corrections computed again on the sequences of a dump, with other settings. It needs no TRL."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from ...correction.compute import RolloutCorrection, compute_rollout_correction
from ...correction.functional import LOG_RATIO_BOUND, Tokens, select_tokens
from ...messages import PREFIX
from ...settings.resolve import Settings
from ..dump.sequences import Sequences, pad


_SHORT = 64  # tokens up to which padding costs nothing


class Block(NamedTuple):
    """
    Sequences of about the same length, padded to the longest: `B` of at most `T` tokens, in tensors of shape `(B, T)`.
    """

    mask: torch.Tensor  # True for tokens, False for padding
    train_logps: torch.Tensor  # nats
    rollout_logps: torch.Tensor
    turn: torch.Tensor
    keep: torch.Tensor  # tokens that the run kept
    coefficients: torch.Tensor  # factor of the policy gradient in the run
    advantages: torch.Tensor  # `(B, 1)`, or `(B, T)` where each token has its own; 0 if it is not finite
    fresh: torch.Tensor  # `(B,)`: sampled with the weights of `train_logps`

    def tokens(self, *, neutralize: bool) -> Tokens:
        """Tokens that count. With `neutralize`, a token without a finite log-probability counts with ratio 1."""
        return select_tokens(self.train_logps, self.rollout_logps, self.mask, neutralize=neutralize)


class Batch(NamedTuple):
    """
    Tokens of the loss of sequences, without tool tokens. They lie in blocks, because one long completion would pad all
    others to its length.
    """

    steps: list[int]  # of the sequences, in order
    blocks: list[Block]

    @property
    def n_sequences(self) -> int:
        return sum(len(block.mask) for block in self.blocks)

    @property
    def n_tokens(self) -> int:
        return sum(int(block.mask.sum()) for block in self.blocks)


class Spread(NamedTuple):
    """Log-ratios of `B` completions with at least one token that counts."""

    lengths: torch.Tensor  # tokens per completion, `(B,)`
    s: float  # root mean square of the log-ratio of a token


class Outcome(NamedTuple):
    """What settings do to sequences. `None` where a number is not defined."""

    rejected: float | None = None  # share of the tokens that a criterion rejects
    sample_size: float | None = None  # effective sample size of the weights, as a share of the tokens
    effective_lr: float | None = None  # mean factor of the policy gradient
    cosine: float | None = None  # between the corrected and the uncorrected gradient, by token
    norm: float | None = None  # of the corrected gradient, relative to the uncorrected one


def batch_of(sequences: Sequences, rows: np.ndarray) -> Batch:
    """The tokens of the loss of the sequences in a boolean mask. A `ValueError` if there are none."""
    of_loss = sequences.mask & rows[sequences.row]
    if not of_loss.any():
        raise ValueError("the dump holds no token of the loss")
    lengths = sequences.sums(of_loss).astype(int)
    blocks = [
        _block(sequences, of_loss, lengths, chosen) for chosen in _groups_by_length(lengths, np.flatnonzero(rows))
    ]
    return Batch(np.unique(sequences.step[rows]).tolist(), blocks)


def _groups_by_length(lengths: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    """Rows in groups of similar length: at most twice the tokens of another row, or all short."""
    order = rows[np.argsort(lengths[rows], kind="stable")]
    groups, start = [], 0
    while start < len(order):
        longest = 2 * max(int(lengths[order[start]]), _SHORT)
        end = int(np.searchsorted(lengths[order], longest, side="right"))
        groups.append(np.sort(order[start:end]))
        start = end
    return groups


def _block(sequences: Sequences, of_loss: np.ndarray, lengths: np.ndarray, rows: np.ndarray) -> Block:
    """The tokens of the loss of some sequences, padded."""
    chosen = np.zeros(len(sequences), bool)
    chosen[rows] = True
    here = of_loss & chosen[sequences.row]
    columns = ("mask", "train_logps", "rollout_logps", "turn", "keep", "coefficients", "advantage_of_token")
    padded = {name: pad(getattr(sequences, name)[here], lengths[rows]) for name in columns}
    of_tokens, of_rows = padded.pop("advantage_of_token"), torch.from_numpy(sequences.advantage[rows])[:, None]
    # a criterion on completions takes one advantage of each
    advantages = of_rows if np.isnan(sequences.advantages).all() else of_tokens
    advantages = advantages.nan_to_num(0.0, 0.0, 0.0)
    return Block(**padded, advantages=advantages, fresh=torch.from_numpy(sequences.is_fresh[rows]))


def spread_of(batch: Batch) -> Spread:
    """
    Spread of the log-ratio over tokens with a finite log-probability of both policies; a `ValueError` without any.
    """
    tokens = [block.tokens(neutralize=False) for block in batch.blocks]
    lengths = torch.cat([x.lengths.flatten().double() for x in tokens])
    if not lengths.any():
        raise ValueError("no token of the loss has a finite log-probability under both policies")
    d = torch.cat([x.log_ratio[x.valid > 0].double() for x in tokens])
    return Spread(lengths[lengths > 0], d.square().mean().sqrt().item())


def rejected_by(sequences: Sequences, row: int, settings: Settings) -> dict[str, np.ndarray]:
    """
    The tokens of a sequence that each criterion of the settings rejects, boolean, by name of the criterion. Empty if
    the criteria together reject other tokens than the run did.
    """
    here = sequences.slice(row)
    of_loss = sequences.mask[here]
    (block,) = batch_of(sequences, np.arange(len(sequences)) == row).blocks
    found = {}
    for name, threshold in zip(settings.rollout_rs or [], settings.rollout_rs_threshold or [], strict=False):
        alone = replace(settings, rollout_is=None, rollout_rs=[name], rollout_rs_threshold=[threshold])
        correction = compute_rollout_correction(
            block.train_logps,
            block.rollout_logps,
            block.mask,
            alone,
            advantages=block.advantages,
            turn_ids=block.turn,
        )
        rejected = np.zeros(len(of_loss), bool)
        valid = block.tokens(neutralize=alone.rollout_nan_policy == "neutralize").valid.bool()
        rejected[of_loss] = (valid & ~correction.keep.bool())[0].numpy()
        found[name] = rejected
    together = np.any([*found.values()], 0) if found else np.zeros(len(of_loss), bool)
    gone = of_loss & ~sequences.keep[here] & np.isfinite(sequences.train_logps[here] - sequences.rollout_logps[here])
    return found if np.array_equal(together, gone) else {}


def recompute(
    batch: Batch,
    settings: Settings,
    *,
    clip: tuple[float, float],
    as_dumped: bool = False,
) -> Outcome:
    """What settings do to sequences or, `as_dumped`, of the correction that the run itself wrote."""
    corrections, neutralize = _correct_blocks(batch, settings), settings.rollout_nan_policy == "neutralize"
    tokens = kept = 0.0
    coefficient, products = 0.0, torch.zeros(3, dtype=torch.float64)
    for block, correction in zip(batch.blocks, corrections, strict=True):
        counted = block.tokens(neutralize=neutralize)
        keep, coefficients = (
            (block.keep, block.coefficients) if as_dumped else (correction.keep, correction.coefficients)
        )
        if settings.clips_around_sampler:
            coefficients = coefficients * (counted.log_ratio.abs() <= LOG_RATIO_BOUND)  # PPO's gradient ends there
        factor = policy_factor(coefficients, counted.log_ratio, block.advantages, settings, clip)
        tokens += counted.lengths.sum(dtype=torch.float64).item()
        kept += keep.sum().item()
        coefficient += coefficients.sum(dtype=torch.float64).item()
        products += _gradients(block, factor)
    statistics = sum((x.statistics for x in corrections[1:]), corrections[0].statistics)
    share = float("nan") if not tokens else 1 / tokens
    return Outcome(
        None if not settings.criteria else 1 - kept * share,
        statistics.finish().get(f"{PREFIX}rollout_is_eff_sample_size"),
        coefficient * share,
        *_compared(*products.tolist()),
    )


def _correct_blocks(batch: Batch, settings: Settings) -> list[RolloutCorrection]:
    """The correction of each block. A value of the whole batch, such as the mean weight, covers all blocks."""

    def correct(sum_over_blocks: Callable[[torch.Tensor], torch.Tensor]) -> list[RolloutCorrection]:
        return [
            compute_rollout_correction(
                block.train_logps,
                block.rollout_logps,
                block.mask,
                settings,
                advantages=block.advantages,
                turn_ids=block.turn,
                fresh=block.fresh,
                sum_over_ranks=sum_over_blocks,
            )
            for block in batch.blocks
        ]

    totals: list[torch.Tensor] = []

    def note(total: torch.Tensor) -> torch.Tensor:
        totals.append(total)
        return total

    corrections = correct(note)
    if len(totals) < 2:
        return corrections
    of_all = torch.stack(totals).sum(0)
    return correct(lambda total: of_all)


def policy_factor(
    coefficients: torch.Tensor,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    settings: Settings,
    clip: tuple[float, float],
) -> torch.Tensor:
    """
    Factor of `advantage * grad logp` of each token in the first optimizer step on it, `(B, T)`. It is PPO's ratio up
    to the clip bounds around the sampler; in the other modes the ratio is 1.
    """
    if not settings.clips_around_sampler:
        return coefficients
    lower, upper = clip
    largest = float(settings.rollout_clip_ratio_c or math.inf)
    ratio = log_ratio.clamp(max=LOG_RATIO_BOUND).exp()
    clipped = torch.where(advantages > 0, ratio > upper, (ratio < lower) | (ratio > largest))
    return coefficients * ratio * ~clipped


def _gradients(block: Block, factor: torch.Tensor) -> torch.Tensor:
    """Scalar product and squared norms, `(3,)`, of the plain and the corrected gradient by token logit."""
    unlikely = -torch.expm1(block.train_logps.clamp(max=0.0))  # 1 - p
    plain = (block.advantages * unlikely).masked_fill(~(block.mask & block.train_logps.isfinite()), 0.0)
    corrected = plain * factor
    pairs = ((plain, corrected), (plain, plain), (corrected, corrected))
    return torch.stack([(a * b).sum(dtype=torch.float64) for a, b in pairs])


def _compared(product: float, square: float, corrected_square: float) -> tuple[float | None, float | None]:
    """Cosine, and ratio of norms, of the plain and the corrected gradient."""
    if not square:
        return None, None
    norm = (corrected_square / square) ** 0.5
    return (product / (square * corrected_square) ** 0.5 if corrected_square else None), norm
