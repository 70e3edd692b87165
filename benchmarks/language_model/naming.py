"""What `trl-rollout-corr diagnose` says of samples and of a trainer's scores, which are written as a dump."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1] / "diagnose"))

import gap
from generate import ROWS, STEPS, Sample, write
from harness import Record


def name_cause(
    sampler: gap.Sampler, trainer: gap.Trainer, alone: gap.Trainer, samples: Record, logps: list, model: str
) -> str:
    """
    Causes of a gap, the first first, or the verdict if there is none.

    Args:
        sampler ([`gap.Sampler`]):
            How it was sampled.
        trainer ([`gap.Trainer`]):
            How it was scored.
        alone ([`gap.Trainer`]):
            The same trainer without padding.
        samples (`dict`):
            As of [`gap.sample`]; 64 of them are looked at.
        logps (`list[list[float]]`):
            Scores of the trainer.
        model (`str`):
            Folder of the model.
    """
    n = STEPS * ROWS
    triples = zip(samples["prompts"], samples["completions"], samples["logps"], strict=True)
    chosen = [Sample(prompt, ids, theirs, [True] * len(ids)) for prompt, ids, theirs in triples][:n]
    first = {key: samples[key][:ROWS] for key in ("prompts", "completions", "logps")}
    again = dict(enumerate(gap.score(sampler, alone, first, model)["logps"]))
    widths = [max(len(s.prompt) for s in chosen[i - i % ROWS :][:ROWS]) for i in range(n)]
    padding = [width - len(s.prompt) for width, s in zip(widths, chosen, strict=True)]
    about: dict[str, Any] = {"adapter": "none", "experts": "none", "sampler_dtype": sampler.engine["dtype"]}
    about |= {key: sampler.engine[key] for key in ("kv_cache_dtype", "quantization") if key in sampler.engine}
    about["trainer_dtype"] = "bfloat16" if trainer.autocast else trainer.dtype
    with tempfile.TemporaryDirectory() as dump:
        write(Path(dump), chosen, (logps, padding), again, ages=[0] * n, settings={}, about=about)
        command = [sys.executable, "-m", "trl_rollout_corr", "diagnose", dump, "--json"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
    if said.returncode not in (0, 1):
        return f"no diagnosis: {said.stderr.strip()}"
    answer = json.loads(said.stdout)
    causes = ", ".join(cause["cause"] for cause in answer["causes"]) or answer["verdict"]
    return f"{causes} (healthy)" if answer["healthy"] else causes
