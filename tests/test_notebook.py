"""
The notebook: its form is what Colab expects, and its cells run in order, with a tiny model on a CPU.

Cells run in one namespace. Lines for IPython are done here: `!` runs a command, `%%writefile` writes a file, and `%pip` does
nothing.
"""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import trl_rollout_corr
from tests.launching import ROOT, UNCOMPILED, clean_environment
from trl_rollout_corr import RolloutCorrectedGRPOConfig
from trl_rollout_corr.__main__ import make_parser


FILE = ROOT / "examples/notebooks/rollout_correction.ipynb"
NOTEBOOK = json.loads(FILE.read_text())
CODE = {cell["id"]: "".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"}
SCRIPT = CODE["script"].partition("\n")[2]  # without `%%writefile`


def plain_python(source: str) -> str:
    """A cell without its lines for IPython."""
    return "" if source.startswith("%%") else "\n".join(x for x in source.splitlines() if not x.startswith(("!", "%")))


def commands() -> list[list[str]]:
    found = [line[1:].split() for source in CODE.values() for line in source.splitlines() if line.startswith("!")]
    assert len(found) == 5
    return found


def test_the_form_is_that_of_colab():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["metadata"]["accelerator"]) == (4, "GPU")
    assert NOTEBOOK["metadata"]["colab"]["gpuType"]
    assert NOTEBOOK["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(ids) == len(set(ids))
    for cell in NOTEBOOK["cells"]:
        assert cell["cell_type"] in {"code", "markdown"}
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
    first = "".join(NOTEBOOK["cells"][0]["source"])
    path = FILE.relative_to(ROOT)
    assert re.search(rf"colab-badge\.svg\)\]\(https://colab\.research\.google\.com/github/[\w./-]+/{path}\)", first)
    (parameters,) = [cell for cell in NOTEBOOK["cells"] if "parameters" in cell["metadata"].get("tags", [])]
    assert "".join(parameters["source"]) == CODE["parameters"]


def test_the_package_is_installed_with_extras_that_exist():
    import tomllib

    (extras,) = re.findall(r"%pip install .*trl-rollout-corr\[([\w,]+)\] @ git\+https://", CODE["install"])
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(declared)


def test_the_script_compiles_and_sets_fields_that_exist():
    tree = ast.parse(SCRIPT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "trl_rollout_corr":
            assert all(hasattr(trl_rollout_corr, alias.name) for alias in node.names)
    (config,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "RolloutCorrectedGRPOConfig"
    ]
    keys = {key.value for key in config.keywords[0].value.keys if key is not None}
    assert len(keys) > 20
    assert keys <= RolloutCorrectedGRPOConfig.__dataclass_fields__.keys()
    lint = [sys.executable, "-m", "ruff", "check", "--select", "F", "--stdin-filename", "train.py", "-"]
    if importlib.util.find_spec("ruff"):
        subprocess.run(lint, input=SCRIPT, text=True, check=True)
    read = set(re.findall(r"settings\[\"(\w+)\"\]", SCRIPT))
    assert read == set(re.findall(r"\"([A-Z_]+)\"", CODE["settings"]))


def test_commands_are_those_of_the_package():
    for command in commands():
        if command[0] == "trl-rollout-corr":
            make_parser().parse_args(command[1:])
        else:
            assert command[:2] == ["python", "train.py"]
            RolloutCorrectedGRPOConfig("output", rollout_correction=command[2], use_cpu=True, bf16=False)


class Shown:
    """Stands in for what a notebook displays, where IPython is not installed."""

    def __init__(self, data: Any):
        self.data = data


def run_command(line: str, names: dict, folder: Path) -> str:
    """A line that begins with `!`, as IPython runs it: names in braces become their values."""
    command = re.sub(r"\{(\w+)\}", lambda found: str(names[found[1]]), line[1:])
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = clean_environment(PATH=here, PYTHONPATH=str(ROOT), **UNCOMPILED)
    process = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode in (0, 1), process.stdout[-3000:] + process.stderr[-6000:]  # 1: a cause was found
    return process.stdout + process.stderr


@pytest.mark.slow  # two engines of vLLM start
@pytest.mark.vllm
def test_it_runs(tiny_model_path, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    shown = []
    if importlib.util.find_spec("IPython") is None:
        display = ModuleType("IPython.display")
        display.HTML, display.display = Shown, shown.append
        monkeypatch.setitem(sys.modules, "IPython.display", display)
    names: dict[str, Any] = {}
    output: dict[str, str] = {}
    small = {"per_device_train_batch_size": 32, "max_completion_length": 8, "vllm_max_model_length": 64}
    for name, source in CODE.items():
        if source.startswith("%%writefile "):
            first, _, text = source.partition("\n")
            Path(first.split()[1]).write_text(text)
            continue
        lines = [line for line in source.splitlines() if line.startswith("!")]
        output[name] = "".join(run_command(line, names, tmp_path) for line in lines)
        exec(compile(plain_python(source), name, "exec"), names)
        if name == "parameters":
            names.update(
                MODEL=tiny_model_path,
                OUTPUT=str(tmp_path / "runs"),
                STEPS=10,
                PUSH_EVERY=5,
                LEARNING_RATE=0.003,
                MORE=small,
            )
    logs = names["logs"]
    assert list(logs["disabled"]["rollout_corr/staleness_mean"]) == [0, 1, 2, 3, 4] * 2
    apart = logs["disabled"]["rollout_corr/k3_kl"]
    assert apart.iloc[4] > 0.03 > apart.iloc[0]  # it grows until weights are pushed
    assert logs["disabled"]["rollout_corr/monitor/alarms"].sum() > 0
    assert "k3_kl" in output["disabled"]
    assert "`rollout_correction`" in output["disabled"]  # what the alarm advises
    assert (logs["disabled"]["rollout_corr/effective_lr"] == 1).all()
    assert (logs["auto"]["rollout_corr/effective_lr"] < 1).any()
    assert re.match("(Found|Possible): stale weights", output["diagnose"])  # few tokens: not always certain
    assert set(names["accuracy"]) == {"disabled", "auto"}
    report = (tmp_path / "runs/report.html").read_text()
    assert "disabled" in report
    assert "auto" in report
    if shown:
        assert shown[-1].data.startswith("<div><iframe srcdoc=")
