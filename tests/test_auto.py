"""
The preset `auto`: little where policies differ by rounding, a trust region where they part, weights up to 1, and nothing for
tokens that the trainer finds absurd. Here the age is unknown, so that weights are old; `test_fresh.py` has new ones.
"""

import math
import re

import pytest
import torch

from tests.training import TRAINERS, VLLM, build, freeze_sampler, gradients, logged, micro_batches
from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.tools.report.report import write_report


def correct(train_logps, rollout_logps, advantages, **fields):
    config = RolloutCorrectionConfig(**{"rollout_correction": "auto", **fields})
    mask = torch.ones_like(train_logps)
    return compute_rollout_correction(train_logps, rollout_logps, mask, config, advantages=advantages)


@pytest.mark.parametrize("spread", [1e-4, 0.01, 0.03])
@pytest.mark.parametrize("length", [16, 16_000])
def test_rounding_is_left_alone_at_every_length(length, spread):
    dice = torch.Generator().manual_seed(length)
    rollout = -torch.rand(4, length, generator=dice).mul(3)
    train_logps = rollout + spread * torch.randn(4, length, generator=dice)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    found = correct(train_logps, rollout, advantages)
    assert found.keep.all()
    assert (found.coefficients[advantages > 0] == 1).all()
    bad = advantages < 0
    d = (train_logps - rollout)[bad].double()
    so_far = torch.nn.functional.pad(d.cumsum(1), (16, 0))
    products = (so_far[:, 16:] - so_far[:, :-16]).exp()
    weights = found.coefficients[bad].double()
    torch.testing.assert_close(weights, products.clamp(max=1.0), rtol=1e-4, atol=1e-5)
    begin, end = weights.chunk(2, dim=1)
    assert abs((end.mean() - begin.mean()).item()) < 0.05  # it does not shrink with length


def test_tokens_are_not_pushed_further_but_pushed_back():
    rollout, train_logps = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.72, 0.28]]).log()
    for sign, keep in ((1.0, [False, True]), (-1.0, [True, False]), (0.0, [True, True])):
        assert correct(train_logps, rollout, torch.tensor([sign])).keep.tolist() == [keep]


@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("sure", [0.95, 0.3, 0.02])
def test_broken_tokens_weigh_no_more_than_others(sure, sign):
    rollout, train_logps = torch.tensor([[-6.0, math.log(0.95)]]), torch.tensor([[sure, 0.95]]).log()
    for pair in ((train_logps, rollout), (rollout, train_logps)):
        assert correct(*pair, torch.tensor([sign])).coefficients.max() <= 1.0


@pytest.mark.filterwarnings("ignore:`bypass_mode` with")
@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("sampler", "trainer"), [(0.9, 1e-6), (0.9, 8e-4), (0.999, 1e-30), (0.01, 1e-6)])
def test_garbage_that_the_sampler_is_sure_of_has_no_weight(sampler, trainer, sign, bypass):
    rollout, train_logps = torch.tensor([[sampler, 0.5]]).log(), torch.tensor([[trainer, 0.5]]).log()
    found = correct(train_logps, rollout, torch.tensor([sign]), bypass_mode=bypass)
    assert found.coefficients[0, 0] <= 0.01
    if sign < 0 and not bypass:  # nor has what follows it, in a bad completion
        assert found.coefficients[0, 1] <= 0.01
    else:
        assert found.coefficients[0, 1] == 1.0


@pytest.mark.parametrize("ratio", [0.002, 0.05, 0.5])
def test_a_good_token_that_has_become_unlikely_is_brought_back_in_full(ratio):
    rollout = torch.tensor([[0.9]]).log()
    assert correct(rollout + math.log(ratio), rollout, torch.tensor([1.0])).coefficients.item() == 1.0


@pytest.mark.parametrize(("now", "weight"), [(0.3, 0.6), (0.45, 0.9), (0.55, 1.0), (0.9, 1.0)])
def test_a_bad_token_is_pushed_down_less_the_unlikelier_it_has_become(now, weight):
    rollout, train_logps = torch.tensor([[0.5]]).log(), torch.tensor([[now]]).log()
    assert correct(train_logps, rollout, torch.tensor([-1.0])).coefficients.item() == pytest.approx(weight)


def test_what_was_good_and_has_become_likely_is_not_pushed_further():
    rollout, train_logps = torch.tensor([[0.01]]).log(), torch.tensor([[0.6]]).log()
    assert correct(train_logps, rollout, torch.tensor([1.0])).coefficients.item() == 0.0


def test_every_part_can_be_set():
    bounds = {"rollout_is_threshold": 5.0, "rollout_rs_threshold": [0.3, [0.01, math.inf]]}
    config = RolloutCorrectionConfig(rollout_correction="auto", **bounds)
    assert config.settings.bounding[1:3] == (None, 5.0)
    assert [(c.lower, c.upper) for c in config.settings.criteria] == [(-0.3, 0.3), (-math.inf, -math.log(0.01))]
    with pytest.warns(UserWarning, match="does not go with 'auto'"):
        config = RolloutCorrectionConfig(rollout_correction="auto", bypass_mode=True)
    assert config.settings.clips_around_sampler
    assert config.settings.rollout_rs == ["token_tv", "token_k1"]


in_bypass_too = pytest.mark.filterwarnings("ignore:`bypass_mode` with `rollout_loss_type='ppo_clip'` does not go with")


@in_bypass_too
@pytest.mark.vllm
@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_run_rejects_and_the_report_says_what(kind, bypass, tmp_path, tiny_model_path, shared_engine):
    fields = {"rollout_correction": "auto", "bypass_mode": bypass, "rollout_dump_dir": str(tmp_path / "dump")}
    generation = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64, "beta": 0.0}
    # much tighter bounds, as a tiny model that was never trained is sure of nothing
    tight = {"rollout_rs_threshold": [[0.002, 0.002], [0.7, math.inf]]}
    trainer = build(
        *TRAINERS[kind], tiny_model_path, tmp_path, per_device_train_batch_size=16, **generation, **fields, **tight
    )
    freeze_sampler(trainer, 0.5)
    trainer.train()
    shares = {name: logged(trainer, f"rollout_rs_{name}_masked_fraction") for name in trainer.args.settings.rollout_rs}
    assert all(0 < max(found) < 1 for found in shares.values())
    assert any(logged(trainer, "kl_advantage_positive"))
    write_report([str(tmp_path)], str(tmp_path / "report.html"))
    page = " ".join(re.sub("<[^>]+>", " ", (tmp_path / "report.html").read_text()).split())
    for name, found in shares.items():
        assert f"rejected by {name} {100 * sum(found) / len(found):.3g} %" in page


GARBAGE = 2  # number of "<unk>"


def find_garbage_absurd(model):
    """Give garbage a logit far below those of all other tokens, at every place."""
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 5.0  # a large number at every place
        head = model.get_output_embeddings().weight
        head[:, 0] = 0.0
        head[GARBAGE] = 0.0
        head[GARBAGE, 0] = -3.0


def sample_garbage(llm, monkeypatch):
    """Let vLLM put garbage in place of the first token of every other completion, and report that it was sure of it."""
    generate = llm.generate

    def generate_garbage(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        for completion in [output.outputs[0] for output in outputs][::2]:
            (reported,) = completion.logprobs[0].values()
            reported.logprob = math.log(0.9)
            completion.logprobs[0] = {GARBAGE: reported}
            completion.token_ids = [GARBAGE, *completion.token_ids[1:]]
        return outputs

    monkeypatch.setattr(llm, "generate", generate_garbage)


@in_bypass_too
@pytest.mark.vllm
@pytest.mark.parametrize("kind", TRAINERS)
def test_rewarded_garbage_has_no_gradient(kind, tmp_path, tiny_model_path, shared_engine, monkeypatch):
    """As garbage has almost no probability anywhere, its row of the head has a gradient through sampled garbage alone."""

    def gradient_of_garbage(**fields) -> float:
        trainer = build(*TRAINERS[kind], tiny_model_path, tmp_path, **VLLM, **fields)
        find_garbage_absurd(trainer.model)
        with monkeypatch.context() as patch:
            sample_garbage(trainer.vllm_generation.llm, patch)
            batches = micro_batches(trainer)
        assert any(
            advantage > 0 and ids[0] == GARBAGE
            for batch in batches
            for ids, advantage in zip(batch["completion_ids"], batch["advantages"], strict=True)
        )
        return max(gradients(trainer, batch)["lm_head.weight"][GARBAGE].norm().item() for batch in batches)

    without_floor = gradient_of_garbage(rollout_correction="auto", rollout_rs_threshold=[0.1, [0.0, math.inf]])
    assert without_floor > 1e-4
    for fields in ({}, {"bypass_mode": True}):
        assert gradient_of_garbage(rollout_correction="auto", **fields) <= 0.01 * without_floor
