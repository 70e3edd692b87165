"""Documents that the installed package contains, as text for a terminal."""

import re
from collections.abc import Iterator
from pathlib import Path

from ..messages import SelfContainedError, nearest
from .recipes import source


_FOR_THE_SITE = {"README", "api"}  # the index, and a list of docstrings


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
        `str`: the text, Markdown without comments.

    Raises:
        `SelfContainedError`: if there is no such page or section. The message has the nearest name.
    """
    paths = pages()
    if name is None:
        return _list(paths)
    page, _, section = name.partition("#")
    page = page.removeprefix("docs/").removesuffix(".md")
    if page not in paths:
        raise SelfContainedError(
            f"`docs {name}`: there is no document {page!r}.{nearest(page, paths)} `trl-rollout-corr docs` lists them."
        )
    text = paths[page].read_text(encoding="utf-8")
    return re.sub(r"<!--.*?-->", "", _section(text, page, section) if section else text, flags=re.DOTALL)


def _list(paths: dict[str, Path]) -> str:
    """Name of each page, and the question that it answers: `docs/README.md` has them."""
    index = (folder() / "README.md").read_text(encoding="utf-8")
    width = max(map(len, paths))
    lines = []
    for name, path in paths.items():
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        about = re.search(rf"\({re.escape(path.name)}\): ([^?]+\?)", index)
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
