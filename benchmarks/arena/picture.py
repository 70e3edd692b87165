"""
The picture of the comparison: accuracy over steps of five arms with three seeds each, in a cell of each kind.

    python benchmarks/arena/picture.py    # from `runs.jsonl.xz`, without training

It writes `picture.json`, with the mean and the range over seeds of each look, and draws `docs/images/comparison.svg`. A cell
is left out until all five arms have three seeds there.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1]))

import archive
from plan import STAGES
from seeds import FULL, REFERENCE


HERE = Path(__file__).parent
DATA, PICTURE = HERE / "picture.json", HERE.parents[1] / "docs/images/comparison.svg"
# With the colours of the quickstart's picture
ARMS = {
    "none": ("no correction", "#d55e00"),
    "trl": ("TRL's default", "#009e73"),
    "dppo_tv": ("bypass_dppo_tv", "#cc79a7"),
    "cap3": ("auto", "#0072b2"),
    REFERENCE: ("fresh weights, no correction", "#333333"),
}
# Exact answers, a format at two rates, and the pretrained model
CELLS = {
    "grpo-interleave-lag_32-faster": "exact answers, 32 steps old",
    "grpo-tag_swap-lag_8-fast": "a format, 8 steps old",
    "grpo-tag_even-lag_8-faster": "a format at twice the rate",
    "grpo-tagged_words-lag_8-faster": "pretrained model, 8 steps old",
}
Curve = dict[str, list[float]]


def curves(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Curve]]:
    """Mean and range over seeds of each look, by cell and arm, of cells in which every arm has three seeds."""
    planned: dict[tuple[str, str], dict[int, str]] = {}
    for run in (run for stage in STAGES.values() for run in stage()):
        if run.name in runs:
            planned.setdefault((run.cell.name, run.arm.name), {})[run.seed] = run.name
    found = {
        cell: {arm: [runs[name] for name in planned.get((cell, arm), {}).values()] for arm in ARMS} for cell in CELLS
    }
    return {
        cell: {arm: band(records) for arm, records in by_arm.items()}
        for cell, by_arm in found.items()
        if all(len(records) >= FULL for records in by_arm.values())
    }


def band(records: list[Mapping[str, Any]]) -> Curve:
    """Of each look, the mean, the lowest and the highest accuracy over seeds."""
    looks = [*zip(*(record["accuracy"] for record in records), strict=True)]
    found = {"steps": records[0]["steps"]}
    for name, of in (("mean", mean), ("low", min), ("high", max)):
        found[name] = [round(of(values), 4) for values in looks]
    return found


def draw(data: Mapping[str, Mapping[str, Curve]], path: Path):
    """A panel per cell, next to each other."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "comparison"  # the same file each time
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(data), figsize=(3.2 * len(data), 3.2), squeeze=False, sharey=True)
    for panel, (cell, by_arm) in zip(panels[0], data.items(), strict=True):
        for arm, (label, color) in ARMS.items():
            found = by_arm[arm]
            panel.plot(
                found["steps"], found["mean"], label=label, color=color, dashes=(3, 2) if arm == REFERENCE else ()
            )
            panel.fill_between(found["steps"], found["low"], found["high"], color=color, alpha=0.15, linewidth=0)
        panel.set(title=CELLS[cell], xlabel="optimizer steps", ylim=(0, 1))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("held-out accuracy")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="lower center", ncols=len(ARMS), frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main():
    data = curves(archive.read())
    DATA.write_text(json.dumps(data) + "\n")
    draw(data, PICTURE)
    print(f"{', '.join(data)}: {DATA} and {PICTURE}")


if __name__ == "__main__":
    main()
