"""
The computation alone, against verl's helper on the same tensors: time and host synchronisations.

    python benchmarks/computation.py
    python benchmarks/computation.py --shapes 512x32768

Weights, keep-mask and every metric of a batch of completions with ragged lengths, in float32, timed in turns. Metrics are
numbers in both, so that the host reads them.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import verl_helper
from tables import COMPUTATION, markdown
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction


SHAPES = ("64x2048", "256x8192", "256x32768")
CASES = {
    "token": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "sequence, normalised": {
        "rollout_is": "sequence",
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": True,
    },
    "token, two criteria": {
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_rs": "token_k1,seq_max_k2",
        "rollout_rs_threshold": "0.6_1.6,2.5",
    },
}


def make_batch(shape: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of trainer and sampler, and a mask of completions of ragged lengths."""
    rows, length = map(int, shape.split("x"))
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(rows, length, generator=generator) * 3
    train = rollout + 0.02 * torch.randn(rows, length, generator=generator)
    lengths = torch.randint(length // 8, length + 1, (rows, 1), generator=generator)
    mask = torch.arange(length).expand(rows, -1) < lengths
    return train, rollout, mask


def contestants(batch: tuple, case: dict, verl) -> dict[str, Callable]:
    """What is timed, by name. `verl` is the module of verl's helper."""
    train, rollout, mask = batch
    config = RolloutCorrectionConfig(**case)

    def ours():
        correction = compute_rollout_correction(train, rollout, mask, config)
        return correction, correction.metrics()  # verl's helper reads its metrics, too

    def theirs():
        weights, keep, metrics = verl.compute_rollout_correction_and_rejection_mask(train, rollout, mask, **case)
        return weights, keep, metrics | verl.compute_offpolicy_metrics(train, rollout, mask)

    return {"ours": ours, "verl": theirs}


def interleaved(functions: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each, timed in turns."""
    times = {name: [] for name in functions}
    for round_ in range(rounds + 1):
        for name, function in functions.items():
            start = time.process_time()
            function()
            if round_:  # the first warms up
                times[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


class HostReads(TorchDispatchMode):
    """Counts the operators through which the host waits for a value."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += str(function).startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select"))
        return function(*args, **(kwargs or {}))


class ListReads(TorchFunctionMode):
    """Counts tensors that become lists, each of which is one wait. On a CPU no operator is seen then."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.Tensor.tolist
        return function(*args, **(kwargs or {}))


def host_reads(function: Callable) -> int:
    with HostReads() as reads, ListReads() as lists:
        function()
    return reads.count + lists.count


def measure(shape: str, case: str, rounds: int, verl) -> dict:
    batch = make_batch(shape)
    functions = contestants(batch, CASES[case], verl)
    times = interleaved(functions, rounds)
    return {
        "shape": shape,
        "case": case,
        **{f"{name}_ms": 1000 * value for name, value in times.items()},
        "verl_over_ours": times["verl"] / times["ours"],
        **{f"{name}_host_reads": host_reads(functions[name]) for name in ("ours", "verl")},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="Where to write the results as JSON.")
    args = parser.parse_args()

    verl, rows = verl_helper.load(), []
    torch.set_num_threads(1)
    for shape in args.shapes:
        for case in CASES:
            rows.append(measure(shape, case, args.rounds, verl))
            print(f"{shape}, {case}: done", flush=True)
    print(f"\n{markdown(rows, COMPUTATION)}")
    if args.output:
        setting = {
            "torch": torch.__version__,
            "verl": verl_helper.VERSION,
            "python": platform.python_version(),
            "rounds": args.rounds,
        }
        args.output.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
