"""
Answers of the command `probe` about faults that a recipe can have: a small model with a real vLLM engine on the CPU, through
the command line.

    python benchmarks/diagnose/probe.py                # all of them
    python benchmarks/diagnose/probe.py top-p dropout
    python benchmarks/diagnose/probe.py --pretrained   # on the pretrained model of `language_model`
"""

import argparse
import json
import resource
import shutil
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


def save_pretrained(folder: Path, changes: dict[str, Any]) -> str:
    """The pretrained language model, with changes of its configuration."""
    sys.path.append(str(Path(__file__).parents[1] / "language_model"))
    from model import make_model

    shutil.copytree(make_model(), folder, dirs_exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return str(folder)


def probe(model: str, options: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Output of the command, and the seconds of a core that it took."""
    words = [word for name, value in options.items() for word in (f"--{name}", _as_word(value))]
    start = _seconds()
    process = subprocess.run(
        [sys.executable, "-m", "trl_rollout_corr", "probe", model, "--json", *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if process.returncode not in (0, 1):
        sys.exit(process.stderr[-2000:])
    return json.loads(process.stdout), _seconds() - start


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
    parser.add_argument("--pretrained", action="store_true", help="the model of `language_model`")
    parser.add_argument("--output", type=Path, default=Path("outputs/probe"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| the run has | named first | gap, nats | times the trainer's own | what the experiments say | seconds of a core |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for name in args.names or RUNS:
        run = RUNS[name]
        if args.pretrained:
            model = save_pretrained(args.output / "pretrained", run.model)
            options = {"dtype": "float32", "completions": 16, **run.options}
        else:
            model, options = save(args.shape, args.output / "model", run.model), run.options
        found, seconds = probe(model, options)
        first = found["causes"][0]["cause"] if found["causes"] else found["verdict"]
        gap, noise = found["rms_log_ratio"], found["noise_floor"]
        says = "; ".join(
            f"{x['changed']}: {x['rms_log_ratio_after']:.3g}" + (f", {x['says']} `{x['cause']}`" if x["says"] else "")
            for x in found["experiments"]
            if x["rms_log_ratio_after"] is not None
        )
        wrong = "" if first == run.expected else f" (expected `{run.expected}`)"
        times = f"{gap / noise:.3g}" if noise else "-"  # no yardstick for a sampler that rounds more coarsely
        print(f"| {name} | `{first}`{wrong} | {gap:.3g} | {times} | {says} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
