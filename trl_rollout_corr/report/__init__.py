"""
A run or a dump as one page: `python -m trl_rollout_corr report`.

Imports nothing heavy until it runs. `source` reads, `table` holds the tokens, `summary` counts them, `trends`, `distribution`,
`rejected`, `tokens` and `advice` make parts of the report, `content` puts them together, `drawing` makes pictures of charts,
and `page` and `markdown` write it all down.
"""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path


def add_arguments(parser: ArgumentParser):
    """Add the arguments of the command."""
    parser.add_argument(
        "source",
        help="a dump (folder or file), a run (`output_dir` or trainer_state.json), or an `output_dir` with both",
    )
    parser.add_argument(
        "-o",
        "--output",
        default="report.html",
        help="report.html, or report.md with the charts beside it as report.png",
    )


def run(args: Namespace) -> str:
    """
    Write the report.

    Args:
        args (`Namespace`):
            With `source`, what to report on, and `output`, the file to write.

    Returns:
        `str`: what was written, one file a line.

    Raises:
        `ValueError`: in one line, if the source cannot be read or the output cannot be written.
    """
    output = Path(args.output)
    if output.suffix not in (".html", ".md"):
        raise ValueError(f"the output is {args.output!r}, and must end in .html or .md")
    if not output.parent.is_dir():
        raise ValueError(f"the output is {args.output!r}, but there is no folder {str(output.parent)!r}")
    if output.is_dir() or not os.access(output.parent, os.W_OK):
        raise ValueError(f"the output is {args.output!r}, which cannot be written")
    _require_matplotlib()
    from .content import build
    from .markdown import files_of_markdown
    from .page import page
    from .source import load

    report = build(load(Path(args.source)))
    files = {output: page(report).encode()} if output.suffix == ".html" else files_of_markdown(report, output)
    for path, content in files.items():
        _write(path, content)
    return "".join(f"{path}\n" for path in files)


def _require_matplotlib():
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        message = 'the report is drawn with matplotlib, which is missing: pip install "trl-rollout-corr[report]"'
        raise ValueError(message) from None


def _write(path: Path, content: bytes):
    """Under its name only when it is complete."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ValueError(f"{str(path)!r} cannot be written: {error.strerror}") from None
