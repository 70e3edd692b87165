"""
Answers of `diagnose` on trainings whose sampler is behind, on tasks of the arena and with the pretrained language model.

    python benchmarks/diagnose/trainings.py     # trains what is missing, one to six minutes each, and judges

The sampler of every other task says how old it is; the answer without the ages is judged as well.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from trl_rollout_corr.diagnosis import diagnose, read_tokens
from trl_rollout_corr.diagnosis.observed import DumpedTokens


HERE = Path(__file__).parent
OUTPUT = HERE.parents[1] / "outputs/diagnose/trainings"
# Task, optimizer steps behind, learning rate, arm
TRAININGS = [
    *(("sort", 16, "fast", arm) for arm in ("none", "auto")),
    *(("copy_noise", 16, "fast", arm) for arm in ("none", "auto")),
    *(("add", 32, "fast", arm) for arm in ("none", "auto")),
    *(("brackets", 32, "fast", arm) for arm in ("none", "auto")),
    *((task, 32, "fast", "none") for task in ("sets", "modulo", "drop_vowels")),
    ("sums", 8, "faster", "none"),
]
KNOWN = ("copy_noise", "sort", "sums")  # tasks that were known when the rule for them was made


def train(task: str, lag: int, rate: str, arm: str, folder: Path):
    """Train with a dump, and keep the accuracy before and after."""
    sys.path += [str(HERE.parent / "arena"), str(HERE.parent)]
    import training
    from cells import ARMS, LANGUAGE, STEPS, Cell, Run, Rung

    dumps = {"rollout_dump_dir": str(folder), "rollout_diagnose": True}
    dumping = replace(ARMS[arm], options={**ARMS[arm].options, **dumps})
    run = Run(dumping, Cell(task, Rung(lag, rate)), steps=50 if task == LANGUAGE else STEPS)
    training.prepare(run.engine)
    accuracy = training.train(run)["accuracy"]
    (folder / "accuracy.json").write_text(json.dumps([accuracy[0], sum(accuracy[-3:]) / 3]))


def first_cause(observed: DumpedTokens) -> str:
    diagnosis = diagnose(observed)
    return diagnosis.findings[0].name if diagnosis.findings else diagnosis.verdict


def judge(task: str, lag: int, rate: str, arm: str, folder: Path) -> dict[str, Any]:
    observed = read_tokens(folder)
    named, size, announced = first_cause(observed), observed.size, bool(observed.staleness.max() > 0)
    observed.staleness[:] = 0
    start, end = json.loads((folder / "accuracy.json").read_text())
    return {
        "task": task, "lag": lag, "rate": rate, "arm": arm, "announced": announced, "accuracy": [start, end], "rms": size,
        "first": named, "without_ages": first_cause(observed),
    }  # fmt: skip


def _markdown(*lines: tuple[str, ...]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], ("---",) * len(lines[0]), *lines[1:]))


def table(rows: list[dict[str, Any]]) -> str:
    head = ("task", "age", "correction", "accuracy", "rms of d", "age reported", "named first", "without the ages")
    lines = []
    for row in rows:
        start, end = row["accuracy"]
        lines.append(
            (
                row["task"], str(row["lag"]), row["arm"], f"{start:.2f} to {end:.2f}", f"{row['rms']:.2f}",
                "yes" if row["announced"] else "no", f"`{row['first']}`", f"`{row['without_ages']}`",
            )
        )  # fmt: skip
    return _markdown(head, *lines)


def tally(rows: list[dict[str, Any]]) -> str:
    """How many are called stale, of the tasks that were known when the rule was made, and of the others."""
    kinds = {
        "all": rows,
        f"tasks known when the rule was made ({', '.join(KNOWN)})": [row for row in rows if row["task"] in KNOWN],
        "other tasks": [row for row in rows if row["task"] not in KNOWN],
    }
    counts = [
        (name, *(str(sum(row[key] == "stale" for row in some)) for key in ("first", "without_ages")), str(len(some)))
        for name, some in kinds.items()
    ]
    return _markdown(("trainings", "stale named first", "without the ages", "dumps"), *counts)


def main():
    rows = []
    for one in TRAININGS:
        folder = OUTPUT / "-".join(map(str, one))
        if not (folder / "accuracy.json").exists():  # in a process of its own, which gives back its memory
            command = f"import trainings; trainings.train(*{one!r}, trainings.Path({str(folder)!r}))"
            subprocess.run([sys.executable, "-c", command], cwd=HERE, check=True)
        rows.append(judge(*one, folder))
    (HERE / "trainings.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{tally(rows)}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
