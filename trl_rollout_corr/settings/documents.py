"""Documents that the installed package contains, as text for a terminal."""

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten

from ..messages import SelfContainedError, nearest
from .recipes import source


_FOR_THE_SITE = {"README", "api"}  # the index, and a list of docstrings


def folder() -> Path:
    """Folder of the documents: inside the package if it is installed from a wheel, else in the checkout."""
    return source() / "docs"


def pages() -> dict[str, Path]:
    """Files of the documents, by name."""
    return {path.stem: path for path in sorted(folder().glob("*.md")) if path.stem not in _FOR_THE_SITE}


def document(name: str | None = None) -> str:
    """Text of a page, or of a section (`page#section`); a list of the sections with another word, or of all pages."""
    paths = pages()
    if name is None:
        return _list(paths)
    page, _, section = name.partition("#")
    page = page.removeprefix("docs/").removesuffix(".md")
    if page in paths:
        text = _text(paths[page])
        return _section(text, page, section) if section else text
    if not section and (found := _containing(name, paths)):
        return found
    raise SelfContainedError(
        f"`docs {name}`: no document has this name{'' if section else ' or contains it'}.{nearest(page, paths)} "
        "`trl-rollout-corr docs` lists them."
    )


def _text(path: Path) -> str:
    """Text of a page, without comments."""
    return re.sub(r"<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def _containing(word: str, paths: dict[str, Path]) -> str:
    """Names of the sections that contain a word, each with its first line that does."""
    found: dict[str, str] = {}
    for page, path in paths.items():
        text, anchor = _text(path), ""
        anchors = {i: anchor for i, anchor, _ in sections(text)}
        for i, line in enumerate(text.splitlines()):
            anchor = anchors.get(i, anchor)
            if word.lower() in line.lower():
                found.setdefault(f"docs {page}#{anchor}", shorten(line, 110, placeholder=" ..."))
    return "".join(f"{section}\n    {line}\n" for section, line in found.items())


def _list(paths: dict[str, Path]) -> str:
    """Name of each page, and the question that it answers: `docs/README.md` has them."""
    index = (folder() / "README.md").read_text(encoding="utf-8")
    width = max(map(len, paths))
    lines = []
    for name, path in paths.items():
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        about = re.search(rf"\({re.escape(path.name)}\): ([^?]+\?)", index)
        lines.append(f"{name:<{width}}  {' '.join(about[1].split()) if about else title}")
    how = "To read one: trl-rollout-corr docs NAME, or docs NAME#SECTION. To find a word: docs WORD."
    return "\n".join([*lines, "", how, f"Files: {folder()}", ""])


def sections(text: str) -> Iterator[tuple[int, str, int]]:
    """Line, anchor and level of each heading."""
    in_code = False
    for i, line in enumerate(text.splitlines()):
        in_code ^= line.startswith("```")
        if not in_code and (heading := re.match(r"(#+) (.+)", line)):
            words = re.sub(r"\]\([^)]*\)", "", heading[2])
            yield i, re.sub(r"[^\w -]", "", words).lower().replace(" ", "-"), len(heading[1])


def _section(text: str, page: str, name: str) -> str:
    """The section of a text that has an anchor."""
    headings = list(sections(text))
    places = {anchor: (first, level) for first, anchor, level in headings}
    if name not in places:
        hint = nearest(name, places) or f" Its sections are {', '.join(places)}."
        raise SelfContainedError(f"`docs {page}#{name}`: the document has no such section.{hint}")
    first, level = places[name]
    last = next((i for i, _, other in headings if i > first and other <= level), None)
    return "\n".join(text.splitlines()[first:last]).rstrip() + "\n"
