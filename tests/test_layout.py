"""Allowed imports of each module."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trl_rollout_corr


PACKAGE = Path(trl_rollout_corr.__file__).parent
ROOT = Path(__file__).parents[1]
# Wings, and the modules of each. A module imports modules above it, of its own wing and of wings above that
ORDER = {
    "messages": [],
    "health": ["bands", "reward", "windows", "texts", "rule", "conditions", "rules", "examine"],
    "settings": [
        "criteria",
        "presets",
        "thresholds",
        "recipes",
        "documents",
        "fields",
        "resolve",
        "migrate",
        "config",
        "counterparts",
        "files",
    ],  # so far without torch
    "correction": [
        "functional",
        "sums",
        "metrics",
        "groups",
        "age",
        "compute",
    ],  # so far without pyarrow, numpy and TRL
    "replay": ["routers", "sampled_experts", "router_hooks", "capture", "experts", "kept_tokens"],
    "dumps": ["columns", "rows", "sequences", "files", "claims", "reading"],
    "diagnosis": [
        "observed",
        "evidence",
        "single_tokens",
        "sampling",
        "drift",
        "precision",
        "causes",
        "ranking",
        "text",
    ],
    "reloading": [],
    "arrival": ["fingerprints", "worker", "weights", "frozen", "server", "pushes"],
    "recording": ["keys", "run_metadata", "dumping", "first_step", "observer", "monitor"],
    "trainers": [
        "gradient_check",
        "completions",
        "forward_pass",
        "adapters",
        "pushes",
        "versions",
        "trl_checks",
        "replays",
        "trl_interface",
        "logprobs",
        "engine",
        "batches",
        "mixin",
        "grpo",
        "rloo",
    ],
    "asynchronous": [
        "contract",
        "packing",
        "placeholders",
        "trl_parts",
        "stopping",
        "samples",
        "pushes",
        "trainer",
    ],
    "axolotl": ["trainer", "plugin"],
    "check": [],
    "probe": ["parts", "process", "command"],
    "analysis": ["run", "recompute", "spread", "recommend", "compare", "report"],
    "__main__": [],
}
REPORT = [
    "token_tables",
    "completions",
    "page",
    "facts",
    "log_charts",
    "compose",  # so far without matplotlib
    "drawing",
    "html_page",
    "follow",
    "command",
]


def modules_of(*wings: str) -> list[str]:
    return [f"{wing}.{name}" if name else wing for wing in wings for name in ORDER[wing] or [""]]


WITHOUT_TORCH = [*modules_of("messages", "health", "settings"), "__main__"]
WITHOUT_MATPLOTLIB = [
    "analysis.compare",
    *(f"analysis.report.{name}" for name in REPORT[: REPORT.index("compose") + 1]),
]
WITHOUT_TRL = [
    *modules_of(
        "messages",
        "health",
        "settings",
        "correction",
        "replay",
        "dumps",
        "diagnosis",
        "reloading",
        "arrival",
        "analysis",
    ),
    *(f"analysis.report.{name}" for name in REPORT),
    "probe.parts",
    "probe.command",
    "__main__",
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
    """
    Modules of the package that a module imports, at its top or inside functions, or names in a string (not in a docstring),
    as paths from the package.
    """
    folder = path.parent.relative_to(PACKAGE).parts
    tree = ast.parse(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield from re.findall(r"\btrl_rollout_corr\.([a-z_]+(?:\.[a-z_]+)*)", node.value)
        if isinstance(node, ast.ImportFrom) and node.level:
            above = folder[: len(folder) - node.level + 1]
            if node.module:
                yield ".".join([*above, node.module])
            else:  # from . import a, b
                yield from (".".join([*above, alias.name]) for alias in node.names)


def test_arrows_point_up_only():
    places = {name: place for place, name in enumerate(modules_of(*ORDER))}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts[:2])
        for found in imported(path):
            target = ".".join(found.split(".")[:2])
            if name in places and target in places and target != name:
                assert places[target] < places[name], f"{path.relative_to(PACKAGE)} imports {found}"


def test_a_report_has_an_order_of_its_own():
    for path in (PACKAGE / "analysis/report").glob("*.py"):
        for found in imported(path):
            target = found.partition("analysis.report.")[2]
            if path.stem in REPORT and target in REPORT and target != path.stem:
                assert REPORT.index(target) < REPORT.index(path.stem), f"{path.name} imports {found}"
    assert {path.stem for path in (PACKAGE / "analysis/report").glob("*.py")} - {"__init__"} == set(REPORT)


def test_every_module_has_its_place():
    others = {"__init__", "__pycache__", "py", ".agents"}  # the last has the skill for coding agents
    assert {path.stem for path in PACKAGE.iterdir()} - others == set(ORDER)
    for wing, modules in ORDER.items():
        found = {
            path.stem for path in (PACKAGE / wing).glob("*") if path.suffix == ".py" or (path / "__init__.py").exists()
        }
        assert found - {"__init__"} == set(modules), wing


def test_trl_is_imported_by_the_trainers_scripts_and_the_process_of_the_probe_alone():
    for path in PACKAGE.rglob("*.py"):
        if path.parent not in {PACKAGE / "recording", PACKAGE / "trainers", PACKAGE / "asynchronous"} and path not in {
            PACKAGE / "check.py",
            PACKAGE / "probe/process.py",
        }:
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                assert not {name.split(".")[0] for name in names} & {"trl", "transformers", "accelerate"}, path


def test_public_names():
    for name in trl_rollout_corr.__all__:
        assert getattr(trl_rollout_corr, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'RolloutCorrector'"):
        trl_rollout_corr.RolloutCorrector


def test_docstrings_begin_with_a_noun_or_a_verb():
    for path in (path for wing in ("correction", "trainers") for path in (PACKAGE / wing).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                first = (ast.get_docstring(node) or "").split(" ")[0]
                assert first not in {"What", "Who", "Which", "How", "Where", "Whether"}, f"{path.name}: {node}"


def test_examples_import_public_names_only():
    """Examples are copied by users."""
    for path in (ROOT / "examples").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl_rollout_corr":
                assert node.module == "trl_rollout_corr", f"{path.name} imports {node.module}"
