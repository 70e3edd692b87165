"""
Record runs whose outcome is known, and see when the monitor's rules alarm.

    python benchmarks/monitor/record.py              # train what is missing, then write recorded.json and print the table
    python benchmarks/monitor/record.py --report     # train nothing

The runs are arms of `benchmarks/headline`, with a look at the held-out prompts every five steps. Each is a file in
`outputs/monitor/runs`, and one that is there is not done again.
"""

import json
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import replace
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "headline"))

from arms import ARMS, SEEDS, Run
from harness import train_missing
from leads import PREFIX, READ, margins, recorded, silent_runs, table
from run import prepare


HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EVAL_EVERY = 5
SEVERAL_SEEDS = ["none", "geo_rs_tis", "on_policy"]
ONE_SEED = ["rloo_none", "random_rs", "token_tis", "bypass", "rloo_geo_rs_tis", "fp8_none", "fp8_geo_rs_tis"]


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--arms", nargs="+", choices=[*SEVERAL_SEEDS, *ONE_SEED], metavar="ARM", help="default: all")
    parser.add_argument("--workers", type=int, default=2, help="processes that train (default: 2)")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs/monitor/runs", help="folder of the runs")
    parser.add_argument("--output", type=Path, default=HERE / "recorded.json", help="file to write")
    return parser.parse_args()


def choose_runs(arms: list[str] | None) -> list[Run]:
    """The runs of some arms. The monitor is off: the rules are applied afterwards."""
    runs = []
    for arm in ARMS:
        if arm.name in (arms or [*SEVERAL_SEEDS, *ONE_SEED]):
            silent = replace(arm, options={**arm.options, "rollout_monitor": None})
            runs += [Run(silent, seed) for seed in (SEEDS if arm.name in SEVERAL_SEEDS else SEEDS[:1])]
    return runs


def columns(log_history: list[dict[str, float]]) -> dict[str, list[float | None]]:
    """Inputs of the rules, and the reward, of every step: a list per metric, with None where it was not reported."""
    entries = [entry for entry in log_history if "loss" in entry]
    keys = ["step", "reward", *sorted(PREFIX + key for key in READ)]
    return {
        key: [float(f"{entry[key]:.5g}") if key in entry else None for entry in entries]
        for key in keys
        if any(key in entry for entry in entries)
    }


def record(run: Run) -> dict[str, Any]:
    """Train, with more looks and more of the log kept than in the headline experiment."""
    import train

    train.EVAL_EVERY, train.columns = EVAL_EVERY, columns
    return train.train(run)


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Runs by name, in the order of the arms."""
    paths = {run.name: folder / f"{run.name}.json" for run in choose_runs(None)}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def main():
    args = parse_args()
    if not args.report:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when a worker imports torch
        command = "python benchmarks/monitor/record.py"
        runs = choose_runs(args.arms)
        train_missing(runs, args.output_dir, args.workers, command, prepare=prepare, train=record)
    runs = recorded(load(args.output_dir))
    args.output.write_text(json.dumps(runs, separators=(",", ":")).replace('"runs"', '\n"runs"') + "\n")
    print(
        f"\n{table(runs)}\n\n{margins(runs, silent_runs(runs))}\n\n{args.output}: {args.output.stat().st_size / 1e6:.2f} MB"
    )


if __name__ == "__main__":
    main()
