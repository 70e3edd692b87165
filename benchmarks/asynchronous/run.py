"""
What correction buys in asynchronous training: time. Seconds of wall clock until a held-out accuracy is reached, against the
synchronous trainer, with and without correction, for samples of up to 2, 8 and 16 versions.

    python benchmarks/asynchronous/run.py             # every arm, three seeds
    python benchmarks/asynchronous/run.py --smoke     # two arms, one seed, few steps
    python benchmarks/asynchronous/run.py --report    # table of the runs there are

The task is that of the quickstart. One run at a time, as each of them is timed and uses two cores: vLLM's server and the
trainer when it is asynchronous, and both in turns when not. A run that is in the output folder is not done again. The machine
should have nothing else to do.
"""

import json
import os
import statistics
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import dataclass
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import train_missing


ROOT = Path(__file__).parents[2]
CORRECTIONS = {
    "none": {"rollout_correction": "disabled"},
    "weights": {"rollout_correction": "decoupled_token_is"},
    "weights_and_rejection": {
        "rollout_correction": "decoupled_geo_rs_token_tis",
        "rollout_rs_threshold": [0.95, 1.05],
    },
}
ARMS: dict[str, dict[str, Any]] = {
    "synchronous": {"trainer": "grpo", **CORRECTIONS["weights"]},
    **{
        f"{name}_{staleness}": {"trainer": "async_grpo", "max_staleness": staleness, **correction}
        for staleness in (2, 8, 16)
        for name, correction in CORRECTIONS.items()
    },
}
SMOKE = ["synchronous", "weights_8"]


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
    parser.add_argument("--report", action="store_true", help="train nothing; table of what is there")
    parser.add_argument("--arms", nargs="+", choices=ARMS, metavar="ARM", help=f"some of: {', '.join(ARMS)}")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0 1 2")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 160)")
    parser.add_argument("--every", type=int, help="optimizer steps between two looks (default: 10)")
    parser.add_argument("--accuracy", type=float, default=0.6, help="that is to be reached (default: 0.6)")
    parser.add_argument("--output_dir", type=Path, help="default: outputs/asynchronous, or outputs/asynchronous_smoke")
    args = parser.parse_args()
    args.arms = args.arms or (SMOKE if args.smoke else list(ARMS))
    args.seeds = args.seeds or ([0] if args.smoke else [0, 1, 2])
    args.steps = args.steps or (8 if args.smoke else 160)
    args.every = args.every or (4 if args.smoke else 10)
    args.output_dir = args.output_dir or ROOT / "outputs" / ("asynchronous_smoke" if args.smoke else "asynchronous")
    return args


def prepare(engine: str):
    from train import prepare  # torch and TRL, in the worker only

    prepare()


def train(run: Run) -> dict[str, Any]:
    from train import train

    return train(run.settings)


def report(folder: Path, target: float) -> str:
    """Medians over the seeds of each arm."""
    records: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        records.setdefault(path.stem.rsplit("-", 1)[0], []).append(json.loads(path.read_text()))
    rows = [
        f"| arm | seeds | seconds to {target:g} | step | seconds per step | accuracy at the end | mean age | too old |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm in [arm for arm in ARMS if arm in records]:
        found = records[arm]
        reached = [first(record, target) for record in found]
        seconds, steps = (
            f"{statistics.median(values):.0f}"
            if None not in (values := [at and at[i] for at in reached])
            else "not by all"
            for i in (0, 1)
        )
        rows.append(
            f"| {arm} | {len(found)} | {seconds} | {steps} | "
            f"{median(record['seconds_at'][-1] / record['steps'][-1] for record in found)} | "
            f"{median(record['accuracy'][-1] for record in found)} | "
            f"{median(average(record, 'staleness_mean') for record in found)} | "
            f"{median(average(record, 'stale_dropped/fraction') for record in found)} |"
        )
    return "\n".join(rows)


def first(record: dict[str, Any], target: float) -> tuple[float, int] | None:
    """Seconds and step of the first look at which the accuracy was reached."""
    looks = zip(record["accuracy"], record["seconds_at"], record["steps"], strict=True)
    return next(((seconds, step) for found, seconds, step in looks if found >= target), None)


def average(record: dict[str, Any], key: str) -> float:
    values = [entry[f"rollout_corr/{key}"] for entry in record["history"] if f"rollout_corr/{key}" in entry]
    return statistics.fmean(values) if values else 0.0


def median(values) -> str:
    return f"{statistics.median(values):.2f}"


def main():
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when a worker imports torch
    args = parse_args()
    runs = [Run(arm, seed, args.steps, args.every) for seed in args.seeds for arm in args.arms]
    if not args.report:
        command = f"python benchmarks/asynchronous/run.py --steps {args.steps} --every {args.every}"
        train_missing(runs, args.output_dir / "runs", 1, command, prepare=prepare, train=train)
    print(report(args.output_dir / "runs", args.accuracy))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Interrupted. The same command goes on from here.")
