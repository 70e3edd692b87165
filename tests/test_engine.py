"""Arguments of vLLM's engine that TRL has no field for."""

import pytest
import torch

from tests.training import VLLM, build
from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer, RolloutCorrectionConfig
from trl_rollout_corr.recording.run_metadata import check_types, engine_metadata
from trl_rollout_corr.trainers.engine import RESERVED, check_engine_kwargs


pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("given", [{"dtype": "float16"}, '{"dtype": "float16"}', "{dtype: float16}"])
def test_a_mapping_is_read_in_python_and_on_a_command_line(given):
    assert RolloutCorrectionConfig(rollout_engine_kwargs=given).settings.rollout_engine_kwargs == {"dtype": "float16"}
    assert RolloutCorrectionConfig(rollout_engine_kwargs="none").settings.rollout_engine_kwargs is None


@pytest.mark.parametrize("given", ["float16", ["dtype"], {1: 2}, 3])
def test_what_is_no_mapping_is_refused(given):
    with pytest.raises(ValueError, match="`rollout_engine_kwargs` must be a mapping from arguments of vLLM's engine"):
        RolloutCorrectionConfig(rollout_engine_kwargs=given)


@pytest.mark.parametrize("name", RESERVED)
def test_what_is_decided_elsewhere_is_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=rf"has '{name}', which is set elsewhere: .+ Remove it"):
        check_engine_kwargs({name: 1})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({}, "`use_vllm` is False"), ({"use_vllm": True, "vllm_mode": "server"}, "a server has the arguments")],
)
def test_arguments_of_another_engine_warn(tmp_path, fields, reason):
    on_a_cpu = {"output_dir": str(tmp_path), "bf16": False, "use_cpu": True}
    with pytest.warns(UserWarning, match=f"`rollout_engine_kwargs` .* has no effect: {reason}"):
        RolloutCorrectedGRPOConfig(rollout_engine_kwargs={"dtype": "float16"}, **on_a_cpu, **fields)


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
    types = {"sampler_dtype": "float32", "sampler_head_dtype": "bfloat16", "kv_cache_dtype": "auto"}
    assert engine_metadata(config) == types
    assert trainer._observer.dump is None
    trainer.train()
