"""
The command `probe`: the diagnosis of a model and its sampler before any training. No TRL here: each engine has a process of
its own (`trl_rollout_corr/probe/process.py`), which writes dumps and an answer in JSON.
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

import torch

from ..diagnosis import DumpedTokens, read_tokens
from ..diagnosis.text import write_json, write_text
from ..messages import warn
from .experiments import EXPERIMENTS, Result, as_data, as_text, engines_to_try, judge, own_noise


# Variables that vLLM reads when it is imported: on a CPU a small cache, the engine in its own process, errors only
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
# Keep the current folder off Python's path, in the process and in those that vLLM starts with `python -m`: a `yaml.py` there
# would be run. The folder of this package is passed as an argument, and last on the path once the package is imported.
_SAFE = {"PYTHONSAFEPATH": "1"}
_START = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); import trl_rollout_corr; sys.path.append(sys.path.pop(0)); "
    "runpy.run_module('trl_rollout_corr.probe.process', run_name='__main__')"
)


def probe(run: Mapping[str, object], *, as_json: bool = False, verbose: bool = False) -> tuple[str, bool]:
    """
    Start a trainer and its sampler as a run would, and diagnose the gap between them.

    Args:
        run (`Mapping[str, Any]`):
            `model` (name or folder), `config` (recipe, a YAML file, or `None` for TRL's defaults with a colocated engine),
            `options` (a command line, which comes after the recipe), `prompts` (a text file, or `None` for built-in ones),
            `completions` (the least number of them) and `trainer` (`"grpo"` or `"rloo"`).
        as_json (`bool`, *optional*, defaults to `False`):
            Return JSON.
        verbose (`bool`, *optional*, defaults to `False`):
            Show the output of TRL and vLLM.

    Returns:
        `tuple[str, bool]`: the diagnosis with the results of the experiments, and whether nothing has to be done.

    Raises:
        `ValueError`: in one line, if anything cannot be used.
    """
    _check(run)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rollout-probe-") as name:
        folder = Path(name)
        _say("starting trainer and sampler")
        facts = _run({**run, "engine": {}, "experiments": True}, folder / "first", verbose=verbose)
        observed = read_tokens(folder / "first" / "as_it_is")
        results = results_of(folder / "first", observed, facts["left_out"])
        for experiment in engines_to_try(judge(observed, results), facts["about"], results):
            results.append(_with_engine(experiment, run, folder, observed, facts["mode"], verbose=verbose))
    noise = own_noise(observed)
    diagnosis = judge(observed, results)._replace(floor=observed.size / noise if noise else None)
    if not as_json:
        return write_text(diagnosis) + as_text(observed.size, noise, results, observed.about), diagnosis.healthy
    seconds = round(time.monotonic() - start, 1)
    more = {"noise_floor": noise, "experiments": as_data(noise, results), "about": observed.about, "seconds": seconds}
    return write_json(diagnosis, more), diagnosis.healthy


def _check(run: Mapping[str, Any]) -> None:
    model, completions = run["model"], run["completions"]
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():  # not a name of the Hub
        raise ValueError("this folder does not exist. Name a folder, or a model on the Hub")
    for name in ("config", "prompts"):
        if run[name] is not None and not Path(run[name]).is_file():
            raise ValueError(f"--{name} is {run[name]!r}, which is not a file")
    if completions < 2:
        raise ValueError(f"--completions must be 2 or more, got {completions}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("`probe` runs in one process, but WORLD_SIZE is above 1: start it without a launcher")


def results_of(folder: Path, observed: DumpedTokens, left_out: Mapping[str, str]) -> list[Result]:
    """Results of the experiments that have left a dump, and of those that were left out."""
    done = [name for name in EXPERIMENTS if (folder / name).is_dir()]
    noise = own_noise(observed)
    results = [Result(name, observed.size, read_tokens(folder / name).size, noise=noise) for name in done]
    return results + [Result(name, observed.size, None, reason) for name, reason in left_out.items()]


def _with_engine(
    name: str, run: Mapping[str, Any], folder: Path, observed: DumpedTokens, mode: str, *, verbose: bool
) -> Result:
    """The result of an experiment that takes an engine of its own."""
    experiment = EXPERIMENTS[name][1]
    if mode == "server":
        return Result(
            name,
            observed.size,
            None,
            f"This experiment needs another server that is started with {dict(experiment.engine)}.",
        )
    _say(f"starting another sampler: {experiment.change}")
    try:
        _run({**run, "engine": dict(experiment.engine), "experiments": False}, folder / name, verbose=verbose)
    except ValueError as error:
        return Result(name, observed.size, None, f"vLLM refused this change: {error}")
    return Result(name, observed.size, read_tokens(folder / name / "as_it_is").size, noise=own_noise(observed))


def _run(request: dict[str, Any], output: Path, *, verbose: bool) -> dict[str, Any]:
    """Run one trainer and one sampler, which write dumps into the folder. Returns their answer."""
    output.mkdir()
    file = output / "request.json"
    file.write_text(json.dumps({**request, "output": str(output)}), encoding="utf-8")
    command = [sys.executable, "-c", _START, str(Path(__file__).parents[1]), str(file)]
    # its output must not mix with the output of this command
    stdout = sys.__stderr__ if verbose else subprocess.DEVNULL
    # TRL's own choice is the same in all processes that start at one time
    environment = {**_ENVIRONMENT, "MASTER_PORT": str(_free_port()), **os.environ, **_SAFE}
    if not torch.accelerator.is_available():  # compiling for a CPU would take longer than everything else
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
    last = ""
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,  # no command asks the user
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stderr or ():
            if verbose:
                sys.stderr.write(line)
            last = line.strip() or last
    answer = output / "answer.json"
    facts = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    for message in dict.fromkeys(facts.get("warnings", ())):
        warn(message)
    if "about" not in facts:
        ended = f"trainer or sampler ended with code {process.returncode}: {last or 'no output'} (--verbose shows all)"
        raise ValueError(facts.get("error") or ended)
    return facts


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def _say(action: str) -> None:
    print(f"Probe: {action} ...", file=sys.stderr, flush=True)  # noqa: T201
