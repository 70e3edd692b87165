"""
What pushes cost: the score of some completions after a push, and a push of an adapter against TRL's merge.

    python benchmarks/pushes.py --output benchmarks/results/pushes.json

The pretrained model of `examples/smollm2.py`, with an adapter on all linear layers, trains a few steps, and completions are
scored once more after every push. The share of a run of 200 steps follows from the medians: its default schedule scores after
11 of its pushes, from the fourth one on fewer completions. Then weights are pushed in turns, as we do and as TRL does,
without a training step between. A new process measures each of the two numbers of memory: the largest that the preparation of
a push takes on top of what it had. Seconds are CPU time, as other programs share the machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch


os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import addition
import smollm2
import torch
import transformers
import vllm
from datasets import Dataset
from peft import LoraConfig
from tables import PUSHES, RESCORE, markdown
from transformers import PrinterCallback, TrainerCallback

from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer
from trl_rollout_corr.correction.functional import k3
from trl_rollout_corr.pushes import rescore
from trl_rollout_corr.pushes.rescore import MOST, SURE, Rescore, is_due


WAYS = {"ours": "base + delta", "trl": "TRL's merge"}
STEPS = 200  # of the run whose share is reported
ADAPTER = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights="gaussian")


def merging(way: str) -> Any:
    """Context in which an adapter is pushed in one of two ways."""
    name = "trl_rollout_corr.pushes.merged_adapters.leaving_base_alone"
    return patch(name, lambda *args: nullcontext(False)) if way == "trl" else nullcontext()


class Times(TrainerCallback):
    """CPU seconds of each step without what is measured on its own, and of each of these."""

    def __init__(self):
        self.steps, self.looks, self._start, self._apart = [], [], 0.0, 0.0

    def apart(self, look: Callable[[Rescore], None]) -> Callable[[Rescore], None]:
        def timed(self_: Rescore) -> None:
            start = time.process_time()
            look(self_)
            self.looks.append(time.process_time() - start)
            self._apart += self.looks[-1]

        return timed

    def on_step_begin(self, args, state, control, **kwargs):
        self._start, self._apart = time.process_time(), 0.0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(time.process_time() - self._start - self._apart)


def build(model: Path, completions: int, length: int, steps: int, folder: str, **fields: Any) -> tuple[Any, Times]:
    """A trainer, whose completions all have the full length."""
    times = Times()
    prompts = [{"prompt": text} for text, _ in addition.problems(64, 0)]
    trainer = RolloutCorrectedGRPOTrainer(
        model=str(model),
        reward_funcs=lambda completion_ids, **kwargs: [float(sum(ids) % 7) for ids in completion_ids],
        args=RolloutCorrectedGRPOConfig(
            folder,
            use_cpu=True,
            bf16=False,
            model_init_kwargs={"dtype": "bfloat16"},
            use_vllm=True,
            vllm_mode="colocate",
            vllm_max_model_length=512,
            rollout_engine_kwargs={"dtype": "bfloat16", "enforce_eager": True, "num_gpu_blocks_override": 512},
            max_completion_length=length,
            generation_kwargs={"ignore_eos": True, "detokenize": False},
            per_device_train_batch_size=completions,
            num_generations=8,
            gradient_accumulation_steps=1,
            gradient_checkpointing=False,
            max_steps=steps,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            rollout_monitor="warn",
            **fields,
        ),
        train_dataset=Dataset.from_list(prompts),
        peft_config=ADAPTER,
        callbacks=[times],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, times


# Completions that are scored once more --------------------------------------------------------------------------------


def cost(model: Path, completions: int, length: int, steps: int) -> tuple[Any, dict[str, Any]]:
    """A trainer after some steps, and the cost of the scores in it."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, times = build(model, completions, length, steps, folder)
        with (
            patch.object(rescore, "is_due", lambda push: True),
            patch.object(Rescore, "_look", times.apart(Rescore._look)),
        ):
            trainer.train()
    step = statistics.median(times.steps[1:])
    first, later = statistics.median(times.looks[1:SURE]), statistics.median(times.looks[SURE:])
    looks = SURE * first + (sum(map(is_due, range(1, STEPS + 1))) - SURE) * later
    row = {
        "completions": completions,
        "length": length,
        "scored": MOST,
        "steps": len(times.steps) - 1,
        "step_s": step,
        "look_s": first,
        "later_look_s": later,
        "share": 100 * looks / (STEPS * step + looks),
    }
    return trainer, row


# Pushes of an adapter -------------------------------------------------------------------------------------------------


def pushes(trainer: Any, rounds: int) -> list[dict[str, Any]]:
    """Time of a push, and the gap after it, in turns; and the share of the frozen weights that changed."""
    base = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if ".base_layer." in name}
    found: dict[str, dict[str, list[float]]] = {way: {"push_s": [], "prepare_s": [], "gap": []} for way in WAYS}
    changed = dict.fromkeys(WAYS, 0.0)
    for _ in range(rounds):
        for way, of_way in found.items():
            before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if name in base}
            with merging(way):
                start = time.process_time()
                trainer.vllm_generation.sync_weights()
                of_way["push_s"].append(time.process_time() - start)
                start = time.process_time()
                prepare(trainer)
                of_way["prepare_s"].append(time.process_time() - start)
            of_way["gap"].append(gap(trainer))
            changed[way] = max(changed[way], moved(trainer.model, before))
            restore(trainer.model, base)
        print(f"push: {found}", flush=True)
    medians = {way: {name: statistics.median(x) for name, x in of_way.items()} for way, of_way in found.items()}
    return [
        {
            "way": WAYS[way],
            **x,
            "ratio": x["push_s"] / medians["trl"]["push_s"],
            "prepare_ratio": x["prepare_s"] / medians["trl"]["prepare_s"],
            "changed": 100 * changed[way],
        }
        for way, x in medians.items()
    ]


def prepare(trainer: Any) -> None:
    """What a push makes of the weights, without vLLM."""
    with trainer._pushes.leaving_base_alone(trainer.model):
        trainer.model.merge_adapter()
        for _, weight in trainer.vllm_generation._iter_named_params():
            del weight
        trainer.model.unmerge_adapter()


def gap(trainer: Any) -> float:
    """`fresh_k3_kl` of the latest completions."""
    look = trainer._pushes.checks.rescore
    texts = look._texts
    sampler = look.sampler.score([text.ids for text in texts], look.looks)
    sums = []
    for text, theirs in zip(texts, sampler, strict=True):
        with torch.no_grad():
            ours = look._score(text).double()
        sums.append(k3(ours - torch.tensor(theirs[len(text.prompt) - 1 :], dtype=torch.float64)))
    return float(torch.cat(sums).mean())


def moved(model: Any, before: dict[str, torch.Tensor]) -> float:
    """Share of the frozen weights that differ from those before."""
    now = dict(model.named_parameters())
    differ = sum(int((now[name] != x).sum()) for name, x in before.items())
    return differ / sum(x.numel() for x in before.values())


def restore(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Give frozen weights their values back, so that both ways start from the same."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, x in weights.items():
            parameters[name].copy_(x)


# Memory ---------------------------------------------------------------------------------------------------------------


def memory_of(way: str, model: Path) -> float:
    """Largest memory, in MB, that the preparation of a push takes on top of what the process had. Needs Linux."""
    command = [sys.executable, __file__, "--memory_of", way, "--model", str(model)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(output.split()[-1])


def memory(way: str, model: Path) -> float:
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from trl_rollout_corr.pushes.merged_adapters import leaving_base_alone

    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16), ADAPTER)

    def push() -> None:
        with nullcontext() if way == "trl" else leaving_base_alone(policy):
            policy.merge_adapter()
            for _, weight in policy.named_parameters():
                del weight
            policy.unmerge_adapter()

    push()  # the allocator keeps some pages
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    push()
    return (_status("VmHWM") - before) / 1000


def _status(name: str) -> int:
    """A number of the status of this process, in kB."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="A folder; by default the model of `examples/smollm2.py`.")
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory_of", choices=[*WAYS], help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="Where to write the results as JSON.")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    model = args.model or smollm2.make_model()
    if args.memory_of:
        print(memory(args.memory_of, model))
        return
    trainer, row = cost(model, args.completions, args.length, args.steps)
    print(markdown([row], RESCORE), flush=True)
    rows = pushes(trainer, args.rounds)
    rows = [{**x, "memory_mb": memory_of(way, model)} for way, x in zip(WAYS, rows, strict=True)]
    print(markdown(rows, PUSHES))
    if args.output:
        setting = {"model": args.model.name if args.model else smollm2.NAME, "rounds": args.rounds}
        setting |= {"torch": torch.__version__, "vllm": vllm.__version__, "threads": torch.get_num_threads()}
        args.output.write_text(json.dumps({"setting": setting, "rescore": [row], "pushes": rows}, indent=1))


if __name__ == "__main__":
    main()
