"""
Parts of a gap against faults of known size: does `probe` find of each part what was put in?

    python benchmarks/shares.py MODEL --output outputs/shares

Trainer and sampler (vLLM) compute in float32, so that nothing else differs. Each fault is put in alone, and its size is the
`k3_kl` of the whole gap; then in pairs, where its part should have that size. Prints a line for each part and the tally.
"""

import argparse
import itertools
import math
import os
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch


os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}

import torch

from trl_rollout_corr.arrival.worker import push
from trl_rollout_corr.probe.parts import DECODING, DROPOUT, OPTIONS, PADDING, PUSH, WHOLE, chain_of, split
from trl_rollout_corr.probe.process import Probe, build, run


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


def measured(probe: Probe, folder: Path, *faults: str) -> tuple[float, dict[str, float]]:
    """`k3_kl` of the whole gap with some faults, and of the part of each."""
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(FAULTS[fault][0](probe))
        first = run(probe, folder)
    parts = {part.name: part.k3 for part in split(first.logps["as_it_is"], chain_of(first, {}))}
    return parts[WHOLE], {fault: sum(parts.get(name, 0.0) for name in FAULTS[fault][1]) for fault in FAULTS}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--completions", type=int, default=1024)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path("outputs/shares"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    request = {"model": args.model, "options": OPTIONS_OF_RUN, "config": None, "prompts": None, "trainer": "grpo"}
    probe = build(
        {**request, "settings": {}, "output": str(args.output), "completions": args.completions, "length": args.length}
    )
    sizes, found = {}, []
    go = partial(measured, probe, args.output)
    print(f"without a fault: {go()[0]:.2e}")
    for faults in [*itertools.combinations(FAULTS, 1), *itertools.combinations(FAULTS, 2)]:
        whole, parts = go(*faults)
        for fault in faults:
            size = sizes.setdefault(fault, whole)
            off = parts[fault] / size - 1
            found.append(math.fabs(off) <= CLOSE)
            print(
                f"{' + '.join(faults):24} {fault:12} put in {size:.3e}  found {parts[fault]:.3e}  {off:+.0%}",
                flush=True,
            )
    print(f"{sum(found)} of {len(found)} parts within a fifth of their size")


if __name__ == "__main__":
    main()
