"""Runs in a few numbers, and the tables of `README.md`. No torch here."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from cells import ARMS, SAMPLERS, STAGES, Run, arms_of


Row = dict[str, Any]
HERE = Path(__file__).parent
OF_CORRECTION = "rollout_corr/"
NOISE = 0.03  # two means of three looks at 256 problems differ by this, one time in five, if the policies are equal


# Rows ---------------------------------------------------------------------------------------------------------------------


def row_of(run: Run, record: dict[str, Any]) -> Row:
    """
    A run in a few numbers.

    Args:
        run (`Run`):
            The run. One of the on-policy arm stands in every cell that it is the reference of.
        record (`dict`):
            What `training.train` returned.

    Returns:
        `dict`: cell, arm and seed; accuracy at the start, at the lowest look, and as the mean of the last three; mean share of
        tokens rejected, or given weight 0; median of the gap; shares of broken and of sound tokens rejected, where the sampler
        breaks some.
    """
    accuracy, history, broken = record["accuracy"], record["history"], record["broken"]
    row = {
        "cell": run.cell.name,
        "arm": run.arm.name,
        "seed": run.seed,
        "start": accuracy[0],
        "lowest": min(accuracy),
        "accuracy": mean(accuracy[-3:]),
        "rejected": mean_of(history, "rollout_rs_masked_fraction", "rollout_is_oob_ratio"),
        "k3": (lambda values: median(values) if values else None)(logged(history, "k3_kl")),
    }
    if broken.get("broken"):
        row["caught"] = broken["broken_rejected"] / broken["broken"]
        row["sound_rejected"] = broken["sound_rejected"] / broken["sound"]
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def logged(history: dict[str, list[float | None]], key: str) -> list[float]:
    return [value for value in history.get(OF_CORRECTION + key, []) if value is not None]


def mean_of(history: dict[str, list[float | None]], *keys: str) -> float | None:
    """Mean over the log of the first metric that was logged."""
    return next((mean(values) for key in keys if (values := logged(history, key))), None)


def collect(folder: Path) -> dict[str, Any]:
    """The runs in a folder that belong to the published stages, as rows, and how many were planned."""
    results: dict[str, Any] = {}
    for stage in ("tuning", "judging"):
        runs = STAGES[stage]()
        paths = {run.name: folder / f"{run.name}.json" for run in runs}
        done = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
        results[stage] = {
            "planned": len(paths),
            "done": len(done),
            "minutes": round(sum(record["seconds"] for record in done.values()) / 60),
            "rows": [row_of(run, done[run.name]) for run in runs if run.name in done],
        }
    return results


def write(results: dict[str, Any], path: Path):
    """As JSON, a row a line."""
    text = json.dumps(results, indent=1)
    path.write_text(re.sub(r"\{\s+(\"cell\"[^{}]*?)\s+\}", lambda m: "{" + " ".join(m[1].split()) + "}", text) + "\n")


# Comparisons --------------------------------------------------------------------------------------------------------------


Group = dict[str, Row]  # rows of a cell and a seed, by arm


def groups_of(rows: Iterable[Row], arms: Sequence[str]) -> dict[tuple[str, int], Group]:
    """Cells of which all arms are there: what an interrupted stage has half done is not compared."""
    found: dict[tuple[str, int], Group] = defaultdict(dict)
    for row in rows:
        if row["arm"] in arms:
            found[row["cell"], row["seed"]][row["arm"]] = row
    return {key: group for key, group in found.items() if set(group) >= needed(key[0], arms)}


def needed(cell: str, arms: Sequence[str]) -> set[str]:
    return {arm.name for arm in arms_of(CELLS[cell], [*arms])}


def regret(group: Group, arm: str) -> float:
    """Distance of an arm from the best correction of a cell. On-policy sampling is not a correction."""
    return max(row["accuracy"] for name, row in group.items() if name != "on_policy") - group[arm]["accuracy"]


def behind(group: Group, arm: str, other: str) -> float:
    return group[other]["accuracy"] - group[arm]["accuracy"]


CELLS = {run.cell.name: run.cell for stage in STAGES.values() for run in stage()}


def kind(cell: str) -> str:
    """The fault of the sampler of a cell."""
    faults = SAMPLERS[CELLS[cell].sampler]
    if "burst" in faults:
        return "broken"
    return "stale" if "lag" in faults else "rounded" if faults else "in step"


# Tables -------------------------------------------------------------------------------------------------------------------


def summary(rows: Sequence[Row], arms: Sequence[str]) -> str:
    """A line per arm, over the cells that are complete."""
    groups = groups_of(rows, arms)
    lines = [
        "| arm | cells | accuracy | behind on-policy | regret, mean | worst | where | rejected: in step | rounded "
        "| stale | broken | caught |",
        "| --- " * 12 + "|",
    ]
    for arm in arms:
        own = {key: group for key, group in groups.items() if arm in group}
        if not own:
            continue
        of_cells = {key: regret(group, arm) for key, group in own.items()}
        worst = max(of_cells, key=lambda key: of_cells[key])
        rejected = [
            shown([group[arm].get("rejected") for key, group in own.items() if kind(key[0]) == some], percent)
            for some in ("in step", "rounded", "stale", "broken")
        ]
        reference = arm == "on_policy"
        cells = [
            f"`{arm}`",
            str(len(own)),
            f"{mean(group[arm]['accuracy'] for group in own.values()):.3f}",
            "-" if reference else f"{mean(behind(group, arm, 'on_policy') for group in own.values()):.3f}",
            *(
                ("-", "-", "-")
                if reference
                else (f"{mean(of_cells.values()):.3f}", f"{of_cells[worst]:.2f}", named(worst))
            ),
            *rejected,
            shown([group[arm].get("caught") for group in own.values()], percent),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(values: Sequence[float | None], form: Any) -> str:
    known = [value for value in values if value is not None]
    return form(mean(known)) if known else "-"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %" if share else "0"


def named(key: tuple[str, int]) -> str:
    return key[0] + (f", seed {key[1]}" if key[1] else "")


def every_cell(rows: Sequence[Row], arms: Sequence[str]) -> str:
    """A line per cell and seed, complete or not, with the accuracy of each arm; the best correction in bold."""
    found: dict[tuple[str, int], Group] = defaultdict(dict)
    for row in rows:
        if row["arm"] in arms:
            found[row["cell"], row["seed"]][row["arm"]] = row
    lines = [f"| cell | start | {' | '.join(arms)} |", "| --- " * (len(arms) + 2) + "|"]
    for key, group in found.items():
        if set(group) == {"on_policy"}:  # a reference of several cells, none of whose arms is done
            continue
        best = max(row["accuracy"] for name, row in group.items() if name != "on_policy")
        values = [f"{group[arm]['accuracy']:.2f}" if arm in group else "" for arm in arms]
        bold = [
            f"**{v}**" if a in group and a != "on_policy" and group[a]["accuracy"] == best else v
            for a, v in zip(arms, values, strict=True)
        ]
        lines.append(f"| {named(key)} | {next(iter(group.values()))['start']:.2f} | {' | '.join(bold)} |")
    return "\n".join(lines)


def against(rows: Sequence[Row], arm: str, other: str, arms: Sequence[str]) -> str:
    """One arm against another in a sentence: where it is behind by more than noise."""
    groups = {key: g for key, g in groups_of(rows, arms).items() if {arm, other} <= set(g)}
    if not groups:
        return f"- `{arm}` against `{other}`: no cell is complete."
    gaps = {key: behind(group, arm, other) for key, group in groups.items()}
    losses = [
        f"{named(key)} ({gap:.2f})" for key, gap in sorted(gaps.items(), key=lambda pair: -pair[1]) if gap > NOISE
    ]
    wins = sum(gap < -NOISE for gap in gaps.values())
    return (
        f"- `{arm}` against `{other}`, {len(gaps)} cell{'s' * (len(gaps) > 1)}: {-mean(gaps.values()):+.3f} on average; more "
        f"than {NOISE} above in {wins}, below in {len(losses)}{': ' + ', '.join(losses) if losses else ''}."
    )


def arms_in(rows: Sequence[Row]) -> list[str]:
    present = {row["arm"] for row in rows}
    return [name for name in ARMS if name in present]


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Text between the marks of `README.md`, by mark."""
    judging, tuning = results["judging"]["rows"], results["tuning"]["rows"]
    judged = arms_in(judging)
    fixed = [name for name in judged if name not in ("on_policy", "auto")]
    return {
        "runs": " ".join(
            f"*{stage}*: {results[stage]['done']} of {results[stage]['planned']} planned runs, {results[stage]['minutes']} "
            "minutes of training."
            for stage in ("tuning", "judging")
        ),
        "judging": summary(judging, judged),
        "against": "\n".join(against(judging, "auto", other, judged) for other in fixed),
        "judging-cells": every_cell(judging, judged),
        "tuning-cells": every_cell(tuning, arms_in(tuning)),
        "simulation": simulated(json.loads((HERE / "simulation.json").read_text())["situations"]),
    }


# Of the simulation, what the document shows
SITUATIONS = {
    "rounding 0.03": "rejected",
    "rounding 0.3": "rejected",
    "rounding 0.1, heavy tails": "rejected",
    "stale 0.3": "gradient",
    "stale 1": "gradient",
    "astray 1": "gradient",
    "broken": "caught",
    "broken, stale 0.3": "caught",
}


def simulated(situations: dict[str, dict[str, dict[str, float]]]) -> str:
    """A line per rule."""
    lines = [
        f"| rule | {' | '.join(f'{name}: {measure}' for name, measure in SITUATIONS.items())} |",
        "| --- " * (len(SITUATIONS) + 1) + "|",
    ]
    for rule in (name for name in situations["broken"] if name != "k3_kl"):
        found = [(measure, situations[name][rule][measure]) for name, measure in SITUATIONS.items()]
        cells = [f"{value:.2f}" if measure == "gradient" else percent(value) for measure, value in found]
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)


def filled(text: str, parts: dict[str, str]) -> str:
    """A document with what stands between its marks replaced."""
    for mark, part in parts.items():
        text, times = re.subn(
            rf"(<!-- {mark} -->\n).*?(<!-- end -->)", lambda m, part=part: m[1] + part + "\n" + m[2], text, flags=re.S
        )
        if times != 1:
            raise ValueError(f"{times} places are marked {mark!r}, expected one.")
    return text


def publish(results: dict[str, Any], folder: Path = HERE):
    """Write `results.json`, and its tables into `README.md`."""
    write(results, folder / "results.json")
    readme = folder / "README.md"
    readme.write_text(filled(readme.read_text(), tables(results)))
