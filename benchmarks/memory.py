"""
Peaks of memory: TRL alone, this package, and completions that this package scores once more after a push.

    python benchmarks/memory.py --output benchmarks/results/memory.json

A model of random weights whose vocabulary is large, so that logits are what takes memory. A micro-batch is one long
completion. Its tokens are drawn at random and not by vLLM, which would take long and little memory. The weights are pushed
to a colocated vLLM, which scores texts before the first update and after it.

A new process of each round trains all arms in turns. The kernel keeps the largest resident memory of a process and can be
told to begin anew, which is done when a training begins, and before and after texts are scored. So there is a peak of the
training and one of the scores, both on top of what the process had when the training began. Medians over the rounds are
reported, and ratios to TRL without correction.

What a CPU cannot show: a GPU has other kernels, and vLLM reserves its share of the memory at the start.
"""

import argparse
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from functools import wraps
from pathlib import Path
from typing import Any


ARMS = {
    "TRL, no correction": {"vllm_importance_sampling_correction": False},
    "TRL's correction": {},
    "trl": {"rollout_correction": "trl"},
    "auto": {"rollout_correction": "auto"},
    "metrics only": {"rollout_correction": "auto", "rollout_metrics_only": True},
}
BASELINE = "TRL, no correction"
VOCABULARY = 151_936  # that of Qwen2.5
STEPS = 2
MIB, MARK = 2**20, "peaks:"
# At another temperature than 1, a text needs a head of its own, because it is scored at 1
CASES = [(1.0, BASELINE), (1.0, "auto"), (0.7, BASELINE), (0.7, "auto"), (1.0, "trl"), (1.0, "metrics only")]
CASES.append((1.0, "TRL's correction"))


class Peaks:
    """Largest resident memory of this process, of the training and of the scores in it."""

    def __init__(self):
        self.training = self.scores = self.start = self.looks = 0

    @staticmethod
    def _read(name: str) -> int:
        """A number of the process in bytes."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

    @classmethod
    def _take(cls) -> int:
        """The peak so far, which begins anew."""
        peak = cls._read("VmHWM")
        Path("/proc/self/clear_refs").write_text("5")
        return peak

    def begin(self):
        self._take()
        self.start = self._read("VmRSS")

    def apart(self, look: Any) -> Any:
        @wraps(look)
        def measured(rescore: Any) -> None:
            self.end()
            look(rescore)
            self.scores, self.looks = max(self.scores, self._take()), rescore.looks

        return measured

    def end(self):
        self.training = max(self.training, self._take())


def measure(name: str, temperature: float, length: int, model: Path) -> dict[str, Any]:
    """Peaks of an arm in bytes, on top of the memory at the start of the training."""
    from unittest.mock import patch

    import step
    from transformers import TrainerCallback

    from trl_rollout_corr.pushes.rescore import Rescore

    peaks = Peaks()
    step.CONTESTANTS[name] = (*(step.GRPO if "TRL" in name else step.OUR_GRPO), ARMS[name])

    class Begin(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            peaks.begin()

    fields = {"temperature": temperature, "num_generations": 2, "gradient_accumulation_steps": 2}
    fields["vllm_max_model_length"] = 4096  # one engine for all
    with patch.object(Rescore, "_look", peaks.apart(Rescore._look)):
        trainer, _ = step.build(name, model, length, 1, STEPS, **fields)
        trainer.add_callback(Begin())
        trainer.train()
        peaks.end()
    scores = peaks.scores - peaks.start if peaks.scores else 0
    return {"training": peaks.training - peaks.start, "scores": scores, "start": peaks.start, "looks": peaks.looks}


def measure_all(cases: list[tuple[float, str]], length: int, hidden: int) -> None:
    """Measure arms in turns, and print the peaks of each."""
    import step
    from trl.generation.vllm_generation import VLLMGeneration

    step.share_one_engine()
    VLLMGeneration.generate = wraps(VLLMGeneration.generate)(drawn_at_random)  # with its signature
    with tempfile.TemporaryDirectory() as folder:
        options = {"intermediate_size": 2 * hidden, "max_position_embeddings": 8192, "tie_word_embeddings": True}
        model = step.make_model(Path(folder), hidden, layers=2, vocab_size=VOCABULARY, **options)
        measure(BASELINE, 1.0, 16, model)  # the first training of a process takes what later ones reuse
        for temperature, name in cases:
            gc.collect()
            print(MARK, json.dumps([temperature, name, measure(name, temperature, length, model)]), flush=True)


def drawn_at_random(generation: Any, prompts: list[list[int]], *args: Any, **kwargs: Any) -> tuple:
    """What vLLM's `generate` returns, with tokens that are drawn at random."""
    dice, length = random.Random(0), generation.max_completion_length
    completions = [[dice.randrange(20, VOCABULARY) for _ in range(length)] for _ in prompts]
    logps = [[[-math.log(VOCABULARY)] for _ in ids] for ids in completions]
    return prompts, completions, logps, [[[token] for token in ids] for ids in completions]


def rows_of_peaks(measured: dict[tuple[float, str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row of each arm: medians over the rounds, in MiB."""
    median = {
        case: {what: statistics.median(peaks[what] for peaks in of_case) for what in of_case[0]}
        for case, of_case in measured.items()
    }
    rows = []
    for (temperature, name), m in median.items():
        base = median[temperature, BASELINE]["training"]
        row = {"arm": name, "temperature": temperature, "looks": int(m["looks"]), "start_mib": round(m["start"] / MIB)}
        for what in ("training", "scores"):
            row |= {f"{what}_mib": round(m[what] / MIB), f"{what}_ratio": f"{m[what] / base:.3f}"}
        rows.append(row if m["scores"] else {**row, "scores_mib": "", "scores_ratio": ""})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", action="store_true", help="Measure one round in this process.")
    parser.add_argument("--completion_length", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="Where to write the results as JSON.")
    args = parser.parse_args()
    if args.here:
        measure_all(CASES, args.completion_length, args.hidden)
        return
    from tables import MEMORY, markdown

    measured: dict[tuple[float, str], list[dict[str, Any]]] = {}
    # blocks above 1 MiB go back to the kernel when they are freed, so that no arm uses what another one has left
    environment = {**os.environ, "GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={MIB}"}
    shape = ["--completion_length", str(args.completion_length), "--hidden", str(args.hidden)]
    for _ in range(args.rounds):
        with subprocess.Popen(
            [sys.executable, __file__, "--here", *shape], stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            for line in filter(lambda line: line.startswith(MARK), process.stdout):
                temperature, name, peaks = json.loads(line.removeprefix(MARK))
                measured.setdefault((temperature, name), []).append(peaks)
                print(temperature, name, peaks, flush=True)
    rows = rows_of_peaks(measured)
    print(markdown(rows, MEMORY))
    if args.output:
        setting = {name: str(value) for name, value in vars(args).items() if name not in ("output", "here")}
        args.output.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
