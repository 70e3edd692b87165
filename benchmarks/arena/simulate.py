"""
Rules of rejection on tokens whose true policies are known: what each rejects where nothing is wrong, what it catches where
something is, and how much of the true gradient it leaves.

    python benchmarks/arena/simulate.py            # half a minute, writes simulation.json beside this file

A token is drawn from eight, by a sampler whose logits are the trainer's plus rounding (`rounding`, the same with heavy tails),
or are those of some steps ago: the trainer has moved since, towards what is rewarded (`stale`) or anywhere (`astray`). In
`broken`, every tenth token is reported with the log-probability of another, unlikely one, as in the arena. What a rule leaves
of the gradient is `<g', g> / <g, g>`, of the estimate `g'` from the sampler's tokens and the policy gradient `g` of the
trainer's policy.
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
    return Tokens(p[rows, chosen], log_q, advantage[rows, chosen], step, gradient, is_broken)


# Rules: which tokens stay ---------------------------------------------------------------------------------------------


def binary_kl(a: Array, b: Array) -> Array:
    return a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b))


def within_kl(bound: float) -> Callable[[Tokens], Array]:
    """KPop."""

    def keep(t: Tokens) -> Array:
        p, q = (np.exp(x).clip(SMALLEST, 1 - SMALLEST) for x in (t.log_p, t.log_q))
        return np.maximum(binary_kl(p, q), binary_kl(q, p)) <= bound

    return keep


def within_tv(bound: float) -> Callable[[Tokens], Array]:
    """DPPO."""
    return lambda t: np.sign(t.advantage) * (np.exp(t.log_p) - np.exp(t.log_q)) <= bound


def within_ratio(lower: float, upper: float) -> Callable[[Tokens], Array]:
    """IcePop."""
    return lambda t: (np.exp(t.d) >= lower) & (np.exp(t.d) <= upper)


def within_mean(lower: float, upper: float) -> Callable[[Tokens], Array]:
    """Whole completions, by the geometric mean of the ratio."""

    def keep(t: Tokens) -> Array:
        mean = np.exp(t.d.reshape(-1, LENGTH).mean(-1))
        return np.repeat((mean >= lower) & (mean <= upper), LENGTH)

    return keep


def within_moment(budget: float, batch: int = 64 * LENGTH) -> Callable[[Tokens], Array]:
    """M2PO (https://huggingface.co/papers/2510.01161): the largest d^2 of a batch go until the mean of the rest is low."""

    def keep(t: Tokens) -> Array:
        squares = t.d.reshape(-1, batch) ** 2
        order = np.sort(squares, -1)
        means = order.cumsum(-1) / np.arange(1, batch + 1)
        last = (means <= budget).sum(-1).clip(min=1) - 1
        return (squares <= np.take_along_axis(order, last[:, None], -1)).ravel()

    return keep


def within_sigmas(bound: float, batch: int = 64 * LENGTH) -> Callable[[Tokens], Array]:
    """Log-ratio over its spread in the batch, from percentiles so that outliers do not widen it."""

    def keep(t: Tokens) -> Array:
        d = t.d.reshape(-1, batch)
        low, high = np.percentile(d, [5, 95], axis=-1, keepdims=True)
        return (np.abs(d) <= bound * (high - low) / 3.29).ravel()

    return keep


def both(*rules: Callable[[Tokens], Array]) -> Callable[[Tokens], Array]:
    return lambda t: np.logical_and.reduce([rule(t) for rule in rules])


RULES: dict[str, Callable[[Tokens], Array]] = {
    "none": lambda t: np.ones_like(t.d, bool),
    "seq_mean_k1 [0.999, 1.001]": within_mean(0.999, 1.001),
    "seq_mean_k1 [0.95, 1.05]": within_mean(0.95, 1.05),
    "IcePop [0.5, 5]": within_ratio(0.5, 5.0),
    "token_binary_kl 0.1": within_kl(0.1),
    "M2PO 0.04": within_moment(0.04),
    "5 sigma": within_sigmas(5.0),
    "token_tv 0.2": within_tv(0.2),
    "token_tv 0.2, token_binary_kl 0.5": both(within_tv(0.2), within_kl(0.5)),
    "token_tv 0.2, token_binary_kl 1": both(within_tv(0.2), within_kl(1.0)),
    "token_tv 0.2, token_binary_kl 2": both(within_tv(0.2), within_kl(2.0)),
    "token_tv 0.2, token_k1 up to 10": both(within_tv(0.2), within_ratio(0.0, 10.0)),
    "token_tv 0.2, token_k1 up to 5": both(within_tv(0.2), within_ratio(0.0, 5.0)),
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
}


def judge(tokens: Tokens, keep: Array) -> dict[str, float]:
    """Effect of a rule, with token weights truncated at 2 beneath it."""
    broken, sound = tokens.broken, ~tokens.broken
    weights = np.exp(tokens.d).clip(max=2.0) * keep * tokens.advantage
    estimate = (weights[:, None] * tokens.step * tokens.gradient).sum(dtype=np.float64)
    result = {
        "rejected": 1 - keep[sound].mean(),
        "gradient": estimate / (tokens.gradient**2).sum(dtype=np.float64),
    }
    return {**result, "caught": 1 - keep[broken].mean()} if broken.any() else result


def simulate(n: int) -> dict[str, dict[str, dict[str, float]]]:
    """By situation and rule. `k3_kl` of the situation is under `"k3_kl"`."""
    results = {}
    for number, (name, options) in enumerate(SITUATIONS.items()):
        tokens = draw(np.random.default_rng(number), n, **options)
        found = {rule: judge(tokens, keep(tokens)) for rule, keep in RULES.items()}
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
