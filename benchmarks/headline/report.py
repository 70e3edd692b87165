"""Table, claims, `results.json` and `headline.png` of the runs in a folder."""

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from arms import ARMS
from figure import K3, draw
from tables import markdown


NOISE = {
    "arms": "{arms}",
    "number of arms": "{number}",
    "of one seed": "{seed:.3f}",
    "of a mean over three seeds": "{mean:.3f}",
    "of a difference between two such means": "{difference:.3f}",
}
SCORES = {
    "arm": "{label}",
    "start": "{start}",
    "last 3": "**{last}**",
    "per seed": "{per_seed}",
    "final": "{final}",
}
GAPS = {
    "arm": "{label}",
    "sampler's reward": "{reward}",
    "k3 median / max": "{k3} / {k3_max}",
    "sample size": "{sample_size}",
    "kept": "{kept}",
}
DIFFERENCES = {
    "higher": "{higher}",
    "lower": "{lower}",
    "difference": "{difference:.3f}",
    "limit": "{limit:.2f}",
    "counts": "{counts}",
    "overlap": "{overlap}",
}
# Between two and three standard errors of a difference; set after the runs
LIMIT_ROSE, LIMIT_FELL = 0.07, 0.15
# Arms whose difference is told: the corrections of one situation, and the control
COMPARED = [
    ("auto", "trl_default"),
    ("geo_rs_tis", "trl_default"),
    ("bypass", "trl_default"),
    ("token_tis", "trl_default"),
    ("auto", "token_tis"),
    ("on_policy", "auto"),
    ("rloo_auto", "rloo_geo_rs_tis"),
    ("fp8_auto", "fp8_none"),
    ("fp8_geo_rs_tis", "fp8_none"),
    ("random_rs", "none"),
]
CLAIMS = {
    "claim": "{claim}",
    "verdict": "{verdict}",
    "per seed": "{shown} {relation} {bound:.2f}, margin {margin:.3f}",
}

Record = dict[str, Any]  # what `train.train` returns, and the command
Runs = dict[str, dict[int, Record]]  # by arm and seed


def load(folder: Path) -> Runs:
    """
    The runs in a folder, in the order of the arms.

    Raises:
        `SystemExit`: if there is none, or if the seeds of an arm were run with different settings.
    """
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    runs = {}
    for arm in ARMS:
        seeds = {record["seed"]: record for record in records if record["arm"] == arm.name}
        if seeds:
            runs[arm.name] = dict(sorted(seeds.items()))
        if any(record["settings"] != next(iter(seeds.values()))["settings"] for record in seeds.values()):
            raise SystemExit(f"The runs of {arm.name!r} in {folder} have different settings.")
    if not runs:
        raise SystemExit(f"There are no runs in {folder}.")
    return runs


# Summaries -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """
    A run in a few numbers.

    Args:
        start, worst, final (`float`):
            Held-out accuracy before the first step, at its lowest, and after the last step.
        last (`float`):
            Mean held-out accuracy of the last three looks.
        greedy (`float`):
            Held-out accuracy after the last step, with the most likely token at every position.
        reward (`float`):
            What the sampler was rewarded with in training, mean of the last 20 steps.
        k3, k3_max (`float` or `None`):
            Median and maximum over the steps of the KL divergence from sampler to trainer, in nats per token.
        sample_size (`float` or `None`):
            Median effective sample size of the weights, where there are weights.
        kept (`float` or `None`):
            Mean share of tokens that are not rejected, where there is rejection.
        grad_norm (`float`):
            Median gradient norm before clipping.
    """

    start: float
    worst: float
    final: float
    last: float
    greedy: float
    reward: float
    k3: float | None
    k3_max: float | None
    sample_size: float | None
    kept: float | None
    grad_norm: float


def summarize(record: Record) -> Summary:
    accuracy, history = record["accuracy"], record["history"]
    k3 = history.get(K3)
    sample_size = history.get("rollout_corr/rollout_is_eff_sample_size")
    rejected = history.get("rollout_corr/rollout_rs_masked_fraction")
    return Summary(
        start=accuracy[0],
        worst=min(accuracy),
        final=accuracy[-1],
        last=mean(accuracy[-3:]),
        greedy=record["greedy_accuracy"],
        reward=mean(history["reward"][-20:]),
        k3=median(k3) if k3 else None,
        k3_max=max(k3) if k3 else None,
        sample_size=median(sample_size) if sample_size else None,
        kept=1 - mean(rejected) if rejected else None,
        grad_norm=median(history["grad_norm"]),
    )


# Tables --------------------------------------------------------------------------------------------------------------


def tables(results: dict[str, Any]) -> list[str]:
    """The tables of `README.md`: noise, differences, scores, gaps, claims."""
    arms = results["arms"].values()
    rows = [row_of(arm) for arm in arms]
    return [
        markdown(noise_of(arms, results["start"]), NOISE),
        markdown(differences_of(results["arms"], results["start"]), DIFFERENCES),
        markdown(rows, SCORES),
        markdown(rows, GAPS),
        markdown(map(verdict_of, results["claims"]), CLAIMS),
    ]


def noise_of(arms: Iterable[dict[str, Any]], start: float) -> list[dict[str, Any]]:
    """Standard errors of the last-3 accuracy, from what the seeds of an arm differ by. Arms with one seed are left out."""
    variances = {"accuracy rose": [], "accuracy fell": []}
    for arm in arms:
        seeds = [seed["summary"]["last"] for seed in arm["seeds"].values()]
        if len(seeds) > 1:
            variances["accuracy rose" if mean(seeds) > start else "accuracy fell"].append(stdev(seeds) ** 2)
    rows = []
    for name, of_arms in variances.items():
        if of_arms:
            seed = math.sqrt(mean(of_arms))
            errors = {"seed": seed, "mean": seed / math.sqrt(3), "difference": seed * math.sqrt(2 / 3)}
            rows.append({"arms": name, "number": len(of_arms), **errors})
    return rows


def differences_of(arms: dict[str, dict[str, Any]], start: float) -> list[dict[str, Any]]:
    """Which of two arms has the higher last-3 accuracy, by how much, and whether a seed of the other is as high."""
    rows = []
    for pair in COMPARED:
        if all(name in arms for name in pair):
            seeds = {name: [seed["summary"]["last"] for seed in arms[name]["seeds"].values()] for name in pair}
            means = {name: mean(of_arm) for name, of_arm in seeds.items()}
            lower, higher = sorted(pair, key=means.__getitem__)
            difference = means[higher] - means[lower]
            limit = LIMIT_ROSE if means[lower] > start else LIMIT_FELL  # the lower one fell, if any did
            rows.append(
                {
                    "higher": arms[higher]["label"],
                    "lower": arms[lower]["label"],
                    "difference": difference,
                    "limit": limit,
                    "counts": "yes" if difference > limit else "no",
                    "overlap": "yes" if max(seeds[lower]) >= min(seeds[higher]) else "no",
                }
            )
    return rows


def row_of(arm: dict[str, Any]) -> dict[str, str]:
    """Means over seeds, or the extreme where the column says so."""
    summaries = [seed["summary"] for seed in arm["seeds"].values()]

    def over_seeds(key: str, pick: Callable = mean, form: str = ".2f") -> str:
        values = [summary[key] for summary in summaries]
        return "-" if None in values else format(pick(values), form)

    return {
        "label": arm["label"],
        "per_seed": ", ".join(f"{summary['last']:.2f}" for summary in summaries),
        "k3": over_seeds("k3", form=".2g"),
        "k3_max": over_seeds("k3_max", max, ".2g"),
        **{key: over_seeds(key) for key in ("start", "last", "final", "reward", "sample_size", "kept")},
    }


def verdict_of(claim: dict[str, Any]) -> dict[str, Any]:
    shown = ", ".join(f"{value:.2f}" for value in claim["values"])
    return {**claim, "verdict": "held" if claim["held"] else "**did not hold**", "shown": shown}


# Claims --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """
    A number that is above, or below, a bound in every seed.

    Args:
        statement (`str`):
            What is claimed.
        arms (`list[str]`):
            Arms that the number is made of.
        number (`Callable[..., float]`):
            Takes the [`Summary`] of one seed of each arm.
        relation (`str`):
            `">"` or `"<"`.
        bound (`float`):
            The bound.
    """

    statement: str
    arms: list[str]
    number: Callable[..., float]
    relation: str
    bound: float

    def check(self, summaries: dict[str, dict[int, Summary]]) -> dict[str, Any] | None:
        """The verdict, or `None` if an arm was not run."""
        if any(arm not in summaries for arm in self.arms):
            return None
        seeds = sorted(set.intersection(*(set(summaries[arm]) for arm in self.arms)))
        if not seeds:
            return None
        values = [self.number(*(summaries[arm][seed] for arm in self.arms)) for seed in seeds]
        margin = min(values) - self.bound if self.relation == ">" else self.bound - max(values)
        return {
            "claim": self.statement,
            "held": margin > 0,
            "values": [round(value, 4) for value in values],
            "relation": self.relation,
            "bound": round(self.bound, 4),
            "margin": round(margin, 4),
        }


def claims(start: float) -> list[Claim]:
    """
    Claims of the experiment, fixed before it was run.

    Args:
        start (`float`):
            Held-out accuracy of the warmed-up model.
    """

    def last(summary: Summary) -> float:
        return summary.last

    def final(summary: Summary) -> float:
        return summary.final

    def behind(reference: Summary, corrected: Summary) -> float:
        return reference.last - corrected.last

    rescued = [("auto", "auto"), ("bypass", "bypass")]
    return [
        Claim("Without correction, accuracy ends below the start", ["none"], final, "<", start),
        *(Claim(f"With {label}, last-3 accuracy is above 0.50", [arm], last, ">", 0.5) for arm, label in rescued),
        *(
            Claim(f"With {label}, last-3 accuracy is above start + 0.10", [arm], last, ">", start + 0.1)
            for arm, label in rescued
        ),
        *(
            Claim(
                f"With {label}, last-3 accuracy is less than 0.10 below on-policy",
                ["on_policy", arm],
                behind,
                "<",
                0.1,
            )
            for arm, label in rescued
        ),
        Claim(
            "Median k3 without correction is more than 3 times as large as with auto",
            ["none", "auto"],
            lambda none, corrected: none.k3 / corrected.k3,
            ">",
            3,
        ),
        Claim("With random rejection, last-3 accuracy is below start - 0.10", ["random_rs"], last, "<", start - 0.1),
        Claim("RLOO: without correction, accuracy ends below the start", ["rloo_none"], final, "<", start),
        Claim("RLOO: with auto, last-3 accuracy is above start + 0.10", ["rloo_auto"], last, ">", start + 0.1),
        Claim(
            "fp8 cache: last-3 accuracy is higher with auto than without correction",
            ["fp8_none", "fp8_auto"],
            lambda none, corrected: corrected.last - none.last,
            ">",
            0,
        ),
        Claim(
            "fp8 cache: the sampler's reward is lower with auto than without correction",
            ["fp8_none", "fp8_auto"],
            lambda none, corrected: corrected.reward - none.reward,
            "<",
            0,
        ),
    ]


# Report --------------------------------------------------------------------------------------------------------------


def as_json(runs: Runs, start: float, verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    """The experiment without the parts of the history that are not in the figure."""
    records = [record for seeds in runs.values() for record in seeds.values()]

    def run(record: Record) -> dict[str, Any]:
        curves = {key: record["history"][key] for key in ("reward", K3) if key in record["history"]}
        kept = {key: record[key] for key in ("steps", "accuracy", "seconds")}
        summary = {key: value and round(value, 6) for key, value in asdict(summarize(record)).items()}
        return {**kept, "summary": summary, "history": curves}

    return {
        "command": distinct(records, "command"),
        "start": start,
        "machine": distinct(records, "machine"),
        "versions": distinct(records, "versions"),
        "training": distinct(records, "training"),
        "claims": verdicts,
        "arms": {
            arm.name: {
                "label": arm.label,
                "settings": next(iter(runs[arm.name].values()))["settings"],
                "seeds": {seed: run(record) for seed, record in runs[arm.name].items()},
            }
            for arm in ARMS
            if arm.name in runs
        },
    }


def to_text(results: dict[str, Any]) -> str:
    """Indented JSON, with a list of numbers on one line."""
    text = json.dumps(results, indent=1) + "\n"
    return re.sub(r"\[[^][{}]+\]", lambda numbers: " ".join(numbers[0].split()), text)


def distinct(records: list[Record], key: str) -> Any:
    """The one value of all runs, or a list if they differ."""
    values = []
    for record in records:
        if record[key] not in values:
            values.append(record[key])
    return values[0] if len(values) == 1 else values


def write_report(folder: Path):
    """Print the tables of the runs in `folder / "runs"`, and write `results.json` and `headline.png`."""
    runs = load(folder / "runs")
    summaries = {arm: {seed: summarize(record) for seed, record in seeds.items()} for arm, seeds in runs.items()}
    start = mean(summary.start for seeds in summaries.values() for summary in seeds.values())
    verdicts = [claim.check(summaries) for claim in claims(start)]
    checked = [verdict for verdict in verdicts if verdict is not None]
    results = as_json(runs, start, checked)
    print(f"\nHeld-out accuracy at the start: {start:.2f}", *tables(results), sep="\n\n")
    if len(checked) < len(verdicts):
        print(f"{len(verdicts) - len(checked)} claims are about arms that were not run.")
    (folder / "results.json").write_text(to_text(results))
    draw(runs, start, folder / "headline.png")
    print(f"\n{folder / 'results.json'}\n{folder / 'headline.png'}")
