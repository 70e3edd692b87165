"""
The arena: every way to correct, on tasks and samplers of many kinds.

    python benchmarks/arena/run.py --stage third          # caps on the weights of bad tokens
    python benchmarks/arena/run.py --report --publish     # train nothing: write the results of all runs there are

A run that is in the output folder is not done again, so that the same command goes on where it was interrupted.
"""

import gc
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1]))

import archive
import results
from harness import train_missing
from plan import STAGES, Run


ROOT = Path(__file__).parents[2]


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=[*STAGES], help="which runs (default: all)")
    parser.add_argument("--arms", nargs="+", help="some of the arms of the stage")
    parser.add_argument("--cells", nargs="+", help="some of the cells of the stage")
    parser.add_argument("--seeds", nargs="+", type=int, help="some of the seeds of the stage")
    parser.add_argument(
        "--wanted", action="store_true", help="of other seeds than 0, only the runs that PROTOCOL.md asks for"
    )
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--publish", action="store_true", help="write the results, the tables and the archive")
    parser.add_argument("--workers", type=int, default=2, help="processes that train, each on one core (default: 2)")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs/arena", help="default: outputs/arena")
    return parser.parse_args()


def prepare(engine: str):
    from training import prepare  # torch and vLLM, in the workers only

    prepare(engine)


def train(run: Run) -> dict[str, Any]:
    from training import train

    record = train(run)
    gc.collect()  # trainers have cycles, and those of the language model fill the memory
    return record


def main():
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when a worker imports torch
    args = parse_args()
    runs: dict[str, Run] = {}
    for run in (run for stage in args.stage for run in STAGES[stage]()):
        runs.setdefault(run.name, run)  # a reference is that of the first of its cells, where it is done
    chosen = [
        run
        for run in runs.values()
        if (args.arms is None or run.arm.name in args.arms)
        and (args.cells is None or run.cell.name in args.cells)
        and (args.seeds is None or run.seed in args.seeds)
    ]
    archive.unpack(args.output_dir / "runs")
    if args.wanted:
        rows = [row for found in results.collect(args.output_dir / "runs").values() for row in found["rows"]]
        chosen = results.needed(chosen, rows)
    if not args.report:
        command = f"python benchmarks/arena/run.py --stage {' '.join(args.stage)}"
        train_missing(chosen, args.output_dir / "runs", args.workers, command, prepare=prepare, train=train)
    found = results.collect(args.output_dir / "runs")
    for name, part in results.tables(found).items():
        print(f"\n{name}\n{part}")
    if args.publish:
        results.publish(found, args.output_dir / "runs")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Interrupted. The same command goes on from here.")
