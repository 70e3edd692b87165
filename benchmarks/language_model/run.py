"""
A pretrained language model: how far apart its sampler and its trainer are.

    python benchmarks/language_model/run.py

It samples and scores what is missing, about two hours of one core, writes results.json, and prints the tables of README.md.
Whatever is in the output folder is not done again, so that the same command goes on where it was interrupted.
"""

import json
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any


os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gap
import report


ROOT = Path(__file__).parents[2]


def in_a_process(what: str, do: Callable[..., Any], *args: Any):
    """Do it in a process of its own, as an engine does not give its memory back."""
    print(what, flush=True)
    process = get_context("spawn").Process(target=do, args=args)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{what}: failed. The same command goes on from there.")


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs/language_model")
    args = parser.parse_args()
    for sampler in gap.SAMPLERS:
        if not gap.file_of(args.output_dir, sampler).exists():
            in_a_process(f"{sampler.name}: sampling", gap.sample_and_keep, args.output_dir, sampler)
        if gap.missing(args.output_dir, sampler):
            in_a_process(f"{sampler.name}: scoring", gap.score_and_keep, args.output_dir, sampler)
    results = report.collect(args.output_dir)
    (Path(__file__).parent / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print("\n\n".join(report.tables(results)))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Interrupted. The same command goes on from here.")
