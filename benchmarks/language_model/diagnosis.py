"""
What `diagnose` says of faults that are put into a pretrained model's sampler or trainer, or between them.

The faults are those of the fault kit, and dumps are as in `benchmarks/diagnose`: 8 optimizer steps of 8 completions each.
Underneath, sampler and trainer compute in float32, or the sampler in bfloat16, or both. Half of the seeds are there to move
bounds, the others to judge.
"""

import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


sys.path.insert(0, str(Path(__file__).parents[1] / "diagnose"))

import torch
from gap import Batch, tokenize
from generate import (
    ROWS,
    STEPS,
    TEMPERATURE,
    Sample,
    about_of,
    ages_of,
    mask_of,
    score,
    score_steps,
    start,
    stop,
    with_weights,
    write,
)
from harness import write as write_json
from package import FAULTS, SIGNATURES, diagnose, merged, observe, training_on
from prompts import PROMPTS
from transformers import AutoTokenizer
from variants import load, make_variant


SEEDS = range(12)
MOVING = range(6)  # seeds that bounds may be moved on; the others judge
LONGEST = 96
AGAIN = 8  # sequences of the first step that are scored a second time, alone
BELOW = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))  # sampler and trainer, by seed
END = 2  # of the tokenizer: <|im_end|>
# Faults of one cause take turns, so that each half of the seeds has all of them
FAMILIES = {
    "weights": ("int8_weights", "fp8_weights", "int4_weights"),
    "temperature": ("cold_sampler", "hot_sampler", "raw_logprobs"),
    "truncation": ("top_p", "top_k", "min_p"),
    "penalty": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    "first_token": ("bos", "template"),
}


def below(seed: int) -> tuple[str, str]:
    """Types of sampler and trainer underneath the fault."""
    return BELOW[seed % 3]


def of_family(cause: str, seed: int) -> str:
    family = FAMILIES[cause]
    return family[(seed // 3 + seed) % len(family)]


# Sampling -----------------------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """What one engine samples: dumps of some seeds, each with parameters of its own."""

    name: str
    dtype: str
    variant: str
    engine: dict[str, Any]
    sampling: dict[int, dict[str, Any]]  # by seed


def jobs() -> Iterator[Job]:
    """All sampling there is."""
    for dtype in ("float32", "bfloat16"):
        mine = [seed for seed in SEEDS if below(seed)[0] == dtype]
        yield Job("right", dtype, "plain", {}, {seed: {} for seed in (SEEDS if dtype == "float32" else mine)})
        yield Job("fp8_cache", dtype, "plain", {"kv_cache_dtype": "fp8"}, {seed: {} for seed in mine})
        for cause in ("temperature", "truncation", "penalty"):
            chosen = {seed: FAULTS[of_family(cause, seed)] for seed in mine}
            for engine in ({}, {"logprobs_mode": "raw_logprobs"}):
                sampling = {
                    seed: dict(fault.sampling) for seed, fault in chosen.items() if dict(fault.engine) == engine
                }
                if sampling:
                    yield Job(f"raw_{cause}" if engine else cause, dtype, "plain", engine, sampling)
        for name in FAMILIES["weights"]:
            yield Job(
                name,
                dtype,
                name.removesuffix("_weights"),
                {},
                {s: {} for s in mine if of_family("weights", s) == name},
            )


def sample(job: Job) -> dict[int, list[Sample]]:
    """Samples by seed, in one pass of the engine."""
    from vllm import SamplingParams

    folder = make_variant(job.variant)
    llm = start(folder, job.dtype, **job.engine)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [tokenize(tokenizer, text) for text in PROMPTS]
    prompts, params, owners = [], [], []
    for seed, fields in job.sampling.items():
        for prompt in random.Random(seed).sample(chats, STEPS * ROWS):
            prompts.append({"prompt_token_ids": prompt})
            settings = {"temperature": 1.0, "max_tokens": LONGEST, "logprobs": 0, "detokenize": False, **fields}
            params.append(SamplingParams(**settings, stop_token_ids=[END]))
            owners.append(seed)
    found: dict[int, list[Sample]] = {seed: [] for seed in job.sampling}
    for seed, prompt, out in zip(owners, prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        tokens = list(out.outputs[0].token_ids)
        logps = [entry[token].logprob for token, entry in zip(tokens, out.outputs[0].logprobs, strict=True)]
        mask = mask_of(tokens, len(found[seed])) if seed % 4 >= 2 else [True] * len(tokens)
        found[seed].append(Sample(prompt["prompt_token_ids"], tokens, logps, mask))
    stop(llm)
    return found


def keep(folder: Path, job: Job):
    """Sample, and keep what was sampled, a file per seed."""
    for seed, samples in sample(job).items():
        write_json(samples_file(folder, job.name, job.dtype, seed), [list(s) for s in samples])


def samples_file(folder: Path, name: str, dtype: str, seed: int) -> Path:
    path = folder / "samples" / f"{name}-{dtype}-{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def samples_of(folder: Path, name: str, dtype: str, seed: int) -> list[Sample]:
    return [Sample(*s) for s in json.loads(samples_file(folder, name, dtype, seed).read_text())]


# Dumps --------------------------------------------------------------------------------------------------------------------


Scored = tuple[list[list[float]], list[int]]  # log-probabilities of the trainer, and padding


class Maker:
    """
    Makes the dumps of one seed, as far as they are not there.

    Args:
        folder (`Path`):
            Folder with the samples; a dump goes to `folder/dumps/fault/seed`.
        seed (`int`):
            Seed.
    """

    def __init__(self, folder: Path, seed: int):
        self.folder, self.seed = folder, seed
        self.sampler, self.trainer = below(seed)
        plain = make_variant("plain")
        self.models = {name: load(plain, getattr(torch, name)) for name in sorted({"float32", self.trainer})}
        self.weights = {name: p.detach().clone() for name, p in self.models["float32"].named_parameters()}

    def path_of(self, fault: str) -> Path:
        return self.folder / "dumps" / fault / str(self.seed)

    def lacks(self, fault: str) -> bool:
        return not self.path_of(fault).exists()

    def samples(self, name: str, dtype: str | None = None) -> list[Sample]:
        return samples_of(self.folder, name, dtype or self.sampler, self.seed)

    def write(self, fault: str, samples: list[Sample], scored: Scored, again: dict[int, list[float]], **how: Any):
        """A dump that is complete when it is there. Whoever came to an end is rewarded."""
        rewards = torch.tensor([float(s.completion[-1] == END) for s in samples])
        advantages = dict(
            zip((0.0, 1.0), ((torch.arange(2.0) - rewards.mean()) / (rewards.std() + 1e-4)).tolist(), strict=True)
        )
        change = FAULTS[fault].rows or (lambda row: row)

        def rewarded(row: dict[str, Any]) -> dict[str, Any]:
            reward = float(row["token_ids"][-1] == END)
            return change({**row, "reward": reward, "advantage": advantages[reward]})

        partial = self.folder / "partial" / str(self.seed)
        shutil.rmtree(partial, ignore_errors=True)
        settings = {"ages": ages_of(self.seed), "settings": {}, "about": about_of(self.seed, fault), **how}
        write(partial, samples, scored, again, change=rewarded, **settings)
        self.path_of(fault).parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial, self.path_of(fault))

    def make(self, fault: str, samples: list[Sample], dtype: str, *, temperature: float = 1.0):
        """A dump of what one forward pass says."""
        how, model = FAULTS[fault], self.models[dtype]
        with training_on(model, how):
            scored = score_steps(model, samples, temperature=temperature, **how.scoring)
            again = {i: score(model, [samples[i]], temperature=temperature, **how.scoring)[0][0] for i in range(AGAIN)}
        self.write(fault, samples, scored, again)

    def all(self):
        """Every fault."""
        exact, right = self.samples("right", "float32"), self.samples("right")
        plans: list[tuple[str, list[Sample], str]] = [("none", exact, "float32"), ("bf16_head", exact, "float32")]
        if self.sampler == "bfloat16":
            plans.append(("bf16", right, self.trainer))
        turns = [s._replace(mask=mask_of(s.completion, i)) for i, s in enumerate(right)]
        faults = ("one_token_shift", "eos", "nan_rows", of_family("first_token", self.seed), "dropout", "padding")
        plans += [(fault, right, self.trainer) for fault in faults]
        plans += [("seams", turns, self.trainer), ("fp8_cache", self.samples("fp8_cache"), self.trainer)]
        weights = of_family("weights", self.seed)
        plans.append((weights, self.samples(weights), self.trainer))
        for cause in ("temperature", "truncation", "penalty"):
            fault = of_family(cause, self.seed)
            raw = "raw_" if fault == "raw_logprobs" else ""
            plans.append((fault, self.samples(f"{raw}{cause}"), self.trainer))
        for fault, samples, dtype in plans:
            if self.lacks(fault):
                self.make(fault, samples, dtype, temperature=TEMPERATURE if fault == "raw_logprobs" else 1.0)
        if any(self.lacks(fault) for fault in ("stale", "never_pushed", "own_updates")):
            self.drifting(right)
        if self.lacks("lora_merge"):
            self.merging(exact)

    def drifting(self, samples: list[Sample]):
        """The sampler has the first weights. The trainer has made updates, with the same reward and other completions."""
        dice = random.Random(self.seed)
        rate = 10 ** dice.uniform(-6.3, -5.3)
        step = [i // ROWS for i in range(len(samples))]
        ages = [dice.randint(0, 5) for _ in samples]
        behind = {"stale": ages, "never_pushed": step, "own_updates": [s % 4 for s in step]}
        found: dict[str, Scored] = {fault: ([[]] * len(samples), [0] * len(samples)) for fault in behind}
        again: dict[str, dict[int, list[float]]] = {fault: {} for fault in behind}
        others = samples_of(self.folder, "right", "float32", (self.seed + 1) % len(SEEDS))
        for k, weights in enumerate(updates(self.models["float32"], others, rate, STEPS - 1)):
            model = load(make_variant("plain"), getattr(torch, self.trainer))
            with_weights(model, weights)
            for fault, old in behind.items():
                rows = [i for i, b in enumerate(old) if b == k]
                for first in range(0, len(rows), ROWS):
                    part = rows[first : first + ROWS]
                    for i, logps, padding in zip(part, *score(model, [samples[i] for i in part]), strict=True):
                        found[fault][0][i], found[fault][1][i] = logps, padding
                if old[0] == k:
                    again[fault] = {0: score(model, samples[:1])[0][0]}
        with_weights(self.models["float32"], self.weights)
        for fault, old in behind.items():
            settings = {"rollout_correction": "bypass_ppo_clip"} if fault == "own_updates" else {}
            ages = [0] * len(samples) if fault == "never_pushed" else old
            self.write(fault, samples, found[fault], again[fault], ages=ages, settings=settings)

    def merging(self, samples: list[Sample]):
        """An adapter grows; the sampler has it merged in bfloat16, the trainer beside the weights. Both compute in float32."""
        model = self.models["float32"]
        size = 10 ** random.Random(self.seed).uniform(-3, -2)
        kept, logps, padding = [], [], []
        again: dict[int, list[float]] = {}
        for step in range(STEPS):
            change = merged(rank=4, size=size * step, seed=self.seed)
            mine = samples[step * ROWS : step * ROWS + ROWS]
            for rounded in (True, False):
                pairs = {
                    name: change(name, weight) if step else (weight, weight) for name, weight in self.weights.items()
                }
                with_weights(model, {name: pair[rounded] for name, pair in pairs.items()})
                scored = score(model, mine)
                if rounded:
                    kept += [s._replace(logps=x) for s, x in zip(mine, scored[0], strict=True)]
            logps += scored[0]
            padding += scored[1]
            if step == 0:
                again = {i: score(model, [mine[i]])[0][0] for i in range(AGAIN)}
        with_weights(model, self.weights)
        self.write("lora_merge", kept, (logps, padding), again)


def updates(model: Any, samples: list[Sample], rate: float, n: int) -> Iterator[dict[str, torch.Tensor]]:
    """Weights after 0 to `n` optimizer steps of policy gradients, with a reward for coming to an end. The model is changed."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    rewards = torch.tensor([float(s.completion[-1] == END) for s in samples])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    yield {name: p.detach() for name, p in model.named_parameters()}
    for k in range(n):
        rows = slice(k * ROWS, k * ROWS + ROWS)
        batch = Batch.of([s.prompt for s in samples[rows]], [s.completion for s in samples[rows]])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch.ids, attention_mask=batch.attention).logits[:, batch.width - 1 : -1]
        mask = batch.attention[:, batch.width :]
        logps = logits.float().log_softmax(-1).gather(-1, batch.ids[:, batch.width :, None])[..., 0]
        (-(advantages[rows, None] * logps * mask).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield {name: p.detach() for name, p in model.named_parameters()}


# Judging ------------------------------------------------------------------------------------------------------------------


def judged(folder: Path) -> list[dict[str, Any]]:
    """What is said of every dump: a record each."""
    found = []
    for path in sorted((folder / "dumps").glob("*/*")):
        observed = observe(path)
        diagnosis = diagnose(observed)
        seed, fault = int(path.name), path.parent.name
        # faults that are made of one precision only
        types = ("float32", "float32") if fault in ("none", "bf16_head", "lora_merge") else below(seed)
        statistics = {}
        for signature in SIGNATURES:
            seen = signature.test(observed)
            statistics[f"{signature.cause}: {signature.test.__name__}"] = None if seen is None else seen.statistic
        found.append(
            {
                "fault": fault,
                "cause": FAULTS[fault].cause,
                "seed": seed,
                "half": "moving" if seed in MOVING else "judging",
                "sampler": types[0],
                "trainer": types[1],
                "rms": diagnosis.size,
                "first": diagnosis.findings[0].name if diagnosis.findings else diagnosis.verdict,
                "findings": [[f.name, round(f.certainty, 3), round(f.share, 3)] for f in diagnosis.findings],
                "healthy": diagnosis.healthy,
                "times_own_noise": diagnosis.floor,
                "statistics": statistics,
            }
        )
    return found


# Parts --------------------------------------------------------------------------------------------------------------------


def missing_jobs(folder: Path) -> list[Job]:
    """Engines that have not sampled."""
    return [
        job
        for job in jobs()
        if any(not samples_file(folder, job.name, job.dtype, seed).exists() for seed in job.sampling)
    ]


def make_seed(folder: Path, seed: int):
    torch.set_num_threads(1)
    Maker(folder, seed).all()
