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
from typing import Any, NamedTuple


os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import faults
import torch
from faults.models import merged
from policies import EOS, SHAPES, VOCABULARY, build, updated

from trl_rollout_corr.diagnosis.evidence import FLOOR
from trl_rollout_corr.dumps import files as dump


STEPS, ROWS, AGAIN = 8, 8, 12  # optimizer steps, sequences of each, and how many of all are scored a second time
PUSHED = 6  # optimizer steps of a push
TEMPERATURE = 0.7  # that the trainer knows of, where log-probabilities are raw
# Of truncation, the first is as in the catalogue. A sure model samples from few tokens in any case, and has to be left fewer
STRENGTHS = {"top_p": (0.9, 0.8, 0.7, 0.5), "top_k": (10, 5, 3, 2), "min_p": (0.05, 0.1, 0.2, 0.4)}
Weights = dict[str, torch.Tensor]


class Sample(NamedTuple):
    """One sequence: its prompt, its completion, and the log-probabilities of the sampler."""

    prompt: list[int]
    completion: list[int]
    logps: list[float]
    mask: list[bool]


# Sampling -----------------------------------------------------------------------------------------------------------------


def start(folder: Path, dtype: str, **engine: Any) -> Any:
    from vllm import LLM

    settings = {"dtype": dtype, "logprobs_mode": "processed_logprobs", **engine}
    return LLM(
        str(folder),
        enforce_eager=True,
        max_model_len=192,
        max_num_seqs=256,
        seed=0,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        enable_prefix_caching=False,
        **settings,
    )


def requests(seed: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of a seed, and how long their completions may be."""
    dice = random.Random(seed)
    prompts = [[dice.randrange(2, VOCABULARY) for _ in range(dice.randint(3, 40))] for _ in range(STEPS * ROWS)]
    return prompts, [dice.randint(16, 72) for _ in prompts]


def sample(llm: Any, seeds: list[int], sampling: dict[int, dict[str, Any]]) -> dict[int, list[Sample]]:
    """Samples of all seeds in one pass of the engine."""
    from vllm import SamplingParams

    prompts, params, owners = [], [], []
    for seed in seeds:
        for prompt, length in zip(*requests(seed), strict=True):
            prompts.append({"prompt_token_ids": prompt})
            fields = {"temperature": 1.0, **sampling.get(seed, {})}
            params.append(
                SamplingParams(max_tokens=length, logprobs=0, detokenize=False, stop_token_ids=[EOS], **fields)
            )
            owners.append(seed)
    samples: dict[int, list[Sample]] = {seed: [] for seed in seeds}
    for seed, prompt, out in zip(owners, prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        tokens = list(out.outputs[0].token_ids)
        logps = [entry[token].logprob for token, entry in zip(tokens, out.outputs[0].logprobs, strict=True)]
        # every other seed has turns
        mask = mask_of(tokens, len(samples[seed])) if seed % 4 >= 2 else [True] * len(tokens)
        samples[seed].append(Sample(prompt["prompt_token_ids"], tokens, logps, mask))
    return samples


def mask_of(tokens: list[int], i: int) -> list[bool]:
    """An answer of a tool in every other completion."""
    mask = [True] * len(tokens)
    if i % 2 and len(tokens) > 14:
        first = len(tokens) // 3
        mask[first : first + 4] = [False] * 4
    return mask


# Scoring ------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def score(
    model: Any,
    samples: list[Sample],
    *,
    temperature: float = 1.0,
    attend_padding: bool = False,
    drop_prompt: int = 0,
    retokenize: bool = False,
) -> tuple[list[list[float]], list[int]]:
    """Log-probabilities of the trainer, and the padding before each prompt. Prompts are padded on the left, as in TRL."""
    prompts = [s.prompt[: len(s.prompt) - drop_prompt] for s in samples]
    width, length = max(map(len, prompts)), max(len(s.completion) for s in samples)
    ids = torch.zeros(len(samples), width + length, dtype=torch.long)
    attention = torch.zeros_like(ids)
    padding = [width - len(prompt) for prompt in prompts]
    for row, (prompt, s) in enumerate(zip(prompts, samples, strict=True)):
        ids[row, padding[row] : width] = torch.tensor(prompt)
        ids[row, width : width + len(s.completion)] = torch.tensor(s.completion)
        attention[row, 0 if attend_padding else padding[row] : width + len(s.completion)] = 1
    read = ids.clone()
    if retokenize:
        for row, s in enumerate(samples):
            edges = [i for i in range(1, len(s.mask)) if s.mask[i] and not s.mask[i - 1]]
            for edge in edges:
                read[row, width + edge - 1] = 2 + (int(ids[row, width + edge - 1]) + 17) % (VOCABULARY - 2)
    kept = ids.shape[1] - width + 1
    logits = model(input_ids=read, attention_mask=attention, logits_to_keep=kept).logits[:, :-1].float() / temperature
    logps = logits.log_softmax(-1).gather(-1, ids[:, width:, None])[..., 0]
    return [logps[row, : len(s.completion)].tolist() for row, s in enumerate(samples)], padding


def score_steps(model: Any, samples: list[Sample], **how: Any) -> tuple[list[list[float]], list[int]]:
    """As a trainer does it, a step at a time."""
    logps, padding = [], []
    for first in range(0, len(samples), ROWS):
        a, b = score(model, samples[first : first + ROWS], **how)
        logps += a
        padding += b
    return logps, padding


def effect(logps: list[list[float]], others: list[list[float]]) -> float:
    """Root mean square of a difference of log-probabilities, in nats, behind the first tokens of completions."""
    pairs = zip(logps, others, strict=True)
    d = torch.cat([torch.tensor(a[1:]) - torch.tensor(b[1:]) for a, b in pairs])
    return float(d.square().mean().sqrt())


def with_weights(model: Any, weights: Weights) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


# Dumps --------------------------------------------------------------------------------------------------------------------


def write(
    folder: Path,
    samples: list[Sample],
    scored: tuple[list[list[float]], list[int]],
    again: dict[int, list[float]],
    *,
    ages: list[int],
    settings: dict[str, Any],
    about: dict[str, str],
    change: Any = None,
    token_ages: list[list[float]] | None = None,
):
    logps, padding = scored
    for step in range(STEPS):
        rows = []
        for i in range(step * ROWS, step * ROWS + ROWS):
            s, n = samples[i], len(samples[i].completion)
            row = {
                "step": step + 1,
                "rank": 0,
                "sampled": True,
                "worst": False,
                "prompt": "",
                "completion": "",
                "tokens": [""] * n,
                "token_ids": s.completion,
                "mask": s.mask,
                "train_logps": logps[i],
                "rollout_logps": s.logps,
                "weights": None,
                "keep": [True] * n,
                "coefficients": [1.0] * n,
                "reward": float(i % 2),
                "advantage": float(i % 2 * 2 - 1),
                "staleness": ages[i],
                "prompt_ids": s.prompt,
                "padding": padding[i],
                "again_logps": again.get(i),
                "token_staleness": token_ages[i] if token_ages else None,
            }
            rows.append(change(row) if change else row)
        dump.write_rows(folder, step + 1, 0, rows, settings, about)


def about_of(seed: int, fault: str = "") -> dict[str, str]:
    """Metadata of a run: an adapter, which has nothing to do with most faults, and how the engine caches."""
    adapter = {"adapter": "LORA"} if seed % 3 == 0 or fault == "lora_merge" else {"adapter": "none"}
    cache = faults.FAULTS[fault].engine.get("kv_cache_dtype", "auto") if fault else "auto"
    return {**adapter, "kv_cache_dtype": cache}


def ages_of(seed: int) -> list[int]:
    """Ages that mean nothing: batches are taken as they come, or two steps train on each."""
    return [(i // ROWS) % 2 if seed % 5 < 2 else 0 for i in range(STEPS * ROWS)]


class Maker:
    """
    Makes the dumps of one shape.

    Args:
        shape (`str`):
            Name of the shape.
        seeds (`list[int]`):
            Seeds.
        output (`Path`):
            Folder; a dump goes to `output/shape/fault/seed`.
    """

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

    def make(
        self,
        fault: str,
        seed: int,
        samples: list[Sample],
        dtype: str,
        *,
        temperature: float = 1.0,
        output: Path | None = None,
    ):
        how = faults.FAULTS[fault]
        model = self.models[dtype]
        with faults.training_on(model, how):
            scored = score_steps(model, samples, temperature=temperature, **how.scoring)
            again = self.again(model, samples, temperature=temperature, **how.scoring)
        settings: dict[str, Any] = {}
        write(
            (output or self.output) / fault / str(seed),
            samples,
            scored,
            again,
            ages=ages_of(seed),
            settings=settings,
            about=about_of(seed, fault),
            change=how.rows,
        )

    def again(self, model: Any, samples: list[Sample], **how: Any) -> dict[int, list[float]]:
        """Some sequences scored alone, those that `rollout_diagnose` takes: of the first step."""
        return {i: score(model, [samples[i]], **how)[0][0] for i in range(0, min(AGAIN, ROWS))}

    def of_an_engine(self, dtype: str):
        """All faults on an engine with that type."""
        mine = [seed for seed in self.seeds if self.below(seed) == dtype]
        llm = start(self.folder, dtype)
        if "moe" in self.shape:
            for fault in ["none"] if dtype == "float32" else ["bf16_moe"]:
                for seed, samples in sample(llm, self.seeds, {}).items():
                    self.make(fault, seed, samples, dtype)
            return stop(llm)
        for seed, samples in sample(llm, self.seeds, {}).items():
            self.make("none" if dtype == "float32" else "bf16", seed, samples, dtype)
            if dtype == "float32":
                self.make("bf16_head", seed, samples, dtype)
            if seed in mine:
                for fault in (
                    "one_token_shift",
                    "eos",
                    "dropout",
                    "padding",
                    "nan_rows",
                    ("bos", "template")[seed // 2 % 2],
                ):
                    self.make(fault, seed, samples, dtype)
                turns = [s._replace(mask=mask_of(s.completion, i)) for i, s in enumerate(samples)]
                self.make("seams", seed, turns, dtype)
                for fault in ("stale", "never_pushed", "own_updates"):
                    self.drifting(fault, seed, samples, dtype)
                self.pushing(seed, samples, dtype)
                self.merging(seed, samples)
        for family in (
            ("cold_sampler", "hot_sampler"),
            ("repetition_penalty", "presence_penalty", "frequency_penalty"),
        ):
            chosen = {seed: family[seed // 2 % len(family)] for seed in mine}
            drawn = sample(llm, mine, {seed: dict(faults.FAULTS[name].sampling) for seed, name in chosen.items()})
            for seed, samples in drawn.items():
                self.make(chosen[seed], seed, samples, dtype)
        self.truncating(llm, mine, dtype)
        for k, fault in enumerate(("int8_weights", "fp8_weights", "int4_weights")):
            chosen_seeds = [seed for seed in mine if seed // 2 % 3 == k]
            if chosen_seeds:
                with faults.sampling_from(llm, self.weights.items(), faults.FAULTS[fault]):
                    drawn = sample(llm, chosen_seeds, {})
                for seed, samples in drawn.items():
                    self.make(fault, seed, samples, dtype)
        stop(llm)
        name = "fp8_cache"
        llm = start(self.folder, dtype, **faults.FAULTS[name].engine)
        for seed, samples in sample(llm, mine, {}).items():
            self.make(name, seed, samples, dtype)
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
        # what is weaker than that, as the catalogue has it, is kept apart
        weaker = {seed: name for seed in mine for name, x in self.truncation[seed].items() if x != STRENGTHS[name][0]}
        catalogue = {seed: dict(faults.FAULTS[name].sampling) for seed, name in weaker.items()}
        for seed, samples in sample(llm, [*weaker], catalogue).items():
            self.make(weaker[seed], seed, samples, dtype, output=self.output.with_name(f"{self.shape}-weaker"))

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

    def drifting(self, fault: str, seed: int, samples: list[Sample], dtype: str):
        """The sampler has the first weights, the trainer later ones."""
        dice = random.Random(seed)
        sequences = torch.stack([torch.tensor((s.prompt + s.completion * 48)[:48]) for s in samples])
        rate = 10 ** dice.uniform(-4.8, -4.2)
        steps = [(i // ROWS) + 1 for i in range(len(samples))]
        if fault == "stale":
            ages = [dice.randint(0, 5) for _ in samples]
            behind = ages
        elif fault == "never_pushed":
            ages, behind = [0] * len(samples), [step - 1 for step in steps]
        else:
            ages = [(step - 1) % 4 for step in steps]
            behind = ages
        weights = updated(self.models["float32"], sequences, max(behind), rate, seed)
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
        write(
            self.output / fault / str(seed),
            samples,
            (logps, padding),
            again,
            ages=ages,
            settings=settings,
            about=about_of(seed, fault),
        )

    @torch.no_grad()
    def pushing(self, seed: int, samples: list[Sample], dtype: str, *, clears: bool = False):
        """
        New weights reach the sampler in the first quarter of every other completion, which keeps the keys and values of the
        old ones unless the sampler `clears` them. The others begin behind the push. The trainer has the new weights, or those
        of one step later.
        """
        dice, model = random.Random(seed), self.models[dtype]
        sequences = torch.stack([torch.tensor((s.prompt + s.completion * 48)[:48]) for s in samples])
        with torch.enable_grad():
            weights = updated(self.models["float32"], sequences, PUSHED + 1, 10 ** dice.uniform(-4.8, -4.2), seed)
        later = [step // 4 % 2 for step in range(len(samples))]
        places = [dice.randint(1, max(len(s.completion) // 4, 1)) if i % 2 else 0 for i, s in enumerate(samples)]
        with_weights(model, weights[0])
        caches = [
            model(input_ids=torch.tensor([[*s.prompt, *s.completion[: place - 1]]])).past_key_values if place else None
            for s, place in zip(samples, places, strict=True)
        ]
        with_weights(model, weights[PUSHED])
        fresh = score_steps(model, samples)
        kept, token_ages = [], []
        for s, place, cache, of_new, more in zip(samples, places, caches, fresh[0], later, strict=True):
            if place and not clears:
                rest = torch.tensor([s.completion[place - 1 :]])
                logits = model(input_ids=rest, past_key_values=cache).logits[0, :-1].float()
                of_new = [*of_new[:place], *logits.log_softmax(-1).gather(-1, rest[0, 1:, None])[:, 0].tolist()]
            of_new = [*s.logps[:place], *of_new[place:]]
            kept.append(s._replace(logps=of_new))
            token_ages.append([float(more + PUSHED * (i < place)) for i in range(len(s.completion))])
        with_weights(model, weights[PUSHED + 1])
        last = score_steps(model, samples)[0]
        logps = [after if more else now for now, after, more in zip(fresh[0], last, later, strict=True)]
        with_weights(model, self.weights)
        write(
            self.output / "across_push" / str(seed),
            kept,
            (logps, fresh[1]),
            {},
            ages=[int(max(of_one)) for of_one in token_ages],
            token_ages=token_ages,
            settings={},
            about=about_of(seed, "across_push"),
        )

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
        write(
            self.output / "lora_merge" / str(seed),
            kept,
            (logps, padding),
            again,
            ages=ages_of(seed),
            settings={},
            about=about_of(seed, "lora_merge"),
        )


def stop(llm: Any):
    import gc

    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()


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
            maker.of_an_engine(dtype)


if __name__ == "__main__":
    main()
