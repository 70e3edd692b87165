"""`trl-rollout-corr convert`: every configuration of verl's documents, and files of TRL and Axolotl."""

import io
import math
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml

from tests.launching import ROOT, run
from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.tools.translation.counterparts import COUNTERPARTS
from trl_rollout_corr.tools.translation.of_trl import from_trl
from trl_rollout_corr.tools.translation.verl import from_verl


INF = math.inf
SECTION = "algorithm.rollout_correction"
TOKEN = {"rollout_is": "token", "rollout_is_threshold": 2.0}


@pytest.fixture
def convert(capsys, monkeypatch):
    """Convert a file by its text, or arguments, and return the YAML, the warnings and the text."""

    def converted(given: str | list[str]) -> tuple[dict, list[str], str]:
        if isinstance(given, str):
            monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        code = main(["convert", *(["-"] if isinstance(given, str) else given)])
        output = capsys.readouterr()
        assert code == 0, output.err
        return yaml.safe_load(output.out), output.err.splitlines(), output.out

    return converted


@pytest.fixture
def refusal(capsys, monkeypatch):
    """The one line about a file by its text, or about arguments, that cannot be converted."""

    def refused(given: str | list[str]) -> str:
        if isinstance(given, str):
            monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        assert main(["convert", *(["-"] if isinstance(given, str) else given)]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        [line] = [line for line in output.err.splitlines() if not line.startswith("warning: ")]
        assert "unexpected" not in line
        return line

    return refused


def in_shell(script: str) -> list[str]:
    """Arguments that a script passes to `trl-rollout-corr convert`, which stands in the place of verl's command."""
    script = script.replace("python3 -m verl.trainer.main_ppo", "trl-rollout-corr convert")
    show = 'trl-rollout-corr() { shift; printf "%s\\0" "$@"; }\n'
    output = subprocess.run(["bash", "-c", show + script], capture_output=True, text=True, check=True).stdout
    return output.split("\0")[:-1]


# Lines of settings, as a shell reads them
BLOCK = 'settings=(\n{}\n)\ntrl-rollout-corr convert "${{settings[@]}}"'


# Documents of verl ----------------------------------------------------------------------------------------------------

EXAMPLES = yaml.safe_load((ROOT / "tests/verl_examples.yaml").read_text(encoding="utf-8"))


@pytest.mark.filterwarnings("ignore:`rollout_rs_threshold` for 'seq_mean_k1'")
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_the_documents(convert, name):
    example = EXAMPLES[name]
    given = example.get("yaml") or in_shell(example.get("script") or BLOCK.format(example["block"]))
    written, said, text = convert(given)
    assert written == {"use_vllm": True, **example["fields"]}
    for part, line in zip(example.get("says", []), said, strict=True):
        assert part in line
    trainer = f"# for {example['trainer']}\n" if "trainer" in example else ""
    assert text.startswith(f"{trainer}use_vllm") or name == "the algorithm"


def test_both_meanings_of_the_first_mask_give_the_same_coefficients():
    train = torch.tensor([[0.3, -0.5, 1.9], [0.1, 0.0, -0.1]])
    removed = RolloutCorrectionConfig(**from_verl(yaml.safe_load(EXAMPLES["asymmetric"]["yaml"])["algorithm"]))
    zeroed = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=[0.8, 5.0])
    coefficients = [
        compute_rollout_correction(train, torch.zeros(2, 3), torch.ones(2, 3), config).coefficients
        for config in (removed, zeroed)
    ]
    assert torch.equal(*coefficients)


GEO = {"rollout_correction": "decoupled_geo_rs", "rollout_rs": ["seq_mean_k1", "seq_max_k1"]}
PRESETS = {
    "token_is": {"rollout_correction": "decoupled_token_is"},
    "token_tis": {"rollout_correction": "decoupled_token_is"},
    "seq_is": {"rollout_correction": "decoupled_seq_is"},
    "seq_is_rs": {"rollout_correction": "decoupled_seq_is_rs"},
    "seq_mis": {"rollout_correction": "decoupled_seq_is_rs", "rollout_rs_threshold": [[0.0, 2.0]]},
    "geo_rs": {**GEO, "rollout_rs_threshold": [[1 / 1.001, 1.001], [1e-4, INF]]},
    "geo_mis": {**GEO, "rollout_rs_threshold": [[0.999, 1.001], [1e-4, INF]]},
    "ppo_is_bypass": {"rollout_correction": "bypass_ppo_clip", **TOKEN},
    "pure_is": {"rollout_correction": "bypass_pg_is"},
    "disabled": {"rollout_correction": "disabled"},
    "decoupled_k3_rs": {"rollout_correction": "decoupled_k3_rs"},  # of today
}


@pytest.mark.parametrize("name", PRESETS)
def test_names_of_presets(convert, name):
    assert convert([f"{SECTION}={name}"])[0] == {"use_vllm": True, **PRESETS[name]}


# What the shell and Hydra do ------------------------------------------------------------------------------------------


def test_the_command_in_a_script(tmp_path):
    """The shell expands variables with defaults, arrays and branches."""
    script = tmp_path / "run.sh"
    script.write_text(
        "#!/usr/bin/env bash\nset -euo pipefail\n"
        f"correction=({SECTION}.rollout_is=token {SECTION}.rollout_is_threshold=${{BOUND:-3.0}})\n"
        f'if [ "${{OLD:-no}}" = yes ]; then correction+=({SECTION}.bypass_mode=True); else correction+=(a.b=1); fi\n'
        f"MORE='algorithm.adv_estimator=grpo +actor_rollout_ref.rollout.n=8'\n"
        f'{sys.executable} -m trl_rollout_corr convert --config-path=config --config-name ppo "${{correction[@]}}" $MORE \\\n'
        f"  ++{SECTION}.bypass_mode=${{BYPASS:-False}} {SECTION}.rollout_rs=\\'token_k1,seq_max_k2\\' \\\n"
        f'  {SECTION}.rollout_rs_threshold="0.5_2.0,2.5"\n'
    )
    process = run("bash", str(script))
    assert process.returncode == 0, process.stderr
    assert yaml.safe_load(process.stdout) == {
        "use_vllm": True, "rollout_is": "token", "rollout_is_threshold": 3.0, "rollout_rs": ["token_k1", "seq_max_k2"],
        "rollout_rs_threshold": [[0.5, 2.0], 2.5], "num_generations": 8,
    }  # fmt: skip
    assert process.stderr.splitlines() == [
        "warning: --config-path=config --config-name ppo: options of Python and Hydra are left out. A file that they name is "
        "not read.",
        "warning: `a.b` is left out: not about rollout correction.",
    ]


TRUE, FALSE = ("true", "True", "yes", "on", "TRUE"), ("false", "False", "no", "off", "FALSE")


@pytest.mark.parametrize("word", [*TRUE, *FALSE, True, False])
def test_truth_is_read_as_yaml_reads_it(convert, word):
    expected = word in TRUE or word is True
    given = f"rollout_correction: {{rollout_is: token, bypass_mode: {word!r}}}"
    assert convert(given)[0].get("bypass_mode", False) == expected
    assert convert([f"{SECTION}.bypass_mode={word}"])[0].get("bypass_mode", False) == expected
    first = {"rollout_is": word, "rollout_is_threshold": 2.0}
    assert from_verl(first).get("rollout_metrics_only", False) != expected
    scaled = convert([f"algorithm.norm_adv_by_std_in_grpo={word}", "rollout_is=token"])[0]["scale_rewards"]
    assert scaled == ("group" if expected else "none")


REFUSED = {
    "no truth": (["rollout_is=token", f"{SECTION}.bypass_mode=0"], "`bypass_mode` must be true or false, got '0'"),
    "no truth elsewhere": (["actor_rollout_ref.actor.use_kl_loss=1"], "`actor.use_kl_loss` must be true or false"),
    "a variable": (
        [f"{SECTION}.bypass_mode=${{BYPASS_MODE:-False}}"],
        "`bypass_mode` is '${BYPASS_MODE:-False}', which is not expanded. The shell must expand it",
    ),
    "a variable that is not set": (["rollout_is=token", f"{SECTION}.rollout_is_threshold="], "` is '', which is empty."),
    "a quoted variable": (
        ["algorithm.adv_estimator=grpo rollout_is=token"], "`algorithm.adv_estimator` is 'grpo rollout_is=token', which h"
    ),
    "a backslash and a blank": (["rollout_is=token", " "], "' ': it is neither `key=value` nor an option"),
    "a file and arguments": (["old.yaml", "rollout_is=token"], "'old.yaml': it is neither `key=value` nor an option"),
    "a misspelt key": (["rollout_is=token", "bypas_mode=true"], "`bypas_mode` is 'true', which verl does not have. Did yo"),
    "no number": (["rollout_is=token", "rollout.n=many"], "`rollout.n` must be a number, got 'many'"),
    "nothing": ([], "it has no settings of verl"),
    "no YAML": ("a: [1", "line 1: not YAML: expected"),
    "another key": ("rollout_correction: {rollout_iss: token}", "`rollout_iss` is 'token', which does not belong to a verl"),
    "no section": ("algorithm: {rollout_correction: [token_is]}", "`rollout_correction` must be a section, the name"),
    "three bounds": ("rollout_correction: {rollout_is: token, rollout_is_threshold: [1, 2, 3]}", "`rollout_is_threshold`"),
    "a level of none": ("rollout_is_level: [token]\nrollout_is_threshold: 2", "`rollout_is_level` must be one of"),
    "a mode of none": ("rollout_is_mode: zero\nrollout_is_threshold: 2", "`rollout_is_mode` must be 'truncate'"),
    "two generations": ("rollout_is_level: token\nrollout_rs: token_k1", "does not belong to the `rollout_is*` keys"),
    "a nested list": ("rollout_rs: [[token_k1]]\nrollout_rs_threshold: 2.0", "`rollout_rs` must be a list of names"),
    "TRL's own": ("vllm_importance_sampling_mode: turn_mask", "must be token_truncate"),
    "TRL's own beside ours": ("rollout_correction: trl\nvllm_importance_sampling_mode: token_mask", "fields of this package"),
    "unknown of TRL's": ("vllm_importance_sampling_x: 1", "does not belong to TRL"),
    "shell": ("#!/bin/bash\npython3 -m verl.trainer.main_ppo a=1", "This is a shell script: put `trl-rollout-corr convert`"),
    "lines": ("rollout_is=token\nrollout_is_threshold=2.0", "This is a shell script: put `trl-rollout-corr convert`"),
    "Python": ("from verl import x\nconfig.rollout_is = True", "This is a Python file: copy its settings into a YAML file"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_one_line(refusal, name):
    given, message = REFUSED[name]
    assert message in refusal(given)


def test_files(capsys, tmp_path):
    assert main(["convert", str(tmp_path / "missing.yaml")]) == 2
    assert capsys.readouterr().err.endswith("missing.yaml: No such file or directory\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert main(["convert", str(tmp_path / "bytes")]) == 2
    assert "not YAML" in capsys.readouterr().err
    for recipe in ("grpo/token_is.yaml", "rloo/geo_rs_token_tis.yaml", "grpo/multi_rs.yaml"):
        assert main(["convert", str(ROOT / "recipes" / recipe)]) == 2
        assert "needs no conversion" in capsys.readouterr().err
    assert main(["convert", str(Path(__file__))]) == 2
    assert f"{__file__}: This is a Python file" in capsys.readouterr().err


# Settings of verl outside the section ---------------------------------------------------------------------------------


def test_the_lines_of_trl(convert):
    settings = {
        "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False, "rollout_correction": TOKEN},
        "actor_rollout_ref": {
            "model": {"path": "m"},
            "actor": {"optim": {"lr": "1e-6"}, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0, "grad_clip": 0.5,
                      "ppo_epochs": 2, "use_kl_loss": True, "kl_loss_coef": 0.01, "loss_agg_mode": "seq-mean-token-mean"},
            "rollout": {"n": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1,
                        "max_model_len": None, "quantization": "fp8", "enable_rollout_routing_replay": True,
                        "presence_penalty": 0.5},
        },
        "data": {"max_response_length": 1024, "train_files": "x"}, "trainer": {"total_epochs": 15, "nnodes": 1},
    }  # fmt: skip
    written, said, text = convert(yaml.safe_dump(settings, sort_keys=False))
    assert written == {
        "use_vllm": True, **TOKEN, "model_name_or_path": "m", "learning_rate": 1e-6, "epsilon_high": 0.28, "delta": 10,
        "max_grad_norm": 0.5, "num_iterations": 2, "beta": 0.01, "loss_type": "grpo", "scale_rewards": "none",
        "num_generations": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1,
        "max_completion_length": 1024, "num_train_epochs": 15,
    }  # fmt: skip
    distorting = [line for line in text.splitlines() if "changes what vLLM samples but not what the trainer" in line]
    assert [line.split(":")[0] for line in distorting] == ["top_p", "top_k", "repetition_penalty"]
    assert [line.split(" ")[1] for line in said] == [
        "`actor_rollout_ref.rollout.quantization`", "`actor_rollout_ref.rollout.enable_rollout_routing_replay`",
        "`actor_rollout_ref.rollout.presence_penalty`", "`data.train_files`,",
    ]  # fmt: skip
    assert "not quantised" in said[0]
    assert "`rollout_routing: replay`" in said[1]
    assert said[3] == "warning: `data.train_files`, `trainer.nnodes` are left out: not about rollout correction."


KL = ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.01"]


@pytest.mark.parametrize(
    ("arguments", "written", "said"),
    [
        (["rollout.top_k=-1", "rollout.top_p=1.0"], {"top_k": 0, "top_p": 1}, []),
        (["actor.clip_ratio_low=0.1"], {"epsilon": 0.1, "epsilon_high": 0.2}, []),  # TRL's default would be 0.1
        (["actor.clip_ratio_c=4"], {"delta": 4}, []),
        (["actor.clip_ratio_c=4", "clip_ratio_c=5"], {"delta": 5}, ["another key sets `delta` to 4"]),
        (["actor.clip_ratio_c=4", "adv_estimator=rloo"], {"beta": 0}, ["TRL's RLOO has no such bound"]),
        (["actor.loss_agg_mode=token-mean"], {"loss_type": "dapo"}, []),
        (["actor.loss_agg_mode=seq-mean-token-sum"], {}, ["`loss_type: dr_grpo` is the nearest"]),
        (KL, {"beta": 0.01}, []),
        (KL[:1], {"beta": 0.001}, []),
        (KL[1:], {}, ["kl_loss_coef` is left out: it acts with `use_kl_loss`"]),
        (["actor.use_kl_loss=False"], {}, []),
        ([*KL, "adv_estimator=rloo"], {}, ["use_kl_loss` is left out: set `beta`", "kl_loss_coef` is left out"]),
        (["adv_estimator=rloo"], {"beta": 0}, []),  # TRL's default is above 0
        (["algorithm.gamma=0.9"], {}, ["`algorithm.gamma` is left out: not about rollout correction"]),
    ],
)
def test_lines_of_trl_that_need_a_rule(convert, arguments, written, said):
    result, lines, _ = convert(["rollout_is=token", *arguments])
    assert result == {"use_vllm": True, **TOKEN, **written}
    assert [any(text in line for line in lines) for text in said] == [True] * len(said)
    assert len(lines) == len(said)


def test_the_lines_of_trl_are_fields_of_trl():
    from trl import GRPOConfig, ModelConfig

    fields = GRPOConfig.__dataclass_fields__.keys() | ModelConfig.__dataclass_fields__
    assert {field for field, _ in COUNTERPARTS.values() if field} <= fields


# Rules of verl's section ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:verl applies")
def test_a_ported_run_rejects_what_verl_rejected():
    # measured on verl 0.9.1 with token_k1 0.6_1.6
    ratios, kept = torch.tensor([[0.61, 0.63, 1.62, 1.66, 1.70]]), [False, True, True, True, False]
    config = RolloutCorrectionConfig(**from_verl({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.6"}))
    keep = compute_rollout_correction(ratios.log(), torch.zeros(1, 5), torch.ones(1, 5), config).keep
    assert keep.tolist() == [kept]


@pytest.mark.parametrize(
    ("criterion", "bounds", "read", "inverted"),
    [
        ("seq_sum_k1", "0.5_inf", [0.0, 2.0], True),
        ("seq_sum_k1", "0.5_2.0", [0.5, 2.0], False),
        ("token", "0.6_1.6", [0.6, 1.6], False),  # by their first names, the bounds are on the ratio
        ("seq_max_k1", "0.6_1.6", [0.6, 1.6], False),  # verl does not have it
        ("token_k1", [0.0, 5.0], [0.0, 5.0], False),  # verl refuses a lower bound of 0
        ("token_tv", "0.1_0.3", [0.1, 0.3], False),
        ("token_k2,token_k2", "0.1", 0.1, False),  # verl drops repeated names
    ],
)
def test_bounds_of_criteria(criterion, bounds, read, inverted):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fields = from_verl({"rollout_rs": criterion, "rollout_rs_threshold": bounds})
    assert fields["rollout_rs_threshold"] == [read]
    assert ["to the inverse of the ratio" in str(warning.message) for warning in caught] == [True] * inverted


def test_the_first_version_of_the_section():
    fields = from_verl(
        {"_target_": "verl.x", "rollout_is": None, "rollout_rs": "geometric", "rollout_rs_threshold": 1.001,
         "rollout_rs_threshold_lower": 0.9, "rollout_token_veto_threshold": 1e-4, "bypass_old_logprob_for_rollout": True,
         "use_pure_rollout_correction": True}
    )  # fmt: skip
    assert fields == {
        "rollout_is": None, "rollout_rs": ["seq_mean_k1", "seq_max_k1"], "rollout_rs_threshold": [[0.9, 1.001], [1e-4, INF]],
        "bypass_mode": True, "rollout_loss_type": "reinforce",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"rollout_is": "token", "rollout_is_threshold": None}, "`rollout_is_threshold` is null, which makes verl compute no"),
        ({"use_pure_rollout_correction": True}, "`use_pure_rollout_correction` is set to True but has no effect: `byp"),
        ({"loss_type": "reinforce"}, "`loss_type` is set to 'reinforce' but has no effect: `bypass_mode` is False."),
        ({"rollout_is": "null", "rollout_is_threshold": 5.0}, "`rollout_is_threshold` is set to 5.0 but has no effect"),
        ({"rollout_rs": None, "rollout_rs_threshold": "0.6_1.6"}, "`rollout_rs_threshold` is set to '0.6_1.6' but has no"),
        ({"rollout_is": None, "rollout_is_threshold": "2.0", "rollout_is_batch_normalize": False, "rollout_rs": None,
          "rollout_rs_threshold": None, "bypass_mode": False, "loss_type": "ppo_clip"}, ""),  # verl's defaults
    ],
)  # fmt: skip
def test_settings_of_verl_without_effect_are_warned_about_once(section, message):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert from_verl(section) == {"rollout_is": None}
    assert [message in str(warning.message) for warning in caught] == [True] * bool(message)


# TRL and Axolotl ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({}, ("sequence", [0.0, 3.0], None)),  # TRL's default: sequence_mask, clip_max 3
        ({"mode": "token_truncate", "clip_max": 2.0}, ("token", 2.0, None)),
        ({"mode": "sequence_truncate", "cap": 4.0}, ("sequence", 4.0, None)),
        ({"mode": "token_mask", "clip_min": 0.5, "clip_max": None}, ("token", [0.5, INF], None)),
        ({"mode": "token_truncate", "clip_min": 0.5}, ("token", [0.5, 3.0], True)),
        ({"mode": "sequence_truncate", "clip_min": 0.5}, ("sequence", [0.5, 3.0], True)),
    ],
)
def test_the_settings_of_trl(settings, fields):
    found = from_trl({f"vllm_importance_sampling_{name}": value for name, value in settings.items()})
    assert (found["rollout_is"], found["rollout_is_threshold"], found.get("rollout_is_clamp")) == fields
    assert found["rollout_nan_policy"] == "neutralize"
    assert from_trl({"vllm_importance_sampling_correction": "off"}) == {"rollout_correction": "disabled"}


def test_the_whole_yaml_of_trl_comes_back(convert):
    text = (
        "output_dir: o\nuse_vllm: true\nvllm_importance_sampling_mode: token_truncate\nlearning_rate: 1e-6  # small\n"
    )
    written, said, output = convert(f"{text}vllm_importance_sampling_clip_max: 2.0\nreport_to: [wandb]\n")
    ours = "rollout_is: token\nrollout_is_threshold: 2.0\nrollout_nan_policy: neutralize\n"
    assert output == f"output_dir: o\nuse_vllm: true\nlearning_rate: 1e-6\nreport_to: [wandb]\n{ours}"
    assert said == []
    assert RolloutCorrectionConfig(**{name: written[name] for name in written if name.startswith("rollout")})


def test_the_whole_yaml_of_axolotl_comes_back(convert):
    trl = {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask", "num_generations": 4}
    written, said, _ = convert(yaml.safe_dump({"rl": "grpo", "trl": trl, "plugins": ["a.B"], "micro_batch_size": 2}))
    assert written == {
        "rl": "grpo", "trl": {"use_vllm": True, "num_generations": 4}, "micro_batch_size": 2,
        "plugins": ["a.B", "trl_rollout_corr.axolotl.RolloutCorrectionPlugin"],
        "rollout_is": "token", "rollout_is_threshold": [0.0, 3.0], "rollout_nan_policy": "neutralize",
    }  # fmt: skip
    assert said == []
