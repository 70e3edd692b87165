"""
The arena: every way to correct, on tasks and samplers of many kinds.

    python benchmarks/arena/run.py --again grpo-sort-lag_32-faster cap3 0    # a published run: are the digits the same?
    python benchmarks/arena/run.py --stage third --options '{"rollout_correction": "decoupled_kpop"}'    # an arm of your own
    python benchmarks/arena/run.py --stage third                             # caps on the weights of bad tokens
    python benchmarks/arena/run.py --report --publish                        # write the results of all runs there are

A run that is in the output folder is not done again, so that the same command goes on where it was interrupted. `--again`
trains it all the same, and leaves the published one as it is. With several arms and seeds (`--again CELL cap3,auto 0,1`) all
of them are compared on one machine, and `--publish` adds them to `again.json`.
"""

import gc
import json
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1]))

import alarms
import archive
import picture
import report
import results
from harness import processor, train_all, train_missing, write
from plan import ARMS, STAGES, Arm, Run


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
    parser.add_argument(
        "--again",
        nargs=3,
        metavar=("CELL", "ARMS", "SEEDS"),
        help="train published runs anew, of arms and seeds with commas between them, and print both curves",
    )
    parser.add_argument(
        "--options",
        type=options_of,
        metavar="JSON",
        help="train an arm of your own in the cells of the stage, with seed 0 (or `--seeds`): fields of the configuration",
    )
    parser.add_argument("--name", default="own", help="name of that arm in files and tables (default: own)")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--publish", action="store_true", help="write results, tables, alarms, picture and archive")
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


def options_of(text: str) -> dict[str, Any]:
    """The fields of an arm, from JSON."""
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(options, dict):
        raise ArgumentTypeError(f'{text!r} has no fields. An example: \'{{"rollout_correction": "auto"}}\'')
    return options


def planned(stages: Sequence[str]) -> list[Run]:
    """The runs of some stages. A reference is that of the first of its cells, where it is done."""
    runs: dict[str, Run] = {}
    for run in (run for stage in stages for run in STAGES[stage]()):
        runs.setdefault(run.name, run)
    return [*runs.values()]


def the_run(cell: str, arm: str, seed: str) -> Run:
    """The run of a planned cell, an arm and a seed. The process ends if there is no such cell or arm."""
    cells = {run.cell.name: run for stage in STAGES.values() for run in stage()}
    for asked, known, what in ((cell, cells, "cell"), (arm, ARMS, "arm")):
        if asked not in known:
            near = " or ".join(get_close_matches(asked, known, n=3, cutoff=0.3))
            sys.exit(f"`--again`: {asked!r} is no {what} of `plan.py`. Did you mean {near or next(iter(known))}?")
    if ARMS[arm].past:
        sys.exit(
            f"`--again`: the package no longer has the rule of the arm {arm!r}. Its runs are in the archive alone."
        )
    if not seed.isdecimal():
        sys.exit(f"`--again`: the seed {seed!r} is no number, such as 0.")
    return replace(cells[cell], arm=ARMS[arm], seed=int(seed))


def do_again(runs: Sequence[Run], folder: Path):
    """Train runs of a cell, published or not, and print the curve of each next to that of the archive."""
    published = archive.read()
    print(f"Training {', '.join(run.name for run in runs)}. Starting vLLM takes half a minute.", flush=True)
    for run, record in train_all(runs, 1, prepare, train):
        if isinstance(record, BaseException):
            raise record
        path = folder / "again" / f"{run.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"cell": run.cell.name, "arm": run.arm.name, "seed": run.seed, "machine": processor()}
        write(path, {**about, **record})
        print(f"{report.curves(published.get(run.name), record)}\n\nThe log of every step is in {path}.", flush=True)


def own_runs(args: Namespace) -> list[Run]:
    """An arm of somebody's own in the cells of the chosen stages."""
    arm = Arm(args.name, args.options)
    runs = [replace(run, arm=arm, seed=seed) for run in planned(args.stage) for seed in args.seeds or [0]]
    return [*{run.name: run for run in runs if args.cells is None or run.cell.name in args.cells}.values()]


def main():
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when a worker imports torch
    args = parse_args()
    command = f"python benchmarks/arena/run.py --stage {' '.join(args.stage)}"
    folder = args.output_dir / "runs"
    if args.again:
        cell, arms, seeds = args.again
        do_again([the_run(cell, arm, seed) for seed in seeds.split(",") for arm in arms.split(",")], args.output_dir)
        return
    archive.unpack(folder)
    if args.options is not None:
        runs = own_runs(args)
        train_missing(runs, folder, args.workers, command, prepare=prepare, train=train)
        print(f"\n{results.beside_published(runs, folder)}")
        return
    chosen = [
        run
        for run in planned(args.stage)
        if not run.arm.past
        and (args.arms is None or run.arm.name in args.arms)
        and (args.cells is None or run.cell.name in args.cells)
        and (args.seeds is None or run.seed in args.seeds)
    ]
    if args.wanted:
        rows = [row for found in results.collect(folder).values() for row in found["rows"]]
        chosen = results.needed(chosen, rows)
    if not args.report:
        train_missing(chosen, folder, args.workers, command, prepare=prepare, train=train)
    found = results.collect(folder)
    for name, part in results.tables(found).items():
        print(f"\n{name}\n{part}")
    if args.publish:
        results.publish(found, folder)
        alarms.write(alarms.counted(alarms.replays()))
        picture.main()
        print("The pages of the documents quote these files: `make tables` writes them again.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Interrupted. The same command goes on from here.")
