"""
Apply the monitor's rules to the runs of the arena, and see which alarms are false and which falls are missed.

    python benchmarks/monitor/arena.py             # the table, of all runs there are
    python benchmarks/monitor/arena.py --write     # and write arena.json and the tables of README.md

The runs are those of `benchmarks/arena/run.py`, which trains without a monitor. Nothing is trained here, and no torch.
"""

import json
import re
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1] / "arena"))

import itertools

from cells import TUNING
from leads import entries, settings_of

from trl_rollout_corr.health.examine import examine
from trl_rollout_corr.messages import PREFIX


HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FALL = 0.1
LEAD = 5  # optimizer steps before a fall at which an alarm is in time
RUNS = ROOT / "outputs/arena/runs"
RESULTS = HERE / "arena.json"
Alarm = tuple[int, str, str]


# One run --------------------------------------------------------------------------------------------------------------


def is_watched(record: Mapping[str, Any]) -> bool:
    """True if a run logged the inputs of the rules. Runs of TRL's own trainer did not."""
    return f"{PREFIX}k3_kl" in record["history"]


def alarms(record: Mapping[str, Any]) -> list[Alarm]:
    """
    Alarms that the monitor would have raised during a run.

    Args:
        record (`Mapping`):
            A file of `outputs/arena/runs`.

    Returns:
        `list[tuple[int, str, str]]`: step at which it was seen first, severity (`"warning"` or `"critical"`) and rule of each
        cause, by step. Empty if the run logged no metrics.
    """
    if not is_watched(record):
        return []
    found = examine(entries(record), settings_of(record["settings"]["options"]))
    return sorted((finding.step, finding.severity, finding.bound) for finding in found)


def course(record: Mapping[str, Any]) -> tuple[str, int | None]:
    """
    Held-out accuracy over a run.

    Args:
        record (`Mapping`):
            A file of `outputs/arena/runs`.

    Returns:
        `tuple[str, int or None]`: `"falls"` if it is 0.1 or more below its best so far at two looks in a row, `"dips"` if
        only at single ones, else `"keeps"`; and the step of the first such look.
    """
    best, low = -1.0, []
    for value in record["accuracy"]:
        best = max(best, value)
        low.append(value <= best - FALL)
    lasting = [now and after for now, after in itertools.pairwise(low)]
    kind = "falls" if any(lasting) else "dips" if any(low) else "keeps"
    which = lasting if kind == "falls" else low
    return kind, record["steps"][which.index(True)] if kind != "keeps" else None


def summary(name: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """A run in a line of the result file."""
    kind, at = course(record)
    found, accuracy = alarms(record), record["accuracy"]
    critical = next(((step, rule) for step, severity, rule in found if severity == "critical"), (None, None))
    return {
        "run": name,
        "logging_steps": record["history"]["step"][0],
        "task": record["settings"]["task"],
        "arm": record["arm"],
        "accuracy": [round(x, 2) for x in (accuracy[0], max(accuracy), sum(accuracy[-3:]) / len(accuracy[-3:]))],
        "course": kind,
        "at": at,
        "warning": min((step for step, *_ in found), default=None),
        "critical": critical[0],
        "rule": critical[1],
        "verdict": verdict(kind, at, critical[0]),
    }


def verdict(kind: str, at: int | None, critical: int | None) -> str:
    """Of a run that keeps its accuracy: `false` or `silent`; of one that falls: `missed`, `late` or `before`; else `dips`."""
    if kind == "keeps":
        return "silent" if critical is None else "false"
    if kind == "dips":
        return "dips"
    if critical is None:
        return "missed"
    return "before" if at is not None and critical < at else "late"


# Tables ---------------------------------------------------------------------------------------------------------------


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Runs that logged metrics, by name."""
    records = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {name: record for name, record in records.items() if is_watched(record)}


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line per run."""
    lines = [
        "| run | accuracy: start, best, end | course | first warning | first critical | verdict |",
        "| --- " * 6 + "|",
    ]
    for row in rows:
        start, best, end = row["accuracy"]
        critical = "-" if row["critical"] is None else f"{row['critical']} `{row['rule']}`"
        lead = f", {row['at'] - row['critical']} steps" if row["verdict"] == "before" else ""
        word = f"**{row['verdict']}**" if row["verdict"] in ("false", "missed", "late") else row["verdict"]
        cells = [
            f"`{row['run']}`",
            f"{start:.2f}, {best:.2f}, {end:.2f}",
            row["course"] if row["at"] is None else f"{row['course']} at {row['at']}",
            "-" if row["warning"] is None else str(row["warning"]),
            critical,
            word + lead,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def every(record: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The run as if it had logged every so many optimizer steps: means of the metrics."""
    history: dict[str, list[float | None]] = {}
    for key, values in record["history"].items():
        chunks = [[x for x in values[i : i + steps] if x is not None] for i in range(0, len(values), steps)]
        history[key] = [
            None if not chunk else chunk[-1] if key in ("step", f"{PREFIX}staleness_max") else mean(chunk)
            for chunk in chunks
        ]
    return {**record, "history": history}


def counts(rows: Iterable[Mapping[str, Any]]) -> str:
    """Summary of the runs: false alarms of those that keep their accuracy, and what came before the falls."""
    rows = list(rows)
    lines = [
        "| runs | number | critical 5 steps before | before | late | never |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    kept = [row for row in rows if row["course"] == "keeps"]
    for words, chosen in (
        ("corrected or on-policy, keep their accuracy", [row for row in kept if row["arm"] != "none"]),
        ("uncorrected, keep it", [row for row in kept if row["arm"] == "none"]),
    ):
        false = sum(row["verdict"] == "false" for row in chosen)
        lines.append(f"| {words} | {len(chosen)} | - | {false} false | - | {len(chosen) - false} |")
    for words, kind in (("fall by 0.1 or more, for two looks", "falls"), ("dip by 0.1 or more, for one", "dips")):
        chosen = [row for row in rows if row["course"] == kind]
        verdicts = [verdict("falls", row["at"], row["critical"]) for row in chosen]
        early = sum(row["critical"] is not None and row["critical"] <= row["at"] - LEAD for row in chosen)
        numbers = [str(early), *(str(verdicts.count(x)) for x in ("before", "late", "missed"))]
        lines.append(f"| {words} | {len(chosen)} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def sections(rows: Sequence[Mapping[str, Any]]) -> str:
    """The tables of both kinds of tasks, as README.md has them."""
    parts = []
    for kind, tuned in (("Judging", False), ("Tuning", True)):
        for steps, words in ((1, "tasks"), (10, "tasks, a log entry every 10 steps")):
            chosen = [row for row in rows if (row["task"] in TUNING) == tuned and row["logging_steps"] == steps]
            if chosen:
                parts += [f"### {kind} {words}", counts(chosen)]
            if chosen and steps == 1:
                told = [row for row in chosen if row["course"] == "falls" or row["verdict"] == "false"]
                parts += ["Runs that fall, and false alarms:", table(told)]
    return "\n\n".join(parts)


def insert(text: str, tables: str) -> str:
    """README.md with new tables between its marks."""
    start, end = "<!-- arena.py -->", "<!-- end -->"
    return re.sub(f"{start}.*{end}", lambda _: f"{start}\n\n{tables}\n\n{end}", text, count=1, flags=re.DOTALL)


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the arena's runs")
    parser.add_argument("--write", action="store_true", help="write arena.json and the tables of README.md")
    return parser.parse_args()


def main():
    args = parse_args()
    runs = load(args.runs)
    rows = [summary(name, every(record, steps)) for steps in (1, 10) for name, record in runs.items()]
    print(sections(rows))
    if args.write:
        RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
        readme = HERE / "README.md"
        readme.write_text(insert(readme.read_text(), sections(rows)))


if __name__ == "__main__":
    main()
