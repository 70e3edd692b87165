"""Documents in a terminal: `trl-rollout-corr docs`, and the messages that point at them."""

import ast
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import trl_rollout_corr
from tests.launching import ROOT, clean_environment
from tests.test_docs import anchors
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.tools.documents import document, pages, sections


PACKAGE = Path(trl_rollout_corr.__file__).parent
COMMAND = re.compile(r"trl-rollout-corr docs ([a-z][\w.-]*(?:#[\w-]+)?)")


def test_every_page_for_readers_is_listed_with_its_question(capsys):
    assert main(["docs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = dict(line.split(maxsplit=1) for line in lines[: lines.index("")])
    assert set(listed) == {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    assert listed["debugging"] == "What does this symptom mean, and what do I do about it?"
    assert [name for name, question in listed.items() if not question.endswith("?")] == []


def test_a_page_reads_well():
    for name, path in pages().items():
        text = document(name)
        assert "<!--" not in text
        assert text.startswith(path.read_text().splitlines()[0])


def test_a_section_ends_where_the_next_begins():
    text = document("pushes#weights-do-not-arrive")
    assert text.startswith("## Weights do not arrive\n")
    assert len(re.findall("^#+ ", text, re.MULTILINE)) == 1
    assert document("debugging.md#the-gap").count("\n### ") > 5  # a file name will do
    assert document("docs/debugging.md") == document("debugging")


def test_comments_in_code_are_no_sections():
    text = "# A page\n\n```bash\n# a comment\n```\n\n## `x`, a [part](y.md)\n"
    assert [(line, anchor) for line, anchor, _ in sections(text)] == [(0, "a-page"), (6, "x-a-part")]
    for path in pages().values():
        found = [anchor for _, anchor, _ in sections(path.read_text())]
        assert set(found) <= anchors(path.read_text())


def test_a_misspelt_name_gets_the_nearest(capsys):
    assert main(["docs", "debuging"]) == 2
    assert "Did you mean 'debugging'?" in capsys.readouterr().err
    assert main(["docs", "pushes#weights-dont-arrive"]) == 2
    assert "Did you mean 'weights-do-not-arrive'?" in capsys.readouterr().err
    assert main(["docs", "run#zzz"]) == 2
    assert "Its sections are looking-at-a-run, a-run-without-a-dump, dump," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "section"),
    [
        ("k3_uncorrected", "alarms#k3_uncorrected"),
        ("8-bit samplers", "models#8-bit-samplers"),
        ("wandb", "metrics#names-in-dashboards-and-trackers"),
        ("W&B", "metrics#names-in-dashboards-and-trackers"),
        ("qlora", "models#qlora-and-4-bit-bases"),
        ("oom", "debugging#out-of-memory"),
        ("own loss", "custom#a-loss-of-your-own"),  # no words next to each other
        ("loss own", "custom#a-loss-of-your-own"),
        ("Trackio database", "run#a-run-without-a-dump"),  # in no heading
        ("qlora qwertz base", "models#qlora-and-4-bit-bases"),  # the most words
    ],
)
def test_words_find_a_section_that_has_all_of_them(capsys, typed, section):
    assert main(["docs", *typed.split()]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"docs {section}\n\n#")
    assert "<!--" not in said
    printed, *listed = re.findall(r"^docs (\S+)$", said, re.MULTILINE)
    assert printed not in listed
    assert len(listed) <= 12


def test_the_section_of_a_title_ends_where_its_page_goes_on():
    """`docs rloo` would print all of *Choosing*, because its title has the word as a keyword."""
    whole, first = document("choosing"), document("choosing#choosing-a-correction")
    text, _, more = first.partition("\n\nThe whole page: ")
    assert whole.startswith(f"{text}\n\n## ")
    assert more == "trl-rollout-corr docs choosing\n"
    assert "\n### " in document("trl#switching")  # other sections have those below them


def test_a_question_without_words_finds_nothing(capsys):
    assert main(["docs", "???"]) == 2
    assert "no document has this name" in capsys.readouterr().err


def test_words_that_no_section_has_together_are_one_line(capsys):
    assert main(["docs", "qlora", "qwertz"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("`docs qlora qwertz`: no document has this name, and no section has its words.")


def test_keywords_are_no_text_of_a_page():
    text = document("metrics")
    assert "trackio, mlflow, comet" not in text
    assert "\n\n\n" not in text


def strings(path: Path) -> Iterator[str]:
    """Strings of a module; parts of an f-string are joined."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(x.value) if isinstance(x, ast.Constant) else "{}" for x in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_words_of_messages_that_the_page_quotes_are_in_a_message():
    """Rows of `Find the words of your message`: half of their groups of three words are in one string of the package."""
    page = (ROOT / "docs/pushes.md").read_text()
    tables = re.findall(r"^\| words of the message .*\n((?:\|.*\n)+)", page, re.MULTILINE)
    quotes = re.findall(r"^\| \*(.+?)\*", "".join(tables), re.MULTILINE)
    assert len(quotes) >= 10
    told = [text for path in PACKAGE.rglob("*.py") for text in strings(path)]
    for quote in quotes:
        words = quote.split()
        groups = [" ".join(words[i : i + 3]) for i in range(len(words) - 2)]
        assert any(2 * sum(group in text for group in groups) >= len(groups) for text in told), quote


def docstrings(path: Path) -> set[str | None]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {ast.get_docstring(x, clean=False) for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, kinds)}


def test_every_document_that_is_named_can_be_read():
    """In messages, docstrings, examples and recipes: whoever installed a wheel has no folder `docs`."""
    files = [*PACKAGE.rglob("*.py"), *ROOT.glob("examples/**/*.py")]
    named = {name for path in files for text in strings(path) for name in COMMAND.findall(text)}
    more = [*ROOT.glob("recipes/**/*.*"), *ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "README.zh-CN.md"]
    named |= {name for path in more for name in COMMAND.findall(path.read_text())}
    assert {"choosing", "debugging"} <= named
    for name in named:
        assert document(name.rstrip("."))


def test_messages_name_no_file_of_the_repository_that_is_not_installed():
    for path in PACKAGE.rglob("*.py"):
        told = set(strings(path)) - docstrings(path)
        found = [text for text in told if re.search(r"\bdocs/[\w.-]*\w|\bbenchmarks/\w|[\w-]+\.md\b", text)]
        allowed = {"README.md"}  # the card of a model
        assert [text for text in found if text not in allowed and path.name != "documents.py"] == [], path


def test_no_advice_installs_from_an_index_what_is_not_there():
    """There is no release yet: extras can be had from a clone alone."""
    tracked = [*PACKAGE.rglob("*.py"), *ROOT.glob("examples/**/*.*"), *ROOT.glob("benchmarks/**/*.py")]
    tracked += [*ROOT.glob("**/*.md"), *ROOT.glob("recipes/**/*.*")]
    for path in tracked:
        if "contributions" in path.parts:
            continue  # texts to submit once there is a release
        if path.is_file() and ".venv" not in path.parts and path.suffix in {".py", ".md", ".yaml"}:
            assert "trl-rollout-corr[" not in path.read_text(), path


# As it is installed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_documents_are_in_what_is_installed(built, tmp_path, kind):
    if kind == "wheel":
        with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
            archive.extractall(tmp_path / "installed")
        folder = tmp_path / "installed"
    else:
        with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
            archive.extractall(tmp_path, filter="data")
        (folder,) = tmp_path.glob("trl_rollout_corr-*")

    def call(*arguments: str) -> str:
        environment = clean_environment(PYTHONPATH=str(folder))
        command = [sys.executable, "-P", "-m", "trl_rollout_corr", "docs", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert f"Files: {folder}" in call()
    assert call("pushes#weights-do-not-arrive") == document("pushes#weights-do-not-arrive")
    assert len(call().splitlines()) == len(pages()) + 3
