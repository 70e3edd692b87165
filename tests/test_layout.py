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
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if name == "__init__":
            continue
        for node in ast.parse(path.read_text()).body:  # imports at the top of a module
            if isinstance(node, ast.ImportFrom) and node.level == (1 if path.parent == PACKAGE else 2):
                target = (node.module or "").split(".")[0]
                if target in order:
                    assert order.index(target) < order.index(name), f"{path.name} imports {target}"


def test_public_names():
    for name in trl_rollout_corr.__all__:
        assert getattr(trl_rollout_corr, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'RolloutCorrector'"):
        trl_rollout_corr.RolloutCorrector
