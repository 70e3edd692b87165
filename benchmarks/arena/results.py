"""Runs in a few numbers, and what is written of them. No torch here."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import archive
import report
from plan import ARMS, CHOSEN, CUT_TASKS, STAGES, Run
from seeds import scores, wanted


Row = dict[str, Any]
HERE = Path(__file__).parent
DATA, PAGE = "results.json", "RESULTS.md"
AGAIN = "again.json"  # runs that one machine made one after the other, next to those of the archive
OF_AGAIN = "AMD EPYC"  # the processor on which the cells were trained again that `CHOSEN` had missed
OF_CORRECTION = "rollout_corr/"
FALL = 0.1  # below an own best
LAST = 3  # looks that are averaged
LATE = 6  # last windows of ten steps
FIRST, SETTLED = 20, 40  # steps: documents read the gap of fresh weights between them


def row_of(run: Run, record: Mapping[str, Any]) -> Row:
    """
    A run in a few numbers.

    Args:
        run (`Run`):
            The run. One of the on-policy arm stands in every cell that it is the reference of.
        record (`Mapping`):
            What `training.train` returned.

    Returns:
        `dict`: cell, arm and seed; accuracy at the start, and as the mean of the last three looks; whether it fell; mean share
        of tokens without gradient; median of the gap. Where they are known, also:

        - with fresh weights, the mean gap of the first 20 steps, and the median of the next 20;
        - where a witness was there, of the last 60 steps, the share of bad tokens with a ratio above 1, their part of the pull
          of bad tokens, and the mean gap;
        - with 8 bits, the share of numbers that a push changes;
        - of tasks with cut answers, the share that is cut in the last 60 steps;
        - of runs of 600 steps, the mean and the lowest look of the second half, and the reward of the sampler in the last 60
          steps;
        - every look, where the task has tags.
    """
    accuracy, history = record["accuracy"], record["history"]
    gaps = logged(history, f"{OF_CORRECTION}k3_kl")
    row = {
        "cell": run.cell.name,
        "arm": run.arm.name,
        "seed": run.seed,
        "start": accuracy[0],
        "accuracy": mean(accuracy[-LAST:]),
        "falls": falls(accuracy),
        "rejected": rejected(history),
        "k3": median(gaps) if gaps else None,
    }
    if gaps and not run.cell.rung.lag:
        row["k3_first"] = mean(gaps[:FIRST])
        row["k3_settled"] = median(gaps[FIRST:SETTLED] or gaps)
    force = record.get("force", [])[-LATE:]
    if bad := sum(window["bad"] for window in force):  # 0 where no answer is right any more
        row["grown"] = sum(window["grown"] for window in force) / bad
        row["grown_pull"] = sum(window["grown_pull"] for window in force) / sum(window["bad_pull"] for window in force)
        row["k3_late"] = mean(gaps[-LATE * 10 :])
    if "moved" in record:
        row["moved"] = record["moved"]
    if run.cell.task in CUT_TASKS:
        row["cut"] = mean(logged(history, "completions/clipped_ratio")[-LATE * 10 :] or [0.0])
    if run.cell.way == "long":
        second_half = accuracy[len(accuracy) // 2 :]
        row |= {"late": mean(second_half), "lowest": min(second_half)}
        row["reward"] = mean(logged(history, "reward")[-LATE * 10 :])
    if run.cell.task.startswith("tag"):
        row["steps"] = record["steps"]
        row["looks"] = [round(value, 4) for value in accuracy]
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def falls(accuracy: Sequence[float]) -> bool:
    """Whether two looks in a row are 0.1 below the best one before them."""
    best, low = accuracy[0], []
    for value in accuracy:
        best = max(best, value)
        low.append(value <= best - FALL)
    return any(now and after for now, after in pairwise(low))


def logged(history: Mapping[str, Sequence[float | None]], key: str) -> list[float]:
    return [value for value in history.get(key, []) if value is not None]


def rejected(history: Mapping[str, Sequence[float | None]]) -> float | None:
    """Mean share of tokens without gradient: by a criterion, by a weight of 0, or by clipping."""
    keys = (
        f"{OF_CORRECTION}rollout_rs_masked_fraction",
        f"{OF_CORRECTION}rollout_is_oob_ratio",
        "clip_ratio/region_mean",
    )
    return next((mean(values) for key in keys if (values := logged(history, key))), None)


def collect(folder: Path) -> dict[str, Any]:
    """The runs in a folder that belong to a stage, as rows, and how many were planned. A stage without runs is left out."""
    results: dict[str, Any] = {}
    for stage, plan in STAGES.items():
        runs = list({(run.cell.name, run.arm.name, run.seed): run for run in plan()}.values())
        paths = {run.name: folder / f"{run.name}.json" for run in runs}
        done = {name: archive.shortened(json.loads(path.read_text())) for name, path in paths.items() if path.exists()}
        if not done:
            continue
        rows = [row_of(run, done[run.name]) for run in runs if run.name in done]
        results[stage] = {
            "planned": len({*done, *(run.name for run in needed(runs, rows))}),
            "done": len(done),
            "minutes": round(sum(record["cpu_seconds"] for record in done.values()) / 60),
            "rows": rows,
        }
    return results


def beside_published(
    runs: Sequence[Run], folder: Path, names: Sequence[str] = ("on_policy", "none", "trl", "dppo_tv", "cap3")
) -> str:
    """A line per cell of somebody's own runs: their scores next to those that are published."""
    own = [row_of(run, json.loads((folder / f"{run.name}.json").read_text())) for run in runs]
    cells = {row["cell"] for row in own}
    published = {
        (row["cell"], row["arm"], row["seed"]): row
        for found in collect(folder).values()
        for row in found["rows"]
        if row["cell"] in cells
    }
    arms = [*names, *dict.fromkeys(run.arm.name for run in runs)]
    return report.every_cell([*published.values(), *own], arms)


def needed(runs: Sequence[Run], rows: Iterable[Row]) -> list[Run]:
    """Runs that the protocol asks for: of other seeds than 0, those that rows of seed 0 make useful."""
    asked = {cell: wanted(by_arm) for cell, by_arm in scores(rows).items() if any(0 in x for x in by_arm.values())}
    return [run for run in runs if not run.seed or run.arm.name in asked.get(run.cell.name, [])]


def write(results: dict[str, Any], path: Path):
    """As JSON, a row a line."""
    text = json.dumps(results, indent=1)
    path.write_text(re.sub(r"\{\s+(\"cell\"[^{}]*?)\s+\}", lambda m: "{" + " ".join(m[1].split()) + "}", text) + "\n")


def again(runs: Path | None = None, published: Path = HERE / AGAIN) -> list[Row]:
    """Runs that `--again` trained, those published before and those in a folder, as rows with every look."""
    rows = {
        (row["run"], row["machine"]): row for row in (json.loads(published.read_text()) if published.exists() else [])
    }
    for path in sorted(runs.glob("*.json")) if runs is not None else []:
        record = json.loads(path.read_text())
        accuracy = record["accuracy"]
        rows[path.stem, record["machine"]] = {
            "run": path.stem,
            **{key: record[key] for key in ("cell", "arm", "seed", "machine")},
            "accuracy": round(mean(accuracy[-LAST:]), 4),
            "falls": falls(accuracy),
            "looks": [round(value, 4) for value in accuracy],
        }
    return [rows[name] for name in sorted(rows)]


def tables(results: Mapping[str, Any], of_one_machine: Sequence[Row] | None = None) -> dict[str, str]:
    """Text between the marks of the page, by mark."""
    parts = {"runs": report.counts(results), "kept": report.kept(results)}
    for stage, found in results.items():
        rows = found["rows"]
        parts |= report.tables(stage, rows, [name for name in ARMS if any(row["arm"] == name for row in rows)])
    parts["one_rule"] = report.one_rule(results, CHOSEN)
    parts["unseen"] = report.unseen(results)
    parts["further"] = report.further(results)
    parts["same_arms"] = report.same_arms(results)
    parts["grown"] = report.grown(results)
    parts["recent"] = report.recent(results, again=False)
    parts["recent_again"] = report.recent(results, again=True)
    parts["young"] = report.young(results)
    rows = again() if of_one_machine is None else of_one_machine
    missed = {row["cell"] for row in rows if row["machine"] == OF_AGAIN and row["arm"] == CHOSEN}
    parts["again"] = report.again(
        [row for row in rows if row["machine"] == OF_AGAIN and row["cell"] in missed], results, CHOSEN
    )
    announced = {run.cell.name for stage in STAGES.values() for run in stage() if run.sampler.get("announced")}
    weighted = {cell for cell in announced if "lost" not in cell}  # its pushes are announced, and the age is 0
    others = [row for row in rows if row["machine"] != OF_AGAIN]
    parts["today"] = report.today(results, others, weighted)
    parts["next"] = report.next_rule(others, results, weighted)
    return parts


def filled(text: str, parts: Mapping[str, str]) -> str:
    """A document with what stands between its marks replaced. Parts that it has no marks for are left out."""

    def part(mark: str) -> str:
        stage = mark.partition("-")[0]
        has_runs = any(name.startswith(f"{stage}-") for name in parts)
        return parts[mark] if has_runs or stage not in STAGES else "No run is done yet."

    return re.sub(
        r"(<!-- ([\w-]+) -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{part(m[2])}\n{m[3]}", text, flags=re.DOTALL
    )


def publish(results: dict[str, Any], runs: Path, folder: Path = HERE):
    """Write results, their page, and the archive of the runs."""
    write(results, folder / DATA)
    of_one_machine = again(runs.parent / "again", folder / AGAIN)
    lines = ",\n".join(json.dumps(row) for row in of_one_machine)
    (folder / AGAIN).write_text(f"[\n{lines}\n]\n")
    page = folder / PAGE
    page.write_text(filled(page.read_text(), tables(results, of_one_machine)))
    archive.pack(runs, [run.name for stage in STAGES.values() for run in stage()], folder / archive.ARCHIVE.name)
