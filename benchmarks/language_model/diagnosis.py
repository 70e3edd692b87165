"""
What `diagnose` says of faults that are put into a pretrained model's sampler or trainer, or between them.

The faults are those of the fault kit, and dumps are as in `benchmarks/diagnose`: 8 optimizer steps of 8 completions each.
Underneath, sampler and trainer compute in bfloat16, or the sampler in bfloat16 and the trainer in float32, or both in float32.
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
from package import FAULTS, diagnose, merged, read_tokens, sampling_from, training_on
from prompts import PROMPTS
from transformers import AutoTokenizer
from variants import load, make_variant


SEEDS = (2, 1, 5, 4, 0, 3)  # in the order in which they are made
LONGEST = 32  # tokens of a completion
AGAIN = 8  # sequences of the first step that are scored a second time, alone
BELOW = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))  # sampler and trainer, by seed
END = 2  # of the tokenizer: <|im_end|>
# Faults of one cause take turns, so that each half of the seeds has all of them
FAMILIES = {
    "weights": ("int8_weights", "fp8_weights", "int4_weights"),
    "temperature": ("cold_sampler", "hot_sampler"),
    "truncation": ("top_p", "top_k", "min_p"),
    "penalty": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    "first_token": ("bos", "template"),
}


def below(seed: int) -> tuple[str, str]:
    """Types of sampler and trainer underneath the fault."""
    return BELOW[seed % 3]


def types_of(fault: str, seed: int) -> tuple[str, str]:
    """Types of sampler and trainer: some faults are made in float32 only."""
    return ("float32", "float32") if fault in ("none", "bf16_head", "lora_merge") else below(seed)


def of_family(cause: str, seed: int) -> str:
    family = FAMILIES[cause]
    return family[(seed // 3 + seed) % len(family)]


# Sampling -----------------------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """What one engine samples: `faults` of seeds, the right policy among them."""

    dtype: str
    engine: dict[str, Any]
    faults: list[tuple[int, str]]  # seed and fault; "right": none


def jobs() -> Iterator[Job]:
    """All sampling there is: two engines of each type."""
    for dtype in ("bfloat16", "float32"):
        mine = [seed for seed in SEEDS if below(seed)[0] == dtype]
        families = ("temperature", "truncation", "penalty", "weights")
        plain = [(seed, of_family(cause, seed)) for seed in mine for cause in families]
        right = mine if dtype == "bfloat16" else SEEDS
        yield Job(dtype, {}, [*((seed, "right") for seed in right), *plain])
        yield Job(dtype, {"kv_cache_dtype": "fp8"}, [(seed, "fp8_cache") for seed in mine])


def sample(folder: Path, job: Job):
    """Sample with an engine, and keep it: a file for each seed and fault."""
    from vllm import SamplingParams

    plain = make_variant("plain")
    llm = start(plain, job.dtype, **job.engine)
    weights = [*load(plain, torch.bfloat16).named_parameters()]
    tokenizer = AutoTokenizer.from_pretrained(plain)
    chats = [tokenize(tokenizer, text) for text in PROMPTS]
    for seed, name in job.faults:
        path = samples_file(folder, name, job.dtype, seed)
        if path.exists():
            continue
        prompts = [{"prompt_token_ids": prompt} for prompt in random.Random(seed).sample(chats, STEPS * ROWS)]
        fault = FAULTS["none" if name == "right" else name]
        settings = {"temperature": 1.0, "max_tokens": LONGEST, "logprobs": 0, "detokenize": False, **fault.sampling}
        params = SamplingParams(**settings, stop_token_ids=[END])
        with sampling_from(llm, weights, fault):
            outputs = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
        found = []
        for prompt, out in zip(prompts, outputs, strict=True):
            tokens = list(out.token_ids)
            logps = [entry[token].logprob for token, entry in zip(tokens, out.logprobs, strict=True)]
            found.append([prompt["prompt_token_ids"], tokens, logps])
        write_json(path, found)
        print(f"  seed {seed}: {name}", flush=True)
    stop(llm)


def samples_file(folder: Path, name: str, dtype: str, seed: int) -> Path:
    path = folder / "samples" / f"{name}-{dtype}-{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def samples_of(folder: Path, name: str, dtype: str, seed: int) -> list[Sample]:
    """Samples of a file, half of the seeds with tokens of a tool in every other completion."""
    found = []
    for prompt, completion, logps, *_ in json.loads(samples_file(folder, name, dtype, seed).read_text()):
        tokens = completion[:LONGEST]
        mask = mask_of(tokens, len(found)) if seed % 4 >= 2 else [True] * len(tokens)
        found.append(Sample(prompt, tokens, logps[:LONGEST], mask))
    return found


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
        self.scored: dict[str, tuple[Scored, dict[int, list[float]]]] = {}  # of faults that change rows only

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
        sides = zip(("sampler_dtype", "trainer_dtype"), types_of(fault, self.seed), strict=True)
        about = {**about_of(self.seed, fault), **dict(sides)}
        settings = {"ages": ages_of(self.seed), "settings": {}, "about": about, **how}
        write(partial, samples, scored, again, change=rewarded, **settings)
        self.path_of(fault).parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial, self.path_of(fault))

    def make(self, fault: str, samples: list[Sample], dtype: str):
        """A dump of what one forward pass says."""
        how, model = FAULTS[fault], self.models[dtype]
        key = f"{id(samples)} {dtype} {how.scoring or (how.trainer and fault)}"
        if key not in self.scored:
            with training_on(model, how):
                scored = score_steps(model, samples, **how.scoring)
                again = {i: score(model, [samples[i]], **how.scoring)[0][0] for i in range(AGAIN)}
            self.scored[key] = scored, again
        self.write(fault, samples, *self.scored[key])

    def all(self):
        """Every fault."""
        right = self.samples("right")
        plans: list[tuple[str, list[Sample], str]] = []
        if self.sampler == "bfloat16":
            plans.append(("bf16", right, self.trainer))
        faults = ("one_token_shift", "eos", "nan_rows", of_family("first_token", self.seed), "dropout", "padding")
        plans += [(fault, right, self.trainer) for fault in faults]
        turns = [s._replace(mask=mask_of(s.completion, i)) for i, s in enumerate(right)]
        plans.append(("seams", turns, self.trainer))
        for fault in (
            "fp8_cache",
            *(of_family(cause, self.seed) for cause in ("weights", "temperature", "truncation", "penalty")),
        ):
            plans.append((fault, self.samples(fault), self.trainer))
        for fault, samples, dtype in plans:
            if self.lacks(fault):
                self.make(fault, samples, dtype)
        if any(self.lacks(fault) for fault in ("stale", "never_pushed", "own_updates")):
            self.drifting(right)
        exact = self.samples("right", "float32")
        if self.lacks("lora_merge"):
            self.merging(exact)
        for fault in ("bf16_head", "none"):
            if self.lacks(fault):
                self.make(fault, exact, "float32")

    def drifting(self, samples: list[Sample]):
        """The sampler has the first weights. The trainer has made updates, with the same reward and other completions."""
        dice = random.Random(self.seed)
        rate = 10 ** dice.uniform(-4.7, -4.2)
        step = [i // ROWS for i in range(len(samples))]
        ages = [dice.randint(0, 5) for _ in samples]
        behind = {"stale": ages, "never_pushed": step, "own_updates": [s % 4 for s in step]}
        found: dict[str, Scored] = {fault: ([[]] * len(samples), [0] * len(samples)) for fault in behind}
        again: dict[str, dict[int, list[float]]] = {fault: {} for fault in behind}
        others = samples_of(self.folder, "right", "float32", (self.seed + 1) % 12)
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
    paths = sorted((folder / "dumps").glob("*/*"))
    for path, silent in [*((path, False) for path in paths), *((p, True) for p in paths if p.parent.name == "stale")]:
        observed = read_tokens(path)
        observed.about = {**observed.about, "experts": "none"}
        if silent:  # a sampler that is behind without saying so, which an older policy or 8 bits may be
            observed.staleness[:] = float("nan")
        diagnosis = diagnose(observed)
        seed, fault = int(path.name), path.parent.name
        types = types_of(fault, seed)
        found.append(
            {
                "fault": "stale, silent" if silent else fault,
                "cause": "weights" if silent else FAULTS[fault].cause,
                "seed": seed,
                "sampler": types[0],
                "trainer": types[1],
                "rms": diagnosis.size,
                "first": diagnosis.findings[0].name if diagnosis.findings else diagnosis.verdict,
                "findings": [[f.name, round(f.certainty, 3), round(f.share, 3)] for f in diagnosis.findings],
                "healthy": diagnosis.healthy,
                "times_own_noise": diagnosis.floor,
            }
        )
    return found


# Parts --------------------------------------------------------------------------------------------------------------------


def missing_jobs(folder: Path, seed: int) -> list[Job]:
    """Engines that have not sampled everything that a seed needs. An engine samples for all seeds."""
    return [
        job
        for job in jobs()
        if any(not samples_file(folder, name, job.dtype, s).exists() for s, name in job.faults if s == seed)
    ]


def make_seed(folder: Path, seed: int):
    torch.set_num_threads(1)
    Maker(folder, seed).all()
