"""
Rules that are tried in the arena and are no setting of the package: what multiplies the policy gradient of each token.

`r` is the ratio of a token's probability under the trainer to that under the sampler. With one update per generation every
rule of the package is such a factor too, so that these can be compared with them.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from trl_rollout_corr.correction.compute import RolloutCorrection
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.trainers.keys import ROLLOUT_LOGPS


TV = 0.2  # DPPO's
IPO_EPS = 0.3  # prime-rl's `eps` since August 2026
FLOOR = 0.001  # of `auto`
BROKEN = -math.log(FLOOR)  # nats; beyond it a token is broken, and not rounded
CAP = 3.0  # of `auto`
MOST = 0.99  # quantile that stands for what rounding alone does
KEPT = 0.9  # of the moving mean, per step
GROWTH, WIDEST = 4.0, 0.4  # rounding counts up to so many times its first measurement, and up to this probability
RHO_MIN, LEAST_POWER = 0.3, 0.05  # of IS-Reshape
M2_BUDGET = 0.04  # of M2PO
RECENT = 16  # tokens whose ratios are multiplied


class Seen(NamedTuple):
    """What a rule sees of a batch of `B` completions of `T` tokens. Numbers are 0 where a token does not count."""

    d: torch.Tensor  # (B, T): log-ratio, in nats
    logp: torch.Tensor  # (B, T): log-probabilities of the trainer
    positive: torch.Tensor  # (B, 1): where the advantage is positive
    valid: torch.Tensor  # (B, T): where a token counts
    fresh: torch.Tensor  # (B, 1): where the sampler announces the trainer's weights
    rounding: float  # what rounding alone moves a probability
    log_rounding: float  # what rounding alone moves a log-ratio
    grown: bool = False  # whether the gap is far larger than in the first step

    @property
    def moved(self) -> torch.Tensor:
        """`(B, T)`: probability in the trainer minus that in the sampler."""
        return self.logp.exp() - (self.logp - self.d).exp()


# Factor of each token, `(B, T)`
Rule = Callable[[Seen], torch.Tensor]


def within_tv(seen: Seen, bound: float = TV) -> torch.Tensor:
    """Whether the probability has not been pushed by more than DPPO allows."""
    return torch.where(seen.positive, seen.moved <= bound, seen.moved >= -bound)


def ipo(seen: Seen) -> torch.Tensor:
    """
    IPO of prime-rl since August 2026, without a pull-back term: the ratio, and nothing for a token whose probability differs
    by more than 0.3, whatever its advantage.
    """
    return seen.d.exp() * (seen.moved.abs() <= IPO_EPS)


def region(seen: Seen) -> torch.Tensor:
    """
    `auto` with a cap that follows from its trust region: the ratio of a bad token is computed with a probability that is at
    most `TV` above that of the sampler, `min(p, q + TV) / q`. The bound of 20 is DPPO's, against overflow.
    """
    q = (seen.logp - seen.d).exp()
    bad = (torch.minimum(seen.logp.exp(), q + TV) / q).clamp(max=20.0)
    return torch.where(seen.positive, 1.0, bad) * within_tv(seen) * (seen.d.exp() >= FLOOR)


# Candidates for one rule that is right with fresh, rounded and stale weights -------------------------------------------------


def wide(seen: Seen) -> torch.Tensor:
    """The `auto` of before, with a region that is wider by what rounding alone does."""
    weights = torch.where(seen.positive, 1.0, seen.d.exp().clamp(max=CAP))
    return weights * within_tv(seen, TV + seen.rounding) * (seen.d.exp() >= FLOOR)


def by_age(seen: Seen) -> torch.Tensor:
    """Fresh completions: each token is weighted by its ratio. Others: `wide`."""
    within = within_tv(seen, TV + seen.rounding) * (seen.d.exp() >= FLOOR)
    return torch.where(seen.fresh, seen.d.exp().clamp(max=CAP) * within, wide(seen))


def split(seen: Seen) -> torch.Tensor:
    """
    `wide`, in which the weight of a good token, too, is its ratio, as far as rounding alone explains it. What is left of the
    ratio is due to age, for which a good token has a weight of 1.
    """
    explained = seen.d.clamp(-seen.log_rounding, seen.log_rounding).exp().clamp(max=CAP)
    return torch.where(seen.positive, explained, 1.0) * wide(seen)


def twice(seen: Seen) -> torch.Tensor:
    """`split`, for which rounding explains twice as much, since the 99th percentile leaves out tokens that pull much."""
    return split(seen._replace(rounding=2 * seen.rounding, log_rounding=2 * seen.log_rounding))


def excess(seen: Seen) -> torch.Tensor:
    """
    The `auto` of before, whose weights forget what rounding explains: a probability is moved towards the sampler's by what
    rounding alone does. With fresh weights there are hardly any weights, and the region is left.
    """
    q = (seen.logp - seen.d).exp()
    beyond = seen.moved - seen.moved.clamp(-seen.rounding, seen.rounding)
    bad = (1 + beyond / q).clamp(0.0, CAP)
    return torch.where(seen.positive, 1.0, bad) * within_tv(seen) * (seen.d.exp() >= FLOOR)


def slack(seen: Seen) -> torch.Tensor:
    """
    A rule that needs no age: `cap1`, but the weight of a bad token begins to fall only where its ratio has halved, which
    rounding hardly does.
    """
    return _less_for_bad(seen, 2.0)


def quarter(seen: Seen) -> torch.Tensor:
    """`slack`, whose weights begin to fall where a ratio has become a quarter."""
    return _less_for_bad(seen, 4.0)


def grown(seen: Seen) -> torch.Tensor:
    """`auto`, for which a completion also counts as old while the gap is far larger than in the first step."""
    unweighted = seen.fresh & (not seen.grown)
    return torch.where(unweighted, _less_for_bad(seen, math.inf), _less_for_bad(seen, 1.0))


def prefix(seen: Seen) -> torch.Tensor:
    """
    `auto`, whose weight of a bad token is the product of the ratios up to it, at most 1: what follows a beginning that the
    trainer would no longer write hardly counts.
    """
    return _product_for_bad(seen, seen.d.cumsum(1))


def recent(seen: Seen) -> torch.Tensor:
    """`prefix`, whose products have at most `RECENT` factors, so that they do not shrink with length."""
    so_far = torch.nn.functional.pad(seen.d.double().cumsum(1), (RECENT, 0))
    return _product_for_bad(seen, (so_far[:, RECENT:] - so_far[:, :-RECENT]).to(seen.d))


def _product_for_bad(seen: Seen, log_product: torch.Tensor) -> torch.Tensor:
    """Good tokens have the weight 1, and bad ones of old completions a product, at most 1."""
    product = torch.where(seen.fresh, 1.0, log_product.clamp(max=0.0).exp())
    return torch.where(seen.positive, 1.0, product) * within_tv(seen) * (seen.d.exp() >= FLOOR)


def _less_for_bad(seen: Seen, times: float) -> torch.Tensor:
    """Good tokens have the weight 1, and bad ones so many times their ratio, at most 1."""
    bad = (times * seen.d.exp()).clamp(max=1.0)
    return torch.where(seen.positive, 1.0, bad) * within_tv(seen) * (seen.d.exp() >= FLOOR)


# Published rules that adapt themselves, without knowing the age ---------------------------------------------------------


def reshape(seen: Seen) -> torch.Tensor:
    """IS-Reshape, of the authors of VESPO: the ratio to a power that keeps the effective sample size near `RHO_MIN`."""
    variance = seen.d[seen.valid].var(correction=0).clamp(min=1e-12)
    power = (-math.log(RHO_MIN) / variance).sqrt().clamp(LEAST_POWER, 1.0)
    return (power * seen.d).exp()


def mixture(seen: Seen) -> torch.Tensor:
    """A stand-in for AIS (arXiv 2605.13907), whose coefficient could not be read: more of the weights as they scatter."""
    r = seen.d[seen.valid].exp()
    scatter = 1 - r.sum().square() / (len(r) * r.square().sum())
    return 1 + scatter.clamp(0.0, 1.0) * (seen.d.exp().clamp(max=2.0) - 1)


def m2po(seen: Seen) -> torch.Tensor:
    """M2PO (arXiv 2510.01161): drops outward tokens, those furthest away first, until the mean of `d^2` is within budget."""
    squares = torch.where(seen.valid, seen.d.square(), 0.0)
    outward = (seen.d > 0) == seen.positive
    ordered = torch.where(outward, squares, 0.0).flatten().sort(descending=True)
    too_much = squares.sum() - M2_BUDGET * seen.valid.sum()
    dropped = torch.zeros_like(ordered.values, dtype=torch.bool)
    dropped[ordered.indices] = (ordered.values.cumsum(0) - ordered.values < too_much) & (ordered.values > 0)
    return seen.d.exp() * ~dropped.view_as(seen.d)


def vexact(seen: Seen) -> torch.Tensor:
    """VeXact (arXiv 2605.14220, second hand): ratios up to 2, without completions whose ratio is below 0.001."""
    return seen.d.exp().clamp(max=2.0) * (seen.d.sum(1, keepdim=True) >= math.log(FLOOR))


CANDIDATES = {
    rule.__name__: rule for rule in (wide, by_age, split, twice, excess, slack, quarter, grown, prefix, recent)
}
CONTROLS = {rule.__name__: rule for rule in (reshape, mixture, m2po, vexact)}
RULES: dict[str, Rule] = {"ipo": ipo, "region": region, **CANDIDATES, **CONTROLS}


class Rounding:
    """
    What rounding alone does to a number: a moving mean of the 99th percentile of its size, over tokens of fresh completions.
    It counts up to `GROWTH` times its first measurement, so that weights that do not arrive are not taken for rounding.
    """

    def __init__(self, largest: float):
        self.first = self.value = None
        self.largest = largest

    def measure(self, sizes: torch.Tensor) -> float:
        """Add a batch, and return the value."""
        if len(sizes):
            now = sizes.quantile(MOST).item()
            self.first = now if self.first is None else self.first
            moving = now if self.value is None else KEPT * self.value + (1 - KEPT) * now
            self.value = min(moving, GROWTH * self.first, self.largest)
        return self.value or 0.0


class Growth:
    """Whether the gap, as a mean of `k3` over the last `STEPS` batches, is `MUCH` times that of the first batch."""

    STEPS, MUCH = 5, 100.0

    def __init__(self):
        self.first = None
        self.last: deque[float] = deque(maxlen=self.STEPS)

    def measure(self, d: torch.Tensor) -> bool:
        """Add the log-ratios of a batch, and return whether the gap has grown."""
        gap = (d.exp() - 1 - d).mean().item()
        self.first = gap if self.first is None else self.first
        self.last.append(gap)
        return sum(self.last) / len(self.last) > self.MUCH * self.first


def with_rule(trainer_class: type, name: str) -> type:
    """A trainer of the package in which a rule decides the factor of each token."""
    rule = RULES[name]

    class RuledTrainer(trainer_class):
        def _compute_correction(self, train_logps: torch.Tensor, batch: dict[str, Any]) -> RolloutCorrection:
            correction = super()._compute_correction(train_logps, batch)
            if not hasattr(self, "_rule_rounding"):
                self._rule_rounding, self._rule_log_rounding = Rounding(WIDEST), Rounding(math.inf)
                self._rule_growth = Growth()
            valid = correction.valid
            d = torch.where(valid, train_logps.detach() - batch[ROLLOUT_LOGPS], 0.0).clamp(-20.0, 20.0)
            logp = torch.where(valid, train_logps.detach(), 0.0)
            ages = self._ages(batch)
            fresh = torch.zeros(len(d), dtype=torch.bool) if ages is None else ages == 0
            seen = Seen(
                d,
                logp,
                batch["advantages"].unsqueeze(1) > 0,
                valid,
                fresh.unsqueeze(1),
                0.0,
                0.0,
                self._rule_growth.measure(d[valid]),
            )
            known = valid & seen.fresh & (d.abs() < BROKEN)
            seen = seen._replace(
                rounding=self._rule_rounding.measure(seen.moved[known].abs()),
                log_rounding=self._rule_log_rounding.measure(d[known].abs()),
            )
            factors = rule(seen) * valid
            pull = (d.exp() - 1) * batch["advantages"].unsqueeze(1) * valid
            self._seen = {
                "rollout_rs_masked_fraction": ((factors == 0) & valid).sum() / valid.sum(),
                "rounding": seen.rounding,
                "log_rounding": seen.log_rounding,
                "grown": seen.grown,
                "signed_positive": (pull * seen.positive).sum() / valid.sum(),
                "signed_negative": (pull * ~seen.positive).sum() / valid.sum(),
            }
            return replace(correction, weights=factors, keep=valid)

        def _close_window(self, now: Any) -> dict[str, float]:
            return {
                **super()._close_window(now),
                **{f"{PREFIX}{key}": float(value) for key, value in self._seen.items()},
            }

    return RuledTrainer
