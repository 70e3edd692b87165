"""Engines that quantise weights while they load them: `rollout_engine_kwargs={"quantization": ...}`."""

import json
import shutil
import sys
from pathlib import Path
from textwrap import dedent
from unittest.mock import patch

import pytest
import torch
import vllm
from peft import LoraConfig
from trl.generation import vllm_generation

from tests.asynchronous import parts_for_a_cpu
from tests.launching import output_of, serving
from tests.tiny import build_tiny_model, load_model
from tests.training import TRAINERS, VLLM, build_checked, logged, losing, messages
from trl_rollout_corr.messages import SettingError
from trl_rollout_corr.pushes.server_api import read_server, score_on_server
from trl_rollout_corr.trainers import quantised_engine as engine
from trl_rollout_corr.trainers.quantised_engine import build_quantised, check_scheme


pytestmark = pytest.mark.vllm

SCHEME = "fp8_per_channel"  # the one that vLLM has CPU kernels for
QUANTISED = {
    **VLLM,
    "rollout_engine_kwargs": {"quantization": SCHEME, "enforce_eager": True, "num_gpu_blocks_override": 64},
}
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj", "embed_tokens"], "init_lora_weights": "gaussian"}
TEXT = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11, 12]}, {"prompt_token_ids": [20, 3, 30, 3, 40]}]


KEPT: list = []  # engines, to the end of the process: one that is collected would end the process group of all others


@pytest.fixture(scope="module", autouse=True)
def keeping_engines():
    """Keep the engines of this module, which are not those of `sharing_engines`, as these are in float32."""

    def build(*given, **kwargs):
        KEPT.append(vllm.LLM(*given, **kwargs))
        return KEPT[-1]

    with patch.object(vllm_generation, "LLM", build):
        yield


@pytest.fixture
def make(tiny_model_path, tied_model_path, tmp_path):
    def make(kind="grpo", tied=False, **fields):
        path = tied_model_path if tied else tiny_model_path
        try:
            return build_checked(
                *TRAINERS[kind], path, tmp_path, **{**QUANTISED, "max_steps": 3, "learning_rate": 1e-2, **fields}
            )
        except ValueError as error:
            if "has no kernel" in str(error):
                pytest.skip(str(error))
            raise

    return make


def engine_of(trainer):
    return trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.get_model()


def score(llm) -> list[float]:
    """Log-probabilities of a fixed text."""
    llm.reset_prefix_cache()
    params = vllm_generation.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    outputs = llm.generate(TEXT, params, use_tqdm=False)
    return [
        place[token].logprob
        for output in outputs
        for token, place in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    ]


def flat(lists: list[list[float]]) -> list[float]:
    return [x for inner in lists for x in inner]


def fresh_engine(trainer, path: str, folder: Path):
    """An engine that loads the weights that the trainer would push now from a checkpoint, and quantises them."""
    weights = {name: x.detach().clone() for name, x in trainer.vllm_generation._iter_named_params()}
    if "lm_head.weight" not in weights:  # tied
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    plain = load_model(path)
    plain.load_state_dict(weights)
    shutil.copytree(path, folder)
    plain.save_pretrained(folder)
    arguments = {"max_model_len": 64, "max_num_seqs": 16, "distributed_executor_backend": "external_launcher"}
    arguments |= {"logprobs_mode": "processed_logprobs", "model": str(folder)}
    return build_quantised(vllm_generation.LLM, arguments, QUANTISED["rollout_engine_kwargs"])


@pytest.mark.parametrize(
    ("kind", "tied", "lora"), [("grpo", False, False), ("rloo", True, False), ("grpo", True, True)]
)
def test_after_a_push_the_sampler_has_the_new_weights_with_new_scales(make, tmp_path, kind, tied, lora):
    trainer = make(kind, tied, extra={"peft_config": LoraConfig(**LORA)} if lora else None)
    llm, model = trainer.vllm_generation.llm, engine_of(trainer)
    scales = {name: x.clone() for name, x in model.named_parameters() if name.endswith("weight_scale")}
    assert len(scales) == 8
    trainer.train()
    trainer.vllm_generation.sync_weights()
    pushed = score(llm)
    path = trainer.vllm_generation.model.name_or_path
    assert pushed == score(fresh_engine(trainer, path, tmp_path / "fresh"))

    parameters = dict(model.named_parameters())
    for name, old in scales.items():  # as a push that loads values into tensors of 8 bits
        weight, new = parameters[name.removesuffix("_scale")].data, parameters[name].data
        exact = weight.float() * new.reshape(1, -1)
        weight.copy_((exact / old.reshape(1, -1)).clamp(-448, 448).to(weight.dtype))
        new.copy_(old)
    assert max(abs(a - b) for a, b in zip(score(llm), pushed, strict=True)) > 1e-3


def test_a_run_names_the_layers_and_logs_tensors_that_stand_still(make, caplog):
    trainer = make(max_steps=4)
    (line,) = [message for message in messages(caplog) if "vLLM rounds" in message]
    assert f"`quantization: {SCHEME}`: vLLM rounds mlp.down_proj, mlp.gate_up_proj, self_attn" in line
    assert {x.dtype for name, x in engine_of(trainer).named_parameters() if "head" in name or "embed" in name} == {
        torch.bfloat16
    }
    assert trainer._about["quantization"] == SCHEME
    trainer.train()
    assert logged(trainer, "quantised_unmoved") == [0.0] * 3
    assert all(0 < x < 0.1 for x in logged(trainer, "k3_kl"))


def test_updates_that_rounding_swallows_are_no_failed_push(make, caplog):
    """Norms and biases are not rounded, so they do not train here."""
    trainer = make(max_steps=16, learning_rate=1e-9, extra={"peft_config": LoraConfig(r=4, target_modules=["q_proj"])})
    trainer.train()
    assert logged(trainer, "quantised_unmoved") == [] or min(logged(trainer, "quantised_unmoved")) > 0
    assert not [message for message in messages(caplog) if "two pushes" in message]


def test_pushes_that_lose_weights_are_named(make, caplog):
    trainer = make(max_steps=16, learning_rate=1e-3)
    with losing("everything"), pytest.raises(RuntimeError, match="does not have the weights of the trainer"):
        trainer.train()


def test_quantised_tensors_alone_that_stand_still_get_a_warning_that_begins_with_its_doubt(make, caplog):
    trainer = make(max_steps=16, learning_rate=1e-3, extra={"peft_config": LoraConfig(r=4, target_modules=["q_proj"])})
    with losing("everything"):
        trainer.train()
    assert logged(trainer, "quantised_unmoved") == [1.0] * 15
    (line,) = [message for message in messages(caplog) if "no quantised tensor" in message]
    assert line.startswith("Updates may be smaller than a step of the grid")


@pytest.mark.slow
def test_a_server_quantises_weights_that_come_through_files(make, tiny_model_path, tmp_path):
    """As an engine that loads them from a checkpoint."""
    trainer = make()
    trainer.train()
    expected = score(fresh_engine(trainer, tiny_model_path, tmp_path / "fresh"))
    limits = ["--max-model-len", "64", "--max-num-seqs", "16", "--no-enable-chunked-prefill"]
    environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    options = ["--dtype", "bfloat16", "--quantization", SCHEME, *limits]
    with serving(tiny_model_path, tmp_path / "log", *options, TORCHDYNAMO_DISABLE="1", **environment) as url:
        transfer = parts_for_a_cpu().DiskWeightTransfer(url, tmp_path / "weights")
        transfer.init_weight_transfer()
        texts = [prompt["prompt_token_ids"] for prompt in TEXT]
        before, first = flat([score_on_server(url, tiny_model_path, text) for text in texts]), read_server(url, [])
        transfer.pause()
        transfer.send_weights(trainer.vllm_generation._iter_named_params())
        transfer.resume()
        after, second = flat([score_on_server(url, tiny_model_path, text) for text in texts]), read_server(url, [])
    assert after == pytest.approx(expected, abs=1e-5)
    assert before != pytest.approx(expected, abs=1e-2)
    assert len(second["quantised"]) == 8
    assert all(first["held"][name] != second["held"][name] for name in second["quantised"])


# Mistakes ---------------------------------------------------------------------------------------------------------------


def test_an_unknown_scheme_is_refused_with_the_nearest_name():
    with pytest.raises(
        SettingError, match=r"'quantization' must be a scheme .*, got 'fp8_per_chanel'.*Did you mean 'fp8_per_channel'"
    ):
        check_scheme("fp8_per_chanel", {})


def test_a_model_that_is_quantised_already_is_refused(tiny_model_path, tmp_path):
    folder = Path(shutil.copytree(tiny_model_path, tmp_path / "quantised"))
    config = json.loads((folder / "config.json").read_text())
    check_scheme("fp8", {"model": str(folder)})
    expected = r"the trainer's model is quantised already\. Remove `quantization`"
    with pytest.raises(ValueError, match=expected):
        check_scheme("fp8", {"model": str(folder), "quantization": "bitsandbytes"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match=expected):
        check_scheme("fp8", {"model": str(folder)})


def test_a_scheme_without_kernel_is_refused_with_those_that_work(make, tiny_model_path, tmp_path):
    make()  # skips where no scheme works
    without = [scheme for scheme in ("fp8", "fp8_per_tensor", "fp8_per_block") if not engine.computes(scheme)]
    if not without:
        pytest.skip("This machine has kernels for all schemes.")
    kwargs = {**QUANTISED["rollout_engine_kwargs"], "quantization": without[0]}
    message = rf"for 'quantization' is '{without[0]}', for which this vLLM has no kernel .*'{SCHEME}'"
    with pytest.raises(SettingError, match=message):
        build_checked(*TRAINERS["grpo"], tiny_model_path, tmp_path, **{**QUANTISED, "rollout_engine_kwargs": kwargs})


@pytest.mark.parametrize("judges", [True, False])
def test_another_error_is_not_called_a_missing_kernel(make, monkeypatch, judges):
    if not judges:  # vLLM asks more of its configuration than the layer that we try, as it did on an H200
        monkeypatch.setattr(engine, "computes", lambda scheme: False)
    with pytest.raises(Exception) as raised:  # noqa: PT011 - vLLM's own
        make(rollout_engine_kwargs={**QUANTISED["rollout_engine_kwargs"], "no_such_argument": 1})
    assert "no_such_argument" in str(raised.value)
    assert "has no kernel" not in str(raised.value)


def test_a_scheme_that_changes_no_layer_says_so(make, caplog):
    make(rollout_engine_kwargs={**QUANTISED["rollout_engine_kwargs"], "quantization": "int8_per_channel_weight_only"})
    (said,) = [message for message in messages(caplog) if "has no effect: vLLM rounds no layer" in message]
    assert "'fp8_per_channel'" in said
    assert "'nvfp4_per_token'" not in said  # for experts alone, too


@pytest.mark.slow  # vLLM has to be new: it prepares for experts, or does not, once per process
def test_routers_keep_their_type_and_experts_are_pushed(tmp_path):
    path = build_tiny_model(tmp_path / "model", experts=4)
    script = f"""
        from pathlib import Path
        from tests.test_quantised import QUANTISED, engine_of, fresh_engine, score
        from tests.training import TRAINERS, build

        kwargs = {{**QUANTISED["rollout_engine_kwargs"], "quantization": "online"}}
        kwargs["quantization_config"] = {{"linear": "{SCHEME}"}}
        fields = {{**QUANTISED, "rollout_engine_kwargs": kwargs, "learning_rate": 1e-2, "max_steps": 3}}
        trainer = build(*TRAINERS["grpo"], {path!r}, Path({str(tmp_path)!r}), **fields)
        types = {{name: str(x.dtype) for name, x in engine_of(trainer).named_parameters()}}
        assert types["model.layers.0.self_attn.qkv_proj.weight"] == "torch.float8_e4m3fn", types
        assert types["model.layers.0.mlp.gate.weight"] == "torch.bfloat16", types
        QUANTISED["rollout_engine_kwargs"] = kwargs
        trainer.train()
        trainer.vllm_generation.sync_weights()
        assert score(trainer.vllm_generation.llm) == score(fresh_engine(trainer, {path!r}, Path({str(tmp_path)!r}, "fresh")))
    """
    output_of(sys.executable, "-c", dedent(script))
