"""Hooks of the site: links that lead out of `docs/` go to the repository."""

import posixpath
import re


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Give links to files beside `docs/` the address that they have in the repository."""

    def to_repository(match: re.Match) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), match[1]))
        return match[0] if path.startswith("docs/") else f"]({config.repo_url}/blob/main/{path}{match[2] or ''})"

    return re.sub(r"\]\((\.\./[^)#\s]+)(#[^)\s]+)?\)", to_repository, markdown)


def on_page_content(html: str, page, config, files) -> str:
    """Show docstrings in TRL's format: types in backticks with the default beside them, classes as [`~trl.GRPOTrainer`]."""

    def type_of(match: re.Match) -> str:
        words = re.sub(r"`([^`]+)`", r"<code>\1</code>", match[1]).replace("*optional*", "<em>optional</em>")
        return f"({words})"

    html = re.sub(r"\[<code>~?([\w.]+)</code>\]", lambda match: f"<code>{match[1].split('.')[-1]}</code>", html)
    return re.sub(
        r"\(<code>([^<]*`[^<]*)</code>(?:,\s*default:\s*<code>.*?</code>)?\s*\)", type_of, html, flags=re.DOTALL
    )
