"""Releases of TRL in the metadata, the documents and CI, and the jobs that watch them."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.editing import copy_trl
from tests.launching import ROOT, output_of
from trl_rollout_corr.trainers.versions import FIRST_UNSUPPORTED, NEWEST_TESTED, OLDEST, TESTED_VLLM


def test_the_supported_range_is_the_one_that_installers_read():
    asked = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if "trl" in line and ">=" in line]
    ranges = {found for line in asked for found in re.findall(r'"trl(?:\[\w+\])?([^"]+)"', line)}
    assert ranges == {f">={OLDEST},<{FIRST_UNSUPPORTED}"}


def test_documents_name_the_releases_of_the_table():
    window = f"TRL {OLDEST} to {NEWEST_TESTED}"
    assert window in (ROOT / "README.md").read_text()
    for readme in ("README.md", "README.zh-CN.md"):
        assert f"![TRL {OLDEST} to {NEWEST_TESTED}]" in (ROOT / readme).read_text()
    rows = re.findall(
        r"^\| (\d+\.\d+)\.\d+ \| ([\d.]+)", (ROOT / "benchmarks/RELEASES.md").read_text(), flags=re.MULTILINE
    )
    assert set(TESTED_VLLM.items()) <= set(rows)


def markers_of(command: str) -> list[str]:
    """Selections by marker, in quotation marks, of the commands of a Makefile or a workflow."""
    return re.findall(r'pytest .*?-m "?((?:not )?\w+(?: and (?:not )?\w+)*)', command)


def smallest_file_of(selection: str) -> Path:
    """The smallest file with tests of a selection."""
    asked = re.findall(r"(?<!not )\b(?!not\b|and\b)(\w+)", selection)
    marks = [f"pytest.mark.{word}\n" for word in asked]
    files = [path for path in (ROOT / "tests").glob("test_*.py") if all(mark in path.read_text() for mark in marks)]
    assert files, f"no test has all of {marks}"
    return min(files, key=lambda path: path.stat().st_size)


def test_what_ci_selects_exists():
    workflows = [path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")]
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE))
    for workflow in workflows:
        assert set(re.findall(r"\bmake ([\w-]+)", workflow)) <= targets
        for path in re.findall(r"\btests/\w+\.py", workflow):
            assert (ROOT / path).exists()
    selections = {selection for text in (makefile, *workflows) for selection in markers_of(text)}
    assert {"seam and not slow", "slow", "not slow"} <= selections
    for selection in selections:
        collect = ["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-m", selection]
        assert pytest.main([*collect, str(smallest_file_of(selection))]) == 0, selection


def test_a_job_that_fails_is_seen():
    """Nothing lets a job go on after an error, and `make test-trl` stops at the first command that fails."""
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        assert "continue-on-error" not in path.read_text()
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile[makefile.index("\ntest-trl:") :].split("\n\n")[0]
    commands = [line[1:] for line in recipe.splitlines()[2:] if line.startswith("\t")]
    assert commands
    assert not [command for command in commands if command.lstrip("@").startswith("-") or "|| true" in command]


def test_ci_watches_the_window_and_what_is_newer():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    watched = {"trl": [*TESTED_VLLM], "newer-trl": ["newest", "main"]}
    for job, releases in watched.items():
        assert jobs[job]["strategy"] == {"fail-fast": False, "matrix": {"trl": releases}}
        assert jobs[job]["steps"][-1]["run"].startswith("make test-trl TRL=${{ matrix.trl }}")
    assert jobs["trl"]["if"] == "github.event_name != 'schedule'"
    assert jobs["newer-trl"]["if"] == "github.event_name == 'schedule'"


@pytest.mark.slow
def test_the_job_of_a_newer_trl_is_not_ended_by_our_own_warning(tmp_path):
    """Warnings of this package are errors in tests, and a newer TRL is warned about."""
    newer = copy_trl(tmp_path / "trl", "1.99.0", {})
    trains = "tests/test_contract.py::test_a_forward_pass_more_while_scoring_is_an_error"
    output_of(sys.executable, "-m", "pytest", "-q", trains, PYTHONPATH=f"{newer}:{ROOT}")
