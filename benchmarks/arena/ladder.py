"""
Where correction counts: per task and trainer, the lowest rung of the ladder at which a run without correction ends 0.1 below
one whose sampler is never behind, at the same learning rate.

    python benchmarks/arena/ladder.py              # climb, and write ladder.json: an hour or two on two cores
    python benchmarks/arena/ladder.py --report     # train nothing: what the runs there are say

Runs are kept where those of `run.py` are, which needs most of them again.
"""

import json
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1]))

from cells import ARMS, CLIMBS, LADDER, Cell, Run
from harness import missing, start_worker, write
from run import ROOT, prepare, train


LOSS = 0.1
FIRST = 2  # where most tasks are first hurt
OUTPUT = Path(__file__).parent / "ladder.json"
Accuracies = Mapping[str, float]  # of runs, by name


def runs_at(task: str, algorithm: str, rung: int) -> tuple[Run, Run]:
    """What is compared at a rung: the reference, and no correction."""
    cell = Cell(task, LADDER[rung], algorithm)
    return Run(ARMS["on_policy"], cell), Run(ARMS["none"], cell)


def loss_at(task: str, algorithm: str, rung: int, known: Accuracies) -> float | None:
    """How much no correction loses at a rung, if it is known."""
    reference, none = (known.get(run.name) for run in runs_at(task, algorithm, rung))
    return None if reference is None or none is None else reference - none


def climbed(task: str, algorithm: str, known: Accuracies) -> tuple[int | None, list[Run]]:
    """
    The lowest rung at which no correction loses, and the runs that are needed next to tell.

    Args:
        task (`str`):
            Name of the task.
        algorithm (`str`):
            `"grpo"` or `"rloo"`.
        known (`Mapping[str, float]`):
            Accuracy at the end of the runs that are done, by name.

    Returns:
        `tuple[int or None, list[Run]]`: the rung, settled if no run is needed; `None` if not even the highest one hurts.
    """
    low, high = -1, len(LADDER)  # does not hurt, hurts
    rung = (climbed(task, "grpo", known)[0] or FIRST) if algorithm == "rloo" else FIRST
    while high - low > 1:
        loss = loss_at(task, algorithm, rung, known)
        if loss is None:
            return None, [run for run in runs_at(task, algorithm, rung) if run.name not in known]
        low, high = (low, rung) if loss >= LOSS else (rung, high)
        rung = min(low + 2, high - 1) if high == len(LADDER) and low < high - 2 else (low + high) // 2
    return (high if high < len(LADDER) else None), []


def accuracies(folder: Path) -> dict[str, float]:
    """Mean of the last three looks, of each run in a folder."""
    records = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return {name: mean(record["accuracy"][-3:]) for name, record in records.items()}


def climb(task: str, algorithm: str, folder: Path, lock: Any) -> int | None:
    """Train what is needed to find a rung, and return it."""
    rung, todo = climbed(task, algorithm, accuracies(folder))
    if not todo:
        return rung
    missing(todo, folder)  # complains about runs with other settings
    with ProcessPoolExecutor(1, get_context("spawn"), start_worker, (prepare, todo[0].engine, lock)) as pool:
        while todo:
            record = pool.submit(train, todo[0]).result()
            write(folder / f"{todo[0].name}.json", {**record, "command": "python benchmarks/arena/ladder.py"})
            print(f"{todo[0].name}: {mean(record['accuracy'][-3:]):.2f} in {record['seconds']:.0f} s", flush=True)
            rung, todo = climbed(task, algorithm, accuracies(folder))
    print(f"{algorithm} {task}: {'no rung hurts' if rung is None else LADDER[rung]}", flush=True)
    return rung


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--tasks", nargs="+", help="some of the tasks")
    parser.add_argument("--workers", type=int, default=2, help="processes that train, each on one core (default: 2)")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs/arena")
    return parser.parse_args()


def main():
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when a worker imports torch
    args = parse_args()
    folder = args.output_dir / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    climbs = [climb_ for climb_ in CLIMBS if args.tasks is None or climb_[0] in args.tasks]
    if not args.report:
        lock = get_context("spawn").Lock()
        with ThreadPoolExecutor(args.workers) as threads:
            for future in [threads.submit(climb, *names, folder, lock) for names in climbs]:
                future.result()
    known, found = accuracies(folder), {}
    for task, algorithm in CLIMBS:
        rung, todo = climbed(task, algorithm, known)
        losses = [loss_at(task, algorithm, i, known) for i in range(len(LADDER))]
        said = "?" if todo else "none" if rung is None else str(LADDER[rung])
        print(f"{algorithm} {task:12} {said:10}", *("   -" if x is None else f"{x:5.2f}" for x in losses))
        if not todo:
            found.setdefault(algorithm, {})[task] = rung
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Interrupted. The same command goes on from here.")
