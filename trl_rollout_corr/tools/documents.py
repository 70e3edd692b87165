"""Documents that the installed package contains, as text for a terminal."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from textwrap import shorten

from ..messages import SelfContainedError, nearest
from .recipes import source


_PRINTED = 5  # up to this many sections with a word are printed, more are listed
# Words that a reader types, below the heading of a section with other words: `<!-- keywords: wandb, dashboard -->`
_KEYWORDS = re.compile(r"<!-- keywords: (.*?) -->")

# A number, such as `0.03` or `>3e-2`, or a sign of comparison alone
_NUMBER = re.compile(r"[<>=~+-]+|[<>=~+-]*(\d+[.,]?\d*|[.,]\d+)(e[+-]?\d+)?%?")


def folder() -> Path:
    """Folder of the documents: inside the package if it is installed from a wheel, else in the checkout."""
    return source() / "docs"


def pages() -> dict[str, Path]:
    """Files of the documents, by name."""
    return {path.stem: path for path in sorted(folder().glob("*.md")) if path.stem != "README"}


def document(name: str | None = None) -> str:
    """
    Text of a page, of a section (`page#section`), or of sections that contain another word; by default a list of all
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
    if not section and (found := _containing(name, paths)):
        return found
    words = [word for word in name.split() if not _NUMBER.fullmatch(word)]
    if words and words != name.split():  # a number of a run is on no page
        return f"No document contains `{name}`. Without the numbers:\n\n{document(' '.join(words))}"
    raise SelfContainedError(
        f"`docs {name}`: no document has this name{'' if section else ' or contains it'}.{nearest(page, paths)} "
        "`trl-rollout-corr docs` lists them."
    )


def _text(path: Path) -> str:
    """Text of a page, without comments."""
    return _without_comments(path.read_text(encoding="utf-8"))


def _without_comments(text: str) -> str:
    return re.sub(r"(?<=\n)<!--.*?-->\n+|<!--.*?-->", "", text, flags=re.DOTALL)


def _containing(word: str, paths: dict[str, Path]) -> str:
    """
    The sections in which a word has its beginning, or if there is none, in which a word contains it ("ess" is in
    "staleness"), or in which all words begin in one line ("own loss" finds "A loss of your own").
    """
    words = [re.escape(part) for part in word.split()]
    within = r"\W+".join(words)  # "dr grpo" finds "Dr. GRPO"
    in_one_line = "^" + "".join(rf"(?=.*(?<!\w){part})" for part in words)
    return _matching(rf"(?<!\w){within}", paths) or _matching(within, paths) or _matching(in_one_line, paths)


def _matching(pattern: str, paths: dict[str, Path]) -> str:
    """
    The sections with a pattern in their heading or keywords, or all sections with it if they are few, and the first
    line of each other one.
    """
    contains = re.compile(pattern, re.IGNORECASE).search
    found: dict[str, tuple[list[str], list[str]]] = {}  # lines of a section, and its lines with the word
    named = []  # sections with the word in their heading or keywords
    for page, path in paths.items():
        raw = path.read_text(encoding="utf-8").splitlines()
        for (first, anchor, _), (last, *_) in pairwise([*sections("\n".join(raw)), (len(raw), "", 0)]):
            section = "\n".join(raw[first:last])
            lines, keywords = _without_comments(section).splitlines(), _KEYWORDS.findall(section)
            hits = list(filter(contains, lines))
            if any(map(contains, (lines[0], *keywords))):
                named.append(f"docs {page}#{anchor}")
            elif not hits:
                continue
            found[f"docs {page}#{anchor}"] = lines, hits or [lines[0]]
    whole = named or list(found)
    whole = whole if len(whole) <= _PRINTED else []
    texts = ["\n".join([name, "", *found[name][0]]).rstrip() + "\n\n" for name in whole]
    rest = [
        f"{name}\n    {shorten(found[name][1][0], 110, placeholder=' ...')}\n" for name in found if name not in whole
    ]
    return "".join([*texts, *rest])


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
    """The section of a text with the anchor `name`."""
    headings = list(sections(text))
    places = {anchor: (first, level) for first, anchor, level in headings}
    if name not in places:
        hint = nearest(name, places) or f" Its sections are {', '.join(places)}."
        raise SelfContainedError(f"`docs {page}#{name}`: the document has no such section.{hint}")
    first, level = places[name]
    last = next((i for i, _, other in headings if i > first and other <= level), None)
    return "\n".join(text.splitlines()[first:last]).rstrip() + "\n"
