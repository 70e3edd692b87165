"""`python -m trl_rollout_corr convert`."""

import io
import sys

import pytest
import yaml

from tests.launching import run
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.__main__ import main


VERL = {
    "rollout_is": "token",
    "rollout_is_threshold": 2.0,
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": "0.5_2.0",
}
LEGACY = {"rollout_is": True, "rollout_is_threshold": 5.0, "rollout_is_level": "sequence", "rollout_is_mode": "mask"}
TRL = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
CASES = {
    "verl, whole file": ({"algorithm": {"gamma": 1.0, "rollout_correction": VERL}, "data": {}}, "from_verl", VERL),
    "verl, off": ({"algorithm": {"rollout_correction": None}}, "from_verl", None),
    "verl, section": ({"rollout_correction": VERL}, "from_verl", VERL),
    "verl, keys": (VERL, "from_verl", VERL),
    "legacy, whole file": ({"algorithm": {"adv_estimator": "grpo", **LEGACY}}, "from_legacy", LEGACY),
    "legacy, metrics only": ({**LEGACY, "rollout_is": False}, "from_legacy", {**LEGACY, "rollout_is": False}),
    "trl, whole file": ({"learning_rate": 1e-6, "use_vllm": True, **TRL}, "from_trl", TRL),
}


@pytest.mark.parametrize("case", CASES)
def test_the_printed_yaml_is_the_translated_configuration(case, tmp_path, capsys):
    document, importer, settings = CASES[case]
    path = tmp_path / "old.yaml"
    path.write_text(yaml.safe_dump(document))
    assert main(["convert", str(path)]) == 0
    output = capsys.readouterr()
    assert RolloutCorrectionConfig(**yaml.safe_load(output.out)) == getattr(RolloutCorrectionConfig, importer)(
        settings
    )
    assert output.err == ""


def test_differences_are_warned_about_beside_the_yaml(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(yaml.safe_dump({**VERL, "rollout_rs_threshold": "0.6_1.6"})))
    assert main(["convert", "-"]) == 0
    output = capsys.readouterr()
    assert yaml.safe_load(output.out)["rollout_rs_threshold"] == [[0.625, pytest.approx(1 / 0.6)]]
    assert output.err.startswith("warning: verl applies the bounds of `token_k1` to the inverse of the ratio")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no settings of rollout correction found"),
        (b"learning_rate: 1", "no settings of rollout correction found"),
        (b"- 1\n- 2", "no settings of rollout correction found"),
        (b"a: [1", "not YAML"),
        (b"\xff\xfe\x00", "not YAML"),
        (b"rollout_correction: {rollout_is: word}", "`rollout_is` must be one of token"),
        (b"rollout_correction: {rollout_iss: token}", "'rollout_iss'"),
        (b"rollout_correction: {rollout_is: token, rollout_is_threshold: [1, 2, 3]}", "`rollout_is_threshold`"),
        (b"rollout_is_level: word\nrollout_is_threshold: 2", "`rollout_is_level` must be one of"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(content, message, tmp_path, capsys):
    path = tmp_path / "old.yaml"
    path.write_bytes(content)
    assert main(["convert", str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    assert len(output.err.splitlines()) == 1


def test_the_command(tmp_path):
    process = run(sys.executable, "-m", "trl_rollout_corr", "convert", str(tmp_path / "missing.yaml"))
    assert process.returncode == 2
    assert process.stderr.strip().endswith("missing.yaml: No such file or directory")
    path = tmp_path / "old.yaml"
    path.write_text(yaml.safe_dump(TRL))
    process = run(sys.executable, "-m", "trl_rollout_corr", "convert", str(path))
    assert process.stdout == "rollout_is: token\nrollout_is_threshold: 2.0\nrollout_nan_policy: neutralize\n"
