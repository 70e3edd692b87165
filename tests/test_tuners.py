"""Every tuner of the installed PEFT: what is pushed, and what a push leaves behind, also if it is interrupted."""

import inspect
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from peft import get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from trl.generation.vllm_generation import VLLMGeneration

from tests.tiny import load_model
from tests.training import TRAINERS, VLLM, build_checked, logged, messages
from trl_rollout_corr.pushes import merged_adapters as adapters
from trl_rollout_corr.pushes.merged_adapters import _as_before, leaving_base_alone


CONFIGS = {kind.value: config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm", "norm"]
VIRTUAL = {"num_virtual_tokens": 4}
OPTIONS = {
    "ADALORA": {"total_step": 10},
    "BEFT": {"target_modules": ["q_proj", "k_proj", "v_proj"]},  # layers with a bias
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 16},
    "CARTRIDGE": VIRTUAL,
    "CPT": {"cpt_token_ids": [3, 4, 5], "cpt_tokens_type_mask": [1, 2, 3]},
    "FOURIERFT": {"n_frequency": 20},
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": NORMS},
    "MULTITASK_PROMPT_TUNING": {**VIRTUAL, "num_tasks": 1},
    "OFT": {"oft_block_size": 4},
    "PREFIX_TUNING": VIRTUAL,
    "PROMPT_TUNING": VIRTUAL,
    "P_TUNING": VIRTUAL,
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [5, 6]},
    "VBLORA": {"vector_length": 8, "num_vectors": 16},
    "WAVEFT": {"n_frequency": 20},
}
# Why PEFT builds none on the tiny model
NOT_BUILT = {
    "ADAMSS": "scikit-learn is required",
    "ADAPTION_PROMPT": "Unsupported model type",
    "XLORA": "`use_cache` must be False",
}
# What PEFT says of a merge, which TRL asks for at every push: these tuners cannot be trained with vLLM
OF_PROMPTS = ("CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING")
NOT_MERGED = {
    **dict.fromkeys(OF_PROMPTS, AttributeError),
    **dict.fromkeys(("LILY", "POLY", "SHADOW"), NotImplementedError),
}
# Parameters of a tuner that TRL sends with the base. vLLM refuses a name that it does not know, so that this tuner cannot
# be trained with vLLM
SENT_BY_TRL = {"ADALORA": "ranknum"}
# PEFT takes none of their merges back, so that TRL cannot push them
NOT_UNMERGED = {"OSF"}
PUSHED = [kind for kind in CONFIGS if kind not in {*NOT_BUILT, *NOT_MERGED}]
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])


def adapted(kind: str, path: str, dtype: torch.dtype = torch.float32):
    """A PEFT model with an adapter of a kind that changes the policy."""
    options = {"task_type": "CAUSAL_LM", "target_modules": LINEAR, **OPTIONS.get(kind, {})}
    known = inspect.signature(CONFIGS[kind].__init__).parameters
    torch.manual_seed(0)
    config = CONFIGS[kind](**{name: x for name, x in options.items() if name in known})
    model = get_peft_model(load_model(path, dtype), config).eval()
    torch.manual_seed(1)
    for p in model.parameters():
        if p.requires_grad:
            p.data.add_(0.05 * torch.randn_like(p))
    return model


def sending(model) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that TRL sends in a push, one after another."""
    generation = VLLMGeneration.__new__(VLLMGeneration)
    generation.model = model
    generation._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda parameters: nullcontext())
    return generation._iter_named_params()


def sent(model) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in sending(model)}


def state(model):
    """Tensors and modules of a model, by identity and by value, and what PEFT notes of a merge."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    return {
        "identities": {name: id(x) for name, x in tensors.items()},
        "values": {name: x.detach().clone() for name, x in tensors.items()},
        "modules": {name: id(module) for name, module in model.named_modules()},
        "notes": {
            name: {key: repr(x) for key, x in vars(layer).items() if key == "_caches" or "merged" in key}
            for name, layer in model.named_modules()
            if isinstance(layer, BaseTunerLayer)
        },
        "merged": [name for name, layer in model.named_modules() if getattr(layer, "merged", False)],
    }


def assert_as_before(model, before) -> None:
    now = state(model)
    values, values_before = now.pop("values"), before.pop("values")
    assert now == before
    assert all(torch.equal(x, values[name]) for name, x in values_before.items())


@pytest.fixture
def make(tiny_model_path):
    return lambda kind, dtype=torch.float32: adapted(kind, tiny_model_path, dtype)


@pytest.mark.parametrize("kind", PUSHED)
def test_what_is_pushed_is_what_was_trained(make, kind, tiny_model_path):
    """The base with the weights that are sent is the policy; and they are PEFT's own merged weights."""
    model = make(kind)
    before = state(model)
    with leaving_base_alone(model):
        found = sent(model)
    assert_as_before(model, before)
    if kind not in NOT_UNMERGED:
        expected = sent(make(kind))
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=1e-6)
    base = load_model(tiny_model_path)
    of_base = {name: found[name] for name, _ in base.named_parameters()}
    more = found.keys() - of_base.keys()
    assert {name.split(".")[-2] for name in more} == {SENT_BY_TRL[kind]} if kind in SENT_BY_TRL else not more
    with torch.no_grad():
        untrained = base(IDS).logits
        base.load_state_dict(of_base)
        policy = model(IDS).logits
        torch.testing.assert_close(base(IDS).logits, policy, atol=1e-4, rtol=1e-4)
    assert (untrained - policy).abs().max() > 1e-3


@pytest.mark.parametrize("kind", PUSHED)
def test_in_bfloat16_too_a_push_leaves_no_trace(make, kind):
    model = make(kind, torch.bfloat16)
    before = state(model)
    with leaving_base_alone(model):
        found = sent(model)
    assert_as_before(model, before)
    base = dict(load_model(model.config._name_or_path, torch.bfloat16).named_parameters())
    assert all(found[name].dtype == torch.bfloat16 for name in base)
    assert any(not torch.equal(found[name], p) for name, p in base.items())


@pytest.mark.parametrize("kind", NOT_MERGED)
def test_a_tuner_that_peft_cannot_merge_is_refused_by_peft_itself(make, kind):
    model = make(kind)
    before = state(model)
    with pytest.raises(NOT_MERGED[kind]), leaving_base_alone(model):
        sent(model)
    assert_as_before(model, before)


@pytest.mark.parametrize("kind", NOT_BUILT)
def test_a_tuner_that_is_not_built_cannot_be_built(make, kind):
    with pytest.raises((ImportError, ValueError), match=NOT_BUILT[kind]):
        make(kind)
    pytest.skip(f"PEFT: {NOT_BUILT[kind]}")


# Pushes that are interrupted --------------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


@contextmanager
def failing_merge(layer):
    """A merge that fails in one layer after it has merged."""
    merge = type(layer).merge

    def failing(self, *args, **kwargs):
        merge(self, *args, **kwargs)
        if self is layer:
            raise Interrupted

    with patch.object(type(layer), "merge", failing):
        yield


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def interrupted_push(model, place: str) -> None:
    """A push that fails at a place: in the merge of the last layer, between two weights, or after the last one."""
    with leaving_base_alone(model):
        with failing_merge(layers_of(model)[-1]) if place == "in a merge" else nullcontext():
            for n, _ in enumerate(sending(model)):
                if place == "between weights" and n == 9:
                    raise Interrupted
        raise Interrupted


@pytest.mark.parametrize("place", ["in a merge", "between weights", "after the last weight"])
@pytest.mark.parametrize("kind", PUSHED)
def test_a_push_that_is_interrupted_leaves_the_trainer_as_it_was(make, kind, place):
    model = make(kind)
    before = state(model)
    with pytest.raises(Interrupted):
        interrupted_push(model, place)
    assert_as_before(model, before)
    with leaving_base_alone(model):
        again = sent(model)
    expected = make(kind)
    with leaving_base_alone(expected):
        assert all(torch.equal(x, again[name]) for name, x in sent(expected).items())


@pytest.mark.parametrize("place", ["in a merge", "between weights"])
def test_a_push_with_the_merge_of_trl_that_is_interrupted_leaves_no_layer_merged(make, place, monkeypatch):
    """Where layers cannot be copied. Taking a merge back rounds, in a push that ends well as well."""
    monkeypatch.setattr(adapters, "_can_be_copied", lambda layer: False)
    model = make("LORA")
    before = state(model)
    with pytest.raises(Interrupted):
        interrupted_push(model, place)
    now = state(model)
    assert now["merged"] == before["merged"] == []
    for name, x in before["values"].items():
        torch.testing.assert_close(now["values"][name], x, atol=1e-6, rtol=1e-6)


# Runs with vLLM ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(tiny_model_path, tmp_path, shared_engine):
    def trained(kind: str, **fields):
        options = {"target_modules": LINEAR, **OPTIONS.get(kind, {})}
        config = CONFIGS[kind](task_type="CAUSAL_LM", **options)
        fields = {**VLLM, "max_steps": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant", **fields}
        return build_checked(*TRAINERS["grpo"], tiny_model_path, tmp_path, extra={"peft_config": config}, **fields)

    return trained


@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["LN_TUNING", "OSF"])  # PEFT swaps modules in a merge, or takes none back
def test_the_sampler_of_a_run_has_what_was_trained(trained, kind, caplog):
    trainer = trained(kind)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    moved = max(
        float((p - before[name]).abs().max()) for name, p in trainer.model.named_parameters() if name in before
    )
    assert moved > 1e-3
    assert max(logged(trainer, "k3_kl") + logged(trainer, "fresh_k3_kl")) < 1e-6
    assert not [message for message in messages(caplog) if "push" in message]


@pytest.mark.vllm
@pytest.mark.parametrize("place", ["in the engine", "after it"])
@pytest.mark.parametrize("kind", ["LORA", "LN_TUNING"])
def test_a_run_goes_on_after_a_push_that_was_interrupted(trained, kind, place):
    """As with a server that does not answer for a while: the user catches the error, and pushes again."""
    trainer = trained(kind)
    trainer.train()
    generation = trainer.vllm_generation
    before, step = state(trainer.model), trainer.rollout_step
    engine = generation.llm.llm_engine.model_executor.driver_worker
    method = (engine, "reload_weights") if place == "in the engine" else (generation.llm, "reset_prefix_cache")

    def interrupted(*args, **kwargs):
        for weights in kwargs.values():
            next(weights)
        raise Interrupted

    with patch.object(*method, interrupted), pytest.raises(Interrupted):
        generation.sync_weights()
    assert_as_before(trainer.model, dict(before))
    assert trainer.rollout_step == step
    generation.sync_weights()
    assert trainer.rollout_step == trainer.state.global_step > step
    assert_as_before(trainer.model, before)


class PartitionedParameters(OrderedDict):
    """As DeepSpeed's dictionary of parameters (ZeRO-3): it cannot be copied, and a look at a key gathers from all ranks."""

    def __init__(self, parent_module, *args):
        super().__init__(*args)
        self._parent_module = parent_module

    def __getitem__(self, key):
        raise AssertionError("a gather outside of a gathering context")


def test_a_module_whose_parameters_are_partitioned_is_given_back_as_it_was():
    layer = torch.nn.Linear(2, 2)
    before = dict(layer._parameters)
    layer._parameters = PartitionedParameters(layer, before.items())
    with _as_before(layer):
        layer._parameters["weight"] = torch.nn.Parameter(torch.zeros(2, 2))
        layer._parameters["merged"] = None
        layer.merged_adapters = ["default"]
    assert dict(layer._parameters.items()).keys() == before.keys()
    assert all(value is before[name] for name, value in layer._parameters.items())
    assert isinstance(layer._parameters, PartitionedParameters)
    assert not hasattr(layer, "merged_adapters")
