"""Tables of the documents, made of what results files hold. No torch here."""

from collections.abc import Iterable, Mapping
from typing import Any


def markdown(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """
    A table.

    Args:
        rows (`Iterable[Mapping]`):
            What the rows are about, such as the `rows` of a results file.
        columns (`Mapping[str, str]`):
            Format of a cell, by the header of its column: `{"gather, ms": "{gather_ms:.2f}"}`.
    """
    cells = ([form.format_map(row) for form in columns.values()] for row in rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *cells))


# Columns of the tables of `README.md` in this folder

COMPUTATION = {
    "batch": "{shape}",
    "case": "{case}",
    "read, ms": "{read_ms:.2f}",
    "here, ms": "{ours_ms:.1f}",
    "verl, ms": "{verl_ms:.1f}",
    "verl / here": "{verl_over_ours:.1f}",
    "here / read": "{ours_over_read:.1f}",
    "reads: here, verl": "{ours_host_reads}, {verl_host_reads}",
    "mem: here, verl": "{ours_peak_tensors:.1f}, {verl_peak_tensors:.1f}",
}
STEP = {
    "contestant": "{contestant}",
    "step, s": "{step_s:.3f}",
    "without sampling, s": "{training_s:.3f}",
    "ratio of the step": "{step_ratio:.3f}",
    "ratio without sampling": "{training_ratio:.3f}",
}
MEMORY = {"contestant": "{contestant}", "peak of the process, GiB": "{peak_gib:.3f}", "ratio": "{ratio:.4f}"}
GATHER = {
    "configuration": "{config}",
    "ranks": "{ranks}",
    "sent per rank, kB": "{sent_kb:.1f}",
    "gather, ms": "{gather_ms:.2f}",
    "to numbers, ms": "{finish_ms:.2f}",
}
ON_PAPER = {
    "configuration": "{config}",
    "ranks": "{ranks}",
    "received, MB": "{received_mb:.2f}",
    "network, ms": "{network_ms:.2f}",
    "to numbers (measured), ms": "{finish_ms:.2f}",
}
