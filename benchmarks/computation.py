"""
The computation alone, against verl's helper on the same tensors: time, host synchronisations and memory.

    python benchmarks/computation.py
    python benchmarks/computation.py --device cuda --shapes 512x32768

Weights, keep-mask and every metric of a batch of completions with ragged lengths, float32. The two are timed in turns, and
beside them the accounting by group, which verl does not have, and one pass that only reads the inputs, the least that any
implementation must do.
"""

import argparse
import json
import platform
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import verl_helper
from tables import COMPUTATION, markdown
from torch.utils._python_dispatch import TorchDispatchMode

from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.correction.groups import add_up_groups


SHAPES = ("64x2048", "256x8192", "256x32768")
GROWTH = ("64x8192", "128x8192", "256x8192", "512x8192")  # time should be linear in the number of tokens
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


def make_batch(shape: str, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of trainer and sampler, and a mask of completions of ragged lengths."""
    rows, length = map(int, shape.split("x"))
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(rows, length, generator=generator) * 3
    train = rollout + 0.02 * torch.randn(rows, length, generator=generator)
    lengths = torch.randint(length // 8, length + 1, (rows, 1), generator=generator)
    mask = torch.arange(length).expand(rows, -1) < lengths
    return train.to(device), rollout.to(device), mask.to(device)


def contestants(batch: tuple, case: dict, verl) -> dict[str, Callable]:
    """What is timed, by name. `verl` is the module of verl's helper, or `None` to do without."""
    train, rollout, mask = batch
    config = RolloutCorrectionConfig(**case)
    generator = torch.Generator().manual_seed(1)
    advantages, rewards = (torch.randn(len(mask), generator=generator).to(mask.device) for _ in range(2))

    def ours():
        return compute_rollout_correction(train, rollout, mask, config)

    def accounted():
        correction = ours()
        return correction, add_up_groups(
            correction.valid, correction.keep, correction.coefficients, advantages, rewards
        )

    def theirs():
        weights, keep, metrics = verl.compute_rollout_correction_and_rejection_mask(train, rollout, mask, **case)
        return weights, keep, metrics | verl.compute_offpolicy_metrics(train, rollout, mask)

    def read():
        return train.sum(), rollout.sum(), mask.sum()

    found = {"read": read, "ours": ours, "accounted": accounted}
    return found if verl is None else {**found, "verl": theirs}


def seconds(function: Callable, device: str) -> float:
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def interleaved(functions: dict[str, Callable], device: str, rounds: int) -> dict[str, float]:
    """Median seconds of each, timed in turns."""
    times = {name: [] for name in functions}
    for round_ in range(rounds + 1):
        for name, function in functions.items():
            spent = seconds(function, device)
            if round_:  # the first warms up
                times[name].append(spent)
    return {name: statistics.median(values) for name, values in times.items()}


class HostReads(TorchDispatchMode):
    """Counts the operators through which the host waits for a value."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += str(function).startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select"))
        return function(*args, **(kwargs or {}))


class LiveMemory(TorchDispatchMode):
    """Follows the bytes of all tensors that operators make, and their peak."""

    def __init__(self):
        super().__init__()
        self.tensors, self.bytes, self.peak = Counter(), 0, 0

    def release(self, storage: int, size: int):
        self.tensors[storage] -= 1
        if not self.tensors[storage]:
            del self.tensors[storage]
            self.bytes -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in output if isinstance(output, (tuple, list)) else (output,):
            if not isinstance(x, torch.Tensor):
                continue
            storage, size = x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
            if storage in inputs and storage not in self.tensors:
                continue  # a view of an argument from outside
            if not self.tensors[storage]:
                self.bytes += size
                self.peak = max(self.peak, self.bytes)
            self.tensors[storage] += 1
            weakref.finalize(x, self.release, storage, size)
        return output


def host_reads(function: Callable) -> int:
    with HostReads() as reads:
        function()
    return reads.count


def peak_tensors(function: Callable, shape: tuple[int, int], device: str) -> float:
    """Largest extra memory, in float32 tensors of the batch's shape."""
    size = 4 * shape[0] * shape[1]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = function()
        del kept
        return (torch.cuda.max_memory_allocated() - before) / size
    with LiveMemory() as memory:
        kept = function()
    del kept
    return memory.peak / size


@contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(shape: str, case: str, device: str, rounds: int, verl) -> dict:
    batch = make_batch(shape, device)
    functions = contestants(batch, CASES[case], verl)
    times = interleaved(functions, device, rounds)
    compared = [name for name in ("ours", "verl") if name in functions]
    return {
        "shape": shape,
        "case": case,
        **{f"{name}_ms": 1000 * value for name, value in times.items()},
        **({"verl_over_ours": times["verl"] / times["ours"]} if "verl" in times else {}),
        "ours_over_read": times["ours"] / times["read"],
        **{f"{name}_host_reads": host_reads(functions[name]) for name in compared},
        **{f"{name}_peak_tensors": peak_tensors(functions[name], batch[0].shape, device) for name in compared},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES, *GROWTH])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--wheel_folder", type=Path, default=Path(".cache/verl"))
    parser.add_argument("--output", type=Path, help="Where to write the results as JSON.")
    args = parser.parse_args()

    args.wheel_folder.mkdir(parents=True, exist_ok=True)
    verl = verl_helper.load(args.wheel_folder)
    rows = []
    with threads(args.threads) if args.device == "cpu" else nullcontext():
        for shape in dict.fromkeys(args.shapes):
            for case in args.cases:
                if shape in GROWTH and shape not in SHAPES and case != "token":
                    continue
                rows.append(measure(shape, case, args.device, args.rounds, verl))
                print(f"{shape}, {case}: done", flush=True)
    print(f"\n{markdown(rows, COMPUTATION)}")
    if args.output:
        setting = {"torch": torch.__version__, "verl": verl_helper.VERSION, "python": platform.python_version()}
        setting |= {"device": args.device, "threads": args.threads, "rounds": args.rounds}
        args.output.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
