"""
A pretrained language model: how far apart its sampler and its trainer are.

    python benchmarks/language_model/run.py gap           # sample and score what is missing, about two hours of one core
    python benchmarks/language_model/run.py --report      # the tables of what there is
    python benchmarks/language_model/run.py --report --publish    # and write results.json and README.md

Whatever is in the output folder is not done again, so that the same command goes on where it was interrupted.
"""

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
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


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"what to do: {', '.join(PARTS)} (default: nothing)")
    parser.add_argument("--report", action="store_true", help="print the tables")
    parser.add_argument("--publish", action="store_true", help="write results.json and the tables of README.md")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs/language_model")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"{', '.join(unknown)}: parts are {', '.join(PARTS)}")
    return args


def in_a_process(what: str, do: Callable[..., Any], *args: Any):
    """Do it in a process of its own, as an engine does not give its memory back."""
    print(what, flush=True)
    process = get_context("spawn").Process(target=do, args=args)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{what}: failed. The same command goes on from there.")


def measure_gap(folder: Path):
    todo = gap.missing(folder)
    for i, (sampler, trainers) in enumerate(todo, 1):
        what = "sampling" if trainers is None else f"scoring by {len(trainers)} trainers"
        in_a_process(f"[{i}/{len(todo)}] {sampler.name}: {what}", gap.do, folder, sampler, trainers)


PARTS = {"gap": measure_gap}


def main():
    args = parse_args()
    for part in args.parts:
        PARTS[part](args.output_dir / part)
    if args.report or args.publish:
        results = report.collect(args.output_dir)
        for name, part in report.tables(results).items():
            print(f"\n{name}\n{part}")
        if args.publish:
            report.publish(results)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Interrupted. The same command goes on from here.")
