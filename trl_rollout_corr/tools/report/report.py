"""The command `report`: a run or a dump as one page, or two against each other."""

import os
from collections.abc import Sequence
from pathlib import Path

from ...messages import SelfContainedError
from ..formats import visible, write_whole
from .compose import compose
from .drawing import png
from .facts import analyse
from .follow import follow
from .html_page import render
from .page import Page
from .run import read_run


def write_report(sources: Sequence[str], output: str) -> str:
    """
    Write the page (`.html`) or picture (`.png`) of one or two sources. Returns the state of each run, the first line
    of its diagnosis, and the file name.
    """
    _check_number(sources)
    path = _check_output(Path(output))
    page = _read_page(sources)
    _write(path, png(page) if path.suffix == ".png" else render(page).encode())
    return "".join(f"{visible(line)}\n" for line in [*in_a_terminal(page), str(path)])


def in_a_terminal(page: Page) -> list[str]:
    """The state of each run with the first finding, and the first line of the diagnosis."""
    lines = [f"{f'{it.title}: ' if it.title else ''}{it.headline}. {it.detail}" for it in page.banners]
    diagnosis = next(
        (section.cards[0].title for section in page.sections if section.name == "diagnosis" and section.cards), ""
    )
    return [*lines, *([f"Diagnosis: {diagnosis}"] if diagnosis else [])]


def follow_report(sources: Sequence[str], output: str) -> str:
    """Write the page again every few seconds until Ctrl-C. Runs may begin later. Returns the last line to print."""
    _check_number(sources)
    path = _check_output(Path(output))
    if path.suffix != ".html":
        raise SelfContainedError(f"{path}: a picture cannot follow a run. With --follow, the output must end in .html")
    return follow(lambda: render(_read_page(sources)), path, " and ".join(sources))


def _check_number(sources: Sequence[str]) -> None:
    if len(sources) > 2 or len({*map(os.path.realpath, sources)}) < len(sources):
        raise SelfContainedError(f"one run, or two different runs to compare; got {', '.join(sources)}")


def _read_page(sources: Sequence[str]) -> Page:
    """The page of one run, or of two."""
    names, letters = _names(sources), ("A", "B") if len(sources) > 1 else ("",)
    facts = []
    for name, letter, source in zip(names, letters, sources, strict=True):
        run = read_run(source)
        facts.append(analyse(run, name, letter))
    return compose(facts)


def _check_output(path: Path) -> Path:
    """The output as a path. Raises an error of one line if nothing can be written there."""
    if path.suffix not in (".html", ".png"):
        raise SelfContainedError(f"{path}: the output must end in .html or .png.")
    if not path.parent.is_dir():
        raise SelfContainedError(f"{path}: there is no folder {str(path.parent)!r} to write to")
    return path


def _names(sources: Sequence[str]) -> list[str]:
    """The names of the folders of runs, with the parent folders that tell them apart."""
    paths = [Path(source).resolve() for source in sources]
    folders = [path.parent if path.is_file() else path for path in paths]
    if len({*folders}) < len(folders):
        folders = paths
    above = os.path.commonpath([folder.parent for folder in folders])
    return [folder.relative_to(above).as_posix() for folder in folders]


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, lambda file: file.write(content))
    except OSError as error:
        raise SelfContainedError(f"{path}: cannot be written: {error.strerror}") from None
