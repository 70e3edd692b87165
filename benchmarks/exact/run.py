"""
Bias, variance and direction of the policy gradient under every preset, counted over all completions of a small space.

    python benchmarks/exact/run.py

No training and no sampling: four minutes on one core, or seven seconds with `--lengths 2 4 --seeds 1`. Writes
`results.json` and `exact.png`, and prints the tables of `README.md`.
"""

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from errors import error_of, gap
from figure import draw
from policies import KINDS, make_problem
from tables import markdown

from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.settings.presets import PRESETS


FOLDER = Path(__file__).parent
SPACES = {2: 6, 4: 6, 6: 6, 9: 3, 14: 2}  # tokens of a completion: size of the vocabulary
STRENGTHS = (0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2)
MEASURES = ("alignment", "cosine", "bias", "spread")
# Gaps are counted in these bins of `s`.
BINS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, math.inf)


def measure(configs: dict[str, RolloutCorrectionConfig], seeds: int, spaces: dict[int, int]) -> list[dict]:
    """One row per problem and sampler, with the error of each setting."""
    rows = []
    for length, size in spaces.items():
        for seed in range(seeds):
            problem = make_problem(length, size, seed)
            for kind, perturbation in KINDS.items():
                for strength in STRENGTHS:
                    table = perturbation(problem, strength, seed)
                    setting = {"kind": kind, "strength": strength, "length": length, "seed": seed}
                    setting |= asdict(gap(problem, table))
                    if setting["s"] == 0 and setting["lost"] < 1e-12:
                        continue  # as the policy itself
                    errors = {name: asdict(error_of(problem, table, config)) for name, config in configs.items()}
                    rows.append({**setting, "errors": errors})
    return rows


def same(rows: list[dict]) -> dict[str, list[str]]:
    """Presets that make the same gradient at the first visit of a batch, by the first of them."""
    groups = defaultdict(list)
    for name in rows[0]["errors"]:
        groups[tuple(round(row["errors"][name]["alignment"], 9) for row in rows)].append(name)
    return {names[0]: names for names in groups.values()}


def by_gap(rows: list[dict]) -> dict[tuple[int, float], list[dict]]:
    """Rows of a length, and of a bin of `s`, by its lower end."""
    groups = defaultdict(list)
    for row in rows:
        low = max(bound for bound in BINS if bound <= row["s"])
        groups[row["length"], low].append(row)
    return dict(sorted(groups.items()))


def typical(rows: list[dict], measure: str) -> dict[str, float]:
    """Mean of a measure over some rows, by setting; of errors, of their logarithm, so that one row does not decide."""
    values = {name: [row["errors"][name][measure] for row in rows] for name in rows[0]["errors"]}
    if measure == "bias":
        return {name: statistics.geometric_mean(max(v, 1e-9) for v in x) for name, x in values.items()}
    return {name: statistics.fmean(x) for name, x in values.items()}


def summary(rows: list[dict]) -> list[dict]:
    """Data of the tables: per length and gap, each measure of each setting."""
    found = []
    for (length, low), some in by_gap(rows).items():
        measures = {
            name: {setting: float(f"{value:.4g}") for setting, value in typical(some, name).items()}
            for name in MEASURES
        }
        found.append({"length": length, "s_from": low, "problems": len(some), **measures})
    return found


# Tables of `README.md` ------------------------------------------------------------------------------------------------


# Gaps of the tables, by their lower end. Above 1 there are too few cases.
SHOWN_GAPS = BINS[:-2]
# Presets whose measure differs by less than this from the best are not told apart.
CLOSE = 0.002
HIGHER_IS_BETTER = {"alignment": True, "bias": False}


def by_length(results: list[dict], measure: str) -> str:
    """Per length and gap: the best value of a measure, what has it, and the values of some presets."""
    best = f"{'highest' if HIGHER_IS_BETTER[measure] else 'lowest'} {measure}"
    columns = {
        "tokens": "{length}",
        "s": "{s_from:g} to {s_to:g}",
        "cases": "{problems}",
        best: "{best:.3f}",
        "with": "{with}",
        "no correction": "{values[disabled]:.3f}",
        "token weights": "{values[decoupled_token_is]:.3f}",
        "sequence weights": "{values[decoupled_seq_is]:.3f}",
        "`auto`": "{values[auto]:.3f}",
    }
    rows = []
    for result in results:
        if result["s_from"] not in SHOWN_GAPS:
            continue
        values = result[measure]
        ordered = sorted(values, key=values.__getitem__, reverse=HIGHER_IS_BETTER[measure])
        close = [name for name in ordered if abs(values[name] - values[ordered[0]]) < CLOSE]
        shown = ", ".join(close) if len(close) <= 3 else f"{len(close)} of {len(values)} presets"
        high = BINS[BINS.index(result["s_from"]) + 1]
        rows.append({**result, "s_to": high, "best": values[ordered[0]], "with": shown, "values": values})
    return markdown(rows, columns)


def every_setting(results: list[dict], measure: str) -> str:
    """One line per setting: the measure by bin of the gap, over all lengths and kinds. The best in the last bin is first."""
    bins = [low for low in SHOWN_GAPS if any(result["s_from"] == low for result in results)]
    columns = {low: over_lengths([r for r in results if r["s_from"] == low], measure) for low in bins}
    ordered = sorted(columns[bins[-1]].items(), key=lambda item: item[1], reverse=HIGHER_IS_BETTER[measure])
    rows = [
        {"setting": name, **{f"from_{i}": columns[low][name] for i, low in enumerate(bins)}} for name, _ in ordered
    ]
    cells = {f"s from {low:g}": f"{{from_{i}:.3f}}" for i, low in enumerate(bins)}
    return markdown(rows, {f"preset, and its {measure}": "{setting}", **cells})


def over_lengths(results: list[dict], measure: str) -> dict[str, float]:
    """Mean over all problems of some lengths, as in [`typical`]."""
    counts = [result["problems"] for result in results]
    values = {name: [result[measure][name] for result in results] for name in results[0][measure]}
    if measure == "bias":
        return {name: math.exp(statistics.fmean(map(math.log, x), counts)) for name, x in values.items()}
    return {name: statistics.fmean(x, counts) for name, x in values.items()}


def tables(results: list[dict]) -> list[str]:
    return [make(results, measure) for make in (every_setting, by_length) for measure in ("bias", "alignment")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(SPACES), choices=SPACES)
    parser.add_argument("--output", type=Path, default=FOLDER)
    args = parser.parse_args()

    torch.set_num_threads(1)
    configs = {name: RolloutCorrectionConfig(rollout_correction=name) for name in PRESETS}
    groups = same(measure(configs, 1, {length: SPACES[length] for length in (2, 4)}))
    chosen = {name: configs[name] for name in groups}
    rows = measure(chosen, args.seeds, {length: SPACES[length] for length in args.lengths})
    args.output.mkdir(parents=True, exist_ok=True)
    draw(rows, args.output / "exact.png")
    for first, names in groups.items():
        print(f"- {first}" + (f", as {', '.join(names[1:])}" if names[1:] else ""))
    results = summary(rows)
    print("", *tables(results), sep="\n\n")
    (args.output / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
