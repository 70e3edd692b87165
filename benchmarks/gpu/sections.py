"""
The measurements, a function for each section, made of the other benchmarks. `run.py` starts a process for each part:

    python benchmarks/gpu/sections.py JOB.json

The result is a list of rows, each a dictionary of text and numbers.
"""

import json
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import before_imports  # noqa: F401

import torch
from harness import end_with_parent, write
from plan import PRESETS


ROOT = Path(__file__).parents[2]
Job = dict[str, Any]
Rows = list[dict[str, Any]]
ON_GPU = torch.cuda.is_available()
DEVICE = {"use_cpu": not ON_GPU, "bf16": ON_GPU}  # of a trainer; with bf16, it computes in autocast
ENGINE = {"dtype": "bfloat16", "enforce_eager": not ON_GPU}  # compiled on a GPU, as it is by default
QUIET = {**DEVICE, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
CORRECTIONS = ("no correction", "measured", "auto", "bypass_ppo_clip", "TRL's correction")  # contestants of `step.py`


def among(folder: str):
    """Import from a folder of the benchmarks from now on, several of which have modules of the same name."""
    sys.path.insert(0, str(ROOT / "benchmarks" / folder))


def seconds() -> float:
    """Wall clock, when the GPU has done what it was given."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def questions(model: str, n: int = 256) -> Any:
    """Prompts of the language model, as chats if the model has a template for them."""
    among("language_model")
    from datasets import Dataset
    from prompts import PROMPTS
    from transformers import AutoTokenizer

    texts = (PROMPTS * (n // len(PROMPTS) + 1))[:n]
    chats = AutoTokenizer.from_pretrained(model).chat_template is not None
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": x}] for x in texts] if chats else texts})


def machine(job: Job, tiny: bool = False) -> Rows:
    """Hardware and drivers, without a name that tells whose they are. For a test, make a tiny model."""
    if tiny and not (Path(job["model"]) / "tokenizer.json").exists():
        make_tiny_model(job["model"])
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())
    found: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "gpus": []}
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        of_gpu = {"name": gpu.name, "gib": gpu.total_memory / 2**30, "capability": f"{gpu.major}.{gpu.minor}"}
        found["gpus"].append(of_gpu)
    if found["gpus"] and torch.version.cuda:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
        found |= {"cuda": torch.version.cuda, "driver": driver}
    return [found]


def seams(job: Job, steps: int, length: int) -> Rows:
    from seams import compare

    return [compare(job["model"], questions(job["model"]), steps, length, ENGINE, **DEVICE)]


def gap(job: Job, sampler: str, engine: dict, trainers: dict[str, dict], tokens: int, longest: int = 256) -> Rows:
    among("language_model")
    import pairs
    from gap import Sampler, Trainer

    scoring = [Trainer(name, **fields) for name, fields in trainers.items()]
    return pairs.measure(job["model"], Sampler(sampler, engine), scoring, Path(job["work"]), tokens, longest)


def cost(job: Job, length: int, completions: int, rounds: int, steps: int) -> Rows:
    """Seconds and memory of a step without its sampling, in turns, on the same completions of full length."""
    import step
    from datasets import Dataset
    from seams import remember_samples

    took = remember_samples(seconds=seconds, **ENGINE)
    same = Dataset.from_dict({"prompt": list(questions(job["model"], 1)["prompt"]) * 256})
    fields = {**DEVICE, "vllm_max_model_length": length + 256, "dataset": same, "seconds": seconds}
    contestants = [f"grpo, {name}" for name in CORRECTIONS]
    times = step.interleaved(contestants, job["model"], length, completions, steps, rounds, **fields)
    plain, rows = times[contestants[0]]["training"], []
    for name, found in zip(CORRECTIONS, times.values(), strict=True):
        ratios = [mine / other for mine, other in zip(found["training"], plain, strict=True)]
        row = {"tokens": length, "completions": completions, "correction": name, "ratio": median(ratios)}
        row |= {"least": min(ratios), "largest": max(ratios), "seconds": median(found["training"])}
        rows.append({**row, "sampling_seconds": took[0], "peak_gib": max(found.get("peak", [0])) or None})
    return rows


def kernels(job: Job, shapes: list[str], rounds: int, beside_verl: bool = False) -> Rows:
    import computation
    import verl_helper

    verl = verl_helper.load(Path(job["work"])) if beside_verl else None
    device = "cuda" if ON_GPU else "cpu"
    return [computation.measure(shape, case, device, rounds, verl) for shape in shapes for case in computation.CASES]


def training(job: Job, task: str, arm: str, age: int, seed: int, steps: int) -> Rows:
    among("language_model")
    from learning import train

    fields, start = {**QUIET, "output_dir": job["work"], "seed": seed, "max_steps": steps}, seconds()
    row, rewards = train(job["model"], task, PRESETS[arm], age, **fields)
    about = {"task": task, "age": age, "arm": arm, "seed": seed}
    return [{**about, **row, "seconds": seconds() - start, "rewards": rewards}]


def asynchronous(job: Job, arm: str, steps: int, length: int) -> Rows:
    among("language_model")
    among("asynchronous")
    from overlap import measure
    from prompts import QUESTIONS

    gpu = None if arm == "synchronous" else job["devices"][-1] if job["devices"] else "cpu"
    fields = {**QUIET, "output_dir": job["work"], "max_steps": steps, "max_completion_length": length}
    row = measure(job["model"], QUESTIONS, Path(job["work"]), gpu, **fields)
    return [{"arm": arm, **row, "gpus": 2 if gpu and len(job["devices"]) > 1 else len(job["devices"])}]


def routing(job: Job, dtype: str, steps: int, sizes: dict[str, int]) -> Rows:
    """The gap of a random mixture of experts with and without replay. On a GPU, vLLM itself returns the experts."""
    among("routing")
    from run import build_model, measure

    build_model(job["work"], 0, **sizes)
    rows = []
    for replay in (False, True):
        engine = {"enable_return_routed_experts": True} if ON_GPU and replay else {}
        row = measure(job["work"], dtype, replay, 0, steps, engine=engine, use_cpu=not ON_GPU)
        rows.append({"trainer": dtype, "replay": "replay" if replay else "none", **row})
    return rows


def fsdp2(job: Job, steps: int) -> Rows:
    """A recipe as users start it, in two processes, with DDP and with FSDP2."""
    from sums import problems

    work, rows = Path(job["work"]), []
    (work / "sums").mkdir()
    lines = [json.dumps({"question": text, "answer": answer}) for text, answer in problems(16 * steps, seed=0)]
    (work / "sums/train.jsonl").write_text("\n".join(lines))
    for name in ("ddp", "fsdp2"):
        launch = ["-m", "accelerate.commands.launch", "--config_file", f"recipes/accelerate/{name}.yaml"]
        recipe = ["--num_processes", "2", "examples/grpo.py", "--config", "recipes/grpo/auto.yaml"]
        options = {"model_name_or_path": job["model"], "dataset_name": work / "sums", "output_dir": work / name}
        options |= {"max_steps": steps, "max_completion_length": 128, "report_to": "none"}
        told = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
        subprocess.run([sys.executable, *launch, *recipe, *told], cwd=ROOT, check=True)
        log = json.loads((work / name / "trainer_state.json").read_text())["log_history"]
        k3 = [entry["rollout_corr/k3_kl"] for entry in log if "rollout_corr/k3_kl" in entry]
        rows.append({"processes": name, "k3": max(k3), "first_k3": k3[0], "last_k3": k3[-1]})
    return rows


def make_tiny_model(folder: str):
    """Write a model with random weights, and a tokenizer of single characters."""
    among("arena")
    import tasks

    characters = "".join(chr(i) for i in range(32, 127) if chr(i) != tasks.MARK) + "\n"
    task = tasks.Task("tiny", characters, lambda dice: ("", ""), 0.0, 1, 1)
    torch.manual_seed(0)
    tokenizer = tasks.make_tokenizer(task)
    tasks.make_model(task, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main():
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    if os.getpgrp() == os.getpid():  # started by `run.py`
        threading.Thread(target=end_with_parent, daemon=True).start()
    if rows := globals()[job["section"]](job, **job["options"]):
        write(Path(job["output"]), rows)


if __name__ == "__main__":
    main()
