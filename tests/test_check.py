"""The command `check` on a file: it is read as a training script would read it, and every mistake is named."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import NormalDist

import pytest
import torch

from tests.launching import HAS_ASYNCHRONOUS, ROOT, clean_environment
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.correction.functional import bound_weights
from trl_rollout_corr.settings.effects import effects, mean_and_sample_size


@pytest.fixture
def check(tmp_path, capsys):
    def check(text: str, *options: str) -> tuple[int, dict]:
        """Exit code and report for the text of a file."""
        path = tmp_path / "run.yaml"
        path.write_text(text)
        code = main(["check", str(path), "--json", *options])
        return code, json.loads(capsys.readouterr().out)

    return check


def test_every_mistake_is_named_with_the_nearest_name(check):
    code, report = check(
        "rollout_corection: auto\nrollout_is: tokn\nrollout_nan_policy: dropp\nmax_steps: three\n"
        "learning_rate: 1e-6\nlearning_rate: 2e-6\nnum_generations: 7\nper_device_train_batch_size: 8\n"
    )
    assert code == 1
    for part in (
        "line 1: `rollout_corection` is not a field of the configuration. Did you mean 'rollout_correction'?",
        "line 2: `rollout_is` must be one of token, window, turn, sequence, geometric, preset or None, got "
        "'tokn'. Did you mean 'token'?",
        "line 3: `rollout_nan_policy` must be one of drop, raise, neutralize, got 'dropp'. Did you mean 'drop'?",
        "line 4: argument --max_steps/--max-steps: invalid int value: 'three'",
        "lines 5 and 6: `learning_rate` is set 2 times, and the last one counts.",
        "line 7: generation_batch_size (8) must be divisible by num_generations (7).",
    ):
        assert part in report["mistakes"]
    assert len(report["mistakes"]) == 6


@pytest.mark.parametrize("above", ["", "# mine\n", "model_name_or_path: m\n\n", "env:\n  max_steps: '1'\n"])
def test_a_mistake_has_the_line_of_its_setting(check, above):
    """Comments, blank lines and the entries of a section count as lines, and a section above has the same name in it."""
    (mistake,) = check(f"{above}max_steps: three\nuse_vllm: true\n")[1]["mistakes"]
    assert mistake.startswith(f"line {above.count(chr(10)) + 1}: argument --max_steps")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rollout_rs: [token_k1, token_k9]\nrollout_rs_threshold: [[0.9, 1.1], 2.0]\n",
            "'token_k9' is not a criterion",
        ),
        ("rollout_rs: [token_k1]\nrollout_rs_threshold: -1\n", "`rollout_rs_threshold`"),
    ],
)
def test_a_consequence_of_a_mistake_is_not_a_mistake(check, text, message):
    (mistake,) = check(text)[1]["mistakes"]
    assert message in mistake


def test_a_file_for_another_machine_has_no_mistake(check):
    code, report = check("bf16: true\ntf32: true\nuse_vllm: true\nreward_funcs: [accuracy_reward]\nuse_peft: true\n")
    assert code == 0
    assert report["mistakes"] == []
    assert report["correction"].startswith("auto: ")


def test_a_field_of_the_users_own_script_is_a_remark(check):
    code, report = check("judge_address: localhost\nuse_vllm: true\n")
    assert code == 0
    (remark,) = report["remarks"]
    assert remark.startswith("`judge_address` is not a field of the trainer or of TRL's scripts")


def test_warnings_of_the_configuration_are_remarks(check):
    code, report = check("rollout_dump_steps: 5\nrollout_correction: disabled\n")
    assert code == 0
    assert any("`rollout_dump_steps`" in remark for remark in report["remarks"])


OF_TRL = "vllm_importance_sampling_"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            "max_completion_length: 8192\n",
            "keeps 6.6 % to 0.38 % of its loss on average. Set `rollout_correction` to auto: it drops tokens",
        ),
        ("max_completion_length: 512\n", ""),
        (f"max_completion_length: 8192\n{OF_TRL}mode: token_truncate\n", ""),
        ("max_completion_length: 8192\nrollout_correction: auto\n", ""),
        ("max_completion_length: 8192\nrollout_correction: decoupled_seq_is\n", "Set `rollout_correction` to auto: "),
        ("max_completion_length: 8192\nrollout_correction: decoupled_geo_rs\n", "`seq_mean_k1` rejects 33 to 92 %"),
        (f"{OF_TRL}correction: false\n{OF_TRL}mode: token_mask\n", f"`{OF_TRL}mode='token_mask'` has no effect: "),
        (f"{OF_TRL}correction: false\nmax_completion_length: 8192\n", ""),
        (f"max_completion_length: 64\n{OF_TRL}cap: 2.0\n", f"`{OF_TRL}cap` argument is deprecated"),
        (f"rollout_correction: auto\n{OF_TRL}mode: token_mask\n", "which replaces TRL's own correction"),
    ],
)
def test_what_a_file_does_to_the_loss_is_a_remark(check, text, part):
    own = "" if "rollout_correction" in text else "rollout_correction: trl\n"
    code, report = check(f"use_vllm: true\n{own}{text}", "--trainer", "grpo")
    assert code == 0
    assert [part in remark for remark in report["remarks"]] == [True] * bool(part)


@pytest.mark.skipif(not HAS_ASYNCHRONOUS, reason="TRL's asynchronous trainer does not import")
@pytest.mark.parametrize(
    ("loss_type", "part"),
    [
        ("my_loss", "which TRL"),
        ("dr_gpro", "unless your trainer computes the loss itself. Did you mean 'dr_grpo'?"),
        *((name, "") for name in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo")),
    ],
)
def test_a_loss_that_trl_does_not_know_is_a_remark(check, loss_type, part):
    code, report = check(f"use_vllm: true\nloss_type: {loss_type}\n")
    assert code == 0
    assert [part in remark for remark in report["remarks"]] == [True] * bool(part)


def test_a_file_that_repeats_the_defaults_of_trl_is_told_what_replaces_them(check):
    repeated = f"use_vllm: true\nmax_completion_length: 64\n{OF_TRL}mode: sequence_mask\n"
    (remark,) = check(repeated)[1]["remarks"]
    assert remark.startswith(f"`{OF_TRL}mode` has its default value")
    assert remark.endswith("set `rollout_correction: trl`.")
    for named in ("rollout_correction: auto\n", "rollout_correction: trl\n", f"{OF_TRL}clip_max: 2.0\n"):
        assert check(repeated + named)[1]["remarks"] == [], named


def test_a_file_without_a_correction_is_told_how_to_keep_the_loss(check):
    says = "This is the default; `rollout_correction: trl` keeps TRL's loss."
    for named, is_told in (("", True), ("rollout_correction: auto\n", False), ("rollout_metrics_only: true\n", False)):
        assert (says in check(f"use_vllm: true\n{named}")[1]["correction"]) == is_told, named


def test_a_setting_with_two_names_is_told_once(check):
    told = check("use_vllm: true\nvllm_importance_sampling_cap: 2.0\n")[1]["correction"]
    assert told.startswith("trl (TRL's loss with your `vllm_importance_sampling_clip_max: 2.0`): ")


def test_the_trainer_is_the_one_that_knows_the_fields(check):
    assert check("max_staleness: 4\n")[1]["trainer"] == "async_grpo"


@pytest.mark.skipif(not HAS_ASYNCHRONOUS, reason="TRL's asynchronous trainer does not import")
@pytest.mark.parametrize("recipe", ["auto", "trl", "bypass_ppo_clip"])
def test_a_file_that_fits_trainers_with_other_corrections_is_left_open(check, recipe):
    """Their advice would contradict: one of them refuses what the others need."""
    text = (ROOT / f"recipes/async_grpo/{recipe}.yaml").read_text()
    code, report = check(text)
    (remark,) = report["remarks"]
    assert (code, report["correction"]) == (0, "")
    assert remark.startswith("This file fits GRPO, RLOO and asynchronous GRPO, which correct differently. Say which: ")
    for trainer, remarks in (("async_grpo", 0), ("grpo", 1)):
        code, report = check(text, "--trainer", trainer)
        assert (code, len(report["remarks"])) == (0, remarks)
        assert report["correction"].startswith(recipe)
    assert check(f"{text}use_vllm: true\n")[1]["correction"].startswith(recipe)


def test_a_field_of_another_trainer_is_a_mistake(check):
    """Advice for GRPO, such as TRL's `token_truncate`, must not pass for RLOO, whose configuration refuses it."""
    text = "use_vllm: true\nrollout_correction: trl\nvllm_importance_sampling_mode: token_truncate\n"
    assert check(text, "--trainer", "grpo")[0] == 0
    code, report = check(text, "--trainer", "rloo")
    assert code == 1
    assert report["mistakes"][0] == (
        "line 3: `vllm_importance_sampling_mode` is a field of RolloutCorrectedGRPOConfig, and "
        "RolloutCorrectedRLOOConfig refuses it. Remove it, or train with grpo."
    )
    if HAS_ASYNCHRONOUS:
        code, report = check("num_iterations: 2\nmax_staleness: 4\n", "--trainer", "async_grpo")
        assert "is a field of RolloutCorrectedGRPOConfig and RolloutCorrectedRLOOConfig, and" in report["mistakes"][0]
        assert report["mistakes"][0].endswith("train with grpo or rloo.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate: 1e-6\n", "`use_vllm` is not set, and false by default."),
        ("use_vllm: false\n", "`use_vllm` is false."),
        ("use_vllm: true\n", ""),
    ],
)
@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_a_file_without_a_sampler_is_told_so(check, trainer, text, message):
    code, report = check(text, "--trainer", trainer)
    assert code == 0  # the script may set it
    assert [remark.startswith(message) for remark in report["remarks"]] == [True] * bool(message)
    assert [("`rollout_func`" in remark) == (trainer == "grpo") for remark in report["remarks"]] == [True] * bool(
        message
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout_engine_kwargs: {quantisation: fp8}\n", "Did you mean 'quantization'?"),
        ("rollout_is_treshold: 2\n", "Did you mean 'rollout_is_threshold'?"),
        ("rollout_engine_kwargs: {quantization: int8}\n", "which is no scheme by which vLLM 0"),
        (
            "rollout_engine_kwargs: {quantization: int8}\n",
            "Did you mean 'int8_per_channel_weight_only'? It rounds experts only; for a model without experts use fp8.",
        ),
        ("rollout_engine_kwargs: {quantization: experts_int8}\n", "which is no scheme by which vLLM 0"),
        ("rollout_engine_kwargs: {quantization: fp8_per_chanel}\n", "Did you mean 'fp8_per_channel'? `trl"),
        ("rollout_engine_kwargs: {kv_cache_dtype: int4}\n", "which is no `kv_cache_dtype` of vLLM 0"),
        ("rollout_engine_kwargs: {dtype: fp16}\n", "It takes auto, half, float16, "),
        ("max_steps: 1.0e+400\n", "`max_steps` is inf"),
        ("num_generations: 0\n", "TRL divides by one of these settings, which are 0: `num_generations`."),
        ("learning_rate: .nan\n", "`learning_rate` is NaN"),
        ("rollout_token_veto_threshold: 1.0e-4\n", "Write `rollout_rs: [seq_max_k1]`"),
        ("env: 5\n", "`env` must be a section"),
        ("sync_ref_model: true\n", "`beta` is 0"),
        ("use_peft: true\nload_in_4bit: true\nvllm_mode: server\n", "a server cannot read packed weights"),
        ("loss_type: vespo\nrollout_correction: trl\n", "token_truncate or token_mask"),
    ],
)
def test_what_the_trainer_would_refuse_is_a_mistake(check, text, message):
    code, report = check(f"use_vllm: true\n{text}")
    assert code == 1
    assert len(report["mistakes"]) == 1
    assert message in report["mistakes"][0]


@pytest.mark.parametrize(
    ("scheme", "rounds_experts_alone"),
    [("int8_per_channel_weight_only", True), ("nvfp4_per_token", True), ("fp8_per_channel", False), ("fp8", False)],
)
def test_a_scheme_for_experts_alone_says_that_a_dense_model_is_not_rounded(check, scheme, rounds_experts_alone):
    code, report = check(f"use_vllm: true\nrollout_engine_kwargs: {{quantization: {scheme}}}\n")
    assert code == 0
    said = ["In a model without experts it rounds nothing" in remark for remark in report["remarks"]]
    assert said == [True] * rounds_experts_alone


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ("use_peft: true\n", "`lora_dropout` is not set, and 0.05 by default."),
        ("use_peft: true\nlora_dropout: 0.1\n", "`lora_dropout` is 0.1."),
        ("use_peft: true\nlora_dropout: 0\n", None),
        ("lora_dropout: 0.1\n", None),
        ("rollout_engine_kwargs: {kv_cache_dtype: fp8}\n", "`rollout_engine_kwargs` sets `kv_cache_dtype: fp8`"),
        ("rollout_engine_kwargs: {kv_cache_dtype: auto}\n", None),
    ],
)
def test_what_opens_a_gap_of_its_own_is_a_remark(check, text, begin):
    code, report = check(f"use_vllm: true\n{text}")
    assert code == 0
    assert [remark.startswith(begin or "") for remark in report["remarks"]] == [True] * (begin is not None)


@pytest.mark.parametrize(
    ("text", "system"),
    [
        ("actor_rollout_ref: {rollout: {n: 8}}\ndata: {train_batch_size: 8}\n", "verl"),
        ("algorithm: {rollout_correction: {rollout_is: token}}\n", "verl"),
        ("trainer: {algorithm: {off_policy_correction: {tis_ratio_type: token}}}\n", "SkyRL"),
        ("base_model: m\nrl: grpo\ntrl: {use_vllm: true}\n", "Axolotl"),
        ((ROOT / "recipes/accelerate/cpu.yaml").read_text(), "accelerate"),
    ],
)
def test_the_file_of_another_system_is_not_checked(tmp_path, capsys, text, system):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert main(["check", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"these are settings of {system}, which no script of TRL reads" in line
    assert (f"`trl-rollout-corr convert {path}`" in line) == (system == "verl")


def test_marks_of_direction_are_written_out(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text('use_vllm: true\nrollout_is\u202e: token\n"abc\\ud800": 1\n')
    assert main(["check", str(path)]) == 1
    output = capsys.readouterr().out
    assert "`rollout_is\\u202e` is not a field" in output
    assert "`abc\\ud800` is not a field" in output


SIGN = "Importing PyTorch, TRL and vLLM to read {} as the trainer would. This may take a minute or two.\n"

# Ends at the first import that takes long
WITHOUT_HEAVY_IMPORTS = """
import sys

class Ends:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "trl", "vllm", "pyarrow"):
            sys.stderr.write(f"imports {name}")
            sys.stderr.flush()
            sys.exit(3)

sys.meta_path.insert(0, Ends())
from trl_rollout_corr.__main__ import main
main(sys.argv[1:])
"""


INSTALLED = SIGN.replace("read {} as the trainer would", "look at the installed packages")


@pytest.mark.parametrize(("of_file", "sign"), [(True, SIGN), (False, INSTALLED)])
def test_a_sign_of_life_comes_before_the_imports_that_take_long(tmp_path, of_file, sign):
    path = tmp_path / "run.yaml"
    path.write_text("use_vllm: true\n")
    command = [sys.executable, "-c", WITHOUT_HEAVY_IMPORTS, "check", *([str(path)] if of_file else [])]
    ended = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), check=False)
    first, *others = ended.stderr.splitlines(keepends=True)
    assert ended.returncode == 3
    assert first == sign.format(path)
    assert others[0].startswith("imports ")


def test_nothing_of_vllm_is_among_the_errors(tmp_path):
    """vLLM warns about Triton when it is imported."""
    path = tmp_path / "run.yaml"
    path.write_text("use_vllm: true\nrollout_engine_kwargs: {quantisation: fp8}\n")
    command = [sys.executable, "-m", "trl_rollout_corr", "check", str(path)]
    environment = {name: x for name, x in clean_environment().items() if name != "VLLM_LOGGING_LEVEL"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.stderr.startswith(SIGN.format(path))
    assert "Triton" not in ended.stdout + ended.stderr
    assert ended.stdout.startswith("error: line 2: `rollout_engine_kwargs` for 'quantisation' is 'fp8'")
    assert ended.returncode == 1


@pytest.mark.parametrize(
    ("text", "message"), [("a: [1\nb: 2\n", "line 2: not YAML"), ("- 1\n", "must have one setting")]
)
def test_what_cannot_be_read_is_one_line(tmp_path, capsys, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert main(["check", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(str(path))
    assert message in line
    assert main(["check", str(Path("no/such.yaml"))]) == 2
    assert capsys.readouterr().err == "no/such.yaml: No such file or directory\n"


def test_a_report_for_people_ends_with_the_correction(capsys):
    assert main(["check", str(ROOT / "recipes/grpo/token_is.yaml")]) == 0
    *_, verdict, correction = capsys.readouterr().out.splitlines()
    others = "`--trainer rloo` or `--trainer async_grpo`"
    assert verdict.endswith(f"token_is.yaml: no mistakes, read as settings of grpo. For another trainer: {others}.")
    assert correction.startswith("Correction: decoupled_token_is: ")


def test_without_a_file_it_tells_versions_and_cuda(capsys):
    assert main(["check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["usable"]
    cuda = report["versions"]["cuda"]
    assert cuda.startswith("not available: ") or " x " in cuda
    assert main(["check", "--trainer", "rloo"]) == 2
    assert "--trainer rloo has an effect only with a file" in capsys.readouterr().err


def test_the_command_alone_prints_the_help(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: trl-rollout-corr")


# What length does, by calculation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 100, 1000])
@pytest.mark.parametrize(
    "fields",
    [
        {"rollout_is_threshold": 2.0},
        {"rollout_is_threshold": [0.5, 5.0]},
        {"rollout_is_threshold": [0.5, 5.0], "rollout_is_clamp": True},
        {"rollout_is_threshold": [0.0, 3.0]},
    ],
)
def test_the_calculated_weights_are_those_of_normal_log_ratios(fields, length):
    """Against the weights at evenly spaced quantiles of the logarithm of the product."""
    settings = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs=None, **fields).settings
    bounding, variance = settings.bounding, 2 * 0.002 * length
    n = 20_000
    of_product = NormalDist(-variance / 2, variance**0.5)
    log_ratio = torch.tensor([of_product.inv_cdf((i + 0.5) / n) for i in range(n)], dtype=torch.float64)[:, None]
    weights = bound_weights(
        log_ratio.exp(),
        torch.ones_like(log_ratio),
        lower=bounding.lower,
        upper=bounding.upper,
        clamp=bounding.clamps,
    )
    mean, size = mean_and_sample_size(bounding, 0.002, length)
    assert mean == pytest.approx(weights.mean().item(), rel=2e-3)
    assert size == pytest.approx((weights.mean() ** 2 / weights.square().mean()).item(), rel=2e-3)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "of its loss on average"),
        (
            {"rollout_is_batch_normalize": True},
            "the effective sample size of completions",
        ),  # their mean is 1, but few of them count
        ({"rollout_correction": None, "bypass_mode": True, "rollout_loss_type": "ppo_clip"}, ""),  # only reported
    ],
)
def test_length_takes_the_loss_of_weights_that_act(fields, told):
    of_sequences = {"rollout_is": "sequence", "rollout_is_threshold": [0.0, 3.0], "rollout_rs": None}
    settings = RolloutCorrectionConfig(**of_sequences, **fields).settings
    found = [effect.text for effect in effects(settings, {"max_completion_length": 2000})]
    assert ([told in text for text in found] == [True]) if told else found == []


@pytest.mark.parametrize(("length", "told"), [(127, False), (128, True)])
def test_rejections_of_whole_completions_are_told_of_runs_that_are_no_trials(length, told):
    settings = RolloutCorrectionConfig(rollout_correction="decoupled_geo_rs").settings
    found = [effect.text for effect in effects(settings, {"max_completion_length": length})]
    assert ["`seq_mean_k1` rejects" in text for text in found] == [True] * told
