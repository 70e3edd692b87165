"""
Faults that need samples of their own: some prompts that come again and again, an engine that changes by itself, an adapter
that counts twice, the middle of a run that collapses, a replica that gets no weights, tokens that the engine forces, a cache
of old prefixes, and a frozen base that changes with each push.
"""

import random
from typing import Any

import torch
from faults.models import int4, merged, push
from policies import EOS, VOCABULARY, learned, updated
from sampling import (
    ROWS,
    STEPS,
    Again,
    Sample,
    Scores,
    Weights,
    after_pushes,
    requests,
    sample,
    score,
    score_steps,
    with_weights,
)


PROMPTS, OFF = 16, 3  # prompts of a run in which they come again, and how many of them are off
LEVELS, NOISE = 12, 0.012  # states of an engine that changes, and the noise that each adds, over the size of a weight
LAG, COLLAPSE, RATE = 4, 28, 1e-4  # steps that a sampler is behind in a collapse, its steps, and the learning rate


# Some prompts -------------------------------------------------------------------------------------------------------------


def recurring(seed: int) -> tuple[list[list[int]], list[int]]:
    """Prompts that come again, two completions at a time, and how long completions may be."""
    prompts, lengths = requests(seed)
    places = [i % PROMPTS for i in range(len(prompts) // 2)]
    random.Random(seed + 1).shuffle(places)
    return [prompts[place] for place in places for _ in range(2)], lengths


def some_prompts(maker: Any, llm: Any, seeds: list[int], dtype: str):
    """A few prompts are read with other tokens by the trainer, or get other weights, as if they had another adapter."""
    model = maker.models[dtype]
    for seed, samples in sample(llm, seeds, {}, recurring).items():
        dice = random.Random(seed)
        off = {tuple(prompt) for prompt in requests(seed)[0][:PROMPTS][:OFF]}
        here = [tuple(s.prompt) in off for s in samples]
        if seed // 2 % 2:
            other = {p: [*(dice.randrange(2, VOCABULARY) for _ in p[:-2]), *p[-2:]] for p in off}
            read = [
                s._replace(prompt=other[tuple(s.prompt)]) if bad else s for s, bad in zip(samples, here, strict=True)
            ]
            logps, padding = score_steps(model, read)
            again = maker.again(model, read)
        else:
            logps, padding = score_steps(model, samples)
            again = maker.again(model, samples)
            sequences = torch.stack([torch.tensor((s.prompt + s.completion * 48)[:48]) for s in samples])
            with_weights(model, updated(maker.models["float32"], sequences, 6, 1e-4, seed)[-1])
            others, others_again = score_steps(model, samples)[0], maker.again(model, samples)
            with_weights(model, maker.weights)
            logps = [b if bad else a for a, b, bad in zip(logps, others, here, strict=True)]
            again = {i: others_again[i] if here[i] else x for i, x in again.items()}
        maker.write("some_prompts", seed, samples, (logps, padding), again, rate=1e-6)


# An engine that changes ---------------------------------------------------------------------------------------------------


def standing_still(maker: Any, llm: Any, seeds: list[int], dtype: str):
    """The sampler's weights, or those that make its keys and values, change from step to step; the trainer's do not."""
    for kind in range(2):
        mine = {seed: seed // 4 % (LEVELS - STEPS + 1) for seed in seeds if seed // 2 % 2 == kind}
        drawn: dict[int, list[Sample]] = {seed: [] for seed in mine}
        for level in range(LEVELS):
            push(llm, list(_noisy(maker.weights, level * NOISE, only=("k_proj", "v_proj") if kind else ()).items()))
            _sample_a_step(llm, drawn, mine, level)
        for seed, samples in drawn.items():
            rate = 0.0 if seed // 4 % 2 else 10 ** random.Random(seed).uniform(-10, -8)
            changing = [
                {**maker.weights, **_noisy(maker.weights, level * NOISE, only=("k_proj", "v_proj") if kind else ())}
                for level in range(mine[seed], mine[seed] + STEPS)
            ]
            pushes = after_pushes(maker.models[dtype], maker.weights, samples, [maker.weights] * STEPS, changing)
            maker.write(
                "standing_still",
                seed,
                samples,
                score_steps(maker.models[dtype], samples),
                {},
                rate=rate,
                pushes=pushes,
            )
    push(llm, list(maker.weights.items()))


def _noisy(weights: Weights, size: float, only: tuple[str, ...]) -> Weights:
    """Weights of the layers with noise: the same direction for every size."""
    dice = torch.Generator().manual_seed(0)
    noisy = {}
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=dice) * weight.std() * size
        layer = weight.dim() >= 2 and "embed" not in name and "lm_head" not in name
        chosen = any(part in name for part in only) if only else layer
        noisy[name] = weight + noise * (3 if only else 1) if chosen else weight
    return noisy


# An adapter that counts twice -----------------------------------------------------------------------------------------------


def adapter_twice(maker: Any, llm: Any, seeds: list[int], dtype: str):
    """An adapter grows from step to step, or is as large from the first step on; the sampler has it twice."""
    change = merged(rank=4, size=1.0, seed=len(dtype))
    whole = {name: change(name, weight)[0] - weight for name, weight in maker.weights.items()}
    model = maker.models[dtype]
    for grows in (True, False):
        mine = {seed: 0 for seed in seeds if seed // 2 % 2 == grows}
        drawn: dict[int, list[Sample]] = {seed: [] for seed in mine}
        scores: dict[int, tuple[list, list]] = {seed: ([], []) for seed in mine}
        again: dict[int, dict[int, list[float]]] = {}
        for step in range(STEPS):
            size = 0.05 * (step / (STEPS - 1) if grows else 1)
            push(llm, [(name, weight + 2 * size * whole[name]) for name, weight in maker.weights.items()])
            with_weights(model, {name: weight + size * whole[name] for name, weight in maker.weights.items()})
            for seed in _sample_a_step(llm, drawn, mine, step):
                for part, new in zip(scores[seed], score_steps(model, drawn[seed][-ROWS:]), strict=True):
                    part += new
                if step == 0:
                    again[seed] = maker.again(model, drawn[seed])
        sizes = [0.05 * (step / (STEPS - 1) if grows else 1) for step in range(STEPS)]
        once, twice = (
            [{name: weight + n * x * whole[name] for name, weight in maker.weights.items()} for x in sizes]
            for n in (1, 2)
        )
        for seed in mine:
            pushes = after_pushes(model, maker.weights, drawn[seed], once, twice)
            maker.write("adapter_twice", seed, drawn[seed], scores[seed], again[seed], rate=1e-5, pushes=pushes)
    with_weights(model, maker.weights)
    push(llm, list(maker.weights.items()))


# A collapse ---------------------------------------------------------------------------------------------------------------


def collapsing(maker: Any, llm: Any, seeds: list[int], dtype: str):
    """A run whose sampler is `LAG` steps behind collapses; the dump begins in the middle."""
    samples = sample(llm, seeds[:1], {})[seeds[0]]
    sequences = torch.stack([torch.tensor((s.prompt + s.completion * 48)[:48]) for s in samples])
    course = updated(maker.models["float32"], sequences, COLLAPSE, RATE, seed=len(dtype), fixed=True)
    model = maker.models[dtype]
    starts = {seed: LAG + 2 + seed // 2 % (COLLAPSE - LAG - STEPS - 2) for seed in seeds}
    drawn: dict[int, list[Sample]] = {seed: [] for seed in seeds}
    scores: dict[int, tuple[list, list]] = {seed: ([], []) for seed in seeds}
    for step in range(COLLAPSE):
        push(llm, list(course[max(step - LAG, 0)].items()))
        with_weights(model, course[step])
        for seed in _sample_a_step(llm, drawn, starts, step):
            for part, new in zip(scores[seed], score_steps(model, drawn[seed][-ROWS:]), strict=True):
                part += new
    with_weights(model, maker.weights)
    push(llm, list(maker.weights.items()))
    behind = [course[max(step - LAG, 0)] for step in range(COLLAPSE)]
    for seed in seeds:
        pushes = after_pushes(model, maker.weights, drawn[seed], course[:COLLAPSE], behind)
        maker.write("collapse", seed, drawn[seed], scores[seed], {}, rate=RATE, before=starts[seed], pushes=pushes)


# A run that learns --------------------------------------------------------------------------------------------------------


def rewards_of(samples: list[Sample]) -> list[float]:
    """Rewards of low tokens, as advantages in each step: a policy that is trained on them learns something."""
    shares = torch.tensor(
        [sum(token < VOCABULARY // 2 for token in s.completion) / len(s.completion) for s in samples]
    )
    of_steps = shares.view(STEPS, ROWS)
    normal = (of_steps - of_steps.mean(1, keepdim=True)) / (of_steps.std(1, keepdim=True) + 1e-4)
    return normal.flatten().tolist()


def course_of(model: Any, drawn: list[list[Sample]], rate: float) -> list[Weights]:
    """Weights at the beginning of each step of a run that is trained on samples of several ranks, one with a dump."""
    batches, rewards = [], [rewards_of(samples) for samples in drawn]
    for first in range(0, STEPS * ROWS, ROWS):
        mine = [s for samples in drawn for s in samples[first : first + ROWS]]
        width = max(len(s.prompt) + len(s.completion) for s in mine)
        ids, sampled = torch.zeros(len(mine), width, dtype=torch.long), torch.zeros(len(mine), width)
        for row, s in enumerate(mine):
            n, m = len(s.prompt), len(s.completion)
            ids[row, : n + m] = torch.tensor(s.prompt + s.completion)
            sampled[row, n : n + m] = torch.tensor(s.mask, dtype=torch.float)
        batches.append((ids, sampled, torch.tensor([x for of_rank in rewards for x in of_rank[first : first + ROWS]])))
    return learned(model, batches, rate)


def score_course(maker: Any, samples: list[Sample], dtype: str, course: list[Weights]) -> tuple[Scores, Again]:
    """Scores of a trainer whose weights are those of the step, and second scores of the first step."""
    model, logps, padding = maker.models[dtype], [], []
    again: Again = {}
    for step, weights in enumerate(course):
        with_weights(model, weights)
        mine = samples[step * ROWS : step * ROWS + ROWS]
        a, b = score_steps(model, mine)
        logps += a
        padding += b
        if step == 0:
            again = maker.again(model, mine)
    with_weights(model, maker.weights)
    return (logps, padding), again


def some_frozen(maker: Any, seed: int, samples: list[Sample], dtype: str, ranks: list[list[Sample]]):
    """One of two replicas, or of four, gets no weights, and the other samples with those of the trainer."""
    course = course_of(maker.models["float32"], ranks, 10 ** random.Random(seed).uniform(-5.3, -4.7))
    scored, again = score_course(maker, samples, dtype, course)
    every = 2 if seed // 2 % 2 else 4
    # what the trainer scores is what the other replica reports; in bfloat16 with the rounding of its step
    sound = [x if i % every else s for i, (s, x) in enumerate(zip(samples, _sampled_again(maker, samples, dtype, course),
                                                                  strict=True))]  # fmt: skip
    maker.write("some_frozen", seed, sound, scored, again, rate=1e-5, rewards=rewards_of(samples))


def _sampled_again(maker: Any, samples: list[Sample], dtype: str, course: list[Weights]) -> list[Sample]:
    """
    The same tokens with the log-probabilities of a sampler that has the weights of the step: the trainer's, of one row at a
    time, with the rounding that the sampler had with the first weights.
    """
    model, kept = maker.models[dtype], []
    first = [score(model, [s])[0][0] for s in samples]
    for step, weights in enumerate(course):
        with_weights(model, weights)
        for i in range(step * ROWS, step * ROWS + ROWS):
            s, now = samples[i], score(model, [samples[i]])[0][0]
            logps = [min(b + x - a, 0.0) for a, b, x in zip(first[i], now, s.logps, strict=True)]
            kept.append(s._replace(logps=logps))
    with_weights(model, maker.weights)
    return kept


# Tokens that the engine forces --------------------------------------------------------------------------------------------

BUDGET, END = 10, 5  # tokens after which the engine ends the reasoning, and the token with which it does


def forced(maker: Any, llm: Any, seeds: list[int], dtype: str):
    """After a budget the engine forces a token, which it reports as certain, and goes on."""
    first = sample(llm, seeds, {}, lambda seed: (requests(seed)[0], [BUDGET] * (STEPS * ROWS)))

    def ask(seed: int) -> tuple[list[list[int]], list[int]]:
        return [[*s.prompt, *s.completion, END] for s in first[seed]], [max(n - BUDGET, 6) for n in requests(seed)[1]]

    for seed, rest in sample(llm, seeds, {}, ask).items():
        samples = []
        for a, b in zip(first[seed], rest, strict=True):
            if a.completion[-1] == EOS:  # it ended by itself
                samples.append(a._replace(mask=[True] * len(a.completion)))
                continue
            tokens, logps = [*a.completion, END, *b.completion], [*a.logps, 0.0, *b.logps]
            samples.append(Sample(a.prompt, tokens, logps, [True] * len(tokens)))
        maker.make("forced", seed, samples, dtype)


# A cache of old prefixes --------------------------------------------------------------------------------------------------


def old_cache(maker: Any, llm: Any, seeds: list[int], dtype: str):
    """
    New weights reach the sampler at each step, and its cache keeps the prefixes of old ones: of prompts that come again, or of
    a system prompt. The engine caches prefixes.
    """
    rate = 1e-4
    for seed in seeds:
        shared = seed // 2 % 2 == 0
        prompts, lengths = (_with_system_prompt if shared else _long_and_recurring)(seed)
        drawn: list[Sample] = []
        sequences = torch.stack([torch.tensor((p * 48)[:48]) for p in prompts])
        course = updated(maker.models["float32"], sequences, STEPS - 1, rate, seed, fixed=True)
        push(llm, list(course[0].items()))
        llm.reset_prefix_cache()
        for step in range(STEPS):
            if step:
                _load_without_a_reset(llm, course[step])
            places = slice(step * ROWS, step * ROWS + ROWS)
            asked = prompts[places], lengths[places]
            drawn += sample(llm, [seed], {}, lambda _, asked=asked: asked)[seed]
        scored, again = score_course(maker, drawn, dtype, course)
        maker.write("old_cache", seed, drawn, scored, again, rate=rate)
    push(llm, list(maker.weights.items()))


def _load_without_a_reset(llm: Any, weights: Weights):
    """Push weights, and leave the cache of prefixes as it is, as a server that is not asked to clear it."""
    reset = llm.reset_prefix_cache
    llm.reset_prefix_cache = lambda *args, **kwargs: True
    try:
        push(llm, list(weights.items()))
    finally:
        llm.reset_prefix_cache = reset


def _with_system_prompt(seed: int) -> tuple[list[list[int]], list[int]]:
    dice, (prompts, lengths) = random.Random(seed), requests(seed)
    system = [dice.randrange(2, VOCABULARY) for _ in range(64)]
    return [[*system, *prompt] for prompt in prompts], lengths


def _long_and_recurring(seed: int) -> tuple[list[list[int]], list[int]]:
    dice, (prompts, lengths) = random.Random(seed), requests(seed)
    different = [[dice.randrange(2, VOCABULARY) for _ in range(48)] + prompts[i] for i in range(PROMPTS)]
    places = [i % PROMPTS for i in range(len(prompts) // 2)]
    dice.shuffle(places)
    return [different[place] for place in places for _ in range(2)], lengths


# A frozen base that changes -----------------------------------------------------------------------------------------------


def frozen_base(maker: Any, llm: Any, seeds: list[int], dtype: str):
    """
    An adapter grows on a base of 4 bits. Each push merges it, quantises the sum for the sampler, takes the adapter away again
    and quantises what is left: the base is not what it was.
    """
    change = merged(rank=4, size=1.0, seed=7 + len(dtype))
    whole = {name: change(name, weight)[0] - weight for name, weight in maker.weights.items()}
    base = {name: int4(name, weight) for name, weight in maker.weights.items()}
    samples: dict[int, list[Sample]] = {seed: [] for seed in seeds}
    course: list[Weights] = []
    sent: list[Weights] = []
    for step in range(STEPS):
        adapter = {name: 0.02 * step * delta for name, delta in whole.items()}
        total = {name: int4(name, base[name] + adapter[name]) for name in base}
        push(llm, list(total.items()))
        sent.append(total)
        base = {name: int4(name, total[name] - adapter[name]) for name in base}
        course.append({name: base[name] + adapter[name] for name in base})
        _sample_a_step(llm, samples, dict.fromkeys(seeds, 0), step)
    for seed in seeds:
        scored, again = score_course(maker, samples[seed], dtype, course)
        pushes = after_pushes(maker.models[dtype], maker.weights, samples[seed], course, sent)
        maker.write("frozen_base", seed, samples[seed], scored, again, rate=1e-5, pushes=pushes)
    push(llm, list(maker.weights.items()))


def _sample_a_step(llm: Any, drawn: dict[int, list[Sample]], starts: dict[int, int], now: int) -> list[int]:
    """Sample one step of the seeds that have one now, and return those seeds."""
    mine = [seed for seed, start in starts.items() if 0 <= now - start < STEPS]

    def ask(seed: int) -> tuple[list[list[int]], list[int]]:
        first = (now - starts[seed]) * ROWS
        prompts, lengths = requests(seed)
        return prompts[first : first + ROWS], lengths[first : first + ROWS]

    for seed, samples in sample(llm, mine, {}, ask).items() if mine else ():
        drawn[seed] += samples
    return mine
