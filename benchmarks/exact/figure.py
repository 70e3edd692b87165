"""One page of pictures: how well a batch points along the true gradient."""

import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt


# What is drawn: one of each family, and what is done without.
SHOWN = {
    "disabled": ("no correction", "black"),
    "decoupled_token_is": ("token weights", "tab:blue"),
    "decoupled_seq_is": ("sequence weights", "tab:purple"),
    "decoupled_token_icepop": ("IcePop", "tab:green"),
    "bypass_ppo_clip": ("PPO around the sampler", "tab:orange"),
    "bypass_dppo_tv": ("DPPO, total variation", "tab:red"),
    "decoupled_kpop": ("KPop", "tab:brown"),
    "auto": ("auto", "tab:cyan"),
    "decoupled_geo_rs_token_tis": ("geometric rejection", "tab:gray"),
}


def draw(rows: list[dict], path: Path):
    kinds, lengths = list(dict.fromkeys(row["kind"] for row in rows)), sorted({row["length"] for row in rows})
    figure, axes = plt.subplots(
        len(kinds),
        len(lengths),
        figsize=(3 * len(lengths) + 1, 2.5 * len(kinds)),
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for y, kind in enumerate(kinds):
        for x, length in enumerate(lengths):
            of_both = [row for row in rows if (row["kind"], row["length"]) == (kind, length)]
            draw_one(axes[y, x], of_both)
            if not y:
                axes[y, x].set_title(f"{length} tokens")
            if not x:
                axes[y, x].set_ylabel(f"{kind}\nalignment")
            if y == len(kinds) - 1:
                axes[y, x].set_xlabel("gap s of a token, nats")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=4 if len(lengths) > 2 else 2, loc="upper center", frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95 if len(kinds) > 2 else 0.9))
    figure.savefig(path, dpi=80)
    plt.close(figure)


def draw_one(axis, rows: list[dict]):
    """Alignment over gap, each the mean over the seeds at one strength."""
    by_strength = defaultdict(list)
    for row in rows:
        by_strength[row["strength"]].append(row)
    groups = [by_strength[strength] for strength in sorted(by_strength)]
    gaps = [statistics.fmean(row["s"] for row in group) for group in groups]
    for name, (label, color) in SHOWN.items():
        aligned = [statistics.fmean(row["errors"][name]["alignment"] for row in group) for group in groups]
        points = sorted(zip(gaps, aligned, strict=True))
        axis.plot(*zip(*points, strict=True), label=label, color=color, linewidth=1.2)
    axis.set(xscale="log", xlim=(3e-3, 2), ylim=(-0.1, 1))
    axis.grid(alpha=0.3)
