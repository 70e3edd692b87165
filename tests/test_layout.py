"""Which module may import what."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trl_rollout_corr


PACKAGE = Path(trl_rollout_corr.__file__).parent
# Each may import those above it. A folder counts as one module; inside it, the order is its own
ORDER = [
    "keys",
    "messages",
    "criteria",
    "presets",
    "original",
    "thresholds",
    "health",
    "rules",
    "migrate",
    "shipped",
    "config",  # so far without torch
    "compiling",
    "functional",
    "histogram",
    "sums",
    "metrics",
    "accounting",
    "staleness",
    "ages",
    "step_size",
    "correction",  # so far without pyarrow, numpy and TRL
    "dump",
    "reload",
    "faults",
    "analysis",  # so far without TRL
    "trainers",
    "__main__",
]
ANALYSIS = [
    "text",
    "documents",
    "settings",
    "convert",
    "reading",
    "run",
    "phase",
    "replay",
    "spread",
    "exact",
    "compare",
    "diagnose",
    "report",
]
DIAGNOSE = ["observed", "signatures", "causes", "ranking", "written", "pictures"]
REPORT = [
    "summary",
    "shares",
    "tokens",
    "verdict",
    "advice",  # so far without matplotlib
    "drawing",
    "trends",
    "story",
    "distribution",
    "rejected",
    "content",
    "markup",
    "diagnosis",
    "banner",
    "page",
    "markdown",
    "versus",
]
WITHOUT_TORCH = [*ORDER[: ORDER.index("config") + 1], *(f"analysis.{name}" for name in ANALYSIS[:4]), "__main__"]
WITHOUT_MATPLOTLIB = [f"analysis.report.{name}" for name in REPORT[: REPORT.index("advice") + 1]]
WITHOUT_TRL = [
    *ORDER[: ORDER.index("analysis") + 1],
    "__main__",
    *(f"analysis.{name}" for name in ANALYSIS),
    *(f"analysis.report.{name}" for name in REPORT),
]


def loaded_after(modules: list[str], heavy: list[str]) -> str:
    """Import modules one after the other in a process of their own. Says which was the first to load something heavy."""
    code = f"""
import importlib, sys
for module in {modules}:
    importlib.import_module(f"trl_rollout_corr.{{module}}")
    loaded = [name for name in {heavy} if name in sys.modules]
    if loaded:
        sys.exit(f"{{module}} imports {{loaded}}")
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return process.stderr[-500:] if process.returncode else ""


def test_settings_and_their_translation_load_without_torch():
    assert loaded_after(WITHOUT_TORCH, ["torch", "numpy", "pyarrow", "matplotlib"]) == ""


def test_only_charts_load_matplotlib():
    assert loaded_after(WITHOUT_MATPLOTLIB, ["matplotlib"]) == ""


def test_all_but_the_trainers_loads_without_trl():
    assert loaded_after(WITHOUT_TRL, ["trl", "transformers", "accelerate"]) == ""


def imported(path: Path) -> Iterator[str]:
    """Modules of the package that a module imports, at its top or inside functions, as paths from the package."""
    folder = path.parent.relative_to(PACKAGE).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = folder[: len(folder) - node.level + 1]
            if node.module:
                yield ".".join([*above, node.module])
            else:  # from . import a, b
                yield from (".".join([*above, alias.name]) for alias in node.names)


@pytest.mark.parametrize(
    ("package", "order"),
    [("", ORDER), ("analysis.", ANALYSIS), ("analysis.diagnose.", DIAGNOSE), ("analysis.report.", REPORT)],
    ids=str,
)
def test_arrows_point_up_only(package, order):
    folder = PACKAGE.joinpath(*package.split("."))
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder).with_suffix("").parts[0]
        for found in imported(path):
            target = found.removeprefix(package).split(".")[0]
            if name != "__init__" and found.startswith(package) and target in order and target != name:
                assert order.index(target) < order.index(name), f"{path.relative_to(PACKAGE)} imports {found}"


@pytest.mark.parametrize(
    ("folder", "order"),
    [("", ORDER), ("analysis", ANALYSIS), ("analysis/diagnose", DIAGNOSE), ("analysis/report", REPORT)],
)
def test_every_module_has_its_place(folder, order):
    modules = {
        path.relative_to(PACKAGE / folder).with_suffix("").parts[0] for path in (PACKAGE / folder).rglob("*.py")
    }
    assert modules - {"__init__"} == set(order)


def test_trl_is_imported_by_the_trainers_alone():
    for path in PACKAGE.rglob("*.py"):
        if path.parent != PACKAGE / "trainers":
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                assert not {name.split(".")[0] for name in names} & {"trl", "transformers", "accelerate"}, path


def test_public_names():
    for name in trl_rollout_corr.__all__:
        assert getattr(trl_rollout_corr, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'RolloutCorrector'"):
        trl_rollout_corr.RolloutCorrector
