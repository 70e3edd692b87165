"""Documents that the installed package contains, as text for a terminal."""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from ..messages import SelfContainedError, nearest
from .recipes import source


_FOR_THE_SITE = {"README", "api"}  # the index, and a list of docstrings
_LEGEND = "[docs NAME] is the command `trl-rollout-corr docs NAME`; other paths are those of the repository.\n"


def folder() -> Path:
    """Folder of the documents: inside the package if it is installed from a wheel, else that of the checkout."""
    return source() / "docs"


def pages() -> dict[str, Path]:
    """Files of the documents, by name."""
    return {path.stem: path for path in sorted(folder().glob("*.md")) if path.stem not in _FOR_THE_SITE}


def document(name: str | None = None) -> str:
    """
    Text of a document.

    Args:
        name (`str`, *optional*):
            Name of a page such as `"troubleshooting"`, or of a section such as `"troubleshooting#weights-do-not-arrive"`; by
            default all pages are listed.

    Returns:
        `str`: the text, without comments, and with links as commands and paths.

    Raises:
        `SelfContainedError`: if there is no such page or section. The message has the nearest name.
    """
    found = pages()
    if name is None:
        return _list(found)
    page, _, section = name.partition("#")
    page = page.removeprefix("docs/").removesuffix(".md")
    if page not in found:
        raise SelfContainedError(
            f"`docs {name}`: there is no document {page!r}.{nearest(page, found)} `trl-rollout-corr docs` lists them."
        )
    text = found[page].read_text(encoding="utf-8")
    text = _readable(_section(text, page, section) if section else text, page, set(found))
    return f"{text}\n{_LEGEND}" if "[docs " in text else text


def _list(found: dict[str, Path]) -> str:
    """Name and subject of each page."""
    index = (folder() / "README.md").read_text(encoding="utf-8")
    width = max(map(len, found))
    lines = []
    for name, path in found.items():
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        about = re.search(rf"\({re.escape(path.name)}\): ([^.\[]+)\.", index)
        lines.append(f"{name:<{width}}  {' '.join(about[1].split()) if about else title}")
    return "\n".join(
        [*lines, "", "To read one: trl-rollout-corr docs NAME, or docs NAME#SECTION.", f"Files: {folder()}", ""]
    )


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


def _readable(text: str, page: str, names: set[str]) -> str:
    """Markdown without comments, and with links as text: a command for a document, and the path for another file."""

    def link(match: re.Match) -> str:
        words, target = match[1], match[2]
        path, hash_sign, anchor = target.partition("#")
        linked = path.removesuffix(".md") if path else page
        if linked in names:
            target = f"docs {linked}{hash_sign}{anchor}"
        elif "://" not in target:
            target = posixpath.normpath(posixpath.join("docs", path))
        return f"`{target}`" if words == path else words if target in words else f"{words} [{target}]"

    return re.sub(r"!?\[([^\]]*)\]\(([^)\s]+)\)", link, re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))
