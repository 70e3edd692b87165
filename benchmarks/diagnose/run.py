"""
Judge `diagnose` by injected faults, and publish the confusion matrix.

    python benchmarks/diagnose/run.py                      # makes the dumps that are missing, then judges
    python benchmarks/diagnose/run.py --output elsewhere   # where dumps are kept
    python benchmarks/diagnose/run.py tune-loops --first 500 --seeds 24    # others, without publishing

Bounds were set on the shapes `tune-*`; what is published is of the shapes `judge-*`, which have other seeds.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from faults import FAULTS

from trl_rollout_corr.diagnosis import diagnose, observe
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
            observed = observe(dump)
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


def table(matrix: dict[str, dict[str, int]]) -> str:
    """Rows of the table in README.md."""
    lines = ["| cause | named first | runs | otherwise |", "| --- | --- | --- | --- |"]
    for cause, answers in matrix.items():
        others = ", ".join(f"{name} {n}" for name, n in sorted(answers.items()) if name != cause)
        lines.append(f"| `{cause}` | {answers.get(cause, 0)} | {sum(answers.values())} | {others or '-'} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--first", type=int, default=FIRST)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--output", type=Path, default=Path("outputs/diagnose"))
    args = parser.parse_args()
    for shape in args.shapes:
        if not (args.output / shape).exists():
            options = {"--seeds": args.seeds, "--first": args.first, "--output": args.output}
            words = [str(word) for option in options.items() for word in option]
            subprocess.run([sys.executable, str(HERE / "generate.py"), shape, *words], check=True)
    folders = [args.output / shape for shape in args.shapes]
    with_look, by_fault, healthy = judge(folders, old=False)
    without, _, _ = judge(folders, old=True)
    _, weaker, _ = judge([folder.with_name(f"{folder.name}-weaker") for folder in folders], old=False)
    strengths = [json.loads(path.read_text()) for folder in folders for path in folder.glob("truncation.json")]
    drawn = Counter(f"{name} {x:g}" for of_shape in strengths for one in of_shape.values() for name, x in one.items())
    order = sorted(with_look)
    results = {
        "shapes": args.shapes,
        "seeds": [args.first, args.first + args.seeds - 1],
        "signatures": [[name, test.weak, test.strong] for stage in (*STAGES, *DIFFUSE) for name, test in stage.tests],
        "with_second_look": {cause: dict(with_look[cause]) for cause in order},
        "without": {cause: dict(without[cause]) for cause in order},
        "by_fault": {fault: dict(by_fault[fault]) for fault in sorted(by_fault)},
        "healthy": dict(healthy),
        "truncation": dict(sorted(drawn.items())),
        "weaker": {fault: dict(answers) for fault, answers in weaker.items()},
    }
    if (args.shapes, args.first, args.seeds) == (SHAPES, FIRST, SEEDS):
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table({cause: with_look[cause] for cause in order}))
    print("\nOld dumps:\n")
    print(table({cause: without[cause] for cause in order}))
    print(f"\nHealthy: {dict(healthy)}\nTruncation: {results['truncation']}\nWeaker: {results['weaker']}")


if __name__ == "__main__":
    main()
