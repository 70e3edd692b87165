"""
Hooks of the site.

The front page is the README of the repository, with the list of all documents below it. Links that lead out of `docs/` go to
the repository, if the site knows its address.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File


ROOT = Path(__file__).parent.parent
PICTURE = re.compile(r"(!\[[^\]]*\]\()(?!https?:)([^)\s]+)(\))")
LINK = re.compile(r"(\]\()(?!https?:|#)([^)\s]+\))")


def on_files(files, config):
    """Add the pictures of the README, which lie outside of `docs/`."""
    for _, path, _ in PICTURE.findall(readme()):
        files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """
    Put the README in front of the list of documents, and give links to files beside `docs/` their address in the repository,
    `repo_url`. Without one, a link becomes its text and the path of the file, and an image its text.
    """
    if page.file.src_uri == "README.md":
        markdown = front_page(markdown)
    markdown = markdown.replace("](../README.md", "](README.md")

    def to_repository(match: re.Match) -> str:
        image, text, link, anchor = match.groups()
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link))
        if path.startswith("docs/"):
            return match[0]
        if config.repo_url:
            return f"{image}[{text}]({config.repo_url}/blob/main/{path}{anchor or ''})"
        return text if image or path in text else f"{text} (`{path}`)"

    return re.sub(r"(!?)\[([^\]]*)\]\((\.\./[^)#\s]+)(#[^)\s]+)?\)", to_repository, markdown)


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def in_site(path: str) -> str:
    """Where the site has a picture of the README."""
    return f"images/{posixpath.basename(path)}"


def front_page(documents: str) -> str:
    """The README, with links as from `docs/`, and below it the list of documents, with headings a level lower."""
    text = readme().replace("](docs/README.md)", "](#documents)")
    text = PICTURE.sub(lambda match: f"{match[1]}docs/{in_site(match[2])}{match[3]}", text)
    text = LINK.sub(r"\1../\2", text).replace("](../docs/", "](")
    return text + "\n" + re.sub(r"^#", "##", documents, flags=re.MULTILINE)


def on_page_content(html: str, page, config, files) -> str:
    """Show docstrings in TRL's format: types in backticks with the default beside them, classes as [`~trl.GRPOTrainer`]."""

    def type_of(match: re.Match) -> str:
        words = re.sub(r"`([^`]+)`", r"<code>\1</code>", match[1]).replace("*optional*", "<em>optional</em>")
        return f"({words})"

    html = re.sub(r"\[<code>~?([\w.]+)</code>\]", lambda match: f"<code>{match[1].split('.')[-1]}</code>", html)
    return re.sub(
        r"\(<code>([^<]*`[^<]*)</code>(?:,\s*default:\s*<code>.*?</code>)?\s*\)", type_of, html, flags=re.DOTALL
    )
