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
from trl_rollout_corr.messages import SelfContainedError
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


def test_words_find_their_section_first(capsys):
    text = document("k3_uncorrected")
    assert text.startswith("docs alarms#k3_uncorrected\n\n### `k3_uncorrected`\n\n> ")
    assert "docs alarms#all-alarms\n    " in text
    assert main(["docs", "8-bit", "samplers"]) == 0
    assert capsys.readouterr().out.startswith("docs models#8-bit-samplers\n")


@pytest.mark.parametrize(
    ("typed", "section"),
    [
        ("wandb", "metrics#names-in-dashboards-and-trackers"),
        ("multi-turn", "asynchronous#agents"),
        ("resume", "processes#resuming"),
        ("8k", "trl#long-completions"),
        ("qlora", "models#qlora-and-4-bit-bases"),
        ("liger", "processes#liger"),
        ("oom", "debugging#out-of-memory"),
        ("W&B", "metrics#names-in-dashboards-and-trackers"),
        ("repeat", "alarms#alarms"),
        ("8192", "trl#long-completions"),
        ("upgrade", "processes#releases"),
        ("fp8", "models#8-bit-samplers"),
        ("moe", "models#a-large-mixture-of-experts"),
        ("nan", "alarms#nonfinite_many"),
        ("collapse", "debugging#the-reward-falls"),
        ("staleness", "alarms#staleness"),
        ("own loss", "custom#a-loss-of-your-own"),  # no words next to each other
        ("multi-node", "processes#several-machines"),
        ("ESS", "alarms#effective_sample_size"),
        ("rollout_is_eff_sample_size", "alarms#effective_sample_size"),
        ("rloo", "choosing#choosing-a-correction"),
        ("bf16", "choosing#choosing-a-correction"),
        ("vision", "models#images"),
        ("reward falls", "debugging#the-reward-falls"),
        ("cut answers", "debugging#answers-are-cut"),
        ("max_staleness", "asynchronous#asynchronous"),
        ("async", "asynchronous#asynchronous"),
        ("lora", "models#adapters"),
        ("dr grpo", "trl#dapo-dr-grpo-and-gspo"),
        ("TRL 1.10", "processes#releases"),
    ],
)
def test_words_of_users_find_the_section_that_says_it_in_other_words(capsys, typed, section):
    assert main(["docs", typed]) == 0
    said = capsys.readouterr().out
    assert f"docs {section}\n\n#" in said  # printed and not only listed
    assert "<!--" not in said


@pytest.mark.parametrize(
    ("typed", "section"),
    [
        ("wandb collapsed", "run#a-run-without-a-dump"),
        ("collapsed at 700, all I have is W&B", "run#a-run-without-a-dump"),
        ("vision model", "models#images"),
        ("my own loss", "custom#a-loss-of-your-own"),
        ("loss_type of my own", "custom#a-loss-of-your-own"),
        ("seq-mean-k1", "fields#names-of-criteria"),
        ("Qwen3-30B-A3B what to set", "models#a-large-mixture-of-experts"),
        ("lora rank 16", "models#adapters"),
        ("ESS 0.2", "alarms#effective_sample_size"),
        ("low effective sample size", "alarms#effective_sample_size"),
        ("RLOO 8k", "trl#long-completions"),
        ("async max_staleness 4", "asynchronous#asynchronous"),
        ("dr grpo epsilon_high 0.28", "trl#dapo-dr-grpo-and-gspo"),
        ("k3_kl 0.009 and stays", "debugging#the-gap-stays-above-0005"),
        ("k3_kl 0.03 at step 1", "debugging#a-large-gap-at-the-first-step"),
        ("num_iterations 4", "debugging#is-my-sampler-stale"),
        ("TRL 1.10 pinned", "processes#releases"),
        ("server on another node", "processes#several-machines"),
        ("32 GPUs with FSDP2", "processes#several-machines"),
        ("how do I sample in int8?", "models#8-bit-samplers"),
        ("mask truncated completions", "debugging#answers-are-cut"),
        ("agent with tools and environment tokens", "asynchronous#agents"),
        ("what do I do with a rollout_func", "asynchronous#agents"),
        ("how old is my sampler", "debugging#is-my-sampler-stale"),
        ("keep TRL's loss", "trl#keep-your-loss-rollout_correction-trl"),
        ("lora 2k tokens", "trl#long-completions"),
        ("weights not updated", "pushes#weights-do-not-arrive"),
        ("push error", "pushes#pushes-that-go-wrong"),
        ("how much memory", "debugging#out-of-memory"),
        ("reproduce verl", "verl#convert-a-configuration"),
        ("what is k3_kl", "metrics#which-metric-to-look-at-first"),
        ("alarm false positive", "alarms#silence-an-alarm-or-change-its-limit"),
        ("nan loss", "alarms#nonfinite_many"),
        ("LoRA r=16", "models#adapters"),
        ("safest first step", "trl#keep-your-loss-rollout_correction-trl"),
        ("which numbers are healthy", "metrics#metrics"),
        ("steps_per_generation 8 and gradient_accumulation_steps 8", "glossary#training"),
        ("reward stopped", "alarms#nothing_to_learn"),
        ("early stopping", "custom#a-monitor-rule-of-your-own"),
        ("turn off the correction", "fields#change-a-preset"),
        ("no gpu", "tutorial#tutorial-long-answers-and-a-sampler-that-falls-behind"),
        ("vllm serve options", "processes#servers"),
        ("coming from OpenRLHF", "verl#coming-from-openrlhf-slime-or-another-trainer"),
    ],
)
def test_a_question_finds_its_section(typed, section):
    assert f"docs {section}\n\n#" in document(typed)


def test_the_best_section_comes_first_and_others_are_listed():
    text = document("weights that do not arrive")
    assert text.startswith("docs pushes#weights-do-not-arrive\n\n## Weights do not arrive\n")
    printed = re.findall(r"^docs \S+\n\n#", text, re.MULTILINE)
    listed = re.findall(r"^docs (\S+)\n    ", text, re.MULTILINE)
    assert len(printed) <= 2
    assert "causes#never_pushed" in listed
    assert len(listed) <= 8


def test_a_word_is_sought_at_the_beginning_of_words():
    assert "docs alarms#staleness\n" not in document("ess")  # "ess" is in "staleness"
    assert document("max_staleness").startswith("docs asynchronous#asynchronous\n")
    assert "docs alarms#effective_sample_size\n" in document("ective_sample_s")  # no word begins like this


@pytest.mark.parametrize(
    ("typed", "unknown"),
    [("k3_kl 0.0317", "0.0317"), ("k3_kl > 31.7%", "31.7"), ("k3_kl 3.17e-2", "3.17e-2"), ("k3_kl >0.0317", "0.0317"),
     ("qwertz k3_kl", "qwertz")],
)  # fmt: skip
def test_a_word_or_number_that_no_page_contains_hides_no_section(typed, unknown, capsys):
    assert main(["docs", *typed.split()]) in (None, 0)
    note, found = capsys.readouterr().out.split("\n\n", 1)
    assert note == f"No document contains `{unknown}`. Without it:"
    assert found == document("k3_kl")
    assert "Without" not in document("0.005").partition("\n")[0]  # which pages contain
    with pytest.raises(SelfContainedError, match="no document has this name or contains it"):
        document("0.98765 1234.5")


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
