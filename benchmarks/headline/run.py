"""
What a stale and a low-precision sampler do to training, and what rollout correction does about it.

    python benchmarks/headline/run.py             # every arm, three seeds
    python benchmarks/headline/run.py --smoke     # three arms, one seed, about two minutes
    python benchmarks/headline/run.py --report    # table, claims and figure of the runs there are

A run that is in the output folder is not done again, so that the same command goes on where it was interrupted.
"""

import json
import os
import shutil
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from datetime import timedelta
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.synchronize import Lock
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal
from socket import socket
from threading import Thread
from traceback import print_exception
from typing import Any

from arms import ARMS, SEEDS, SMOKE_ARMS, SMOKE_STEPS, Run, choose_runs
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


# Workers -------------------------------------------------------------------------------------------------------------


def start_worker(kv_cache_dtype: str, one_at_a_time: Lock):
    """Make a new process ready for runs."""
    signal(SIGINT, SIG_IGN)  # the parent ends its workers
    Thread(target=leave_with_parent, daemon=True).start()
    os.environ["MASTER_PORT"] = str(free_port())  # that of accelerate and vLLM; by default the same in every process
    from train import prepare  # torch and vLLM, in the workers only

    with one_at_a_time:  # the first warms up the model for all
        prepare(kv_cache_dtype)


def free_port() -> int:
    with socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def leave_with_parent():
    parent_process().join()
    os._exit(1)


def train_in_worker(run: Run) -> dict[str, Any]:
    from train import train

    return train(run)


def train_all(runs: list[Run], workers: int) -> Iterator[tuple[Run, dict[str, Any] | Exception]]:
    """Train in several processes, and yield each run with its record, or with what stopped it."""
    context = get_context("spawn")
    lock = context.Lock()
    for kv_cache_dtype in dict.fromkeys(run.arm.kv_cache_dtype for run in runs):
        group = [run for run in runs if run.arm.kv_cache_dtype == kv_cache_dtype]
        pool = ProcessPoolExecutor(min(workers, len(group)), context, start_worker, (kv_cache_dtype, lock))
        try:
            futures = {pool.submit(train_in_worker, run): run for run in group}
            for future in as_completed(futures):
                error = future.exception()
                if isinstance(error, BrokenExecutor):  # a worker died, and its pool with it
                    raise error
                yield futures[future], error or future.result()
        except BaseException:  # an interrupt: do not wait for the runs that are going on
            for process in active_children():
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


# Runs ----------------------------------------------------------------------------------------------------------------


def missing(runs: list[Run], folder: Path) -> list[Run]:
    """
    Runs that are not in the folder.

    Raises:
        `SystemExit`: if the folder has a run of the same name with other settings.
    """
    absent = []
    for run in runs:
        path = folder / f"{run.name}.json"
        if not path.exists():
            absent.append(run)
        elif json.loads(path.read_text())["settings"] != run.arm.settings:
            sys.exit(f"{path} was made with other settings. Delete it, or choose another `--output_dir`.")
    return absent


def write(path: Path, record: dict[str, Any]):
    """Write a file that is complete whenever it exists."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(record))
    os.replace(unfinished, path)


def train_missing(runs: list[Run], folder: Path, workers: int, command: str):
    """
    Train what is not in the folder.

    Raises:
        `SystemExit`: if a run failed, after the others are done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    todo = missing(runs, folder)
    print(f"{len(todo)} of {len(runs)} runs to do. Starting vLLM takes half a minute.", flush=True)
    start, records, failed = time.perf_counter(), [], []
    for run, record in train_all(todo, workers):
        if isinstance(record, Exception):
            failed.append(run.name)
            print(f"{run.name} failed", file=sys.stderr)
            print_exception(record)
            continue
        write(folder / f"{run.name}.json", {**record, "command": command})
        records.append(record)
        print(
            f"[{len(runs) - len(todo) + len(records):>2}/{len(runs)}] {run.name:<17} "
            f"accuracy {record['accuracy'][0]:.2f} -> {record['accuracy'][-1]:.2f} in {record['seconds']:>3.0f} s;  "
            f"elapsed {rounded(time.perf_counter() - start)}, left {rounded(time_left(todo, records, workers))}",
            flush=True,
        )
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}. The same command tries them again.")


def time_left(todo: list[Run], records: list[dict[str, Any]], workers: int) -> float:
    """Seconds, at the speed of the runs so far. In proportion to steps, as runs differ in length."""
    steps = sum(record["settings"]["steps"] for record in records)
    speed = steps / sum(record["seconds"] for record in records)
    return (sum(run.arm.steps for run in todo) - steps) / speed / workers


def rounded(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))


def main():
    # Read when a worker imports torch, and by the libraries it starts with. The quickstart sets vLLM's.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    args = parse_args()
    runs_folder = args.output_dir / "runs"
    if not args.report:
        train_missing(choose_runs(args.arms, args.seeds, args.steps), runs_folder, args.workers, args.command)
    write_report(args.output_dir)
    if args.commit_results:
        for name in ("results.json", "headline.png"):
            shutil.copy(args.output_dir / name, HERE / name)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Interrupted. The same command goes on from here.")
