"""Bias and alignment of the gradient under each way to correct, without Monte-Carlo error."""

from dataclasses import dataclass

import torch
from policies import Problem, mean_gradient, mean_square, probabilities, true_gradient

from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.tools.analysis.recompute import policy_factor


BATCH = 256  # completions of a batch, whose noise is part of the error
CLIP = (0.8, 1.2)


@dataclass(frozen=True)
class Error:
    """
    Error of a gradient.

    Args:
        bias (`float`):
            Distance of the expected gradient from the true one, in lengths of the true one.
        alignment (`float`):
            Cosine of the true gradient with that of a batch, whose length counts the noise: what an optimizer that
            ignores the scale of gradients gets.
    """

    bias: float
    alignment: float


def spread_of_the_gap(problem: Problem, table: torch.Tensor) -> float:
    """`s = sqrt(2 * k3_kl)` over the completions that the sampler draws: the spread of a token's log-ratio, in nats."""
    mass, d = probabilities(problem, table), log_ratio(problem, table)
    drawn = mass > 0
    k3 = (torch.expm1(d) - d)[drawn].mean(1)
    return (2 * (mass[drawn] * k3).sum()).sqrt().item()


def log_ratio(problem: Problem, table: torch.Tensor) -> torch.Tensor:
    return problem.logps(problem.logits.log_softmax(-1)) - problem.logps(table)


def error_of(problem: Problem, table: torch.Tensor, config: RolloutCorrectionConfig, *, fresh: bool = False) -> Error:
    """
    Error of the gradient that a configuration makes of the completions of a sampler `(T, V, V)`, at their first visit.
    A `fresh` sampler announces the trainer's own weights.
    """
    mass = probabilities(problem, table)
    drawn = mass > 0  # the others never enter a batch
    mass, some = mass[drawn], Problem(problem.logits, problem.rewards[drawn], problem.completions[drawn])
    advantages = some.rewards - (mass * some.rewards).sum()  # the baseline is the sampler's: nothing else is at hand
    factor = coefficients(some, table, advantages, config, fresh) * advantages.unsqueeze(1)
    expected, true = mean_gradient(some, mass, factor), true_gradient(problem)
    length, square = true.norm(), expected.square().sum()
    variance = (mean_square(some, mass, factor) - square).clamp(min=0)  # of the gradient of one completion
    noisy = (square + variance / BATCH).sqrt()
    alignment = (expected * true).sum() / (length * noisy).clamp(min=1e-300)
    return Error(((expected - true).norm() / length).item(), alignment.item())


def coefficients(
    problem: Problem,
    table: torch.Tensor,
    advantages: torch.Tensor,
    config: RolloutCorrectionConfig,
    fresh: bool,
) -> torch.Tensor:
    """Factor on the gradient of each token, of shape `(N, T)`. No preset has one that depends on the rest of a batch."""
    train_logps, rollout_logps = problem.logps(problem.logits.log_softmax(-1)), problem.logps(table)
    everywhere = torch.ones_like(train_logps)
    found = compute_rollout_correction(
        train_logps,
        rollout_logps,
        everywhere,
        config,
        advantages=advantages,
        fresh=torch.full((len(everywhere),), fresh),
    )
    return policy_factor(
        found.coefficients, train_logps - rollout_logps, advantages.unsqueeze(1), config.settings, CLIP
    )
