"""
What a log costs over many processes: one gather of one vector, and how that grows.

    python benchmarks/gather.py

Processes on this machine that talk through gloo each hold the statistics of a batch; timed are the gather, and what turns
gathered vectors into metrics. The latter is also timed for up to 512 vectors, which needs no processes. On paper, a log over
`n` ranks takes that time, plus `n` vectors through a network of a given bandwidth. More processes than cores mostly wait for
each other: their times say little about a machine with a device per rank.
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
import torch.distributed as dist
from torch.multiprocessing import spawn

from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction


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


def batch_statistics(config: RolloutCorrectionConfig, seed: int):
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(8, 512, generator=generator)
    train = rollout + 0.02 * torch.randn(8, 512, generator=generator)
    return compute_rollout_correction(train, rollout, torch.ones(8, 512), config).statistics


def work(rank: int, ranks: int, port: int, rounds: int, path: str):
    """One process: log as the trainers do, again and again."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    found = {}
    for name, fields in CONFIGS.items():
        part = batch_statistics(RolloutCorrectionConfig(**fields), seed=rank)
        gathered = [torch.empty_like(part.vector) for _ in range(ranks)]
        times = {"gather": [], "finish": []}
        for _ in range(rounds):
            dist.barrier()
            start = time.perf_counter()
            dist.all_gather(gathered, part.vector)
            middle = time.perf_counter()
            part.combine(torch.stack(gathered)).finish()
            times["gather"].append(middle - start)
            times["finish"].append(time.perf_counter() - middle)
        found[name] = {"bytes": part.vector.numel() * part.vector.element_size()}
        found[name] |= {f"{key}_ms": 1000 * statistics.median(values) for key, values in times.items()}
    if rank == 0:
        Path(path).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def finishing_ms(fields: dict, ranks: int, rounds: int) -> float:
    """Median milliseconds from the vectors of so many ranks to metrics."""
    part = batch_statistics(RolloutCorrectionConfig(**fields), seed=0)
    vectors, times = torch.stack([part.vector] * ranks), []
    for _ in range(rounds):
        start = time.perf_counter()
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
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            path = f"{folder}/{ranks}"
            spawn(work, (ranks, free_port(), args.rounds, path), nprocs=ranks)
            rows += [
                {"config": name, "ranks": ranks, "received": found["bytes"] * (ranks - 1), **found}
                for name, found in json.loads(Path(path).read_text()).items()
            ]
    for name in CONFIGS:
        mine = [row for row in rows if row["config"] == name]
        print(f"\n{name}: {mine[0]['bytes']} bytes sent per rank and log")
        for row in mine:
            print(f"  {row['ranks']:>4} ranks  gather {row['gather_ms']:.2f} ms  to numbers {row['finish_ms']:.2f} ms")
        for ranks in PAPER:
            finishing = finishing_ms(CONFIGS[name], ranks, args.rounds)
            received = mine[0]["bytes"] * ranks
            network = 1000 * received / (args.bandwidth * 1e9)
            print(
                f"  {ranks:>4} ranks on paper: {received / 1e6:.2f} MB received, {network:.2f} ms at {args.bandwidth} GB/s; "
                f"to numbers, measured: {finishing:.2f} ms"
            )
            rows.append(
                {"config": name, "ranks": ranks, "received": received, "network_ms": network, "finish_ms": finishing}
            )
    if args.output:
        setting = {"torch": torch.__version__, "cores": os.cpu_count(), "rounds": args.rounds}
        args.output.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
