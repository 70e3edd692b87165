"""
Corrections on tokens whose true policies are known: how much of the true gradient each leaves, how many tokens it rejects, and
how much of the gradient broken tokens have.

    python benchmarks/arena/simulate.py            # half a minute, writes simulation.json beside this file

A token is drawn from eight, by a sampler whose logits are the trainer's plus rounding (`rounding`, the same with heavy tails),
or are those of some steps ago: the trainer has moved since, towards what is rewarded (`stale`) or anywhere (`astray`). In
`broken`, every tenth token is reported with the log-probability of another, unlikely one, as in the arena. In `garbage`, every
hundredth token is garbage: the sampler reports that it was sure of it, the trainer gives it a probability below 1e-5, and the
reward forgives it, so that its advantage has either sign.

What a correction leaves of the gradient is `<g', g> / <g, g>`, of the estimate `g'` from the sampler's tokens and the policy
gradient `g` of the trainer's policy. The share of broken tokens, or of garbage, is theirs in `sum |factor * advantage|`.
"""

import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np


Array = np.ndarray
HERE = Path(__file__).parent
VOCABULARY, LENGTH = 8, 256
SMALLEST = 1e-6  # as in `functional.probability_divergence`


class Tokens(NamedTuple):
    """Sampled tokens; arrays of shape `(N,)` but `step`, `(N, VOCABULARY)`."""

    log_p: Array  # the trainer's
    log_q: Array  # what the sampler reports
    advantage: Array
    step: Array  # gradient of log_p by the logits
    gradient: Array  # the true one, `(N, VOCABULARY)`
    broken: Array

    @property
    def d(self) -> Array:
        return self.log_p - self.log_q

    @property
    def ratio(self) -> Array:
        return np.exp(self.d)


def log_softmax(logits: Array) -> Array:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def draw(
    dice: np.random.Generator,
    n: int,
    *,
    spread: float,
    tails: float | None = None,
    drift: float = 0.0,
    broken: float = 0.0,
    garbage: float = 0.0,
) -> Tokens:
    """
    Args:
        spread (`float`):
            Standard deviation of what separates the logits of the two policies and has nothing to do with rewards.
        tails (`float`, *optional*):
            Degrees of freedom of its Student distribution; normal by default.
        drift (`float`, *optional*, defaults to `0.0`):
            How far the trainer's logits have moved since, per standard deviation of what a token is worth.
        broken (`float`, *optional*, defaults to `0.0`):
            Share of tokens that are reported with another log-probability.
        garbage (`float`, *optional*, defaults to `0.0`):
            Share of tokens that are garbage, outside the eight of the vocabulary.
    """
    shape = (n, VOCABULARY)
    noise = dice.standard_normal(shape) if tails is None else dice.standard_t(tails, shape)
    worth = dice.standard_normal(shape)
    q = log_softmax(dice.uniform(1, 8, (n, 1)) * dice.standard_normal(shape))  # sure of most tokens, torn at some
    p = log_softmax(q + spread * noise + drift * worth)
    chosen = (np.cumsum(np.exp(q), -1) < dice.random((n, 1))).sum(-1).clip(max=VOCABULARY - 1)
    rows = np.arange(n)
    advantage = worth - (np.exp(q) * worth).sum(-1, keepdims=True)
    gradient = np.exp(p) * (advantage - (np.exp(p) * advantage).sum(-1, keepdims=True))
    step = -np.exp(p)
    step[rows, chosen] += 1
    log_q, is_broken = q[rows, chosen], dice.random(n) < broken
    log_q = np.where(is_broken, -dice.uniform(2, 12, n), log_q)
    tokens = Tokens(p[rows, chosen], log_q, advantage[rows, chosen], step, gradient, is_broken)
    return with_garbage(dice, tokens, garbage) if garbage else tokens


def with_garbage(dice: np.random.Generator, tokens: Tokens, share: float) -> Tokens:
    """Some tokens replaced by garbage. It pushes none of the eight tokens up, and all down as much as any other token does."""
    n = len(tokens.log_p)
    is_garbage = dice.random(n) < share
    log_p, log_q = -dice.uniform(12, 20, n), -dice.uniform(0.05, 0.15, n)
    down = tokens.step - (tokens.step > 0) * 1.0
    return tokens._replace(
        log_p=np.where(is_garbage, log_p, tokens.log_p),
        log_q=np.where(is_garbage, log_q, tokens.log_q),
        advantage=np.where(is_garbage, dice.standard_normal(n), tokens.advantage),
        step=np.where(is_garbage[:, None], down, tokens.step),
        broken=tokens.broken | is_garbage,
    )


# Factor of the gradient of each token -----------------------------------------------------------------------------------


def binary_kl(a: Array, b: Array) -> Array:
    return a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b))


def kpop(t: Tokens) -> Array:
    p, q = (np.exp(x).clip(SMALLEST, 1 - SMALLEST) for x in (t.log_p, t.log_q))
    return t.ratio * (np.maximum(binary_kl(p, q), binary_kl(q, p)) <= 0.1)


def within_tv(t: Tokens, bound: float) -> Array:
    """Whether the probability was not pushed further than a bound."""
    return np.sign(t.advantage) * (np.exp(t.log_p) - np.exp(t.log_q)) <= bound


def within_mean(t: Tokens, lower: float, upper: float) -> Array:
    """Whole completions, by the geometric mean of the ratio, with token weights."""
    mean = np.exp(t.d.reshape(-1, LENGTH).mean(-1))
    return t.ratio.clip(max=2.0) * np.repeat((mean >= lower) & (mean <= upper), LENGTH)


def within_moment(t: Tokens, budget: float, batch: int = 64 * LENGTH) -> Array:
    """M2PO (https://huggingface.co/papers/2510.01161): the largest d^2 of a batch go until the mean of the rest is low."""
    squares = t.d.reshape(-1, batch) ** 2
    order = np.sort(squares, -1)
    means = order.cumsum(-1) / np.arange(1, batch + 1)
    last = (means <= budget).sum(-1).clip(min=1) - 1
    return t.ratio * (squares <= np.take_along_axis(order, last[:, None], -1)).ravel()


def clipped(t: Tokens) -> Array:
    """PPO clipped around the sampler, with its dual clip."""
    good = t.advantage > 0
    return t.ratio * np.where(good, t.ratio <= 1.2, (t.ratio >= 0.8) & (t.ratio <= 3.0))


RULES: dict[str, Callable[[Tokens], Array]] = {
    "none": lambda t: np.ones_like(t.d),
    "token weights up to 2": lambda t: t.ratio.clip(max=2.0),
    "the same, seq_mean_k1 [0.999, 1.001]": lambda t: within_mean(t, 0.999, 1.001),
    "the same, seq_mean_k1 [0.95, 1.05]": lambda t: within_mean(t, 0.95, 1.05),
    "IcePop [0.5, 5]": lambda t: t.ratio * (t.ratio >= 0.5) * (t.ratio <= 5.0),
    "KPop 0.1": kpop,
    "M2PO 0.04": lambda t: within_moment(t, 0.04),
    "bypass_ppo_clip": clipped,
    "bypass_dppo_tv": lambda t: t.ratio.clip(max=20.0) * within_tv(t, 0.2),
    "auto without its floor": lambda t: np.where(t.advantage > 0, 1.0, t.ratio.clip(max=1.0)) * within_tv(t, 0.2),
    "auto": lambda t: RULES["auto without its floor"](t) * (t.ratio >= 0.001),
}
SITUATIONS: dict[str, dict[str, float]] = {
    **{f"rounding {spread:g}": {"spread": spread} for spread in (1e-4, 0.001, 0.01, 0.03, 0.1, 0.3)},
    "rounding 0.03, heavy tails": {"spread": 0.03, "tails": 2.5},
    "rounding 0.1, heavy tails": {"spread": 0.1, "tails": 2.5},
    "stale 0.1": {"spread": 0.01, "drift": 0.1},
    "stale 0.3": {"spread": 0.01, "drift": 0.3},
    "stale 1": {"spread": 0.01, "drift": 1.0},
    "astray 1": {"spread": 1.0},
    "broken": {"spread": 0.01, "broken": 0.1},
    "broken, stale 0.3": {"spread": 0.01, "drift": 0.3, "broken": 0.1},
    "garbage": {"spread": 0.01, "garbage": 0.01},
    "garbage, stale 0.3": {"spread": 0.01, "drift": 0.3, "garbage": 0.01},
}


def judge(tokens: Tokens, factor: Array) -> dict[str, float]:
    """Effect of a correction, from the factor of the gradient of each token."""
    broken, pull = tokens.broken, factor * tokens.advantage
    estimate = (pull[:, None] * tokens.step * tokens.gradient).sum(dtype=np.float64)
    result = {
        "rejected": (factor[~broken] == 0).mean(),
        "gradient": estimate / (tokens.gradient**2).sum(dtype=np.float64),
    }
    return {**result, "pull": np.abs(pull[broken]).sum() / max(np.abs(pull).sum(), 1e-9)} if broken.any() else result


def simulate(n: int) -> dict[str, dict[str, dict[str, float]]]:
    """By situation and rule. `k3_kl` of the situation is under `"k3_kl"`."""
    results = {}
    for number, (name, options) in enumerate(SITUATIONS.items()):
        tokens = draw(np.random.default_rng(number), n, **options)
        found = {rule: judge(tokens, factor(tokens)) for rule, factor in RULES.items()}
        results[name] = {
            "k3_kl": {"mean": float((np.expm1(tokens.d) - tokens.d)[~tokens.broken].mean())},
            **{rule: {key: float(f"{value:.4g}") for key, value in row.items()} for rule, row in found.items()},
        }
    return results


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**20, help="per situation, a multiple of 16384 (default: 2^20)")
    parser.add_argument("--output", type=Path, default=HERE / "simulation.json")
    args = parser.parse_args()
    results = simulate(args.tokens)
    args.output.write_text(json.dumps({"tokens": args.tokens, "situations": results}, indent=1) + "\n")
    for name, rules in results.items():
        print(f"\n{name}: k3_kl {rules['k3_kl']['mean']:.2g}")
        for rule in RULES:
            print(f"  {rule:36}", "  ".join(f"{key} {value:.4f}" for key, value in rules[rule].items()))


if __name__ == "__main__":
    main()
