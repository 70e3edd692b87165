"""Tables of the results, with the spread over training seeds. Definitions: `PROTOCOL.md`. No torch here."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

from seeds import DIFFERS, REFERENCE, Scores, differ, interval, regret, scores, spreads, worst_regret


Row = Mapping[str, Any]
HALF = 0.5  # of the score of the reference: the format is learned
GAIN = 0.9  # of what the reference gains
FORMER, TODAY = "cap1", "cap3"  # `auto` before the third comparison, with which the tables compare, and since then
ROUNDED = "-fp8"  # end of the names of cells with a sampler of 8 bits
UNKNOWN_SPREAD = 0.02  # while no cell has three seeds; tables say so


class Spread:
    """
    Spread over training seeds of the scores of an arm in a cell. It is pooled over all arms and cells with three seeds: over
    those with a run that falls, or over those without one. If nothing is known of one of the groups, it has the larger of the
    other group's spread and [`UNKNOWN_SPREAD`].

    Args:
        rows (`Sequence[Row]`):
            Runs of a stage.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.measured = spreads(rows)
        self._fall = {(row["cell"], row["arm"]) for row in rows if row["falls"]}
        self._known = max([UNKNOWN_SPREAD, *self.measured.values()])

    def __call__(self, cell: str, *arms: str) -> float:
        """The larger one of the spreads of some arms in a cell."""
        return max(self.measured.get((cell, arm) in self._fall, self._known) for arm in arms)

    def __str__(self) -> str:
        if not self.measured:
            return f"The spread over training seeds is {UNKNOWN_SPREAD:.3f} (assumed, as no cell has three seeds)."
        words = {False: "no run falls", True: "a run falls"}
        parts = [f"{self.measured[fall]:.3f} where {words[fall]}" for fall in (False, True) if fall in self.measured]
        return f"The spread over training seeds is {' and '.join(parts)} (measured)."


def separate(cell: Scores) -> bool:
    """Whether corrections differ in a cell by more than two times the noise of an evaluation."""
    means = [mean(by_seed.values()) for arm, by_seed in cell.items() if arm != REFERENCE]
    return bool(means) and max(means) - min(means) > DIFFERS


def gain(cell: Scores, arm: str, start: float) -> float:
    """What an arm gains over the start, as a share of what the reference gains."""
    reference = mean(cell[REFERENCE].values()) - start
    return (mean(cell[arm].values()) - start) / reference


def summary(rows: Sequence[Row], arms: Sequence[str]) -> str:
    """
    A line per arm: regret, gain and falls, over the cells in which it was tried. Means are over the cells that have all of
    these arms, as others do not compare.
    """
    cells = scores(rows)
    shared = [name for name, cell in cells.items() if {REFERENCE, *arms} <= {*cell}]
    starts = {row["cell"]: row["start"] for row in rows}
    spread = Spread(rows)
    lines = [
        f"| arm | cells | worst regret | 90 % interval | where | mean regret in {len(shared)} shared cells "
        "| keeps 0.9 of the gain | falls |",
        "| --- " * 8 + "|",
    ]
    for arm in (arm for arm in arms if arm != REFERENCE):
        own = {name: cell for name, cell in cells.items() if arm in cell and REFERENCE in cell}
        if not own:
            continue
        worst, where = worst_regret(own, arm)
        low, high = interval(own, arm, spread)
        keeps = sum(gain(cell, arm, starts[name]) >= GAIN for name, cell in own.items())
        runs = [row for row in rows if row["arm"] == arm]
        fields = [
            f"`{arm}`", str(len(own)), f"{worst:.3f}", f"{low:.2f} to {high:.2f}", where,
            f"{mean(regret(own[name], arm) for name in shared):.3f}" if shared else "-", f"{keeps} of {len(own)}",
            f"{sum(row['falls'] for row in runs)} of {len(runs)}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(fields)} |")
    return "\n".join(lines)


def differences(rows: Sequence[Row], arms: Sequence[str], other: str = FORMER) -> str:
    """A line per arm: the cells in which it differs from `other`, for the better and for the worse."""
    cells, spread = scores(rows), Spread(rows)
    lines = [f"| arm | cells | better than `{other}` | worse |", "| --- " * 4 + "|"]
    for arm in (arm for arm in arms if arm not in (REFERENCE, other)):
        own = {
            name: differ(cell[arm], cell[other], spread(name, arm, other))
            for name, cell in cells.items()
            if {arm, other} <= {*cell}
        }
        if own:
            better, worse = (
                ", ".join(f"{name} ({gap:+.2f})" for name, gap in own.items() if sign * gap > 0) or "none"
                for sign in (1, -1)
            )
            lines.append(f"| `{arm}` | {len(own)} | {better} | {worse} |")
    return "\n".join(lines)


def steps_to_half(steps: Sequence[int], accuracy: Sequence[float], level: float) -> float:
    """Optimizer step at which a score first reaches a level, interpolated between evaluations; infinite if never."""
    if accuracy[0] >= level:
        return float(steps[0])
    for (s0, a0), (s1, a1) in pairwise(zip(steps, accuracy, strict=True)):
        if a1 >= level:
            return s0 + (s1 - s0) * (level - a0) / (a1 - a0)
    return float("inf")


def formats(rows: Sequence[Row], arms: Sequence[str]) -> str:
    """A line per cell of a format task: steps to half of the last score of the reference, on average over seeds."""
    own, cells = [row for row in rows if "looks" in row], scores(rows)
    names = [arm for arm in arms if any(row["arm"] == arm for row in own)]
    lines = [f"| cell | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|"]
    for cell in dict.fromkeys(row["cell"] for row in own if REFERENCE in cells[row["cell"]]):
        level = HALF * mean(cells[cell][REFERENCE].values())
        fields = []
        for arm in names:
            steps = [
                steps_to_half(row["steps"], row["looks"], level)
                for row in own
                if (row["cell"], row["arm"]) == (cell, arm)
            ]
            fields.append("" if not steps else "never" if max(steps) == float("inf") else f"{mean(steps):.0f}")
        lines.append(f"| {cell} | {' | '.join(fields)} |")
    return "\n".join(lines)


def every_cell(rows: Sequence[Row], names: Sequence[str]) -> str:
    """A line per cell: the mean score of each arm, with the number of seeds if it is not 1."""
    cells = scores(rows)
    lines = [f"| cell | start | {' | '.join(names)} |", "| --- " * (len(names) + 2) + "|"]
    starts = {row["cell"]: row["start"] for row in rows}
    for cell, by_arm in cells.items():
        fields = []
        for arm in names:
            own = by_arm.get(arm, {})
            count = f" ({len(own)})" if len(own) > 1 else ""
            fields.append(f"{mean(own.values()):.3f}{count}" if own else "")
        name = cell if separate(by_arm) else f"{cell} (no difference)"
        lines.append(f"| {name} | {starts[cell]:.2f} | {' | '.join(fields)} |")
    return "\n".join(lines)


def pulls(rows: Sequence[Row]) -> str:
    """
    A line per cell and cap, of cells with several seeds of both: what bad tokens with a ratio above 1 do in the second half of
    a run.
    """
    lines = [
        "| cell | arm | seeds | bad tokens with a ratio above 1 | their part of the pull of bad tokens | tokens rejected "
        "| `k3_kl`, second half |",
        "| --- " * 7 + "|",
    ]
    several = {
        name for name, cell in scores(rows).items() if all(len(cell.get(arm, {})) > 1 for arm in (FORMER, TODAY))
    }
    own = [row for row in rows if "grown" in row and row["arm"] in (FORMER, TODAY) and row["cell"] in several]
    for cell, arm in dict.fromkeys((row["cell"], row["arm"]) for row in own):
        found = [row for row in own if (row["cell"], row["arm"]) == (cell, arm)]
        shares = (
            f"{100 * mean(row[key] or 0.0 for row in found):.1f} %" for key in ("grown", "grown_pull", "rejected")
        )
        k3 = ", ".join(f"{row['k3_late']:.3f}" for row in found)
        lines.append(f"| {cell} | `{arm}` | {len(found)} | {' | '.join(shares)} | {k3} |")
    return "\n".join(lines)


def beside(rows: Sequence[Row], arms: Sequence[str]) -> str:
    """As `every_cell`, of cells with a sampler of 8 bits: those with bfloat16 are arms of them."""
    rounded = [row for row in rows if row["cell"].endswith(ROUNDED)]
    cells = {row["cell"] for row in rounded}
    plain = [
        {**row, "cell": row["cell"] + ROUNDED, "arm": f"{row['arm']}, bfloat16"}
        for row in rows
        if row["cell"] + ROUNDED in cells and row["arm"] != REFERENCE
    ]
    first = [name for name in (f"{arm}, bfloat16" for arm in arms) if any(row["arm"] == name for row in plain)]
    return every_cell([*rounded, *plain], [REFERENCE, *first, *(arm for arm in arms if arm != REFERENCE)])


def roundings(rows: Sequence[Row], arm: str = TODAY) -> str:
    """A line per cell with a sampler of 8 bits: the gap of an arm, next to that with a sampler of bfloat16."""
    lines = ["| cell | `k3_kl` with bfloat16 | with 8 bits | 8-bit numbers that a push changes |", "| --- " * 4 + "|"]
    own = [row for row in rows if row["arm"] == arm]
    for cell in dict.fromkeys(row["cell"] for row in own if "moved" in row):
        plain, rounded = ([row for row in own if row["cell"] == name] for name in (cell.removesuffix(ROUNDED), cell))
        if plain:
            gaps = " | ".join(f"{mean(row['k3'] for row in found):.2g}" for found in (plain, rounded))
            lines.append(f"| {cell} | {gaps} | {100 * mean(row['moved'] for row in rounded):.1f} % |")
    return "\n".join(lines)


def counts(results: Mapping[str, Any]) -> str:
    """How many runs each stage has, and the CPU time of their training."""
    return " ".join(
        f"*{stage}*: {found['done']} of {found['planned']} planned runs, {found['minutes']} minutes of training."
        for stage, found in results.items()
    )


def tables(stage: str, rows: Sequence[Row], arms: Sequence[str]) -> dict[str, str]:
    """
    Text between the marks of the page, by mark. Arms that were tried in less than half of the cells are in the table of scores
    alone.
    """
    cells = scores(rows)
    often = [arm for arm in arms if sum(arm in cell for cell in cells.values()) >= len(cells) / 2]
    return {
        f"{stage}-spread": str(Spread(rows)),
        f"{stage}-summary": summary(rows, often),
        f"{stage}-differences": differences(rows, often),
        f"{stage}-formats": formats(rows, often),
        f"{stage}-pulls": pulls(rows),
        f"{stage}-roundings": roundings(rows),
        f"{stage}-cells": every_cell(rows, arms if stage in ("third", "taught_language") else often),
        f"{stage}-beside": beside(rows, arms),
    }
