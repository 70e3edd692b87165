"""
`diagnose --probe`: a model and its sampler, looked at before anything is trained. No TRL here: each engine has a process of
its own (`trl_rollout_corr/probe/process.py`), which leaves dumps that are diagnosed as any other.
"""

import json
import os
import shlex
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


# What vLLM reads when it is imported: on a CPU a small cache and the engine in this process, and to say what matters alone
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
# Python puts no folder on the path by itself, such as the current one, whose `yaml.py` would be run: neither here, nor in the
# processes that vLLM starts with `python -m`. The folder of this package is passed, and last once the package is imported.
_SAFE = {"PYTHONSAFEPATH": "1"}
_START = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); import trl_rollout_corr; sys.path.append(sys.path.pop(0)); "
    "runpy.run_module('trl_rollout_corr.probe', run_name='__main__')"
)


class Probed(NamedTuple):
    """
    What a probe found.

    Args:
        observed ([`~trl_rollout_corr.diagnosis.Observed`]):
            The tokens, as sampled and scored without a change.
        diagnosis ([`~trl_rollout_corr.diagnosis.Diagnosis`]):
            In the light of the experiments.
        noise (`float` or `None`):
            What the trainer differs from itself, in nats.
        results (`list[Result]`):
            Of the experiments.
        seconds (`float`):
            How long it took.
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
            How many completions are sampled, at least.
        trainer (`str`, *optional*, defaults to `"grpo"`):
            Whose options those are: `"grpo"` or `"rloo"`.
        verbose (`bool`, *optional*, defaults to `False`):
            Let through what TRL and vLLM say.

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


def _check(model: str, config: str | None, prompts: str | None, completions: int):
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():  # no name of the Hub
        raise ValueError("there is no such folder")
    for name, file in (("--config", config), ("--prompts", prompts)):
        if file is not None and not Path(file).is_file():
            raise ValueError(f"{name} is {file!r}, which is no file")
    if completions < 2:
        raise ValueError(f"--completions must be 2 or more, got {completions}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("a probe is one process, and is started without a launcher")


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
        line = serve_line(request["model"], experiment.engine)
        return Result(name, observed.size, None, f"It takes a server of its own: {line}")
    _say(f"starting another sampler: {experiment.change}")
    try:
        _run({**request, "engine": dict(experiment.engine), "experiments": False}, folder / name, verbose=verbose)
    except ValueError as error:
        return Result(name, observed.size, None, f"vLLM cannot: {error}")
    return Result(name, observed.size, observe(folder / name / "as_it_is").size, noise=noise)


def serve_line(model: str, engine: Mapping[str, Any]) -> str:
    """The command that starts a server with these arguments."""
    words = [(f"--{name.replace('_', '-')}", x if isinstance(x, str) else json.dumps(x)) for name, x in engine.items()]
    return " ".join(["vllm serve", shlex.quote(model), *(f"{flag} {shlex.quote(value)}" for flag, value in words)])


def _run(request: dict[str, Any], output: Path, *, verbose: bool) -> dict[str, Any]:
    """One trainer and one sampler. Returns what is known of them, with dumps in the folder."""
    output.mkdir()
    file = output / "request.json"
    file.write_text(json.dumps({**request, "output": str(output)}), encoding="utf-8")
    command = [sys.executable, "-c", _START, str(Path(__file__).parents[1]), str(file)]
    # what it prints must not get between what is printed here
    stdout = sys.__stderr__ if verbose else subprocess.DEVNULL
    # TRL's own choice is the same in all processes that choose at one time
    environment = {**_ENVIRONMENT, "MASTER_PORT": str(_free_port()), **os.environ, **_SAFE}
    lines = []
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,  # nobody is asked anything
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stderr or ():
            if verbose:
                sys.stderr.write(line)
            lines += [line.strip()] if line.strip() else []
    for line in dict.fromkeys(line for line in lines if line.startswith("warning: ")):
        warn(line.removeprefix("warning: "))
    if process.returncode or not (output / "facts.json").exists():
        said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        raise ValueError(said[-1] if said else _last_words(lines, process.returncode))
    return json.loads((output / "facts.json").read_text(encoding="utf-8"))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def _last_words(lines: list[str], code: int) -> str:
    last = lines[-1] if lines else "it said nothing"
    return f"trainer or sampler ended with code {code}: {last} (--verbose shows all)"


def _say(what: str):
    print(f"Probe: {what} ...", file=sys.stderr, flush=True)  # noqa: T201
