"""`rollout_support: replay`: truncated sampling by a real vLLM, and log-probabilities over the tokens that it kept."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import StaleSampler
from tests.training import TRAINERS, VLLM, build, logged, micro_batches
from trl_rollout_corr.probe.process import Probe
from trl_rollout_corr.trainers import versions
from trl_rollout_corr.trainers.keys import SUPPORT
from trl_rollout_corr.trainers.support import check_replay, pad_kept


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
    support, length = batch[SUPPORT].long(), batch["completion_ids"].shape[1]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    present = batch["completion_mask"].bool()
    sizes = (support >= 0).sum(2)[present]
    assert 1 <= sizes.min() < sizes.max() < 40  # of 47

    def gradients(logps):
        trainer.model.zero_grad()
        (logps * present).sum().backward()
        return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}

    logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1] / trainer.temperature
    kept = torch.zeros(logits.shape, dtype=torch.bool)
    for row, column in present.nonzero().tolist():
        kept[row, column, support[row, column][support[row, column] >= 0]] = True
    expected = logits.masked_fill(~kept & present.unsqueeze(2), -torch.inf).log_softmax(-1)
    expected = expected.gather(2, batch["completion_ids"].unsqueeze(2))[..., 0]
    trainer._loss_call = type("Call", (), {"batch": batch})
    found = trainer._forward_over_support(trainer.model, ids, mask, length)[0]
    trainer._loss_call = None
    torch.testing.assert_close(found[present], expected[present], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[present], batch["sampling_per_token_logps"][present], rtol=1e-3, atol=1e-3)
    wanted = gradients(expected)
    for name, gradient in gradients(found).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.vllm
def test_passes_outside_the_loss_are_over_the_kept_tokens_too(make):
    """Of a probe, of a second look at single sequences, and of the check that weights arrive."""
    trainer = make(top_k=5, max_steps=1)
    batch = micro_batches(trainer)[0]
    parts = [torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask")]
    probe = Probe.__new__(Probe)
    probe.trainer = trainer
    sampled, mask = batch["sampling_per_token_logps"], batch["completion_mask"].bool()
    (scored,), (alone,) = probe.score([batch]), probe.score_alone([batch])
    for found in (scored, alone, trainer._forward_again(batch, *parts, mask.shape[1])):
        torch.testing.assert_close(found[mask], sampled[mask], rtol=1e-3, atol=1e-3)


def test_an_adapter_of_the_head_is_refused(tiny_model_path, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    accelerator = SimpleNamespace(unwrap_model=lambda model, **kwargs: model, distributed_type=None)
    args = TRAINERS["grpo"][1](str(tmp_path), bf16=False, use_vllm=True, rollout_support="replay", top_k=5)
    trainer = SimpleNamespace(args=args, model=model, accelerator=accelerator)
    check_replay(trainer)
    trainer.model = get_peft_model(model, LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="`rollout_support` is 'replay', but the adapter changes the head"):
        check_replay(trainer)


@pytest.mark.vllm
def test_without_truncation_nothing_is_cut(make):
    with pytest.warns(UserWarning, match="`rollout_support` is set to 'replay' but has no effect"):
        trainer = make()
    assert trainer.vllm_generation.logprobs == 0
    assert not trainer.vllm_generation.top_k


@pytest.mark.vllm
def test_a_kept_set_that_the_candidates_do_not_hold_is_no_sample(make, monkeypatch):
    monkeypatch.setattr("trl_rollout_corr.trainers.support._TIES", -3)  # as if four tokens tied with the last one
    trainer = make(top_k=5, max_steps=1)
    trainer.train()
    assert logged(trainer, "nonfinite_fraction") == [1.0]


def test_kept_sets_are_padded():
    assert pad_kept([[[4, 2], [7]], []], 2, torch.device("cpu")).tolist() == [[[4, 2], [7, -1]], [[-1, -1]] * 2]


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
    monkeypatch.setattr("trl_rollout_corr.trainers.sampler.makes_up_for_truncation", lambda trainer: True)
    with pytest.raises(ValueError, match=r"but the installed TRL makes up for truncated sampling itself"):
        config(top_p=0.9)
    assert not versions.makes_up_for_truncation(trainer_class._trl_class)


def test_an_asynchronous_run_has_no_replay(tmp_path):
    pytest.importorskip("trl_rollout_corr.trainers.upstream", exc_type=ImportError)
    with pytest.raises(ValueError, match="`rollout_support` is 'replay', which needs a colocated vLLM"):
        TRAINERS["async_grpo"][1](str(tmp_path), use_cpu=True, bf16=False, rollout_support="replay")
