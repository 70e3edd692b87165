"""
Importance weights and rejection rules: tensors in, tensors out.

Shapes: `B` completions, `T` completion tokens. Indicators of tokens are numbers, 1 or 0, in the type of the log-ratio:
multiplying and adding them is several times faster than combining and counting booleans.

Nothing in this module reads a configuration, synchronises with the host, or talks to another process.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from ..settings.criteria import OF_PROBABILITIES, WINDOW, Bounding, Criterion


Bound = float | torch.Tensor

# exp(20) = 4.9e8: a larger ratio means "broken", not "off-policy", and sums of squares still fit in float32. The bound
# is verl's. verl also raises ratios below exp(-20) to exp(-20); here they keep their value, which is at most 2e-9
# away.
LOG_RATIO_BOUND = 20.0

# A log-ratio beyond this comes from a masked logit. The bound keeps sums of squares finite in float32.
LARGEST_LOG_RATIO = 1e15

# Exponents of e are clamped to this: a long row of exp(60) still adds up within float32.
LARGEST_POWER = 60.0

# Probabilities are kept this far from 0 and 1 in a divergence of two events.
SMALLEST_PROBABILITY = 1e-6

# Weights with a mean below this are not normalised, because every weight was set to 0.
MIN_MEAN_WEIGHT = 1e-8

# Rows are processed in blocks of this many tokens, with a dozen tensors alive at a time. On a CPU a block stays in the
# cache; elsewhere a kernel must be worth its launch.
_BLOCK_ON_CPU, _BLOCK_ELSEWHERE = 2**17, 2**22


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Type for sums over a batch: float32 stops counting at 2^24 tokens, but MPS lacks float64."""
    return torch.float32 if device.type == "mps" else torch.float64


class Tokens(NamedTuple):
    """The tokens that count, in some rows of a batch. [`select_tokens`] makes it."""

    log_ratio: torch.Tensor  # (B, T): d = log pi_train - log pi_rollout, in nats, 0 where tokens do not count
    train_logps: torch.Tensor  # (B, T): log-probabilities of the training policy, in nats, 0 where tokens do not count
    valid: torch.Tensor  # (B, T): 1 on tokens that count, else 0
    inf_where_invalid: torch.Tensor  # (B, T): 0 on tokens that count, else infinity: for minima and maxima
    lengths: torch.Tensor  # (B, 1): number of tokens that count
    mask_lengths: torch.Tensor  # (B, 1): number of tokens of the loss
    broken: torch.Tensor  # (B, 1): number of tokens of the loss whose log-ratio is not finite
    turn: torch.Tensor | None = None  # (B, T): turn of each token, from 0; `None` if no level or scope asks for turns

    def over(self, unit: str, x: torch.Tensor, how: str) -> torch.Tensor:
        """
        Sum (`"sum"`) or maximum (`"amax"`) of `x`, `(B, T)`, over each sequence (`"seq"`), `(B, 1)`, or over the turn
        of each token (`"turn"`), `(B, T)`.
        """
        of_row = x.sum(-1, keepdim=True) if how == "sum" else x.amax(-1, keepdim=True)
        if unit == "seq" or self.turn is None:
            return of_row
        turns = torch.full_like(x, 0.0 if how == "sum" else -torch.inf).scatter_reduce_(-1, self.turn, x, how)
        # A single turn takes the sum of the sequence: another order of addition would round differently
        return torch.where(self.turn.amax(-1, keepdim=True) > 0, turns.gather(-1, self.turn), of_row)

    def part_of_turn(self) -> torch.Tensor:
        """`(B, T)`: 1 over the number of tokens in the turn; 0 where a token does not count."""
        return self.valid / self.over("turn", self.valid, "sum").clamp(min=1)


class Rejection(NamedTuple):
    """Result of one [`Criterion`]. `(B, 1)` for criteria of sequences, else `(B, T)`."""

    # compared with the bounds; 0 for a token that does not count, and a sequence without tokens
    statistic: torch.Tensor
    high: torch.Tensor  # 1 above the upper bound, else 0
    low: torch.Tensor  # 1 below the lower bound, else 0

    @property
    def rejected(self) -> torch.Tensor:
        return torch.maximum(self.high, self.low)


def row_blocks(mask: torch.Tensor) -> Iterator[slice]:
    """Slices of the rows of a tensor of shape `(B, T)`, each small enough to process at once."""
    size = _BLOCK_ON_CPU if mask.device.type == "cpu" else _BLOCK_ELSEWHERE
    step = max(size // mask.shape[1], 1)
    for start in range(0, mask.shape[0], step):
        yield slice(start, start + step)


def turns_of(mask: torch.Tensor, turn_ids: torch.Tensor | None = None) -> torch.Tensor:
    """
    Turn of each token of the model, from 1; all shapes are `(B, T)`. `mask` marks these tokens. A token outside the
    mask gets the turn before it, or 0 without one. A change of `turn_ids`, which never decrease, begins a turn; by
    default a turn is a run of tokens of the model.
    """
    model = mask != 0
    turn_so_far = model.long() if turn_ids is None else torch.where(model, turn_ids.long() + 1, 0).cummax(1).values
    before = torch.nn.functional.pad(turn_so_far[:, :-1], (1, 0))
    return (model & (turn_so_far > before)).cumsum(1)


def as_numbers(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """1 where a mask is not 0, else 0. CPUs convert booleans six times faster if read as bytes."""
    if mask.dtype != torch.bool:
        mask = mask.detach() != 0
    return mask.view(torch.uint8).to(dtype)


def zero_unless(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """`x` where `counts` is 1, and 0 where it is 0, also where `x` is NaN or infinite."""
    return x.nan_to_num(0.0, 0.0, 0.0).mul_(counts)  # NaN * 0 is NaN


def above(x: torch.Tensor, bound: Bound) -> torch.Tensor:
    """1 where `x > bound`, else 0, in the type of `x`."""
    return torch.gt(x, bound, out=torch.empty_like(x))


def below(x: torch.Tensor, bound: Bound) -> torch.Tensor:
    """1 where `x < bound`, else 0, in the type of `x`."""
    return torch.lt(x, bound, out=torch.empty_like(x))


def select_tokens(
    train_logps: torch.Tensor, rollout_logps: torch.Tensor, mask: torch.Tensor, *, neutralize: bool = False
) -> Tokens:
    """
    Select the tokens that count, in float32 or wider: tokens of the mask with a finite log-ratio. Elsewhere the
    log-probabilities, `(B, T)` in nats, may be anything, NaN included. `neutralize` sets the log-ratio to 0 where only
    the rollout policy's log-probability is not finite.
    """
    dtype = torch.promote_types(torch.promote_types(train_logps.dtype, rollout_logps.dtype), torch.float32)
    train_logps = train_logps.detach().to(dtype)
    difference = train_logps - rollout_logps.detach().to(dtype)
    mask = as_numbers(mask, dtype)
    finite = below(difference.abs(), LARGEST_LOG_RATIO).mul_(mask)  # 0 for NaN
    valid = below(train_logps.abs(), torch.inf).mul_(mask) if neutralize else finite
    mask_lengths, lengths = mask.sum(-1, keepdim=True), valid.sum(-1, keepdim=True)
    return Tokens(
        log_ratio=zero_unless(difference, finite),
        train_logps=zero_unless(train_logps, valid),
        valid=valid,
        inf_where_invalid=valid.reciprocal().sub_(1.0),
        lengths=lengths,
        mask_lengths=mask_lengths,
        broken=mask_lengths - (finite.sum(-1, keepdim=True) if neutralize else lengths),
    )


def importance_ratio(tokens: Tokens, *, level: str) -> torch.Tensor:
    r"""
    Raw importance ratio, before any bound: `exp(d)` per token, `exp(sum d)` per turn, sequence or window, or
    `exp(mean d)` per sequence. The window of a token ends with it and has
    [`~trl_rollout_corr.settings.criteria.WINDOW`] tokens; one that does not count has a ratio of 1 in it.

    `sequence` is the unbiased importance weight of a completion; `token` is its first-order, low-variance substitute
    ([Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training](https://fengyao.notion.site/off-policy-rl)); `geometric` is `sequence` to the power `1 / length`
    ([GSPO](https://huggingface.co/papers/2507.18071) uses this form of ratio).

    The exact weight of a token's gradient, with what came before it, is the product of all ratios up to it
    (per-decision importance sampling); `window` leaves out those far before, so that it does not scatter more in long
    completions.

    The ratio, `(B, T)` or for the two sequence levels `(B, 1)`, is at most `exp(20)`, and 0 on tokens that do not
    count.
    """
    if level == "token":
        return tokens.log_ratio.clamp(max=LOG_RATIO_BOUND).exp_().mul_(tokens.valid)
    if level == "window":
        log_ratio = torch.nn.functional.pad(tokens.log_ratio, (WINDOW - 1, 0)).unfold(-1, WINDOW, 1).sum(-1)
        return log_ratio.clamp_(max=LOG_RATIO_BOUND).exp_().mul_(tokens.valid)
    unit = "turn" if level == "turn" else "seq"
    log_ratio = tokens.over(unit, tokens.log_ratio, "sum")
    if level == "geometric":
        log_ratio = log_ratio / tokens.lengths.clamp(min=1)
    return log_ratio.clamp(max=LOG_RATIO_BOUND).exp().mul_(counting(tokens, unit))


def counting(tokens: Tokens, unit: str) -> torch.Tensor:
    """1 where a token counts, `(B, T)`, or for `"seq"` where a sequence contains one, `(B, 1)`."""
    return above(tokens.lengths, 0.0) if unit == "seq" else tokens.valid


def bounds_by_sign(
    bounding: Bounding, direction: torch.Tensor | None, dtype: torch.dtype
) -> tuple[Bound | None, Bound]:
    """
    Lower and upper bound of the importance weights. Bounds that depend on the advantage take the shape of its sign
    `direction`, `(B, 1)` or `(B, T)`.
    """
    if bounding.positive is None or bounding.lower is None:
        return bounding.lower, bounding.upper
    assert direction is not None  # `compute_rollout_correction` has refused missing advantages
    constant = partial(direction.new_full, (), dtype=dtype)
    lower, upper = map(constant, bounding.positive)
    good = direction > 0
    return torch.where(good, lower, constant(bounding.lower)), torch.where(good, upper, constant(bounding.upper))


def bound_weights(
    ratio: torch.Tensor, counts: torch.Tensor, *, lower: Bound | None, upper: Bound, clamp: bool = False
) -> torch.Tensor:
    """
    Bound importance ratios, `(B, T)` or `(B, 1)`, which count where `counts` is 1. Without `lower` they are truncated:
    `min(ratio, upper)`. With it they become 0 outside `[lower, upper]`, as in
    [IcePop](https://ringtech.notion.site/icepop), or the nearest bound with `clamp`.
    """
    if lower is None:
        return ratio.clamp(max=upper)
    if clamp:
        return ratio.clamp(lower, upper).mul_(counts)  # type: ignore[arg-type]  # two numbers, or two tensors
    return ratio * (1.0 - above(ratio, upper) - below(ratio, lower))


def token_divergence(log_ratio: torch.Tensor, divergence: str) -> torch.Tensor:
    r"""
    Per-token estimates of the divergence between the two policies
    ([Approximating KL Divergence](http://joschu.net/blog/kl-approx.html)), with `d` the log-ratio:

    - `k1 = -d`, which is signed: positive where the trainer finds the token less likely than the sampler did;
    - `k2 = d^2 / 2`, symmetric in `d`;
    - `k3 = exp(d) - 1 - d`, which grows like the ratio above 1 and like its logarithm below.

    The estimate, `(B, T)`, is in nats. `k2` and `k3` are computed from `d` clamped to `[-20, 20]` so that they stay
    finite.
    """
    if divergence == "k1":
        return -log_ratio
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if divergence == "k2":
        return bounded.square() / 2
    assert divergence == "k3"  # a new name must not become another one's estimate
    return k3(bounded)


def excess(log_ratio: torch.Tensor) -> torch.Tensor:
    """`exp(d) - 1` of log-ratios, at most `exp(60) - 1`."""
    return torch.expm1(log_ratio.clamp(max=LARGEST_POWER))  # exp(d) - 1 loses every digit for the usual d of 1e-4


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """`exp(d) - 1 - d` of log-ratios, with the bound of [`excess`]."""
    return excess(log_ratio) - log_ratio


def probability_divergence(tokens: Tokens, divergence: str) -> torch.Tensor:
    r"""
    Divergences of the two policies seen as policies over two events, the sampled token and any other. With `p` the
    probability under the training policy, `q` under the sampler, and
    `D(a, b) = a ln(a / b) + (1 - a) ln((1 - a) / (1 - b))`:

    - `tv = p - q`, the total variation with its sign, and `kl = sign(p - q) D(q, p)`, from
      [DPPO](https://huggingface.co/papers/2602.04879) (equations 13 and 14 there);
    - `binary_kl = max(D(p, q), D(q, p))`: KPop, as in AReaL.

    A ratio is noisy for an unlikely token and insensitive for a likely one: from 0.98 to 0.90 it moves by 8 percent.

    The divergence, `(B, T)`, is in nats except for `tv`, and 0 where a token does not count. Probabilities are clamped
    to `[1e-6, 1 - 1e-6]`.
    """
    log_p = tokens.train_logps.clamp(max=0.0)
    log_q = (tokens.train_logps - tokens.log_ratio).clamp_(max=0.0)
    if divergence == "tv":  # without the difference of two numbers near 1
        larger = torch.maximum(log_p, log_q).exp_()
        return torch.expm1(-tokens.log_ratio.abs()).neg_().copysign_(tokens.log_ratio).mul_(larger)
    for logps in (log_p, log_q):
        logps.clamp_(math.log(SMALLEST_PROBABILITY), math.log1p(-SMALLEST_PROBABILITY))
    # ln(p / q) and ln((1 - p) / (1 - q))
    d, of_others = log_p - log_q, torch.log(torch.expm1(log_p) / torch.expm1(log_q))
    # neither can be negative except by rounding
    from_sampler = (torch.expm1(log_q) * of_others - log_q.exp() * d).clamp_(min=0.0)  # D(q, p)
    if divergence == "kl":
        return from_sampler.copysign_(d)
    return torch.maximum(from_sampler, log_p.exp() * d - torch.expm1(log_p) * of_others)


def reject(tokens: Tokens, criterion: Criterion, direction: torch.Tensor | None = None) -> Rejection:
    """
    Apply one rejection rule. `direction`, of shape `(B, 1)` or `(B, T)`, is the sign of the advantage, for a rule that
    depends on it.
    """
    if criterion.divergence in OF_PROBABILITIES and criterion.scope == "token":
        return _reject_by_probability(tokens, criterion, direction)
    if criterion.divergence in OF_PROBABILITIES:
        # FlashREINFORCE and OpenRLHF take D(q, p) for completions, and the size of the total variation
        kind = "kl" if criterion.divergence == "binary_kl" else criterion.divergence
        divergence = probability_divergence(tokens, kind).abs_().mul_(tokens.valid)
    else:
        divergence = token_divergence(tokens.log_ratio, criterion.divergence)  # 0 where it does not count
    highest = lowest = statistic = _reduce(divergence, tokens, criterion.scope)
    if criterion.scope.endswith("_max") and criterion.divergence == "k1":
        # k1 is signed, so the worst token may lie on either side
        lowest = -_reduce(-divergence, tokens, criterion.scope)
        statistic = torch.where(highest.abs() >= lowest.abs(), highest, lowest)
    counts = counting(tokens, criterion.unit)
    high, low = above(highest, criterion.upper).mul_(counts), below(lowest, criterion.lower).mul_(counts)
    return Rejection(statistic, high, low)


def _reject_by_probability(tokens: Tokens, criterion: Criterion, direction: torch.Tensor | None) -> Rejection:
    statistic = probability_divergence(tokens, criterion.divergence).mul_(tokens.valid)
    high, low = above(statistic, criterion.upper).mul_(tokens.valid), below(statistic, criterion.lower)
    if criterion.directed:
        assert direction is not None  # `compute_rollout_correction` has refused missing advantages
        high, low = high * above(direction, 0.0), low * below(direction, 0.0)
    return Rejection(statistic, high, low)


def _reduce(divergence: torch.Tensor, tokens: Tokens, scope: str) -> torch.Tensor:
    """Reduce a divergence over sequences, `(B, 1)`, or turns, `(B, T)`; `"token"` keeps it."""
    unit, _, how = scope.partition("_")
    if unit == "token":
        return divergence
    values, reduction = (divergence - tokens.inf_where_invalid, "amax") if how == "max" else (divergence, "sum")
    reduced = tokens.over(unit, values, reduction)
    if how == "mean":
        reduced = reduced / tokens.over(unit, tokens.valid, "sum").clamp(min=1)
    return reduced.masked_fill(counting(tokens, unit) == 0, 0.0)


def mean_weight(sums: torch.Tensor) -> torch.Tensor:
    """
    Divisor of the weights in batch normalisation (self-normalised importance sampling): their mean, or 1 if it is
    below 1e-8. `sums`, of shape `(2,)`, are the sum and the number of the weights over all ranks, counted per token,
    per turn or per sequence as the level says.
    """
    mean = sums[0] / sums[1].clamp(min=1)
    return torch.where(mean > MIN_MEAN_WEIGHT, mean, torch.ones_like(mean))


def renormalization(valid_and_kept: torch.Tensor) -> torch.Tensor:
    """
    Factor that turns a mean over all valid tokens into a mean over the kept ones: `valid / kept`, or 1 if nothing is
    kept. `valid_and_kept`, of shape `(2,)`, counts these tokens over all ranks.
    """
    valid, n_kept = valid_and_kept
    return torch.where(n_kept > 0, valid / n_kept.clamp(min=1), torch.ones_like(valid))
