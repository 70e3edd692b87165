"""
Judge `diagnose` by injected faults: make the dumps that are missing, judge them, and write `results.json`.

    python benchmarks/diagnose/run.py
    python benchmarks/diagnose/run.py --output elsewhere   # where dumps are kept
"""

import argparse
import json
import math
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from faults import FAULTS
from tables import grid

from trl_rollout_corr.diagnosis import diagnose, read_tokens
from trl_rollout_corr.diagnosis.ranking import DIFFUSE, STAGES


HERE = Path(__file__).parent
SHAPES = ["judge-qwen3", "judge-llama", "judge-moe-small", "judge-moe"]
FIRST, SEEDS = 600, 20


def judge(folders: list[Path], *, old: bool) -> tuple[dict[str, Counter], dict[str, Counter], Counter]:
    """Answers by cause and by fault, and how many of the runs without a fault, or with rounding alone, were called healthy."""
    by_cause: dict[str, Counter] = defaultdict(Counter)
    by_fault: dict[str, Counter] = defaultdict(Counter)
    healthy: Counter = Counter()
    for folder in folders:
        for dump in sorted(path for path in folder.glob("*/*") if path.is_dir()):
            observed = read_tokens(dump)
            if old:  # as a dump that nobody asked for a diagnosis of
                observed.about = {}
                observed.again[:] = np.nan
            diagnosis = diagnose(observed)
            answer = diagnosis.findings[0].name if diagnosis.findings else diagnosis.verdict
            fault = dump.parent.name
            if FAULTS[fault].drifts != "run":  # which is about a name that must not be given
                by_cause[FAULTS[fault].cause][answer] += 1
            by_fault[fault][answer] += 1
            if fault in ("none", "bf16"):
                healthy[fault] += diagnosis.healthy
    return by_cause, by_fault, healthy


# Tables of README.md -------------------------------------------------------------------------------------------------------

Matrix = dict[str, dict[str, int]]
_Z = 1.96  # standard deviations of an interval of 95 %


def interval(hits: int, n: int) -> str:
    """Interval of 95 % of a share, in percent, by Wilson's formula."""
    centre, spread = hits + _Z**2 / 2, _Z * math.sqrt(hits * (n - hits) / n + _Z**2 / 4)
    low, high = (100 * (centre + sign * spread) / (n + _Z**2) for sign in (-1, 1))
    return f"{low:.0f} to {high:.0f} %"


HEAD = ("named first", "runs", "95 % interval", "otherwise")


def _counts(answers: dict[str, int], right: str) -> tuple[str, ...]:
    hits, n = answers.get(right, 0), sum(answers.values())
    others = ", ".join(f"`{other}` {count}" for other, count in sorted(answers.items()) if other != right)
    return (str(hits), str(n), interval(hits, n), others or "-")


def missed(matrix: Matrix, other: Matrix) -> str:
    """Answers by cause, for causes that were not named in every run, here or there, and the sum over all causes."""
    shown = (cause for cause in matrix if {cause} != matrix[cause].keys() | other[cause].keys())
    hits = sum(answers.get(cause, 0) for cause, answers in matrix.items())
    n = sum(sum(answers.values()) for answers in matrix.values())
    rows = [(f"`{cause}`", *_counts(matrix[cause], cause)) for cause in shown]
    return grid(("cause", *HEAD), [*rows, ("all", str(hits), str(n), interval(hits, n), f"{n - hits} runs")])


def by_fault(answers: Matrix, by_cause: Matrix) -> str:
    """Answers by fault, for faults that are one of several of their cause and were not named in every run."""
    rows = []
    for fault, found in answers.items():
        cause, what = FAULTS[fault].cause, FAULTS[fault].what
        if found.keys() != {cause} and found != by_cause[cause]:
            rows.append((f"`{fault}`", what, f"`{cause}`", *_counts(found, cause)))
    return grid(("fault", "what is wrong", "right answer", *HEAD), rows)


def without_a_fault(results: dict[str, Any]) -> str:
    """How many of the runs without a fault were called healthy."""
    kinds = {"float32": "none", "bfloat16": "bf16"}
    counts = {kind: (results["healthy"][f], sum(results["by_fault"][f].values())) for kind, f in kinds.items()}
    counts["all"] = tuple(map(sum, zip(*counts.values(), strict=True)))
    rows = [(kind, str(hits), str(n), interval(hits, n)) for kind, (hits, n) in counts.items()]
    return grid(("both sides", "called healthy", "runs", "95 % interval"), rows)


def tables(results: dict[str, Any]) -> list[str]:
    """All of them, in the order of the page."""
    looked, without = results["with_second_look"], results["without"]
    return [
        missed(looked, without),
        missed(without, looked),
        by_fault(results["by_fault"], looked),
        without_a_fault(results),
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("outputs/diagnose"))
    args = parser.parse_args()
    for shape in SHAPES:
        if not (args.output / shape).exists():
            options = {"--seeds": SEEDS, "--first": FIRST, "--output": args.output}
            words = [str(word) for option in options.items() for word in option]
            subprocess.run([sys.executable, str(HERE / "generate.py"), shape, *words], check=True)
    folders = [args.output / shape for shape in SHAPES]
    with_look, of_faults, healthy = judge(folders, old=False)
    without, _, _ = judge(folders, old=True)
    strengths = [json.loads(path.read_text()) for folder in folders for path in folder.glob("truncation.json")]
    drawn = Counter(f"{name} {x:g}" for of_shape in strengths for one in of_shape.values() for name, x in one.items())
    order = sorted(with_look)
    results = {
        "signatures": [[name, test.weak, test.strong] for stage in (*STAGES, *DIFFUSE) for name, test in stage.tests],
        "with_second_look": {cause: dict(with_look[cause]) for cause in order},
        "without": {cause: dict(without[cause]) for cause in order},
        "by_fault": {fault: dict(of_faults[fault]) for fault in sorted(of_faults)},
        "healthy": dict(healthy),
        "truncation": dict(sorted(drawn.items())),
    }
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print("\n\n".join(tables(results)))


if __name__ == "__main__":
    main()
