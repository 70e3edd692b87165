"""
Effect of a stale and of a low-precision sampler on training, without and with rollout correction.

    python benchmarks/headline/run.py             # every arm, three seeds
    python benchmarks/headline/run.py --smoke     # three arms, one seed, about two minutes
    python benchmarks/headline/run.py --report    # table, claims and figure of the runs there are

A run that is in the output folder is not done again, so that the same command goes on where it was interrupted.
"""

import os
import shutil
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1]))

from arms import ARMS, SEEDS, SMOKE_ARMS, SMOKE_STEPS, Run, choose_runs
from harness import train_missing
from report import write_report


HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    names = [arm.name for arm in ARMS]
    parser.add_argument("--smoke", action="store_true", help="three arms, one seed, few steps")
    parser.add_argument(
        "--report", action="store_true", help="train nothing; table, claims and figure of what is there"
    )
    parser.add_argument(
        "--commit_results", action="store_true", help="copy results.json and headline.png beside run.py"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that train, each on one core (default: 2)")
    parser.add_argument("--output_dir", type=Path, help="default: outputs/headline, or outputs/headline_smoke")
    parser.add_argument("--arms", nargs="+", choices=names, metavar="ARM", help=f"some of: {', '.join(names)}")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0 1 2")
    parser.add_argument("--steps", type=int, help="optimizer steps in place of those of the arms")
    args = parser.parse_args()
    args.command = command_of(args)
    args.arms = args.arms or (SMOKE_ARMS if args.smoke else names)
    args.seeds = args.seeds or (SEEDS[:1] if args.smoke else SEEDS)
    args.steps = args.steps or (SMOKE_STEPS if args.smoke else None)
    args.output_dir = args.output_dir or ROOT / "outputs" / ("headline_smoke" if args.smoke else "headline")
    return args


def command_of(args: Namespace) -> str:
    """The options that matter for the results, as typed. Without paths, to be shown to others."""
    parts = ["python benchmarks/headline/run.py"]
    for key in ("smoke", "arms", "seeds", "steps", "workers"):
        value = getattr(args, key)
        if value:
            values = value if isinstance(value, list) else [] if value is True else [value]
            parts += [f"--{key}", *map(str, values)]
    return " ".join(parts)


def prepare(engine: str):
    from train import prepare  # torch and vLLM, in the workers only

    prepare(engine)


def train(run: Run) -> dict[str, Any]:
    from train import train

    return train(run)


def main():
    # Read when a worker imports torch, and by the libraries it starts with. The quickstart sets vLLM's.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    args = parse_args()
    runs_folder = args.output_dir / "runs"
    if not args.report:
        train_missing(
            choose_runs(args.arms, args.seeds, args.steps),
            runs_folder,
            args.workers,
            args.command,
            prepare=prepare,
            train=train,
        )
    write_report(args.output_dir)
    if args.commit_results:
        for name in ("results.json", "headline.png"):
            shutil.copy(args.output_dir / name, HERE / name)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Interrupted. The same command goes on from here.")
