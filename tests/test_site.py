"""The site builds strictly: every link and anchor leads somewhere, every page is reached, and every public name is in it."""

import dataclasses
import os
import re
import sys
from pathlib import Path

import pytest

import trl_rollout_corr
from tests.launching import ROOT, run


PLACES = (ROOT / ".venv-docs/bin", Path(sys.executable).parent)
MKDOCS = next((folder / "mkdocs" for folder in PLACES if (folder / "mkdocs").exists()), None)
pytestmark = pytest.mark.skipif(MKDOCS is None, reason="mkdocs is not installed; `make docs` installs it")
REPOSITORY = "https://example.org/repository"


def build_site(folder: Path, **environment: str) -> Path:
    process = run(str(MKDOCS), "build", "--strict", "--site-dir", str(folder), NO_MKDOCS_2_WARNING="1", **environment)
    assert process.returncode == 0, process.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return build_site(tmp_path_factory.mktemp("site"), REPO_URL=REPOSITORY)


def test_every_document_is_a_page(site):
    for path in (ROOT / "docs").glob("*.md"):
        page = "index.html" if path.stem == "README" else f"{path.stem}/index.html"
        assert (site / page).exists()
        assert f"/{page.removesuffix('index.html')}index.md" in (site / "llms.txt").read_text()
    assert (site / "sample/report.html").read_bytes() == (ROOT / "docs/sample/report.html").read_bytes()


def test_the_front_page_is_the_readme_and_a_list_of_all_documents(site):
    page = re.sub("</?code>", "`", (site / "index.html").read_text())
    for heading in re.findall(r"^## (.+)$", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert re.search(
            f'<h2 id="[^"]+">{re.escape(heading)}<', page.replace("&rsquo;", "'").replace("&#39;", "'")
        ), heading
    for path in (ROOT / "docs").glob("*.md"):
        assert path.stem == "README" or f'href="{path.stem}/"' in page
    assert 'href="../#install"' in (site / "tutorial/index.html").read_text()


def test_recipes_benchmarks_and_the_chinese_readme_are_pages(site):
    front = (site / "index.html").read_text()
    for path in [ROOT / "recipes/README.md", ROOT / "README.zh-CN.md", *(ROOT / "benchmarks").rglob("*.md")]:
        folder = path.relative_to(ROOT).as_posix().removesuffix(".md").removesuffix("/README")
        assert (site / folder / "index.html").exists()
        assert f'href="{folder}/"' in front  # in the list of pages
    assert 'href="../../run/#diagnose"' in (site / "benchmarks/diagnose/index.html").read_text()


def test_links_to_files_without_a_page_lead_to_the_repository(site):
    prefix = f"{REPOSITORY}/blob/main/"
    found = set(re.findall(rf'href="{prefix}([^"#]+)', (site / "index.html").read_text()))
    assert {"CITATION.cff", "LICENSE", "examples/notebooks/rollout_correction.ipynb"} <= found
    for page in site.rglob("*.html"):
        for path in re.findall(rf'href="{prefix}([^"#]+)', page.read_text()):
            assert (ROOT / path).exists() or os.sep not in path, (page, path)


def test_without_a_repository_such_links_are_text(tmp_path):
    page = (build_site(tmp_path) / "index.html").read_text()
    assert "notebook (<code>examples/notebooks/rollout_correction.ipynb</code>)" in page
    assert "/blob/main/" not in page
    assert 'href="LICENSE"' not in page  # the link of a badge


def test_python_has_every_public_name_and_its_fields(site):
    text = (site / "fields/index.html").read_text()
    for name in trl_rollout_corr.__all__:
        assert f'id="trl_rollout_corr.{name}"' in text
    for field in dataclasses.fields(trl_rollout_corr.RolloutCorrectionConfig):
        assert field.name in text


def test_messages_are_wrapped_by_the_page_and_tables_of_a_terminal_are_not(site):
    pages = {page: (site / page / "index.html").read_text() for page in ("alarms", "tutorial")}
    assert '<div class="language-text highlight">' in pages["alarms"]
    assert "which explains it unless the gap came suddenly." in pages["alarms"]  # two lines of a terminal
    (table,) = re.findall(r'<div class="([^"]+)"><pre><span></span><code>\| settings ', pages["tutorial"])
    assert table == "language-text columns highlight"
    assert ".columns" in (site / "site.css").read_text()
