"""`trl-rollout-corr convert`."""

import io
import os
import re
import sys

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.launching import ROOT, run
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.settings.files import read_config
from trl_rollout_corr.settings.migrate import COUNTERPARTS


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
    foreign = [key for key in document.get("algorithm", {}) if key not in ("rollout_correction", *LEGACY)]
    lines = output.err.splitlines()
    assert len(lines) == (1 if importer == "from_trl" else len(foreign))
    assert all(f"{path}:2: `algorithm.{key}` is left out" in output.err for key in foreign)
    if importer == "from_trl":
        said = "`learning_rate`, `use_vllm` are left out: they are not about TRL's own correction, so keep name and value."
        assert lines[0].endswith(said)


def test_a_misspelt_key_of_a_flat_file_is_not_lost(tmp_path, capsys):
    path = tmp_path / "old.yaml"
    path.write_text("rollout_is: token\nrollout_is_threshold: 2.0\nbypas_mode: true\nlearning_rate: 1\n")
    assert main(["convert", str(path)]) == 0
    error = capsys.readouterr().err
    assert error == (
        f"warning: {path}:3: `bypas_mode` is left out. Did you mean `bypass_mode`?\n"
        f"warning: {path}:4: `learning_rate` is left out: TRL has `learning_rate`.\n"
    )


def test_what_is_left_out_is_named_with_its_line(tmp_path, capsys):
    path = tmp_path / "old.yaml"
    path.write_text(
        "data:\n  max_prompt_length: 1024\nalgorithm:\n  adv_estimator: gae\n  gamma: 0.99\n  lam: 0.95\n"
        "  rollout_correction:\n    rollout_is: token\n    rollout_rs: seq_mean_k1\n    rollout_rs_threshold: 0.9_1.2\n"
        "trainer:\n  total_epochs: 5\n  project_name: p\n  val_only: false\n"
    )
    assert main(["convert", str(path)]) == 0
    found = {line.split(": ", 2)[1]: line for line in capsys.readouterr().err.splitlines()}
    assert {place.removeprefix(str(path)) for place in found} == {":2", ":4", ":5", ":6", ":10", ":12", ":13"}
    assert "`algorithm.adv_estimator` is left out: TRL has neither GAE nor a value model" in found[f"{path}:4"]
    assert "`algorithm.lam` is left out: it is a parameter of GAE" in found[f"{path}:6"]
    assert "verl applies the bounds of `seq_mean_k1` to the inverse" in found[f"{path}:10"]
    assert "`data.max_prompt_length` is left out: TRL has none: filter the dataset" in found[f"{path}:2"]
    assert "`trainer.total_epochs` is left out: TRL has `num_train_epochs`." in found[f"{path}:12"]
    assert "`trainer.project_name`, `trainer.val_only` are left out: they are not about" in found[f"{path}:13"]


SCRIPT = """#!/usr/bin/env bash
set -xeuo pipefail
MODEL_PATH="Qwen/Qwen2.5-7B"
threshold=3.0

python3 -m verl.trainer.main_ppo \\
    data.train_files="${TRAIN_FILE}" \\
    algorithm.adv_estimator=rloo \\
    +algorithm.rollout_correction.rollout_is="sequence" \\
    algorithm.rollout_correction.rollout_is_threshold=${threshold} \\
    algorithm.rollout_correction.rollout_is_batch_normalize="true" \\
    algorithm.rollout_correction.rollout_rs="token_k1,seq_max_k2" \\
    algorithm.rollout_correction.rollout_rs_threshold="0.5_2.0,2.5" \\
    algorithm.rollout_correction.bypass_mode="true" \\     # important
    algorithm.rollout_correction.loss_type="reinforce" \\
    trainer.logger='["console","wandb"]' \\
    # ... and so on
"""


def test_a_shell_script(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    assert main(["convert", str(path)]) == 0
    output = capsys.readouterr()
    assert yaml.safe_load(output.out) == {
        "rollout_is": "sequence", "rollout_is_threshold": 3.0, "rollout_is_batch_normalize": True,
        "rollout_rs": ["token_k1", "seq_max_k2"], "rollout_rs_threshold": [[0.5, 2.0], 2.5],
        "bypass_mode": True, "rollout_loss_type": "reinforce",
    }  # fmt: skip
    assert f"{path}:8: `algorithm.adv_estimator` is left out: train with `RolloutCorrectedRLOOTrainer`" in output.err
    path.write_text(SCRIPT.replace("0.5_2.0,2.5", "0.5_2.0"))
    assert main(["convert", str(path)]) == 2
    assert "line 13: `rollout_rs_threshold`" in capsys.readouterr().err


VARIABLES = """
export NCCL_DEBUG=WARN
bound=3.0
adv_estimator=gae
gamma=0.99
lam=0.95
LR=1e-6
rollout_is="sequence"
rollout_is_threshold=${bound}
rollout_rs="null"
bypass_mode="false"   # several epochs
ppo_epochs=4
seed=7
"""


def test_variables_of_a_script_are_not_lost(tmp_path, capsys):
    path = tmp_path / "lines.sh"
    path.write_text(VARIABLES)
    assert main(["convert", str(path)]) == 0
    output = capsys.readouterr()
    assert yaml.safe_load(output.out) == {"rollout_is": "sequence", "rollout_is_threshold": 3.0}
    found = [line.removeprefix(f"warning: {path}:") for line in output.err.splitlines()]
    assert [line.split(".")[0] for line in found] == [
        "4: `adv_estimator` is left out: TRL has neither GAE nor a value model",
        "5: `gamma` is left out: it discounts rewards per token, and TRL's trainers give one reward to the whole completion",
        "6: `lam` is left out: it is a parameter of GAE, which TRL does not have",
        "7: `LR` is left out: TRL has `learning_rate`",
        "12: `ppo_epochs` is left out: TRL has `num_iterations`",
        "2: `NCCL_DEBUG`, `seed` are left out: they are not about rollout correction",
    ]


def test_variables_alone_are_no_settings_of_rollout_correction(tmp_path, capsys):
    path = tmp_path / "lines.sh"
    path.write_text("adv_estimator=rloo   # or grpo\ngamma=1.0\n")
    assert main(["convert", str(path)]) == 2
    assert "it has no settings of rollout correction" in capsys.readouterr().err


NAMES = ["rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold", "bypass_mode", "loss_type"]
GOOD = dict(zip(NAMES, ["sequence", "3.0", "seq_max_k2", "2.5", "true", "reinforce"], strict=True))
ELSEWHERE = [
    "algorithm.adv_estimator", "algorithm.gamma", "algorithm.new", "actor_rollout_ref.actor.optim.lr", "trainer.logger",
    "actor_rollout_ref.actor.optim.weight_decay", "critic.optim.lr", "data.train_files", "reward.a.b.c", "lone", "Seed",
    "actor_rollout_ref.actor.ess_scaling.scaling_rule",
]  # fmt: skip


def nested(settings: dict) -> dict:
    document: dict = {}
    for name, value in settings.items():
        *above, last = name.split(".")
        section = document
        for part in above:
            section = section.setdefault(part, {})
        section[last] = value
    return document


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    above=st.sampled_from(["algorithm.rollout_correction.", "rollout_correction.", "algorithm.", ""]),
    ours=st.sets(st.sampled_from([name for name in NAMES if "rs" not in name]), min_size=1).map(
        lambda x: {*x, *NAMES[:1]}
    ),
    rejects=st.booleans(),
    others=st.sets(st.sampled_from(ELSEWHERE)),
    script=st.booleans(),
    shuffle=st.randoms(),
)
def test_no_setting_disappears(tmp_path, capsys, above, ours, rejects, others, script, shuffle):
    """Each is in the YAML, or a message names it in full."""
    section = {above + name: GOOD[name] for name in NAMES if name in ours or (rejects and "rs" in name)}
    pairs = [*section.items(), *((name, "3") for name in others)]
    shuffle.shuffle(pairs)
    path = tmp_path / "old"
    path.write_text(
        "\n".join(f"{name}={value}" for name, value in pairs) if script else yaml.safe_dump(nested(dict(pairs)))
    )
    assert main(["convert", str(path)]) == 0
    output = capsys.readouterr()
    assert "unexpected" not in output.err
    written = {name.replace("rollout_loss", "loss") for name in yaml.safe_load(output.out)}
    for name in section:
        last = name.removeprefix(above)
        assert last in written or f"`{last}`" in output.err
    assert all(f"`{name}`" in output.err for name in others)


def test_a_line_with_an_open_quote_is_read(tmp_path, capsys):
    path = tmp_path / "lines.sh"
    path.write_text("echo it's\nrollout_is='token\nactor_rollout_ref.actor.optim.lr=1e-6 trainer.logger='[\"a\",\n")
    assert main(["convert", str(path)]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("rollout_is: token\n")
    assert "`actor_rollout_ref.actor.optim.lr`" in output.err
    assert "`trainer.logger`" in output.err


def test_of_a_key_that_is_written_twice_the_last_one_counts_and_that_is_said(tmp_path, capsys):
    path = tmp_path / "old.yaml"
    path.write_text("rollout_correction:\n  rollout_is: token\n  rollout_is: sequence\n  rollout_is_threshold: 2.0\n")
    assert main(["convert", str(path)]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("rollout_is: sequence\n")
    assert output.err == f"warning: {path}:2: `rollout_is` has no effect: line 3 sets it again.\n"


ALIASES = "\n".join(
    ["a0: &a0 [1, 1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)), "rollout_is: token"]
)
MERGES = "\n".join(
    [
        "a0: &a0 {x: 1}",
        *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 10)),
        "rollout_is: token",
    ]
)


@pytest.mark.parametrize(
    "text", [ALIASES, MERGES, "a: &a [*a]\nrollout_is: token", "a: &a {b: *a}\nrollout_is: token"]
)
def test_nested_aliases_are_refused(tmp_path, capsys, text):
    path = tmp_path / "old.yaml"
    path.write_text(text)
    assert main(["convert", str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{path}: its aliases (`*name`) stand for too many values")
    with pytest.raises(ValueError, match="its aliases"):
        read_config(str(path))


def test_a_few_aliases_are_read(tmp_path, capsys):
    path = tmp_path / "old.yaml"
    path.write_text("x: &x {rollout_is: token, rollout_is_threshold: 2.0}\nalgorithm:\n  rollout_correction: *x\n")
    assert main(["convert", str(path)]) == 0
    assert capsys.readouterr().out == "rollout_is: token\nrollout_is_threshold: 2.0\n"


def test_pipes_and_devices_are_refused(tmp_path, capsys, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (str(pipe), "/dev/zero", str(tmp_path)):
        assert main(["convert", path]) == 2
        assert capsys.readouterr().err.startswith(f"{path}: it is a ")
    large = tmp_path / "large"
    large.write_text("#" * 2_000_000)
    assert main(["convert", str(large)]) == 2
    with open("/dev/zero") as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        assert main(["convert", "-"]) == 2
    assert capsys.readouterr().err.count("more than 1,000,000 characters") == 2


def test_lines_of_a_readme(tmp_path, capsys):
    path = tmp_path / "lines.sh"
    path.write_text(
        'rollout_is="null"   # no weights\nrollout_rs="token_k1,sequence"\nrollout_rs_threshold="0.8_1.6,2.0"\n'
    )
    assert main(["convert", str(path)]) == 0
    output = capsys.readouterr()
    # today's name bounds the inverse of the ratio, the first one the ratio itself
    assert yaml.safe_load(output.out) == {
        "rollout_is": None, "rollout_rs": ["token_k1", "seq_sum_k1"], "rollout_rs_threshold": [[0.625, 1.25], [0.5, 2.0]]
    }  # fmt: skip
    assert "`token_k1` to the inverse" in output.err


@pytest.mark.parametrize(
    "line",
    [
        "rollout_is_threshold=2.0   # a bound",
        'rollout_is_batch_normalize="true"',
        'rollout_rs_threshold="0.6_1.6"',
        'rollout_rs_threshold="2.5"',
        'loss_type="reinforce"',
        'algorithm.rollout_correction.use_pure_rollout_correction="true"',
    ],
)
def test_a_line_of_a_readme_that_does_nothing_alone_says_so(tmp_path, capsys, line):
    path = tmp_path / "lines.sh"
    path.write_text(f"# of a table\n{line}\n")
    assert main(["convert", str(path)]) == 0
    output = capsys.readouterr()
    name = line.split("=")[0].split(".")[-1]
    assert output.out == "rollout_is: null\n"
    assert output.err.startswith(f"warning: {path}:2: `{name}` is set to ")
    assert " but has no effect: " in output.err
    assert len(output.err.splitlines()) == 1


def test_of_a_line_that_is_written_again_the_last_one_counts_and_that_is_said(tmp_path, capsys):
    path = tmp_path / "lines.sh"
    path.write_text('rollout_rs="token_k2"\nrollout_rs_threshold=0.1\nrollout_rs="null"\nrollout_rs="null"\n')
    assert main(["convert", str(path)]) == 0
    output = capsys.readouterr()
    assert output.out == "rollout_is: null\n"
    assert f"{path}:1: `rollout_rs` has no effect: line 4 sets it again." in output.err
    assert f"{path}:2: `rollout_rs_threshold` is set to '0.1' but has no effect" in output.err
    assert len(output.err.splitlines()) == 2  # to the same value again is no matter


def test_criteria_of_ours_keep_their_bounds(tmp_path, capsys):
    path = tmp_path / "old.yaml"
    section = "rollout_rs: [token_tv, token_kl, token_k1]\n    rollout_rs_threshold: [0.2, 0.05, [0, 5]]\n"
    path.write_text(f"algorithm:\n  rollout_correction:\n    {section}")
    assert main(["convert", str(path)]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert yaml.safe_load(output.out)["rollout_rs_threshold"] == [[0.2, 0.2], [0.05, 0.05], [0.0, 5.0]]
    path.write_text(path.read_text().replace("0.2, 0.05", "5, 0.05"))
    assert main(["convert", str(path)]) == 2
    assert "line 4: `rollout_rs_threshold` for `token_tv`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("decoupled_k3_rs", {"rollout_correction": "decoupled_k3_rs"}),
        ("token_is", {"rollout_correction": "decoupled_token_is"}),
        ("seq_mis", {"rollout_correction": "decoupled_seq_is_rs", "rollout_rs_threshold": [[0.0, 2.0]]}),
    ],
)
@pytest.mark.parametrize("text", ["algorithm:\n  rollout_correction: {}\n", "algorithm.rollout_correction={}"])
def test_the_name_of_a_preset_in_the_place_of_verl(tmp_path, capsys, text, name, fields):
    path = tmp_path / "old"
    path.write_text(text.format(name))
    assert main(["convert", str(path)]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == fields


@pytest.mark.parametrize(
    "text", ["algorithm:\n  rollout_is: true\n", "algorithm:\n  rollout_correction:\n    rollout_is: true\n"]
)
def test_a_switch_without_a_threshold_is_off_and_says_so(tmp_path, capsys, text):
    path = tmp_path / "old.yaml"
    path.write_text(text)
    assert main(["convert", str(path)]) == 0
    output = capsys.readouterr()
    assert output.out == "rollout_correction: disabled\n"
    assert "`rollout_is_threshold` is missing, which switched everything off in verl" in output.err


@pytest.mark.parametrize(
    "recipe", ["recipes/grpo/token_is.yaml", "recipes/rloo/geo_rs_token_tis.yaml", "recipes/grpo/multi_rs.yaml"]
)
def test_a_recipe_of_ours_needs_no_conversion(capsys, recipe):
    assert main(["convert", str(ROOT / recipe)]) == 2
    assert "already a configuration of this package" in capsys.readouterr().err


def test_differences_are_warned_about_beside_the_yaml(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(yaml.safe_dump({**VERL, "rollout_rs_threshold": "0.6_1.6"})))
    assert main(["convert", "-"]) == 0
    output = capsys.readouterr()
    assert yaml.safe_load(output.out)["rollout_rs_threshold"] == [[0.625, pytest.approx(1 / 0.6)]]
    assert output.err.startswith("warning: -:4: verl applies the bounds of `token_k1` to the inverse of the ratio")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has no settings of rollout correction"),
        (b"learning_rate: 1", "it has no settings of rollout correction"),
        (b"- 1\n- 2", "it has no settings of rollout correction"),
        (b"a: [1", "line 1: not YAML: expected"),
        (b"\xff\xfe\x00", "not YAML"),
        (b"rollout_correction: {rollout_is: word}", "`rollout_is` must be one of token"),
        (
            b"rollout_correction: {rollout_iss: token}",
            "line 1: `rollout_iss` is 'token', which does not belong to a verl",
        ),
        (b"rollout_correction: {rollout_is: token, rollout_is_threshold: [1, 2, 3]}", "`rollout_is_threshold`"),
        (b"rollout_is_level: word\nrollout_is_threshold: 2", "`rollout_is_level` must be one of"),
        (b"rollout_is_level: [token]\nrollout_is_threshold: 2", "`rollout_is_level` must be one of"),
        (
            b"rollout_rs: [[token_k1]]\nrollout_rs_threshold: 2.0",
            "line 1: `rollout_rs` must be a list of names, got [['token_k1']]. Write the names in one list, such as ",
        ),
        (b"rollout_rs: 5\nrollout_rs_threshold: 2.0", "line 1: `rollout_rs` must be a list of names, got 5"),
        (b"algorithm: {rollout_correction: [token_is]}", "it has no settings of rollout correction"),
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


def test_a_refused_value_of_another_name_has_its_line(tmp_path, capsys):
    path = tmp_path / "verl.yaml"
    path.write_text("rollout_correction:\n  bypass_mode: true\n  rollout_rs: null\n  loss_type: pg\n")
    assert main(["convert", str(path)]) == 2
    assert "line 4: `rollout_loss_type` must be one of ppo_clip, reinforce, got 'pg'" in capsys.readouterr().err


def test_the_document_has_the_counterparts_that_convert_names():
    """Each setting stands in the table, in a row with the names of TRL that the message has."""
    text = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    table = text.split("## Settings outside the section")[1].split("\n## ")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]
    rows = [(cell.split(" times ")[0], theirs) for cell, theirs in rows]
    for setting, message in COUNTERPARTS.items():
        [(_, theirs)] = [row for row in rows if f"`{setting}`" in row[0]]
        for name in re.findall(r"TRL(?:'s| has) `([^`]+)`", message):
            assert f"`{name}" in theirs
    named = {name.split("=")[0] for cell, _ in rows for name in re.findall(r"`([a-z]+\.[\w.]+)", cell)}
    assert named - COUNTERPARTS.keys() == {"algorithm.adv_estimator"}


def test_a_variable_may_have_the_name_of_a_setting(tmp_path, capsys):
    script = tmp_path / "run.sh"
    section = "algorithm.rollout_correction"
    script.write_text(
        f"rollout_is=token\npython -m verl {section}.rollout_is=$rollout_is {section}.rollout_is_threshold=3\n"
    )
    assert main(["convert", str(script)]) == 0
    found = capsys.readouterr()
    assert found.out.splitlines()[:2] == ["rollout_is: token", "rollout_is_threshold: 3.0"]
    assert "left out" not in found.err
    script.write_text(f"rollout_is=token\npython -m verl {section}.bypass_mode=true\n")
    assert main(["convert", str(script)]) == 0
    expected = f"{script}:1: `rollout_is` is left out, because the settings of `{section}` are translated."
    assert expected in capsys.readouterr().err
