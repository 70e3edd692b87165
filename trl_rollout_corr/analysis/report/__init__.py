"""
A run or a dump as one page: `python -m trl_rollout_corr report`.

`summary`, `shares`, `tokens` and `advice` compute; `trends`, `distribution` and `rejected` make charts of it; `content` puts
everything together; `page` and `markdown` write it down, with `drawing` for the pictures.
"""

import os
from pathlib import Path


def write_report(source: str, output: str) -> str:
    """
    Write the report.

    Args:
        source (`str`):
            What to report on: a dump, a run, or a folder with both.
        output (`str`):
            The file to write, which ends in `.html` or `.md`.

    Returns:
        `str`: what was written, one file a line.

    Raises:
        `ValueError`: in one line, if the source cannot be read or the output cannot be written.
    """
    path = Path(output)
    if path.suffix not in (".html", ".md"):
        raise ValueError(f"the output is {output!r}, and must end in .html or .md")
    if not path.parent.is_dir():
        raise ValueError(f"the output is {output!r}, but there is no folder {str(path.parent)!r}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"the output is {output!r}, which cannot be written")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        message = 'the report is drawn with matplotlib, which is missing: pip install "trl-rollout-corr[report]"'
        raise ValueError(message) from None
    # only now: these import matplotlib, and the line above has to be what says that it is missing
    from ..run import read_run
    from .content import build
    from .markdown import files_of_markdown
    from .page import page

    report = build(read_run(Path(source)))
    files = {path: page(report).encode()} if path.suffix == ".html" else files_of_markdown(report, path)
    for file, content in files.items():
        _write(file, content)
    return "".join(f"{file}\n" for file in files)


def _write(path: Path, content: bytes):
    """Under its name only when it is complete."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ValueError(f"{str(path)!r} cannot be written: {error.strerror}") from None
