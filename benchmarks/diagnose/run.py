"""
Judge `diagnose` by injected faults, and publish the confusion matrix.

    python benchmarks/diagnose/run.py                      # makes the dumps that are missing, then judges
    python benchmarks/diagnose/run.py --output elsewhere   # where dumps are kept
    python benchmarks/diagnose/run.py tune-loops --first 500 --seeds 24    # others, without publishing

Bounds were set on the shapes `tune-*`; what is published is of the shapes `judge-*`, which have other seeds.
"""

import argparse
import json
import math
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from faults import FAULTS

from trl_rollout_corr.diagnosis import diagnose, read_tokens
from trl_rollout_corr.diagnosis.causes import CAUSES
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


def _row(name: str, about: list[str], answers: dict[str, int], right: str) -> tuple[str, ...]:
    hits, n = answers.get(right, 0), sum(answers.values())
    others = ", ".join(f"`{other}` {count}" for other, count in sorted(answers.items()) if other != right)
    return (f"`{name}`", *about, str(hits), str(n), interval(hits, n), others or "-")


def _all(matrix: Matrix, empty: int) -> tuple[str, ...]:
    hits = sum(answers.get(cause, 0) for cause, answers in matrix.items())
    n = sum(sum(answers.values()) for answers in matrix.values())
    return ("all", *[""] * empty, str(hits), str(n), interval(hits, n), f"{n - hits} runs")


def _markdown(*lines: tuple[str, ...]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], ("---",) * len(lines[0]), *lines[1:]))


def table(matrix: Matrix) -> str:
    """Answers by cause, with what each cause means."""
    meanings = {"nothing": "no fault, and both sides in float32", **{name: CAUSES[name].title for name in CAUSES}}
    head = ("cause", "meaning", "named first", "runs", "95 % interval", "otherwise")
    rows = [_row(cause, [meanings[cause]], answers, cause) for cause, answers in matrix.items()]
    return _markdown(head, *rows, _all(matrix, 1))


def missed(matrix: Matrix, usual: Matrix) -> str:
    """Answers by cause, for causes that were not named in every run, here or usually."""
    rows = [
        _row(cause, [], answers, cause)
        for cause, answers in matrix.items()
        if {cause} != answers.keys() | usual[cause].keys()
    ]
    return _markdown(("cause", "named first", "runs", "95 % interval", "otherwise"), *rows, _all(matrix, 0))


def by_kind(by_fault: Matrix) -> str:
    """Answers by fault, for causes that have several faults."""
    several = {cause for cause, n in Counter(FAULTS[fault].cause for fault in by_fault).items() if n > 1}
    chosen = sorted((FAULTS[fault].cause, fault) for fault in by_fault if FAULTS[fault].cause in several)
    rows = [_row(fault, [FAULTS[fault].what, f"`{cause}`"], by_fault[fault], cause) for cause, fault in chosen]
    return _markdown(
        ("fault", "what is wrong", "right answer", "named first", "runs", "95 % interval", "otherwise"), *rows
    )


def without_a_fault(results: dict[str, Any]) -> str:
    """How many of the runs without a fault were called healthy."""
    kinds = {"none": "float32", "bf16": "bfloat16"}
    counts = [
        (kind, results["healthy"][fault], sum(results["by_fault"][fault].values()))
        for fault, kind in kinds.items()
        if fault in results["healthy"]  # models with experts have no second kind
    ]
    counts.append(("all", sum(hits for _, hits, _ in counts), sum(n for _, _, n in counts)))
    rows = [(name, str(hits), str(n), interval(hits, n)) for name, hits, n in counts]
    return _markdown(("both sides", "called healthy", "runs", "95 % interval"), *rows)


def tables(results: dict[str, Any]) -> list[str]:
    """All of them, in the order of the page."""
    looked, without = results["with_second_look"], results["without"]
    return [table(looked), missed(without, looked), by_kind(results["by_fault"]), without_a_fault(results)]


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
    print("\n\n".join(tables(results)))
    print(f"\nTruncation: {results['truncation']}\nWeaker: {results['weaker']}")


if __name__ == "__main__":
    main()
