"""Bias, variance and direction of the gradient under each way to correct, without Monte-Carlo error."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from policies import DOUBLE, Problem, mean_gradient, mean_square, probabilities, true_gradient

from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.analysis.recompute import policy_factor
from trl_rollout_corr.correction.compute import RolloutCorrection


# Settings whose effect depends on what else is in the batch.
OF_THE_BATCH = ("rollout_is_batch_normalize", "rollout_rs_renormalize")
# Completions of a batch, whose noise is part of the error.
BATCH = 256
CLIP = (0.8, 1.2)


@dataclass(frozen=True)
class Gap:
    """
    Distance of two policies, over the completions that the sampler draws.

    Args:
        s (`float`):
            `sqrt(2 * k3_kl)`: spread of the log-ratio of a token, in nats.
        lost (`float`):
            Probability under the trained policy of completions that the sampler never draws.
        ess (`float`):
            Effective sample size of the ratios of whole completions.
    """

    s: float
    lost: float
    ess: float


@dataclass(frozen=True)
class Error:
    """
    Error of a gradient, in units of the length of the true gradient.

    Args:
        bias (`float`):
            Distance of the expected gradient from the true one.
        spread (`float`):
            Root of the variance of the gradient of one completion.
        cosine (`float`):
            Cosine of the expected and the true gradient.
        alignment (`float`):
            Cosine of the true gradient with that of a batch, whose length counts the noise: what an optimizer that
            ignores the scale of gradients gets.
    """

    bias: float
    spread: float
    cosine: float
    alignment: float


def gap(problem: Problem, table: torch.Tensor) -> Gap:
    """Distance of a sampler from the policy."""
    mass, d = probabilities(problem, table), log_ratio(problem, table)
    drawn = mass > 0
    k3 = (torch.expm1(d) - d)[drawn].mean(1)
    weights = d.sum(1).exp()[drawn]
    mean, square = ((mass[drawn] * x).sum() for x in (weights, weights.square()))
    return Gap((2 * (mass[drawn] * k3).sum()).sqrt().item(), 1 - mean.item(), (mean**2 / square).item())


def log_ratio(problem: Problem, table: torch.Tensor) -> torch.Tensor:
    return problem.logps(problem.logits.log_softmax(-1)) - problem.logps(table)


def error_of(problem: Problem, table: torch.Tensor, config: RolloutCorrectionConfig) -> Error:
    """
    Error of the gradient that a configuration makes of a sampler's completions, at their first visit.

    Args:
        problem ([`Problem`]):
            The policy that is trained.
        table (`torch.Tensor` of shape `(T, V, V)`):
            Log-probabilities of the sampler.
        config ([`RolloutCorrectionConfig`]):
            What to do about the gap.

    Returns:
        [`Error`].
    """
    mass = probabilities(problem, table)
    drawn = mass > 0  # the others never enter a batch
    mass, some = mass[drawn], Problem(problem.logits, problem.rewards[drawn], problem.completions[drawn])
    advantages = some.rewards - (mass * some.rewards).sum()  # the baseline is the sampler's: nothing else is at hand
    factor = coefficients(some, table, mass, advantages, config) * advantages.unsqueeze(1)
    expected, true = mean_gradient(some, mass, factor), true_gradient(problem)
    length, size = true.norm(), expected.norm()
    bias = (expected - true).norm() / length
    variance = (mean_square(some, mass, factor) - size.square()) / length.square()
    size, cosine = size / length, (expected * true).sum() / (size * length).clamp(min=1e-300)
    noisy = (size.square() + variance / BATCH).sqrt()
    values = (bias, variance.clamp(min=0).sqrt(), cosine, cosine * size / noisy.clamp(min=1e-300))
    return Error(*(value.item() for value in values))


def coefficients(
    problem: Problem,
    table: torch.Tensor,
    mass: torch.Tensor,
    advantages: torch.Tensor,
    config: RolloutCorrectionConfig,
) -> torch.Tensor:
    """Factor on the gradient of each token, of shape `(N, T)`, as the package computes it in an endless batch."""
    train_logps, rollout_logps = problem.logps(problem.logits.log_softmax(-1)), problem.logps(table)
    correct = partial(
        compute_rollout_correction, train_logps, rollout_logps, torch.ones_like(train_logps), advantages=advantages
    )
    totals = None
    if config.settings.needs_whole_batch:
        alone = correct(replace(config, **dict.fromkeys(OF_THE_BATCH, False)))
        totals = whole_batch(alone, mass, by_token=config.settings.rollout_is == "token")
    correction = correct(config, sum_over_ranks=lambda own: totals.to(own.dtype))
    log_ratio = train_logps - rollout_logps
    return policy_factor(correction.coefficients, log_ratio, advantages.unsqueeze(1), config, CLIP)


def whole_batch(correction: RolloutCorrection, mass: torch.Tensor, *, by_token: bool) -> torch.Tensor:
    """`(4,)`: mean sum and number of the weights, of valid and of kept tokens of a completion."""
    weights = correction.keep.to(DOUBLE) if correction.weights is None else correction.weights
    each = (
        [weights.sum(1), weights.new_full(mass.shape, weights.shape[1])] if by_token else [weights[:, 0], mass * 0 + 1]
    )
    each += [correction.valid.sum(1).to(DOUBLE), correction.keep.sum(1).to(DOUBLE)]
    return torch.stack([(mass * x).sum() for x in each])
