"""
Time that correction saves in asynchronous training. Seconds of wall clock until a held-out accuracy is reached, against the
synchronous trainer, with and without correction, for samples of up to 2, 8 and 16 versions.

    python benchmarks/asynchronous/run.py             # every arm, three seeds
    python benchmarks/asynchronous/run.py --smoke     # two arms, one seed, few steps
    python benchmarks/asynchronous/run.py --report    # table and figure of the runs there are

The task is that of the quickstart, at twice its learning rate. One run at a time, as each of them is timed and uses two
cores: vLLM's server and the trainer when it is asynchronous, and both in turns when not. A run that is in the output folder
is not done again. The machine should have nothing else to do.
"""

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import dataclass
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import train_missing
from report import load, table, write


ROOT = Path(__file__).parents[2]
CORRECTIONS = {"none": {"rollout_correction": "disabled"}, "auto": {"rollout_correction": "auto"}}
FAST = {"learning_rate": 1e-4}  # so that a policy of some steps ago is another one
ARMS: dict[str, dict[str, Any]] = {
    "synchronous": {"trainer": "grpo", **FAST, **CORRECTIONS["auto"]},
    **{
        f"{name}_{staleness}": {"trainer": "async_grpo", "max_staleness": staleness, **FAST, **correction}
        for staleness in (2, 8, 16)
        for name, correction in CORRECTIONS.items()
    },
}
SMOKE = ["synchronous", "auto_8"]


@dataclass(frozen=True)
class Run:
    """One seed of one arm."""

    arm: str
    seed: int
    steps: int
    every: int
    engine: str = ""  # each has one of its own

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"

    @property
    def settings(self) -> dict[str, Any]:
        return {**ARMS[self.arm], "seed": self.seed, "steps": self.steps, "every": self.every}


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two arms, one seed, few steps")
    parser.add_argument("--report", action="store_true", help="train nothing; table and figure of what is there")
    parser.add_argument("--arms", nargs="+", choices=ARMS, metavar="ARM", help=f"some of: {', '.join(ARMS)}")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0 1 2")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 100)")
    parser.add_argument("--every", type=int, help="optimizer steps between two looks (default: 10)")
    parser.add_argument("--accuracy", type=float, default=0.7, help="that is to be reached (default: 0.7)")
    parser.add_argument("--output_dir", type=Path, help="default: outputs/asynchronous, or outputs/asynchronous_smoke")
    args = parser.parse_args()
    args.arms = args.arms or (SMOKE if args.smoke else list(ARMS))
    args.seeds = args.seeds or ([0] if args.smoke else [0, 1, 2])
    args.steps = args.steps or (8 if args.smoke else 100)
    args.every = args.every or (4 if args.smoke else 10)
    args.output_dir = args.output_dir or ROOT / "outputs" / ("asynchronous_smoke" if args.smoke else "asynchronous")
    return args


def prepare(engine: str):
    from train import prepare  # torch and TRL, in the worker only

    prepare()


def train(run: Run) -> dict[str, Any]:
    from train import train

    return train(run.settings)


def main():
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when a worker imports torch
    args = parse_args()
    runs = [Run(arm, seed, args.steps, args.every) for seed in args.seeds for arm in args.arms]
    if not args.report:
        command = f"python benchmarks/asynchronous/run.py --steps {args.steps} --every {args.every}"
        train_missing(runs, args.output_dir / "runs", 1, command, prepare=prepare, train=train)
    found = load(args.output_dir / "runs", ARMS)
    if not found:
        sys.exit(f"There are no runs in {args.output_dir / 'runs'}.")
    print(table(found, args.accuracy))
    write(found, args.accuracy, args.output_dir)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Interrupted. The same command goes on from here.")
