"""
Hooks of the site.

The front page is the README of the repository, with the list of all documents below it. The README in Chinese, recipes,
benchmarks and their pictures are pages as well, although they are not in `docs/`. Links to other files of the repository lead
there, if the site knows its address.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File


ROOT = Path(__file__).parent.parent
PAGES = ("README.zh-CN.md", "CONTRIBUTING.md", "recipes/README.md", "benchmarks/**/*.md")
LINK = re.compile(r"(!?)\[((?:!\[[^\]]*\]\([^)]*\)|[^\]])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]+)?\)")


def on_files(files, config):
    """Add pages that are not in `docs/`, and the pictures of the READMEs. Their places are those in the repository."""
    paths = [path.relative_to(ROOT) for pattern in PAGES for path in ROOT.glob(pattern)]
    for path in [Path("README.md"), *paths]:
        for image, _, link, _ in LINK.findall((ROOT / path).read_text(encoding="utf-8")):
            if image and link.endswith(".png") and not link.startswith("docs/"):
                add(files, config, posixpath.normpath(path.parent / link))
    for path in paths:
        add(files, config, path.as_posix())
    return files


def add(files, config, path: str):
    if not files.get_file_from_path(path):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))


def on_page_markdown(markdown: str, page, config, files) -> str:
    """
    Put the README in front of the list of documents, and lead links between `docs/` and the rest of the repository to their
    page. Links to files without a page get their address in the repository, `repo_url`. Without one, a link becomes its text
    and the path of the file, and an image its text.
    """
    here = page.file.src_uri
    outside = page.file.generated_by is not None
    if here == "README.md":
        markdown = front_page(markdown)
    if here == "fields.md":  # the docstring of each public name, which the table has in short
        names = re.findall(r"^\| `(\w+)` \|", markdown.split("## Python")[1], re.MULTILINE)
        markdown += "".join(f"\n::: trl_rollout_corr.{name}\n" for name in names)

    def to_page(match: re.Match) -> str:
        image, text, link, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here) if outside else "docs", link))
        if not (ROOT / path).exists() or not (outside or link.startswith("../")):
            return match[0]
        inside = "README.md" if path == "README.md" else path.removeprefix("docs/")
        if files.get_file_from_path(inside):
            return f"{image}[{text}]({posixpath.relpath(inside, posixpath.dirname(here) or '.')}{anchor or ''})"
        if config.repo_url:
            return f"{image}[{text}]({config.repo_url}/blob/main/{path}{anchor or ''})"
        return text if image or path in text or text.startswith("!") else f"{text} (`{path}`)"

    return LINK.sub(to_page, markdown)


def front_page(documents: str) -> str:
    """The README, with links as from `docs/`, and below it the list of documents, with headings a level lower."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/README.md)", "](#documents)")
    text = LINK.sub(lambda match: match[0].replace(f"({match[3]}", f"(../{match[3]}"), text).replace(
        "](../docs/", "]("
    )
    return text + "\n" + re.sub(r"^#", "##", documents, flags=re.MULTILINE)


def on_page_content(html: str, page, config, files) -> str:
    """
    Show docstrings in TRL's format: types in backticks with the default beside them, classes as [`~trl.GRPOTrainer`]. And
    mark blocks of text whose columns would not be read if their lines were wrapped.
    """
    html = re.sub(r'(<div class="language-text )(highlight">.*?</div>)', marked, html, flags=re.DOTALL)

    def type_of(match: re.Match) -> str:
        words = re.sub(r"`([^`]+)`", r"<code>\1</code>", match[1]).replace("*optional*", "<em>optional</em>")
        return f"({words})"

    html = re.sub(r"\[<code>~?([\w.]+)</code>\]", lambda match: f"<code>{match[1].split('.')[-1]}</code>", html)
    return re.sub(
        r"\(<code>([^<]*`[^<]*)</code>(?:,\s*default:\s*<code>.*?</code>)?\s*\)", type_of, html, flags=re.DOTALL
    )


def marked(block: re.Match) -> str:
    """A block of text, with a class if it has wide lines in columns; otherwise in whole lines, which the page wraps."""
    name, _, text = block[2].partition(">")
    lines = re.sub("<[^>]*>", "", text).splitlines()
    if any(len(line) > 60 and re.search(r"\S {3,}\S", line) for line in lines):
        return f"{block[1]}columns {block[2]}"
    joined = ""
    while joined != text:  # a line that a terminal wrapped goes on with the same indent
        joined, text = text, re.sub(r"^( *)(?=\S)(.{70,}[^.:\n])\n\1(?=\S)", r"\1\2 ", text, flags=re.MULTILINE)
    return f"{block[1]}{name}>{text}"
