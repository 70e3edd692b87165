"""
A run or a dump as one page, or two against each other: `trl-rollout-corr report`.

`summary`, `shares`, `tokens`, `advice` and `verdict` compute; `trends`, `story`, `distribution`, `rejected` and `diagnosis`
make charts of it; `content` puts everything together; `page`, `markdown` and `versus` write it down, with `drawing` for the
pictures, and `markup` and `banner` for what pages have in common.
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
    Write the report. Warns about what of a source is damaged or missing.

    Args:
        sources (`Sequence[str]`):
            What to report on: a dump, a run, or a folder with both. Two of them are set against each other.
        output (`str`):
            The file to write: a page in `.html`, text with its picture in `.md`, or the picture alone in `.png`.

    Returns:
        `str`: what was written, one file a line.

    Raises:
        `ValueError`: in one line that begins with the source that cannot be read, or the output that cannot be written.
    """
    if len(sources) > 2:
        raise SelfContainedError(
            f"one run, or two to set against each other; got {len(sources)}: {', '.join(sources)}"
        )
    path = check_output(output, (".html", ".md", ".png"))
    files = _files([_read(source) for source in sources], sources, path)
    for file, content in files.items():
        _write(file, content)
    return "".join(f"{file}\n" for file in files)


def check_output(output: str, endings: Sequence[str]) -> Path:
    """A file that can be written, and charts that can be drawn, or an error in one line that says why not."""
    path = Path(output)
    if path.suffix not in endings:
        *others, last = endings
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise SelfContainedError(f"{output}: the output must end in {allowed}")
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
):
    """Write a diagnosis as a page, with the rows of the experiments of a probe."""
    from .diagnosis import page_of_diagnosis

    _write(Path(output), page_of_diagnosis(source, observed, diagnosis, experiments).encode())


def _read(source: str) -> "Run":
    from ..run import read_run

    try:
        run = read_run(Path(source))
    except ValueError as error:
        raise SelfContainedError(f"{source}: {error}") from None
    for sentence in run.damage:
        warn(f"{source}: {sentence}.")
    return run


def _files(runs: "Sequence[Run]", sources: Sequence[str], path: Path) -> dict[Path, bytes]:
    """Content by path."""
    # only now: these import matplotlib, and what says that it is missing has to come first
    from .content import build
    from .markdown import files_of_markdown, picture_of
    from .page import page
    from .versus import markdown_of_two, page_of_two, picture_of_two, set_against

    if len(runs) == 1:
        report = build(runs[0])
        if path.suffix == ".md":
            return files_of_markdown(report, path)
        return {path: page(report).encode() if path.suffix == ".html" else picture_of(report)}
    versus = set_against(runs[0], runs[1], (Path(sources[0]), Path(sources[1])))
    if path.suffix == ".md":
        return markdown_of_two(versus, path)
    return {path: page_of_two(versus).encode() if path.suffix == ".html" else picture_of_two(versus)}


def _write(path: Path, content: bytes):
    """Under its name only when it is complete."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise SelfContainedError(f"{path}: cannot be written: {error.strerror}") from None
