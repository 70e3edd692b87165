"""
Answers of the command `probe` about faults that a recipe can have: a small model with a real vLLM engine on the CPU, through
the command line.

    python benchmarks/diagnose/probe.py                # all of them
    python benchmarks/diagnose/probe.py top-p dropout

`benchmarks/language_model/run.py probe` asks a pretrained model the same.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from policies import EOS, VOCABULARY, build


class Run(NamedTuple):
    """A run with a fault: what should be said first, options of the run, and what is other in the model's configuration."""

    expected: str
    options: dict[str, Any]
    model: dict[str, Any] = {}


_FLOAT32 = {"dtype": "float32"}
_BFLOAT16 = {"dtype": "bfloat16", "rollout_engine_kwargs": {"dtype": "bfloat16"}}
RUNS = {
    "float32": Run("nothing", {"rollout_engine_kwargs": _FLOAT32}),
    "bfloat16 on both sides": Run("rounding", _BFLOAT16),
    "bfloat16 of the sampler": Run("rounding", {"rollout_engine_kwargs": {"dtype": "bfloat16"}}),
    "bfloat16 head of the sampler": Run(
        "head", {"rollout_engine_kwargs": {**_FLOAT32, "hf_overrides": {"head_dtype": "bfloat16"}}}
    ),
    "fp8 cache": Run("kv_cache", {"rollout_engine_kwargs": {**_FLOAT32, "kv_cache_dtype": "fp8"}}),
    "fp8 cache, bfloat16": Run(
        "kv_cache", {"dtype": "bfloat16", "rollout_engine_kwargs": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}}
    ),
    "dropout": Run("dropout", {"rollout_engine_kwargs": _FLOAT32}, {"attention_dropout": 0.1}),
    "top-p": Run("truncation", {"rollout_engine_kwargs": _FLOAT32, "top_p": 0.9}),
    "top-k, bfloat16": Run("truncation", {**_BFLOAT16, "top_k": 10}),
    "repetition penalty": Run("penalty", {"rollout_engine_kwargs": _FLOAT32, "repetition_penalty": 1.1}),
    "presence penalty, bfloat16": Run("penalty", {**_BFLOAT16, "generation_kwargs": {"presence_penalty": 0.5}}),
}


def save(shape: str, folder: Path, changes: dict[str, Any]) -> str:
    """The model of a shape with a tokenizer, and changes of its configuration."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    build(shape, folder, seed=5)
    characters = [chr(32 + i) for i in range(95)]
    words = ["<pad>", "<eos>", "<unk>", *characters, *(f"word{i}" for i in range(VOCABULARY - 3 - len(characters)))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words[:VOCABULARY])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=words[EOS], unk_token="<unk>"
    ).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return str(folder)


def probe(model: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """
    Answer of the command for a run with a fault, given options beside those of the fault.

    Returns:
        `dict`: `run`, `expected`, `first` (cause named first, or the verdict), `rms` and `noise` (nats), `experiments` (the
        change, the gap after it, and what that says) and `seconds` of a core.
    """
    run = RUNS[name]
    words = [word for key, value in {**options, **run.options}.items() for word in (f"--{key}", _as_word(value))]
    start = _seconds()
    process = subprocess.run(
        [sys.executable, "-m", "trl_rollout_corr", "probe", model, "--json", *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if process.returncode not in (0, 1):
        sys.exit(process.stderr[-2000:])
    found = json.loads(process.stdout)
    return {
        "run": name,
        "expected": run.expected,
        "first": found["causes"][0]["cause"] if found["causes"] else found["verdict"],
        "rms": found["rms_log_ratio"],
        "noise": found["noise_floor"],  # None for a sampler that rounds more coarsely
        "experiments": [
            [x["changed"], x["rms_log_ratio_after"], f"{x['says']} `{x['cause']}`" if x["says"] else None]
            for x in found["experiments"]
            if x["rms_log_ratio_after"] is not None
        ],
        "seconds": _seconds() - start,
    }


def _seconds() -> float:
    """Of the processes that have ended, on all cores: others may share them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _as_word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="name")
    parser.add_argument("--shape", default="judge-qwen3")
    parser.add_argument("--output", type=Path, default=Path("outputs/probe"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| the run has | named first | gap, nats | times the trainer's own | what the experiments say | seconds of a core |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for name in args.names or RUNS:
        answer = probe(save(args.shape, args.output / "model", RUNS[name].model), name, {})
        says = "; ".join(
            f"{what}: {gap:.3g}" + (f", {says}" if says else "") for what, gap, says in answer["experiments"]
        )
        wrong = "" if answer["first"] == answer["expected"] else f" (expected `{answer['expected']}`)"
        times = f"{answer['rms'] / answer['noise']:.3g}" if answer["noise"] else "-"
        row = (name, f"`{answer['first']}`{wrong}", f"{answer['rms']:.3g}", times, says, f"{answer['seconds']:.0f}")
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
