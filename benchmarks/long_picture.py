"""
The picture of README: long answers with fresh weights, with each correction and without one, over three seeds.

    python benchmarks/long_picture.py    # from `results/long_answers.json`, without training

It draws `docs/images/long_answers.svg`: a light card, which is a dark one where the page around it is dark.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any


HERE = Path(__file__).parent
RESULTS, PICTURE = HERE / "results/long_answers.json", HERE.parent / "docs/images/long_answers.svg"
ARMS = {  # of the results, and their names in the picture
    "none": "no correction",
    "TRL's default": "TRL's default",
    "TRL's `token_truncate`": "TRL's token_truncate",
    "`auto`": "auto",
}
POINTS = {"k3": "gap (k3_kl)", "weight": "mean weight"}  # of a run, a mean over its steps

TITLE = (
    "Answers of 512 tokens, fresh weights, three seeds: gap, mean weight and reward without a correction, with TRL's two, "
    "and with auto"
)
# Of the page, text, axes and the arms, as GitHub has them
LIGHT = {
    "page": "#ffffff",
    "text": "#1f2328",
    "axes": "#818b98",
    **dict(zip(ARMS, ("#6e7781", "#cf222e", "#8250df", "#0969da"), strict=True)),
}
DARK = {
    "page": "#0d1117",
    "text": "#f0f6fc",
    "axes": "#6e7681",
    **dict(zip(ARMS, ("#9198a1", "#f85149", "#ab7df8", "#4493f8"), strict=True)),
}
FONTS = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
STYLE = {
    "svg.hashsalt": "long_answers",  # the same file each time
    "svg.fonttype": "none",
    "path.simplify": False,  # a point for each step
    "font.size": 13,
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), LIGHT["axes"]),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), LIGHT["text"]),
}


def runs_of(rows: Sequence[Mapping[str, Any]], arm: str) -> list[Mapping[str, Any]]:
    """Rows of an arm."""
    return [row for row in rows if row["arm"] == arm]


def draw(rows: Sequence[Mapping[str, Any]], path: Path):
    """The gap and the mean weight of each run as a point, and the reward as its mean and range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context(STYLE):
        sizes = {"width_ratios": [1, 1, 1.5]}
        figure, panels = plt.subplots(1, 3, figsize=(8.4, 3.5), layout="constrained", gridspec_kw=sizes)
        figure.set_facecolor(LIGHT["page"])
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
        for panel, (name, title) in zip(panels, POINTS.items(), strict=False):
            for place, arm in enumerate(ARMS):
                values = [row[name] for row in runs_of(rows, arm)]
                panel.plot([place] * len(values), values, "o", color=LIGHT[arm], markersize=9)
            panel.set(title=title, xlim=(-0.6, len(ARMS) - 0.4), xticks=[])
            panel.margins(y=0.2)
        for arm in ARMS:
            steps, mean, low, high = band(runs_of(rows, arm))
            panels[2].plot(steps, mean, color=LIGHT[arm], linewidth=2.4)
            panels[2].fill_between(steps, low, high, color=LIGHT[arm], alpha=0.12, linewidth=0)
        panels[2].set(title="reward", xlabel="optimizer steps", xticks=range(5, steps[-1] + 1, 5))
        names = [plt.Line2D([], [], linestyle="none", color=LIGHT[arm], label=name) for arm, name in ARMS.items()]
        bold = {"handlelength": 0, "prop": {"weight": "bold"}, "labelcolor": "linecolor", "frameon": False}
        figure.legend(handles=names, loc="outside lower center", ncols=len(ARMS), **bold)
        for panel in panels:
            panel.set_ylim(0)
            panel.set_facecolor("none")
            panel.locator_params(axis="y", nbins=5)
            panel.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
    path.write_text(with_dark_theme(path.read_text()))


def band(runs: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps, and of the reward at each the mean, the lowest and the highest over runs."""
    looks = [*zip(*(run["rewards"] for run in runs), strict=True)]
    mean, low, high = ([of(values) for values in looks] for of in (fmean, min, max))
    return [*range(1, len(looks) + 1)], mean, low, high


def with_dark_theme(svg: str) -> str:
    """The picture with a title, and with the colours of the dark theme where the page around it is dark."""
    rules = " ".join(
        f'[style*="{kind}: {light}"] {{ {kind}: {DARK[name]} !important; }}'
        for name, light in LIGHT.items()
        for kind in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>"
    svg = re.sub("font-family: [^;]+;", f"font-family: {FONTS};", svg)
    return re.sub(r"(<svg [^>]*)>", rf'\1 role="img">\n <title>{TITLE}</title>\n {style}', svg, count=1)


def main():
    draw(json.loads(RESULTS.read_text()), PICTURE)


if __name__ == "__main__":
    main()
