"""Results in a few numbers, and the tables of `README.md`. No torch here."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


sys.path.insert(0, str(Path(__file__).parents[1]))

from gap import SAMPLERS, Sampler, file_of, trainers_of


HERE = Path(__file__).parent
Row = dict[str, Any]
_RESAMPLES = 200

# Of others: rms and mean of |d|, k3, share of ratios outside [0.9, 1.1]; where they stand is in README.md
PUBLISHED = [
    ("Qwen3-8B", "bfloat16", "bfloat16", 0.0398, 0.0117, 7.8e-4, None),
    ("Qwen3-8B", "bfloat16", "float32", 0.0267, None, None, None),
    ("Qwen3-8B", "float16", "float16", 0.0050, 0.0015, None, None),
    ("Qwen3-8B", "float32", "float32", 0.0019, 0.0006, None, None),
    ("Qwen3-8B", "bfloat16", "bfloat16, float32 norm and head", 0.0327, 0.0110, None, None),
    ("Qwen3-8B", "bfloat16, fp8 cache", "bfloat16", 0.1348, None, None, None),
    ("Qwen2.5-0.5B", "bfloat16", "bfloat16", 0.0499, None, None, 0.075),
    ("Qwen2.5-0.5B", "bfloat16", "float32", 0.0424, None, None, 0.037),
    ("Qwen2.5-0.5B", "none: the trainer, one by one", "bfloat16", 0.0554, None, None, 0.080),
]
# Of Qwen2.5-1.5B: kept mass; mean, median and share outside, with the whole distribution and with what was kept
TRUNCATED = [
    ("top_p=0.8, top_k=1024", 0.895, (0.896, 0.895, 0.518), (1.001, 1.000, 0.043)),
    ("top_k=20", 0.965, (0.965, 0.995, 0.162), (1.000, 1.000, 0.062)),
    ("top_k=1024", 0.994, (0.995, 1.000, 0.069), (1.000, 1.000, 0.059)),
]


# Rows ---------------------------------------------------------------------------------------------------------------------


def flat(lists: Sequence[Sequence[float]]) -> np.ndarray:
    return np.concatenate([np.asarray(x, float) for x in lists])


def row_of(d: np.ndarray, lengths: np.ndarray) -> Row:
    """
    A gap in a few numbers.

    Args:
        d (`np.ndarray` of shape `(N,)`):
            Log-ratio of trainer to sampler, in nats, completion after completion.
        lengths (`np.ndarray` of shape `(B,)`):
            Tokens of each completion.

    Returns:
        `dict`: `k3`, `kl` (nats), `rms`, `mean_abs` and percentiles of `d`, shares of tokens beyond bounds, `ess` (effective
        sample size of whole completions, as a share), and standard errors of `rms` and `k3` from resampled completions.
    """
    ends = np.cumsum(lengths)
    sums = {"n": lengths.astype(float)}
    for name, values in (("k3", np.expm1(d) - d), ("square", d**2)):
        sums[name] = np.diff(np.cumsum(values)[ends - 1], prepend=0)
    weights = np.exp(np.diff(np.cumsum(d)[ends - 1], prepend=0))
    drawn = np.random.default_rng(0).integers(len(lengths), size=(_RESAMPLES, len(lengths)))
    again = {name: values[drawn].sum(1) for name, values in sums.items()}
    size, ratio = np.abs(d), np.exp(d)
    return {
        "tokens": len(d),
        "completions": len(lengths),
        "rms": float(np.sqrt(np.mean(d**2))),
        "rms_error": float(np.std(np.sqrt(again["square"] / again["n"]))),
        "mean_abs": float(size.mean()),
        "k3": float(np.mean(np.expm1(d) - d)),
        "k3_error": float(np.std(again["k3"] / again["n"])),
        "kl": float(-d.mean()),
        **{f"p{q:g}": float(np.percentile(d, q)) for q in (0.1, 1, 50, 99, 99.9)},
        "max_abs": float(size.max()),
        "over_0.1": float((size > 0.1).mean()),
        "over_1": float((size > 1).mean()),
        "ratio": float(ratio.mean()),
        "median": float(np.median(ratio)),
        "outside": float(((ratio < 0.9) | (ratio > 1.1)).mean()),
        "ess": float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
    }


def rows_of(folder: Path, sampler: Sampler) -> list[Row]:
    """The rows of one sampler: a trainer each, as far as it has scored."""
    path = file_of(folder, sampler)
    if not path.exists():
        return []
    samples = json.loads(path.read_text())
    scores = {
        t: json.loads(f.read_text()) for t in trainers_of(sampler) if (f := file_of(folder, sampler, t)).exists()
    }
    rollout = flat(samples["logps"])
    lengths = np.array([len(x) for x in samples["logps"]])
    found = []
    for trainer, record in scores.items():
        train = flat(record["logps"])
        row = {"sampler": sampler.name, "trainer": trainer.name, **row_of(train - rollout, lengths)}
        row |= {"seconds_sampling": samples["seconds"], "seconds_scoring": record["seconds"]}
        if "processed" in record:
            processed = flat(record["processed"])
            row["kept"] = float(np.exp(train - processed).mean())
            row["with_the_rule"] = row_of(processed - rollout, lengths)
        found.append(row)
    return found


def collect(folder: Path) -> dict[str, Any]:
    """What there is, as rows."""
    return {"gap": [rounded(row) for sampler in SAMPLERS for row in rows_of(folder / "gap", sampler)]}


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(x) for key, x in value.items()}
    if isinstance(value, list):
        return [rounded(x) for x in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


# Tables -------------------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def small(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}" if abs(value) < 1e-3 else f"{value:.4f}"


def percent(share: float | None) -> str:
    return "-" if share is None else "0" if not share else f"{100 * share:.2g} %"


# Sampler and trainer of the first table; `results.json` has more
PAIRS = [
    ("bfloat16", "float32 with autocast"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("bfloat16, float32 head", "bfloat16, float32 head"),
    ("float16", "float16"),
    ("float32", "float32"),
    ("bfloat16, int8 weights", "bfloat16"),
    ("bfloat16, fp8 cache", "bfloat16"),
]
# What rounds, in which sampler and trainer
ROUNDS = [
    ("both sides", "bfloat16", "bfloat16"),
    ("both sides, the trainer with autocast", "bfloat16", "float32 with autocast"),
    ("the sampler only", "bfloat16", "float32"),
    ("the trainer only", "float32", "bfloat16"),
    ("both sides, but not the heads", "bfloat16, float32 head", "bfloat16, float32 head"),
    ("both sides, in float16", "float16", "float16"),
    ("both sides, in float32", "float32", "float32"),
    ("both sides, and int8 model weights", "bfloat16, int8 weights", "bfloat16"),
    ("both sides, and an fp8 cache", "bfloat16, fp8 cache", "bfloat16"),
]


def gaps(rows: Sequence[Row]) -> str:
    """The gap of the pairs of a sampler and a trainer that a run is likely to have."""
    lines = [
        [
            row["sampler"],
            row["trainer"],
            f"{row['tokens']:,}",
            f"{small(row['rms'])} ± {small(row['rms_error'])}",
            small(row["mean_abs"]),
            f"{small(row['k3'])} ± {small(row['k3_error'])}",
            f"{row['max_abs']:.2g}",
            percent(row["outside"]),
            f"{row['ess']:.2f}",
        ]
        for pair in PAIRS
        if (row := find(rows, *pair))
    ]
    head = ["sampler", "trainer", "tokens", "rms of d", "mean of abs d", "k3", "largest abs d"]
    return table([*head, "ratio outside [0.9, 1.1]", "sample size of completions"], lines)


def parts(rows: Sequence[Row]) -> str:
    """The mean of d^2 by what rounds, as a multiple of that of bfloat16 on both sides."""
    base = find(rows, *ROUNDS[0][1:])
    if base is None:
        return "Not measured."
    lines = []
    for what, sampler, trainer in ROUNDS:
        if row := find(rows, sampler, trainer):
            times = (row["rms"] / base["rms"]) ** 2
            lines.append([what, sampler, trainer, f"{times:.2f}" if times >= 0.1 else f"{times:.2g}"])
    return table(["what rounds", "sampler", "trainer", "mean of d^2, times the first row"], lines)


def published() -> str:
    """What others have measured."""
    lines = [
        [model, sampler, trainer, small(rms), small(mean), small(k3), percent(outside)]
        for model, sampler, trainer, rms, mean, k3, outside in PUBLISHED
    ]
    return table(["model", "sampler", "trainer", "rms of d", "mean of abs d", "k3", "ratio outside [0.9, 1.1]"], lines)


def find(rows: Sequence[Row], sampler: str, trainer: str) -> Row | None:
    return next((row for row in rows if row["sampler"] == sampler and row["trainer"] == trainer), None)


def truncations(rows: Sequence[Row]) -> str:
    """In the columns of TRL's own table."""

    def shown(x: Row) -> str:
        return f"{x['ratio']:.3f} / {x['median']:.3f} / {100 * x['outside']:.1f} %"

    lines = [
        [
            f"{row['sampler']}",
            row["trainer"],
            f"{row['kept']:.3f}" if "penalty" not in row["sampler"] else "-",
            shown(row),
            shown(row["with_the_rule"]),
        ]
        for row in rows
        if "kept" in row
    ]
    control = [
        ["none (control)", row["trainer"], "1.000", shown(row), "-"]
        for row in (find(rows, "bfloat16", "float32"), find(rows, "bfloat16", "bfloat16"))
        if row
    ]
    theirs = [
        [f"Qwen2.5-1.5B: {name}", "bfloat16", f"{kept:.3f}"]
        + [f"{mean:.3f} / {middle:.3f} / {100 * share:.1f} %" for mean, middle, share in (whole, part)]
        for name, kept, whole, part in TRUNCATED
    ]
    head = [
        "sampling",
        "trainer",
        "kept mass",
        "mean / median / outside [0.9, 1.1]",
        "the same rule on the trainer's logits",
    ]
    return table(head, [*lines, *control, *theirs])


def adapters(rows: Sequence[Row]) -> str:
    """Adapters merged on one side, on both, or on none."""
    lines = [
        [
            row["sampler"],
            row["trainer"] + ("" if "merged" in row["trainer"] else ", adapter beside"),
            f"{row['tokens']:,}",
            f"{small(row['rms'])} ± {small(row['rms_error'])}",
            f"{small(row['k3'])} ± {small(row['k3_error'])}",
            percent(row["outside"]),
        ]
        for row in rows
        if "adapter" in row["sampler"]
    ]
    head = ["sampler", "trainer", "tokens", "rms of d", "k3", "ratio outside [0.9, 1.1]"]
    return table(head, lines) if lines else "Not measured."


def tables(results: dict[str, Any]) -> dict[str, str]:
    """What stands between the marks of `README.md`, by mark."""
    rows = results["gap"]
    return {
        "gap": gaps(rows),
        "parts": parts(rows),
        "published": published(),
        "truncation": truncations(rows),
        "adapter": adapters(rows),
    }


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
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    readme = folder / "README.md"
    readme.write_text(filled(readme.read_text(), tables(results)))
