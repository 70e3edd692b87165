"""
The command `probe`: the diagnosis of a model and its sampler before any training.

No TRL here: each engine has a process of its own (`trl_rollout_corr/probe/process.py`), which writes dumps and an answer in
JSON. The experiments stand in the records of the causes (`trl_rollout_corr/diagnosis/causes.py`).
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..diagnosis import DumpedTokens, read_tokens
from ..diagnosis.causes import CAUSES, Experiment
from ..diagnosis.evidence import FLOOR, Evidence, rms
from ..diagnosis.precision import caches_in_low_precision, coarser_sampler
from ..diagnosis.ranking import Diagnosis, Finding, diagnose
from ..diagnosis.text import write_json, write_text
from ..messages import number, percent, warn


# Variables that vLLM reads when it is imported: a small cache on a CPU, and the engine in the process of the trainer
_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# Share of d^2 that is left: up to the first, the cause is confirmed, from the second on it is ruled out. Another sample of 64
# completions changes the share by a few percent.
_REMOVED, _UNCHANGED = 0.25, 0.8
# The gap over the trainer's own noise: at least the first before the change, and at most the second where only noise is left
_ABOVE, _LEVEL = 1.5, 1.25
_SURE = 0.9  # certainty from which no other engine is started
_LEAST = 0.1  # share of d^2 below which a cause is left out once another one is confirmed
_LOW = ("bfloat16", "float16")
# Causes and experiments by name, in the order in which they are made. Of two that take the gap away the first is believed: the
# head is a part of everything that computes in float32
EXPERIMENTS: dict[str, tuple[str, Experiment]] = {
    name: (cause, experiment)
    for place in ("trainer", "sampler", "engine")
    for cause, record in CAUSES.items()
    for name, experiment in record.experiments.items()
    if experiment.on == place
}


def probe(run: Mapping[str, Any], *, as_json: bool = False) -> tuple[str, bool]:
    """
    Start a trainer and its sampler as a run would, and diagnose the gap between them. `run` has the arguments of the command.

    Returns the diagnosis with the results of the experiments as text or JSON, and whether nothing has to be done. Raises a
    `ValueError` in one line if anything cannot be used.
    """
    _check(run)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rollout-probe-") as name:
        folder = Path(name)
        _say("starting trainer and sampler")
        facts = _run({**run, "engine": {}, "experiments": True}, folder / "first")
        observed = read_tokens(folder / "first" / "as_it_is")
        results = results_of(folder / "first", observed, facts["left_out"])
        for experiment in engines_to_try(judge(observed, results), facts["about"], results):
            after, reason = _with_engine(experiment, run, folder, facts["mode"])
            results.append(Result(experiment, observed.size, after, reason, own_noise(observed)))
    noise = own_noise(observed)
    diagnosis = judge(observed, results)._replace(floor=observed.size / noise if noise else None)
    if not as_json:
        return write_text(diagnosis) + as_text(observed.size, noise, results, observed.about), diagnosis.healthy
    seconds = round(time.monotonic() - start, 1)
    experiments = [_as_data(result) for result in results]
    more = {"noise_floor": noise, "experiments": experiments, "about": observed.about, "seconds": seconds}
    return write_json(diagnosis, more), diagnosis.healthy


def _check(run: Mapping[str, Any]) -> None:
    if run["model"].startswith(("/", ".", "~")) and not Path(run["model"]).is_dir():  # not a name of the Hub
        raise ValueError("this folder does not exist. Name a folder, or a model on the Hub")
    for name in ("config", "prompts"):
        if run[name] is not None and not Path(run[name]).is_file():
            raise ValueError(f"--{name} is {run[name]!r}, which is not a file")
    if run["completions"] < 2:
        raise ValueError(f"--completions must be 2 or more, got {run['completions']}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("`probe` runs in one process, but WORLD_SIZE is above 1: start it without a launcher")


def _with_engine(name: str, run: Mapping[str, Any], folder: Path, mode: str) -> tuple[float | None, str]:
    """The size of the gap with another engine, or the reason why it is not known."""
    experiment = EXPERIMENTS[name][1]
    if mode == "server":
        return None, f"This experiment needs another server that is started with {dict(experiment.engine)}."
    _say(f"starting another sampler: {experiment.change}")
    try:
        _run({**run, "engine": dict(experiment.engine), "experiments": False}, folder / name)
    except ValueError as error:
        return None, f"vLLM refused this change: {error}"
    return read_tokens(folder / name / "as_it_is").size, ""


def _run(request: dict[str, Any], output: Path) -> dict[str, Any]:
    """Run one trainer and one sampler, which write dumps into the folder. Returns their answer."""
    output.mkdir()
    file = output / "request.json"
    file.write_text(json.dumps({**request, "output": str(output)}), encoding="utf-8")
    with socket.create_server(
        ("", 0)
    ) as listener:  # TRL's own choice is the same in all processes that start at one time
        port = str(listener.getsockname()[1])
    environment = {**_ENVIRONMENT, "MASTER_PORT": port, **os.environ}
    if not torch.accelerator.is_available():  # compiling for a CPU would take longer than everything else
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
    command = [sys.executable, "-m", "trl_rollout_corr.probe.process", str(file)]
    # no command asks the user
    process = subprocess.run(command, env=environment, input=b"", capture_output=True, check=False)
    answer = output / "answer.json"
    if not answer.exists():
        sys.stderr.write(process.stderr.decode(errors="replace"))
        raise ValueError(f"trainer or sampler ended with code {process.returncode}: its output is above")
    facts: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    for message in dict.fromkeys(facts["warnings"]):
        warn(message)
    if "error" in facts:
        raise ValueError(facts["error"])
    return facts


def _say(action: str) -> None:
    print(f"Probe: {action} ...", file=sys.stderr, flush=True)  # noqa: T201


# Results ------------------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """The result of an experiment."""

    name: str  # key of `EXPERIMENTS`
    before: float  # root mean square of the log-ratio without the change, in nats
    after: float | None  # with the change; `None` if the experiment was left out
    reason: str = ""  # why it was left out
    noise: float | None = None  # of the trainer, in nats: `own_noise`

    @property
    def cause(self) -> str:
        """Name of the cause that it is about."""
        return EXPERIMENTS[self.name][0]

    @property
    def experiment(self) -> Experiment:
        return EXPERIMENTS[self.name][1]

    @property
    def left(self) -> float | None:
        """Share of the squared log-ratio that is left."""
        return None if self.after is None else (self.after / max(self.before, 1e-300)) ** 2

    @property
    def says(self) -> str:
        """`"confirms"` or `"rules out"` its cause, or neither: `""`."""
        if self.after is None or self.left is None or self.before < FLOOR:  # there is no gap
            return ""
        noise = self.noise or self.before
        if self.left <= _REMOVED or (self.before >= _ABOVE * noise and self.after <= _LEVEL * noise):
            return "confirms"
        return "rules out" if self.experiment.decisive and self.left >= _UNCHANGED else ""


def results_of(folder: Path, observed: DumpedTokens, left_out: Mapping[str, str]) -> list[Result]:
    """Results of the experiments that have left a dump, and of those that were left out."""
    done = [name for name in EXPERIMENTS if (folder / name).is_dir()]
    noise = own_noise(observed)
    results = [Result(name, observed.size, read_tokens(folder / name).size, noise=noise) for name in done]
    return results + [Result(name, observed.size, None, reason) for name, reason in left_out.items()]


def own_noise(o: DumpedTokens) -> float | None:
    """
    Root mean square of the trainer's difference, padded batch against one by one, in nats; `None` if it is unknown, or if the
    sampler rounds more coarsely than the trainer.
    """
    again = np.isfinite(o.again)
    return rms((o.train - o.again)[again]) if again.any() and not coarser_sampler(o.about) else None


def engines_to_try(diagnosis: Diagnosis, facts: Mapping[str, str], results: Iterable[Result]) -> list[str]:
    """At most two experiments with another engine, whose cause is open after the cheap ones. `facts` are those of the dump."""
    if diagnosis.size < FLOOR or any(result.says == "confirms" for result in results):
        return []
    if caches_in_low_precision(facts):
        return ["cache_of_the_model"]  # a low precision of weights looks the same
    for first in diagnosis.findings[:1]:
        settled = first.name == "rounding" and first.certainty > _SURE
        if settled or first.name not in ("head", "rounding", "weights"):
            return []
    tries = {"float32_head_of_the_sampler": "sampler_head_dtype", "float32_sampler": "sampler_dtype"}
    return [name for name, fact in tries.items() if facts.get(fact) in _LOW]


def judge(o: DumpedTokens, results: Iterable[Result]) -> Diagnosis:
    """
    Diagnose with the results of experiments, which count for more than tests of the tokens: a confirmed cause comes first, and
    a cause that is ruled out is not looked for.
    """
    confirming, ruled_out = _speaking(results)
    return _with_confirmed(diagnose(o, ruled_out), confirming)


def _speaking(results: Iterable[Result]) -> tuple[dict[str, Result], set[str]]:
    """Confirming results by cause, and causes that are ruled out."""
    confirming: dict[str, Result] = {}
    ruled_out: set[str] = set()
    for result in results:
        cause = result.cause
        if result.says == "confirms" and not (cause == "rounding" and "head" in confirming):
            confirming.setdefault(cause, result)
        elif result.says == "rules out":
            ruled_out.add(cause)
    return confirming, ruled_out - confirming.keys()


def _with_confirmed(diagnosis: Diagnosis, confirming: Mapping[str, Result]) -> Diagnosis:
    if not confirming:
        return diagnosis
    findings, confirmed = {finding.name: finding for finding in diagnosis.findings}, []
    for cause, result in confirming.items():
        share = 1 - (result.left or 0.0)
        sentence = "an experiment removes the gap: |d| is {before}, and {after} if " + result.experiment.change
        numbers = {"before": result.before, "after": result.after or 0.0}
        evidence = Evidence(1.0, share, numbers, sentence)
        if cause in findings:
            found = findings.pop(cause).evidence
            evidence = found._replace(numbers={**found.numbers, **numbers}, sentence=f"{found.sentence}; {sentence}")
        confirmed.append(Finding(cause, 0.99, share, evidence))
    left = min(1 - finding.share for finding in confirmed)
    others = [finding._replace(share=finding.share * left) for finding in findings.values()]
    others = [finding for finding in others if finding.share >= _LEAST or finding.name == "nan_rows"]
    confirmed.sort(key=lambda finding: -finding.share)
    return diagnosis._replace(findings=[*confirmed, *others], verdict="found")


_COLUMNS = ("changed", "|d|, nats", "times the trainer's own", "d^2 that is left", "evidence")


def as_text(before: float, noise: float | None, results: Iterable[Result], about: Mapping[str, str]) -> str:
    """The results as text for a terminal. `noise` is [`own_noise`], and `about` is that of the dump."""
    results = list(results)
    table = [_COLUMNS, ("nothing", number(before), _times(before, noise), "", "")]
    for result in results:
        if result.after is not None:
            evidence = {"confirms": f"for {result.cause}", "rules out": f"against {result.cause}"}.get(result.says, "")
            left = percent(round(result.left or 0.0, 2)) if before >= FLOOR else "-"
            table.append((result.experiment.change, number(result.after), _times(result.after, noise), left, evidence))
    widths = [max(len(row[i]) for row in table) for i in range(len(_COLUMNS))]
    lines = ["", "Counter-experiments: one change each, after which the gap is measured again."]
    for row in table:
        lines.append("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if noise is not None:
        lines.append(f"The trainer's own: {number(noise)} nats between scoring a padded batch and one by one.")
    kinds = {"trainer_dtype": "the trainer", "sampler_dtype": "the sampler", "kv_cache_dtype": "the sampler's cache"}
    lines.append(f"Types: {', '.join(f'{side} {about[name]}' for name, side in kinds.items() if name in about)}.")
    lines += [f"Left out: {result.experiment.change}. {result.reason}" for result in results if result.reason]
    return "\n".join(lines) + "\n"


def _times(gap: float, noise: float | None) -> str:
    return number(gap / noise) if noise else "-"


def _as_data(result: Result) -> dict[str, object]:
    """A result as data for JSON."""
    return {
        "experiment": result.name,
        "changed": result.experiment.change,
        "cause": result.cause,
        "rms_log_ratio_before": result.before,
        "rms_log_ratio_after": result.after,
        "says": result.says or None,
        "left_out": result.reason or None,
    }
