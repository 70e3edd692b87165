"""
The command `probe`: the diagnosis of a model and its sampler before any training, and the parts of the gap. It needs
no TRL, because each trainer with its sampler runs in a separate process (`trl_rollout_corr/tools/probe/process.py`).
"""

import os
import socket
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ...messages import progress
from ..diagnosis.text import write_json, write_text
from .parts import Measured, Side, chain_of, changes_for, diagnose_parts, split_gap, write_parts


# Variables that vLLM reads at import: a small cache on a CPU, and the engine in the process of the trainer
_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_ANY_PORT = ("", "0", "auto")  # of `MASTER_PORT`: TRL then chooses
_PAUSE = 5.0  # seconds between two lines of progress
_SIZES = {"completions": 64, "length": 128}
_QUICK = {"completions": 8, "length": 32}


def probe(run: Mapping[str, Any], *, as_json: bool = False) -> tuple[str, bool]:
    """
    Start a trainer and its sampler as `run`, the arguments of the command, would. Returns the diagnosis and the parts
    of the gap as text or JSON, and whether nothing needs to be done. Raises a `ValueError` of one line if anything is
    unusable.
    """
    request = {**run, **(_QUICK if run["quick"] else _SIZES)}
    request["completions"] = run["completions"] or request["completions"]
    with tempfile.TemporaryDirectory(prefix="rollout-probe-") as name:
        folder = Path(name)
        first = in_process("the run as it is", {**request, "changes": {}}, folder / "first")
        changes = changes_for(first.facts)
        others: dict[str, Measured | str] = {}
        for i, (change, fields) in enumerate(changes.items(), 1):
            more = {"changes": fields, "tokens": str(folder / "first" / "tokens.pt")}
            try:
                others[change] = in_process(f"{i} of {len(changes)}, {change}", {**request, **more}, folder / str(i))
            except ValueError as error:
                others[change] = str(error)
    parts, observed = split_gap(first.logps[Side.AS_IT_IS], chain_of(first, others)), first.facts["observed"]
    assert observed is not None  # by the process that sampled
    diagnosis = diagnose_parts(observed, parts)
    left_out = {change: reason for change, reason in others.items() if isinstance(reason, str)}
    if as_json:
        tables = {"parts": [part._asdict() for part in parts], "left_out": left_out}
        return write_json(diagnosis, {**tables, "about": first.facts["about"]}), diagnosis.healthy
    return write_text(diagnosis) + write_parts(parts, left_out), diagnosis.healthy


def in_process(title: str, request: Mapping[str, Any], folder: Path) -> Measured:
    """Carry out a request in a separate process, which writes to a new folder, and show its progress."""
    folder.mkdir()
    start = time.monotonic()
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        answer = pool.submit(_answer, {**request, "output": str(folder)})
        while not answer.done():
            progress(f"Probe: {title}, {time.monotonic() - start:.0f} s")
            wait([answer], _PAUSE)
        try:
            return answer.result()
        except (BrokenProcessPool, SystemExit) as error:  # killed, or ended by argparse, which prints the reason
            log = " ".join((folder / "log").read_text(encoding="utf-8", errors="replace").split())
            killed = f"its process was killed, perhaps for lack of memory. {log[-300:]}"
            raise ValueError(log.rpartition(": error: ")[2] if isinstance(error, SystemExit) else killed) from None


def _answer(request: Mapping[str, Any]) -> Measured:
    with (Path(request["output"]) / "log").open("w") as log:  # keeps output of libraries out of the answer
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update({**_ENVIRONMENT, **os.environ})
    if os.environ.get("MASTER_PORT", "").strip().lower() in _ANY_PORT:
        os.environ["MASTER_PORT"] = str(_free_port())
    if not torch.accelerator.is_available():  # compiling for a CPU would take longer than everything else
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from .process import carry_out

    try:
        return carry_out(request)
    except Exception as error:  # from TRL, vLLM or the model, perhaps one that cannot be pickled
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None


def _free_port() -> int:
    """
    A port of a probe's own. TRL looks whether 29500 is free before it builds the engine, which takes it some time
    later: a training that starts in between, or another probe, has it by then.
    """
    with socket.socket() as looking:
        looking.bind(("", 0))
        return int(looking.getsockname()[1])
