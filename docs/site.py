"""Hooks of the site: links that lead out of `docs/` go to the repository, if the site knows its address."""

import posixpath
import re


def on_page_markdown(markdown: str, page, config, files) -> str:
    """
    Give links to files beside `docs/` their address in the repository, `repo_url`. Without one, a link becomes its text and
    the path of the file, and an image its text.
    """

    def to_repository(match: re.Match) -> str:
        image, text, link, anchor = match.groups()
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link))
        if path.startswith("docs/"):
            return match[0]
        if config.repo_url:
            return f"{image}[{text}]({config.repo_url}/blob/main/{path}{anchor or ''})"
        return text if image or path in text else f"{text} (`{path}`)"

    return re.sub(r"(!?)\[([^\]]*)\]\((\.\./[^)#\s]+)(#[^)\s]+)?\)", to_repository, markdown)


def on_page_content(html: str, page, config, files) -> str:
    """Show docstrings in TRL's format: types in backticks with the default beside them, classes as [`~trl.GRPOTrainer`]."""

    def type_of(match: re.Match) -> str:
        words = re.sub(r"`([^`]+)`", r"<code>\1</code>", match[1]).replace("*optional*", "<em>optional</em>")
        return f"({words})"

    html = re.sub(r"\[<code>~?([\w.]+)</code>\]", lambda match: f"<code>{match[1].split('.')[-1]}</code>", html)
    return re.sub(
        r"\(<code>([^<]*`[^<]*)</code>(?:,\s*default:\s*<code>.*?</code>)?\s*\)", type_of, html, flags=re.DOTALL
    )
