"""Scripts say what is wrong in one line, once, before anything is loaded."""

import re
import time

import pytest

from tests.launching import ACCELERATE, run
from trl_rollout_corr import RolloutCorrectedGRPOConfig
from trl_rollout_corr.commands import script
from trl_rollout_corr.commands.script import ScriptParser, one_line_errors


@pytest.fixture
def parse(tmp_path):
    def parse(*options: str) -> RolloutCorrectedGRPOConfig:
        on_a_cpu = ["--use_cpu", "true", "--bf16", "false", "--output_dir", str(tmp_path)]
        (config,) = ScriptParser((RolloutCorrectedGRPOConfig,)).parse_args_and_config([*on_a_cpu, *options])
        return config

    return parse


@pytest.mark.parametrize(
    ("options", "description"),
    [
        (
            ["--rollout_rs", "token_k1", "seq_max_k2", "--rollout_rs_threshold", "0.6_1.6", "2.5"],
            "ratio is outside [0.6, 1.6] (token_k1), and c",
        ),
        (["--rollout_rs", "token_k1,seq_max_k2", "--rollout_rs_threshold", "0.6_1.6,2.5"], "max k2 is above 2.5 (seq_max_k2)"),
        (["--rollout_rs", "token_k1", "token_k2", "--rollout_rs_threshold", "[[0.9,1.1],0.1]"], "k2 is above 0.1 (token_k2)"),
        (["--rollout_rs", "seq_mean_k1", "--rollout_rs_threshold", "0.9", "1.1"], "mean ratio is outside [0.9, 1.1]"),
        (["--rollout_rs", "seq_max_k1", "--rollout_rs_threshold", "1e-4", "inf"], "tokens have a ratio below 0.0001"),
        (["--rollout_is", "token", "--rollout_is_threshold", "0.5", "5"], "each token is weighted by its ratio (trainer to sampler), or by 0 outside [0.5, 5]"),
        (["--rollout_is", "token", "--rollout_is_threshold", "[0.5,5]"], "each token is weighted by its ratio (trainer to sampler), or by 0 outside [0.5, 5]"),
        (["--rollout_is", "token", "--rollout_is_threshold", "3"], "each token is weighted by its ratio (trainer to sampler) up to 3"),
        (["--rollout_is", "none"], "no correction"),
        (["--rollout_correction", "none"], "no correction"),
        (["--bypass_mode"], "PPO clips around the sampler"),
    ],
)
def test_lists_and_pairs_work_as_help_shows_them(parse, options, description):
    assert description in parse(*options).description


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--rollout_iss", "token"],
            "`rollout_iss` in the command line is not an option .* Did you mean 'rollout_is'?",
        ),
        (
            ["--rollout_correction", "decoupled_token_i"],
            "`rollout_correction` is .* Did you mean 'decoupled_token_is'?",
        ),
        (
            ["--rollout_rs", "token_k9", "--rollout_rs_threshold", "2"],
            "'token_k9' is not a criterion. Did you mean 'token_k",
        ),
        (["--rollout_nan_policy", "dropp"], "Did you mean 'drop'?"),
        (["--rollout_monitor_bounds", '{"k3_hihg": 1}'], "Did you mean 'k3_high'?"),
        (["--max_steps", "three"], "argument --max_steps/--max-steps: invalid int value: 'three'"),
        (["--config"], "`--config` is set without a value. Name a YAML file after it."),
        (["--config=/no/such.yaml"], "/no/such.yaml: No such file or directory"),
        (["--config", "{bad}"], "while parsing a flow sequence"),
        (
            ["--config", "{misspelt}"],
            "`rollout_corection` in .*misspelt.yaml is not an option .* 'rollout_correction'?",
        ),
        (["grpo"], "`grpo` in the command line is not an option of this script. An option starts with --."),
    ],
)
def test_what_cannot_be_used_is_one_line(parse, tmp_path, capsys, options, message):
    for name, text in (("bad", "a: [1\nb: 2\n"), ("misspelt", "rollout_corection: token_is\n")):
        (tmp_path / f"{name}.yaml").write_text(text)
        options = [option.replace(f"{{{name}}}", str(tmp_path / f"{name}.yaml")) for option in options]
    with pytest.raises(SystemExit) as ended, one_line_errors():
        parse(*options)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert re.search(message.replace("?", r"\?"), line), line


def test_the_other_ranks_let_the_first_speak(parse, capsys, monkeypatch):
    monkeypatch.setattr(script, "_PATIENCE", 0.2)
    monkeypatch.setenv("RANK", "1")
    began = time.monotonic()
    with pytest.raises(SystemExit), one_line_errors():
        parse("--rollout_iss", "token")
    assert time.monotonic() - began >= 0.2
    assert "error: " in capsys.readouterr().err  # nobody has ended it: the fault is this rank's alone


def test_other_errors_keep_their_traceback():
    with pytest.raises(ValueError, match="of the user"), one_line_errors(of_package=True):
        raise ValueError("of the user")
    with pytest.raises(KeyError), one_line_errors():
        raise KeyError("a fault of the code")


@pytest.mark.filterwarnings("always:::trl_rollout_corr")
def test_warnings_of_the_package_are_one_line(parse, capsys):
    with one_line_errors():
        parse("--rollout_correction", "disabled", "--rollout_is_clamp", "true")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "rollout" in line]
    assert line.startswith("warning: `rollout_is_clamp` is set to True but has no effect: ")


@pytest.mark.slow
def test_two_ranks_say_it_once():
    process = run(
        ACCELERATE, "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
        "--dynamo_backend", "no", "--main_process_port", "0", "examples/grpo.py", "--rollout_iss", "token",
        "--use_cpu", "true", "--bf16", "false",
    )  # fmt: skip
    assert process.returncode != 0
    assert process.stderr.count("error: `rollout_iss` in the command line is not an option of this script.") == 1
    assert 'examples/run.py", line' not in process.stderr  # no traceback of ours; the launcher adds one of its own
