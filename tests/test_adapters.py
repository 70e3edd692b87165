"""Pushes of an adapter: they send base and adapter together, and leave the base as it is."""

from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer

from tests.tiny import build_tiny_model, load_model
from tests.training import TRAINERS, VLLM, build_checked, logged, messages, saying
from trl_rollout_corr.pushes.merged_adapters import leaving_base_alone
from trl_rollout_corr.pushes.pushes import refuse_packed_base
from trl_rollout_corr.tools.diagnosis import diagnose, read_tokens
from trl_rollout_corr.tools.diagnosis.text import evidence_in_words


LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    "bias": {"target_modules": ["q_proj", "v_proj"], "lora_bias": True},
    "embedding and head": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "saved modules": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": {"embed_tokens": [3, 4]}},
    "all linear": {"target_modules": "all-linear"},
}
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def adapted(path: str, dtype: torch.dtype, autocast: bool = True, **config):
    """A PEFT model with an adapter that changes the policy."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR, "task_type": TaskType.CAUSAL_LM, **config}
    torch.manual_seed(0)
    model = get_peft_model(load_model(path, dtype), LoraConfig(**options), autocast_adapter_dtype=autocast)
    for p in model.parameters():
        if p.requires_grad:
            p.data.add_(0.05 * torch.randn_like(p))
    return model


def pushed(model) -> dict[str, torch.Tensor]:
    """Weights of a push, as TRL reads them."""
    model.merge_adapter()
    weights = {name: p.data.clone() for name, p in model.named_parameters()}
    model.unmerge_adapter()
    return weights


@contextmanager
def merging_itself(model):
    """The layers that PEFT merges one after another into the base of the model."""
    merges, layers = [], [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    merge_adapter = type(model.base_model).merge_adapter

    def noted(self, *args, **kwargs):
        merge_adapter(self, *args, **kwargs)
        merges.extend(layer for layer in layers if layer.merged)

    with patch.object(type(model.base_model), "merge_adapter", noted):
        yield merges


def state(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_pushed_is_what_peft_merges_rounded_once(tiny_model_path, tied_model_path, kind, tied):
    if tied and kind == "saved modules":
        pytest.skip("PEFT unties a head that is saved")
    path = tied_model_path if tied else tiny_model_path
    precise = adapted(path, torch.float32, **KINDS[kind])
    expected = pushed(adapted(path, torch.float32, **KINDS[kind]))
    before = state(precise)
    with leaving_base_alone(precise), merging_itself(precise) as merges:
        found = pushed(precise)
        assert next(precise.named_parameters())[1] is next(precise.parameters())
    assert not merges
    assert same(state(precise), before)
    assert not any(getattr(module, "merged", False) for module in precise.modules())
    assert found.keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in found.items())
    assert any(not torch.equal(x, before[name]) for name, x in found.items())


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("kind", ["lora", "dora", "embedding and head"])
def test_in_bfloat16_a_push_is_at_least_as_exact_and_leaves_no_trace(tiny_model_path, kind, autocast):
    """Base and adapter are those of bfloat16, merged in float32."""
    model = adapted(tiny_model_path, torch.bfloat16, autocast, **KINDS[kind])
    exact = pushed(adapted(tiny_model_path, torch.bfloat16, autocast, **KINDS[kind]).float())
    merged = pushed(adapted(tiny_model_path, torch.bfloat16, autocast, **KINDS[kind]))
    before = state(model)
    with leaving_base_alone(model):
        found = pushed(model)
    assert same(state(model), before)
    assert all(x.dtype == before[name].dtype for name, x in found.items())
    base = [name for name in found if ".base_layer." in name]
    assert all(torch.equal(found[name], exact[name].to(torch.bfloat16)) for name in base)
    as_trl = all(torch.equal(merged[name], found[name]) for name in base)
    assert as_trl if autocast and kind == "lora" else autocast or not as_trl


def test_experts_are_merged_too(tmp_path):
    path = build_tiny_model(tmp_path / "experts", experts=4)
    model, expected = (adapted(path, torch.float32, **EXPERTS) for _ in range(2))
    before = state(model)
    with leaving_base_alone(model), merging_itself(model) as merges:
        found = pushed(model)
    assert not merges
    assert same(found, pushed(expected))
    assert same(state(model), before)
    assert sum(not torch.equal(x, before[name]) for name, x in found.items() if ".experts." in name) == 4


def test_a_layer_that_cannot_be_copied_is_merged_by_trl(tiny_model_path):
    model = adapted(tiny_model_path, torch.float32)
    for refused in ({"fsdp_version": 1}, {}):
        if not refused:
            model.merge_adapter()  # by the user
        with leaving_base_alone(model, **refused), merging_itself(model) as merges:
            pushed(model)
        assert merges
    with leaving_base_alone(load_model(tiny_model_path)):
        pass


def test_a_packed_base_with_a_server_is_refused(tiny_model_path):
    model = adapted(tiny_model_path, torch.float32)
    refuse_packed_base(model, "server")
    layer = model.base_model.model.model.layers[0].mlp.down_proj.base_layer
    layer.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    refuse_packed_base(model, "colocate")
    with pytest.raises(ValueError, match=r"base of the adapter is quantised.*load the model without"):
        refuse_packed_base(model, "server")


# Runs with vLLM ---------------------------------------------------------------------------------------------------------

BFLOAT16 = {"model_init_kwargs": {"dtype": "bfloat16"}, "rollout_engine_kwargs": {"dtype": "bfloat16"}}
ADAPTER = {"r": 4, "target_modules": LINEAR}


@pytest.fixture
def make(tiny_model_path, tmp_path, shared_engine):
    def make(kind="grpo", build=build_checked, **fields):
        config = LoraConfig(**ADAPTER)
        fields = {**VLLM, **BFLOAT16, "max_steps": 6, "learning_rate": 1e-2, **fields}
        return build(*TRAINERS[kind], tiny_model_path, tmp_path, extra={"peft_config": config}, **fields)

    return make


def frozen(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}


def merging_as_trl(monkeypatch):
    """Pushes with TRL's own merge."""
    monkeypatch.setattr("trl_rollout_corr.pushes.merged_adapters.leaving_base_alone", lambda *args: nullcontext())


@pytest.mark.seam
@pytest.mark.vllm
@pytest.mark.parametrize("kind", TRAINERS)
def test_pushes_of_a_run_leave_the_base_as_it_is(make, kind, monkeypatch, tmp_path, caplog):
    trainer = make(kind, rollout_dump_dir=str(tmp_path / "ours"))
    before = frozen(trainer)
    trainer.train()
    assert same(frozen(trainer), before)
    assert not messages(caplog)
    assert "frozen_base" not in [finding.name for finding in diagnose(read_tokens(tmp_path / "ours")).findings]
    ours = logged(trainer, "k3_kl")
    merging_as_trl(monkeypatch)
    trainer = make(kind, rollout_dump_dir=str(tmp_path / "trl"))
    with saying(
        caplog, r"^Perhaps something else writes.*changed \d of 8 frozen weights.*`base_model.*base_layer.weight`"
    ):
        trainer.train()
    assert not same(frozen(trainer), before)
    findings = {finding.name: finding for finding in diagnose(read_tokens(tmp_path / "trl")).findings}
    assert "base_layer.weight" in evidence_in_words(findings["frozen_base"])
    assert max(ours) < 2 * max(logged(trainer, "k3_kl"))


@pytest.mark.vllm
def test_a_quantised_base_that_changes_ends_the_run_before_its_second_push(make, monkeypatch, caplog):
    """A base that says of itself that it is quantised, as bitsandbytes does."""
    merging_as_trl(monkeypatch)
    trainer = make(max_steps=6)
    trainer._pushes.checks.frozen._quantised = True
    with pytest.raises(RuntimeError, match="The base is quantised, and the adapter was merged into it"):
        trainer.train()
    assert trainer.state.global_step == 2  # the adapter of the first push is 0


@pytest.mark.vllm
@pytest.mark.slow
def test_300_pushes_leave_the_base_as_it_is(make):
    trainer = make(max_steps=300, learning_rate=1e-3)
    before = frozen(trainer)
    trainer.train()
    assert same(frozen(trainer), before)
