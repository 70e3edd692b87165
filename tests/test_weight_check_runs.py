"""
Many healthy runs, in none of which a check or the alarm may say that weights do not arrive, and runs with broken pushes, which
a check must name within 30 steps.
"""

from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tests.launching import ROOT
from tests.test_agents import look
from tests.tiny import StaleSampler, build_tiny_tokenizer, conversations, prompts, with_tools
from tests.training import TRAINERS, VLLM, build, logged, losing, said_of_pushes


pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:.*changes? the distribution", "ignore:The trainer computes", "ignore:Dropout"),
]

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
SAMPLING: dict[str, dict[str, Any]] = {
    "min_tokens": {"generation_kwargs": {"min_tokens": 6}},
    "repetition penalty": {"repetition_penalty": 1.4},
    "presence penalty": {"generation_kwargs": {"presence_penalty": 1.0, "frequency_penalty": 0.5}},
    "logit_bias": {"generation_kwargs": {"logit_bias": {1: -100.0}}},
    "bad_words": {"generation_kwargs": {"bad_words": ["a", "b"]}},
    "allowed tokens": {"generation_kwargs": {"allowed_token_ids": list(range(1, 30))}},
    "structured output": {"vllm_structured_outputs_regex": "[a-m]{1,6}"},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.5},
}
TRAINING: dict[str, dict[str, Any]] = {
    "plain": {},
    "bypass": {"rollout_correction": "bypass_ppo_clip"},
    "metrics only": {"rollout_metrics_only": True},
    "no learning rate": {"learning_rate": 0.0},
    "tiny learning rate": {"learning_rate": 1e-9},
    "collapse": {"learning_rate": 3e-2},
    "warmup": {"warmup_steps": 10},
    "one group per micro-batch": {"per_device_train_batch_size": 4, "num_generations": 4},
    "short completions": {"max_completion_length": 1},
    "four iterations": {"schedule": "two iterations", "num_iterations": 4},
    "several steps per generation": {"schedule": "several steps per generation"},
    "not a multiple": {"schedule": "not a multiple"},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "extra": {"eval_dataset": prompts(8)}},
    "weight decay": {"weight_decay": 0.1},
    "gradient accumulation": {"schedule": "several generations per step"},
    "logs of five steps": {"logging_steps": 5},
}
OTHERS: dict[str, dict[str, Any]] = {
    "adapter": {"extra": {"peft_config": LORA}, "learning_rate": 1e-3},
    "adapter, small learning rate": {"extra": {"peft_config": LORA}, "learning_rate": 1e-6},
    "rsLoRA": {"extra": {"peft_config": {**LORA, "use_rslora": True}}, "learning_rate": 1e-3},
    "DoRA": {"extra": {"peft_config": {**LORA, "use_dora": True}}, "learning_rate": 1e-2},
    "adapter and embedding": {"extra": {"peft_config": {**LORA, "modules_to_save": ["embed_tokens"]}}},
}

# Kind of trainer, whether the head is tied, type of the sampler, and the fields of the run
HEALTHY: dict[str, tuple[str, bool, str, dict[str, Any]]] = {}
for name, fields in {**SAMPLING, **TRAINING}.items():
    HEALTHY[f"grpo {name}"] = "grpo", False, "float32", fields
for name, fields in (SAMPLING | TRAINING | OTHERS).items():
    HEALTHY[f"grpo bfloat16 {name}"] = "grpo", True, "bfloat16", fields
for name in ("plain", "collapse", "several steps per generation", "evaluation", "min_tokens", "top_k"):
    if name != "min_tokens":
        HEALTHY[f"rloo {name}"] = "rloo", False, "float32", (SAMPLING | TRAINING)[name]
    HEALTHY[f"rloo bfloat16 {name}"] = "rloo", True, "bfloat16", (SAMPLING | TRAINING)[name]
for name, fields in OTHERS.items():
    HEALTHY[f"grpo {name}"] = "grpo", False, "float32", fields

LOST = [
    "everything", "the head", "one layer", "norms", "every second push", "every third push", "all but every third push",
    "all but every fourth push", "pushes from the tenth on",
]  # fmt: skip
BROKEN = {f"{lost}, {dtype}": (lost, dtype) for lost in LOST for dtype in ("float32", "bfloat16")}


@pytest.fixture
def make(tiny_model_path, tied_model_path, tmp_path, shared_engine):
    def make(kind="grpo", tied=False, dtype="float32", **fields):
        path = tied_model_path if tied else tiny_model_path
        fields = {**VLLM, "max_steps": 30, "learning_rate": 1e-4, **fields}
        extra = dict(fields.pop("extra", {}))
        if "peft_config" in extra:
            extra["peft_config"] = LoraConfig(**extra["peft_config"])
        if dtype == "bfloat16":
            fields["model_init_kwargs"] = {"dtype": "bfloat16"}
        fields = {"rollout_monitor": "warn", "rollout_engine_kwargs": {"dtype": dtype}, **fields}
        return build(*TRAINERS[kind], path, tmp_path, extra=extra, **fields)

    return make


@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_run_hears_nothing(make, case, caplog):
    kind, tied, dtype, fields = HEALTHY[case]
    trainer = make(kind, tied, dtype, **fields)
    trainer.train()
    assert trainer.state.global_step == 30
    assert trainer._pushes.checks.weights._before is not None  # it could look
    assert len(logged(trainer, "fresh_k3_kl")) >= 3
    assert not said_of_pushes(caplog)


@pytest.mark.parametrize("lag", [1, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_announced_lag_hears_nothing(make, monkeypatch, lag, dtype, caplog):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from quickstart import Lag

    trainer = make(dtype=dtype, learning_rate=1e-3)
    Lag(trainer, lag)
    trainer.train()
    assert not said_of_pushes(caplog)


@pytest.mark.parametrize("learning_rate", [1e-5, 1e-3])
def test_an_engine_of_eight_bits_hears_nothing(make, learning_rate, caplog):
    engine = {"quantization": "fp8_per_channel", "dtype": "bfloat16"}
    make(learning_rate=learning_rate, rollout_engine_kwargs=engine).train()
    assert not said_of_pushes(caplog)


def test_weights_of_eight_bits_hear_nothing(make, caplog):
    trainer = make(learning_rate=1e-3)
    generation = trainer.vllm_generation
    exact = generation._iter_named_params

    def rounded():
        """Weights with a scale per row, as a quantised engine computes with them."""
        for name, weight in exact():
            scale = weight.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
            yield name, torch.round(weight.detach() / scale) * scale if weight.dim() > 1 else weight

    generation._iter_named_params = rounded
    trainer.train()
    assert not said_of_pushes(caplog)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_hears_nothing(make, tmp_path, dtype, caplog):
    fields = {"dtype": dtype, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 10}
    make(**fields, max_steps=10).train()
    make(**fields).train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert not said_of_pushes(caplog)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tools_hear_nothing(make, dtype, caplog):
    extra = {
        "tools": [look],
        "train_dataset": conversations(64),
        "processing_class": with_tools(build_tiny_tokenizer(), "look", "place"),
    }
    reward = {"reward_funcs": lambda completions, **kwargs: [float(len(x)) for x in completions]}
    make(dtype=dtype, extra={**extra, **reward}, max_completion_length=24).train()
    assert not said_of_pushes(caplog)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_easy_prompts_first_hear_nothing(make, dtype, caplog):
    from datasets import Dataset

    data = Dataset.from_dict({"prompt": ["aaaaaaaaaaaaaaaa="] * 4 + ["12 ab=", "a long prompt="] * 30})
    make(dtype=dtype, learning_rate=1.5e-4, extra={"train_dataset": data}, shuffle_dataset=False).train()
    assert not said_of_pushes(caplog)


def test_dropout_hears_nothing(make, caplog):
    make(model_init_kwargs={"attention_dropout": 0.3}, learning_rate=1e-3).train()
    assert not said_of_pushes(caplog)


def test_samples_of_a_function_hear_nothing(make, tiny_model_path, caplog):
    sampler = StaleSampler(tiny_model_path, noise=0.1)
    make(learning_rate=1e-3, extra={"rollout_func": partial(StaleSampler.__call__, sampler)}).train()
    assert not said_of_pushes(caplog)


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_broken_push_is_named(make, kind, case):
    lost, dtype = BROKEN[case]
    learning_rate = 1e-2 if lost == "norms" else 1e-5  # below, norms stay the same in bfloat16
    trainer = make(kind, dtype=dtype, learning_rate=learning_rate)
    with losing(lost), pytest.raises(RuntimeError, match="does not have the weights of the trainer"):
        trainer.train()
    assert trainer.state.global_step <= 12
