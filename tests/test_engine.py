"""Arguments of vLLM's engine that TRL has no field for."""

import sys
import warnings
from contextlib import nullcontext

import pytest
import torch
from trl.generation import vllm_generation

from tests.launching import run
from tests.training import VLLM, build
from trl_rollout_corr import (
    RolloutCorrectedGRPOConfig,
    RolloutCorrectedGRPOTrainer,
    RolloutCorrectedRLOOConfig,
    RolloutCorrectionConfig,
)
from trl_rollout_corr.tools.engine_checks import DOUBTFUL, RESERVED, check_names, known_arguments
from trl_rollout_corr.trainers.engine_arguments import engine_arguments
from trl_rollout_corr.trainers.metadata import engine_metadata
from trl_rollout_corr.trainers.model_checks import check_types
from trl_rollout_corr.trainers.trl_checks import check_shared_process


pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("given", [{"dtype": "float16"}, '{"dtype": "float16"}', "{dtype: float16}"])
def test_a_mapping_is_read_in_python_and_on_a_command_line(given):
    assert RolloutCorrectionConfig(rollout_engine_kwargs=given).settings.rollout_engine_kwargs == {"dtype": "float16"}
    assert RolloutCorrectionConfig(rollout_engine_kwargs="none").settings.rollout_engine_kwargs is None


@pytest.mark.parametrize("given", ["float16", ["dtype"], {1: 2}, 3])
def test_what_is_no_mapping_is_refused(given):
    with pytest.raises(ValueError, match="`rollout_engine_kwargs` must be a mapping from arguments of vLLM's engine"):
        RolloutCorrectionConfig(rollout_engine_kwargs=given)


COLOCATED = {"use_vllm": True, "vllm_mode": "colocate", "bf16": False, "use_cpu": True}


@pytest.mark.parametrize("name", RESERVED)
def test_what_is_decided_elsewhere_is_refused_with_the_reason(tmp_path, name):
    with pytest.raises(ValueError, match=rf"for '{name}' is 1, which is set elsewhere: .+ Remove it"):
        RolloutCorrectedGRPOConfig(str(tmp_path), **COLOCATED, rollout_engine_kwargs={name: 1})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({}, "`use_vllm` is False"), ({"use_vllm": True, "vllm_mode": "server"}, "a server has the arguments")],
)
def test_arguments_of_another_engine_warn(tmp_path, fields, reason):
    on_a_cpu = {"output_dir": str(tmp_path), "bf16": False, "use_cpu": True}
    with pytest.warns(UserWarning, match=f"`rollout_engine_kwargs` .* has no effect: {reason}"):
        RolloutCorrectedGRPOConfig(rollout_engine_kwargs={"dtype": "float16"}, **on_a_cpu, **fields)


@pytest.mark.parametrize("config_class", [RolloutCorrectedGRPOConfig, RolloutCorrectedRLOOConfig])
def test_arguments_that_vllm_does_not_have_are_refused_before_it_starts(tmp_path, config_class):
    fields = {"output_dir": str(tmp_path), **COLOCATED}
    message = r"for 'enforce_egaer' is True, and no engine argument of vLLM \d.* Did you mean 'enforce_eager'\?"
    with pytest.raises(ValueError, match=message):
        config_class(**fields, rollout_engine_kwargs={"enforce_egaer": True})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # arguments of `LLM` and of `EngineArgs`
        config_class(**fields, rollout_engine_kwargs={"disable_custom_all_reduce": True, "max_num_batched_tokens": 64})


def test_what_cannot_be_looked_up_is_left_to_vllm(monkeypatch):
    monkeypatch.setattr("vllm.engine.arg_utils.EngineArgs", lambda **kwargs: None)  # takes everything
    check_names({"enforce_egaer": True})
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)  # has moved
    check_names({"enforce_egaer": True})
    monkeypatch.delattr(vllm_generation, "LLM")  # no vLLM
    check_names({"enforce_egaer": True})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"speculative_config": {"method": "ngram"}},
            "'speculative_config'. Perhaps the log-probabilities belong",
        ),
        ({"logits_processors": ["a.B"]}, "'logits_processors'. A processor of logits changes what vLLM samples"),
        (
            {"hf_overrides": {"rope_theta": 1e6}},
            "'rope_theta' of the model's .*perhaps vLLM then computes another model",
        ),
        (
            {"override_generation_config": {"top_p": 0.9}},
            "'top_p' in 'override_generation_config', which has no effect",
        ),
        ({"quantization_config": {"linear": "fp8_per_channel"}}, "without 'quantization'. vLLM then rounds no layer"),
    ],
)
def test_arguments_that_change_what_a_log_probability_means_are_named(tmp_path, kwargs, message):
    with pytest.warns(UserWarning, match=message) as caught:
        RolloutCorrectedGRPOConfig(str(tmp_path), **COLOCATED, rollout_engine_kwargs=kwargs)
    assert len(caught) == 1


def test_every_doubtful_argument_is_one_of_vllm():
    unknown = DOUBTFUL.keys() - known_arguments(vllm_generation.LLM)
    assert not unknown  # a newer vLLM may drop some


def test_no_quantization_leaves_what_trl_asks_for(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_generation, "LLM", lambda **kwargs: kwargs)
    args = RolloutCorrectedGRPOConfig(
        str(tmp_path),
        bf16=False,
        use_cpu=True,
        use_vllm=True,
        rollout_engine_kwargs={"quantization": None, "dtype": "half"},
    )
    with engine_arguments(args, args.settings):
        assert vllm_generation.LLM(quantization="bitsandbytes") == {"quantization": "bitsandbytes", "dtype": "half"}


def test_different_types_warn():
    with pytest.warns(UserWarning, match="The trainer computes in float16 and the sampler in bfloat16"):
        check_types({"trainer_dtype": "float16", "sampler_dtype": "bfloat16"})
    with pytest.warns(
        UserWarning, match="keeps keys and values in fp8, .*Remove `kv_cache_dtype` from `rollout_engine"
    ):
        check_types({"kv_cache_dtype": "fp8"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_types({"trainer_dtype": "bfloat16", "sampler_dtype": "bfloat16", "kv_cache_dtype": "auto"})


@pytest.mark.slow
def test_arguments_reach_the_engine(tiny_model_path, tmp_path):
    kwargs = {
        "dtype": "float32", "enforce_eager": True, "max_logprobs": 7, "num_gpu_blocks_override": 256,
        "hf_overrides": {"head_dtype": "bfloat16"},
    }  # fmt: skip
    trainer = build(
        RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig, tiny_model_path, tmp_path,
        **{**VLLM, "rollout_engine_kwargs": kwargs, "max_steps": 1},
    )  # fmt: skip
    config = trainer.vllm_generation.llm.llm_engine.vllm_config
    assert config.model_config.max_logprobs == 7
    assert config.model_config.head_dtype == torch.bfloat16
    types = {"sampler_dtype": "float32", "sampler_head_dtype": "bfloat16", "kv_cache_dtype": "auto"}
    assert engine_metadata(config) == types
    assert not trainer._watchers
    trainer.train()


SHARED = {"use_vllm": True, "vllm_mode": "colocate", "bf16": False, "use_cpu": True}
BREAKS = """
import sys
from trl import GRPOConfig, GRPOTrainer
from tests.tiny import length_reward, prompts
trainer = GRPOTrainer(
    sys.argv[1], length_reward, train_dataset=prompts(8), args=GRPOConfig(
        sys.argv[2], use_vllm=True, vllm_mode="colocate", vllm_model_impl=sys.argv[3], bf16=False, use_cpu=True,
        report_to=[], max_steps=1, per_device_train_batch_size=4, num_generations=4, max_completion_length=4,
        vllm_max_model_length=64))
ids = trainer.processing_class("12", return_tensors="pt").input_ids
print(trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids.ne(-1).long(), 1)[0].shape)
"""


@pytest.mark.parametrize("config_class", [RolloutCorrectedGRPOConfig, RolloutCorrectedRLOOConfig])
def test_what_breaks_the_trainer_in_the_process_of_both_is_refused(tmp_path, monkeypatch, config_class):
    fields = {"output_dir": str(tmp_path), **SHARED}
    with pytest.raises(ValueError, match=r"`vllm_model_impl` is 'transformers', .*forward pass of the trainer fails"):
        config_class(**fields, vllm_model_impl="transformers")
    config_class(**{**fields, "vllm_mode": "server"}, vllm_model_impl="transformers")
    for value, refused in (("0", False), ("1", True)):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        with (
            pytest.raises(ValueError, match=r"VLLM_BATCH_INVARIANT is set, .* on a CPU") if refused else nullcontext()
        ):
            config_class(**fields)
    config_class(**{**fields, "vllm_mode": "server"})


def test_batch_invariance_warns_on_an_older_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    config = RolloutCorrectedGRPOConfig(**{"output_dir": str(tmp_path), **SHARED, "vllm_mode": "server"})
    config.vllm_mode, config.use_cpu = "colocate", False
    for name in ("torch.accelerator.is_available", "torch.cuda.is_available"):
        monkeypatch.setattr(name, lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 6))
    with pytest.warns(UserWarning, match="^Perhaps the first backward pass will fail.*never run"):
        check_shared_process(config, config.settings)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_shared_process(config, config.settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "environment", "error"),
    [("transformers", {}, "do_not_compile"), ("vllm", {"VLLM_BATCH_INVARIANT": "1"}, "Error")],
)
def test_trl_and_vllm_fail_where_a_setting_is_refused(tiny_model_path, tmp_path, implementation, environment, error):
    """Once this fails, vLLM has changed, and the refusal can go."""
    command = [sys.executable, "-c", BREAKS, tiny_model_path, str(tmp_path), implementation]
    process = run(*command, **environment)
    assert process.returncode != 0, process.stdout
    assert error in process.stderr.strip().splitlines()[-1]
