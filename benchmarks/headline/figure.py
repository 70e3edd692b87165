"""The figure: accuracy and KL of the stale sampler, RLOO, and the sampler with an fp8 cache."""

from pathlib import Path
from statistics import mean, median
from typing import Any

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt
from arms import ARMS
from matplotlib.axes import Axes


HELD_OUT = "exact answers, held-out"
K3 = "rollout_corr/k3_kl"
# The titles of the panels say the rest
LABELS = {arm.name: arm.label.removeprefix("RLOO, ").removeprefix("fp8 cache, ") for arm in ARMS}
# Okabe and Ito's colours, which colour-blind readers tell apart; related arms share one and differ in the line
STYLES = {
    "none": ("#D55E00", "-"),
    "random_rs": ("#D55E00", ":"),
    "token_tis": ("#E69F00", "-"),
    "trl_default": ("#56B4E9", "-"),
    "auto": ("#0072B2", "-"),
    "bypass": ("#009E73", "-"),
    "on_policy": ("#000000", "--"),
    "rloo_none": ("#D55E00", "-"),
    "rloo_auto": ("#0072B2", "-"),
    "fp8_none": ("#D55E00", "-"),
    "fp8_auto": ("#0072B2", "-"),
}
GRPO = [name for name in STYLES if not name.startswith(("rloo", "fp8"))]
RLOO = ["rloo_none", "rloo_auto"]
FP8 = ["fp8_none", "fp8_auto"]

Runs = dict[str, dict[int, dict[str, Any]]]
Curve = tuple[list[float], list[float]]  # steps and values


def accuracy(record: dict[str, Any]) -> Curve:
    return record["steps"], record["accuracy"]


def k3(record: dict[str, Any]) -> Curve:
    return windows(record["history"][K3], 10, median)


def reward(record: dict[str, Any]) -> Curve:
    return windows(record["history"]["reward"], 20, mean)


def windows(values: list[float], width: int, average) -> Curve:
    """Averages over consecutive windows, each drawn in its middle: 64 completions a step are noisy."""
    chunks = [values[i : i + width] for i in range(0, len(values), width)]
    return [i * width + (len(chunk) + 1) / 2 for i, chunk in enumerate(chunks)], [average(chunk) for chunk in chunks]


def plot(axes: Axes, records: list[dict[str, Any]], curve, label: str, color: str, line: str, band: bool = True):
    """Mean over seeds, a band from the lowest to the highest, and the label at the end of the line."""
    steps = curve(records[0])[0]
    seeds = list(zip(*(curve(record)[1] for record in records), strict=True))
    if band:
        axes.fill_between(steps, [min(v) for v in seeds], [max(v) for v in seeds], color=color, alpha=0.12, lw=0)
    means = [mean(v) for v in seeds]
    axes.plot(steps, means, color=color, linestyle=line, linewidth=2)
    return means[-1], label, color


def label_ends(axes: Axes, ends: list[tuple[float, str, str]]):
    """Write labels to the right of the axes, each beside the end of its line or as near as the others let it."""
    if not ends:
        return
    axes.autoscale_view()  # else matplotlib does it when it draws, after the labels are placed
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = sorted(ends)
    heights = spread([to_axes.transform((0, value))[1] for value, _, _ in ends], gap=0.062)
    for height, (_, label, color) in zip(heights, ends, strict=True):
        axes.text(1.02, height, label, color=color, transform=axes.transAxes, va="center", fontsize=9)


def spread(heights: list[float], gap: float) -> list[float]:
    """Push sorted heights apart until they are a gap from each other, each pair by the same amount."""
    heights = list(heights)
    for _ in range(100):
        for i in range(len(heights) - 1):
            push = max(gap - (heights[i + 1] - heights[i]), 0) / 2
            heights[i], heights[i + 1] = heights[i] - push, heights[i + 1] + push
    return heights


def panel(axes: Axes, runs: Runs, names: list[str], curve, title: str, **settings):
    """Draw one curve of some arms."""
    axes.set_title(title, loc="left")
    axes.set(xlabel="optimizer step", **settings)
    arms = {name: list(runs[name].values()) for name in names if name in runs}
    ends = [plot(axes, records, curve, LABELS[name], *STYLES[name]) for name, records in arms.items()]
    label_ends(axes, ends)


def fp8_panel(axes: Axes, runs: Runs):
    axes.set_title("GRPO, sampler with an fp8 key-value cache", loc="left")
    axes.set(xlabel="optimizer step", ylabel="trainer: held-out; sampler: in training", ylim=(0.2, 0.9))
    ends = []
    for name in (name for name in FP8 if name in runs):
        records, color = list(runs[name].values()), STYLES[name][0]
        ends.append(plot(axes, records, accuracy, f"trainer, {LABELS[name]}", color, "-"))
        ends.append(plot(axes, records, reward, f"sampler, {LABELS[name]}", color, ":"))
    label_ends(axes, ends)


def draw(runs: Runs, start: float, path: Path):
    """
    Draw the arms that have a style.

    Args:
        runs (`dict[str, dict[int, dict]]`):
            Records by arm and seed.
        start (`float`):
            Held-out accuracy of the warmed-up model.
        path (`Path`):
            Where to save the figure.
    """
    measured = [name for name in GRPO if name in runs and K3 in runs[name][min(runs[name])]["history"]]
    rows = 2 if any(name in runs for name in (*RLOO, *FP8)) else 1
    figure, grid = plt.subplots(rows, 2, figsize=(10, 3.4 * rows), layout="constrained")
    left, right, *below = grid.flat
    panel(left, runs, GRPO, accuracy, "GRPO, sampler 8 steps behind", ylabel=HELD_OUT, ylim=(0, 0.85))
    panel(right, runs, measured, k3, "The same runs", ylabel="KL (k3) from sampler to trainer", yscale="log")
    if below:
        panel(below[0], runs, RLOO, accuracy, "RLOO, sampler 8 steps behind", ylabel=HELD_OUT, ylim=(0, 0.85))
        fp8_panel(below[1], runs)
    for axes in (left, *below):
        axes.axhline(start, color="0.7", linewidth=0.8, zorder=0)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
        axes.set_xlim(0)
    figure.savefig(path, dpi=130)
    plt.close(figure)
