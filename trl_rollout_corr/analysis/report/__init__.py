"""
A run or a dump as one page, or two against each other: `trl-rollout-corr report`. In three passes:

`facts` computes everything that a report says about a run, once; `compose` makes a page of it, which is data; `html_page`
writes the page as HTML, `drawing` as a picture.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...messages import SelfContainedError, warn


if TYPE_CHECKING:
    from ...diagnosis import Diagnosis, Observed
    from ..run import Run


def write_report(sources: Sequence[str], output: str) -> str:
    """
    Write the report. Warns about damaged and missing parts of a source.

    Args:
        sources (`Sequence[str]`):
            A dump, a run, or a folder with both. Two of them are set against each other.
        output (`str`):
            The file to write: a page in `.html`, or its state and main charts in `.png`.

    Returns:
        `str`: the name of the file, as a line.

    Raises:
        `ValueError`: in one line that begins with the source that cannot be read, or the output that cannot be written.
    """
    if len(sources) > 2:
        raise SelfContainedError(f"one run, or two runs to compare; got {len(sources)}: {', '.join(sources)}")
    path = check_output(output, (".html", ".png"))
    # only now: these import matplotlib, and the error about a missing matplotlib comes first
    from .compose import compose
    from .drawing import png
    from .facts import analyse
    from .html_page import render

    runs = [_read(source) for source in sources]
    names = [run.name for run in runs] if len(runs) == 1 else _names([Path(source) for source in sources])
    facts = [analyse(name, run, alone=len(runs) == 1) for name, run in zip(names, runs, strict=True)]
    page = compose(facts)
    _write(path, png(page) if path.suffix == ".png" else render(page).encode())
    return f"{path}\n"


def check_output(output: str, endings: Sequence[str]) -> Path:
    """The path of the output, or an error in one line: it cannot be written, or charts cannot be drawn."""
    path = Path(output)
    if path.suffix not in endings:
        instead = (
            " Markdown is no longer written: attach the HTML page or the picture." if path.suffix == ".md" else ""
        )
        raise SelfContainedError(f"{output}: the output must end in {' or '.join(endings)}.{instead}")
    if not path.parent.is_dir():
        raise SelfContainedError(f"{output}: there is no folder {str(path.parent)!r} to write to")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise SelfContainedError(f"{output}: the output cannot be written")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        message = "the report is drawn with matplotlib, which is missing: pip install matplotlib"
        raise SelfContainedError(message) from None
    return path


def write_diagnosis(
    source: str, output: str, observed: "Observed", diagnosis: "Diagnosis", experiments: Sequence[Sequence[str]] = ()
) -> None:
    """Write a diagnosis as a page, with the table of the experiments of a probe: its columns, then its rows."""
    from .compose import compose_diagnosis
    from .html_page import render

    page = compose_diagnosis(Path(source).name, observed, diagnosis, experiments)
    _write(Path(output), render(page).encode())


def _read(source: str) -> "Run":
    from ..run import read_run

    try:
        run = read_run(Path(source))
    except ValueError as error:
        raise SelfContainedError(f"{source}: {error}") from None
    for sentence in run.damage:
        warn(f"{source}: {sentence}.")
    return run


def _names(sources: Sequence[Path]) -> list[str]:
    """The shortest ends of two paths that differ."""
    first, second = (source.resolve().parts for source in sources)
    for n in range(1, max(len(first), len(second)) + 1):
        names = ["/".join(first[-n:]), "/".join(second[-n:])]
        if names[0] != names[1]:
            return names
    return [f"{first[-1]} (A)", f"{second[-1]} (B)"]


def _write(path: Path, content: bytes) -> None:
    """Under its name only when it is complete."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise SelfContainedError(f"{path}: cannot be written: {error.strerror}") from None
