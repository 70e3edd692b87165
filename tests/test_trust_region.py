"""Criteria on probabilities: vectors of verl's DPPO losses, probabilities near 0 and 1, and both trainers."""

import json
import math

import pytest
import torch

from tests.dumps import read_dump
from tests.training import TRAINERS, build, freeze_sampler, logged
from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.correction.functional import probability_divergence, select_tokens
from trl_rollout_corr.settings.criteria import DIRECTED, OF_PROBABILITIES
from trl_rollout_corr.tools.analysis.compare import compare
from trl_rollout_corr.tools.report.report import write_report


_INDEX = torch.arange(24, dtype=torch.float64).view(4, 6)
ROLLOUT = -(0.02 + ((7 * _INDEX) % 11) / 10)
TRAIN = (ROLLOUT + 0.9 * torch.sin(1.3 * _INDEX)).clamp(max=-0.001)
MASK = torch.ones(4, 6)
MASK[1, 4:] = MASK[2, 2:4] = 0
ADVANTAGES = torch.tensor([1.0, -0.5, 0.0, -2.0], dtype=torch.float64)


def correct(train_logps, rollout_logps, mask, advantages, **fields):
    config = RolloutCorrectionConfig(**fields)
    return compute_rollout_correction(train_logps, rollout_logps, mask, config, advantages=advantages)


# Gradients of the losses `dppo_tv` and `dppo_kl` of verl 0.9.1, by running its functions; the ratio is truncated at 20.
GRADIENT = torch.tensor(
    [
        [-0.05, 0, 0, -0.026924414, -0.022576596, -0.060681022],
        [0.061409518, 0.033316886, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0.198635759, 0.152044035, 0, 0],
    ],
    dtype=torch.float64,
)
WIDER_ABOVE, TIGHTER = GRADIENT.clone(), GRADIENT.clone()
WIDER_ABOVE[0, 2] = -0.068787566
TIGHTER[0, 5] = 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rollout_correction": "bypass_dppo_tv"}, GRADIENT),
        ({"rollout_correction": "bypass_dppo_tv", "rollout_rs_threshold": [0.1, 0.3]}, WIDER_ABOVE),
        ({"rollout_correction": "bypass_dppo_kl"}, TIGHTER),
    ],
)
def test_gradients_are_those_of_verls_losses(fields, expected):
    correction = correct(TRAIN, ROLLOUT, MASK, ADVANTAGES, **fields)
    gradient = -correction.coefficients * ADVANTAGES[:, None] / MASK.sum()
    torch.testing.assert_close(gradient, expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("divergence", DIRECTED)
def test_only_what_the_advantage_pushes_further_is_dropped(divergence):
    rollout = torch.tensor([[math.log(0.5)] * 3]).repeat(3, 1)
    train_logps = torch.tensor([[0.9, 0.5, 0.1]]).log().repeat(3, 1)
    fields = {"rollout_rs": f"token_{divergence}", "rollout_rs_threshold": 0.2}
    correction = correct(train_logps, rollout, torch.ones(3, 3), torch.tensor([1.0, 0.0, -1.0]), **fields)
    assert correction.keep.tolist() == [[False, True, True], [True, True, True], [True, True, False]]


def test_the_binary_divergence_takes_the_larger_direction():
    p, q = torch.tensor([[0.9, 0.02, 0.5]]), torch.tensor([[0.5, 0.3, 0.5]])
    tokens = select_tokens(p.log(), q.log(), torch.ones(1, 3))

    def binary(a, b):
        return a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log()

    torch.testing.assert_close(
        probability_divergence(tokens, "binary_kl"), torch.maximum(binary(p, q), binary(q, p)), atol=1e-6, rtol=1e-5
    )
    torch.testing.assert_close(
        probability_divergence(tokens, "kl"), binary(q, p) * (p - q).sign(), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("divergence", OF_PROBABILITIES)
def test_probabilities_near_zero_and_one(divergence):
    logps = torch.tensor([0.0, -1e-9, -1e-7, -1e-3, -1.0, -20.0, -90.0, -1e3])
    train_logps, rollout_logps = logps.repeat(8, 1), logps.unsqueeze(1).repeat(1, 8)
    found = probability_divergence(select_tokens(train_logps, rollout_logps, torch.ones(8, 8)), divergence)
    assert found.isfinite().all()
    assert torch.equal(found.diagonal(), torch.zeros(8))  # the same policy
    assert found[:3, :3].abs().max() < 1e-5
    assert found[-3:, -3:].abs().max() < 1e-4  # as unlikely as can be told
    assert found[0, -1].abs() > 0.9  # one is certain, the other excludes it
    assert found[-1, 0].abs() > 0.9


@pytest.mark.parametrize("advantages", [None, torch.ones(2), torch.ones(3, 4)])
def test_missing_advantages_are_named(advantages):
    zeros = torch.zeros(3, 2)
    with pytest.raises(
        ValueError, match=r"`rollout_rs` contains 'token_tv', .* pass `advantages` of shape \(3,\) or \(3, 2\)"
    ):
        correct(zeros, zeros, torch.ones(3, 2), advantages, rollout_rs="token_tv", rollout_rs_threshold=0.1)


@pytest.mark.parametrize("wrong", [0, -0.1, [0.1, 0.0], [0.1, 0.2, 0.3], "0.1_0.2_0.3"])
def test_bounds_on_a_change_are_positive_and_one_or_two(wrong):
    with pytest.raises(ValueError, match=r"`rollout_rs_threshold` .*token_tv"):
        RolloutCorrectionConfig(rollout_rs="token_tv", rollout_rs_threshold=wrong)


@pytest.mark.parametrize("wrong", [1, 1.0, 5.0, [0.2, 1.0], [1.5, 0.2], math.inf, "[inf, inf]"])
def test_a_bound_that_no_difference_of_probabilities_exceeds_is_refused(wrong):
    with pytest.raises(ValueError, match=r"for `token_tv` must be below 1, got .* rejects nothing"):
        RolloutCorrectionConfig(rollout_rs="token_tv", rollout_rs_threshold=wrong)


def test_one_side_may_have_no_bound():
    rollout, train_logps = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.1, 0.9]]).log()
    for bounds, sign, keep in (([0.2, math.inf], 1, [True, True]), ([0.2, math.inf], -1, [False, True])):
        fields = {"rollout_rs": "token_tv", "rollout_rs_threshold": bounds}
        found = correct(train_logps, rollout, torch.ones(1, 2), torch.tensor([float(sign)]), **fields)
        assert found.keep.tolist() == [keep]
    config = RolloutCorrectionConfig(rollout_rs="token_kl", rollout_rs_threshold=5.0)
    assert config.settings.rollout_rs_threshold == [[5.0, 5.0]]


def test_the_baseline_cannot_depend_on_what_depends_on_it():
    with pytest.raises(ValueError, match=r"`rollout_rs_exclude_from_baseline` is True, but 'token_kl'"):
        RolloutCorrectionConfig(rollout_rs="token_kl", rollout_rs_threshold=0.1, rollout_rs_exclude_from_baseline=True)


@pytest.mark.vllm
@pytest.mark.parametrize("preset", ["bypass_dppo_tv", "decoupled_token_is"])
@pytest.mark.parametrize("kind", TRAINERS)
def test_both_trainers_reject_by_the_advantage(kind, preset, tmp_path, tiny_model_path, shared_engine):
    fields = {
        "rollout_correction": preset,
        "rollout_rs": "token_tv",
        "rollout_rs_threshold": 0.01,
        "rollout_dump_dir": str(tmp_path / "dump"),
        "rollout_dump_sampled": 16,
    }
    generation = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64, "beta": 0.0}
    trainer = build(*TRAINERS[kind], tiny_model_path, tmp_path, per_device_train_batch_size=16, **generation, **fields)
    freeze_sampler(trainer, 0.5)
    trainer.train()
    dropped = {1: 0, -1: 0}
    for row in read_dump(tmp_path / "dump").rows:
        change = [math.exp(p) - math.exp(q) for p, q in zip(row["train_logps"], row["rollout_logps"], strict=True)]
        sign = (row["advantage"] > 0) - (row["advantage"] < 0)
        expected = [valid and sign * x <= 0.01 for valid, x in zip(row["mask"], change, strict=True)]
        assert row["keep"] == expected
        if sign:
            dropped[sign] += sum(row["mask"]) - sum(expected)
    assert min(dropped.values()) > 0
    assert any(fraction > 0 for fraction in logged(trainer, "rollout_rs_token_tv_masked_fraction"))
    assert any("rejected/" in key for entry in trainer.state.log_history for key in entry)
    document = json.loads(compare(str(tmp_path / "dump"), [], as_json=True))
    compared = {name: entry for entry in document["settings"] for name in entry["name"].split(", ")}
    assert 0 < compared["this run"]["rejected"] < 1
    assert compared["bypass_dppo_tv"]["rejected"] < compared["this run"]["rejected"]  # its bound is ten times wider
    write_report([str(tmp_path / "dump")], str(tmp_path / "report.html"))
    assert "token_tv" in (tmp_path / "report.html").read_text()
