"""Sequences of a dump, corrected again with other settings. No TRL here."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from ..config import RolloutCorrectionConfig
from ..correction import compute_rollout_correction
from ..dump import read_table
from ..functional import LOG_RATIO_BOUND, Tokens, select_tokens
from ..metrics import PREFIX


_LISTS = ("mask", "train_logps", "rollout_logps", "keep", "coefficients")
_COLUMNS = ["step", "sampled", "advantage", *_LISTS]


class Rows(NamedTuple):
    """
    Tokens of the loss of `B` sequences, padded to the longest. Tokens of tools are left out.

    Args:
        steps (`list[int]`):
            Optimizer steps that they are from, in order.
        mask (`torch.Tensor` of shape `(B, T)`):
            Which entries are tokens.
        train_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the training policy, in nats.
        rollout_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the rollout policy, in nats.
        keep (`torch.Tensor` of shape `(B, T)`):
            What the run kept.
        coefficients (`torch.Tensor` of shape `(B, T)`):
            What multiplied the policy gradient in the run.
        advantages (`torch.Tensor` of shape `(B, 1)`):
            Advantage of each sequence; 0 if it is not finite.
    """

    steps: list[int]
    mask: torch.Tensor
    train_logps: torch.Tensor
    rollout_logps: torch.Tensor
    keep: torch.Tensor
    coefficients: torch.Tensor
    advantages: torch.Tensor

    def tokens(self, config: RolloutCorrectionConfig) -> Tokens:
        """Tokens that count under a configuration."""
        neutralize = config.rollout_nan_policy == "neutralize"
        return select_tokens(self.train_logps, self.rollout_logps, self.mask, neutralize=neutralize)


class Outcome(NamedTuple):
    """
    What settings do to the sequences. `None` for what there is not.

    Args:
        rejected (`float` or `None`):
            Share of the tokens that a criterion rejects.
        sample_size (`float` or `None`):
            Effective sample size of the weights, as a share of the tokens.
        effective_lr (`float` or `None`):
            Mean of what multiplies the policy gradient.
        cosine (`float` or `None`):
            Cosine of the corrected and the uncorrected gradient, by token.
        norm (`float` or `None`):
            Norm of the corrected gradient over that of the uncorrected one.
    """

    rejected: float | None = None
    sample_size: float | None = None
    effective_lr: float | None = None
    cosine: float | None = None
    norm: float | None = None


def read_rows(path: str | Path, *, worst: bool, steps: tuple[int, int] | None) -> tuple[Rows, dict[str, Any]]:
    """
    Read the sequences of a dump.

    Args:
        path (`str` or `Path`):
            The dump.
        worst (`bool`):
            Whether to take those that were chosen because they are the worst, too.
        steps (`tuple[int, int]` or `None`):
            First and last optimizer step to take. `None` for all.

    Returns:
        `tuple[Rows, dict]`: the sequences, and the settings of the run.

    Raises:
        `ValueError`: in one line, if there is no dump, it is damaged, or nothing in it fits.
    """
    table, settings = read_table(path, _COLUMNS)
    if steps is not None:
        first, last = steps
        table = table.filter(pc.and_(pc.greater_equal(table["step"], first), pc.less_equal(table["step"], last)))
        if not table.num_rows:
            raise ValueError(f"the dump holds no sequences of steps {first} to {last}")
    if not worst:
        table = table.filter(table["sampled"])
        if not table.num_rows:
            raise ValueError(
                "no sequence was drawn at random (`rollout_dump_sampled`), and the worst ones do not represent the batch; "
                "take them with --worst"
            )
    return _padded(table), settings


def replay(
    rows: Rows,
    config: RolloutCorrectionConfig,
    *,
    epsilon: float,
    epsilon_high: float,
    as_dumped: bool = False,
) -> Outcome:
    """
    Correct sequences with a configuration.

    Args:
        rows ([`Rows`]):
            The sequences, taken as one batch.
        config ([`RolloutCorrectionConfig`]):
            What to do.
        epsilon (`float`):
            PPO's interval of the ratio reaches down to `1 - epsilon`.
        epsilon_high (`float`):
            It reaches up to `1 + epsilon_high`.
        as_dumped (`bool`, *optional*, defaults to `False`):
            Take what was rejected, and what multiplied the gradients, from the run itself.

    Returns:
        [`Outcome`]: what it does.

    Raises:
        `ValueError`: if a log-probability is not finite and `rollout_nan_policy` is `"raise"`.
    """
    correction = compute_rollout_correction(rows.train_logps, rows.rollout_logps, rows.mask, config)
    metrics = correction.metrics()
    tokens = rows.tokens(config)
    keep, coefficients = (rows.keep, rows.coefficients) if as_dumped else (correction.keep, correction.coefficients)
    if config.bypass_mode and config.rollout_loss_type == "ppo_clip":
        coefficients = coefficients * (tokens.log_ratio.abs() <= LOG_RATIO_BOUND)  # PPO's gradient ends there
    count = tokens.lengths.sum(dtype=torch.float64)
    rejected = None if config.rollout_rs is None else (1 - keep.sum() / count).item()
    effective_lr = (coefficients.sum(dtype=torch.float64) / count).item()
    cosine, norm = _compare_gradients(rows, _factor(coefficients, tokens, rows, config, epsilon, epsilon_high))
    return Outcome(rejected, metrics.get(f"{PREFIX}rollout_is_eff_sample_size"), effective_lr, cosine, norm)


def _factor(
    coefficients: torch.Tensor,
    tokens: Tokens,
    rows: Rows,
    config: RolloutCorrectionConfig,
    epsilon: float,
    epsilon_high: float,
) -> torch.Tensor:
    """What multiplies the gradient of each token. Around the sampler, PPO's ratio does too, until it is clipped."""
    if not config.bypass_mode or config.rollout_loss_type != "ppo_clip":
        return coefficients
    ratio = tokens.log_ratio.clamp(max=LOG_RATIO_BOUND).exp()
    clipped = torch.where(rows.advantages > 0, ratio > 1 + epsilon_high, ratio < 1 - epsilon)
    return coefficients * ratio * ~clipped


def _compare_gradients(rows: Rows, factor: torch.Tensor) -> tuple[float | None, float | None]:
    """Cosine, and ratio of norms, of the gradients with respect to the logit of each sampled token."""
    unlikely = -torch.expm1(rows.train_logps.clamp(max=0.0))  # 1 - p
    plain = (rows.advantages * unlikely).masked_fill(~(rows.mask & rows.train_logps.isfinite()), 0.0)
    corrected = plain * factor
    product, square, corrected_square = (
        (a * b).sum(dtype=torch.float64).item()
        for a, b in ((plain, corrected), (plain, plain), (corrected, corrected))
    )
    if not square:
        return None, None
    norm = (corrected_square / square) ** 0.5
    return (product / (square * corrected_square) ** 0.5 if corrected_square else None), norm


# From lists of different lengths to tensors -------------------------------------------------------------------------------


def _padded(table: pa.Table) -> Rows:
    lengths = _lengths(table, "mask")
    if any(not np.array_equal(lengths, _lengths(table, name)) for name in _LISTS):
        raise ValueError("a sequence of the dump has lists of different lengths")
    mask = _flat(table, "mask")
    loss_lengths = np.bincount(np.repeat(np.arange(len(lengths)), lengths)[mask], minlength=len(lengths))
    if not mask.any():
        raise ValueError("the dump holds no token of the loss")
    inside = torch.arange(int(loss_lengths.max())) < torch.from_numpy(loss_lengths)[:, None]

    def padded(name: str) -> torch.Tensor:
        values = torch.from_numpy(_flat(table, name)[mask])
        out = values.new_zeros(inside.shape)
        out[inside] = values
        return out

    columns = {name: padded(name) for name in _LISTS if name != "mask"}
    advantages = torch.from_numpy(table["advantage"].to_numpy().copy()).nan_to_num(0.0, 0.0, 0.0)[:, None]
    return Rows(table["step"].unique().to_pylist(), inside, advantages=advantages, **columns)


def _lengths(table: pa.Table, name: str) -> np.ndarray:
    return pc.fill_null(pc.list_value_length(table[name]), 0).to_numpy()


def _flat(table: pa.Table, name: str) -> np.ndarray:
    """All lists of a column, end to end."""
    chunks = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table[name].chunks]
    return np.concatenate(chunks).astype(bool if name in ("mask", "keep") else np.float32, copy=False)
