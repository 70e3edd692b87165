"""
The measurements, a function for each section, out of the other benchmarks. A part runs in a process of its own:

    python benchmarks/gpu/sections.py JOB.json

The job has the section, its options, the folders of the model and of the work, the GPUs, and the file of the result: a list
of rows, each a dictionary of text and numbers. `run.py` starts this.
"""

import gc
import importlib.util
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any


ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path[:0] = [str(ROOT / "examples"), str(BENCHMARKS)]

import before_imports  # noqa: F401

import torch
from harness import write
from plan import PRESETS


Job = dict[str, Any]
Rows = list[dict[str, Any]]
ON_GPU = torch.cuda.is_available()
DEVICE = {"use_cpu": not ON_GPU, "bf16": ON_GPU}  # of a trainer; with bf16, it computes in autocast
ENGINE = {"dtype": "bfloat16", "enforce_eager": not ON_GPU}  # compiled on a GPU, as it is by default
QUIET = {**DEVICE, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
CONTESTANTS = {  # of the cost, by their name in `step.py`
    "no correction": "grpo, no correction",
    "metrics only": "grpo, measured",
    "auto": "grpo, auto",
    "bypass": "grpo, bypass_ppo_clip",
    "TRL's own": "grpo, TRL's correction",
}


def load(path: str) -> ModuleType:
    """A module by its path below the benchmarks, where several have the same name."""
    sys.path.insert(0, str((BENCHMARKS / path).parent))
    spec = importlib.util.spec_from_file_location(f"gpu_{Path(path).stem}", BENCHMARKS / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # so that its functions can be pickled
    spec.loader.exec_module(module)
    return module


def seconds() -> float:
    """Wall clock, when the GPU has done what it was given."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def questions(model: str, n: int = 256) -> Any:
    """Prompts: those of the language model, as chats if the model has a template for them."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    texts = load("language_model/prompts.py").PROMPTS
    chats = [[{"role": "user", "content": texts[i % len(texts)]}] for i in range(n)]
    template = AutoTokenizer.from_pretrained(model).chat_template
    return Dataset.from_dict({"prompt": chats if template else [chat[0]["content"] for chat in chats]})


# Sections -------------------------------------------------------------------------------------------------------------


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
    return [load("seams.py").compare(job["model"], questions(job["model"]), steps, length, ENGINE, **DEVICE)]


def gap(job: Job, sampler: str, engine: dict, trainers: dict[str, dict], tokens: int, longest: int = 256) -> Rows:
    """The gap of a sampler to some trainers, each with its diagnosis. One that fails has its error in its row."""
    load("language_model/gap.py")
    import naming
    import numpy as np
    import report
    from gap import Sampler, Trainer, score

    how, file, rows = Sampler(sampler, engine), Path(job["work"]) / "samples.json", []
    arguments = (str(file), how, job["model"], tokens, longest)
    process = multiprocessing.get_context("spawn").Process(target=sample, args=arguments)
    process.start()  # an engine does not give its memory back
    process.join()
    if process.exitcode:
        raise RuntimeError(f"Sampling ended with exit code {process.exitcode}.")
    samples = json.loads(file.read_text())
    lengths = np.array([len(x) for x in samples["logps"]])
    for name, fields in trainers.items():
        row, trainer = {"sampler": sampler, "trainer": name}, Trainer(name, **fields)
        try:
            logps = score(how, trainer, samples, job["model"])["logps"]
            gaps = report.row_of(report.flat(logps) - report.flat(samples["logps"]), lengths)
            alone = Trainer(name, **fields, alone=True)
            said = naming.name_cause(how, trainer, alone, samples, logps, job["model"])
            kept = ("tokens", "rms", "k3", "k3_error", "kl", "max_abs", "outside", "ess")
            rows.append({**row, **{key: gaps[key] for key in kept}, "diagnosis": said})
        except (ImportError, ValueError, RuntimeError) as error:  # such as an attention that is not installed
            rows.append({**row, "error": f"{type(error).__name__}: {error}"})
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def sample(file: str, sampler: Any, model: str, tokens: int, longest: int):
    from gap import sample

    write(Path(file), sample(sampler, model, tokens, longest))


def cost(job: Job, length: int, completions: int, rounds: int, steps: int) -> Rows:
    """Seconds and memory of a step without its sampling, in turns, on the same completions of full length."""
    import step
    from datasets import Dataset

    took = load("seams.py").remember_samples(seconds=seconds, **ENGINE)
    one = Dataset.from_dict({"prompt": list(questions(job["model"], 1)["prompt"]) * 256})
    fields = {**DEVICE, "vllm_max_model_length": length + 256, "dataset": one, "seconds": seconds}
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    peaks: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for turn in range(rounds):
        names = [*CONTESTANTS]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            built = step.build(CONTESTANTS[name], job["model"], length, completions, steps + 1, **fields)
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
            built[0].train()
            pairs = zip(built[1].steps[1:], built[1].sampling[1:], strict=True)  # the first warms up
            times[name].append(median(whole - sampling for whole, sampling in pairs))
            peaks[name].append(torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0)
            del built
            gc.collect()
            torch.cuda.empty_cache()
    rows = []
    for name, spent in times.items():
        ratios = [mine / plain for mine, plain in zip(spent, times["no correction"], strict=True)]
        row = {"tokens": length, "completions": completions, "correction": name, "ratio": median(ratios)}
        row |= {"least": min(ratios), "largest": max(ratios), "seconds": median(spent), "sampling_seconds": took[0]}
        rows.append({**row, "peak_gib": median(peaks[name]) or None})
    return rows


def kernels(job: Job, shapes: list[str], rounds: int, beside_verl: bool = False) -> Rows:
    import computation
    import verl_helper

    verl = verl_helper.load(Path(job["work"])) if beside_verl else None
    device = "cuda" if ON_GPU else "cpu"
    return [computation.measure(shape, case, device, rounds, verl) for shape in shapes for case in computation.CASES]


def training(job: Job, task: str, arm: str, age: int, seed: int, steps: int) -> Rows:
    fields = {**QUIET, "output_dir": job["work"], "seed": seed, "max_steps": steps}
    start, train = seconds(), load("language_model/learning.py").train
    row, rewards = train(job["model"], task, PRESETS[arm], age, **fields)
    about = {"task": task, "age": age, "arm": arm, "seed": seed}
    return [{**about, **row, "seconds": seconds() - start, "rewards": rewards}]


def asynchronous(job: Job, arm: str, steps: int, length: int) -> Rows:
    gpu = None if arm == "synchronous" else job["devices"][-1] if job["devices"] else "cpu"
    sys.path.insert(0, str(BENCHMARKS / "asynchronous"))
    import overlap  # by this name the process of the rollout worker finds the reward

    fields = {**QUIET, "output_dir": job["work"], "max_steps": steps, "max_completion_length": length}
    texts = load("language_model/prompts.py").QUESTIONS
    row = overlap.measure(job["model"], texts, Path(job["work"]), gpu, **fields)
    return [{"arm": arm, **row, "gpus": 2 if gpu and len(job["devices"]) > 1 else len(job["devices"])}]


def routing(job: Job, dtype: str, steps: int, sizes: dict[str, int]) -> Rows:
    """The gap of a random mixture of experts with and without replay. On a GPU, vLLM itself returns the experts."""
    script, rows = load("routing/run.py"), []
    script.build_model(job["work"], 0, **sizes)
    for replay in (False, True):
        engine = {"enable_return_routed_experts": True} if ON_GPU and replay else {}
        row = script.measure(job["work"], dtype, replay, 0, steps, engine=engine, use_cpu=not ON_GPU)
        rows.append({"trainer": dtype, "replay": "replay" if replay else "none", **row})
    return rows


def fsdp2(job: Job, steps: int) -> Rows:
    """The same training in two processes, with DDP and with FSDP2."""
    rows = []
    for name in ("ddp", "fsdp2"):
        file, output = (Path(job["work"]) / f"{name}-{kind}.json" for kind in ("job", "result"))
        of_rank = {"section": "rank", "options": {"steps": steps, "name": name}, "output": str(output)}
        file.write_text(json.dumps({**job, **of_rank}))
        config = ROOT / f"recipes/accelerate/{name}.yaml"
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        subprocess.run([*launch, "--num_processes", "2", __file__, str(file)], check=True)
        rows += json.loads(output.read_text())
    return rows


def rank(job: Job, steps: int, name: str) -> Rows:
    """What each of two processes does. The first one tells what was logged."""
    from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer

    fields = {**QUIET, "output_dir": job["work"], "max_steps": steps, "learning_rate": 1e-6, "num_generations": 8}
    fields |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
    fields |= {"max_completion_length": 128, "vllm_max_model_length": 512, "per_device_train_batch_size": 8}
    trainer = RolloutCorrectedGRPOTrainer(
        job["model"],
        args=RolloutCorrectedGRPOConfig(**fields),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        train_dataset=questions(job["model"]),
    )
    trainer.train()
    k3 = [entry["rollout_corr/k3_kl"] for entry in trainer.state.log_history if "rollout_corr/k3_kl" in entry]
    found = {"processes": name, "k3": max(k3), "first_k3": k3[0], "last_k3": k3[-1]}
    return [found] if trainer.accelerator.is_main_process else []


# The process ----------------------------------------------------------------------------------------------------------


def make_tiny_model(folder: str):
    """Write a model with random weights, and a tokenizer of single characters."""
    sys.path.insert(0, str(BENCHMARKS / "arena"))
    import tasks

    characters = "".join(chr(i) for i in range(32, 127) if chr(i) != tasks.MARK) + "\n"
    task = tasks.Task("tiny", characters, lambda dice: ("", ""), 0.0, 1, 1)
    torch.manual_seed(0)
    tokenizer = tasks.make_tokenizer(task)
    tasks.make_model(task, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def end_with_parent():
    """Wait until the pipe to the parent closes, and end this process and those that it started."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def main():
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    if os.getpgrp() == os.getpid():  # started by `run.py`, and no rank of two
        threading.Thread(target=end_with_parent, daemon=True).start()
    if rows := globals()[job["section"]](job, **job["options"]):
        write(Path(job["output"]), rows)


if __name__ == "__main__":
    main()
