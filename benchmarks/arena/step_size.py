"""
Effect of `rollout_lr_scaling: ess_sqrt` on the tuning tasks of the arena with stale samplers.

    python benchmarks/arena/step_size.py            # train what is missing, and print the table: an hour on one core
    python benchmarks/arena/step_size.py --report   # the table, of the runs there are
"""

import json
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1]))

from cells import ARMS, FAST, SLOW, Cell, Run
from harness import train_missing
from run import ROOT, prepare, train


SCALED = {"rollout_lr_scaling": "ess_sqrt"}
CELLS = {
    Cell("sort", "lag 8", SLOW): (0, 1, 2),
    Cell("sort", "lag 16", FAST): (0, 1, 2),
    Cell("copy_noise", "lag 8", FAST): (0, 1),
    Cell("copy_noise", "lag 16", SLOW): (0, 1),
}
KEY = "rollout_corr/lr_scale"


def runs() -> list[Run]:
    """Without correction and with token weights, each with whole and with scaled steps."""
    arms = [ARMS["none"], ARMS["token_is"]]
    arms += [replace(arm, name=f"{arm.name}_ess", options={**arm.options, **SCALED}) for arm in arms]
    return [Run(arm, cell, seed) for cell, seeds in CELLS.items() for arm in arms for seed in seeds]


def table(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Final accuracy by seed, accuracy over the course, and the mean factor of the learning rate: a line per cell and arm."""
    lines = [
        "| task, sampler | arm | accuracy at the end, by seed | over the course | `lr_scale` |",
        "| --- " * 5 + "|",
    ]
    by_line: dict[tuple[Cell, str], list[Mapping[str, Any]]] = {}
    for run in runs():
        if run.name in records:
            by_line.setdefault((run.cell, run.arm.name), []).append(records[run.name])
    for (cell, arm), found in by_line.items():
        ends = ", ".join(f"{fmean(record['accuracy'][-3:]):.2f}" for record in found)
        course = fmean(x for record in found for x in record["accuracy"][1:])
        scales = [x for record in found for x in record["history"].get(KEY, [])]
        scale = f"{fmean(scales):.2f}" if scales else "-"
        lines.append(f"| {cell.task}, {cell.sampler} | `{arm}` | {ends} | {course:.2f} | {scale} |")
    return "\n".join(lines)


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--workers", type=int, default=2, help="processes that train, each on one core (default: 2)")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs/arena/step_size")
    return parser.parse_args()


def main():
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when a worker imports torch
    args = parse_args()
    if not args.report:
        command = "python benchmarks/arena/step_size.py"
        train_missing(runs(), args.output_dir, args.workers, command, prepare=prepare, train=train)
    found = {path.stem: json.loads(path.read_text()) for path in args.output_dir.glob("*.json")}
    print(table(found))


if __name__ == "__main__":
    main()
