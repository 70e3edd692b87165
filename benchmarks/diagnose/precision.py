"""
Effect of the precision kit: the gap before and after, on a small model in bfloat16, with a real vLLM engine on the CPU.

    python benchmarks/diagnose/precision.py
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
from faults import Fault, training_on
from faults.models import head_in
from generate import sample, score_steps, start, stop, with_weights
from policies import build


SEEDS = list(range(8))
# Type of both sides, whether the head of the sampler and that of the trainer compute in float32
SETTINGS = {
    "bfloat16": ("bfloat16", False, False),
    "bfloat16, float32 head of the sampler": ("bfloat16", True, False),
    "bfloat16, float32 head of the trainer": ("bfloat16", False, True),
    "bfloat16, float32 heads": ("bfloat16", True, True),
    "float16": ("float16", False, False),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="judge-llama")
    parser.add_argument("--output", type=Path, default=Path("outputs/diagnose"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.output / f"{args.shape}-precision"
    right = build(args.shape, folder, seed=5)
    weights = {name: p.detach().clone() for name, p in right.named_parameters()}
    first = None
    print("| both sides | rms of d, nats | k3_kl | change |\n| --- | --- | --- | --- |")
    for name, (dtype, sampler_head, trainer_head) in SETTINGS.items():
        llm = start(folder, dtype, **({"hf_overrides": {"head_dtype": "float32"}} if sampler_head else {}))
        model = with_weights(type(right)(right.config).to(getattr(torch, dtype)).eval(), weights)
        fault = Fault("head", "", trainer=head_in(torch.float32))
        differences = []
        with training_on(model, fault) if trainer_head else nullcontext():
            for samples in sample(llm, SEEDS, {}).values():
                scored, _ = score_steps(model, samples)
                pairs = zip(samples, scored, strict=True)
                differences += [torch.tensor(logps) - torch.tensor(s.logps) for s, logps in pairs]
        stop(llm)
        d = torch.cat(differences).double()
        k3 = (d.expm1() - d).mean().item()
        first = first or k3
        print(f"| {name} | {d.square().mean().sqrt():.4f} | {k3:.3g} | {100 * (k3 / first - 1):+.0f} % |", flush=True)


if __name__ == "__main__":
    main()
