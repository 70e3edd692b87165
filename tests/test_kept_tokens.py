"""`rollout_support: replay`: truncated sampling by a real vLLM, and log-probabilities over the tokens that it kept."""

from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM

from tests.tiny import StaleSampler
from tests.training import TRAINERS, VLLM, build, logged, micro_batches
from trl_rollout_corr.replay import kept_tokens as module
from trl_rollout_corr.replay.choices import check_kept_tokens
from trl_rollout_corr.replay.kept_tokens import (
    KEPT,
    KEPT_SIZES,
    Sets,
    columns_of_sets,
    kept_logps,
    over_kept_tokens,
)
from trl_rollout_corr.tools.probe.process import Probe
from trl_rollout_corr.trainers.forward_pass import Rescoring


REPLAY = {
    **VLLM,
    "rollout_support": "replay",
    "rollout_is": "token",
    "rollout_is_threshold": [0.01, 100.0],
    "max_steps": 2,
}
TOGETHER = {"top_p": 0.9, "top_k": 10, "min_p": 0.05, "temperature": 0.7}


@pytest.fixture
def make(tiny_model_path, tmp_path, shared_engine):
    return lambda name="grpo", **fields: build(*TRAINERS[name], tiny_model_path, tmp_path, **{**REPLAY, **fields})


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("grpo", {"top_p": 0.7}),
        ("grpo", {"top_k": 5}),
        ("grpo", {"min_p": 0.2}),
        ("grpo", {**TOGETHER, "schedule": "several steps per generation", "beta": 0.1}),
        ("rloo", {**TOGETHER, "beta": 0.1}),
        ("rloo", {"generation_kwargs": {"top_k": 5}, "rollout_correction": "bypass_pg_is"}),
    ],
)
def test_ratios_are_unbiased_under_truncated_sampling(make, name, fields):
    trainer = make(name, **fields)
    trainer.train()
    weights, k3 = logged(trainer, "rollout_is_mean"), logged(trainer, "k3_kl")
    first = 1 if "schedule" not in fields else 2  # steps with the weights that sampled
    assert weights[:first] == pytest.approx([1.0] * first, abs=1e-3)
    assert max(k3[:first]) < 1e-6  # as without truncation, in float32
    assert logged(trainer, "nonfinite_fraction")[0] == 0.0
    if fields.get("beta"):  # the reference is the policy so far, and scored over the same tokens
        assert trainer.state.log_history[0]["kl"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.vllm
def test_gradients_are_those_of_the_truncated_policy(make):
    trainer = make(top_p=0.8, min_p=0.02, max_steps=1)
    batch = micro_batches(trainer)[0]
    kept_ids, sizes, length = batch[KEPT].long(), batch[KEPT_SIZES], batch["completion_ids"].shape[1]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    present = batch["completion_mask"].bool()
    assert 1 <= sizes[present].min() < sizes.max() < 40  # of 47

    def gradients(logps):
        trainer.model.zero_grad()
        (logps * present).sum().backward()
        return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}

    logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1] / trainer.temperature
    kept = torch.zeros(logits.shape, dtype=torch.bool)
    for row, column in present.nonzero().tolist():
        before = sizes[row, :column].sum()
        kept[row, column, kept_ids[row, before : before + sizes[row, column]]] = True
    expected = logits.masked_fill(~kept & present.unsqueeze(2), -torch.inf).log_softmax(-1)
    expected = expected.gather(2, batch["completion_ids"].unsqueeze(2))[..., 0]
    with trainer._during(Rescoring(batch)):
        found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length)[0]
    torch.testing.assert_close(found[present], expected[present], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[present], batch["sampling_per_token_logps"][present], rtol=1e-3, atol=1e-3)
    wanted = gradients(expected)
    for name, gradient in gradients(found).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.vllm
def test_passes_outside_the_loss_are_over_the_kept_tokens_too(make):
    """Of a probe, and of a second look at single sequences."""
    trainer = make(top_k=5, max_steps=1)
    batch = micro_batches(trainer)[0]
    probe = Probe.__new__(Probe)
    probe.trainer = trainer
    sampled, mask = batch["sampling_per_token_logps"], batch["completion_mask"].bool()
    (scored,), (alone,) = probe.score([batch]), probe.score_alone([batch])
    for found in (scored, alone):
        torch.testing.assert_close(found[mask], sampled[mask], rtol=1e-3, atol=1e-3)


def test_an_adapter_of_the_head_is_refused(tiny_model_path, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    accelerator = SimpleNamespace(distributed_type=None)
    args = TRAINERS["grpo"][1](str(tmp_path), bf16=False, use_vllm=True, rollout_support="replay", top_k=5)
    trainer = SimpleNamespace(
        args=args, _settings=args.settings, model=model, accelerator=accelerator, _bare=lambda model: model
    )
    check_kept_tokens(trainer, trainer._settings, trainer._bare)
    trainer.model = get_peft_model(model, LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="`rollout_support` is 'replay', but the adapter changes the head"):
        check_kept_tokens(trainer, trainer._settings, trainer._bare)


@pytest.mark.vllm
def test_without_truncation_nothing_is_cut(make):
    with pytest.warns(UserWarning, match="`rollout_support` is set to 'replay' but has no effect"):
        trainer = make()
    assert trainer.vllm_generation.logprobs == 0
    assert not trainer.vllm_generation.top_k


@pytest.mark.vllm
def test_a_kept_set_that_the_candidates_do_not_hold_is_no_sample(make, monkeypatch):
    monkeypatch.setattr("trl_rollout_corr.replay.kept_tokens._TIES", -3)  # as if four tokens tied with the last one
    trainer = make(top_k=5, max_steps=1)
    trainer.train()
    assert logged(trainer, "nonfinite_fraction") == [1.0]


def test_a_large_set_takes_no_room_from_the_others():
    wide = [*range(500)]
    ids, sizes = columns_of_sets([[[4, 2], [7], wide], [[5]], []], 4, torch.device("cpu")).values()
    assert sizes.tolist() == [[2, 1, 500, 0], [1, 0, 0, 0], [0] * 4]
    assert ids.tolist() == [[4, 2, 7, *wide], [5] + [-1] * 502, [-1] * 503]
    sizes = torch.tensor([2, 1, 500, 3, 8])
    parts = [*module._parts(sizes, 8)]
    assert sum(places.numel() for _, places, _ in parts) <= 2 * int(sizes.sum())
    assert sorted(torch.cat([part for part, *_ in parts]).tolist()) == [0, 2, 3, 4]  # and one token is certain


# Log-probabilities over kept sets, against loops over tokens ----------------------------------------------------------

VOCABULARY, HIDDEN = 60, 16


def some_sets(n: int = 40) -> Sets:
    """Sets of 1 to 32 tokens, and one of half of the vocabulary."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 33, (n,), generator=generator)
    sizes[3], sizes[4] = VOCABULARY // 2, 1
    ids = torch.cat([torch.randperm(VOCABULARY, generator=generator)[:size] for size in sizes.tolist()])
    places = (torch.rand(n, generator=generator) * sizes).long()
    return Sets(ids.int(), sizes, sizes.cumsum(0) - sizes + places)


def some_head(dtype: torch.dtype, bias: bool) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(2)
    tensors = [
        torch.randn(shape, generator=generator) for shape in ((40, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    ]
    return [x.to(dtype).requires_grad_() for x in tensors[:2]] + [
        tensors[2].to(dtype).requires_grad_() if bias else None
    ]


def slopes_of(states, weight, bias, logps) -> list[torch.Tensor]:
    factors = torch.linspace(-2, 2, len(logps), dtype=logps.dtype)
    return [*torch.autograd.grad((logps * factors).sum(), [x for x in (states, weight, bias) if x is not None])]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logps_and_gradients_are_those_of_loops(monkeypatch, dtype, bias):
    monkeypatch.setattr(module, "_ELEMENTS", 8 * HIDDEN)  # many parts
    head = some_head(dtype, bias)
    ids, sizes, own = sets = some_sets()
    exact = [None if x is None else x.detach().double().requires_grad_() for x in head]
    states, weight, bias = exact
    expected, start = [], 0
    for token, size in enumerate(sizes.tolist()):
        rows = ids[start : start + size].long()
        logits = weight[rows] @ states[token] + (0.0 if bias is None else bias[rows])
        expected.append((logits / 0.7).log_softmax(0)[own[token] - start])
        start += size
    expected = torch.stack(expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as in training with `bf16`: the sums stay in float32
        found = kept_logps(*head, sets, 0.7)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8  # one rounding to the type of the head
    for one, other in zip(slopes_of(*head, found), slopes_of(*exact, expected), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("complete", [True, False])
def test_the_whole_vocabulary_has_no_backward_pass_where_all_sets_are_known(tiny_model_path, complete):
    model, passes = AutoModelForCausalLM.from_pretrained(tiny_model_path), []
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 0]])
    mask = (ids > 0).long()

    def forward(model, input_ids, attention_mask, n):
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -n - 1 : -1]
        if logits.requires_grad:
            logits.register_hook(lambda slope: passes.append(slope.abs().sum()))
        return logits.log_softmax(-1).gather(2, input_ids[:, -n:, None])[..., 0], None

    columns = columns_of_sets([[[5, 6], [6, 2, 1]], [[9, 3]] if complete else []], 2, ids.device)
    logps, _ = over_kept_tokens(forward, columns, 1.0, lambda model: model, model, ids, mask, 2)
    (logps * mask[:, 2:]).sum().backward()
    assert bool(passes) != complete
    assert model.lm_head.weight.grad.abs().sum() > 0
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_replay_is_refused_where_it_cannot_be(tiny_model_path, tmp_path, monkeypatch):
    trainer_class, config_class = TRAINERS["grpo"]

    def config(**fields):
        return config_class(str(tmp_path), bf16=False, **{"rollout_support": "replay", "use_vllm": True, **fields})

    with pytest.raises(ValueError, match=r"`rollout_support` must be one of replay or None, got 'mask'"):
        config(rollout_support="mask")
    with pytest.raises(ValueError, match=r"`vllm_mode` is 'server', and only a colocated vLLM"):
        config(top_p=0.9, vllm_mode="server")
    with pytest.warns(UserWarning, match=r"`rollout_support` is set to 'replay' but has no effect: `top_p`, `top_k`"):
        config()
    with pytest.warns(UserWarning, match=r"`top_p=0.9` changes .* set `rollout_support` to 'replay'"):
        config(top_p=0.9, rollout_support=None)
    with pytest.raises(ValueError, match=r"`rollout_support` is 'replay', but `rollout_func` is set"):
        build(
            trainer_class, config_class, tiny_model_path, tmp_path, sampler=StaleSampler(tiny_model_path),
            rollout_support="replay",
        )  # fmt: skip
    monkeypatch.setattr("trl_rollout_corr.tools.engine_checks.INSTALLED", Version("1.17.0"))
    with pytest.raises(ValueError, match=r"trl 1.17.0 is newer than 1.16, and may compute .* itself"):
        config(top_p=0.9)
