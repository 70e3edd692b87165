"""Editors and type checkers know the choices: what is spelt out for them is what the code accepts."""

import inspect
import subprocess
import sys

import pytest

import trl_rollout_corr
from tests.launching import HAS_ASYNCHRONOUS, ROOT
from trl_rollout_corr import RolloutCorrectionConfig


GOOD = """
from trl_rollout_corr import RolloutCorrectionConfig, RolloutCorrectionMonitor
RolloutCorrectionConfig(rollout_correction="decoupled_token_is", rollout_rs=["token_k1"], rollout_rs_threshold=[0.5, 2.0])
RolloutCorrectionConfig(rollout_is="sequence", rollout_nan_policy="raise", rollout_monitor=None)
RolloutCorrectionConfig(rollout_is="preset", rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0", bypass_mode=None)
RolloutCorrectionConfig("bypass_pg_is", rollout_is=None).settings.bounding
RolloutCorrectionMonitor({"staleness": 32})
"""
BAD = """
from trl_rollout_corr import RolloutCorrectionConfig, RolloutCorrectionMonitor
RolloutCorrectionConfig(rollout_is="tokens")
RolloutCorrectionConfig(rollout_rs=["token_k9"])
RolloutCorrectionConfig(rollout_iss="token")
RolloutCorrectionMonitor(32)
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
    assert found == [["bad.py", str(line)] for line in range(3, 7)], process.stdout + process.stderr


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "AsyncGRPO"])
def test_a_trainer_shows_the_arguments_of_trl(name):
    if name == "AsyncGRPO" and not HAS_ASYNCHRONOUS:
        pytest.skip("TRL's asynchronous trainer does not import")
    trainer = getattr(trl_rollout_corr, f"RolloutCorrected{name}Trainer")
    assert inspect.signature(trainer) == inspect.signature(trainer._trl_class)
    assert {"train_dataset", "callbacks", "processing_class"} <= set(inspect.signature(trainer).parameters)

    class Mine(trainer):
        def __init__(self, mine: int):
            super().__init__("a model")

    assert [*inspect.signature(Mine).parameters] == ["mine"]


def test_a_misspelt_field_is_told_the_nearest():
    from trl_rollout_corr import RolloutCorrectedGRPOConfig

    with pytest.raises(
        TypeError, match=r"`rollout_iss` is not a field of RolloutCorrectionConfig. Did you mean 'rollout_is'\?"
    ):
        RolloutCorrectionConfig(rollout_iss="token")
    with pytest.raises(
        TypeError, match=r"`max_step` is not a field of RolloutCorrectedGRPOConfig. Did you mean 'max_steps'\?"
    ):
        RolloutCorrectedGRPOConfig("out", max_step=3)


def test_a_subclass_may_take_what_it_likes():
    class Mine(RolloutCorrectionConfig):
        def __init__(self, mine: int, **kwargs):
            super().__init__(**kwargs)
            self.mine = mine

    assert Mine(mine=3, rollout_is="sequence").settings.rollout_is == "sequence"
