"""
Faults that need samples of their own: some prompts that come again and again, an engine that changes by itself, an adapter
that counts twice, and the middle of a run that collapses.
"""

import random
from typing import Any

import torch
from faults.models import merged, push
from policies import VOCABULARY, updated
from sampling import ROWS, STEPS, Sample, Weights, requests, sample, score_steps, with_weights


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
            maker.write("standing_still", seed, samples, score_steps(maker.models[dtype], samples), {}, rate=rate)
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
        for seed in mine:
            maker.write("adapter_twice", seed, drawn[seed], scores[seed], again[seed], rate=1e-5)
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
    for seed in seeds:
        maker.write("collapse", seed, drawn[seed], scores[seed], {}, rate=RATE, before=starts[seed])


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
