"""
Metrics of the probabilities of sampled tokens, as sums until they are logged. Torch only. verl logs them under the same names.
"""

import math

import torch

from .columns import Columns, row_squares
from .functional import Tokens
from .sums import divide, maximum, std


# Share of the mean square below which a variance is the rounding of sums in float32
_ROUNDING = 1e-6
_MOMENTS = ("lacking", "difference", "lacking_squares", "difference_squares", "product")


def collect_probabilities(c: Columns, tokens: Tokens, log_ratio: torch.Tensor, excess: torch.Tensor) -> None:
    """
    Sums of the probability `q` of each token under the sampler and of the difference `p - q` to the trainer, from the
    log-ratio `d`, bounded from above, and the excess `exp(d) - 1`.
    """
    q = (tokens.train_logps - log_ratio).clamp_(max=0.0).exp_()
    # p - q = q (exp(d) - 1): without the difference of two numbers near 1. It is 0 where a token does not count
    difference = (q * excess).clamp_(max=1.0)
    # sums of q - 1, as the variance of probabilities near 1 would lose its digits in sums of squares of q
    lacking = q.sub_(1.0)
    # summed here, as a column of one token is kept as it is, and both tensors are written to below
    c.add("probs/lacking", lacking.sum(-1, keepdim=True))
    c.add("probs/lacking_squares", row_squares(lacking))
    c.add("probs/difference", difference.sum(-1, keepdim=True))
    c.add("probs/difference_squares", row_squares(difference))
    c.add("probs/product", lacking.mul_(difference))
    distance = difference.abs_()  # in place, as the product: a new tensor costs as much as the arithmetic
    c.add("probs/distance", distance)
    c.maxima["probs/distance_max"] = distance.amax(-1, keepdim=True) - c.no_rows


def probability_metrics(s: dict[str, float]) -> dict[str, float]:
    """
    Distance `|p - q|` of the probabilities under trainer and sampler, and their correlation, which is left out where the
    probabilities hardly vary.
    """
    n = s["tokens"]
    metrics = {
        "rollout_probs_diff_mean": divide(s["probs/distance"], n),
        "rollout_probs_diff_std": std(s["probs/distance"], s["probs/difference_squares"], n, sample=True),
        "rollout_probs_diff_max": maximum(s["probs/distance_max"]),
    }
    if not n:
        return metrics | {"rollout_actor_probs_pearson_corr": math.nan}
    # with u = q - 1 and e = p - q: var p = var q + 2 cov(q, e) + var e, and cov(p, q) = var q + cov(q, e)
    u, e, of_u, of_e, of_ue = (s[f"probs/{name}"] / n for name in _MOMENTS)
    of_sampler, shared = of_u - u**2, of_ue - u * e
    of_trainer = of_sampler + 2 * shared + of_e - e**2
    if of_sampler > _ROUNDING * of_u and of_trainer > _ROUNDING * (of_u + 2 * of_ue + of_e):
        correlation = (of_sampler + shared) / math.sqrt(of_sampler * of_trainer)
        metrics["rollout_actor_probs_pearson_corr"] = min(max(correlation, -1.0), 1.0)
    return metrics
