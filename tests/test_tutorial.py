"""The tutorial shows the output of its commands. The recorded run that it follows is in `benchmarks/tutorial`."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.launching import ROOT, UNCOMPILED
from tests.test_examples import quickstart, small, sorting_model  # noqa: F401
from trl_rollout_corr.__main__ import main


RECORD = ROOT / "benchmarks/tutorial"
PAGE = (ROOT / "docs/tutorial.md").read_text()
BLOCKS = re.findall(r"^```(bash|text)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [text.strip() for kind, text in BLOCKS if kind == "bash"]
TRAININGS = [command for command in COMMANDS if command.startswith("make ")]
TOOLS = [command for command in COMMANDS if command not in TRAININGS]


def shown_after(command: str) -> list[str]:
    """Lines of the outputs that the page shows between a command and the next one."""
    below = PAGE.split(f"\n{command}\n", 1)[1].split("```bash\n", 1)[0]
    texts = re.findall(r"^```text\n(.*?)^```", below, re.MULTILINE | re.DOTALL)
    assert texts
    return [line for text in texts for line in text.splitlines() if line]


def missing(shown: list[str], printed: str) -> list[str]:
    """Lines that a program did not print in this order. The page leaves out lines, and the ends of lines of a table."""
    lines, absent = iter(printed.splitlines()), []
    for line in shown:
        if not any(other.startswith(line.rstrip()) for other in lines):
            absent.append(line)
            lines = iter(printed.splitlines())
    return absent


def call(command: str, folder: Path):
    """Run a command of the page, with another folder in the place of `outputs/sample`."""
    _, *arguments = shlex.split(command)
    main([argument.replace("outputs/sample", str(folder)) for argument in arguments])


def test_the_page_has_these_commands():
    assert len(TRAININGS) == 2
    assert [command.split()[1] for command in TOOLS] == ["report", "diagnose", "compare", "report"]


@pytest.mark.parametrize(("command", "name"), [*zip(TRAININGS, ("uncorrected", "corrected"), strict=True)])
def test_a_training_is_recorded_and_shown_as_it_was(command, name):
    makefile = (ROOT / "Makefile").read_text()
    (recipe,) = re.findall(r'^SAMPLE_RUN = .*ARGS="(.*?)"', makefile, re.MULTILINE)
    (options,) = re.findall(rf"\$\(call SAMPLE_RUN,{name},(.*)\)$", makefile, re.MULTILINE)
    variables = dict(re.findall(r"^(SAMPLE\w*) := (.*)$", makefile, re.MULTILINE))
    made = recipe.replace("$(1)", name).replace("$(2)", options)
    for variable, value in variables.items():
        made = made.replace(f"$({variable})", value)
    assert command == f'make quickstart ARGS="{made}"'  # `make sample` makes the record
    assert missing(shown_after(command), (RECORD / f"{name}.txt").read_text()) == []


@pytest.mark.parametrize("command", TOOLS[1:3])
def test_a_tool_prints_what_the_page_shows(command, capsys):
    call(command, RECORD)
    assert missing(shown_after(command), capsys.readouterr().out) == []


def test_a_changed_output_is_noticed():
    shown = shown_after(TRAININGS[0])
    printed = (RECORD / "uncorrected.txt").read_text()
    assert missing(shown, printed.replace("0.09", "0.08")) == [line for line in shown if "0.09" in line]


def test_the_report_draws_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call(TOOLS[0], RECORD)
    assert Path("uncorrected.png").stat().st_size > 10_000
    both = (ROOT / "docs/sample/two_runs.html").read_text()
    assert "Act now" in both
    assert "Healthy" in both


def test_figures_of_the_text_are_in_an_output():
    outputs = "\n".join(text for kind, text in BLOCKS if kind == "text")
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"[\d.]+<!-- = .*?-->", "", prose)  # these are tied to tables by `test_published.py`
    figures = set(re.findall(r"\d+\.\d+|\d+ %", prose))
    assert len(figures) > 5
    limit = {"0.01", "0.2", "0.3", "0.5", "90 %"}  # of the healthy band, of rules of `auto`, and of a table
    rounded = {f"{100 * float(share):.0f} %" for share in re.findall(r"\b0\.\d+\b", outputs)}
    assert figures <= {*re.findall(r"\d+\.\d+|\d+ %", outputs), *rounded, *limit, gap_of_the_last_tenth()}


def gap_of_the_last_tenth() -> str:
    """The gap in the text above the picture."""
    entries = [json.loads(line) for line in (RECORD / "uncorrected/logs.jsonl").read_text().splitlines()]
    gaps = [entry["rollout_corr/k3_kl"] for entry in entries if "rollout_corr/k3_kl" in entry]
    last = gaps[-(len(gaps) // 10) :]
    return f"{sum(last) / len(last):.3g}"


def test_pictures_are_small():
    pictures = re.findall(r"!\[.+?\]\((images/\w+\.png)\)", PAGE)
    assert len(pictures) == 2
    for picture in pictures:
        assert 10_000 < (ROOT / "docs" / picture).stat().st_size < 150_000


@pytest.mark.slow
@pytest.mark.vllm
def test_the_commands_run_one_after_the_other(sorting_model, tmp_path, monkeypatch):  # noqa: F811
    for command in TRAININGS:
        _, _, arguments = shlex.split(command)
        options = shlex.split(arguments.removeprefix("ARGS=").replace("outputs/sample", str(tmp_path)))
        short = [*small(sorting_model, tmp_path), "--max_steps", "10", "--eval_every", "5"]
        quickstart(*options, *short, environment=UNCOMPILED)
    monkeypatch.chdir(tmp_path)
    for command in TOOLS:
        call(command, tmp_path)
    for name in ("uncorrected.png", "two_runs.html", "quickstart.png"):
        assert Path(name).stat().st_size > 10_000
