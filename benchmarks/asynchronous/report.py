"""Table, `results.json` and `time.png` of the runs in a folder."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any


Record = dict[str, Any]  # of one run, in a few numbers: see `summary`
NOT_BY_ALL = "not by all"


def summary(record: Record) -> Record:
    """The published part of a run."""
    return {
        "settings": record["settings"],
        "steps": record["steps"],
        "seconds_at": [round(seconds, 2) for seconds in record["seconds_at"]],
        "accuracy": [round(accuracy, 4) for accuracy in record["accuracy"]],
        "age": average(record["history"], "rollout_corr/staleness_mean"),
        "too_old": average(record["history"], "rollout_corr/stale_dropped/fraction"),
    }


def average(history: Iterable[Mapping[str, float]], key: str) -> float:
    values = [entry[key] for entry in history if key in entry]
    return round(fmean(values), 4) if values else 0.0


def load(folder: Path, arms: Iterable[str]) -> dict[str, list[Record]]:
    """The runs in a folder, by arm, in the order of the arms and their seeds."""
    paths = sorted(folder.glob("*.json"))
    found = {arm: [path for path in paths if path.stem.rsplit("-", 1)[0] == arm] for arm in arms}
    return {arm: [summary(json.loads(path.read_text())) for path in paths] for arm, paths in found.items() if paths}


def table(runs: Mapping[str, Sequence[Record]], target: float) -> str:
    """Medians over the seeds of each arm."""
    lines = [
        f"| arm | seeds | seconds to {target:g} | step | seconds per step | at the end | worst seed | mean age | too old |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm, records in runs.items():
        ends = [record["accuracy"][-1] for record in records]
        cells = [
            arm,
            len(records),
            *reached(records, target),
            f"{median(record['seconds_at'][-1] / record['steps'][-1] for record in records):.2f}",
            f"{median(ends):.2f}",
            f"{min(ends):.2f}",
            *(f"{median(record[key] for record in records):.2f}" for key in ("age", "too_old")),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def reached(records: Sequence[Record], target: float) -> tuple[str, str]:
    """Median seconds and step of the first look at which the accuracy was reached, if every seed has."""
    found = [first(record, target) for record in records]
    if None in found:
        return NOT_BY_ALL, NOT_BY_ALL
    seconds, steps = zip(*found, strict=True)
    return f"{median(seconds):.0f}", f"{median(steps):.0f}"


def first(record: Record, target: float) -> tuple[float, int] | None:
    looks = zip(record["accuracy"], record["seconds_at"], record["steps"], strict=True)
    return next(((seconds, step) for found, seconds, step in looks if found >= target), None)


def write(runs: Mapping[str, Sequence[Record]], target: float, folder: Path):
    """Write `results.json` and `time.png`."""
    (folder / "results.json").write_text(json.dumps({"target": target, "runs": runs}, indent=1))
    draw(runs, target, folder / "time.png")


# Okabe and Ito's colours, which colour-blind readers tell apart
STYLES = {"synchronous": ("#000000", "--"), "none": ("#D55E00", "-"), "auto": ("#0072B2", "-")}


def draw(runs: Mapping[str, Sequence[Record]], target: float, path: Path):
    """Accuracy against seconds, a panel for each age that is allowed. The synchronous trainer is in all of them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ages = sorted({int(arm.rsplit("_", 1)[1]) for arm in runs if "_" in arm})
    figure, grid = plt.subplots(
        1, len(ages), figsize=(3.8 * len(ages), 3.4), sharey=True, layout="constrained", squeeze=False
    )
    for axes, age in zip(grid.flat, ages, strict=True):
        axes.set_title(f"`max_staleness` {age}", loc="left")
        axes.axhline(target, color="0.7", linewidth=0.8, zorder=0)
        for name, (color, line) in STYLES.items():
            for i, record in enumerate(runs.get(name, runs.get(f"{name}_{age}", ()))):
                label = name if i == 0 else None
                axes.plot(record["seconds_at"], record["accuracy"], line, color=color, alpha=0.75, label=label)
        axes.set(xlabel="seconds of training", ylim=(0, 1))
        axes.set_xlim(0)
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_ylabel("exact answers, held-out")
    grid[0, 0].legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
