"""
Faults in simulated runs: policies that are tables, so that a run takes a moment and every probability is exact.

    python benchmarks/diagnose/simulated.py              # judges the runs, writes simulated.json, and prints the tables
    python benchmarks/diagnose/simulated.py --try 3      # prints the answers of three seeds of the design

A policy has a logit for each token after each of the two tokens before it. The trainer learns from rewards by policy
gradients, and the sampler gets its weights after each step, unless a fault says otherwise.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple


sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from tables import grid

from trl_rollout_corr.pushes.rescore import is_due
from trl_rollout_corr.tools.diagnosis import Diagnosis, diagnose, read_tokens
from trl_rollout_corr.tools.diagnosis.ranking import DIFFUSE, LAST, STAGES
from trl_rollout_corr.tools.diagnosis.text import sure
from trl_rollout_corr.tools.dump import folder as dump


GROUP = 8
HERE = Path(__file__).parent
DESIGN, JUDGED = range(100), range(3000, 3004)  # seeds: bounds were set on the first, the tables are of the second


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


class Policy(NamedTuple):
    """Logits by the last token, and by the one before it: `(V, V)` each."""

    last: np.ndarray
    before: np.ndarray

    def logits(self, ids: np.ndarray, at: int) -> np.ndarray:
        return np.asarray(self.last[ids[:, at - 1]] + self.before[ids[:, at - 2]])


def rounded(policy: Policy, bits: int) -> Policy:
    """Weights that are rounded to a grid with so many bits, as in a quantised engine."""

    def grid(weights: np.ndarray) -> np.ndarray:
        step = np.abs(weights).max() / 2 ** (bits - 1)
        return np.asarray(np.round(weights / step) * step)

    return Policy(grid(policy.last), grid(policy.before))


_ABOUT = {"adapter": "none", "kv_cache_dtype": "auto", "experts": "none"}


@dataclass(frozen=True)
class Run:
    """A run: how long it is, and what the sampler does otherwise than it should."""

    steps: int = 16
    rows: int = 32
    longest: int = 48
    vocabulary: int = 48
    rate: float = 0.3  # of learning
    noise: float = 0.01  # of the sampler, as by rounding
    schedule: Callable[[int], float] = lambda step: 1.0  # factor on the rate by step
    lag: int = 0  # pushes that the sampler is behind
    late_from: int = 1  # first step in which it is
    every: int = 1  # steps from one push to the next, whose samples get older meanwhile
    announced: bool = True  # the age of the samples
    pushed: Callable[[int, Policy, Policy], Policy] | None = None  # step, trainer and sampler before; the new sampler
    drawn: Callable[[np.ndarray], np.ndarray] = softmax  # probabilities that tokens are drawn with, of logits
    told: Callable[[np.ndarray], np.ndarray] = softmax  # probabilities that are reported
    some: float = 1.0  # share of the completions with `drawn` and `told`
    pool: bool = False  # the completions of the first step come again and again
    change: Callable[[dict[str, Any], np.random.Generator], None] | None = None  # of a row
    of_tokens: bool = False  # each token has an advantage of its own, and their mean over a completion is 0
    scores: bool = True  # completions are scored again after pushes
    entropy: bool = True  # the trainer logs its entropy
    about: dict[str, str] = field(
        default_factory=lambda: {"adapter": "none", "kv_cache_dtype": "auto", "experts": "none"}
    )
    settings: dict[str, Any] = field(default_factory=dict)


def varied(run: Run, seed: int) -> Run:
    """
    A judged run differs from those of the design in its length, its noise, how fast it learns, its vocabulary, and the
    number and the length of its completions.
    """
    if seed < JUDGED.start:
        return run
    dice = np.random.default_rng(seed + 10**6)
    steps = run.steps if run.steps < 4 else int(dice.integers(12, 25))
    run = replace(run, steps=steps, noise=run.noise * dice.uniform(0.3, 3), rate=run.rate * dice.uniform(0.6, 1.5))
    rows = run.rows if run.steps < 4 else GROUP * int(dice.integers(3, 7))
    longest = int(run.longest * dice.uniform(0.7, 1.5)) if run.steps >= 4 else run.longest
    return replace(run, rows=rows, longest=longest, vocabulary=int(dice.integers(32, 97)))


def write(run: Run, folder: Path, seed: int) -> Path:
    """Write the dump of a run."""
    run, dice = varied(run, seed), np.random.default_rng(seed)
    sharpness = dice.uniform(1.5, 3.0)
    sizes = run.vocabulary, run.vocabulary
    trainer = Policy(*(sharpness * dice.normal(size=sizes) * x for x in (1.0, 0.6)))
    sampler, history, pool = trainer, [trainer], None
    good = dice.random(run.vocabulary) < 0.3
    for step in range(1, run.steps + 1):
        before = sampler
        history.append(trainer)
        lag = min(run.lag, step - 1) if step >= run.late_from else 0
        push, since = divmod(step - 1, run.every)
        lag += since
        arrives = history[-1 - lag]
        if since == 0:
            sampler = run.pushed(step, arrives, sampler) if run.pushed else arrives
        batch = _sample(run, sampler, dice) if pool is None else pool
        pool = batch if run.pool else None
        ids, lengths, reported = batch
        places = np.arange(ids.shape[1] - 2)
        mask = places < lengths[:, None]
        probabilities = np.stack([softmax(trainer.logits(ids, at)) for at in range(2, ids.shape[1])], 1)
        train = np.log(np.take_along_axis(probabilities, ids[:, 2:, None], -1)[..., 0])
        rewards = (good[ids[:, 2:]] * mask).sum(1) / lengths
        grouped = rewards.reshape(-1, GROUP)
        spread = grouped.std(1, keepdims=True) + 1e-4
        advantages = ((grouped - grouped.mean(1, keepdims=True)) / spread).reshape(-1, 1) * mask
        if run.of_tokens:
            advantages = (good[ids[:, 2:]] - rewards[:, None]) * mask
        age = lag if run.announced else 0
        _write_step(run, folder, step, age, ids, lengths, train, reported, rewards, advantages, dice)
        entry: dict[str, Any] = {"loss": 0.0, "learning_rate": 1e-6 * run.schedule(step), "step": step}
        if run.entropy:
            entropies = -(probabilities * np.log(probabilities)).sum(-1)
            entry["entropy"] = float(entropies[mask].mean())
        if run.scores and not (run.lag and run.announced) and since == 0 and is_due(push + 1):
            entry |= _scored(trainer, before, sampler, ids, mask)
        dump.append_log(folder, entry)
        trainer = _learned(trainer, ids, mask, probabilities, advantages, run.rate * run.schedule(step))
    return folder


def _sample(run: Run, sampler: Policy, dice: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, with two of a prompt before them, lengths, and reported log-probabilities."""
    ids = np.zeros((run.rows, run.longest + 2), np.int64)
    ids[:, :2] = np.repeat(dice.integers(run.vocabulary, size=(run.rows // GROUP, 2)), GROUP, 0)
    lengths = dice.integers(max(run.longest // 2, 4), run.longest + 1, size=run.rows)
    special = dice.random(run.rows) < run.some
    reported = np.zeros((run.rows, run.longest))
    for at in range(2, run.longest + 2):
        logits = sampler.logits(ids, at)
        logits = logits + run.noise * dice.normal(size=logits.shape)
        plain = softmax(logits)
        drawn, told = (np.where(special[:, None], how(logits), plain) for how in (run.drawn, run.told))
        edges = drawn.cumsum(-1)
        ids[:, at] = np.minimum((edges < dice.random((run.rows, 1)) * edges[:, -1:]).sum(-1), run.vocabulary - 1)
        with np.errstate(divide="ignore"):
            reported[:, at - 2] = np.log(np.take_along_axis(told, ids[:, at, None], -1)[:, 0])
    return ids, lengths, reported


def _learned(
    trainer: Policy, ids: np.ndarray, mask: np.ndarray, p: np.ndarray, advantages: np.ndarray, rate: float
) -> Policy:
    """The policy after a step of policy gradients, which is the sum over tokens over the number of completions."""
    gradient = -p * (advantages * mask)[..., None]
    rows, places = np.indices(mask.shape)
    gradient[rows, places, ids[:, 2:]] += advantages * mask
    tables = []
    for table, keys in ((trainer.last, ids[:, 1:-1]), (trainer.before, ids[:, :-2])):
        sums = np.zeros_like(table)
        np.add.at(sums, keys, gradient)
        tables.append(table + rate * sums / len(ids))
    return Policy(*tables)


def _scored(trainer: Policy, then: Policy, now: Policy, ids: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """`fresh_k3_kl` and `age_k3_kl` of some completions after a push."""

    def logps(policy: Policy) -> np.ndarray:
        every = [np.log(softmax(policy.logits(ids[:8], at))) for at in range(2, ids.shape[1])]
        return np.take_along_axis(np.stack(every, 1), ids[:8, 2:, None], -1)[..., 0][mask[:8]]

    sides = [logps(policy) for policy in (trainer, now, then)]
    gaps = (sides[0] - sides[1], sides[1] - sides[2])
    fresh, age = (float(np.mean(np.expm1(d.clip(max=20)) - d)) for d in gaps)
    return {"rollout_corr/fresh_k3_kl": fresh, "rollout_corr/age_k3_kl": age}


def _write_step(
    run: Run, folder: Path, step: int, age: int, ids: Any, lengths: Any, train: Any, reported: Any, rewards: Any,
    advantages: Any, dice: np.random.Generator,
) -> None:  # fmt: skip
    rows = []
    for i, n in enumerate(lengths.tolist()):
        row: dict[str, Any] = {
            "step": step, "rank": 0, "sampled": True, "worst": False, "prompt": "", "completion": "", "tokens": [""] * n,
            "token_ids": ids[i, 2 : n + 2].tolist(), "mask": [True] * n, "train_logps": train[i, :n].tolist(),
            "rollout_logps": reported[i, :n].tolist(), "weights": None, "keep": [True] * n, "coefficients": [1.0] * n,
            "reward": float(rewards[i]), "advantage": float(advantages[i, :n].mean()), "staleness": age,
            "advantages": advantages[i, :n].tolist() if run.of_tokens else None,
            "prompt_ids": ids[i, :2].tolist(), "padding": 0, "again_logps": None,
        }  # fmt: skip
        if run.change:
            run.change(row, dice)
        rows.append(row)
    dump.write_rows(folder, step, 0, rows, run.settings, run.about)


# Faults -------------------------------------------------------------------------------------------------------------------


def at(temperature: float) -> Callable[[np.ndarray], np.ndarray]:
    """Probabilities at a temperature."""
    return lambda logits: softmax(logits / temperature)


def top_p(share: float) -> Callable[[np.ndarray], np.ndarray]:
    """Probabilities of the likeliest tokens that have a share of all together."""

    def truncated(logits: np.ndarray) -> np.ndarray:
        p = softmax(logits)
        order = np.argsort(-p, -1)
        ordered = np.take_along_axis(p, order, -1)
        kept = np.where(ordered.cumsum(-1) - ordered < share, ordered, 0.0)
        back = np.zeros_like(p)
        np.put_along_axis(back, order, kept / kept.sum(-1, keepdims=True), -1)
        return back

    return truncated


def a_fifth_at_random(logits: np.ndarray) -> np.ndarray:
    """A fifth of the tokens is drawn from the whole vocabulary."""
    return 0.8 * softmax(logits) + 0.2 / logits.shape[-1]


def added(amount: float) -> Callable[[dict[str, Any], np.random.Generator], None]:
    """A constant is added to each log-probability of the sampler."""

    def change(row: dict[str, Any], dice: np.random.Generator) -> None:
        row["rollout_logps"] = [x + amount for x in row["rollout_logps"]]

    return change


def mean_at_some(row: dict[str, Any], dice: np.random.Generator) -> None:
    """A tenth of the tokens gets the mean of the completion, which is another one in each."""
    logps, filler = row["rollout_logps"], float(np.mean(row["rollout_logps"]))
    row["rollout_logps"] = [filler if dice.random() < 0.1 else x for x in logps]


def one_in_four(row: dict[str, Any], dice: np.random.Generator) -> None:
    """The values of one completion in four are of another distribution."""
    if dice.random() < 0.25:
        p = np.exp(row["rollout_logps"])
        noise = 1.0 * (1 - p) * dice.normal(size=len(p))
        row["rollout_logps"] = np.minimum(np.log(p) - noise, 0.0).tolist()


def against_rewarded(row: dict[str, Any], dice: np.random.Generator) -> None:
    """Where the advantage is negative, the values are noisy, with the mean ratio of samples."""
    if row["advantage"] < 0:
        scale = 0.3 * (1 - np.exp(row["rollout_logps"]))
        noise = scale * dice.normal(size=len(scale)) - scale**2 / 2
        row["rollout_logps"] = np.minimum(np.asarray(row["rollout_logps"]) - noise, 0.0).tolist()


def never(step: int, trainer: Policy, sampler: Policy) -> Policy:
    """No push arrives after the first step."""
    return sampler


def in_part(step: int, trainer: Policy, sampler: Policy) -> Policy:
    """One of the two tables arrives, such as an adapter without its biases."""
    return Policy(trainer.last, sampler.before)


def lost_once(first: int) -> Callable[[int, Policy, Policy], Policy]:
    """No push arrives from a step on."""
    return lambda step, trainer, sampler: trainer if step < first else sampler


def with_bits(bits: int, steps: range) -> Callable[[int, Policy, Policy], Policy]:
    """The engine quantises the weights in some steps."""
    return lambda step, trainer, sampler: rounded(trainer, bits) if step in steps else trainer


def faster(step: int) -> float:
    """A learning rate that rises when the engine begins to quantise."""
    return 10.0 if step >= 8 else 1.0


class Case(NamedTuple):
    """A kind of run, and the answers that are right: names of causes, `healthy`, or `unknown`."""

    what: str
    right: tuple[str, ...]
    run: Run


_PLAIN, _SHORT = Run(), Run(steps=1, rows=8, longest=20)
_SWITCH = range(8, 100)
CASES: dict[str, Case] = {
    "exact": Case("the sampler computes what the trainer computes", ("healthy",), replace(_PLAIN, noise=0.0)),
    "rounding": Case("noise as of rounding", ("healthy",), _PLAIN),
    "short": Case("136 tokens of one step, with noise as of rounding", ("healthy",), _SHORT),
    "short_exact": Case("136 tokens of one step", ("healthy",), replace(_SHORT, noise=0.0)),
    "short_8_bits": Case("two short steps with more noise", ("healthy",), replace(_SHORT, steps=2, noise=0.03)),
    "unscored": Case("a long healthy run without scores after pushes", ("healthy",), replace(_PLAIN, scores=False)),
    "offset_up": Case("0.2 nats are added to each value", ("offset",), replace(_PLAIN, change=added(0.2))),
    "offset_down": Case("0.2 nats are taken from each value", ("offset",), replace(_PLAIN, change=added(-0.2))),
    "small_offset_up": Case("0.05 nats are added", ("offset",), replace(_PLAIN, change=added(0.05))),
    "small_offset_down": Case("0.05 nats are taken", ("offset",), replace(_PLAIN, change=added(-0.05))),
    "hot": Case("the sampler has a temperature of 1.4", ("temperature",), replace(_PLAIN, drawn=at(1.4), told=at(1.4))),
    "cold": Case("a temperature of 0.7", ("temperature",), replace(_PLAIN, drawn=at(0.7), told=at(0.7))),
    "colder": Case("a temperature of 0.2", ("temperature",), replace(_PLAIN, drawn=at(0.2), told=at(0.2))),
    "coldest": Case("a temperature of 0.1", ("temperature",), replace(_PLAIN, drawn=at(0.1), told=at(0.1))),
    "top_p": Case("`top_p` is 0.9", ("truncation",), replace(_PLAIN, drawn=top_p(0.9), told=top_p(0.9))),
    "low_top_p": Case("`top_p` is 0.4", ("truncation",), replace(_PLAIN, drawn=top_p(0.4), told=top_p(0.4))),
    "top_p_of_half": Case(
        "`top_p` is 0.9 in half of the completions", ("some_completions", "truncation"),
        replace(_PLAIN, noise=0.0, drawn=top_p(0.9), told=top_p(0.9), some=0.5),
    ),
    "cold_third": Case(
        "a third of the requests has a temperature of 0.6", ("some_completions", "temperature"),
        replace(_PLAIN, noise=0.0, drawn=at(0.6), told=at(0.6), some=0.33),
    ),
    "pool": Case("the completions of the first step are used in all steps", ("recorded",), replace(_PLAIN, pool=True)),
    "pool_unscored": Case("the same, without scores after pushes", ("recorded",), replace(_PLAIN, pool=True, scores=False)),
    "never_pushed": Case("no push arrives", ("never_pushed",), replace(_PLAIN, pushed=never)),
    "never_pushed_unscored": Case(
        "no push arrives, without scores", ("never_pushed",), replace(_PLAIN, pushed=never, scores=False)
    ),
    "pushed_in_part": Case("half of the weights arrive", ("pushed_in_part",), replace(_PLAIN, pushed=in_part)),
    "pushed_in_part_unscored": Case(
        "the same, without scores", ("pushed_in_part",), replace(_PLAIN, pushed=in_part, scores=False)
    ),
    "lost_later": Case("no push arrives from step 9 on", ("never_pushed",), replace(_PLAIN, pushed=lost_once(9))),
    "stale": Case("samples are 4 steps old", ("stale",), replace(_PLAIN, lag=4)),
    "stale_unannounced": Case(
        "samples are 4 steps old and announced as fresh", ("stale",), replace(_PLAIN, lag=4, announced=False)
    ),
    "stale_unscored": Case(
        "the same, without scores", ("stale",), replace(_PLAIN, lag=4, announced=False, scores=False)
    ),
    "8_bits_later": Case(
        "the engine quantises from step 8 on", ("changed",), replace(_PLAIN, pushed=with_bits(5, _SWITCH))
    ),
    "8_bits_later_unscored": Case(
        "the same, without scores", ("changed",), replace(_PLAIN, pushed=with_bits(5, _SWITCH), scores=False)
    ),
    "8_bits_at_first": Case(
        "the engine quantises until step 8", ("changed",), replace(_PLAIN, pushed=with_bits(5, range(8)))
    ),
    "8_bits_faster": Case(
        "the engine quantises from step 8 on, where the learning rate becomes ten times as large", ("changed",),
        replace(_PLAIN, rate=0.03, schedule=faster, pushed=with_bits(5, _SWITCH)),
    ),
    "8_bits_shared": Case(
        "the same with two steps on the samples of a push", ("changed",),
        replace(_PLAIN, every=2, rate=0.03, schedule=faster, pushed=with_bits(5, _SWITCH)),
    ),
    "8_bits_old": Case(
        "the engine quantises from step 8 on, and samples are announced as one step old", ("changed",),
        replace(_PLAIN, lag=1, pushed=with_bits(5, _SWITCH)),
    ),
    "faster_old": Case(
        "samples are one step old, and the learning rate becomes ten times as large", ("stale",),
        replace(_PLAIN, lag=1, noise=0.002, rate=0.03, schedule=faster),
    ),
    "8_bits": Case(
        "the engine quantises, and does not say so", ("weights",), replace(_PLAIN, pushed=with_bits(5, range(100)))
    ),
    "drawn_hot": Case(
        "tokens are drawn at a temperature of 2, and the values are of 1", ("other_draws",),
        replace(_PLAIN, drawn=at(2.0)),
    ),
    "drawn_cold": Case("tokens are drawn at 0.3, and the values are of 1", ("other_draws",), replace(_PLAIN, drawn=at(0.3))),
    "drawn_at_random": Case(
        "a fifth of the tokens is drawn at random", ("other_draws",), replace(_PLAIN, drawn=a_fifth_at_random)
    ),
    "mean_at_some": Case(
        "a tenth of the values is the mean of its completion", ("not_sampled",), replace(_PLAIN, change=mean_at_some)
    ),
    "one_in_four": Case(
        "a server scores one text of four wrongly", ("some_completions",), replace(_PLAIN, change=one_in_four)
    ),
    "by_reward": Case(
        "noise where the advantage is negative", ("by_advantage",), replace(_PLAIN, change=against_rewarded)
    ),
    "noted_cache": Case(
        "samples are 4 steps old, and vLLM was seen to read a prompt again within a request", ("stale",),
        replace(_PLAIN, lag=4, announced=False, about={**_PLAIN.about, "prefix_cache": "13 of 13 tokens"}),
    ),
}  # fmt: skip


def answers(diagnosis: Diagnosis) -> tuple[str, str]:
    """The name of the first cause, `healthy`, or the verdict, and the certainty. What is expected has a name."""
    first = diagnosis.findings[0] if diagnosis.findings else None
    if diagnosis.healthy and not diagnosis.expected:
        return "healthy", ""
    return (first.name, sure(first)) if first else (diagnosis.verdict, "")


def answer_of(name: str, seed: int, folder: Path) -> tuple[str, str]:
    """The answer about a run with a fault, whose dump is written to a folder."""
    return answers(diagnose(read_tokens(write(CASES[name].run, folder / name / str(seed), seed))))


WORDS = ("certain", "likely", "possible")
GOALS = {"certain": 98, "likely": 80}  # percent of the answers with this word that are right


def judge(folder: Path) -> dict[str, Any]:
    """Answers by case, and how many of them with each word are right."""
    found = {}
    for name, case in CASES.items():
        every = [answer_of(name, seed, folder) for seed in JUDGED]
        words: Counter = Counter()
        for answer, word in every:
            words[word or answer] += 1
            words[f"{word or answer}, right"] += answer in case.right
        counts = Counter(f"{answer}, {word}" if word else answer for answer, word in every)
        right = sum(answer in case.right for answer, _ in every)
        found[name] = {"answers": dict(sorted(counts.items())), "right": right, "words": dict(sorted(words.items()))}
    bounds = [[name, test.weak, test.strong] for stage in (*STAGES, *DIFFUSE, *LAST) for name, test in stage.tests]
    return {"seeds": [*JUDGED], "signatures": bounds, "answers": found}


def tables(results: dict[str, Any]) -> list[str]:
    """How sure the answers are, and the answers by case."""
    sums: Counter = Counter()
    for answers in results["answers"].values():
        sums.update(answers["words"])
    sure_rows = [
        (word, str(sums[f"{word}, right"]), str(n), f"{100 * sums[f'{word}, right'] / n:.1f} %" if n else "-",
         f"{GOALS[word]} %" if word in GOALS else "-")
        for word, n in ((word, sums[word]) for word in (*WORDS, "healthy"))
    ]  # fmt: skip
    rows = [
        (f"`{name}`", CASES[name].what, str(x["right"]), str(sum(x["answers"].values())), _in_words(x["answers"]))
        for name, x in results["answers"].items()
    ]
    return [
        grid(("word", "right", "answers", "share", "goal"), sure_rows),
        grid(("run", "what it is", "right", "runs", "answers"), rows),
    ]


def _in_words(answers: dict[str, int]) -> str:
    parts = ((*answer.partition(", "), n) for answer, n in answers.items())
    return ", ".join(f"`{name}`{comma}{word} {n}" for name, comma, word, n in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--try", dest="tried", type=int, default=0, help="number of seeds of the design to answer")
    parser.add_argument("--only", default="", help="a part of the names of these runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.tried:
            for name in [name for name in CASES if given.only in name]:
                every = (answer_of(name, seed, Path(folder)) for seed in DESIGN[: given.tried])
                print(
                    f"{name:24}",
                    *(f"{'' if x in CASES[name].right else '!'}{x} {word};" for x, word in every),
                    flush=True,
                )
            return
        results = judge(Path(folder))
    (HERE / "simulated.json").write_text(json.dumps(results, indent=1) + "\n")
    print("\n\n".join(tables(results)))


if __name__ == "__main__":
    main()
