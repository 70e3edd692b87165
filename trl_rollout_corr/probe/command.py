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
from typing import Any, NamedTuple

from ..diagnosis import Diagnosis, Observed, observe
from ..messages import warn
from .experiments import EXPERIMENTS, Result, engines_to_try, judge, own_noise


# Variables that vLLM reads when it is imported: on a CPU a small cache, the engine in its own process, errors only
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
# Keep the current folder off Python's path, in the process and in those that vLLM starts with `python -m`: a `yaml.py` there
# would be run. The folder of this package is passed as an argument, and last on the path once the package is imported.
_SAFE = {"PYTHONSAFEPATH": "1"}
_START = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); import trl_rollout_corr; sys.path.append(sys.path.pop(0)); "
    "runpy.run_module('trl_rollout_corr.probe', run_name='__main__')"
)


class Probed(NamedTuple):
    """
    The result of a probe.

    Args:
        observed ([`~trl_rollout_corr.diagnosis.Observed`]):
            Tokens that were sampled and scored without a change.
        diagnosis ([`~trl_rollout_corr.diagnosis.Diagnosis`]):
            Diagnosis with the results of the experiments.
        noise (`float` or `None`):
            The trainer's difference from itself, in nats.
        results (`list[Result]`):
            Results of the experiments.
        seconds (`float`):
            Seconds that it took.
    """

    observed: Observed
    diagnosis: Diagnosis
    noise: float | None
    results: list[Result]
    seconds: float


def probe(
    model: str,
    *,
    config: str | None = None,
    options: list[str] | None = None,
    prompts: str | None = None,
    completions: int = 64,
    trainer: str = "grpo",
    verbose: bool = False,
) -> Probed:
    """
    Start a trainer and its sampler as a run would, and diagnose the gap between them.

    Args:
        model (`str`):
            Name of a model or its folder.
        config (`str`, *optional*):
            Recipe of the run, a YAML file. Without one, TRL's defaults with a colocated engine.
        options (`list[str]`, *optional*):
            Options of the run that come after those of the recipe, as on its command line.
        prompts (`str`, *optional*):
            A text file with a prompt in each line. By default those of the recipe's dataset, or some plain ones.
        completions (`int`, *optional*, defaults to `64`):
            Least number of completions.
        trainer (`str`, *optional*, defaults to `"grpo"`):
            Trainer of the run: `"grpo"` or `"rloo"`.
        verbose (`bool`, *optional*, defaults to `False`):
            Show the output of TRL and vLLM.

    Returns:
        [`Probed`].

    Raises:
        `ValueError`: in one line, if anything cannot be used.
    """
    _check(model, config, prompts, completions)
    start = time.monotonic()
    request = {
        "model": model,
        "config": config,
        "options": list(options or []),
        "prompts": prompts,
        "completions": completions,
        "trainer": trainer,
    }
    with tempfile.TemporaryDirectory(prefix="rollout-probe-") as name:
        folder = Path(name)
        _say("starting trainer and sampler")
        facts = _run({**request, "engine": {}, "experiments": True}, folder / "first", verbose=verbose)
        observed = observe(folder / "first" / "as_it_is")
        noise = own_noise(observed)
        results = _cheap(folder / "first", observed, noise, facts)
        for experiment in engines_to_try(judge(observed, results), facts["about"], results):
            results.append(_with_engine(experiment, request, folder, observed, noise, facts, verbose=verbose))
        found = judge(observed, results)._replace(floor=observed.size / noise if noise else None)
    return Probed(observed, found, noise, results, time.monotonic() - start)


def _check(model: str, config: str | None, prompts: str | None, completions: int) -> None:
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():  # no name of the Hub
        raise ValueError("there is no such folder")
    for name, file in (("--config", config), ("--prompts", prompts)):
        if file is not None and not Path(file).is_file():
            raise ValueError(f"{name} is {file!r}, which is no file")
    if completions < 2:
        raise ValueError(f"--completions must be 2 or more, got {completions}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("a probe is one process: start it without a launcher")


def _cheap(folder: Path, observed: Observed, noise: float | None, facts: Mapping[str, Any]) -> list[Result]:
    """Results of the experiments that have left a dump."""
    done = [name for name in EXPERIMENTS if (folder / name).is_dir()]
    results = [Result(name, observed.size, observe(folder / name).size, noise=noise) for name in done]
    return results + [Result(name, observed.size, None, reason) for name, reason in facts["left_out"].items()]


def _with_engine(
    name: str,
    request: Mapping[str, Any],
    folder: Path,
    observed: Observed,
    noise: float | None,
    facts: Mapping[str, Any],
    *,
    verbose: bool,
) -> Result:
    """The result of an experiment that takes an engine of its own."""
    experiment = EXPERIMENTS[name][1]
    if facts["mode"] == "server":
        return Result(name, observed.size, None, f"It needs another server: {facts['servers'][name]}")
    _say(f"starting another sampler: {experiment.change}")
    try:
        _run({**request, "engine": dict(experiment.engine), "experiments": False}, folder / name, verbose=verbose)
    except ValueError as error:
        return Result(name, observed.size, None, f"vLLM refuses it: {error}")
    return Result(name, observed.size, observe(folder / name / "as_it_is").size, noise=noise)


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
        raise ValueError(facts.get("error") or _last_words(last, process.returncode))
    return facts


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def _last_words(line: str, code: int) -> str:
    return f"trainer or sampler ended with code {code}: {line or 'no output'} (--verbose shows all)"


def _say(action: str) -> None:
    print(f"Probe: {action} ...", file=sys.stderr, flush=True)  # noqa: T201
