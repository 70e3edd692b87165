"""Arguments of vLLM's engine that TRL has no field for."""

import pytest
import torch

from tests.training import VLLM, build
from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer, RolloutCorrectionConfig
from trl_rollout_corr.trainers.engine import RESERVED, check_engine_kwargs, engine_arguments, serve_line
from trl_rollout_corr.trainers.run_metadata import check_types, engine_metadata


pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("given", [{"dtype": "float16"}, '{"dtype": "float16"}'])
def test_a_mapping_is_read_in_python_and_on_a_command_line(given):
    assert RolloutCorrectionConfig(rollout_engine_kwargs=given).rollout_engine_kwargs == {"dtype": "float16"}
    assert RolloutCorrectionConfig(rollout_engine_kwargs="none").rollout_engine_kwargs is None


@pytest.mark.parametrize("given", ["float16", ["dtype"], {1: 2}, 3])
def test_what_is_no_mapping_is_refused(given):
    with pytest.raises(ValueError, match="`rollout_engine_kwargs` must be a mapping from arguments of vLLM's engine"):
        RolloutCorrectionConfig(rollout_engine_kwargs=given)


@pytest.mark.parametrize("name", RESERVED)
def test_what_is_decided_elsewhere_is_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=rf"has '{name}', which is set elsewhere: .+ Remove it"):
        check_engine_kwargs({name: 1})


def test_what_the_engine_does_not_have_is_refused_with_what_was_meant():
    with pytest.raises(ValueError, match=r"'kv_cache_dtyp', which is no argument .* Did you mean 'kv_cache_dtype'"):
        check_engine_kwargs({"kv_cache_dtyp": "fp8"})


def test_the_line_that_starts_a_server():
    kwargs = {"dtype": "float16", "enforce_eager": True, "hf_overrides": {"head_dtype": "float32"}}
    line = """vllm serve MODEL --dtype float16 --enforce-eager --hf-overrides '{"head_dtype": "float32"}'"""
    assert serve_line(kwargs) == line
    assert serve_line({**kwargs, "dtype": torch.float16, "hf_overrides": {"head_dtype": torch.float32}}) == line


def test_arguments_without_an_engine_warn_and_those_of_a_server_are_printed(tmp_path, capsys):
    fields = {
        "output_dir": str(tmp_path),
        "bf16": False,
        "use_cpu": True,
        "rollout_engine_kwargs": {"dtype": "float16"},
    }
    with (
        pytest.warns(UserWarning, match="has no effect: `use_vllm` is False"),
        engine_arguments(RolloutCorrectedGRPOConfig(**fields)),
    ):
        pass
    with engine_arguments(RolloutCorrectedGRPOConfig(use_vllm=True, vllm_mode="server", **fields)):
        assert "vllm serve MODEL --dtype float16" in capsys.readouterr().out


def test_different_types_warn():
    with pytest.warns(UserWarning, match="The trainer computes in float16 and the sampler in bfloat16"):
        check_types({"trainer_dtype": "float16", "sampler_dtype": "bfloat16"})


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
    assert engine_metadata(config) == {"sampler_dtype": "float32", "kv_cache_dtype": "auto"}
    assert trainer._observer.dump is None
    trainer.train()
