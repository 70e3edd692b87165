"""The vectors of verl 0.9.1. Where its k1 bounds are not reciprocal they are translated to bounds on the ratio."""

import pytest
import torch

from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction


TRAIN_A = torch.tensor([[-1.0, -0.5, -2.0, -0.1], [-0.3, -1.2, -0.7, -9.9]])
ROLLOUT_A = torch.tensor([[-1.2, -0.4, -3.0, -0.1], [-0.3, -2.5, -0.2, -0.1]])
MASK_A = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])

_INDEX = torch.arange(24, dtype=torch.float64)
ROLLOUT_B = -(0.2 + ((7 * _INDEX) % 11) / 10)
TRAIN_B = (ROLLOUT_B + 0.4 * torch.sin(1.3 * _INDEX)).float().view(4, 6)
ROLLOUT_B = ROLLOUT_B.float().view(4, 6)
MASK_B = torch.ones(4, 6, dtype=torch.int)
MASK_B[1, 4:] = MASK_B[2, 2:4] = MASK_B[3] = 0


def correct(batch, **fields):
    train, rollout, mask = {"A": (TRAIN_A, ROLLOUT_A, MASK_A), "B": (TRAIN_B, ROLLOUT_B, MASK_B)}[batch]
    correction = compute_rollout_correction(train, rollout, mask, RolloutCorrectionConfig(**fields))
    return correction, {key.removeprefix("rollout_corr/"): value for key, value in correction.metrics().items()}


def check(metrics, expected):
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-5, rel=1e-5)


def test_diagnostics_of_a():
    _, metrics = correct("A", rollout_is=None)
    check(
        metrics,
        {
            "training_ppl": 2.2708061,
            "rollout_ppl": 2.9782124,
            "kl": -0.2714286,
            "k3_kl": 0.3171927,
            "log_ppl_diff": -0.2708333,
            "ppl_ratio": 0.7627503,
            "chi2_token": 2.6473184,
            "chi2_seq": 5.9890232,
        },
    )


TOKEN = {
    "rollout_is_mean": 1.2475387,
    "rollout_is_std": 0.504829,
    "rollout_is_eff_sample_size": 0.8592914,
    "rollout_is_ratio_fraction_high": 2 / 7,
    "rollout_is_ratio_fraction_low": 0.0,
    "rollout_is_max": 2.0,
    "rollout_is_min": 0.6065307,
}
SEQUENCE = {
    "rollout_is_max": 3.0041661,
    "rollout_is_min": 2.2255409,
    "rollout_is_mean": 2.0,
    "rollout_is_ratio_fraction_high": 1.0,
    "rollout_is_eff_sample_size": 1.0,
}
ICEPOP = {
    "rollout_is_mean": 0.6761101,
    "rollout_is_eff_sample_size": 0.6839626,
    "rollout_is_std": 0.45959,
    "rollout_is_oob_ratio": 2 / 7,
    "rollout_is_max": 1.2214028,
    "rollout_is_min": 0.0,
}


@pytest.mark.parametrize(
    ("fields", "weights", "metrics"),
    [
        ({"rollout_is": "token"}, [[1.2214028, 0.9048374, 2, 1], [1, 2, 0.6065307, 0]], TOKEN),
        ({"rollout_is": "sequence"}, [[2, 2, 2, 2], [2, 2, 2, 0]], SEQUENCE),
        (
            {"rollout_is": "token", "rollout_is_batch_normalize": True},
            [[0.9790500, 0.7252981, 1.6031567, 0.8015783], [0.8015783, 1.6031567, 0.4861819, 0]],
            TOKEN | {"rollout_is_batch_norm_factor": 1.2475387},
        ),
        (
            {"rollout_is": "sequence", "rollout_is_threshold": 3.0, "rollout_is_batch_normalize": True},
            [[1.1482065] * 4, [0.8517935] * 3 + [0]],
            {"rollout_is_batch_norm_factor": 2.612771, "rollout_is_eff_sample_size": 0.979783},
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": [0.5, 2.0]},
            [[1.2214028, 0.9048374, 0, 1], [1, 0, 0.6065307, 0]],
            ICEPOP,
        ),
        (
            {"rollout_is": "sequence", "rollout_is_threshold": "0.5_2.5"},
            [[0] * 4, [2.2255409] * 3 + [0]],
            {
                "rollout_is_mean": 0.9538032,
                "rollout_is_eff_sample_size": 3 / 7,
                "rollout_is_oob_ratio": 4 / 7,
                "rollout_is_ratio_fraction_high": 0.5,
            },
        ),
    ],
)
def test_weights_of_a(fields, weights, metrics):
    correction, found = correct("A", **fields)
    torch.testing.assert_close(correction.weights, torch.tensor(weights), atol=1e-5, rtol=1e-5, check_dtype=False)
    check(found, metrics)


KEEP_1101_1010 = [[1, 1, 0, 1], [1, 0, 1, 0]]
ROW_1_OUT = [[1, 1, 1, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("names", "threshold", "keep", "metrics"),
    [
        ("token_k1", [0.5, 2.0], KEEP_1101_1010, {"token_k1_mean": -0.271429}),
        # verl writes 0.6_1.6 and keeps ratios in [0.625, 1.667]
        ("token_k1", [1 / 1.6, 1 / 0.6], [[1, 1, 0, 1], [1, 0, 0, 0]], {"token_k1_mean": -0.271429}),
        ("token_k1", [0.6, 1.6], KEEP_1101_1010, {}),
        ("token_k1,seq_max_k2", "0.7_1.4,2.0", [[1, 1, 0, 1], [1, 0, 0, 0]], {}),
        ("token_k2", 0.2, KEEP_1101_1010, {"token_k2_mean": 0.213571}),
        ("token_k3", 0.3, KEEP_1101_1010, {"token_k3_mean": 0.317193}),
        ("seq_sum_k1", [0.5, 2.0], [[0] * 4] * 2, {"seq_sum_k1_mean": -0.971429}),
        # verl writes 0.4_2.0
        ("seq_sum_k1", [1 / 2.0, 1 / 0.4], [[0] * 4, [1, 1, 1, 0]], {}),
        ("seq_sum_k1", [0.4, 2.0], [[0] * 4] * 2, {}),
        # verl writes 0.75_1.25
        ("seq_mean_k1", [1 / 1.25, 1 / 0.75], [[1, 1, 1, 1], [1, 1, 1, 0]], {"seq_mean_k1_mean": -0.271429}),
        ("seq_mean_k1", [0.75, 1.25], [[0] * 4] * 2, {}),
        ("seq_sum_k2", 0.9, ROW_1_OUT, {"seq_sum_k2_mean": 0.715714}),
        ("seq_mean_k2", 0.2, ROW_1_OUT, {"seq_mean_k2_mean": 0.213571}),
        ("seq_max_k2", 0.6, ROW_1_OUT, {"seq_max_k2_mean": 0.647857}),
        ("seq_sum_k3", 1.0, ROW_1_OUT, {"seq_sum_k3_mean": 1.057938}),
        ("seq_mean_k3", 0.2, ROW_1_OUT, {"seq_mean_k3_mean": 0.317193}),
        ("seq_max_k3", 1.0, ROW_1_OUT, {"seq_max_k3_mean": 0.997288}),
        (
            "token_k1,seq_max_k2",
            "0.3_3.33333333,0.6",
            ROW_1_OUT,
            {"masked_fraction": 3 / 7},
        ),
        ("token_k1,token_k2", 2.0, KEEP_1101_1010, {}),
    ],
)
def test_rejection_in_a(names, threshold, keep, metrics):
    correction, found = correct("A", rollout_is=None, rollout_rs=names, rollout_rs_threshold=threshold)
    assert correction.keep.int().tolist() == keep
    check(found, {f"rollout_rs_{key}": value for key, value in metrics.items()})


def test_batch_b_without_its_empty_row():
    # verl counts the empty row 3 as perplexity 1, difference 0, weight 0 and squared ratio 1; without it, a mean over the
    # four rows becomes (4 * mean - that value) / 3
    _, metrics = correct("B", rollout_is="token", rollout_is_threshold=1.3)
    check(
        metrics,
        {
            "training_ppl": (4 * 1.806823 - 1) / 3,
            "kl": 0.004298,
            "k3_kl": 0.038186,
            "rollout_ppl": (4 * 1.795764 - 1) / 3,
            "log_ppl_diff": 4 * 0.004785 / 3,
            "ppl_ratio": (4 * 1.004887 - 1) / 3,
            "chi2_token": 0.149112,
            "rollout_is_mean": 0.997379,
            "rollout_is_std": 0.230528,
            "rollout_is_eff_sample_size": 0.949287,
            "rollout_is_ratio_fraction_high": 3 / 14,
            "rollout_is_ratio_fraction_low": 5 / 14,
            "rollout_is_max": 1.3,
            "rollout_is_min": 0.689596,
        },
    )
    assert metrics["chi2_seq"] == pytest.approx(4 * -0.023316 / 3, abs=1e-5)


def test_rejection_in_b():
    correction, metrics = correct("B", rollout_is=None, rollout_rs="seq_mean_k3", rollout_rs_threshold=0.04)
    assert correction.keep.any(-1).tolist() == [True, False, True, False]
    check(
        metrics,
        {
            "rollout_rs_seq_mean_k3_mean": 0.038186,
            "rollout_rs_masked_fraction": 4 / 14,
        },
    )
    correction, metrics = correct("B", rollout_is=None, rollout_rs="seq_max_k3", rollout_rs_threshold=0.07)
    assert not correction.keep.any()
    check(metrics, {"rollout_rs_seq_max_k3_masked_fraction": 1.0})
    correction, _ = correct("B", rollout_is=None, rollout_rs="seq_mean_k1", rollout_rs_threshold=[0.95, 1.05])
    assert correction.keep.sum() == MASK_B.sum()
