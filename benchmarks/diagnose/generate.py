"""
Dumps with faults, of one shape: every fault that the shape can show, at every seed.

    python benchmarks/diagnose/generate.py judge-qwen3 --seeds 20 --output outputs/diagnose

A real vLLM engine on the CPU samples, a real model of transformers scores, and `faults` puts the faults in.
Half of the seeds have both sides in bfloat16 underneath a fault, half in float32.
"""

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any


os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import faults
import moving
import torch
from faults.models import merged
from policies import SHAPES, build, updated
from sampling import (
    ADAPTERS,
    AGAIN,
    ROWS,
    STEPS,
    Again,
    Sample,
    Scores,
    about_of,
    after_pushes,
    ages_of,
    effect,
    mask_of,
    requests,
    sample,
    score,
    score_steps,
    start,
    stop,
    with_weights,
    write,
)

from trl_rollout_corr.tools.diagnosis.measures import FLOOR


__all__ = ["Maker", "Sample", "requests"]

RANKS = 4  # of a run that learns, one of which has the dump
TEMPERATURE = 0.7  # that the trainer knows of, where log-probabilities are raw
# Of truncation, the first is as in the catalogue. A sure model samples from few tokens in any case, and has to be left fewer
STRENGTHS = {"top_p": (0.9, 0.8, 0.7, 0.5), "top_k": (10, 5, 3, 2), "min_p": (0.05, 0.1, 0.2, 0.4)}


# Faults whose samples are of engines that change, or that act on them
OF_MOVING = (
    moving.some_prompts,
    moving.standing_still,
    moving.adapter_twice,
    moving.collapsing,
    moving.forced,
    moving.frozen_base,
)
# Faults that change rows
OF_ROWS = [name for name, fault in faults.FAULTS.items() if fault.rows]


class Maker:
    """Makes the dumps of one shape and some seeds: each goes to `output/shape/fault/seed`."""

    def __init__(self, shape: str, seeds: list[int], output: Path):
        self.shape, self.seeds, self.output = shape, seeds, output / shape
        self.models = {"float32": build(shape, output / f"{shape}-model", seed=sum(map(ord, shape)) % 97)}
        self.models["bfloat16"] = type(self.models["float32"])(self.models["float32"].config).to(torch.bfloat16).eval()
        self.weights = {name: p.detach().clone() for name, p in self.models["float32"].named_parameters()}
        with_weights(self.models["bfloat16"], self.weights)
        self.folder = output / f"{shape}-model"
        self.truncation: dict[int, dict[str, Any]] = {}

    def below(self, seed: int) -> str:
        """The type of both sides underneath a fault."""
        return "bfloat16" if seed % 2 else "float32"

    def make(self, fault: str, seed: int, samples: list[Sample], dtype: str, *, temperature: float = 1.0):
        how = faults.FAULTS[fault]
        model = self.models[dtype]
        with faults.training_on(model, how):
            scored = score_steps(model, samples, temperature=temperature, **how.scoring)
            again = self.again(model, samples, temperature=temperature, **how.scoring)
        self.write(fault, seed, samples, scored, again, ages=ages_of(seed), change=how.rows)

    def rewriting(self, names: list[str], seed: int, samples: list[Sample], dtype: str):
        """Faults that change rows of what a right trainer has scored."""
        model = self.models[dtype]
        scored, again = score_steps(model, samples), self.again(model, samples)
        for name in names:
            change = faults.FAULTS[name].rows
            self.write(name, seed, samples, scored, again, ages=ages_of(seed), change=change)

    def write(self, fault: str, seed: int, samples: list[Sample], scored: Scores, again: Again, **more: Any):
        about = {**about_of(seed, fault), "experts": "routed" if "moe" in self.shape else "none"}
        by_length = seed % 7 < 3
        write(self.output / fault / str(seed), samples, scored, again, about=about, by_length=by_length, **more)

    def again(self, model: Any, samples: list[Sample], **how: Any) -> Again:
        """Some sequences scored alone, those that `rollout_diagnose` takes: of the first step."""
        return {i: score(model, [samples[i]], **how)[0][0] for i in range(0, min(AGAIN, ROWS))}

    def make_all(self, dtype: str):
        """All faults on an engine with that type."""
        mine = [seed for seed in self.seeds if self.below(seed) == dtype]
        llm = start(self.folder, dtype)
        if "moe" in self.shape:
            for fault in ["none"] if dtype == "float32" else ["bf16_moe"]:
                for seed, samples in sample(llm, self.seeds, {}).items():
                    self.make(fault, seed, samples, dtype)
            return stop(llm)
        right = sample(llm, self.seeds, {})
        for seed, samples in right.items():
            self.make("none" if dtype == "float32" else "bf16", seed, samples, dtype)
            if dtype == "float32":
                self.make("bf16_head", seed, samples, dtype)
            if seed in mine:
                self.rewriting([name for name in OF_ROWS if name != "bos" or seed // 2 % 2 == 0], seed, samples, dtype)
                for fault in (
                    "dropout",
                    "padding",
                    *["template"] * (seed // 2 % 2),
                    "chat_template",
                    "two_tokenizers",
                ):
                    self.make(fault, seed, samples, dtype)
                turns = [s._replace(mask=mask_of(s.completion, i)) for i, s in enumerate(samples)]
                for fault in ("seams", "lost_reasoning", "lost_tokens"):
                    self.make(fault, seed, turns, dtype)
                ranks = [samples, *(other for at, other in right.items() if at != seed)][:RANKS]
                moving.some_frozen(self, seed, samples, dtype, ranks)
                for fault in ("stale", "never_pushed", "own_updates", *ADAPTERS):
                    self.drifting(fault, seed, samples, dtype, ranks)
                self.merging(seed, samples)
        for family in (
            ("cold_sampler", "hot_sampler"),
            ("repetition_penalty", "presence_penalty", "frequency_penalty"),
            ("first_candidate",),
            ("logit_bias",),
        ):
            chosen = {seed: family[seed // 2 % len(family)] for seed in mine}
            drawn = sample(llm, mine, {seed: dict(faults.FAULTS[name].sampling) for seed, name in chosen.items()})
            for seed, samples in drawn.items():
                self.make(chosen[seed], seed, samples, dtype)
        self.truncating(llm, mine, dtype)
        cold = sample(llm, mine, {seed: {"temperature": TEMPERATURE} for seed in mine})
        for seed, samples in sample(llm, mine, {}).items():
            mixed = [cold[seed][i] if i % 4 == 1 else s for i, s in enumerate(samples)]
            self.make("some_temperatures", seed, mixed, dtype)
        for k, fault in enumerate(("int8_weights", "fp8_weights", "int4_weights", "noisy_weights")):
            chosen_seeds = [seed for seed in mine if seed // 2 % 3 == k or k == 3]
            if chosen_seeds:
                with faults.sampling_from(llm, self.weights.items(), faults.FAULTS[fault]):
                    drawn = sample(llm, chosen_seeds, {})
                for seed, samples in drawn.items():
                    self.make(fault, seed, samples, dtype)
        for make in OF_MOVING:
            make(self, llm, mine, dtype)
        stop(llm)
        # vLLM quantises models in 16 bits only
        for name in ("fp8_cache", "positions", *["fp8_engine"] * (dtype == "bfloat16")):
            llm = start(self.folder, dtype, **faults.FAULTS[name].engine)
            for seed, samples in sample(llm, self.seeds if name == "fp8_engine" else mine, {}).items():
                self.make(name, seed, samples, dtype)
            stop(llm)
        llm = start(self.folder, dtype, **faults.FAULTS["old_cache"].engine)
        moving.old_cache(self, llm, mine, dtype)
        stop(llm)
        name = "raw_logprobs"
        llm = start(self.folder, dtype, **faults.FAULTS[name].engine)
        for seed, samples in sample(llm, mine[::2], dict.fromkeys(mine, faults.FAULTS[name].sampling)).items():
            self.make(name, seed, samples, dtype, temperature=TEMPERATURE)
        stop(llm)

    def truncating(self, llm: Any, mine: list[int], dtype: str):
        """Truncation, of a strength that is chosen by what it does, on the engine in float32, which comes first."""
        if dtype == "float32":
            self.choose_strengths(llm)
        for seed, samples in sample(llm, mine, self.truncation).items():
            self.make(next(iter(self.truncation[seed])), seed, samples, dtype)

    def choose_strengths(self, llm: Any):
        """
        For each seed the least truncation that does anything. In float32, alone, it moves the log-ratio by as much as is
        looked for; if bfloat16 is underneath, by half as much as the rounding of the two sides.
        """
        left = {seed: [*STRENGTHS][seed // 2 % len(STRENGTHS)] for seed in self.seeds}
        right = sample(llm, self.seeds[:1], {})[self.seeds[0]]
        of_one_side = effect(*(score_steps(model, right)[0] for model in self.models.values()))
        least = {"float32": FLOOR, "bfloat16": 2**0.5 * of_one_side / 2}
        for level in range(max(map(len, STRENGTHS.values()))):
            self.truncation.update({seed: {name: STRENGTHS[name][level]} for seed, name in left.items()})
            for seed, samples in sample(llm, [*left], self.truncation).items():
                alone = effect(score_steps(self.models["float32"], samples)[0], [s.logps for s in samples])
                if alone >= least[self.below(seed)]:
                    del left[seed]
        (self.output / "truncation.json").write_text(json.dumps(self.truncation) + "\n")

    def drifting(self, fault: str, seed: int, samples: list[Sample], dtype: str, ranks: list[list[Sample]]):
        """The sampler has the first weights, the trainer later ones. A run that learns has the samples of all `ranks`."""
        dice = random.Random(seed)
        sequences = torch.stack([torch.tensor((s.prompt + s.completion * 48)[:48]) for s in samples])
        rate = 10 ** dice.uniform(-4.8, -4.2)
        steps = [(i // ROWS) + 1 for i in range(len(samples))]
        if fault == "stale":
            ages = [dice.randint(0, 5) for _ in samples]
            behind = ages
        elif fault == "never_pushed":
            ages, behind = [0] * len(samples), [step - 1 for step in steps]
        elif fault in ADAPTERS:  # as a queue fills
            ages = [max(min(step - 1, 3) - dice.randint(0, 1), 0) for step in steps]
            behind = ages if fault == "stale_adapter" else [step - 1 for step in steps]
        else:
            ages = [(step - 1) % 4 for step in steps]
            behind = ages
        rewards = None
        if behind == [step - 1 for step in steps]:  # the trainer learns from these very samples
            rate = 10 ** dice.uniform(-5.3, -4.7)
            weights, rewards = moving.course_of(self.models["float32"], ranks, rate), moving.rewards_of(samples)
        else:
            straight = fault in ADAPTERS  # as training goes, so that the gap to the first weights keeps growing
            weights = updated(self.models["float32"], sequences, max(behind), rate, seed, fixed=straight)
        model = self.models[dtype]
        logps: list[list[float]] = [[]] * len(samples)
        padding = [0] * len(samples)
        for k in sorted(set(behind)):
            rows = [i for i, b in enumerate(behind) if b == k]
            with_weights(model, weights[k])
            scored = score(model, [samples[i] for i in rows])
            for i, a, b in zip(rows, *scored, strict=True):
                logps[i], padding[i] = a, b
        with_weights(model, weights[behind[0]])
        again = {0: score(model, samples[:1])[0][0]}
        with_weights(model, self.weights)
        settings = {"rollout_correction": "bypass_ppo_clip"} if fault == "own_updates" else {}
        course = [] if settings else [weights[min(step, len(weights) - 1)] for step in range(STEPS)]
        arrives = course if fault in ("stale", "stale_adapter") else [self.weights] * len(course)
        pushes = after_pushes(model, self.weights, samples, course, arrives)
        more: dict[str, Any] = {"settings": settings, "rate": rate, "rewards": rewards, "pushes": pushes}
        self.write(fault, seed, samples, (logps, padding), again, ages=ages, **more)

    def merging(self, seed: int, samples: list[Sample]):
        """An adapter grows; the sampler has it merged in bfloat16, the trainer beside the weights. Both compute in float32."""
        model = self.models["float32"]
        size = 10 ** random.Random(seed).uniform(-3, -2)
        base = {name: weight.bfloat16().float() for name, weight in self.weights.items()}
        kept, logps, padding = [], [], []
        for step in range(STEPS):
            change = merged(rank=4, size=size * step, seed=seed)
            pairs = {name: change(name, weight) if step else (weight, weight) for name, weight in base.items()}
            mine = samples[step * ROWS : step * ROWS + ROWS]
            with_weights(model, {name: pair[1] for name, pair in pairs.items()})
            kept += [s._replace(logps=x) for s, x in zip(mine, score(model, mine)[0], strict=True)]
            with_weights(model, {name: pair[0] for name, pair in pairs.items()})
            a, b = score(model, mine)
            logps += a
            padding += b
            if step == 0:
                again = self.again(model, mine)
        with_weights(model, self.weights)
        self.write("lora_merge", seed, kept, (logps, padding), again, ages=ages_of(seed))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/diagnose"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for shape in args.shapes:
        maker = Maker(shape, list(range(args.first, args.first + args.seeds)), args.output)
        for dtype in ("float32", "bfloat16"):
            maker.make_all(dtype)


if __name__ == "__main__":
    main()
