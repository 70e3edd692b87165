"""Documents that the installed package contains, as text for a terminal."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path

from ..messages import SelfContainedError, nearest
from .recipes import source


_LISTED = 12  # sections below the one that a search prints
# Words that a reader types, below the heading of a section with other words: `<!-- keywords: wandb, dashboard -->`
_KEYWORDS = re.compile(r"<!-- keywords: (.*?) -->")


def folder() -> Path:
    """Folder of the documents: inside the package if it is installed from a wheel, else in the checkout."""
    return source() / "docs"


def pages() -> dict[str, Path]:
    """Files of the documents, by name."""
    return {path.stem: path for path in sorted(folder().glob("*.md")) if path.stem != "README"}


def document(name: str | None = None) -> str:
    """
    Text of a page, of a section (`page#section`), or of the section with most of some words; by default a list of all
    pages.
    """
    paths = pages()
    if name is None:
        return _list(paths)
    page, _, section = name.partition("#")
    page = page.removeprefix("docs/").removesuffix(".md")
    if page in paths:
        text = _text(paths[page])
        return _section(text, page, section) if section else text
    if not section and not _misspells_a_page(name, paths) and (found := _found(name, paths)):
        return found
    words = "" if section else ", and no section has its words"
    raise SelfContainedError(
        f"`docs {name}`: no document has this name{words}.{nearest(page, paths)} `trl-rollout-corr docs` lists them."
    )


def _text(path: Path) -> str:
    """Text of a page, without comments."""
    return _without_comments(path.read_text(encoding="utf-8"))


def _without_comments(text: str) -> str:
    return re.sub(r"(?<=\n)<!--.*?-->\n+|<!--.*?-->", "", text, flags=re.DOTALL)


def _misspells_a_page(name: str, paths: dict[str, Path]) -> bool:
    """True for `debuging`; a word of a document is none."""
    if not get_close_matches(name, paths, cutoff=0.9):
        return False
    return not any(name.lower() in path.read_text(encoding="utf-8").lower() for path in paths.values())


def _found(question: str, paths: dict[str, Path]) -> str:
    """
    The first section of the English pages with most words of a question, and the names of others; empty if none has
    two of them, or the only one. Those come first that have the words in their heading or keywords.
    """
    words = re.findall(r"[\w&-]+", question.lower())
    found: list[tuple[int, int, str]] = []  # words inside, words in the heading, name
    for page, path in paths.items():
        text = "" if "." in page else path.read_text(encoding="utf-8")  # another language
        lines = text.splitlines()
        for (first, anchor, _), (last, *_) in pairwise([*sections(text), (len(lines), "", 0)]):
            inside = "\n".join(lines[first:last]).lower()
            title = f"{page} {lines[first]} {_KEYWORDS.findall(inside)}".lower()
            has, titled = (sum(word in part for word in words) for part in (inside, title))
            found.append((has, titled, f"{page}#{anchor}"))
    most = max(has for has, *_ in found)
    if most < max(1, min(2, len(words))):
        return ""
    best, *others = [name for has, _, name in sorted(found, key=lambda row: -row[1]) if has == most]
    listed = "".join(f"docs {name}\n" for name in others[:_LISTED])
    return f"docs {best}\n\n{document(best).rstrip()}\n\n{listed}"


def _list(paths: dict[str, Path]) -> str:
    """Name of each page, and the question that it answers, from `docs/README.md`."""
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
    """The section of a text with the anchor `name`. That of the title ends at the first heading below it."""
    headings = list(sections(text))
    places = {anchor: (first, level) for first, anchor, level in headings}
    if name not in places:
        hint = nearest(name, places) or f" Its sections are {', '.join(places)}."
        raise SelfContainedError(f"`docs {page}#{name}`: the document has no such section.{hint}")
    first, level = places[name]
    last = next((i for i, _, other in headings if i > first and (other <= level or level == 1)), None)
    more = f"\n\nThe whole page: trl-rollout-corr docs {page}" if level == 1 and last is not None else ""
    return "\n".join(text.splitlines()[first:last]).rstrip() + f"{more}\n"
