"""
The command `probe`: the diagnosis of a model and its sampler before any training, the parts of the gap, and settings to try.
No TRL here: each trainer with its sampler has a process of its own (`trl_rollout_corr/probe/process.py`).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..diagnosis import read_tokens
from ..diagnosis.text import write_json, write_text
from .parts import Scored, chain_of, diagnose_parts, split, write_parts
from .trials import candidates, judged, write_trials


# Variables that vLLM reads when it is imported: a small cache on a CPU, and the engine in the process of the trainer
_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_PAUSE = 5.0  # seconds between two lines of progress
_SIZES = {"completions": 64, "length": 128}
_QUICK = {"completions": 8, "length": 32}


def probe(run: Mapping[str, Any], *, as_json: bool = False) -> tuple[str, bool]:
    """
    Start a trainer and its sampler as the `run` would, which has the arguments of the command. Returns the diagnosis and two
    tables as text or JSON, and whether nothing has to be done; a `ValueError` in one line if anything cannot be used.
    """
    if run["model"].startswith(("/", ".", "~")) and not Path(run["model"]).is_dir():  # not a name of the Hub
        raise ValueError("this folder does not exist. Name a folder, or a model on the Hub")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("`probe` runs in one process, but WORLD_SIZE is above 1: start it without a launcher")
    request = {**run, **(_QUICK if run["quick"] else _SIZES)}
    request["completions"] = run["completions"] or request["completions"]
    with tempfile.TemporaryDirectory(prefix="rollout-probe-") as name:
        folder = Path(name)
        first = _run("the run as it is", {**request, "settings": {}}, folder / "first")
        observed = read_tokens(folder / "first" / "dump")
        settings = candidates(first.facts, quick=run["quick"])
        tried: dict[str, Scored | str] = {}
        for i, (change, fields) in enumerate(settings.items()):
            if isinstance(fields, str):
                tried[change] = fields
                continue
            more = {"settings": fields, "tokens": str(folder / "first" / "tokens.pt")}
            try:
                tried[change] = _run(f"{i + 1} of {len(settings)}, {change}", {**request, **more}, folder / str(i))
            except ValueError as error:
                tried[change] = str(error)
    parts = split(first.logps["as_it_is"], chain_of(first, tried))
    trials, diagnosis = judged(first, settings, tried), diagnose_parts(observed, parts)
    if as_json:
        tables = {"parts": [part._asdict() for part in parts], "settings": [trial._asdict() for trial in trials]}
        return write_json(diagnosis, {**tables, "about": observed.about}), diagnosis.healthy
    return write_text(diagnosis) + write_parts(parts) + write_trials(trials), diagnosis.healthy


def _run(title: str, request: Mapping[str, Any], output: Path) -> Scored:
    """Carry out a request in a process of its own, which writes to the folder `output`, and show for how long."""
    output.mkdir()
    answer, start = output / "answer.json", time.monotonic()
    given = json.dumps({**request, "output": str(output)})
    command = [sys.executable, "-m", "trl_rollout_corr.probe.process", given]
    environment = {**_ENVIRONMENT, **os.environ}
    if not torch.accelerator.is_available():  # compiling for a CPU would take longer than everything else
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
    with (output / "log").open("w+", encoding="utf-8", errors="replace") as log:
        # no command asks the user
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while process.poll() is None:
            seconds = time.monotonic() - start
            print(f"Probe: {title}, {seconds:.0f} s", file=sys.stderr, flush=True)  # noqa: T201
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PAUSE)
        if not answer.exists():
            log.seek(0)
            raise ValueError(
                f"its process ended with code {process.returncode}: {' '.join(log.read().split())[-300:]}"
            )
    found = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in found:
        raise ValueError(found["error"])
    return Scored({name: np.array(x) for name, x in found["logps"].items()}, found["facts"])
