"""Which module may import what."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trl_rollout_corr


PACKAGE = Path(trl_rollout_corr.__file__).parent
# fmt: off
WITHOUT_TRL = [
    "functional", "metrics", "accounting", "thresholds", "presets", "rules", "config", "migrate", "correction", "dump",
    "analysis.convert", "analysis.compare", "analysis.report.page", "analysis.report.markdown", "__main__",
]
# fmt: on


def test_the_mathematics_does_not_import_trl():
    code = f"""
import importlib, sys
for module in {WITHOUT_TRL}:
    importlib.import_module(f"trl_rollout_corr.{{module}}")
    heavy = [name for name in ("trl", "transformers", "accelerate") if name in sys.modules]
    if heavy:
        sys.exit(f"{{module}} imports {{heavy}}")
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-500:]


def test_arrows_point_down_only():
    order = [
        "presets",
        "functional",
        "thresholds",
        "metrics",
        "accounting",
        "rules",
        "config",
        "migrate",
        "correction",
        "dump",
        "analysis",
        "sampler",
        "__main__",
        "trainers",
    ]
    check_order(PACKAGE, order)


def test_arrows_point_down_only_within_the_analysis():
    wing = PACKAGE / "analysis"
    check_order(wing, ["text", "settings", "convert", "reading", "run", "replay", "spread", "compare", "report"])
    compute, charts = ["summary", "shares", "tokens", "advice"], ["drawing", "trends", "distribution", "rejected"]
    check_order(wing / "report", [*compute, *charts, "content", "page", "markdown"])


def check_order(package: Path, order: list[str]):
    """No module of a package imports, at its top, one that comes later."""
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        if parts[0] == "__init__":
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.level == len(parts):
                targets = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
                for target in set(targets) & set(order):
                    assert order.index(target) < order.index(parts[0]), f"{path.name} imports {target}"


def test_commands_load_what_they_need_when_they_run():
    """`convert`, and the parsers of all commands, need no more than the configuration does."""
    code = """
import sys
import trl_rollout_corr.config

heavy = ("torch", "numpy", "pyarrow", "matplotlib", "trl")
before = [module for module in heavy if module in sys.modules]
import trl_rollout_corr.analysis.convert
from trl_rollout_corr.__main__ import make_parser

make_parser()
assert [module for module in heavy if module in sys.modules] == before
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-500:]


def test_public_names():
    for name in trl_rollout_corr.__all__:
        assert getattr(trl_rollout_corr, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'RolloutCorrector'"):
        trl_rollout_corr.RolloutCorrector
