"""Runs in several processes: each a file in a folder, so that the same command goes on where it was interrupted."""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from datetime import timedelta
from itertools import groupby
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.synchronize import Lock
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal
from socket import socket
from threading import Thread
from traceback import print_exception
from typing import Any, Protocol


Record = dict[str, Any]


class Run(Protocol):
    """One training run. Runs of one engine share it within a process; `settings` decide the outcome, apart from the seed."""

    name: str
    engine: str
    settings: dict[str, Any]


# Workers -------------------------------------------------------------------------------------------------------------


def start_worker(prepare: Callable[[str], None], engine: str, one_at_a_time: Lock):
    """Make a new process ready for runs."""
    signal(SIGINT, SIG_IGN)  # the parent ends its workers
    Thread(target=leave_with_parent, daemon=True).start()
    os.environ["MASTER_PORT"] = str(free_port())  # that of accelerate and vLLM; by default the same in every process
    with one_at_a_time:  # the first warms up the model for all
        prepare(engine)


def free_port() -> int:
    with socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def leave_with_parent():
    parent_process().join()
    os._exit(1)


def train_all(
    runs: Sequence[Run], workers: int, prepare: Callable[[str], None], train: Callable[[Any], Record]
) -> Iterator[tuple[Run, Record | BaseException]]:
    """
    Train in several processes, in the order of the runs, and yield each run with its record, or with what stopped it. A new
    process starts where the engine changes.
    """
    context = get_context("spawn")
    lock = context.Lock()
    for engine, consecutive in groupby(runs, key=lambda run: run.engine):
        group = [*consecutive]
        pool = ProcessPoolExecutor(min(workers, len(group)), context, start_worker, (prepare, engine, lock))
        try:
            futures = {pool.submit(train, run): run for run in group}
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


def missing(runs: Sequence[Run], folder: Path) -> list[Run]:
    """Runs that are not in the folder. The process ends if one of the same name has other settings."""
    absent = []
    for run in runs:
        path = folder / f"{run.name}.json"
        if not path.exists():
            absent.append(run)
        elif json.loads(path.read_text())["settings"] != run.settings:
            sys.exit(f"{path} was made with other settings. Delete it, or choose another `--output_dir`.")
    return absent


def processor() -> str:
    """Model of the processor, which decides the last digits of a run."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write(path: Path, record: Record):
    """Write a file that is complete whenever it exists."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(record))
    os.replace(unfinished, path)


def train_missing(
    runs: Sequence[Run],
    folder: Path,
    workers: int,
    command: str,
    *,
    prepare: Callable[[str], None],
    train: Callable[[Any], Record],
):
    """Train what is not in the folder. The process ends at the end if a run failed."""
    folder.mkdir(parents=True, exist_ok=True)
    todo = missing(runs, folder)
    print(f"{len(todo)} of {len(runs)} runs to do. Starting vLLM takes half a minute.", flush=True)
    start, done, failed = time.perf_counter(), len(runs) - len(todo), []
    for run, record in train_all(todo, workers, prepare, train):
        if isinstance(record, BaseException):
            failed.append(run.name)
            print(f"{run.name} failed", file=sys.stderr)
            print_exception(record)
            continue
        write(folder / f"{run.name}.json", {**record, "command": command})
        done += 1
        print(
            f"[{done:>2}/{len(runs)}] {run.name} "
            f"accuracy {record['accuracy'][0]:.2f} -> {record['accuracy'][-1]:.2f} in {record['seconds']:>3.0f} s;  "
            f"elapsed {timedelta(seconds=round(time.perf_counter() - start))}",
            flush=True,
        )
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}. The same command tries them again.")
