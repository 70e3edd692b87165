"""
Training with a sampler that vLLM quantises at each push, on a CPU: the gap, the score, and what the correction does about it.

    python benchmarks/quantised.py              # writes benchmarks/results/quantised.json, and prints the table

The task is that of the quickstart (`examples/sorting.py`). All runs are in one process with one engine per sampler. A CPU
computes 8 bits in float32, so tokens per second say nothing about a GPU: `benchmarks/gpu.py` measures there.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any


sys.path += [str(Path(__file__).parents[1] / name) for name in ("benchmarks", "examples")]

import quickstart  # first: it sets the environment of vLLM and transformers
import sorting
import torch
import transformers
import vllm
from tables import QUANTISED, markdown
from transformers import AutoTokenizer, PrinterCallback
from trl.generation import vllm_generation

from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer


ROOT = Path(__file__).parents[1]
SCHEME = "fp8_per_channel"  # the one that vLLM has CPU kernels for
ARMS = ("disabled", "trl", "decoupled_token_is", "bypass_dppo_tv", "auto")


def share_one_engine_per_sampler() -> None:
    engines: dict[Any, Any] = {}
    build = vllm.LLM

    def shared(**options: Any) -> Any:
        scheme = options.get("quantization")
        if scheme not in engines:
            engines[scheme] = build(**{**options, "enforce_eager": True, "num_gpu_blocks_override": 256})
        return engines[scheme]

    vllm_generation.LLM = shared


class Watch:
    """Counts sampled tokens and seconds, and the numbers of 8 bits that pushes change."""

    def __init__(self, generation: Any):
        self.tokens, self.seconds, self.shares = 0, 0.0, []
        model = generation.llm.llm_engine.model_executor.driver_worker.get_model()
        self.eight_bit = [p for p in model.parameters() if p.dtype == torch.float8_e4m3fn]
        self.before: list[torch.Tensor] = []
        self.generate, self.sync, self.generation = generation.generate, generation.sync_weights, generation
        generation.generate, generation.sync_weights = self._generate, self._sync

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = self.generate(*args, **kwargs)
        self.seconds += time.perf_counter() - start
        self.tokens += sum(map(len, output[1]))
        return output

    def _sync(self, *args: Any, **kwargs: Any) -> None:
        self.sync(*args, **kwargs)
        now = [p.data.view(torch.int8).clone() for p in self.eight_bit]
        if self.before:
            moved = sum(int((x != y).sum()) for x, y in zip(now, self.before, strict=True))
            self.shares.append(moved / sum(x.numel() for x in now))
        self.before = now


def train(sampler: str, arm: str, age: int, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """One run."""
    kwargs = {"quantization": SCHEME} if sampler == SCHEME else None
    settings = {
        **quickstart.TRAINING,
        "max_steps": steps,
        "seed": seed,
        "rollout_monitor": None,
        "rollout_correction": arm,
    }
    settings |= {"rollout_engine_kwargs": kwargs, "report_to": [], "output_dir": tempfile.mkdtemp()}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = RolloutCorrectedGRPOTrainer(
        model=str(folder),
        reward_funcs=sorting.exact_answer,
        args=RolloutCorrectedGRPOConfig(**settings),
        train_dataset=sorting.make_prompts(4096, seed=seed),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    watch = Watch(trainer.vllm_generation)
    if age:
        quickstart.Lag(trainer, age)
    transformers.set_seed(seed)
    before = sorting.accuracy(trainer.model, tokenizer)
    trainer.train()
    row = {"sampler": sampler, "arm": arm, "age": age, "seed": seed, "steps": steps, "before": before}
    k3 = [entry["rollout_corr/k3_kl"] for entry in trainer.state.log_history if "rollout_corr/k3_kl" in entry]
    still = [
        x for entry in trainer.state.log_history if (x := entry.get("rollout_corr/quantised_unmoved")) is not None
    ]
    row |= {"after": sorting.accuracy(trainer.model, tokenizer), "k3_first": fmean(k3[:3]), "k3_last": fmean(k3[-10:])}
    row |= {"unmoved": f"{fmean(still):.2f}" if still else "-"}
    row |= {"moved": f"{fmean(watch.shares):.4f}" if watch.shares else "-"}
    return {**row, "speed": watch.tokens / watch.seconds}


def plan() -> list[tuple[str, str, int]]:
    return [(SCHEME, arm, age) for age in (4, 0) for arm in ARMS] + [("bfloat16", "auto", age) for age in (4, 0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/quantised.json")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the model is so small that threads only wait for each other
    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("MASTER_PORT", "29511")
    folder = sorting.warm_start(ROOT / ".cache/quickstart/model")
    share_one_engine_per_sampler()
    results = json.loads(args.output.read_text()) if args.output.exists() else {"rows": []}
    done = {(row["sampler"], row["arm"], row["age"], row["seed"], row["steps"]) for row in results["rows"]}
    for sampler, arm, age in plan():
        if (sampler, arm, age, args.seed, args.steps) not in done:
            results["rows"].append(row := train(sampler, arm, age, args.seed, args.steps, folder))
            results["versions"] = {name: version(name) for name in ("torch", "trl", "transformers")} | {
                "vllm": vllm.__version__
            }
            results["rows"].sort(key=lambda row: (row["age"], row["seed"], row["sampler"]))
            args.output.write_text(json.dumps(results, indent=1) + "\n")
            print(row, flush=True)
    print(markdown(results["rows"], QUANTISED))


if __name__ == "__main__":
    main()
