"""
Policies small enough to count: every completion of a few tokens has its probability.

A policy is a table of log-probabilities of shape `(T, V, V)`: at a position, after a token, of each token. `T` positions, `V`
tokens, `N = V ** T` completions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


DOUBLE = torch.float64


@dataclass(frozen=True)
class Problem:
    """Logits `(T, V, V)` of a policy that is trained, and the reward `(N,)` and tokens `(N, T)` of each completion."""

    logits: torch.Tensor
    rewards: torch.Tensor
    completions: torch.Tensor

    @property
    def cells(self) -> torch.Tensor:
        """Index into the table of each token of each completion, of shape `(N, T)`."""
        length, size, _ = self.logits.shape
        before = torch.nn.functional.pad(self.completions[:, :-1], (1, 0))  # nothing stands before the first
        return (torch.arange(length) * size + before) * size + self.completions

    def logps(self, table: torch.Tensor) -> torch.Tensor:
        """Log-probability of each token, of shape `(N, T)`, under a table of log-probabilities."""
        return table.flatten()[self.cells]


def make_problem(length: int, size: int, seed: int) -> Problem:
    """
    A policy like that of a language model, sure of most tokens and unsure of some, and a verifier: the reward is 1 if enough
    tokens are those of a hidden answer, else 0. Enough is what the policy reaches nearly half of the time.
    """
    dice = torch.Generator().manual_seed(seed)
    sureness = torch.rand(length, size, 1, generator=dice, dtype=DOUBLE) * 3
    logits = torch.randn(length, size, size, generator=dice, dtype=DOUBLE) * sureness
    completions = torch.cartesian_prod(*[torch.arange(size)] * length).view(-1, length)
    answer = torch.randint(size, (length,), generator=dice)
    right = (completions == answer).sum(1)
    problem = Problem(logits, right.to(DOUBLE), completions)
    mass = probabilities(problem, logits.log_softmax(-1))
    reached = [(mass * (right >= enough)).sum() for enough in range(1, length + 1)]
    enough = min(range(length), key=lambda i: abs(reached[i] - 0.4)) + 1
    return Problem(logits, (right >= enough).to(DOUBLE), completions)


# What the sampler is instead --------------------------------------------------------------------------------------------


Perturbation = Callable[[Problem, float, int], torch.Tensor]


def rounding(problem: Problem, strength: float, seed: int) -> torch.Tensor:
    """Independent noise on every logit, as from low precision."""
    return (problem.logits + strength * noise(problem, seed)).log_softmax(-1)


def routing(problem: Problem, strength: float, seed: int) -> torch.Tensor:
    """Other logits in a tenth of the contexts, as when a mixture of experts takes another route."""
    draws = torch.rand(problem.logits.shape[:2], generator=torch.Generator().manual_seed(seed + 1))
    draws[0, 1:] = 1.0  # nothing but the start stands before the first token
    hit = draws <= draws.flatten().kthvalue(max(draws.numel() // 10, 1)).values
    return (problem.logits + 3 * strength * noise(problem, seed) * hit.unsqueeze(-1)).log_softmax(-1)


def staleness(problem: Problem, strength: float, seed: int) -> torch.Tensor:
    """The policy of some steps ago: the trainer has moved from it along the gradient of the reward."""
    gradient = true_gradient(problem)
    step = gradient / gradient.square().mean().sqrt()
    return (problem.logits - strength * (step + 0.5 * noise(problem, seed))).log_softmax(-1)


def truncation(problem: Problem, strength: float, seed: int) -> torch.Tensor:
    """Unlikely tokens are never sampled (`top_p`), and the others have the probabilities of what is left."""
    probabilities = problem.logits.softmax(-1)
    ordered, order = probabilities.sort(-1, descending=True)
    kept = ordered.cumsum(-1) - ordered < 1 - min(strength, 0.9)
    kept = torch.zeros_like(kept).scatter(-1, order, kept)
    return (probabilities * kept).div((probabilities * kept).sum(-1, keepdim=True)).log()


def precision(problem: Problem, strength: float, seed: int) -> torch.Tensor:
    """Logits in a type whose numbers are `strength` apart, relative to their size: 1/128 is bfloat16."""
    size = 2.0 ** problem.logits.abs().clamp(min=1e-300).log2().floor()
    return ((problem.logits / size / strength).round() * strength * size).log_softmax(-1)


KINDS: dict[str, Perturbation] = {
    "rounding": rounding,
    "precision": precision,
    "routing": routing,
    "staleness": staleness,
    "truncation": truncation,
}


def noise(problem: Problem, seed: int) -> torch.Tensor:
    return torch.randn(problem.logits.shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


# Gradients --------------------------------------------------------------------------------------------------------------


def mean_gradient(problem: Problem, mass: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """`sum_y mass(y) sum_t factor(y, t) grad log p(y_t)`, of shape `(T, V, V)`, for a mass `(N,)` and a factor `(N, T)`."""
    pushed = torch.zeros(problem.logits.numel(), dtype=DOUBLE)
    pushed.index_add_(0, problem.cells.flatten(), (mass.unsqueeze(1) * factor).flatten())
    pushed = pushed.view_as(problem.logits)
    return pushed - pushed.sum(-1, keepdim=True) * problem.logits.softmax(-1)


def mean_square(problem: Problem, mass: torch.Tensor, factor: torch.Tensor) -> float:
    """Mean squared norm of the gradient of one sampled completion. Tokens at different positions share no parameter."""
    p = problem.logits.softmax(-1)
    of_token = (1 - 2 * p + p.square().sum(-1, keepdim=True)).flatten()[problem.cells]  # |e_token - p|^2
    return (mass * (factor.square() * of_token).sum(1)).sum().item()


def probabilities(problem: Problem, table: torch.Tensor) -> torch.Tensor:
    """Probability of each completion, of shape `(N,)`."""
    return problem.logps(table).sum(1).exp()


def true_gradient(problem: Problem) -> torch.Tensor:
    """Gradient of the expected reward, by counting."""
    table = problem.logits.log_softmax(-1)
    mass = probabilities(problem, table)
    advantages = problem.rewards - (mass * problem.rewards).sum()
    return mean_gradient(problem, mass, advantages.unsqueeze(1).expand_as(problem.completions))
