"""
Rules that are tried in the arena and are no setting of the package: what multiplies the policy gradient of each token.

`r` is the ratio of a token's probability under the trainer to that under the sampler. With one update per generation every
rule of the package is such a factor too, so that these can be compared with them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from trl_rollout_corr.correction.compute import RolloutCorrection
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.trainers.keys import ROLLOUT_LOGPS


# Factor of each token, from the log-ratio, the log-probabilities of the trainer, and where the advantage is positive; the
# last is `(B, 1)`, the others `(B, T)`. Both are 0 where a token does not count.
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

TV = 0.2  # DPPO's
IPO_EPS = 0.3  # prime-rl's `eps` since August 2026
FLOOR = 0.001  # of `auto`


def within_tv(d: torch.Tensor, logp: torch.Tensor, positive: torch.Tensor, bound: float = TV) -> torch.Tensor:
    """Whether the probability has not been pushed by more than DPPO allows."""
    moved = logp.exp() - (logp - d).exp()
    return torch.where(positive, moved <= bound, moved >= -bound)


def ipo(d: torch.Tensor, logp: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """
    IPO of prime-rl since August 2026, without a pull-back term: the ratio, and nothing for a token whose probability differs
    by more than 0.3, whatever its advantage.
    """
    change = (logp.exp() - (logp - d).exp()).abs()
    return d.exp() * (change <= IPO_EPS)


def region(d: torch.Tensor, logp: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """
    `auto` with a cap that follows from its trust region: the ratio of a bad token is computed with a probability that is at
    most `TV` above that of the sampler, `min(p, q + TV) / q`. The bound of 20 is DPPO's, against overflow.
    """
    q = (logp - d).exp()
    bad = (torch.minimum(logp.exp(), q + TV) / q).clamp(max=20.0)
    return torch.where(positive, 1.0, bad) * within_tv(d, logp, positive) * (d.exp() >= FLOOR)


RULES: dict[str, Rule] = {
    "ipo": ipo,
    "region": region,
}


def with_rule(trainer_class: type, name: str) -> type:
    """A trainer of the package in which a rule decides the factor of each token."""
    rule = RULES[name]

    class RuledTrainer(trainer_class):
        def _compute_correction(self, train_logps: torch.Tensor, batch: dict[str, Any]) -> RolloutCorrection:
            correction = super()._compute_correction(train_logps, batch)
            valid = correction.valid
            d = torch.where(valid, train_logps.detach() - batch[ROLLOUT_LOGPS], 0.0).clamp(-20.0, 20.0)
            logp = torch.where(valid, train_logps.detach(), 0.0)
            factors = rule(d, logp, batch["advantages"].unsqueeze(1) > 0) * valid
            self._without_gradient = ((factors == 0) & valid).sum().item() / valid.sum().item()
            return replace(correction, weights=factors, keep=valid)

        def _close_window(self, now: Any) -> dict[str, float]:
            return {**super()._close_window(now), f"{PREFIX}rollout_rs_masked_fraction": self._without_gradient}

    return RuledTrainer
