"""Output of the quickstart: a line per look at the held-out prompts, a table at the end, and a picture of all runs."""

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from transformers import TrainerCallback


RESULT = "quickstart.json"  # in the folder of a run; empty until the run is over
IS_COMPARED = "QUICKSTART_IS_COMPARED"  # variable of the environment of a run that another run reports on
# A correction has one colour in every picture, those of `trl-rollout-corr report`; the others share what is left
COLORS = {"disabled": "#d55e00", "auto": "#0072b2", "trl": "#009e73", "bypass_dppo_tv": "#cc79a7"}
OTHER_COLORS = ("#e69f00", "#56b4e9", "#6f4e37", "#59636e")
WORDS = {"disabled": "no correction", "auto": "corrected (auto)", "trl": "TRL's own correction"}
STYLES = ("-", "--", ":", "-.")  # of runs with the same correction


class Progress(TrainerCallback):
    """Prints a line per look at the held-out prompts, and keeps the data of the picture."""

    def __init__(self, tokenizer, every: int, accuracy: Callable):
        self.tokenizer, self.every, self.measure = tokenizer, every, accuracy
        self.steps, self.accuracy = [], []
        self.began = time.monotonic()

    def look(self, step: int, last: int, model, log: dict):
        self.steps.append(step)
        self.accuracy.append(self.measure(model, self.tokenizer))
        columns = [f"{self.accuracy[-1]:>8.2f}"]
        for key in ("k3_kl", "rollout_is_eff_sample_size", "rollout_rs_masked_fraction"):
            value = log.get(f"rollout_corr/{key}")
            columns.append(f"{value:>11.3f}" if value is not None else f"{'-':>11}")
        elapsed = time.monotonic() - self.began
        left = minutes(elapsed / step * (last - step)) if step else "-"
        print(f"{step:>4}/{last} {' '.join(columns)} {minutes(elapsed):>8} {left:>6}", flush=True)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.began = time.monotonic()
        header = f"{'held-out':>8} {'KL (k3)':>11} {'sample size':>11} {'rejected':>11} {'elapsed':>8} {'left':>6}"
        print(f"\n{'step':>{5 + len(str(state.max_steps))}} {header}")
        self.look(0, state.max_steps, model, {})

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if state.global_step % self.every == 0 and "loss" in logs:
            self.look(state.global_step, state.max_steps, model, logs)


def minutes(seconds: float) -> str:
    return f"{round(seconds) // 60}:{round(seconds) % 60:02}"


def conclude(
    name: str,
    correction: str | None,
    progress: Progress,
    log_history: list[dict],
    folders: list[Path],
    family: Path,
    seconds: float,
):
    """
    Save the result of a run, and show it beside the other runs.

    Args:
        name (`str`):
            Name of the run.
        correction (`str`):
            Its `rollout_correction`.
        progress ([`Progress`]):
            What it saw.
        log_history (`list[dict]`):
            What the trainer logged.
        folders (`list[Path]`):
            The folder of the run, and before it that of a run to report beside it.
        family (`Path`):
            The folder whose subfolders are the runs to draw together.
        seconds (`float`):
            How long it took.
    """
    history = [entry for entry in log_history if "rollout_corr/kl" in entry]
    result = {
        "name": name,
        "correction": correction,
        "steps": progress.steps,
        "accuracy": progress.accuracy,
        "history": history,
    }
    (folders[-1] / RESULT).write_text(json.dumps(result))
    print_table(result)
    if IS_COMPARED in os.environ:
        return
    results = [json.loads(path.read_text()) for path in find_results(folders[-1], family)]
    if len(results) > 1:
        print("\nAll runs in the picture, held-out accuracy before and after:")
        for other in results:
            print(f"  {other['accuracy'][0]:.2f} -> {after(other):.2f}  {other['name']}")
    draw(results, family / "quickstart.png")
    print(f"\n{minutes(seconds)} minutes. Picture: {family / 'quickstart.png'}")
    print("Next, every trend and the worst tokens on one page:")
    print(f"    {command()} report {shlex.join(map(str, folders))} -o report.html")
    if os.sep in command():
        print(f"The commands of this package are in {Path(command()).parent}.")
    if len(folders) == 1:
        print('To see the same run without correction next to it: make quickstart ARGS="--compare"')


def find_results(folder: Path, family: Path) -> list[Path]:
    """Those of the runs that are over, in order of time."""
    found = {path.resolve() for path in [folder / RESULT, *family.glob(f"*/{RESULT}")] if path.stat().st_size}
    return sorted(found, key=lambda path: path.stat().st_mtime)


def after(result: dict) -> float:
    """Accuracy at the end: mean of the last three looks."""
    last = result["accuracy"][-3:]
    return sum(last) / len(last)


def command() -> str:
    """The command line of the package, of the environment that this runs in."""
    script, found = Path(sys.executable).with_name("trl-rollout-corr"), shutil.which("trl-rollout-corr")
    if not script.exists() or (found and Path(found).samefile(script)):
        return "trl-rollout-corr"
    return str(script.relative_to(Path.cwd())) if script.is_relative_to(Path.cwd()) else str(script)


def average(history: list[dict], key: str) -> float | None:
    """Mean of a metric over the last quarter of the run."""
    values = [entry[f"rollout_corr/{key}"] for entry in history if f"rollout_corr/{key}" in entry]
    values = values[-max(len(values) // 4, 1) :]
    return sum(values) / len(values) if values else None


def print_table(result: dict):
    history, before = result["history"], result["accuracy"][0]
    size, rejected = average(history, "rollout_is_eff_sample_size"), average(history, "rollout_rs_masked_fraction")
    rows = {
        "held-out accuracy before": f"{before:.2f}",
        "held-out accuracy after": f"{after(result):.2f}   (mean of the last three looks)",
        "KL from sampler to trainer": f"{average(history, 'k3_kl'):.3f}   (nats per token; 0: the same policy)",
        "effective sample size": "-" if size is None else f"{size:.2f}   (share of the batch that the weights leave)",
        "tokens kept": "1.00" if rejected is None else f"{1 - rejected:.2f}",
    }
    width = max(map(len, rows))
    print("\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items()))
    age = average(history, "staleness_max")
    sampler = f"The sampler was up to {age:.0f} steps old" if age else "The sampler had the newest weights"
    if after(result) > before + 0.05:
        verdict = f"{sampler}, and the policy improved."
    elif after(result) < before - 0.05:
        verdict = f"{sampler}, and the policy became worse."
    else:
        verdict = "The accuracy changed by less than 0.05. Try more steps (`--max_steps`), or another `--rollout_correction`."
    print(f"\n{verdict}")


def draw(results: list[dict], path: Path):
    """Draw all runs into one picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = figure_of(results)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def figure_of(results: list[dict]):
    """The picture of all runs. The colour says which correction a run has, and a line that another one covers is wider."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4 + 0.25 * len(results)), layout="constrained")
    gaps = [[entry["rollout_corr/k3_kl"] for entry in result["history"]] for result in results]
    labels = labels_of(results)
    for i, result in enumerate(results):
        alike = [other for other in results[:i] if correction_of(other) == correction_of(result)]
        look = {"color": color_of(correction_of(result)), "linestyle": STYLES[len(alike) % len(STYLES)]}
        accuracies = [other["accuracy"] for other in results]
        left.plot(
            result["steps"], result["accuracy"], marker="o", label=labels[i], linewidth=width_of(i, accuracies), **look
        )
        right.plot([entry["step"] for entry in result["history"]], gaps[i], linewidth=width_of(i, gaps), **look)
    left.set(xlabel="optimizer step", ylabel="exact answers on held-out prompts", ylim=(0, 1))
    right.set(xlabel="optimizer step", ylabel="KL from sampler to trainer (nats per token)", yscale="log")
    figure.legend(loc="outside lower left", frameon=False)
    return figure


def width_of(i: int, curves: list[list]) -> float:
    """Width of a curve: each later one that equals it and would hide it makes it wider."""
    return 1.8 + 3.0 * sum(later == curves[i] for later in curves[i + 1 :])


def correction_of(result: dict) -> str:
    """The correction of a run; those that an older quickstart saved have only a name."""
    return str(result.get("correction") or ("disabled" if " disabled" in result["name"] else "auto"))


def color_of(correction: str) -> str:
    """The colour of a correction, whatever other runs are in the picture."""
    return COLORS.get(correction) or OTHER_COLORS[sum(correction.encode()) % len(OTHER_COLORS)]


def labels_of(results: list[dict]) -> list[str]:
    """Names of runs in plain words: the correction, and behind it the name of the run where several have the correction."""
    corrections = [correction_of(result) for result in results]
    labels = []
    for result, correction in zip(results, corrections, strict=True):
        words = WORDS.get(correction, f"corrected ({correction})")
        labels.append(words if corrections.count(correction) == 1 else f"{words}: {result['name']}")
    return labels
