"""
The command `probe`: the diagnosis of a model and its sampler before any training, the parts of the gap, and settings that make
it smaller.

No TRL here: each trainer with its sampler has a process of its own (`trl_rollout_corr/probe/process.py`).
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..diagnosis import read_tokens
from ..diagnosis.text import write_json, write_text
from ..messages import warn
from .parts import chain_of, diagnose_parts, split, write_parts
from .trials import FLOAT32, HEADS, PLAIN, SERVED, Scored, candidates, is_low, judged, write_trials


# Variables that vLLM reads when it is imported: a small cache on a CPU, and the engine in the process of the trainer
_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_SILENT = 10.0  # seconds without progress, after which the time is printed
_SIZES = {"completions": 64, "length": 128}
_QUICK = {"completions": 16, "length": 32}


def probe(run: Mapping[str, Any], *, as_json: bool = False) -> tuple[str, bool]:
    """
    Start a trainer and its sampler as a run would, diagnose the gap between them, split it into parts, and try settings. `run`
    has the arguments of the command.

    Returns the diagnosis and two tables as text or JSON, and whether nothing has to be done. Raises a `ValueError` in one line
    if anything cannot be used.
    """
    _check(run)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rollout-probe-") as name:
        folder = Path(name)
        sizes = _QUICK if run["quick"] else _SIZES
        request = {**sizes, **{name: value for name, value in run.items() if value is not None or name not in sizes}}
        _say("starting trainer and sampler")
        first = _run({**request, "settings": {}}, folder / "first")
        observed = read_tokens(folder / "first" / "as_it_is")
        tried: dict[str, tuple[dict[str, Any], Scored | str]] = {}
        for i, (change, settings) in enumerate(candidates(first.facts, quick=run["quick"]).items()):
            _say(f"starting both again: {change}")
            more = {**request, "settings": settings, "tokens": str(folder / "first" / "tokens.pt")}
            if change == SERVED:
                own = {**first.facts["engine"], "model_impl": "transformers"}
                more |= {"engine": own, "temperature": first.facts["temperature"]}
            try:
                tried[change] = settings, _run(more, folder / str(i))
            except ValueError as error:
                tried[change] = settings, str(error)
    low = is_low(observed.about)
    nodes, reasons = dict(first.vectors), dict(first.facts["reasons"])
    between = {
        FLOAT32: ("body", "sampler_float32"),
        HEADS: ("head", "sampler_body"),
        PLAIN: ("", "sampler_head" if low else "sampler_float32"),
    }
    for change, (of_trainer, of_sampler) in between.items():
        scored = tried.get(change, (None, "it cannot be tried" if low else ""))[1]
        for node, name in ((of_trainer, "alone"), (of_sampler, "sampler_loaded")):
            if isinstance(scored, str):
                reasons |= {node: scored} if scored and node else {}
            elif node and name in scored.vectors:
                nodes[node] = scored.vectors[name]
    parts = split(nodes, reasons, chain_of(first.facts, low=low))
    trials = judged(first, tried)
    diagnosis = diagnose_parts(observed, parts)
    if as_json:
        more = {"parts": [part._asdict() for part in parts], "settings": [trial._asdict() for trial in trials]}
        more |= {"about": observed.about, "seconds": round(time.monotonic() - start, 1)}
        return write_json(diagnosis, more), diagnosis.healthy
    return write_text(diagnosis) + write_parts(parts) + write_trials(trials), diagnosis.healthy


def _check(run: Mapping[str, Any]) -> None:
    if run["model"].startswith(("/", ".", "~")) and not Path(run["model"]).is_dir():  # not a name of the Hub
        raise ValueError("this folder does not exist. Name a folder, or a model on the Hub")
    for name in ("config", "prompts"):
        if run[name] is not None and not Path(run[name]).is_file():
            raise ValueError(f"--{name} is {run[name]!r}, which is not a file")
    if run["completions"] is not None and run["completions"] < 2:
        raise ValueError(f"--completions must be 2 or more, got {run['completions']}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("`probe` runs in one process, but WORLD_SIZE is above 1: start it without a launcher")


def _run(request: Mapping[str, Any], output: Path) -> Scored:
    """Carry out a request in a process of its own, which writes to the folder `output`, and show its progress."""
    output.mkdir()
    file, log, answer = output / "request.json", output / "log", output / "answer.json"
    file.write_text(json.dumps({**request, "output": str(output)}), encoding="utf-8")
    with socket.create_server(
        ("", 0)
    ) as listener:  # TRL's own choice is the same in all processes that start at one time
        port = str(listener.getsockname()[1])
    environment = {**_ENVIRONMENT, "MASTER_PORT": port, **os.environ}
    if not torch.accelerator.is_available():  # compiling for a CPU would take longer than everything else
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
    command = [sys.executable, "-m", "trl_rollout_corr.probe.process", str(file)]
    start = spoken = time.monotonic()
    with log.open("wb") as sink, log.open(encoding="utf-8", errors="replace") as said:
        # no command asks the user
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
        while process.poll() is None:
            time.sleep(0.2)
            actions = [line.removeprefix("Probe: ").strip() for line in said if line.startswith("Probe: ")]
            now = time.monotonic()
            if not actions and now - spoken > _SILENT:
                actions = [f"... {now - start:.0f} s"]
            for action in actions:
                spoken = now
                _say(action)
    if not answer.exists():
        text = log.read_text(encoding="utf-8", errors="replace")
        raise ValueError(f"its process ended with code {process.returncode}: {' '.join(text.split())[-300:]}")
    facts: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    for message in dict.fromkeys(facts["warnings"]):
        warn(message)
    if "error" in facts:
        raise ValueError(facts["error"])
    return Scored(dict(np.load(output / "scores.npz")), facts)


def _say(action: str) -> None:
    print(f"Probe: {action}", file=sys.stderr, flush=True)  # noqa: T201
