"""
Cost of a log over many processes: one gather of one vector, and how that grows.

    python benchmarks/gather.py

Processes on this machine that talk through gloo each hold what a trainer counts of a batch; timed are the gather, and what
turns gathered vectors into metrics. The latter is also timed for up to 512 vectors, which needs no processes. On paper, a log
over `n` ranks takes that time, plus `n` vectors through a network of a given bandwidth. More processes than cores mostly wait
for each other: their times say little about a machine with a device per rank.
"""

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from tables import GATHER, ON_PAPER, markdown
from torch.multiprocessing import spawn

from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.correction.accounting import account
from trl_rollout_corr.correction.age import Staleness, count_ages, engine_gap
from trl_rollout_corr.correction.sums import Sums
from trl_rollout_corr.recording.observer import LoggingWindow


CONFIGS = {
    "token weights": {"rollout_is": "token"},
    "weights, three criteria": {
        "rollout_is": "sequence",
        "rollout_is_batch_normalize": True,
        "rollout_rs": ["token_k1", "seq_mean_k1", "seq_max_k3"],
        "rollout_rs_threshold": [[0.5, 2.0], [0.99, 1.01], 1.0],
    },
}
PAPER = (8, 64, 512)  # ranks to extrapolate to


def sums_of_a_batch(fields: dict, seed: int) -> list[Sums]:
    """The sums of a trainer at the first visit of a batch."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(8, 512, generator=generator)
    train = rollout + 0.02 * torch.randn(8, 512, generator=generator)
    config, mask, ones = RolloutCorrectionConfig(**fields), torch.ones(8, 512, dtype=torch.bool), torch.ones(8)
    correction = compute_rollout_correction(train, rollout, mask, config, advantages=ones)
    accounts = account(correction.valid, correction.keep, correction.coefficients, ones, ones)
    return [
        correction.statistics,
        accounts,
        Staleness.of(count_ages(ones) | engine_gap(correction.statistics)),
    ]


def work(rank: int, ranks: int, port: int, rounds: int, path: str):
    """One process: log as the trainers do, again and again."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    found = {}
    for name, fields in CONFIGS.items():
        parts = sums_of_a_batch(fields, seed=rank)
        times = {"gather": [], "finish": []}
        for _ in range(rounds):
            window = LoggingWindow(accelerator)
            for part in parts:
                window.add(part)
            accelerator.wait_for_everyone()
            start = time.perf_counter()
            gathered = window.close(step=0)
            middle = time.perf_counter()
            for part in gathered:
                part.finish()
            times["gather"].append(middle - start)
            times["finish"].append(time.perf_counter() - middle)
        found[name] = {"sent_kb": sum(part.vector.numel() * part.vector.element_size() for part in parts) / 1e3}
        found[name] |= {f"{key}_ms": 1000 * statistics.median(values) for key, values in times.items()}
    if rank == 0:
        Path(path).write_text(json.dumps(found))
    accelerator.wait_for_everyone()
    accelerator.end_training()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def finishing_ms(fields: dict, ranks: int, rounds: int) -> float:
    """Median milliseconds from the vectors of so many ranks to metrics."""
    parts = [(part, torch.stack([part.vector] * ranks)) for part in sums_of_a_batch(fields, seed=0)]
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for part, vectors in parts:
            part.combine(vectors).finish()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--bandwidth", type=float, default=1.0, help="Of the network on paper, in GB/s.")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--output", type=Path, help="Where to write the results as JSON.")
    args = parser.parse_args()
    measured, extrapolated = [], []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            path = f"{folder}/{ranks}"
            spawn(work, (ranks, free_port(), args.rounds, path), nprocs=ranks)
            found = json.loads(Path(path).read_text())
            measured += [{"config": name, "ranks": ranks, **row} for name, row in found.items()]
    for row in measured[: len(CONFIGS)]:
        for ranks in PAPER:
            received = row["sent_kb"] * ranks / 1e3
            network = 1000 * received / (args.bandwidth * 1e3)
            finishing = finishing_ms(CONFIGS[row["config"]], ranks, args.rounds)
            of_ranks = {"received_mb": received, "network_ms": network, "finish_ms": finishing}
            extrapolated.append({"config": row["config"], "ranks": ranks, **of_ranks})
    print(markdown(measured, GATHER))
    print(f"\nOn paper, over a network of {args.bandwidth:g} GB/s:\n\n{markdown(extrapolated, ON_PAPER)}")
    if args.output:
        setting = {"torch": torch.__version__, "cores": os.cpu_count(), "rounds": args.rounds}
        results = {"setting": setting, "rows": measured, "on_paper": extrapolated}
        args.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
