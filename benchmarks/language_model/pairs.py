"""One sampler and some trainers of any model: the gap of each pair, and what `trl-rollout-corr diagnose` says of it."""

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1] / "diagnose"))

import gap
import numpy as np
from generate import ROWS, STEPS, Sample
from generate import write as write_dump
from harness import Record, write
from report import flat, row_of


KEPT = ("tokens", "rms", "k3", "k3_error", "kl", "max_abs", "outside", "ess")


def measure(
    model: str, sampler: gap.Sampler, trainers: Sequence[gap.Trainer], folder: Path, tokens: int, longest: int
) -> list[Record]:
    """
    Sample, score and diagnose.

    Args:
        model (`str`):
            Folder of the model.
        sampler ([`gap.Sampler`]):
            How it is sampled.
        trainers (`Sequence[gap.Trainer]`):
            How it is scored.
        folder (`Path`):
            Where the samples are kept.
        tokens (`int`):
            Least number of tokens.
        longest (`int`):
            Most tokens of a completion.

    Returns:
        `list[dict]`: for each trainer the gap as in [`report.row_of`] and the `diagnosis`; or the `error` of a trainer that
        is not to be had, such as an attention that is not installed.
    """
    process = get_context("spawn").Process(target=sample, args=(folder, sampler, model, tokens, longest))
    process.start()  # an engine does not give its memory back
    process.join()
    if process.exitcode:
        raise RuntimeError(f"Sampling ended with exit code {process.exitcode}.")
    samples, rows = json.loads((folder / "samples.json").read_text()), []
    lengths = np.array([len(logps) for logps in samples["logps"]])
    for trainer in trainers:
        row: Record = {"sampler": sampler.name, "trainer": trainer.name}
        try:
            logps = gap.score(sampler, trainer, samples, model)["logps"]
            found = row_of(flat(logps) - flat(samples["logps"]), lengths)
            said = diagnosis(sampler, trainer, samples, logps, model)
            rows.append({**row, **{key: found[key] for key in KEPT}, "diagnosis": said})
        except (ImportError, ValueError, RuntimeError) as error:
            rows.append({**row, "error": f"{type(error).__name__}: {error}"})
        gc.collect()
    return rows


def sample(folder: Path, sampler: gap.Sampler, model: str, tokens: int, longest: int):
    write(folder / "samples.json", gap.sample(sampler, model, tokens, longest))


def diagnosis(sampler: gap.Sampler, trainer: gap.Trainer, samples: Record, logps: list, model: str) -> str:
    """Causes in their order, or the verdict if there is none, of the first 64 completions."""
    n = STEPS * ROWS
    triples = zip(samples["prompts"], samples["completions"], samples["logps"], strict=True)
    chosen = [Sample(prompt, ids, theirs, [True] * len(ids)) for prompt, ids, theirs in triples][:n]
    first = {key: samples[key][:ROWS] for key in ("prompts", "completions", "logps")}
    again = gap.score(sampler, gap.Trainer(**{**vars(trainer), "alone": True}), first, model)["logps"]
    widths = [max(len(s.prompt) for s in chosen[i - i % ROWS :][:ROWS]) for i in range(n)]
    padding = [width - len(s.prompt) for width, s in zip(widths, chosen, strict=True)]
    about: dict[str, Any] = {"adapter": "none", "experts": "none", "sampler_dtype": sampler.engine["dtype"]}
    about |= {key: sampler.engine[key] for key in ("kv_cache_dtype", "quantization") if key in sampler.engine}
    about["trainer_dtype"] = "bfloat16" if trainer.autocast else trainer.dtype
    with tempfile.TemporaryDirectory() as dump:
        fields: dict[str, Any] = {"ages": [0] * n, "settings": {}, "about": about}
        write_dump(Path(dump), chosen, (logps, padding), dict(enumerate(again)), **fields)
        command = [sys.executable, "-m", "trl_rollout_corr", "diagnose", dump, "--json"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
    if said.returncode not in (0, 1):
        return f"no diagnosis: {said.stderr.strip()}"
    answer = json.loads(said.stdout)
    causes = ", ".join(cause["cause"] for cause in answer["causes"]) or answer["verdict"]
    return f"{causes} (healthy)" if answer["healthy"] else causes
