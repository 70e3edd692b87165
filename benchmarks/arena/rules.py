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
from trl_rollout_corr.recording.keys import ROLLOUT_LOGPS


# Factor of each token, from the log-ratio, the log-probabilities of the trainer, and where the advantage is positive; the
# last is `(B, 1)`, the others `(B, T)`. Both are 0 where a token does not count.
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

PPO_CLIP = 0.2
TV = 0.2  # DPPO's
M2_BUDGET = 0.04  # M2PO's
CPPO_BUDGET = 0.02, 0.1  # smallest and largest mean change of a completion; its largest one is DPPO's
CPPO_LAST_WEIGHT = 0.8
PULL = 0.001  # prime-rl's `kl_tau`


def within_tv(d: torch.Tensor, logp: torch.Tensor, positive: torch.Tensor, bound: float = TV) -> torch.Tensor:
    """Whether the probability has not been pushed by more than DPPO allows."""
    moved = logp.exp() - (logp - d).exp()
    return torch.where(positive, moved <= bound, moved >= -bound)


def m2po(d: torch.Tensor, logp: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """
    [M2PO](https://huggingface.co/papers/2510.01161): the tokens with the largest `d^2` go until the mean of the rest is within
    a budget; the others have their importance weight.
    """
    squares = d.square()
    order, _ = squares.flatten().sort()
    means = order.cumsum(0) / torch.arange(1, len(order) + 1)
    within = means <= M2_BUDGET
    largest = order[within][-1] if within.any() else order.new_tensor(-1.0)
    return d.exp() * (squares <= largest)


def topr(d: torch.Tensor, logp: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """
    [TOPR](https://huggingface.co/papers/2503.14286) per token: what was good counts in full, what was bad by its weight, up
    to 1.
    """
    return torch.where(positive, 1.0, d.exp().clamp(max=1.0))


def topr_within(bound: float) -> Rule:
    """The same within a trust region as DPPO's."""
    return lambda d, logp, positive: topr(d, logp, positive) * within_tv(d, logp, positive, bound)


def flipped(d: torch.Tensor, logp: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """
    The ratio turned over where the advantage is positive, as in
    [ASPO](https://huggingface.co/papers/2510.06062): what pushes further weighs less, what brings back weighs more, to 2.
    """
    return torch.where(positive, -d, d).exp().clamp(max=2.0)


def clipped(bound: float) -> Rule:
    """PPO clipped around the sampler, but where its dual clip would drop a token, it has this weight."""

    def rule(d: torch.Tensor, logp: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
        ratio = d.exp()
        inside = torch.where(positive, ratio <= 1 + PPO_CLIP, ratio >= 1 - PPO_CLIP)
        return ratio.clamp(max=bound) * inside

    return rule


def within_cppo(d: torch.Tensor, logp: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """
    Whether [CPPO](https://huggingface.co/papers/2606.10968) keeps a token: the changes of probabilities of a completion have a
    budget, of which its first tokens use up what later ones may not.

    With `D = |p - q|`, weights `w` that fall from 1 to 0.8 along the completion, `S` and `W` the sums of `w D` and `w` up to
    the token before, and `b` the 90th percentile of `D` within its limits, a token that is pushed further is kept if
    `w D <= min(delta, delta + b W - S)`.
    """
    counts = logp != 0
    change = ((logp - d).exp() - logp.exp()).abs() * counts
    places, lengths = counts.cumsum(1) - 1, counts.sum(1, keepdim=True)
    weight = (1 - (1 - CPPO_LAST_WEIGHT) * places / (lengths - 1).clamp(min=1)) * counts
    spent = weight * change
    of_tokens = change.masked_fill(~counts, torch.nan)
    budget = of_tokens.nanquantile(0.9, 1, keepdim=True).nan_to_num(0.0).clamp(*CPPO_BUDGET)
    left = TV + budget * (weight.cumsum(1) - weight) - (spent.cumsum(1) - spent)
    pushed = torch.where(positive, d > 0, d < 0)
    return ~pushed | (spent <= left.clamp(max=TV))


def cppo(d: torch.Tensor, logp: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """The ratio up to 20, as in DPPO, within CPPO's budget."""
    return d.exp().clamp(max=20.0) * within_cppo(d, logp, positive)


def cap3_cppo(d: torch.Tensor, logp: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """1 where the advantage is positive, else the ratio up to 3, within CPPO's budget."""
    return torch.where(positive, 1.0, d.exp().clamp(max=3.0)) * within_cppo(d, logp, positive)


RULES: dict[str, Rule] = {
    "m2po": m2po,
    "topr": topr,
    "topr_tv": topr_within(TV),
    "topr_tv10": topr_within(TV / 2),
    "flipped": flipped,
    "clip_2": clipped(2.0),
    "clip_5": clipped(5.0),
    "cppo": cppo,
    "cap3_cppo": cap3_cppo,
}


def with_rule(trainer_class: type, name: str) -> type:
    """A trainer of the package in which a rule decides the factor of each token. `"pull"` adds a term to its loss instead."""
    if name == "pull":
        return with_pull(trainer_class)
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


def with_pull(trainer_class: type) -> type:
    """A trainer of the package whose loss has `PULL * d^2` of every token besides, as in prime-rl."""

    class PulledTrainer(trainer_class):
        def _compute_correction(self, train_logps: torch.Tensor, batch: dict[str, Any]) -> RolloutCorrection:
            correction = super()._compute_correction(train_logps, batch)
            self._anchor = batch[ROLLOUT_LOGPS], correction.valid
            return correction

        def _correct(self, loss_pass, logps):
            self._current = logps  # before its gradient is corrected
            return super()._correct(loss_pass, logps)

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            rollout_logps, valid = self._anchor
            d = torch.where(valid, self._current - rollout_logps, 0.0)
            return loss + PULL * d.square().sum() / valid.sum()

    return PulledTrainer
