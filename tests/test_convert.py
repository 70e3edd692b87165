"""`trl-rollout-corr convert`: every configuration of verl's documents, and files of TRL and Axolotl."""

import dataclasses
import io
import math
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from trl import GRPOConfig, RLOOConfig

import trl_rollout_corr
from tests.launching import HAS_ASYNCHRONOUS, ROOT, run
from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.tools.translation import own_settings, trl_files
from trl_rollout_corr.tools.translation.counterparts import COUNTERPARTS, LACKS
from trl_rollout_corr.tools.translation.setting_files import lines_of, read_document
from trl_rollout_corr.tools.translation.trl import from_trl
from trl_rollout_corr.tools.translation.verl import from_verl


INF = math.inf
SECTION = "algorithm.rollout_correction"
ASSUMED = (
    "warning: The file is taken for one of GRPO, because no setting in it tells the trainer, and another trainer gets "
    "another answer: add `--trainer rloo` if it is RLOO or `--trainer async_grpo` if it is asynchronous GRPO."
)
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
    "ours beside a section": ("use_vllm: true\nrollout_is: token\nactor_rollout_ref: {rollout: {n: 8}}", "Remove one of the"),
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
        assert main(["convert", str(ROOT / "recipes" / recipe)]) == 0
        output = capsys.readouterr()
        assert output.out == (ROOT / "recipes" / recipe).read_text()
        assert "needs no conversion" in output.err
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
    assert [line.split(" ")[1] for line in said] == [
        "`actor_rollout_ref.rollout.quantization`", "`actor_rollout_ref.rollout.enable_rollout_routing_replay`",
        "`actor_rollout_ref.rollout.presence_penalty`", "`data.train_files`,", "`top_p=0.9`,",
    ]  # fmt: skip
    assert "`top_p=0.9`, `top_k=20`, `repetition_penalty=1.1` change the distribution vLLM samples from" in said[4]
    assert "# the settings of the preset decoupled_token_is\n" in text
    assert "`rollout_engine_kwargs: {quantization: fp8}`" in said[0]
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


# What older and forked verl has outside of the section ------------------------------------------------------------------

CAP = "actor_rollout_ref.actor.tis_imp_ratio_cap"
AROUND = {"rollout_is": None, "bypass_mode": True, "rollout_loss_type": "ppo_clip"}
LOSS = "actor_rollout_ref.actor.policy_loss"


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ([f"{CAP}=2.0"], TOKEN),
        (["actor_rollout_ref.actor.imp_ratio_cap=5"], {**TOKEN, "rollout_is_threshold": 5.0}),
        (["tis_imp_ratio_cap=2"], TOKEN),
        ([f"{CAP}=2", f"{SECTION}.rollout_is=null", f"{SECTION}.rollout_is_threshold=3"], TOKEN),
        ([f"{CAP}=-1", f"{SECTION}.rollout_is=token"], TOKEN),
        ([f"{CAP}=-1"], {"rollout_correction": "disabled"}),  # verl's default
        (["actor_rollout_ref.actor.use_rollout_log_probs=True"], AROUND),
        (["async_training.use_rollout_log_probs=True", f"{SECTION}.rollout_is=null"], AROUND),
        (["async_training.use_rollout_log_probs=True", "async_training.compute_prox_log_prob=True", f"{CAP}=2"], TOKEN),
        ([f"{LOSS}.rollout_correction.rollout_is=token", f"{LOSS}.rollout_correction.bypass_mode=true"],
         {**TOKEN, "bypass_mode": True, "rollout_loss_type": "ppo_clip"}),
        ([f"{LOSS}.rollout_correction=${{algorithm.rollout_correction}}", f"{SECTION}.rollout_is=token"], TOKEN),
        ([f"{LOSS}.loss_mode=dppo_tv", f"{SECTION}.bypass_mode=true", "actor.clip_ratio_low=0.15", "clip_ratio_c=20"],
         {"rollout_correction": "bypass_dppo_tv", "rollout_is_threshold": 20.0, "rollout_rs_threshold": [[0.15, 0.2]]}),
    ],
)  # fmt: skip
def test_settings_outside_the_section_that_correct(convert, arguments, written):
    assert convert(arguments)[0] == {"use_vllm": True, **written}


@pytest.mark.parametrize(
    "given",
    [
        ["actor_rollout_ref.actor.seq_tis_imp_cap=2"],
        ["actor_rollout_ref.actor.is_correction=token"],
        ["actor_rollout_ref.actor.kl_mask_high=8", "actor_rollout_ref.rollout.n=8"],
        ["data.train_files=x", "loss_fn.truncated_importance_sampling_ratio=2"],  # NeMo-RL
        ["actor_rollout_ref.actor.off_policy.kind=token", f"{SECTION}.rollout_is=null"],
        "actor_rollout_ref: {actor: {mask_ratio: 2}}",
    ],
)
def test_a_correction_that_cannot_be_translated_is_never_off_in_silence(refusal, given):
    assert "which may correct for the sampler, and cannot be translated" in refusal(given)


@pytest.mark.parametrize(
    "argument",
    ["actor.optim.lr_warmup_steps_ratio=0.1", "actor.policy_loss.kl_cov_ratio=1", "actor.seq_tis=false", "rollout.is_x=-1",
     "actor.seq_tis_imp_cap=0"],
)  # fmt: skip
def test_other_ratios_and_what_is_off_stop_nothing(convert, argument):
    assert convert([f"actor_rollout_ref.{argument}"])[0] == {"use_vllm": True, "rollout_correction": "disabled"}


OTHERS = {
    "prime-rl": "trainer: {loss: {ratio_type: token}}\ndata: {seq_len: 8}\nalgorithm: {token_mask_high: 8.0, loss_type: x}",
    "NeMo-RL": "loss_fn: {use_importance_sampling_correction: true}\npolicy: {model_name: m}",
    "AReaL": "actor: {eps_clip: 0.2, behav_imp_weight_cap: 5}\nrollout: {n: 1}",
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_system_is_not_taken_for_one_of_verl(refusal, name):
    assert "it has no settings of verl" in refusal(OTHERS[name])


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.1"], ["`beta` is constant"]),
        (["rollout.logprobs_mode=raw_logprobs"], ["what every ratio means"]),
        (["rollout.logprobs_mode=processed_logprobs"], []),
        (["actor_rollout_ref.rollout.ignore_eos=true"], ["changes every ratio"]),
        (["actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8"], ["`rollout_engine_kwargs`"]),
        (["rollout.quantization=fp8"], ["`rollout_engine_kwargs: {quantization: fp8}`", "`fp8_per_block`"]),
    ],
)
def test_what_changes_a_ratio_is_not_called_something_else(convert, arguments, parts):
    written, said, _ = convert(["rollout_is=token", *arguments])
    assert written == {"use_vllm": True, **TOKEN}
    assert len(said) == bool(parts)
    assert all(part in said[0] for part in parts)
    assert not any("not about rollout correction" in line for line in said)


def test_min_p_comes_with_its_warning(convert):
    written, said, _ = convert(["rollout_is=token", "rollout.min_p=0.1"])
    assert written["min_p"] == 0.1
    assert [line.startswith("warning: `min_p=0.1` changes the distribution") for line in said] == [True]


def test_settings_of_one_section_are_counted_and_not_listed(convert):
    many = [f"data.a{i}=1" for i in range(20)]
    *_, line = convert(["rollout_is=token", *many, "x.y=1"])[1]
    assert line == "warning: `x.y`, 20 settings of `data` are left out: not about rollout correction."


def test_a_launcher_is_told_which_of_its_commands_to_replace(refusal):
    of_recipe = "#!/bin/bash\nset -x\npython3 -m pip install x\npython3 -u -m recipe.dapo.main_dapo \\\n  a.b=1\n"
    assert "the place of `python3 -u -m recipe.dapo.main_dapo` in" in refusal(of_recipe)
    other = refusal("#!/bin/bash\nbash start_ray.sh train.sh \\\n  algorithm.rollout_correction.rollout_is=token\n")
    assert "the place of the command that is given the settings in" in other
    assert "main_ppo" not in other


SLIME = "#!/bin/bash\nARGS=(\n   --use-tis\n   --tis-clip 2.0\n)\nray job submit -- python3 -m x train.py ${ARGS[@]}\n"
OPENRLHF = "#!/bin/bash\npython3 -m openrlhf.cli.train_ppo_ray --algo.advantage.is_correction_level token\n"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (SLIME, ["`--use-tis`, `--tis-clip` are not translated", "`--use-tis` is `rollout_is: token`"]),
        (
            ["algorithm.adv_estimator=grpo", "--use-tis", "--tis-clip", "2.0"],
            ["train without a correction", "`--tis-clip`"],
        ),
        (["--use-tis", "--tis-clip=2.0"], ["`--use-tis`, `--tis-clip` are not translated"]),
        (["--use-tis"], ["`--use-tis` is not translated"]),
        (
            OPENRLHF,
            [
                "`--algo.advantage.is_correction_level` is not translated",
                "`trl-rollout-corr docs verl#coming-from-openrlhf-slime-or-another-trainer` says",
            ],
        ),
        ("#!/bin/bash\npython3 train.py --lr 1e-6\n", ["a shell script without settings of verl"]),
    ],
)
def test_options_of_others_that_correct_are_named(refusal, given, named):
    line = refusal(given)
    assert "in the place of" not in line  # no command of such a script passes anything that is read
    assert all(part in line for part in named)


def test_options_beside_a_correction_are_left_out(convert):
    written, said, _ = convert(["rollout_is=token", "--config-name", "ppo", "--use-tis"])
    assert written == {"use_vllm": True, **TOKEN}
    assert len(said) == 1


# SkyRL ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        ["trainer.algorithm.off_policy_correction.tis_ratio_type=token"],
        ["trainer.algorithm.use_tis=true", "algorithm.adv_estimator=grpo"],
        "trainer: {algorithm: {advantage_estimator: grpo}}\ngenerator: {n_samples_per_prompt: 5}\n",
        "use_vllm: true\ntrainer: {algorithm: {off_policy_correction: {tis_ratio_type: token}}}\n",
        "#!/bin/bash\nuv run -m skyrl.train.entrypoints.main_base \\\n"
        '  trainer.algorithm.advantage_estimator="grpo" \\\n  generator.n_samples_per_prompt=5\n',
    ],
)
def test_settings_of_skyrl_are_answered_with_the_table_for_them(refusal, given, capsys):
    line = refusal(given)
    assert "settings of SkyRL (`trainer.algorithm`) are not translated" in line
    (words,) = re.findall(r"`trl-rollout-corr docs (.+)`", line)
    capsys.readouterr()
    assert main(["docs", words]) == 0
    assert "| `tis_ratio_type: token` with `token_tis_ratio_clip_high` |" in capsys.readouterr().out


# Damaged files ----------------------------------------------------------------------------------------------

DAMAGED = {
    "an object": "actor_rollout_ref: !!python/object/apply:os.system ['touch /tmp/pwned']",
    "a tag": "actor_rollout_ref: !!bool x",
    "no number": "actor_rollout_ref: !!int ''",
    "no date": "actor_rollout_ref: 2001-99-99",
    "infinity": "actor_rollout_ref: {rollout: {n: 1.0e+400}}",
    "a direction": "algorithm: {rollout_correction: {rollout_is\u202e: token}}",
    "half a character": 'algorithm: {rollout_correction: {rollout_is: "\\ud800"}}',
    "nothing": "",
    "zeros": "\0" * 100,
    "two documents": "a: 1\n---\nb: 2\n",
    "a list as key": "{[1]: 2}",
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_line(refusal, name):
    assert refusal(DAMAGED[name]).isprintable()


def test_what_is_no_file_of_settings_is_one_line(capsys, tmp_path):
    utf16, latin = (tmp_path / name for name in ("utf16", "latin"))
    utf16.write_bytes("use_vllm: true\n".encode("utf-16"))
    latin.write_bytes("model: \xe9\n".encode("latin-1"))
    for path in (tmp_path, tmp_path / "gone", utf16, latin):
        for command in ("convert", "check"):
            assert main([command, str(path)]) == 2, path
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"{path}: ")
            assert "unexpected" not in line


def test_a_pipe_of_the_shell_is_read():
    process = run("bash", "-c", f"{sys.executable} -m trl_rollout_corr convert <(echo 'rollout_is: token')")
    assert process.returncode == 0, process.stderr
    assert yaml.safe_load(process.stdout) == {"use_vllm": True, **TOKEN}


IN_SECTION = (
    "algorithm:\n  rollout_correction:\n    bypass_mode: false\n    {}\nactor_rollout_ref: {{rollout: {{n: 8}}}}\n"
)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (IN_SECTION.format("rollout_is: tokn"), "-: line 4: `rollout_is` must be one of token, "),
        (IN_SECTION.format("rollout_is_treshold: 3.0"), "-: line 4: `rollout_is_treshold` is 3.0"),
        (
            "use_vllm: true\n\nvllm_importance_sampling_mode: token\n",
            "-: line 3: `vllm_importance_sampling_mode` must be ",
        ),
        # which of two equal names the message is about is unknown, and so is a line for what the file does not have
        (
            "actor_rollout_ref: {rollout: {n: 8}}\na: {kl_coef: 1}\n"
            "algorithm: {adv_estimator: rloo, use_kl_in_reward: true, kl_ctrl: {kl_coef: x}}\n",
            "-: `kl_coef` must be a number, got 'x'",
        ),
        ("trainer: 1\n", "-: it has no settings of verl"),
    ],
)
def test_an_error_about_a_file_has_the_line_of_its_setting(refusal, text, start):
    assert refusal(text).startswith(start)


def test_a_section_that_stands_in_itself_ends():
    assert lines_of(read_document("a: &x\n  b: *x\n  c: 1\n")[1]) == {"a": 1, "a.b": 2, "a.c": 3, "b": 2, "c": 3}


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


# A file as people write it, with comments, and numbers that a dump would write in another way
FLAT = """# run 12: the one that worked
output_dir: o
use_vllm: true

vllm_importance_sampling_mode: token_truncate   # see the wiki
vllm_importance_sampling_clip_max: 2.0
learning_rate: 1e-6  # small
max_grad_norm: 0.10
"""
LINE = "rollout_correction: trl\n"
PLUGIN = "trl_rollout_corr.axolotl.RolloutCorrectionPlugin"


@pytest.mark.parametrize("text", [FLAT, FLAT + "report_to: [wandb]", f"{FLAT}\n\n", FLAT.replace("\n", "\r\n")])
def test_the_whole_yaml_of_trl_comes_back_with_its_comments(convert, text):
    written, said, output = convert(text)
    assert output == text.rstrip() + "\n" + LINE
    assert said == []
    assert written == {**yaml.safe_load(text), "rollout_correction": "trl"}
    fields = {
        name: x
        for name, x in written.items()
        if name.startswith(("vllm_importance", "rollout", "output_dir", "use_vllm"))
    }
    config = RolloutCorrectedGRPOConfig(**fields, use_cpu=True, bf16=False)
    assert (config.settings.rollout_is, config.settings.rollout_is_threshold) == ("token", 2.0)


@pytest.mark.parametrize("text", ["{use_vllm: true, vllm_importance_sampling_cap: 2.0}", f"---\n{FLAT}...\n"])
def test_a_file_that_cannot_be_edited_is_written_anew(convert, text):
    written, said, output = convert(text)
    assert written == {**yaml.safe_load(text.replace("_cap:", "_clip_max:")), "rollout_correction": "trl"}
    assert "use_vllm: true\n" in output  # one setting in each line
    assert "without its comments" in said[-1]
    assert ["is an old name" in line for line in said[:-1]] == [True] * ("cap" in text)


@pytest.mark.parametrize("section", ["", "trl:\n  "])
def test_an_old_name_of_trl_becomes_the_new_one(convert, section):
    """Of one file with both names, which TRL reads as the old one, nothing is guessed."""
    line = "vllm_importance_sampling_cap: 2.0  # mine\n"
    _, said, output = convert(f"learning_rate: 1e-6\n{section}{line}")
    assert f"{section}{line.replace('_cap', '_clip_max')}" in output
    assert "is an old name, which TRL 2 will remove" in said[0]
    indent = section.partition("\n")[2]
    both = f"learning_rate: 1e-6\n{section}{line}{indent}vllm_importance_sampling_clip_max: 2.5\n"
    _, said, output = convert(both)
    assert both in output
    assert "acts in its place: remove one of them" in said[0]


PLAIN = "# mine\nmodel_name_or_path: m\nlearning_rate: 1e-6  # small\nmax_completion_length: {}\n"


@pytest.mark.parametrize(("length", "shares"), [(512, None), (1024, "59 % to 32 %"), (8192, "6.6 % to 0.38 %")])
def test_a_plain_file_of_trl_comes_back_and_is_told_what_length_does(convert, length, shares):
    """The calculation of `docs/trl.md`."""
    text = PLAIN.format(length)
    _, said, output = convert(text)
    assert output == text + LINE
    if shares:
        assert said.pop() == ASSUMED
    assert ["max_completion_length" in line for line in said] == [True] * bool(shares)
    if shares:
        assert len(re.findall(r"[.](?: |$)", said[0])) == 3  # sentences
        assert (
            f"one of `max_completion_length` ({length:,} tokens) keeps {shares} of its loss on average. Set "
            "`rollout_correction` to auto: it drops tokens" in said[0]
        )
        assert "Or set `vllm_importance_sampling_mode` to token_truncate, another correction of TRL's own" in said[0]
    assert convert(text + "vllm_importance_sampling_mode: token_truncate\n")[1] == []
    for of_other in ("reward_clip_range: [-1.0, 1.0]\n", "max_staleness: 4\n"):  # RLOO and asynchronous: no weights
        assert convert(text + of_other)[1] == []
    off = "vllm_importance_sampling_correction: false\n"
    assert convert(text + off)[1] == []
    assert convert(output)[2] == output  # twice


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("top_p: 0.9\n", ["`top_p=0.9` changes the distribution"]),
        ("generation_kwargs: {min_p: 0.1}\n", ["`min_p=0.1` changes the distribution"]),
        ("vllm_importance_sampling_cap: 2.0\n", ["the result has `vllm_importance_sampling_clip_max`"]),
        (
            "vllm_importance_sampling_correction: false\nvllm_importance_sampling_mode: token_mask\n",
            [
                "`vllm_importance_sampling_mode='token_mask'` has no effect: `vllm_importance_sampling_correction` is False"
            ],
        ),
        (
            "vllm_importance_sampling_correction: false\nvllm_importance_sampling_clip_max: 2.0\n",
            ["`vllm_importance_sampling_clip_max=2.0` has no effect"],
        ),
        (
            "rollout_correction: auto\nvllm_importance_sampling_mode: token_mask\n",
            ["needs no", "which replaces TRL's own"],
        ),
    ],
)
def test_a_file_of_trl_is_told_what_has_no_effect(convert, text, parts):
    given = f"use_vllm: true\n{text}"
    for whole in (given, f"base_model: m\ntrl:\n  {given.replace(chr(10), chr(10) + '  ')}".rstrip() + "\n"):
        if "rollout_correction" not in text or whole == given:
            said = convert(whole)[1]
            assert [part in line for part, line in zip(parts, said, strict=True)] == [True] * len(parts), said


SECTION_OF_VERL = """# mine
use_vllm: true  # yes
# the algorithm
algorithm:
  adv_estimator: grpo
  rollout_correction:
    rollout_is: token
    rollout_is_threshold: 3.0
    bypass_mode: false

# the rest
learning_rate: 1e-6
"""


@pytest.mark.parametrize(
    "text",
    [
        SECTION_OF_VERL,
        SECTION_OF_VERL.replace("algorithm:\n  adv_estimator: grpo\n  ", "").replace("    rollout_is", "  rollout_is")
        .replace("    bypass", "  bypass"),
        SECTION_OF_VERL + "actor_rollout_ref: {rollout: {n: 8}, actor: {optim: {lr: 2e-6}}}\n",
        SECTION_OF_VERL + "vllm_importance_sampling_clip_max: 2.0\n",
    ],
)  # fmt: skip
def test_a_section_of_verl_in_a_file_of_trl_is_translated(convert, text):
    written, said, output = convert(text)
    assert {name: x for name, x in written.items() if name.startswith("rollout")} == {
        **TOKEN,
        "rollout_is_threshold": 3.0,
    }
    assert not written.keys() & {"algorithm", "actor_rollout_ref"}
    assert "use_vllm: true  # yes\n# the algorithm\n" in output
    assert "# the rest\nlearning_rate: 1e-6\n" in output
    assert any("is translated and removed" in line for line in said)
    if "actor_rollout_ref" in text:
        assert written["num_generations"] == 8
        assert any("`learning_rate` is '1e-6' in the file, and 2e-06" in line for line in said)
    assert any("replaces TRL's own" in line for line in said) == ("vllm_importance" in text)


def test_a_file_that_does_not_tell_its_trainer_is_told_which_one_was_assumed(convert, tmp_path, capsys):
    text = PLAIN.format(8192)
    path = tmp_path / "run.yaml"
    for trainer, lines in {"grpo": 1, "rloo": 0, "async_grpo": 0}.items():
        path.write_text(text)
        for words in (["--trainer", trainer, str(path)], [str(path), "--trainer", trainer]):
            _, said, output = convert(words)
            assert (output, len(said)) == (text + LINE, lines)
    for of_grpo in ("loss_type: dapo\n", "vllm_importance_sampling_mode: token_mask\n", "delta: 3.0\n"):
        assert ASSUMED not in convert(text + of_grpo)[1]
    assert (
        ASSUMED not in convert("base_model: m\nrl: grpo\ntrl:\n  use_vllm: true\n  max_completion_length: 8192\n")[1]
    )
    section = (
        "actor_rollout_ref: {actor: {clip_ratio_c: 3.0}}\nalgorithm: {%srollout_correction: {rollout_is: token}}\n"
    )
    written, said, _ = convert("learning_rate: 1e-6\n" + section % "")
    assert ("delta" in written, ASSUMED in said) == (True, True)
    written, said, _ = convert("learning_rate: 1e-6\n" + section % "adv_estimator: rloo, ")
    assert ("delta" in written, ASSUMED in said) == (False, False)


OF_FILES = [
    ("grpo", {"loss_type": "vespo", "use_vllm": False}),  # with vLLM, it needs a field of TRL's correction
    ("grpo", {"vllm_importance_sampling_mode": "token_mask"}),
    ("grpo", {"vllm_importance_sampling_mode": "token_mask", "rollout_metrics_only": True}),
    ("grpo", {"vllm_importance_sampling_correction": "false"}),
    ("grpo", {"rollout_correction": "trl", "vllm_importance_sampling_clip_max": 2.0}),
    ("grpo", {"rollout_correction": "trl", "use_vllm": False}),
    ("rloo", {}),
    ("rloo", {"rollout_correction": "trl"}),
    *([("async_grpo", {}), ("async_grpo", {"rollout_correction": "trl"})] if HAS_ASYNCHRONOUS else []),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("trainer", "fields"), OF_FILES, ids=str)
def test_a_file_has_the_settings_that_its_trainer_gives_it(convert, trainer, fields, monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(own_settings, "effects", lambda settings, _: told.append(settings) or [])
    fields = {"rollout_diagnose": True, "use_vllm": True, **fields}
    if trainer == "async_grpo":
        del fields["use_vllm"]
    text = f"learning_rate: 1.0e-6\n{yaml.safe_dump(fields)}"
    (tmp_path / "run.yaml").write_text(text)
    assert convert(["--trainer", trainer, str(tmp_path / "run.yaml")])[2] == text  # it needs no conversion
    name = {"grpo": "GRPO", "rloo": "RLOO", "async_grpo": "AsyncGRPO"}[trainer]
    here = {"use_cpu": True, "bf16": False}
    plain = {key: False if value == "false" else value for key, value in fields.items()}
    config = getattr(trl_rollout_corr, f"RolloutCorrected{name}Config")("output", **here, **plain)
    assert [settings.fields for settings in told] == [config.settings.fields]


def test_the_trainer_of_verl_is_told_by_its_estimator(capsys):
    assert main(["convert", "--trainer", "rloo", "algorithm.adv_estimator=grpo"]) == 2
    assert "`algorithm.adv_estimator`" in capsys.readouterr().err


def test_the_names_that_tell_a_trainer_are_fields_of_it_alone():
    of_grpo, of_rloo = ({field.name for field in dataclasses.fields(x)} for x in (GRPOConfig, RLOOConfig))
    assert of_grpo - of_rloo >= trl_files._OF_GRPO
    assert of_rloo - of_grpo >= trl_files._OF_RLOO


OTHER_TRAINERS = {
    "rloo": ("normalize_advantages: true\n", {"delta", "loss_type", "scale_rewards"}),
    "async_grpo": ("max_staleness: 4\n", {"delta", "loss_type", "scale_rewards", "beta", "num_iterations"}),
}


@pytest.mark.parametrize("trainer", OTHER_TRAINERS)
def test_a_section_of_verl_gives_another_trainer_no_field_that_it_refuses(convert, trainer):
    """`check` finds no mistake in the result: the configuration of the trainer takes each field."""
    field, refused = OTHER_TRAINERS[trainer]
    section = (
        "algorithm: {norm_adv_by_std_in_grpo: true, rollout_correction: {rollout_is: token}}\n"
        "actor_rollout_ref: {rollout: {n: 8, temperature: 0.9}, actor: {ppo_epochs: 2, clip_ratio_c: 3.0, "
        "use_kl_loss: true, kl_loss_coef: 0.01, loss_agg_mode: token-mean}}\n"
    )
    written, said, _ = convert(field + section)
    assert not written.keys() & refused
    assert (written["num_generations"], written["temperature"]) == (8, 0.9)
    assert len([line for line in said if "left out" in line]) >= 1
    named = " ".join(said)
    assert all(name in named for name in refused) or trainer == "rloo"
    assert convert(section.replace("algorithm", "learning_rate: 1e-6\nalgorithm", 1))[0].keys() >= {"beta", "delta"}


@pytest.mark.skipif(not HAS_ASYNCHRONOUS, reason="TRL's asynchronous trainer does not import")
def test_what_a_trainer_lacks_is_what_its_configuration_lacks():
    trainers = {"grpo": "GRPO", "rloo": "RLOO", "async_grpo": "AsyncGRPO"}
    made = {field for field, _ in COUNTERPARTS.values() if field} | {"beta", "epsilon_high"}
    made -= {"model_name_or_path"}  # of TRL's scripts
    for trainer, name in trainers.items():
        config = getattr(trl_rollout_corr, f"RolloutCorrected{name}Config")
        assert {*LACKS[trainer]} == made - {field.name for field in dataclasses.fields(config)}, trainer


AXOLOTL = """base_model: m  # a base
rl: grpo
trl:
  use_vllm: true
  vllm_importance_sampling_mode: token_mask
"""


@pytest.mark.parametrize(
    ("given", "plugins"),
    [
        ("", f"plugins:\n- {PLUGIN}\n"),
        (
            "plugins:  # ours\n  - a.B  # of us\nmicro_batch_size: 2\n",
            f"  - a.B  # of us\n  - {PLUGIN}\nmicro_batch_size",
        ),
        ("plugins: [a.B]  # ours\n", f"plugins: [a.B, {PLUGIN}]  # ours\n"),
        ("plugins:\n- a.B", f"plugins:\n- a.B\n- {PLUGIN}\n"),
        (f"plugins:\n- {PLUGIN}\n", f"plugins:\n- {PLUGIN}\n"),
    ],
)
def test_the_whole_yaml_of_axolotl_comes_back(convert, given, plugins):
    written, said, output = convert(AXOLOTL + given)
    assert output.startswith(AXOLOTL)
    assert plugins in output
    assert LINE in output
    assert {**written, "plugins": None} == {
        **yaml.safe_load(AXOLOTL + given),
        "plugins": None,
        "rollout_correction": "trl",
    }
    assert written["plugins"].count(PLUGIN) == 1
    assert said == []
