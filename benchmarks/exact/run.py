"""
Bias and alignment of the policy gradient under every preset, counted over all completions of a small space.

    python benchmarks/exact/run.py

No training and no sampling: four minutes on one core, or seven seconds with `--lengths 2 4 --seeds 1`. Writes
`results.json`, and prints the tables of `README.md`.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from errors import error_of, spread_of_the_gap
from policies import KINDS, make_problem
from tables import markdown

from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.settings.presets import PRESETS


FOLDER = Path(__file__).parent
SPACES = {2: 6, 4: 6, 6: 6, 9: 3, 14: 2}  # tokens of a completion: size of the vocabulary
OLD = "auto with old weights"
AGE = "staleness"  # the kind whose sampler announces old weights; the others announce the trainer's own
STRENGTHS = (0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2)
BINS = (0.0, 0.01, 0.03, 0.1, 0.3)  # of `s`, by their lower ends
LARGEST = 1.0  # `s` above which there are too few cases
HIGHER_IS_BETTER = {"bias": False, "alignment": True}


def measure(configs: dict[str, RolloutCorrectionConfig], seeds: int, spaces: dict[int, int]) -> list[dict]:
    """One row per problem and sampler, with the error of each preset."""
    rows = []
    for length, size in spaces.items():
        for seed in range(seeds):
            problem = make_problem(length, size, seed)
            for kind, perturbation in KINDS.items():
                for strength in STRENGTHS:
                    table = perturbation(problem, strength, seed)
                    errors = {
                        name: asdict(error_of(problem, table, config, fresh=kind != AGE))
                        for name, config in configs.items()
                    }
                    rows.append({"s": spread_of_the_gap(problem, table), "errors": errors})
    return rows


def same(rows: list[dict]) -> dict[str, list[str]]:
    """Presets that make the same gradient at the first visit of a batch, by the first of them."""
    groups = defaultdict(list)
    for name in rows[0]["errors"]:
        groups[tuple(round(row["errors"][name]["alignment"], 9) for row in rows)].append(name)
    return {names[0]: names for names in groups.values()}


def typical(rows: list[dict], measure: str) -> dict[str, float]:
    """Mean of a measure by preset; of the bias it is the geometric mean, so that one row does not decide."""
    values = {name: [row["errors"][name][measure] for row in rows] for name in rows[0]["errors"]}
    if measure == "bias":
        return {name: statistics.geometric_mean(max(v, 1e-9) for v in x) for name, x in values.items()}
    return {name: statistics.fmean(x) for name, x in values.items()}


def summary(rows: list[dict]) -> list[dict]:
    """Data of the tables: per bin of the gap, each measure of each preset."""
    groups = defaultdict(list)
    for row in rows:
        if row["s"] < LARGEST:
            groups[max(low for low in BINS if low <= row["s"])].append(row)
    return [
        {
            "s_from": low,
            "cases": len(some),
            **{
                name: {preset: float(f"{value:.6g}") for preset, value in typical(some, name).items()}
                for name in HIGHER_IS_BETTER
            },
        }
        for low, some in sorted(groups.items())
    ]


def every_preset(results: list[dict], measure: str) -> str:
    """One line per preset: the measure by bin of the gap. The best in the last bin is first."""
    last = results[-1][measure]
    rows = [
        {"preset": name, **{f"from_{i}": result[measure][name] for i, result in enumerate(results)}}
        for name in sorted(last, key=last.__getitem__, reverse=HIGHER_IS_BETTER[measure])
    ]
    cells = {f"s from {result['s_from']:g}": f"{{from_{i}:.3f}}" for i, result in enumerate(results)}
    return markdown(rows, {f"preset, and its {measure}": "{preset}", **cells})


def tables(results: list[dict]) -> list[str]:
    """The tables of `README.md`."""
    return [every_preset(results, measure) for measure in HIGHER_IS_BETTER]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(SPACES), choices=SPACES)
    parser.add_argument("--output", type=Path, default=FOLDER)
    args = parser.parse_args()

    torch.set_num_threads(1)
    configs = {name: RolloutCorrectionConfig(rollout_correction=name) for name in PRESETS}
    # What `auto` is if no sampler announces its age
    configs[OLD] = RolloutCorrectionConfig(rollout_correction="auto", rollout_is_stale_only=False)
    groups = same(measure(configs, 1, {length: SPACES[length] for length in (2, 4)}))
    chosen = {name: configs[name] for name in groups}
    results = summary(measure(chosen, args.seeds, {length: SPACES[length] for length in args.lengths}))
    for first, names in groups.items():
        print(f"- {first}" + (f", as {', '.join(names[1:])}" if names[1:] else ""))
    print("", *tables(results), sep="\n\n")
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
