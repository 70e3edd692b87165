"""Results in a few numbers, and the tables of `README.md`. No torch here."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


sys.path.insert(0, str(Path(__file__).parents[1]))

from gap import SAMPLERS, TRAINERS, Sampler, file_of
from tables import grid


Row = dict[str, Any]
_RESAMPLES = 200
OUTSIDE = "ratio outside [0.9, 1.1]"

# Of others: rms and mean of |d|, and k3; where they stand is in README.md
PUBLISHED = [
    ("Qwen3-8B", "bfloat16", "bfloat16", 0.0398, 0.0117, 7.8e-4),
    ("Qwen3-8B", "bfloat16", "float32", 0.0267, None, None),
    ("Qwen3-8B", "float16", "float16", 0.0050, 0.0015, None),
    ("Qwen3-8B", "float32", "float32", 0.0019, 0.0006, None),
    ("Qwen3-8B", "bfloat16", "bfloat16, float32 norm and head", 0.0327, 0.0110, None),
    ("Qwen3-8B", "bfloat16, fp8 cache", "bfloat16", 0.1348, None, None),
]


# Rows ---------------------------------------------------------------------------------------------------------------------


def flat(lists: Sequence[Sequence[float]]) -> np.ndarray:
    return np.concatenate([np.asarray(x, float) for x in lists])


def row_of(d: np.ndarray, lengths: np.ndarray) -> Row:
    """
    A gap in a few numbers: of log-ratios of trainer to sampler `(N,)`, in nats, one completion after the other, and of the
    tokens of each completion `(B,)`. Standard errors are those of resampled completions.
    """
    ends = np.cumsum(lengths)
    sums = {"n": lengths.astype(float), "square": np.diff(np.cumsum(d**2)[ends - 1], prepend=0)}
    weights = np.exp(np.diff(np.cumsum(d)[ends - 1], prepend=0))
    drawn = np.random.default_rng(0).integers(len(lengths), size=(_RESAMPLES, len(lengths)))
    again = {name: values[drawn].sum(1) for name, values in sums.items()}
    size, ratio = np.abs(d), np.exp(d)
    return {
        "tokens": len(d),
        "rms": float(np.sqrt(np.mean(d**2))),
        "rms_error": float(np.std(np.sqrt(again["square"] / again["n"]))),
        "mean_abs": float(size.mean()),
        "k3": float(np.mean(np.expm1(d) - d)),
        "ratio": float(ratio.mean()),
        "median": float(np.median(ratio)),
        "outside": float(((ratio < 0.9) | (ratio > 1.1)).mean()),
        "ess": float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
    }


def rows_of(folder: Path, sampler: Sampler) -> list[Row]:
    """The rows of one sampler, one for each of its trainers."""
    rollout = json.loads(file_of(folder, sampler).read_text())["logps"]
    lengths, found = np.array([len(x) for x in rollout]), []
    for name in sampler.trainers:
        record = json.loads(file_of(folder, sampler, TRAINERS[name]).read_text())
        train = flat(record["logps"])
        row = {"sampler": sampler.name, "trainer": name, **row_of(train - flat(rollout), lengths)}
        if "processed" in record:
            processed = flat(record["processed"])
            row["kept"] = float(np.exp(train - processed).mean())
            row["with_the_rule"] = row_of(processed - flat(rollout), lengths)
        found.append(row)
    return found


def collect(folder: Path) -> dict[str, Any]:
    """All rows, when everything was sampled and scored."""
    return {"gap": [rounded(row) for sampler in SAMPLERS for row in rows_of(folder, sampler)]}


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(x) for key, x in value.items()}
    if isinstance(value, list):
        return [rounded(x) for x in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


# Tables -------------------------------------------------------------------------------------------------------------------


def small(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}" if abs(value) < 1e-3 else f"{value:.4f}"


def percent(share: float) -> str:
    return "0" if not share else f"{100 * share:.2g} %"


# Sampler and trainer of the first table
PAIRS = [
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32 with autocast"),
    ("bfloat16", "float32"),
    ("float32", "bfloat16"),
    ("bfloat16, float32 head", "bfloat16, float32 head"),
    ("float16", "float16"),
    ("float32", "float32"),
    ("bfloat16, int8 weights", "bfloat16"),
    ("bfloat16, fp8 cache", "bfloat16"),
]


def find(rows: Sequence[Row], sampler: str, trainer: str) -> Row:
    return next(row for row in rows if row["sampler"] == sampler and row["trainer"] == trainer)


def shown(row: Row) -> Row:
    """A row with its numbers as text, by the headers of their columns."""
    return {
        "sampler": row["sampler"],
        "trainer": row["trainer"],
        "rms of d": f"{small(row['rms'])} ± {small(row['rms_error'])}",
        "mean of abs d": small(row["mean_abs"]),
        "k3": small(row["k3"]),
        OUTSIDE: percent(row["outside"]),
        "sample size of completions": f"{row['ess']:.2f}",
    }


def gaps(rows: Sequence[Row]) -> str:
    """The gap of some samplers and trainers, and its mean of d^2 as a multiple of that of bfloat16 on both sides."""
    chosen = [find(rows, *pair) for pair in PAIRS]
    times = [(row["rms"] / chosen[0]["rms"]) ** 2 for row in chosen]
    lines = [
        (*shown(row).values(), f"{x:.2f}" if x >= 0.1 else f"{x:.2g}") for row, x in zip(chosen, times, strict=True)
    ]
    return grid([*shown(chosen[0]), "mean of d^2, times the first row"], lines)


def published() -> str:
    """What others have measured."""
    lines = [[*line[:3], *map(small, line[3:])] for line in PUBLISHED]
    return grid(["model", "sampler", "trainer", "rms of d", "mean of abs d", "k3"], lines)


def truncations(rows: Sequence[Row]) -> str:
    """Sampling that leaves out tokens or penalises them, scored in float32."""

    def three(row: Row) -> str:
        return f"{row['ratio']:.3f} / {row['median']:.3f} / {100 * row['outside']:.1f} %"

    lines = []
    for row in rows:
        if "kept" in row:
            kept = "-" if "penalty" in row["sampler"] else f"{row['kept']:.3f}"
            lines.append([row["sampler"], kept, three(row), three(row["with_the_rule"])])
    lines.append(["none (control)", "1.000", three(find(rows, "bfloat16", "float32")), "-"])
    rule = "the same rule on the trainer's logits"
    return grid(["sampling", "kept mass", "mean / median / outside [0.9, 1.1]", rule], lines)


def adapters(rows: Sequence[Row]) -> str:
    """Adapters merged on one side, on both, or on none."""
    heads = ["sampler", "trainer", "rms of d", "k3", OUTSIDE]
    lines = [shown(row) for row in rows if "adapter" in row["sampler"]]
    for line in lines:
        line["trainer"] += "" if "merged" in line["trainer"] else ", adapter beside"
    return grid(heads, ([line[head] for head in heads] for line in lines))


def tables(results: dict[str, Any]) -> list[str]:
    """All of them, in the order of the page."""
    rows = results["gap"]
    return [gaps(rows), published(), truncations(rows), adapters(rows)]
