"""
Importance weights and rejection rules: tensors in, tensors out.

Shapes: `B` completions, `T` completion tokens. Everything is `(B, T)` unless it says otherwise, and `valid` is the boolean
mask of the tokens the loss is taken over. `log_ratio` is `log pi_train - log pi_rollout` of the sampled tokens and must be
0 outside `valid` (see [`masked_log_ratio`]); nothing here looks at a token outside `valid`.

Nothing in this module reads a configuration, synchronises with the host, or talks to another process.
"""

from typing import NamedTuple

import torch


# exp(20) = 4.9e8: beyond it a ratio says "broken", not "off-policy", and sums of squares still fit in float32. The bound
# is verl's, which also raises ratios below exp(-20) to it; they may as well go to 0.
LOG_RATIO_BOUND = 20.0

# A mean weight below this carries no information to normalise with (every weight was zeroed).
MIN_MEAN_WEIGHT = 1e-8

LEVELS = ("token", "sequence", "geometric")
SCOPES = ("token", "seq_sum", "seq_mean", "seq_max")
DIVERGENCES = ("k1", "k2", "k3")


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Type to add up a batch in: float32 stops counting at 2^24 tokens, but MPS has nothing wider."""
    return torch.float32 if device.type == "mps" else torch.float64


class Criterion(NamedTuple):
    """
    A rejection rule: keep what has `lower <= statistic <= upper`.

    Args:
        scope (`str`):
            `"token"`, or how the tokens of a sequence are reduced to one statistic: `"seq_sum"`, `"seq_mean"`,
            `"seq_max"`.
        divergence (`str`):
            Per-token statistic, see [`token_divergence`].
        lower (`float`):
            Lower bound, in units of the statistic; `-inf` for none.
        upper (`float`):
            Upper bound, in units of the statistic.
    """

    scope: str
    divergence: str
    lower: float
    upper: float

    @property
    def name(self) -> str:
        return f"{self.scope}_{self.divergence}"


class Rejection(NamedTuple):
    """
    What one [`Criterion`] says about a batch.

    Args:
        keep (`torch.Tensor` of shape `(B, T)`):
            `True` where the criterion keeps the token. A sequence criterion is constant along `T`.
        statistic (`torch.Tensor` of shape `(B, T)` or `(B, 1)`):
            The statistic: per token, or per sequence.
        high (`torch.Tensor` of shape `(B, T)` or `(B, 1)`):
            `True` where the statistic exceeds the upper bound.
        low (`torch.Tensor` of shape `(B, T)` or `(B, 1)`):
            `True` where the statistic is under the lower bound.
    """

    keep: torch.Tensor
    statistic: torch.Tensor
    high: torch.Tensor
    low: torch.Tensor


def masked_log_ratio(train_logps: torch.Tensor, rollout_logps: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """
    Log-ratio of the training policy to the rollout policy, 0 outside `valid`.

    Args:
        train_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the sampled tokens under the training policy, in nats.
        rollout_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the same tokens under the policy that sampled them, in nats.
        valid (`torch.Tensor` of shape `(B, T)`):
            Boolean mask. Where it is `False` the log-probabilities may hold anything, NaN included.

    Returns:
        `torch.Tensor` of shape `(B, T)`: the log-ratio, in float32 or wider.
    """
    dtype = torch.promote_types(torch.promote_types(train_logps.dtype, rollout_logps.dtype), torch.float32)
    difference = train_logps.detach().to(dtype) - rollout_logps.detach().to(dtype)
    return difference.masked_fill(~valid, 0.0)  # not a multiplication: NaN * 0 is NaN


def importance_ratio(log_ratio: torch.Tensor, valid: torch.Tensor, *, level: str) -> torch.Tensor:
    r"""
    Raw importance ratio, before any bound: `exp(d)` per token, `exp(sum d)` or `exp(mean d)` per sequence.

    `sequence` is the unbiased importance weight of a completion; `token` is its first-order, low-variance substitute
    ([Your Efficient RL Framework Secretly Brings You Off-Policy RL Training](https://fengyao.notion.site/off-policy-rl));
    `geometric` is `sequence` to the power `1 / length` ([GSPO](https://huggingface.co/papers/2507.18071) uses this form
    of ratio).

    Args:
        log_ratio (`torch.Tensor` of shape `(B, T)`):
            Log-ratio `d`, 0 outside `valid`.
        valid (`torch.Tensor` of shape `(B, T)`):
            Boolean mask.
        level (`str`):
            `"token"`, `"sequence"` or `"geometric"`.

    Returns:
        `torch.Tensor` of shape `(B, T)`: the ratio in `[0, exp(20)]`, constant along a sequence for the two sequence
        levels, and 0 outside `valid`.
    """
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True)
    elif level == "geometric":
        log_ratio = log_ratio.sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)
    elif level != "token":
        raise ValueError(f"`level` must be one of {LEVELS}, got {level!r}.")
    ratio = log_ratio.clamp(max=LOG_RATIO_BOUND).exp()
    return ratio.expand_as(valid).masked_fill(~valid, 0.0)


def bound_weights(ratio: torch.Tensor, *, lower: float | None, upper: float) -> torch.Tensor:
    """
    Bound importance ratios: truncate them from above, or drop those outside an interval.

    Args:
        ratio (`torch.Tensor` of shape `(B, T)`):
            Raw importance ratio.
        lower (`float` or `None`):
            `None` truncates: `min(ratio, upper)`. A number switches to
            [IcePop](https://ringtech.notion.site/icepop): 0 outside `[lower, upper]`, unchanged inside.
        upper (`float`):
            Upper bound.

    Returns:
        `torch.Tensor` of shape `(B, T)`: weights in `[0, upper]`.
    """
    if lower is None:
        return ratio.clamp(max=upper)
    return ratio.masked_fill((ratio < lower) | (ratio > upper), 0.0)


def token_divergence(log_ratio: torch.Tensor, divergence: str) -> torch.Tensor:
    r"""
    Per-token estimates of the divergence between the two policies
    ([Approximating KL Divergence](http://joschu.net/blog/kl-approx.html)), with `d` the log-ratio:

    - `k1 = -d`, which is signed: positive where the trainer finds the token less likely than the sampler did;
    - `k2 = d^2 / 2`, symmetric in `d`;
    - `k3 = exp(d) - 1 - d`, which grows like the ratio above 1 and like its logarithm below.

    Args:
        log_ratio (`torch.Tensor` of shape `(B, T)`):
            Log-ratio `d`, 0 outside the valid tokens.
        divergence (`str`):
            `"k1"`, `"k2"` or `"k3"`.

    Returns:
        `torch.Tensor` of shape `(B, T)`: the estimate in nats. `k2` and `k3` are computed from `d` clamped to
        `[-20, 20]` so that they stay finite; `k1` needs no clamp.
    """
    if divergence == "k1":
        return -log_ratio
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if divergence == "k2":
        return bounded.square() / 2
    if divergence == "k3":
        return torch.expm1(bounded) - bounded  # expm1: exp(d) - 1 loses every digit for the usual d of 1e-4
    raise ValueError(f"`divergence` must be one of {DIVERGENCES}, got {divergence!r}.")


def reject(log_ratio: torch.Tensor, valid: torch.Tensor, criterion: Criterion) -> Rejection:
    """
    Apply one rejection rule.

    Args:
        log_ratio (`torch.Tensor` of shape `(B, T)`):
            Log-ratio, 0 outside `valid`.
        valid (`torch.Tensor` of shape `(B, T)`):
            Boolean mask.
        criterion ([`Criterion`]):
            The rule.

    Returns:
        [`Rejection`]: what is kept, and the statistic that decided. A sequence without valid tokens has statistic 0.
    """
    tokens = token_divergence(log_ratio, criterion.divergence)  # (B, T), 0 outside `valid`
    highest = lowest = statistic = _reduce_sequence(tokens, valid, criterion.scope)
    if criterion.scope == "seq_max" and criterion.divergence == "k1":
        # k1 is signed, so the worst token may lie on either side
        highest = statistic
        lowest = -_reduce_sequence(-tokens, valid, criterion.scope)
        statistic = torch.where(highest.abs() >= lowest.abs(), highest, lowest)
    high, low = highest > criterion.upper, lowest < criterion.lower
    return Rejection(keep=~(high | low).expand_as(valid), statistic=statistic, high=high, low=low)


def _reduce_sequence(tokens: torch.Tensor, valid: torch.Tensor, scope: str) -> torch.Tensor:
    """Reduce a per-token statistic (0 outside `valid`) to `(B, 1)`, or leave it `(B, T)` for scope `"token"`."""
    if scope == "token":
        return tokens
    if scope == "seq_sum":
        return tokens.sum(-1, keepdim=True)
    if scope == "seq_mean":
        return tokens.sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)
    if scope == "seq_max":
        worst = tokens.masked_fill(~valid, -torch.inf).amax(-1, keepdim=True)
        return worst.masked_fill(~valid.any(-1, keepdim=True), 0.0)
    raise ValueError(f"`scope` must be one of {SCOPES}, got {scope!r}.")


def weight_sums(weights: torch.Tensor, valid: torch.Tensor, *, level: str) -> torch.Tensor:
    """
    Sum and count whose quotient is the mean weight: over tokens at token level, over non-empty sequences otherwise.

    Both are additive over ranks, so the caller adds them up before dividing.

    Args:
        weights (`torch.Tensor` of shape `(B, T)`):
            Bounded weights, 0 outside `valid`.
        valid (`torch.Tensor` of shape `(B, T)`):
            Boolean mask.
        level (`str`):
            Level of the weights.

    Returns:
        `torch.Tensor` of shape `(2,)`: `[sum, count]`, in [`accumulation_dtype`].
    """
    dtype = accumulation_dtype(weights.device)
    if level == "token":
        return torch.stack([weights.sum(dtype=dtype), valid.sum().to(dtype)])
    # weights are constant along a sequence, so its largest entry is its weight: unlike a mean, that is exact
    return torch.stack([weights.amax(-1).sum(dtype=dtype), valid.any(-1).sum().to(dtype)])


def normalize_weights(weights: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """
    Divide weights by their mean over the batch (self-normalised importance sampling).

    Args:
        weights (`torch.Tensor` of shape `(B, T)`):
            Bounded weights.
        sums (`torch.Tensor` of shape `(2,)`):
            [`weight_sums`] of the whole batch, added up over all ranks.

    Returns:
        `torch.Tensor` of shape `(B, T)`: weights of mean 1 over the batch; unchanged if their mean is below 1e-8.
    """
    mean = sums[0] / sums[1].clamp(min=1)
    return weights / torch.where(mean > MIN_MEAN_WEIGHT, mean, torch.ones_like(mean))


def renormalization(valid_and_kept: torch.Tensor) -> torch.Tensor:
    """
    Factor that turns a mean over all valid tokens into a mean over the kept ones.

    Args:
        valid_and_kept (`torch.Tensor` of shape `(2,)`):
            Number of valid tokens and number of kept tokens of the whole batch, added up over all ranks.

    Returns:
        `torch.Tensor` of shape `()`: `valid / kept`, or 1 if nothing is kept.
    """
    valid, kept = valid_and_kept
    return torch.where(kept > 0, valid / kept.clamp(min=1), torch.ones_like(valid))
