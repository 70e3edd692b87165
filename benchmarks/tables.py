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
