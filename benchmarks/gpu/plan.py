"""
What is measured, as data: sections, their parts, and the parts of each size. No torch here.

Minutes are what a part is planned to take, which nobody has measured: they weigh the bar, and a part that takes much longer
is ended.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any


SIZES = {"10min": "about 10 minutes", "hour": "about 1 hour", "night": "one night", "smoke": "a test without a GPU"}
SECTIONS = {
    "seams": "The seams in bf16",
    "gap": "The gap between sampler and trainer",
    "cost": "Cost of a step, without its sampling",
    "kernels": "The computation alone",
    "training": "Training with a sampler that is behind",
    "asynchronous": "Asynchronous training",
    "routing": "Replay of experts",
    "fsdp2": "Two processes",
}
NEEDS = {  # why a part is left out, by what it needs
    "gpu": "it needs a GPU, and none was found",
    "two gpus": "it needs two GPUs, and there are fewer",
    "gsm8k": "it needs GSM8K, which was not asked for (`--download gsm8k`)",
    "verl": "it needs verl's wheel, which was not asked for (`--download verl`)",
}
PRESETS = {"no correction": "disabled", "TRL's own": None, "decoupled_token_is": "decoupled_token_is", "auto": "auto"}

# Arguments of vLLM's engine, by sampler. Without "eager" it is compiled, as vLLM does by default
_BF16: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": False, "gpu_memory_utilization": 0.7}
SAMPLERS = {
    "bf16": _BF16,
    "fp8 weights": {**_BF16, "quantization": "fp8"},
    "bf16, eager": {**_BF16, "enforce_eager": True},
    "fp8 cache": {**_BF16, "kv_cache_dtype": "fp8"},
    "int8 weights": {**_BF16, "quantization": "int8_per_channel_weight_only"},
    "bf16, Triton attention": {**_BF16, "attention_backend": "TRITON_ATTN"},
    "bf16, two GPUs": {**_BF16, "tensor_parallel_size": 2},
}
# Fields of `gap.Trainer`, by trainer. The first is TRL's default; samplers other than the first meet the first two
TRAINERS: dict[str, dict[str, Any]] = {
    "fp32 weights, bf16 autocast": {"dtype": "float32", "autocast": True},
    "bf16": {"dtype": "bfloat16"},
    "fp32": {"dtype": "float32"},
    "bf16, fp32 head": {"dtype": "bfloat16", "float32_head": True},
    "bf16, eager attention": {"dtype": "bfloat16", "attention": "eager"},
    "bf16, FlashAttention-2": {"dtype": "bfloat16", "attention": "flash_attention_2"},
}


@dataclass(frozen=True)
class Part:
    """
    What one process measures: a function of `sections.py` with its `options`, planned to take some `minutes`. Where one of
    its `needs`, keys of `NEEDS`, is not there, it is left out.
    """

    section: str
    name: str
    minutes: float
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ("gpu",)

    @property
    def file(self) -> str:
        """Name of its files, without their ending."""
        return "".join(c if c.isalnum() else "_" for c in f"{self.section}--{self.name}")


def parts(size: str) -> list[Part]:
    """Parts of a size, in the order in which they are done."""
    return _smoke() if size == "smoke" else [*_short(size), *_training(size), *_long(size)]


def _short(size: str) -> list[Part]:
    small, k = size == "10min", ("10min", "hour", "night").index(size)
    found = [Part("seams", "bf16", 1.5, {"steps": (3, 10, 30)[k], "length": 128})]
    for name, engine in list(SAMPLERS.items())[: 2 if small else None]:
        trainers = TRAINERS if name == "bf16" else dict(list(TRAINERS.items())[:2])
        options = {"sampler": name, "engine": engine, "trainers": trainers, "tokens": (20_000, 100_000, 1_000_000)[k]}
        needs = ("gpu", "two gpus") if "tensor_parallel_size" in engine else ("gpu",)
        found.append(Part("gap", name, (1, 2, 10)[k], options, needs))
    for length, completions in ((512, 16), (4096, 8), (16_384, 4))[: 1 if small else None]:
        options = {"length": length, "completions": completions, "rounds": (2, 3, 9)[k], "steps": 3}
        found.append(Part("cost", f"{length} tokens", 1.5 + length / 4096, options))
    options = {"shapes": ["64x2048", "256x8192", "256x32768"][: 2 if small else None], "rounds": 9 if small else 51}
    found.append(Part("kernels", "alone", 0.5, options))
    return [*found, Part("kernels", "beside verl", 1, {**options, "beside_verl": True}, ("gpu", "verl"))]


def _training(size: str) -> list[Part]:
    steps, seeds = {"10min": (40, 1), "hour": (120, 1), "night": (300, 3)}[size]
    few = [("no correction", 8), ("auto", 8)]
    every = [(arm, age) for age in (8, 0) for arm in PRESETS]  # no correction at age 0 is on-policy
    tasks = {"sums": few if size == "10min" else every, "gsm8k": {"10min": [], "hour": few, "night": every}[size]}
    found = []
    for task, arms in tasks.items():
        minutes, needs = (1 + steps / 100, ("gpu",)) if task == "sums" else (3 + steps / 30, ("gpu", "gsm8k"))
        for seed, (arm, age) in product(range(seeds), arms):
            options = {"task": task, "arm": arm, "age": age, "seed": seed, "steps": steps}
            found.append(Part("training", f"{task}, {arm}, age {age}, seed {seed}", minutes, options, needs))
    return found


def _long(size: str) -> list[Part]:
    if size == "10min":
        return []
    steps = 20 if size == "hour" else 100
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "num_experts": 32}
    found = []
    for arm in ("synchronous", "asynchronous"):
        found.append(Part("asynchronous", arm, 2 + steps / 30, {"arm": arm, "steps": steps, "length": 256}))
    for dtype in ("float32", "bfloat16"):
        found.append(Part("routing", dtype, 3, {"dtype": dtype, "steps": 4, "sizes": sizes}))
    return [*found, Part("fsdp2", "FSDP2 beside DDP", 4, {"steps": 5}, ("gpu", "two gpus"))]


def _smoke() -> list[Part]:
    """Every section, as small as can be. What needs a GPU says so."""
    trainers = {name: TRAINERS[name] for name in ("fp32", "bf16, eager attention")}
    tokens = {"trainers": trainers, "tokens": 1500, "longest": 16}
    training = {"task": "sums", "arm": "auto", "age": 2, "seed": 0, "steps": 3}
    return [
        Part("seams", "bf16", 0.4, {"steps": 2, "length": 8}, ()),
        Part("gap", "bf16", 0.6, {"sampler": "bf16", "engine": {"dtype": "bfloat16"}, **tokens}, ()),
        Part("gap", "fp8 weights", 0.6, {"sampler": "fp8 weights", "engine": SAMPLERS["fp8 weights"], **tokens}),
        Part("cost", "8 tokens", 0.4, {"length": 8, "completions": 8, "rounds": 1, "steps": 1}, ()),
        Part("kernels", "alone", 0.2, {"shapes": ["4x64"], "rounds": 3}, ()),
        Part("training", "sums, auto, age 2, seed 0", 0.4, training, ()),
        Part("asynchronous", "asynchronous", 0.8, {"arm": "asynchronous", "steps": 2, "length": 8}, ()),
        Part("routing", "float32", 0.5, {"dtype": "float32", "steps": 1, "sizes": {}}, ()),
        Part("fsdp2", "FSDP2 beside DDP", 0.5, {"steps": 1}, ("two gpus",)),
    ]
