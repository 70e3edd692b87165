"""Tables of the documents, made of what results files hold. No torch here."""

from collections.abc import Iterable, Mapping
from typing import Any


def grid(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A table of cells."""
    head = list(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def markdown(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A table of rows, with the format of a cell by the header of its column: `{"here, ms": "{ours_ms:.1f}"}`."""
    return grid(columns, ([form.format_map(row) for form in columns.values()] for row in rows))


# Columns of the tables of `README.md` in this folder

COMPUTATION = {
    "batch": "{shape}",
    "case": "{case}",
    "here, ms": "{ours_ms:.1f}",
    "verl, ms": "{verl_ms:.1f}",
    "verl / here": "{verl_over_ours:.1f}",
    "reads: here, verl": "{ours_host_reads}, {verl_host_reads}",
}
STEP = {
    "contestant": "{contestant}",
    "step, s": "{step_s:.3f}",
    "ratio of the step": "{step_ratio:.3f}",
    "ratio without sampling": "{training_ratio:.3f}",
}
MEMORY = {
    "arm": "{arm}",
    "temperature": "{temperature:.1f}",
    "training, MiB": "{training_mib}",
    "ratio": "{training_ratio}",
    "scores, MiB": "{scores_mib}",
    "ratio of the scores": "{scores_ratio}",
}
# Tables of `pushes.py`
RESCORE = {
    "completions of a step": "{completions}",
    "tokens of each": "{length}",
    "scored once more": "{scored}",
    "step, s": "{step_s:.2f}",
    "scores, s": "{look_s:.2f}",
    "scores from the fourth time on, s": "{later_look_s:.2f}",
    "share of 200 steps, %": "{share:.2f}",
}
PUSHES = {
    "push": "{way}",
    "push, s": "{push_s:.2f}",
    "ratio": "{ratio:.2f}",
    "without vLLM, s": "{prepare_s:.2f}",
    "ratio without vLLM": "{prepare_ratio:.2f}",
    "memory, MB": "{memory_mb:.0f}",
    "k3 after it": "{gap:.6f}",
    "frozen weights changed, %": "{changed:.1f}",
}
OF_PUSHES = {"rescore": RESCORE, "pushes": PUSHES}
