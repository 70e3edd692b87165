"""
Parts of a gap against faults of known size: does `probe` find of each part what was put in?

    python benchmarks/shares.py MODEL --output outputs/shares

Trainer and sampler (vLLM) compute in float32, so that nothing else differs. Each fault is put in alone, and its size is the
`k3_kl` of the whole gap; then in pairs, where its part should have that size. Faults of the engine are arguments of it, and
each combination is a process that reads the same tokens. vLLM quantises no engine in float32, so the size of that part comes
from a model of Transformers whose linear layers round weights and inputs by the rule of vLLM. Prints a line for each part and
the tally.
"""

import argparse
import itertools
import os
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch


os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from trl_rollout_corr.pushes.reloading import push
from trl_rollout_corr.tools.diagnosis.observed import k3_of
from trl_rollout_corr.tools.probe.parts import (
    BODY,
    CACHE,
    DECODING,
    DROPOUT,
    FLOAT32,
    HEAD,
    HEADS,
    OPTIONS,
    PADDING,
    PLAIN,
    PUSH,
    QUANTISATION,
    SMALL,
    WHOLE,
    Measured,
    Part,
    chain_of,
    split_gap,
)
from trl_rollout_corr.tools.probe.probe import in_process
from trl_rollout_corr.tools.probe.process import Probe, build, run


CLOSE = 0.2  # of the size, within which a part is found
OPTIONS_OF_RUN = [
    "--use_vllm", "true", "--vllm_mode", "colocate", "--use_cpu", "true", "--bf16", "false", "--report_to", "none",
    "--rollout_engine_kwargs", '{"dtype": "float32"}', "--vllm_max_model_length", "128",
]  # fmt: skip


@contextmanager
def dropout(probe: Probe, rate: float = 0.03):
    """Dropout in the attention of the trainer."""
    model = probe.trainer.model
    layers = [layer for layer in model.modules() if hasattr(layer, "attention_dropout")]
    with ExitStack() as stack:
        for owner in (model.config, *layers):
            stack.enter_context(patch.object(owner, "attention_dropout", rate))
        yield


def padding(probe: Probe):
    """The trainer attends to one token of the padding, and counts it as a position."""
    model = probe.trainer.model
    forward = model.forward

    def wider(*args, attention_mask, **kwargs):
        mask = attention_mask.clone()
        mask[:, :-1] |= attention_mask[:, 1:]
        return forward(*args, attention_mask=mask, **kwargs)

    return patch.object(model, "forward", wider)


def noisy_push(probe: Probe, size: float = 0.03):
    """The weights that are pushed have noise."""
    generation, dice = probe.trainer.vllm_generation, torch.Generator().manual_seed(0)

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + size * x.std() * torch.randn(x.shape, generator=dice) if x.dim() > 1 else x

    weights = [(name, noisy(x.detach())) for name, x in probe.trainer.model.named_parameters()]
    return patch.object(generation, "sync_weights", lambda: push(generation.llm, weights))


@contextmanager
def truncation(probe: Probe, top_p: float = 0.8):
    """The sampler draws from the likeliest tokens."""
    with patch.object(probe.trainer.vllm_generation, "top_p", top_p), patch.object(probe.run, "top_p", top_p):
        yield


FAULTS = {
    "dropout": (dropout, {DROPOUT}),
    "padding": (padding, {PADDING}),
    "push": (noisy_push, {PUSH}),
    "truncation": (truncation, {OPTIONS, DECODING}),
}


def measured(probe: Probe, folder: Path, *faults: str) -> tuple[Part, dict[str, Part]]:
    """The whole gap with some faults, and the part of each."""
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(FAULTS[fault][0](probe))
        first = run(probe, folder)
    return parts_of(first, {}, {fault: names for fault, (_, names) in FAULTS.items()})


def parts_of(first: Measured, tried: dict[str, Measured], names: dict[str, set[str]]) -> tuple[Part, dict[str, Part]]:
    """The whole, and the part of each fault that the chain has."""
    parts = {part.name: part for part in split_gap(first.logps["as_it_is"], chain_of(first, tried))}
    return parts[WHOLE], {fault: parts[name] for fault in names for name in names[fault] & parts.keys()}


# Faults of the engine -------------------------------------------------------------------------------------------------

ENGINE = {"head": {HEAD}, "body": {BODY}, "cache": {CACHE}, "quantisation": {QUANTISATION}}
COMBINATIONS = [
    ("head",), ("body",), ("cache",), ("head", "body"), ("head", "cache"), ("body", "cache"), ("body", "quantisation"),
    ("head", "body", "quantisation"),
]  # fmt: skip
BITS = {"cache": {"kv_cache_dtype": "fp8"}, "quantisation": {"quantization": "fp8_per_channel"}}


def arguments(faults: frozenset[str]) -> dict[str, object]:
    """Arguments of an engine with faults."""
    types = {fault: "bfloat16" if fault in faults else "float32" for fault in ("head", "body")}
    kwargs = {"dtype": types["body"], "hf_overrides": {"head_dtype": types["head"]}}
    return kwargs | {name: x for fault in faults & BITS.keys() for name, x in BITS[fault].items()}


def engine_faults(request: dict[str, object], folder: Path, sizes: dict[str, float]):
    """Yields faults of the engine, the whole gap and the part of each. Adds the size of the quantisation to `sizes`."""
    first = in_process("sampling", request, folder / "first")
    tokens = folder / "first" / "tokens.pt"
    scored = {frozenset[str](): first.logps["sampler"]}

    def sampler(*faults: str) -> np.ndarray:
        name = frozenset(faults)
        if name not in scored:
            more = {"changes": {"rollout_engine_kwargs": arguments(name)}, "tokens": str(tokens)}
            title = " + ".join(faults) or "no fault"
            scored[name] = in_process(title, {**request, **more}, folder / title).logps["sampler"]
        return scored[name]

    known = k3_of(
        first.logps["alone"].astype(float) - rounded(request["model"], torch.load(tokens, weights_only=False))
    )
    sizes["quantisation"] = float(known.mean())
    for faults in COMBINATIONS:
        without_bits = [fault for fault in faults if fault not in BITS]
        end = sampler(*faults)
        facts = {**first.facts, "engine_kwargs": arguments(frozenset(faults))}
        run = Measured({**first.logps, "sampler": end, "pushed": end, "sampled": end}, facts)
        steps = {PLAIN: without_bits, HEADS: [fault for fault in without_bits if fault != "head"], FLOAT32: []}
        tried = {change: Measured({"sampler": sampler(*left)}, facts) for change, left in steps.items()}
        yield faults, *parts_of(run, tried, ENGINE)


def rounded(model: str, batches: list[dict[str, torch.Tensor]]) -> np.ndarray:
    """
    Log-probabilities of completions, `(N,)`, by a model whose linear layers round to 8 bits: weights with a scale for each
    row, and inputs with a scale for each token.
    """

    def fp8(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 448  # the largest number of e4m3
        scale = scale.clamp_min(1 / (448 * 512))
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for name, layer in policy.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.weight.data = fp8(layer.weight.data)
            layer.register_forward_pre_hook(lambda layer, inputs: (fp8(inputs[0]),))
    logps = []
    for batch in batches:
        for i, mask in enumerate(batch["completion_mask"].bool()):
            prompt, completion = (
                batch["prompt_ids"][i][batch["prompt_mask"][i].bool()],
                batch["completion_ids"][i][mask],
            )
            with torch.no_grad():
                logits = policy(torch.cat([prompt, completion])[None]).logits[0, -len(completion) - 1 : -1]
            logps.append(logits.log_softmax(-1).gather(1, completion[:, None])[:, 0])
    return torch.cat(logps).numpy()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--completions", type=int, default=1024)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path("outputs/shares"))
    args = parser.parse_args()
    args.output.mkdir(parents=True)
    sizes: dict[str, float] = {}
    found: dict[bool, list[bool]] = {True: [], False: []}  # by whether `probe` puts the part in doubt

    def judge(faults: tuple[str, ...], whole: Part, parts: dict[str, Part]):
        for fault in faults:
            size, part = sizes.setdefault(fault, whole.k3), parts[fault]
            doubt = abs(part.k3) < max(part.error, SMALL * whole.k3)
            found[doubt].append(abs(part.k3 / size - 1) <= CLOSE)
            line = (
                f"put in {size:.3e}  found {part.k3:.3e} +- {part.error:.1e}  {part.k3 / size - 1:+.0%}{' ?' * doubt}"
            )
            print(f"{' + '.join(faults):24} {fault:12} {line}", flush=True)

    given = {"options": OPTIONS_OF_RUN, "config": None, "prompts": None, "trainer": "grpo", "changes": {}}
    request = {**given, "model": args.model, "completions": args.completions, "length": args.length}
    for faults, whole, parts in engine_faults(request, args.output, sizes):
        judge(faults, whole, parts)
    probe = build({**request, "output": str(args.output)})
    go = partial(measured, probe, args.output)
    print(f"without a fault: {go()[0].k3:.2e}")
    for faults in [*itertools.combinations(FAULTS, 1), *itertools.combinations(FAULTS, 2)]:
        judge(faults, *go(*faults))
    for doubt, close in found.items():
        print(
            f"{sum(close)} of {len(close)} parts within a fifth of their size, {'in doubt (?)' if doubt else 'not in doubt'}"
        )


if __name__ == "__main__":
    main()
