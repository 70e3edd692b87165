"""Runs in a few numbers, and the tables of `README.md`. No torch here."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import archive
import second_report
from cells import FORMER, LADDER, RUNGS, TOP, Cell, Run, rung_of
from second import ARMS, SECOND_STAGES, STAGES
from seeds import scores, wanted


Row = dict[str, Any]
HERE = Path(__file__).parent
OF_CORRECTION = "rollout_corr/"
NOISE = 0.03  # two means of three looks at 256 problems differ by this, one time in five, if the policies are equal
FALL = 0.1  # below an own best
KEPT = 0.9  # of what is gained in step
LAST = 3  # looks that are averaged
# Tuned arms that differ in one part: the trust region, weights above 1, weights of positive advantages; and `auto` of before
PAIRS = [("topr_tv10", "topr_tv"), ("tv10_1", "tv10_2"), ("topr_tv10", "tv10_1"), ("topr_tv10", "tv_2_up5")]
# Arms of TRL's own trainer, which does not report the tokens that it drops
UNREPORTED = {name for name, arm in ARMS.items() if arm.trl}
# Arms that take gradients away by PPO's clipping, which is a part of the loss: the counts of broken tokens do not have it
CLIPPED = {name for name, arm in ARMS.items() if arm.options.get("rollout_correction") == "bypass_ppo_clip"}


# Rows ---------------------------------------------------------------------------------------------------------------------


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
        of tokens without gradient; median of the gap; shares of broken and of sound tokens rejected, where the sampler
        breaks some; and every look, where the second proof asks when a format was learned.
    """
    accuracy, history, broken = record["accuracy"], record["history"], record["broken"]
    row = {
        "cell": run.cell.name,
        "arm": run.arm.name,
        "seed": run.seed,
        "start": accuracy[0],
        "accuracy": mean(accuracy[-LAST:]),
        "falls": falls(accuracy),
        "rejected": rejected(history),
        "k3": (lambda values: median(values) if values else None)(logged(history, f"{OF_CORRECTION}k3_kl")),
    }
    if broken.get("broken"):
        row["caught"] = broken["broken_rejected"] / broken["broken"]
        row["sound_rejected"] = broken["sound_rejected"] / broken["sound"]
    if "by_text" in record:
        row["steps"] = record["steps"]
        row["looks"] = [round(value, 4) for value in accuracy]
        for name in ("tag", "text"):  # of tokens with a positive advantage; TRL's own trainer counts none
            tokens = record["by_text"].get(f"{name}_positive")
            if tokens:
                row[f"{name}s_rejected"] = record["by_text"][f"{name}_positive_rejected"] / tokens
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
        done = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
        if not done:
            continue
        rows = [row_of(run, done[run.name]) for run in runs if run.name in done]
        asked = needed(runs, rows) if stage in SECOND_STAGES else runs
        results[stage] = {
            "planned": len({*done, *(run.name for run in asked)}),
            "done": len(done),
            "minutes": round(sum(record["cpu_seconds"] for record in done.values()) / 60),
            "rows": rows,
        }
    return results


def needed(runs: Sequence[Run], rows: Iterable[Row]) -> list[Run]:
    """Runs that the protocol of the second proof asks for: of other seeds than 0, those that rows of seed 0 make useful."""
    asked = {cell: wanted(by_arm) for cell, by_arm in scores(rows).items() if any(0 in x for x in by_arm.values())}
    return [run for run in runs if not run.seed or run.arm.name in asked.get(run.cell.name, [])]


def write(results: dict[str, Any], path: Path):
    """As JSON, a row a line."""
    text = json.dumps(results, indent=1)
    path.write_text(re.sub(r"\{\s+(\"cell\"[^{}]*?)\s+\}", lambda m: "{" + " ".join(m[1].split()) + "}", text) + "\n")


# Comparisons --------------------------------------------------------------------------------------------------------------


@dataclass
class Situation:
    """
    What is known of a cell.

    Args:
        cell (`Cell`):
            The cell.
        rows (`dict[str, dict[int, Row]]`):
            Rows by arm and seed.
    """

    cell: Cell
    rows: dict[str, dict[int, Row]]

    def accuracy(self, arm: str) -> float:
        """Mean over seeds."""
        return mean(row["accuracy"] for row in self.rows[arm].values())

    @property
    def corrections(self) -> list[str]:
        """All arms but the reference, which cannot be had there."""
        return [arm for arm in self.rows if arm != "on_policy"]

    @property
    def differs(self) -> bool:
        """Whether the arms differ by more than noise."""
        return self.range_of(self.corrections) > 2 * NOISE

    @property
    def corrections_differ(self) -> bool:
        """The same without the arm that corrects nothing."""
        return self.range_of([arm for arm in self.corrections if arm != "none"]) > 2 * NOISE

    def range_of(self, arms: Sequence[str]) -> float:
        """Accuracy of the best of some arms, minus that of the worst."""
        found = [self.accuracy(arm) for arm in arms]
        return max(found) - min(found)

    def kept(self, arm: str) -> float:
        """What an arm has gained, as a share of what is gained in step."""
        start = next(iter(self.rows["on_policy"].values()))["start"]
        return (self.accuracy(arm) - start) / (self.accuracy("on_policy") - start)

    def regret(self, arm: str) -> float:
        """How far an arm is behind the best one."""
        return max(self.accuracy(other) for other in self.corrections) - self.accuracy(arm)

    @property
    def above(self) -> int:
        """How many rungs it is above the one where no correction loses."""
        return LADDER.index(self.cell.rung) - (rung_of(self.cell.task, self.cell.algorithm) or 0)


CELLS = {run.cell.name: run.cell for plan in STAGES.values() for run in plan()}


def situations(rows: Iterable[Row], arms: Sequence[str]) -> list[Situation]:
    found: dict[str, dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["arm"] in arms:
            found[row["cell"]][row["arm"]][row["seed"]] = row
    return [
        Situation(CELLS[name], dict(by_arm))
        for name, by_arm in found.items()
        if "on_policy" in by_arm and len(by_arm) > 1
    ]


# Tables -------------------------------------------------------------------------------------------------------------------


def summary(found: Sequence[Situation], arms: Sequence[str]) -> str:
    """A line per arm, over the cells where arms differ and in which it was tried."""
    counted = [situation for situation in found if situation.differs]
    lines = [
        "| arm | cells | gain kept | holds | regret, mean | worst | where | rejected | falls |",
        "| --- " * 9 + "|",
    ]
    for arm in arms:
        own = [situation for situation in counted if arm in situation.rows]
        if not own:
            continue
        rows = [row for situation in found if arm in situation.rows for row in situation.rows[arm].values()]
        regrets = ["-"] * 3
        if arm != "on_policy":
            worst = max(own, key=lambda situation: situation.regret(arm))
            regrets = [f"{mean(s.regret(arm) for s in own):.3f}", f"{worst.regret(arm):.2f}", worst.cell.name]
        holds = sum(situation.kept(arm) >= KEPT for situation in own)
        cells = [
            f"`{arm}`", str(len(own)), f"{mean(s.kept(arm) for s in own):.2f}", str(holds), *regrets,
            "-" if arm in UNREPORTED else shown([row["rejected"] for row in rows], percent),
            f"{sum(row['falls'] for row in rows)} of {len(rows)}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def by_rung(found: Sequence[Situation], arms: Sequence[str]) -> str:
    """A line per arm: in how many cells of each height, and of those where corrections differ, it keeps 0.9 of the gain."""
    groups = {
        "at the task's rung": lambda s: s.above == 0,
        "one rung above": lambda s: s.above == 1,
        f"at {TOP}": lambda s: s.cell.rung == TOP,
        "where corrections differ": lambda s: s.corrections_differ,
    }
    lines = [f"| arm | {' | '.join(groups)} |", "| --- " * (len(groups) + 1) + "|"]
    for arm in (arm for arm in arms if arm != "on_policy"):
        cells = []
        for belongs in groups.values():
            own = [s for s in found if s.differs and arm in s.rows and belongs(s)]
            cells.append(f"{sum(s.kept(arm) >= KEPT for s in own)} of {len(own)}")
        lines.append(f"| `{arm}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def caught(found: Sequence[Situation], arms: Sequence[str]) -> str:
    """A line per arm, over the cells in which tokens are broken: shares of tokens that get no gradient."""
    lines = ["| arm | runs | broken tokens rejected | sound tokens rejected |", "| --- " * 4 + "|"]
    for arm in arms:
        rows = [row for s in found for row in s.rows.get(arm, {}).values() if "caught" in row]
        if rows:
            shares = [
                "-" if arm in CLIPPED else shown([row[key] for row in rows], percent)
                for key in ("caught", "sound_rejected")
            ]
            lines.append(f"| `{arm}` | {len(rows)} | {' | '.join(shares)} |")
    return "\n".join(lines)


def compared(found: Sequence[Situation], pairs: Iterable[tuple[str, str]]) -> str:
    """A line per pair of arms that have cells in common: by how much the first ends above the second."""
    lines = [
        "| accuracy of | cells compared | mean | median | share of the three largest "
        f"| more than {NOISE} above | more than {NOISE} below | where below |",
        "| --- " * 8 + "|",
    ]
    for arm, other in pairs:
        gaps = {s.cell.name: s.accuracy(arm) - s.accuracy(other) for s in found if {arm, other} <= set(s.rows)}
        if not gaps:
            continue
        share = sum(sorted(gaps.values())[-3:]) / sum(gaps.values())
        losses = [
            f"{name} ({gap:.2f})" for name, gap in sorted(gaps.items(), key=lambda pair: pair[1]) if gap < -NOISE
        ]
        cells = [
            f"`{arm}` minus `{other}`", str(len(gaps)), f"{mean(gaps.values()):+.3f}", f"{median(gaps.values()):+.3f}",
            f"{100 * share:.0f} %", str(sum(gap > NOISE for gap in gaps.values())), str(len(losses)),
            ", ".join(losses) or "-",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(values: Sequence[float | None], form: Any) -> str:
    known = [value for value in values if value is not None]
    return form(mean(known)) if known else "-"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %" if share > 1e-7 else "0"


def every_cell(found: Sequence[Situation], arms: Sequence[str]) -> str:
    """A line per cell, with the accuracy of each arm, and the number of seeds if there is more than one; the best in bold."""
    arms = [arm for arm in arms if any(arm in situation.rows for situation in found)]
    lines = [f"| cell | start | {' | '.join(arms)} |", "| --- " * (len(arms) + 2) + "|"]
    for situation in found:
        best = max(situation.accuracy(arm) for arm in situation.corrections)
        cells = []
        for arm in arms:
            if arm not in situation.rows:
                cells.append("")
                continue
            value, n = f"{situation.accuracy(arm):.2f}", len(situation.rows[arm])
            value += f" ({n})" if n > 1 else ""
            is_best = arm != "on_policy" and situation.accuracy(arm) == best and situation.differs
            cells.append(f"**{value}**" if is_best else value)
        start = next(iter(situation.rows["on_policy"].values()))["start"]
        name = situation.cell.name + ("" if situation.differs else " (no difference)")
        lines.append(f"| {name} | {start:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ladder() -> str:
    """A line per task and trainer: the lowest rung at which no correction loses 0.1."""
    lines = ["| trainer | task | the task's rung |", "| --- | --- | --- |"]
    for algorithm, rungs in RUNGS.items():
        for task, rung in rungs.items():
            lines.append(f"| {algorithm} | {task} | {'none' if rung is None else LADDER[rung]} |")
    return "\n".join(lines)


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Text between the marks of `README.md`, by mark."""
    parts = {
        "runs": " ".join(
            f"*{stage}*: {results[stage]['done']} of {results[stage]['planned']} planned runs, {results[stage]['minutes']} "
            "minutes of training."
            for stage in results
        ),
    }
    if not SECOND_STAGES.keys() & {*results}:
        parts["ladder"] = ladder()
        parts |= simulated(json.loads((HERE / "simulation.json").read_text())["situations"])
    for stage in results:
        rows = results[stage]["rows"]
        if stage in SECOND_STAGES:
            parts |= second_report.tables(
                stage, rows, [name for name in ARMS if any(row["arm"] == name for row in rows)]
            )
            continue
        arms = [name for name in (*ARMS, *FORMER) if any(row["arm"] == name for row in rows)]
        found = situations(rows, arms)
        parts[stage] = summary(found, arms)
        parts[f"{stage}-cells"] = every_cell(found, arms)
        if any("caught" in row for row in rows):
            parts[f"{stage}-broken"] = caught(found, arms)
        if stage == "judging":
            others = [name for name in arms if name not in ("on_policy", "auto")]
            parts["judging-rungs"] = by_rung(found, arms)
            parts["against"] = compared(found, [("auto", other) for other in others])
        if stage == "tuning":
            parts["tuning-pairs"] = compared(found, PAIRS)
    return parts


# Of the simulation, what the document shows: a table per measure
SITUATIONS = {
    "rejected": ["rounding 0.03", "rounding 0.3", "rounding 0.1, heavy tails"],
    "gradient": ["stale 0.3", "stale 1", "astray 1"],
    "pull": ["broken", "broken, stale 0.3", "garbage"],
}


def simulated(situations: dict[str, dict[str, dict[str, float]]]) -> dict[str, str]:
    """A table per measure, with a line per rule."""
    parts = {}
    for measure, names in SITUATIONS.items():
        lines = [f"| rule | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|"]
        for rule in (name for name in situations["broken"] if name != "k3_kl"):
            found = [situations[name][rule][measure] for name in names]
            cells = [f"{value:.2f}" if measure == "gradient" else percent(value) for value in found]
            lines.append(f"| {rule.replace('the same, ', 'token weights up to 2, ')} | {' | '.join(cells)} |")
        parts[f"simulation-{measure}"] = "\n".join(lines)
    return parts


def filled(text: str, parts: dict[str, str]) -> str:
    """A document with what stands between its marks replaced."""
    for mark, part in parts.items():
        text, times = re.subn(
            rf"(<!-- {mark} -->\n).*?(<!-- end -->)", lambda m, part=part: m[1] + part + "\n" + m[2], text, flags=re.S
        )
        if times != 1:
            raise ValueError(f"{times} places are marked {mark!r}, expected one.")
    return text


def publish(results: dict[str, Any], runs: Path, folder: Path = HERE):
    """
    Write results and their tables: of the first proof into `results.json` and `README.md`, of the second one into
    `second.json`, `SECOND.md` and the archive of its runs. A proof of which no run is there is left as it is.
    """
    first, second = (
        {stage: found for stage, found in results.items() if (stage in SECOND_STAGES) == is_second}
        for is_second in (False, True)
    )
    for found, data, page in ((first, "results.json", "README.md"), (second, "second.json", "SECOND.md")):
        if found:
            write(found, folder / data)
            page = folder / page
            page.write_text(filled(page.read_text(), tables(found)))
    if second:
        names = [run.name for stage in second for run in STAGES[stage]()]
        archive.pack(runs, names, folder / archive.ARCHIVE.name)
