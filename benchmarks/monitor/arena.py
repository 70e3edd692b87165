"""
Replay the logs of the arena's runs through the monitor's rules: which falls are announced, and which alarms are false.

    python benchmarks/monitor/arena.py                                   # the tables of the published logs
    python benchmarks/monitor/arena.py --write                           # and write second.json and README.md
    python benchmarks/monitor/arena.py --stage second_judging --write    # one stage alone; the others stay as they are

The logs are those of `benchmarks/arena/runs.jsonl.xz`, and of the folder `--runs`, if there is one. Nothing is trained here,
and no torch is needed.
"""

import itertools
import json
import math
import re
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1] / "arena"))

import archive
from cells import TUNING, Run
from leads import entries, settings_of
from second import SECOND_STAGES

from trl_rollout_corr.health.examine import Examiner
from trl_rollout_corr.messages import PREFIX


HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FALL = 0.1
STUNTED = 0.1  # below the run with a sampler of the current weights
LEAD = 5  # optimizer steps before a fall at which an alarm is in time
LAST = 3  # evaluations whose mean is the end of a run
LOGGING_STEPS = 10  # TRL's default
RUNS = ROOT / "outputs/arena/runs"
FIRST, RESULTS = HERE / "arena.json", HERE / "second.json"
STAGES = {"second_tuning": "Tuning", "second_judging": "Judging"}
# Judging runs that were published before the rules were changed for the last time, and could be looked at
KNOWN = "known"
PARTS = {"second_tuning": "tuning", KNOWN: "known runs of judging", "second_judging": "judging"}
KINDS = {"none": "uncorrected", "corrected": "corrected", "on_policy": "never stale"}
Alarm = tuple[int, str, str]
Row = dict[str, Any]


# One run --------------------------------------------------------------------------------------------------------------


def is_watched(record: Mapping[str, Any]) -> bool:
    """True if a run logged the inputs of the rules. Runs of TRL's own trainer did not."""
    return f"{PREFIX}k3_kl" in record["history"]


def alarms(record: Mapping[str, Any]) -> list[Alarm]:
    """
    Alarms that the monitor would have raised during a run with TRL's default `logging_steps`. It reads the sums of an
    optimizer step when the next one ends, or when they are logged; metrics of TRL are those of the last log.

    Args:
        record (`Mapping`):
            A file of `outputs/arena/runs`.

    Returns:
        `list[tuple[int, str, str]]`: step at which it was raised first, severity (`"warning"` or `"critical"`) and bound of
        each cause, by step. Empty if the run logged no metrics.
    """
    return replay(record)[0]


def replay(record: Mapping[str, Any]) -> tuple[list[Alarm], int | None]:
    """The [`alarms`] of a run, and the step at which `rollout_monitor: stop` would have ended it; `None` if it would not."""
    if not is_watched(record):
        return [], None
    examiner, found, ended = Examiner(settings_of(record["settings"]["options"])), dict[str, Alarm](), None
    window: dict[str, list[float]] = defaultdict(list)
    of_trl: dict[str, float] = {}
    for entry in entries(record):
        ours = {key: value for key, value in entry.items() if key.startswith(PREFIX) or key == "step"}
        if "reward" in entry:  # of the generation of this step; the published runs logged no `reward_mean`
            ours.setdefault(f"{PREFIX}reward_mean", entry["reward"])
        for key in entry.keys() - ours.keys():
            window[key].append(entry[key])
        if entry["step"] % LOGGING_STEPS == 0:
            of_trl = {key: mean(values) for key, values in window.items()}
            window.clear()
        raised = examiner.observe({**of_trl, **ours})
        for alarm in raised:
            found.setdefault(alarm.bound, (read_at(alarm.step), alarm.severity, alarm.bound))
        if ended is None and examiner.reward.fell and any(alarm.severity == "critical" for alarm in raised):
            ended = read_at(entry["step"])
    return sorted(found.values()), ended


def read_at(step: int) -> int:
    """Optimizer step at the end of which the monitor reads the sums of a step."""
    return step + (step % LOGGING_STEPS > 0)


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


def end(record: Mapping[str, Any]) -> float:
    """Accuracy at the end of a run."""
    return mean(record["accuracy"][-LAST:])


def summary(name: str, record: Mapping[str, Any], reference: float | None = None) -> Row:
    """A run in a line of the result file. `reference` is the end of the run with a sampler of the current weights."""
    kind, at = course(record)
    correction = record["arm"] if record["arm"] in KINDS else "corrected"
    if kind == "keeps" and correction != "on_policy" and reference is not None and end(record) <= reference - STUNTED:
        kind = "stunted"
    (found, ended), accuracy = replay(record), record["accuracy"]
    critical = next(((step, rule) for step, severity, rule in found if severity == "critical"), (None, None))
    return {
        "run": name,
        "correction": correction,
        "accuracy": [round(x, 2) for x in (accuracy[0], max(accuracy), end(record))],
        "reference": None if reference is None else round(reference, 2),
        "course": kind,
        "at": at,
        "warning": min((step for step, *_ in found), default=None),
        "critical": critical[0],
        "rule": critical[1],
        "ended": ended,
        "verdict": verdict(kind, at, critical[0]),
    }


def verdict(kind: str, at: int | None, critical: int | None) -> str:
    """Of a run that keeps its accuracy `false` or `silent`, of one that falls `missed`, `late` or `before`, else its kind."""
    if kind == "keeps":
        return "silent" if critical is None else "false"
    if kind != "falls":
        return kind
    if critical is None:
        return "missed"
    return "before" if at is not None and critical < at else "late"


# Stages ---------------------------------------------------------------------------------------------------------------


def load(stage: str, folder: Path) -> list[tuple[Run, Row]]:
    """Runs of a stage that are in the archive or in a folder, and have metrics, with their records."""
    with tempfile.TemporaryDirectory() as unpacked:
        archive.unpack(Path(unpacked))
        found = []
        for name, run in {run.name: run for run in SECOND_STAGES[stage]()}.items():
            path = next((path for at in (folder, Path(unpacked)) if (path := at / f"{name}.json").exists()), None)
            record = None if path is None else archive.shortened(json.loads(path.read_text()))
            if record is not None and is_watched(record):
                found.append((run, record))
    return found


def rows_of(runs: Sequence[tuple[Run, Row]]) -> list[Row]:
    """The runs in a line each."""
    ends = defaultdict(list)
    for run, record in runs:
        if run.arm.in_step:
            ends[run.at.name].append(end(record))
    references = {cell: mean(values) for cell, values in ends.items()}
    return [summary(run.name, record, references.get(run.cell.in_step.name)) for run, record in runs]


# Other rules ----------------------------------------------------------------------------------------------------------


def slope(values: Sequence[float]) -> float:
    """Slope of the least-squares line through values at the steps 0, 1, 2, ..."""
    middle = (len(values) - 1) / 2
    return sum((i - middle) * value for i, value in enumerate(values)) / sum(
        (i - middle) ** 2 for i in range(len(values))
    )


def rises(run: Run, record: Row, steps: int, bound: float, level: float, *, full: bool = False) -> int | None:
    """
    First step at which `k3_kl` rises: over so many steps, the slope of its logarithm is above a bound, and its mean is above a
    level. With `full` only once the sampler has reached its full age.
    """
    k3 = record["history"][f"{PREFIX}k3_kl"]
    first = steps + (run.at.rung.lag if full else 0)
    for step in range(first, len(k3) + 1):
        latest = [max(value, 1e-6) for value in k3[step - steps : step] if value is not None]
        if len(latest) == steps and mean(latest) > level and slope([math.log(value) for value in latest]) > bound:
            return read_at(step)
    return None


SLOPES = [
    *((15, bound, level, False) for bound, level in ((0.15, 0.005), (0.15, 0.01), (0.15, 0.02), (0.08, 0.01))),
    *((8, 0.08, level, False) for level in (0.01, 0.03)),
    (15, 0.15, 0.005, True),
]


def tried(runs: Sequence[tuple[Run, Row]]) -> list[Row]:
    """What the monitor's own alarms, and rules about the slope of log k3, say of runs. A line each; none without runs."""
    if not runs:
        return []
    rows = rows_of(runs)
    found = [
        tally("critical alarms of the monitor", rows, lambda i: rows[i]["critical"]),
        tally("all alarms of the monitor", rows, lambda i: rows[i]["warning"]),
    ]
    for steps, bound, level, full in SLOPES:
        words = f"slope of log k3 above {bound} over {steps} steps, mean above {level}"
        words += ", sampler at its full age" if full else ""
        fires = [rises(run, record, steps, bound, level, full=full) for run, record in runs]
        found.append(tally(words, rows, fires.__getitem__))
    return found


def tally(rule: str, rows: Sequence[Row], step: Callable[[int], int | None]) -> Row:
    """Falls that a rule announces, and alarms in runs that keep their accuracy. `step` is that of its alarm in a run."""
    found: Row = {"rule": rule}
    for correction in KINDS:
        own = [(row, step(i)) for i, row in enumerate(rows) if row["correction"] == correction]
        falls = [(row["at"], at) for row, at in own if row["course"] == "falls"]
        kept = [at for row, at in own if row["course"] == "keeps"]
        found[correction] = {
            "falls": len(falls),
            "before": sum(at is not None and at < fall for fall, at in falls),
            "early": sum(at is not None and at <= fall - LEAD for fall, at in falls),
            "kept": len(kept),
            "false": sum(at is not None for at in kept),
        }
    return found


# Tables ---------------------------------------------------------------------------------------------------------------


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (columns, ["---"] * len(columns), *rows))


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line per run that falls, is stunted, or has a false alarm."""
    lines = []
    for row in rows:
        if row["course"] not in ("falls", "stunted") and row["verdict"] != "false":
            continue
        start, best, last = row["accuracy"]
        critical = "-" if row["critical"] is None else f"{row['critical']} `{row['rule']}`"
        lead = f", {row['at'] - row['critical']} steps" if row["verdict"] == "before" else ""
        word = f"**{row['verdict']}**" if row["verdict"] in ("false", "missed", "late") else row["verdict"]
        lines.append(
            [
                f"`{row['run']}`",
                f"{start:.2f}, {best:.2f}, {last:.2f}",
                "-" if row["reference"] is None else f"{row['reference']:.2f}",
                row["course"] if row["at"] is None else f"{row['course']} at {row['at']}",
                "-" if row["warning"] is None else row["warning"],
                critical,
                "-" if row["ended"] is None else row["ended"],
                word + lead,
            ]
        )
    columns = [
        "run",
        "accuracy: start, best, end",
        "never stale",
        "course",
        "first alarm",
        "first critical",
        "`stop` ends it at",
        "verdict",
    ]
    return markdown(columns, lines)


def by_correction(rows: Sequence[Row]) -> str:
    """A line per kind of correction: falls and what announced them, and alarms in the other runs."""
    lines = []
    for correction, words in KINDS.items():
        own = [row for row in rows if row["correction"] == correction]
        falls, keeps, stunted, dips = (
            [row for row in own if row["course"] == kind] for kind in ("falls", "keeps", "stunted", "dips")
        )
        early = sum(row["critical"] is not None and row["critical"] <= row["at"] - LEAD for row in falls)
        critical = [sum(row["critical"] is not None for row in group) for group in (keeps, stunted, dips)]
        before = sum(row["verdict"] == "before" for row in falls)
        warned = sum(row["warning"] is not None for row in keeps)
        ended = [sum(row["ended"] is not None for row in group) for group in (falls, keeps)]
        numbers = [len(own), len(falls), before, early, ended[0], len(keeps), critical[0], ended[1], warned]
        lines.append(
            [words, *numbers, f"{critical[1]} of {len(stunted)}", f"{critical[2]} of {len(dips)}"]
        )  # fmt: skip
    columns = [
        "correction", "runs", "fall", "announced before", "5 steps before", "falls that stop ends", "keep accuracy",
        "false critical alarm", "runs without a fall that stop ends", "any alarm", "stunted, critical", "dip, critical",
    ]  # fmt: skip
    return markdown(columns, lines)


# Of the first proof's falls, and of its corrected and never stale runs that keep their accuracy
GOALS = {
    "falls announced before": (36, 41),
    "falls announced 5 steps before": (32, 41),
    "false critical alarms": (5, 143),
}


def shares(stages: Mapping[str, Sequence[Row]]) -> str:
    """Goals, and what was reached on each part of the runs, as shares."""

    def share(found: int, of: int) -> str:
        return f"{found / of:.2f} ({found} of {of})" if of else "-"

    columns = {"goal": [share(*goal) for goal in GOALS.values()]}
    for stage, rows in stages.items():
        falls = [row for row in rows if row["course"] == "falls"]
        kept = [row for row in rows if row["course"] == "keeps" and row["correction"] != "none"]
        early = sum(row["critical"] is not None and row["critical"] <= row["at"] - LEAD for row in falls)
        columns[PARTS[stage]] = [
            share(sum(row["verdict"] == "before" for row in falls), len(falls)),
            share(early, len(falls)),
            share(sum(row["verdict"] == "false" for row in kept), len(kept)),
        ]
    return markdown(["", *columns], [[name, *cells] for name, *cells in zip(GOALS, *columns.values(), strict=True)])


def comparison(found: Sequence[Row]) -> str:
    """A line per rule that was tried."""
    lines = []
    for row in found:
        cells = [
            f"{row[kind]['before']}, {row[kind]['early']} of {row[kind]['falls']}" for kind in ("none", "corrected")
        ]
        cells += [f"{row[kind]['false']} of {row[kind]['kept']}" for kind in KINDS]
        lines.append([row["rule"], *cells])
    columns = ["rule", "uncorrected falls: before, 5 steps before", "corrected falls: before, 5 steps before"]
    return markdown([*columns, *(f"{words}, keep accuracy: alarm" for words in KINDS.values())], lines)


def counts(rows: Iterable[Mapping[str, Any]]) -> str:
    """Runs of the first proof: false alarms of those that keep their accuracy, and what came before the falls."""
    rows, lines = list(rows), []
    kept = [row for row in rows if row["course"] == "keeps"]
    for words, chosen in (
        ("corrected or on-policy, keep their accuracy", [row for row in kept if row["arm"] != "none"]),
        ("uncorrected, keep it", [row for row in kept if row["arm"] == "none"]),
    ):
        false = sum(row["verdict"] == "false" for row in chosen)
        lines.append([words, len(chosen), "-", f"{false} false", "-", len(chosen) - false])
    for words, kind in (("fall by 0.1 or more, for two looks", "falls"), ("dip by 0.1 or more, for one", "dips")):
        chosen = [row for row in rows if row["course"] == kind]
        verdicts = [verdict("falls", row["at"], row["critical"]) for row in chosen]
        early = sum(row["critical"] is not None and row["critical"] <= row["at"] - LEAD for row in chosen)
        lines.append([words, len(chosen), early, *(verdicts.count(x) for x in ("before", "late", "missed"))])
    return markdown(["runs", "number", "critical 5 steps before", "before", "late", "never"], lines)


def parts_of(results: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Rows by part: those of a stage, and of judging those that were known and those that were not."""
    known = {*results[KNOWN]}
    parts = {stage: results["stages"][stage] for stage in STAGES if stage in results["stages"]}
    if judged := parts.pop("second_judging", []):
        parts[KNOWN] = [row for row in judged if row["run"] in known]
        parts["second_judging"] = [row for row in judged if row["run"] not in known]
    return {part: rows for part, rows in parts.items() if rows}


def tables(results: Mapping[str, Any], first: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Text between the marks of README.md, by mark: of the result file, and of that of the first proof."""
    stages = parts_of(results)
    found = {"shares": shares(stages)}
    for stage, rows in stages.items():
        found[stage] = f"{by_correction(rows)}\n\nRuns that fall, stunted runs, and false alarms:\n\n{table(rows)}"
    for stage, rules in results["rules"].items():
        found[f"{stage}-rules"] = comparison(rules)
    parts = []
    for kind, tuned in (("Judging", False), ("Tuning", True)):
        for steps, words in ((1, "tasks"), (10, "tasks, a log entry every 10 steps")):
            chosen = [row for row in first if (row["task"] in TUNING) == tuned and row["logging_steps"] == steps]
            parts += [f"### {kind} {words}", counts(chosen)]
    return {**found, "first": "\n\n".join(parts)}


def insert(text: str, tables: Mapping[str, str]) -> str:
    """README.md with new tables between its marks."""
    for name, part in tables.items():
        start = f"<!-- {name} -->"
        text = re.sub(
            f"{start}.*?<!-- end -->", lambda _, new=f"{start}\n\n{part}\n\n<!-- end -->": new, text, flags=re.DOTALL
        )
    return text


def write(results: Mapping[str, Any]) -> None:
    """Write the result file, a run a line, and the tables of README.md."""
    text = json.dumps(results, indent=1)
    RESULTS.write_text(re.sub(r"\{\s+(\"r[^{}]*?)\s+\}", lambda m: "{" + " ".join(m[1].split()) + "}", text) + "\n")
    readme = HERE / "README.md"
    readme.write_text(insert(readme.read_text(), tables(results, json.loads(FIRST.read_text()))))


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=[*STAGES], help="which runs (default: all)")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the arena's runs")
    parser.add_argument("--write", action="store_true", help="write second.json and the tables of README.md")
    return parser.parse_args()


def main():
    args = parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {KNOWN: [], "stages": {}, "rules": {}}
    for stage in args.stage:
        runs = load(stage, args.runs)
        if not runs:
            continue
        results["stages"][stage] = rows_of(runs)
        # nothing was chosen on a run that was not known
        results["rules"][stage] = tried([pair for pair in runs if pair[0].name not in results[KNOWN]])
    for name, part in tables(results, json.loads(FIRST.read_text())).items():
        if name == "shares" or name.removesuffix("-rules") in args.stage:
            print(f"\n{name}\n{part}")
    if args.write:
        write(results)


if __name__ == "__main__":
    main()
