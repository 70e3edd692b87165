"""Tables of the results, with the spread over training seeds. Definitions: `PROTOCOL.md`. No torch here."""

import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import sqrt
from statistics import mean
from typing import Any

import numpy as np
from plan import RATES
from seeds import (
    DIFFERS,
    DRAWS,
    MIDDLE,
    REFERENCE,
    Scores,
    differ,
    drawn_scores,
    interval,
    regret,
    scores,
    spreads,
    worst_regret,
)


Row = Mapping[str, Any]
HALF = 0.5  # of the score of the reference: the format is learned
GAIN = 0.9  # of what the reference gains
FORMER, TODAY = "cap1", "cap3"  # `auto` before the third comparison, with which the tables compare, and since then
MASKED = "_masked"  # end of the names of arms that leave cut answers out of the loss
ROUNDED = "-fp8"  # end of the names of cells with a sampler of 8 bits
RARE_ARMS_APART = ("second_tuning", "second_judging", "several_updates", "eight_bits")  # stages with arms in few cells
STALE = 3  # optimizer steps, from which on documents call a sampler stale
STALE_STAGES = ("second_judging", "taught_language", "third", "eight_bits", "cut_answers", "preset_for_8_bits")
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


def differences(rows: Sequence[Row], arms: Sequence[str], other: str = TODAY) -> str:
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


def compared(rows: Sequence[Row], arm: str, names: Collection[str], other: str = TODAY) -> tuple[int, int]:
    """In how many of some cells an arm is better and worse than another, by the rule for differences."""
    cells, spread = scores(rows), Spread(rows)
    gaps = [
        differ(cell[arm], cell[other], spread(name, arm, other))
        for name, cell in cells.items()
        if name in names and {arm, other} <= {*cell}
    ]
    return sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)


def on_equal_seeds(rows: Sequence[Row], arms: Sequence[str]) -> list[Row]:
    """The runs of the cells that all of these arms share, with the seeds that all of them have there."""
    cells = scores(rows)
    seeds = {
        name: set.intersection(*({*cell[arm]} for arm in arms))
        for name, cell in cells.items()
        if {*arms} <= {*cell} and name.startswith("grpo")
    }
    return [row for row in rows if row["arm"] in arms and row["seed"] in seeds.get(row["cell"], ())]


def shared(rows: Sequence[Row], arms: Sequence[str]) -> str:
    """
    A line per arm, over the cells that all of them share and with the same seeds for all. The interval is the middle 90 of 100
    draws of all means, the reference included. The last columns compare with today's `auto` with all seeds that there are.
    """
    own = on_equal_seeds(rows, [REFERENCE, *arms])
    cells, starts, spread = scores(own), {row["cell"]: row["start"] for row in own}, Spread(rows)
    several = [name for name, cell in cells.items() if len(cell[REFERENCE]) > 1]
    lines = [
        f"| arm | keeps 0.9 of the gain, of {len(cells)} | 90 % interval | mean score | mean distance from `{REFERENCE}` "
        f"| runs that fell | better than `{TODAY}` | worse than `{TODAY}` |",
        "| --- " * 8 + "|",
    ]
    for arm in (REFERENCE, *arms):
        means = {name: mean(cell[arm].values()) for name, cell in cells.items()}
        behind = mean(mean(cell[REFERENCE].values()) - means[name] for name, cell in cells.items())
        runs = [row for row in own if row["arm"] == arm]
        falls = f"{sum(row['falls'] for row in runs)} of {len(runs)}"
        if arm == REFERENCE:
            lines.append(f"| `{arm}` | | | {mean(means.values()):.3f} | | {falls} | | |")
            continue
        keeps = sum(gain(cell, arm, starts[name]) >= GAIN for name, cell in cells.items())
        low, high = kept_interval(cells, arm, starts, spread)
        better, worse = compared(rows, arm, cells)
        against = " | |" if arm == TODAY else f" {better} | {worse} |"
        lines.append(
            f"| `{arm}` | {keeps} | {low} to {high} | {mean(means.values()):.3f} | {behind:.3f} | {falls} |{against}"
        )
    seeds = f"{len(cells) - len(several)} cells have seed 0 alone, and {len(several)} have three"
    return "\n".join([*lines, "", f"Of each arm the same runs count: {seeds}."])


def kept_interval(
    cells: Mapping[str, Scores], arm: str, starts: Mapping[str, float], spread: Spread
) -> tuple[int, int]:
    """In how many cells an arm keeps 0.9 of the gain, in the middle 90 of 100 draws of all means."""
    means = [
        (mean(cell[one].values()), spread(name, one) / sqrt(len(cell[one])))
        for name, cell in cells.items()
        for one in (arm, REFERENCE)
    ]
    drawn, start = drawn_scores(means, DRAWS), np.array([starts[name] for name in cells])
    own, reference = drawn[:, ::2], drawn[:, 1::2]
    found = np.sort((own - start >= GAIN * (reference - start)).sum(1))
    edge = round((1 - MIDDLE) / 2 * DRAWS)
    return int(found[edge]), int(found[-edge - 1])


def masks(rows: Sequence[Row]) -> str:
    """A line per cell and arm: scores with cut answers in the loss and left out of it."""
    cells, spread = scores(rows), Spread(rows)
    lines = [
        "| cell | arm | cut answers in the loss | left out | differ | still cut, in the loss | still cut, left out "
        "| falls, in the loss | falls, left out |",
        "| --- " * 9 + "|",
    ]
    for name, cell in cells.items():
        for arm in (arm for arm in cell if f"{arm}{MASKED}" in cell):
            pair = (arm, f"{arm}{MASKED}")
            gap = differ(cell[pair[1]], cell[arm], spread(name, *pair))
            runs = [[row for row in rows if (row["cell"], row["arm"]) == (name, one)] for one in pair]
            fields = [
                *(counted(cell[one]) for one in pair),
                "" if not gap else f"left out {gap:+.2f}",
                *(f"{100 * mean(row['cut'] for row in own):.0f} %" for own in runs),
                *(f"{sum(row['falls'] for row in own)} of {len(own)}" for own in runs),
            ]
            lines.append(f"| {name} | `{arm}` | {' | '.join(fields)} |")
    return "\n".join(lines)


def counted(scores_of_arm: Mapping[int, float]) -> str:
    """A mean score, with the number of seeds if it is not 1."""
    count = f" ({len(scores_of_arm)})" if len(scores_of_arm) > 1 else ""
    return f"{mean(scores_of_arm.values()):.3f}{count}"


def gaps(rows: Sequence[Row], arms: Sequence[str]) -> str:
    """A line per cell and arm: score, gap and falls, and the arms from which it differs by the rule."""
    cells, spread = scores(rows), Spread(rows)
    long = any("late" in row for row in rows)
    middle = " second half: mean | lowest | reward of the sampler at the end |" if long else ""
    lines = [
        f"| cell | arm | score |{middle} `k3_kl` | first 20 steps | steps 21 to 40 | falls | better than | worse than |",
        "| --- " * (12 if long else 9) + "|",
    ]
    for name, cell in cells.items():
        for arm in (arm for arm in arms if arm in cell):
            runs = [row for row in rows if (row["cell"], row["arm"]) == (name, arm)]
            apart = {other: differ(cell[arm], cell[other], spread(name, arm, other)) for other in cell if other != arm}
            better, worse = (
                ", ".join(f"`{other}` ({gap:+.2f})" for other, gap in apart.items() if sign * gap > 0) or "none"
                for sign in (1, -1)
            )
            late = (
                [
                    f"{of(row[key] for row in runs):.2f}"
                    for key, of in (("late", mean), ("lowest", min), ("reward", mean))
                ]
                if long
                else []
            )
            known = (
                [row[key] for row in runs if row.get(key) is not None] for key in ("k3", "k3_first", "k3_settled")
            )
            k3 = (f"{mean(found):.2g}" if found else "" for found in known)
            falls = f"{sum(row['falls'] for row in runs)} of {len(runs)}"
            fields = [name, f"`{arm}`", counted(cell[arm]), *late, *k3, falls, better, worse]
            lines.append(f"| {' | '.join(fields)} |")
    return "\n".join(lines)


def best_rates(rows: Sequence[Row], arms: Sequence[str]) -> str:
    """A line per task and arm: the learning rate with its best mean score, that score, and the score at twice the rate."""
    own = [row for row in rows if row["cell"].rpartition("-")[2] in RATES]
    cells, spread = scores(own), Spread(own)
    lines = [
        "| task | arm | best rate | score | at twice that rate | differs from `cap3` at its own best |",
        "| --- " * 6 + "|",
    ]
    families: dict[str, list[str]] = {}
    for name in cells:
        families.setdefault(name.rpartition("-")[0], []).append(name)
    order = [*RATES]
    for family, names in families.items():
        best = {}
        for arm in arms:
            there = [name for name in names if arm in cells[name]]
            if there:
                best[arm] = max(there, key=lambda name: mean(cells[name][arm].values()))
        for arm, name in best.items():
            rate = name.rpartition("-")[2]
            faster = f"{family}-{order[order.index(rate) + 1]}" if order.index(rate) + 1 < len(order) else ""
            twice = counted(cells[faster][arm]) if arm in cells.get(faster, {}) else ""
            gap = 0.0
            if TODAY in best and arm not in (TODAY, REFERENCE):
                one, other = cells[name][arm], cells[best[TODAY]][TODAY]
                noise = max(spread(name, arm), spread(best[TODAY], TODAY))
                gap = differ(one, other, noise)
            lines.append(
                f"| {family} | `{arm}` | {rate} | {counted(cells[name][arm])} | {twice} | {f'{gap:+.2f}' if gap else ''} |"
            )
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


def curves(published: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """The accuracy of a run at every look, next to that of the published run, and whether they are the same."""
    before = {} if published is None else dict(zip(published["steps"], published["accuracy"], strict=True))
    lines = ["| step | published | now |", "| --- " * 3 + "|"]
    for step, value in zip(now["steps"], now["accuracy"], strict=True):
        known = f"{before[step]:.4f}" if step in before else ""
        lines.append(f"| {step} | {known} | {value:.4f} |")
    return "\n".join([*lines, "", verdict(published, now)])


def verdict(published: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Whether a run is the published one again."""
    if published is None:
        return "This run is not in the archive."
    if published["accuracy"] == now["accuracy"]:
        return "The digits are the same."
    apart = max(abs(one - other) for one, other in zip(published["accuracy"], now["accuracy"], strict=False))
    releases = [", ".join(f"{name} {x}" for name, x in record["versions"].items()) for record in (published, now)]
    return (
        f"The largest difference is {apart:.3f}. The published run had {releases[0]}, and this one {releases[1]}. "
        "Other releases and other processors sample other tokens."
    )


def every_cell(rows: Sequence[Row], names: Sequence[str]) -> str:
    """A line per cell: the mean score of each arm, with the number of seeds if it is not 1."""
    cells = scores(rows)
    lines = [f"| cell | start | {' | '.join(names)} |", "| --- " * (len(names) + 2) + "|"]
    starts = {row["cell"]: row["start"] for row in rows}
    for cell, by_arm in cells.items():
        fields = []
        for arm in names:
            fields.append(counted(by_arm[arm]) if arm in by_arm else "")
        name = cell if separate(by_arm) else f"{cell} (no difference)"
        lines.append(f"| {name} | {starts[cell]:.2f} | {' | '.join(fields)} |")
    return "\n".join(lines)


def of_all_stages(results: Mapping[str, Any]) -> list[Row]:
    """Each run once, whatever stages it belongs to."""
    return [
        *{(row["cell"], row["arm"], row["seed"]): row for found in results.values() for row in found["rows"]}.values()
    ]


# Corrections next to which the chosen rule is judged
RIVALS = ["none", "trl", "trl_preset", "trl_token_truncate", "trl_preset_token_truncate", "token_2", "dppo_tv"]
RIVALS += ["cap1", "cap3", "cap3_unweighted", "cap3_no_region", "reshape", "mixture", "m2po", "vexact"]


def one_rule(results: Mapping[str, Any], chosen: str) -> str:
    """
    A line per cell in which the chosen rule or another candidate was trained, with the scores of other corrections there, of
    whatever stage. The last columns name the corrections that it is worse and better than by the rule for differences.
    """
    rows = of_all_stages(results)
    cells, spread = scores(rows), Spread(rows)
    falls = {(row["cell"], row["arm"], row["seed"]): row["falls"] for row in rows}
    names = ["split", "wide", "excess", REFERENCE, "none", "trl", "trl_preset", "dppo_tv", "cap3", "cap3_unweighted"]
    chosen_cells = {cell: by_arm for cell, by_arm in cells.items() if {chosen, "split", "wide"} & {*by_arm}}
    return judged(chosen, chosen_cells, names, RIVALS, falls, spread)


def rows_of(results: Mapping[str, Any], stage: str) -> list[Row]:
    """The runs of a stage, none if it was not begun."""
    return results[stage]["rows"] if stage in results else []


def with_true_age(results: Mapping[str, Any]) -> list[Row]:
    """
    Runs of `single` with the pretrained model and a sampler that announces its age, and of the other arms in the cells in
    which it does not: they do not read the age, so that their runs are the same.
    """
    announced = rows_of(results, "announced")
    silent = {row["cell"].replace("-announced", ""): row["cell"] for row in announced}
    others = [row for row in of_all_stages(results) if row["cell"] in silent and row["arm"] != "single"]
    return [*announced, *({**row, "cell": silent[row["cell"]]} for row in others)]


# What the README compares, and the arms of a column, of which the first that was trained counts: TRL's own trainer cannot
# push to 8 bits, and where vLLM is up to date `auto` is `single`
OF_README = [
    "grpo-sort-in_step-fast-long-noise",
    "grpo-triple-in_step-fast-long-noise",
    "grpo-tally-lag_16-faster",
    "grpo-tag_runs-lag_8-faster",
    "grpo-merge-lag_8-faster",
    "grpo-tagged_words-lag_8-faster-announced",
    "grpo-tagged_words-in_step-faster-fp8",
    "grpo-tagged_words-lag_4-faster-announced-fp8",
]
IN_README = {
    "on_policy": [REFERENCE],
    "none": ["none"],
    "trl": ["trl", "trl_preset"],
    "token_truncate": ["trl_token_truncate", "trl_preset_token_truncate"],
    "dppo_tv": ["dppo_tv"],
    "auto": ["recent", "single"],
}


def same_arms(results: Mapping[str, Any]) -> str:
    """A line per cell of the README's table: the score of each column there, and how many of its runs fell; then all cells."""
    rows = of_all_stages({**results, "true_age": {"rows": with_true_age(results)}})
    lines = [
        f"| cell | {' | '.join(f'`{name}` | falls of `{name}`' for name in IN_README)} |",
        "| --- " * (2 * len(IN_README) + 1) + "|",
    ]
    fell: dict[str, dict[Any, bool]] = {name: {} for name in IN_README}  # of each run once: rows may share a reference
    for cell in OF_README:
        fields = []
        for name, arms in IN_README.items():
            here = [row for row in rows if row["cell"] == cell]
            trained = next((arm for arm in arms if any(row["arm"] == arm for row in here)), None)
            found = [row for row in here if row["arm"] == trained]
            falls = [row["falls"] for row in found]
            place = "" if name == REFERENCE else cell
            fell[name] |= {(place, row["seed"], row["start"], row["accuracy"]): row["falls"] for row in found}
            score = counted({row["seed"]: row["accuracy"] for row in found}) if found else ""
            fields += [score, f"{sum(falls)} of {len(falls)}"]
        lines.append(f"| {cell} | {' | '.join(fields)} |")
    totals = " | ".join(f" | {sum(falls.values())} of {len(falls)}" for falls in fell.values())
    return "\n".join([*lines, f"| all | {totals} |"])


def grown(results: Mapping[str, Any]) -> str:
    """A line per cell in which the rule that asks the gap as well was trained."""
    rows = of_all_stages(results)
    cells, spread = scores(rows), Spread(rows)
    falls = {(row["cell"], row["arm"], row["seed"]): row["falls"] for row in rows}
    names = ["single", "cap1", "cap3_unweighted", REFERENCE, "none", "trl", "trl_preset", "token_2", "dppo_tv"]
    own_cells = {cell: by_arm for cell, by_arm in cells.items() if "grown" in by_arm}
    return judged("grown", own_cells, names, ["single", "cap1", "cap3_unweighted", *RIVALS[:7]], falls, spread)


def recent(results: Mapping[str, Any], *, again: bool) -> str:
    """A line per cell in which the product of a few ratios was trained as the weight: of E15, or of those before."""
    rows = of_all_stages({**results, "true_age": {"rows": with_true_age(results)}})
    cells, spread = scores(rows), Spread(rows)
    falls = {(row["cell"], row["arm"], row["seed"]): row["falls"] for row in rows}
    names = ["single", "prefix", REFERENCE, "none", "trl", "trl_preset", "token_2", "dppo_tv"]
    of_e15 = {row["cell"] for row in rows_of(results, "recent_again")}
    own_cells = {
        cell: by_arm
        for cell, by_arm in cells.items()
        if {"recent", "prefix"} & {*by_arm} and (cell in of_e15) == again
    }
    return judged("recent", own_cells, names, ["single", *RIVALS[:7]], falls, spread)


def today(results: Mapping[str, Any], here: Sequence[Row], weighted: Collection[str]) -> str:
    """
    A line per half of today's `auto`, and one for both: `recent` where vLLM is behind and says so, and `single` elsewhere,
    where the two are the same. Then the cells in which another correction is better. `here` are runs of the machine of E7,
    which count in cells of which the archive has none. In cells that are `weighted`, whose sampler is old and says so, runs
    of `single` do not count; the last line tells how many cells have only these.
    """
    rows = of_all_stages({**results, "true_age": {"rows": with_true_age(results)}})
    archived = {(row["cell"], row["arm"]) for row in rows}
    rows += [row for row in here if (row["cell"], row["arm"]) not in archived]
    cells, spread = scores(rows), Spread([*of_all_stages(results), *here])
    fell = {(row["cell"], row["arm"], row["seed"]): row["falls"] for row in rows}
    halves = {
        "recent": [cell for cell, by_arm in cells.items() if "recent" in by_arm],
        "single": [
            cell
            for cell, by_arm in cells.items()
            if {"single"} == {"single", "recent"} & {*by_arm} and cell not in weighted
        ],
    }
    lines, totals = (
        ["| where | arm | cells | runs | fell | cells in which another correction is better |", "| --- " * 6 + "|"],
        [0, 0, 0],
    )
    losses: list[str] = []
    where = {"recent": "vLLM is behind", "single": "its weights are the newest, or announced as such"}
    for arm, found in halves.items():
        worse = {
            cell: against_rivals(cells[cell][arm], cells[cell], RIVALS[:7], partial(spread, cell, arm))[0]
            for cell in found
        }
        lost = [f"`{cell}`: {others}" for cell, others in worse.items() if others != "none"]
        runs = [fell[cell, arm, seed] for cell in found for seed in cells[cell][arm]]
        counts = [len(found), len(runs), sum(runs)]
        totals, losses = [x + y for x, y in zip(totals, counts, strict=True)], [*losses, *lost]
        lines.append(f"| {where[arm]} | `{arm}` | {' | '.join(map(str, counts))} | {len(lost)} |")
    lines.append(f"| both | | {' | '.join(map(str, totals))} | {len(losses)} |")
    left = sum("single" in by_arm and "recent" not in by_arm and cell in weighted for cell, by_arm in cells.items())
    listed = "\n".join(f"- {loss}" for loss in losses)
    return "\n".join(
        [
            *lines,
            "",
            "Another correction is better in:",
            "",
            listed,
            "",
            f"Cells with old weights that only `single` was trained in: {left}.",
        ]
    )


def young(results: Mapping[str, Any]) -> str:
    """A line per cell with weights that are one or two steps old."""
    names = [REFERENCE, "none", "trl", "trl_preset", "trl_token_truncate", "trl_preset_token_truncate"]
    return auto_beside(rows_of(results, "young"), [*names, "token_2", "dppo_tv", "recent"], results)


def unseen(results: Mapping[str, Any]) -> str:
    """
    A line per cell of gaps and ages that no rule was chosen by: `single` next to all other arms. A cell of the pretrained
    model in which the sampler announces its age shows the arms of the cell in which it does not, since they do not read the
    age.
    """
    rows = [*rows_of(results, "unseen"), *with_true_age(results)]
    names = [REFERENCE, "none", "trl", "trl_preset", "trl_token_truncate", "token_2", "dppo_tv", "cap1"]
    return auto_beside(rows, names, results)


def further(results: Mapping[str, Any]) -> str:
    """The same of further situations in the same tasks."""
    names = [REFERENCE, "none", "trl", "trl_preset", "trl_token_truncate", "trl_preset_token_truncate"]
    return auto_beside(rows_of(results, "further"), [*names, "token_2", "dppo_tv"], results)


def auto_beside(rows: Sequence[Row], names: Sequence[str], results: Mapping[str, Any]) -> str:
    """A line per cell with `single`, next to the other arms, of which the first is no rival."""
    cells, spread = scores(rows), Spread([*of_all_stages(results), *rows])
    falls = {(row["cell"], row["arm"], row["seed"]): row["falls"] for row in rows}
    with_auto = {cell: by_arm for cell, by_arm in cells.items() if "single" in by_arm}
    return judged("single", with_auto, names, names[1:], falls, spread)


def judged(
    rule: str,
    cells: Mapping[str, Mapping[str, Mapping[int, float]]],
    names: Sequence[str],
    rivals: Sequence[str],
    falls: Mapping[tuple[str, str, int], bool],
    spread: Spread,
) -> str:
    """A line per cell: the score and the falls of a rule, where it was trained, scores of other arms, and who differs."""
    lines = [
        f"| cell | `{rule}` | falls | {' | '.join(f'`{name}`' for name in names)} | worse than | better than |",
        "| --- " * (len(names) + 5) + "|",
    ]
    for cell, by_arm in cells.items():
        own = by_arm.get(rule, {})
        others = [counted(by_arm[name]) if name in by_arm else "" for name in names]
        against = against_rivals(own, by_arm, rivals, partial(spread, cell, rule)) if own else ["", ""]
        found = [counted(own), f"{sum(falls[cell, rule, seed] for seed in own)} of {len(own)}"] if own else ["", ""]
        lines.append(f"| {' | '.join([cell, *found, *others, *against])} |")
    return "\n".join(lines)


def against_rivals(
    own: Mapping[Any, float],
    by_arm: Mapping[str, Mapping[int, float]],
    rivals: Iterable[str],
    spread: Callable[[str], float],
) -> list[str]:
    """The rivals that scores are below and above by the rule for differences, with the gap to each; "none" without any."""
    gaps = {name: differ(own, by_arm[name], spread(name)) for name in rivals if name in by_arm}
    return [
        ", ".join(f"`{name}` ({gap:+.2f})" for name, gap in gaps.items() if sign * gap > 0) or "none"
        for sign in (-1, 1)
    ]


def again(rows: Sequence[Row], results: Mapping[str, Any], chosen: str) -> str:
    """
    A line per cell and arm of runs that one machine trained one after the other: the score, its seeds and falls, that of the
    archive, and how far the chosen rule is above it by the rule for differences, with the spread of all published runs.
    """
    cells, published = scores(rows), of_all_stages(results)
    archived, spread = scores(published), Spread([*published, *rows])
    falls = {(row["cell"], row["arm"], row["seed"]): row["falls"] for row in rows}
    lines = [
        f"| cell | arm | score | falls | in the archive | `{chosen}` differs by |",
        "| --- " * 6 + "|",
    ]
    for cell, by_arm in cells.items():
        for arm, by_seed in by_arm.items():
            before = archived.get(cell, {}).get(arm)
            gap = differ(by_arm[chosen], by_seed, spread(cell, chosen, arm)) if chosen in by_arm else 0.0
            fell = f"{sum(falls[cell, arm, seed] for seed in by_seed)} of {len(by_seed)}"
            found = [counted(by_seed), fell, counted(before) if before else "", f"{gap:+.2f}" if gap else "level"]
            lines.append(f"| {cell} | `{arm}` | {' | '.join(found if arm != chosen else [*found[:3], ''])} |")
    return "\n".join(lines)


def next_rule(rows: Sequence[Row], results: Mapping[str, Any], weighted: Collection[str]) -> str:
    """
    A line per cell in which the rule that followed was trained as `single`, next to the runs of the archive. It is `cap1`, but
    for the first step, in the cells that are `weighted`, whose sampler is old and says so, and else `cap3_unweighted`: the
    archive's runs of the one that it is are further seeds, and no rival. Other arms that were trained on its machine, too,
    take the place of the archive's.
    """
    archived, here = scores(of_all_stages(results)), scores(rows)
    spread = Spread([*of_all_stages(results), *rows])
    falls = {(row["cell"], row["arm"], row["seed"]): row["falls"] for row in rows}
    names = ["cap1", "cap3_unweighted", "rounded", REFERENCE, *RIVALS[:7], "cap3"]
    lines = [
        f"| cell | weights | `single` | falls | {' | '.join(f'`{name}`' for name in names)} | worse than | better than |",
        "| --- " * (len(names) + 6) + "|",
    ]
    for cell, trained in ((cell, trained) for cell, trained in here.items() if "single" in trained):
        by_arm = {**archived.get(cell, {}), **trained}
        own = {str(seed): score for seed, score in by_arm["single"].items()}
        fell = f"{sum(falls[cell, 'single', seed] for seed in by_arm['single'])} of {len(own)}"
        half = "cap1" if cell in weighted else "cap3_unweighted"
        own |= {f"archive {seed}": score for seed, score in archived.get(cell, {}).get(half, {}).items()}
        rivals = [name for name in RIVALS if name != half]
        against = against_rivals(own, by_arm, rivals, partial(spread, cell, "single"))
        others = [
            f"{counted(by_arm[name])}{' †' if name in trained else ''}" if name in by_arm else "" for name in names
        ]
        has = "yes" if half == "cap1" else "no"
        lines.append(f"| {' | '.join([cell, has, counted(by_arm['single']), fell, *others, *against])} |")
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


def kept(results: Mapping[str, Any], arm: str = TODAY) -> str:
    """
    A line per stage: in how many cells with a stale sampler an arm keeps 0.9 of the gain. A cell counts once, in the first
    stage that has it. Stages that chose an arm are left out.
    """
    lines = ["| stage | cells with a stale sampler | keeps 0.9 of the gain |", "| --- " * 3 + "|"]
    counted_cells: set[str] = set()
    kept_cells = 0
    for stage in (stage for stage in STALE_STAGES if stage in results):
        rows = results[stage]["rows"]
        starts = {row["cell"]: row["start"] for row in rows}
        own = {
            name: gain(cell, arm, starts[name]) >= GAIN
            for name, cell in scores(rows).items()
            if {arm, REFERENCE} <= {*cell} and name not in counted_cells and age(name) >= STALE
        }
        counted_cells |= {*own}
        kept_cells += sum(own.values())
        if own:
            lines.append(f"| {stage} | {len(own)} | {sum(own.values())} |")
    return "\n".join([*lines, f"| all | {len(counted_cells)} | {kept_cells} |"])


def age(cell: str) -> int:
    """Age of the sampler of a cell in optimizer steps, from its name."""
    found = re.search(r"-lag_(\d+)-", f"{cell}-")
    return int(found[1]) if found else 0


def fresh_gaps(rows: Sequence[Row], arms: Sequence[str] = ("none", TODAY)) -> str:
    """A line per cell with a sampler of 8 bits in step: the gap of a run of each arm, as its median, at first, and then."""
    names = [f"gap of `{arm}` | first 20 steps of `{arm}` | steps 21 to 40 of `{arm}`" for arm in arms]
    lines = [f"| cell | {' | '.join(names)} |", "| --- " * (3 * len(arms) + 1) + "|"]
    rounded = [row for row in rows if row["cell"].endswith(ROUNDED) and not age(row["cell"])]
    for cell in dict.fromkeys(row["cell"] for row in rounded):
        own = [
            [row[key] for row in rounded if (row["cell"], row["arm"]) == (cell, arm)]
            for arm in arms
            for key in ("k3", "k3_first", "k3_settled")
        ]
        lines.append(f"| {cell} | {' | '.join(f'{mean(found):.2g}' if found else '' for found in own)} |")
    return "\n".join(lines)


def counts(results: Mapping[str, Any]) -> str:
    """How many runs each stage has, and the CPU time of their training."""
    text = " ".join(
        f"*{stage}*: {found['done']} of {found['planned']} planned runs, {found['minutes']} minutes of training."
        for stage, found in results.items()
    )
    return textwrap.fill(text, 120, break_on_hyphens=False)


def tables(stage: str, rows: Sequence[Row], arms: Sequence[str]) -> dict[str, str]:
    """
    Text between the marks of the page, by mark. Arms that were tried in less than half of the cells are in the table of scores
    alone.
    """
    cells = scores(rows)
    often = [arm for arm in arms if sum(arm in cell for cell in cells.values()) >= len(cells) / 2]
    parts = {
        "spread": str(Spread(rows)),
        "summary": summary(rows, often),
        "differences": differences(rows, often),
        "formats": formats(rows, often),
        "pulls": pulls(rows),
        "roundings": roundings(rows),
        "cells": every_cell(rows, often if stage in RARE_ARMS_APART else arms),
        "beside": beside(rows, arms),
    }
    if stage == "second_judging":
        parts["shared"] = shared(rows, [arm for arm in often if arm != REFERENCE])
        once = [row for row in rows if any(arm.startswith("trl_") for arm in cells[row["cell"]])]
        parts["modes"] = every_cell(
            once, [arm for arm in arms if arm == REFERENCE or arm.startswith("trl") or arm in (TODAY, "icepop")]
        )
    if stage == "cut_answers":
        parts["masks"] = masks(rows)
    if stage == "eight_bits":
        parts["fresh"] = fresh_gaps(rows)
    if stage in ("fresh_weights", "preset_for_8_bits", "fresh_8_bits"):
        parts["gaps"] = gaps(rows, arms)
    if stage == "tuned_rates":
        parts["rates"] = best_rates(rows, arms)
    return {f"{stage}-{name}": part for name, part in parts.items()}
