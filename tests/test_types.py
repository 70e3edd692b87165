"""Editors and type checkers know the choices of a setting."""

import subprocess
import sys

import pytest

import trl_rollout_corr
from tests.launching import ROOT


GOOD = """
from trl_rollout_corr import RolloutCorrectionConfig, RolloutCorrectionMonitor
RolloutCorrectionConfig(rollout_correction="decoupled_token_is", rollout_rs=["token_k1"], rollout_rs_threshold=[0.5, 2.0])
RolloutCorrectionConfig(rollout_is="sequence", rollout_nan_policy="raise", rollout_monitor=None)
RolloutCorrectionConfig(rollout_correction={"rollout_is": "token"})
RolloutCorrectionConfig.from_preset("bypass_pg_is", bypass_mode=True).description
RolloutCorrectionMonitor("stop")
"""
BAD = """
from trl_rollout_corr import RolloutCorrectionConfig, RolloutCorrectionMonitor
RolloutCorrectionConfig(rollout_correction=3)
RolloutCorrectionConfig(rollout_is="tokens")
RolloutCorrectionConfig(rollout_rs=["token_k9"])
RolloutCorrectionConfig(rollout_iss="token")
RolloutCorrectionConfig.from_preset(["bypass_pg_is"])
RolloutCorrectionMonitor("shout")
"""


@pytest.mark.slow
def test_a_type_checker_catches_what_is_misspelt(tmp_path):
    pytest.importorskip("mypy")
    for name, code in (("good", GOOD), ("bad", BAD)):
        (tmp_path / f"{name}.py").write_text(code)
    process = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "good.py", "bad.py",
         "--cache-dir", str(tmp_path / "cache")],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={"MYPYPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    found = [line.split(":")[:2] for line in process.stdout.splitlines() if ": error:" in line]
    assert found == [["bad.py", str(line)] for line in range(3, 9)], process.stdout + process.stderr


def test_dir_lists_what_can_be_imported():
    assert set(trl_rollout_corr.__all__) <= set(dir(trl_rollout_corr))
