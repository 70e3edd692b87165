"""
Age of the data: metrics by age, and the part of the gap to the sampler that updates of the policy explain. Sums until they
are logged, as in `metrics.py`. Torch only.

The age of a token is the number of optimizer steps between the weights that sampled it and the weights that train on it. The
age of a completion is that of its first token. In the metrics of a whole batch it is called staleness.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from .accounting import add_up, bucket_of
from .functional import LARGEST_POWER, LOG_RATIO_BOUND, accumulation_dtype, k3, row_blocks, select_tokens
from .metrics import Statistics
from .sums import Applied, SegmentedSums, Segments


# Age in every trainer -------------------------------------------------------------------------------------------------


_GAP = ("tokens", "d", "k3")


class Staleness(SegmentedSums):
    """Sums of ages and lags, and of the two parts of the gap to the sampler. A segment that is unknown stays 0."""

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "engine": tuple(f"engine/{name}" for name in _GAP),
        "update": tuple(f"update/{name}" for name in _GAP),
        "age": ("age/rows", "age/sum"),
        "lag": ("lag/rows", "lag/sum"),
    }
    MAXIMA: ClassVar[tuple[str, ...]] = ("age/largest",)

    def _metrics(self, s: dict[str, float], applied: Applied) -> dict[str, float]:
        metrics = {}
        for part in ("engine", "update"):
            if tokens := s[f"{part}/tokens"]:
                metrics[f"{part}_kl"] = -s[f"{part}/d"] / tokens
                metrics[f"{part}_k3_kl"] = s[f"{part}/k3"] / tokens
        if rows := s["age/rows"]:
            metrics["staleness_mean"] = s["age/sum"] / rows
            metrics["staleness_max"] = s["age/largest"]
        if rows := s["lag/rows"]:
            metrics["sampler_lag"] = s["lag/sum"] / rows
        return metrics


def engine_gap(statistics: Statistics) -> Segments:
    """
    Gap of the old policy to the sampler, which has the same weights: it is due to the two engines. For [`Staleness.of`]. The
    training policy of `statistics` is the old policy.
    """
    return {"engine": torch.stack([statistics[name] for name in _GAP])}


def update_gap(old_logps: torch.Tensor, current_logps: torch.Tensor, mask: torch.Tensor) -> Segments:
    """
    Gap of the current policy to the old policy, which is due to the optimizer steps between the two. For [`Staleness.of`].
    Log-probabilities, in nats, and mask are of shape `(B, T)`.
    """
    tokens = select_tokens(current_logps, old_logps, mask)
    # d = log pi_current - log pi_old, with KL estimates -d and k3 = exp(d) - 1 - d
    d = tokens.log_ratio
    dtype = accumulation_dtype(d.device)
    return {"update": torch.stack([x.sum(dtype=dtype) for x in (tokens.lengths, d, k3(d.clamp(max=LARGEST_POWER)))])}


def count_ages(ages: torch.Tensor) -> Segments:
    """Number, sum and maximum of the ages of completions, `(B,)` in optimizer steps, NaN if unknown. For [`Staleness.of`]."""
    ages = ages.to(accumulation_dtype(ages.device))
    return {"age": _number_and_sum(ages), "age/largest": ages.masked_fill(~ages.isfinite(), -torch.inf).max()}


def count_lags(lags: torch.Tensor) -> Segments:
    """Number and sum of the ages of completions, `(B,)` in optimizer steps, when they were sampled. For [`Staleness.of`]."""
    return {"lag": _number_and_sum(lags.to(accumulation_dtype(lags.device)))}


def _number_and_sum(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.isfinite().sum(dtype=x.dtype), x.nan_to_num(0.0).sum()])


# Metrics by age, of the asynchronous trainer --------------------------------------------------------------------------


# Smallest age of each bin, in optimizer steps
AGES = (0, 1, 2, 4, 8, 16)
AGE_NAMES = ("0", "1", "2_3", "4_7", "8_15", "16_or_more")
_MEASURES = ("tokens", "d", "k3", "squares", "kept", "coefficients", "coefficient_squares")
_COMPLETIONS = ("rows", "tokens", "scored", "reward")


class ByAge(SegmentedSums):
    """
    Sums over the tokens of each age and over the completions that begin at each age, the sums of a least-squares line through
    the squared log-ratio against the age, sums over completions that span a push of weights, and sums over the completions
    that were trained on and those that were dropped as too old.
    """

    SEGMENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "bins": tuple(f"{name}/{measure}" for name in AGE_NAMES for measure in _MEASURES),
        "begun": tuple(f"begun/{name}/{measure}" for name in AGE_NAMES for measure in _COMPLETIONS),
        "line": ("age", "age_squares", "squares", "age_times_squares", "tokens"),
        "spans": ("spans/known", "spans/rows", "spans/tokens", "spans/k3"),
        **{part: tuple(f"{part}/{name}" for name in _COMPLETIONS) for part in ("trained", "stale_dropped")},
    }

    def _metrics(self, s: dict[str, float], applied: Applied) -> dict[str, float]:
        metrics = _line(s) | _completion_metrics(s)
        for name in AGE_NAMES:
            if tokens := s[f"{name}/tokens"]:
                of_bin = {measure: s[f"{name}/{measure}"] for measure in _MEASURES}
                in_bin = _bin_metrics(of_bin, applied) | {"token_share": tokens / s["tokens"]}
                metrics |= {f"age_{name}/{key}": value for key, value in in_bin.items()}
            metrics |= _means(s, f"begun/{name}", f"age_{name}")
        if rows := s["spans/known"]:
            metrics["spans_push/fraction"] = s["spans/rows"] / rows
        if tokens := s["spans/tokens"]:
            metrics["spans_push/k3_kl"] = s["spans/k3"] / tokens
        return metrics


def by_age(
    train_logps: torch.Tensor,
    rollout_logps: torch.Tensor,
    valid: torch.Tensor,
    keep: torch.Tensor,
    coefficients: torch.Tensor,
    rewards: torch.Tensor,
    ages: torch.Tensor,
) -> Segments:
    """
    Add up a batch by the age of its tokens. A completion begins at the age of its oldest token. For [`ByAge.of`]. No host
    synchronisation, no collective.

    Args:
        train_logps, rollout_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the current policy and of the policy that sampled, in nats.
        valid (`torch.Tensor` of shape `(B, T)`):
            Boolean mask of the tokens that count. A log-ratio among them that is not finite is taken as 0.
        keep, coefficients, rewards:
            As for [`~trl_rollout_corr.correction.accounting.account`].
        ages (`torch.Tensor` of shape `(B,)` or `(B, T)`):
            Ages of completions or of tokens, in optimizer steps. Tokens of unknown age, NaN, are left out.
    """
    dtype = accumulation_dtype(valid.device)
    of_tokens = ages if ages.dim() == 2 else ages.unsqueeze(1)  # (B, T), or (B, 1) if all tokens of a row have one age
    counted = valid & of_tokens.isfinite()

    # A completion begins at the age of its oldest token. A row without a token that counts has none, and 0 stands for it.
    begun = torch.where(counted, of_tokens, -torch.inf).amax(1)
    has_age, begun = begun.isfinite(), begun.nan_to_num(0.0, neginf=0.0)
    # Tokens that do not count get the age at which their completion begins, so that they are not the youngest of it
    of_tokens = torch.where(counted, of_tokens, begun.unsqueeze(1)) if ages.dim() == 2 else begun.unsqueeze(1)

    inputs = (train_logps, rollout_logps, counted, keep, coefficients, of_tokens)
    blocks = [_row_sums(*(x[i] for x in inputs)) for i in row_blocks(valid)]
    bins, line = (torch.cat(x).to(dtype) for x in zip(*blocks, strict=True))
    tokens, k3s, squares = (bins[:, :, _MEASURES.index(name)].sum(1) for name in ("tokens", "k3", "squares"))

    # Each row of `bins` is of one age: of the bins of `AGES` in turn, or of the only age of a completion
    bucket = bucket_of(begun, AGES)
    index = bucket if bins.shape[1] == 1 else torch.arange(len(AGES), device=valid.device).repeat(len(valid))

    scored, begun = rewards.isfinite() & has_age, begun.to(dtype)
    completions = torch.stack([has_age, tokens, scored, rewards.nan_to_num(0.0) * scored], 1).to(dtype)

    # Sums of the line over the tokens of a completion, with a the age of a token and b that of the oldest:
    #     sum a d^2 = b sum d^2 - sum (b - a) d^2
    # Most completions have one age. The last sum is then 0, and the ages are multiplied in the wider type.
    sum_age, sum_age_squares, sum_younger_times_squares = line.unbind(1)
    sums_of_line = (sum_age, sum_age_squares, squares, begun * squares - sum_younger_times_squares, tokens)
    segments = {
        "bins": add_up(bins.flatten(0, 1), index, len(AGES)),
        "begun": add_up(completions, bucket, len(AGES)),
        "line": torch.stack([x.sum() for x in sums_of_line]),
    }
    if ages.dim() == 2:
        # A completion spans a push of weights if its youngest token is younger than its oldest
        spans = (of_tokens.amin(1) < begun).to(dtype) * has_age
        segments["spans"] = torch.stack([x.to(dtype).sum() for x in (has_age, spans, spans * tokens, spans * k3s)])
    return segments


def _row_sums(
    train_logps: torch.Tensor,
    rollout_logps: torch.Tensor,
    counted: torch.Tensor,
    keep: torch.Tensor,
    coefficients: torch.Tensor,
    ages: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Sums over the tokens of each row, in the type of the log-ratio.

    Args:
        train_logps, rollout_logps, keep, coefficients:
            As for [`by_age`].
        counted (`torch.Tensor` of shape `(B, T)`):
            Boolean mask of the tokens that count and have an age.
        ages (`torch.Tensor` of shape `(B, T)` or `(B, 1)`):
            Ages of tokens, or the only age of each completion.

    Returns:
        `tuple`: `(B, A, len(_MEASURES))`, sums of the measures over the tokens in each of `A = len(AGES)` bins of age, or with
        `A = 1` over all tokens if each completion has one age; and `(B, 3)`, with `a` the age of a token and `b` the age of
        the oldest token of the row: `sum a`, `sum a^2` and `sum (b - a) d^2`.
    """
    # d = log pi_train - log pi_rollout; 0 for tokens that do not count and where it is not finite
    d = torch.where(counted, train_logps - rollout_logps, 0.0).nan_to_num_(0.0, 0.0, 0.0)
    squares = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).square_()
    coefficients = coefficients.masked_fill(~counted, 0.0)
    gap = k3(d.clamp(max=LARGEST_POWER))
    measures = (counted, d, gap, squares, keep & counted, coefficients, coefficients.square())  # as in `_MEASURES`
    if ages.shape[1] == 1:
        # n tokens of one age a: sum a = a n, sum a^2 = a^2 n, and no token is younger than the oldest
        sums = torch.stack([x.sum(1, dtype=d.dtype) for x in measures], 1)
        n = sums[:, :1]
        return sums.unsqueeze(1), torch.cat([ages * n, ages.square() * n, torch.zeros_like(n)], 1)
    bucket = bucket_of(ages, AGES)
    bins = [torch.stack([(x * (bucket == i)).sum(1, dtype=d.dtype) for x in measures], 1) for i in range(len(AGES))]
    younger = ages.amax(1, keepdim=True) - ages  # b - a
    line = (ages * counted, ages.square() * counted, younger * squares)
    return torch.stack(bins, 1), torch.stack([x.sum(1, dtype=d.dtype) for x in line], 1)


def count_completions(lengths: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """
    Segment `trained` or `stale_dropped` of [`ByAge`], `(4,)`, from the tokens of the loss, `(B,)`, and the rewards, `(B,)`. A
    completion without a token does not count; the reward of one that was not scored is NaN.
    """
    dtype = accumulation_dtype(lengths.device)
    lengths, rewards = lengths.to(dtype), rewards.to(dtype)
    rows = (lengths > 0).to(dtype)
    scored = rewards.isfinite().to(dtype) * rows
    return torch.stack([x.sum() for x in (rows, lengths, scored, rewards.nan_to_num(0.0) * scored)])


def _bin_metrics(s: Mapping[str, float], applied: Applied) -> dict[str, float]:
    tokens = s["tokens"]
    metrics = {"kl": -s["d"] / tokens, "k3_kl": s["k3"] / tokens}
    if applied.rejects:
        metrics["rejected"] = 1 - s["kept"] / tokens
    if applied.corrects:
        # effective sample size over the number of tokens: (sum c)^2 / (N sum c^2)
        squares = s["coefficient_squares"]
        metrics["effective_lr"] = s["coefficients"] / tokens
        metrics["eff_sample_size"] = s["coefficients"] ** 2 / (tokens * squares) if squares else 0.0
    return metrics


def _line(s: Mapping[str, float]) -> dict[str, float]:
    """Least-squares line `d^2 = intercept + slope * age` over tokens. Half of `d^2` is the KL estimate k2."""
    if not (tokens := s["tokens"]):
        return {}
    age, square = s["age"] / tokens, s["squares"] / tokens
    variance = s["age_squares"] / tokens - age**2
    if variance < 1e-9 * max(age, 1.0) ** 2:  # one age only
        return {}
    # slope = cov(age, d^2) / var(age), intercept = mean(d^2) - slope * mean(age)
    slope = (s["age_times_squares"] / tokens - age * square) / variance
    return {
        "engine_k2_kl": (square - slope * age) / 2,
        "drift_k2_kl": slope * age / 2,
        "drift_k2_kl_per_step": slope / 2,
    }


def _completion_metrics(s: Mapping[str, float]) -> dict[str, float]:
    dropped, trained = s["stale_dropped/rows"], s["trained/rows"]
    metrics = {"stale_dropped/fraction": dropped / (dropped + trained)} if dropped + trained else {}
    return metrics | _means(s, "trained", "trained") | _means(s, "stale_dropped", "stale_dropped")


def _means(s: Mapping[str, float], part: str, name: str) -> dict[str, float]:
    """Mean length and reward of completions."""
    rows, scored = s[f"{part}/rows"], s[f"{part}/scored"]
    metrics = {f"{name}/length_mean": s[f"{part}/tokens"] / rows} if rows else {}
    return metrics | ({f"{name}/reward_mean": s[f"{part}/reward"] / scored} if scored else {})
