"""`compute_rollout_correction` against the loops of `reference.py`, and the properties it must have."""

import json
import math
import re
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from tests import reference
from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction
from trl_rollout_corr.correction import functional
from trl_rollout_corr.correction.groups import add_up_groups
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.settings.criteria import CRITERIA, LEVELS, OF_PROBABILITIES


settings.register_profile("package", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("package")

OF_TURNS = [name for name in CRITERIA if name.startswith("turn_")]
RATIO_CRITERIA = [name for name in CRITERIA if not name.endswith(tuple(f"_{kind}" for kind in OF_PROBABILITIES))]
logps = st.floats(-12.0, 0.0, width=32)
# a log-ratio far from every threshold used below: at a threshold, float32 and float64 may decide differently
differences = st.integers(-40, 40).map(lambda i: i / 16 + 0.0123)


@st.composite
def batches(draw, max_rows=4, max_length=6):
    """`(train_logps, rollout_logps, mask)` in float64, with holes, short rows and (usually) something valid."""
    rows, length = draw(st.integers(1, max_rows)), draw(st.integers(1, max_length))
    mask = torch.tensor([[draw(st.booleans()) for _ in range(length)] for _ in range(rows)])
    mask[0, draw(st.integers(0, length - 1))] = True
    rollout = torch.tensor([[draw(logps) for _ in range(length)] for _ in range(rows)], dtype=torch.float64)
    d = torch.tensor([[draw(differences) for _ in range(length)] for _ in range(rows)], dtype=torch.float64)
    return rollout + d, rollout, mask


def sequences(train, rollout, mask):
    return [
        [(t, r) for t, r, m in zip(*row, strict=True) if m]
        for row in zip(train.tolist(), rollout.tolist(), mask.tolist(), strict=True)
    ]


def spread(rows, mask):
    """Per-token values of the valid tokens, back in a `(B, T)` tensor with 0 elsewhere."""
    result = torch.zeros(mask.shape, dtype=torch.float64)
    result[mask] = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    return result


@st.composite
def batches_of_probabilities(draw):
    """As above, of log-probabilities at most 0: with them, advantages of which some are 0."""
    train, rollout, mask = draw(batches())
    shift = torch.maximum(train, rollout).max().clamp(min=0.0)  # the log-ratios stay where they are
    advantages = [draw(st.sampled_from([-1.3, 0.0, 0.7])) for _ in mask]
    return train - shift, rollout - shift, mask, torch.tensor(advantages)


def correct(train, rollout, mask, advantages=None, **fields):
    fields = {"rollout_correction": "decoupled_token_is", **fields}  # the default needs advantages
    return compute_rollout_correction(train, rollout, mask, RolloutCorrectionConfig(**fields), advantages=advantages)


def named(correction):
    return {key.removeprefix(PREFIX): value for key, value in correction.metrics().items()}


def assert_metrics(found, expected):
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-9, abs=1e-9)


BOUNDS = {
    "k1": [0.7, 1.9],
    "k2": 0.21,
    "k3": 0.17,
    "tv": [0.0171, 0.0273],
    "kl": [0.0133, 0.0071],
    "binary_kl": 0.0113,
}


def bounds_of(name):
    if name == "seq_mean_tv":
        return 0.0211
    return BOUNDS[reference.parts(name)[2]]


def turns(mask):
    """Turn of each valid token, by sequence."""
    return [reference.turns_of(row) for row in mask.tolist()]


@given(
    batches(),
    st.sampled_from(LEVELS),
    st.sampled_from([(2.0, False), ([0.6, 3.0], False), ([0.6, 3.0], True)]),
    st.booleans(),
)
def test_weights_and_their_metrics_equal_the_loops(batch, level, bounds, normalize):
    mask, (threshold, clamp) = batch[2], bounds
    correction = correct(
        *batch,
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_clamp=clamp,
        rollout_is_batch_normalize=normalize,
    )
    lower, upper = threshold if isinstance(threshold, list) else (None, threshold)
    rows = sequences(*batch)
    of = {"normalize": normalize, "clamp": clamp, "turns": turns(mask)}
    expected = reference.weights(rows, level, lower, upper, **of)
    torch.testing.assert_close(correction.weights, spread(expected, mask), rtol=1e-9, atol=1e-12)
    metrics = named(correction)
    assert_metrics(metrics, reference.policy_metrics(rows))
    assert_metrics(metrics, reference.weight_metrics(rows, level, lower, upper, **of))


@given(batches_of_probabilities(), st.sampled_from(LEVELS), st.booleans(), st.booleans())
def test_weights_by_sign_of_the_advantage_equal_the_loops(batch, level, clamp, per_token):
    *batch, advantages = batch
    negative, positive = ((0.3, 1.1), (0.9, 3.0)) if not clamp else ((0.0, 1.0), (1.0, 1.0))
    per_token = per_token and level in ("token", "window")
    correction = correct(
        *batch,
        advantages.unsqueeze(1).expand(batch[2].shape) if per_token else advantages,
        rollout_is=level,
        rollout_is_threshold=[negative, positive],
        rollout_is_clamp=clamp,
    )
    rows = sequences(*batch)
    pairs = [positive if advantage > 0 else negative for advantage in advantages.tolist()]
    ratios = reference.ratios(rows, level, turns(batch[2]))
    expected = [[reference.bound(r, *pair, clamp) for r in row] for row, pair in zip(ratios, pairs, strict=True)]
    torch.testing.assert_close(correction.weights, spread(expected, batch[2]), rtol=1e-9, atol=1e-12)
    with_pairs = [[(r, pair) for r in row] for row, pair in zip(ratios, pairs, strict=True)]
    units = reference.normalization_units(with_pairs, level, turns(batch[2]))
    flat = [weight for row in expected for weight in row]
    shares = {
        "rollout_is_mean": statistics.fmean(flat),
        "rollout_is_ratio_fraction_high": statistics.fmean(r > upper for r, (_, upper) in units),
        "rollout_is_ratio_fraction_low": statistics.fmean(r < lower for r, (lower, _) in units),
        **({"rollout_is_max": max(flat), "rollout_is_min": min(flat)} if level in ("token", "window") else {}),
    }
    assert_metrics(named(correction), shares)


def test_weights_by_sign_need_advantages_and_one_per_sequence_for_sequence_weights():
    batch = torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3)
    fields = {"rollout_is_threshold": [[0, 1], [1, 1]], "rollout_is_clamp": True}
    with pytest.raises(
        ValueError,
        match=r"`rollout_is_threshold` contains bounds that depend .* of shape \(2,\) or \(2, 3\), got None",
    ):
        correct(*batch, **fields)
    with pytest.raises(ValueError, match=r"pass `advantages` of shape \(2,\), got \(2, 3\)"):
        correct(*batch, torch.zeros(2, 3), rollout_is="sequence", **fields)


@given(batches_of_probabilities(), st.sampled_from(CRITERIA))
def test_each_criterion_and_its_metrics_equal_the_loops(batch, name):
    bounds, (*batch, advantages) = bounds_of(name), batch
    fields = {"rollout_is": None, "rollout_rs": [name], "rollout_rs_threshold": [bounds]}
    correction = correct(*batch, advantages, **fields)
    rows, advantages = sequences(*batch), advantages.tolist()
    expected = spread(reference.keeps(rows, name, bounds, advantages, turns(batch[2])), batch[2]).bool()
    assert torch.equal(correction.keep, expected)
    expected = reference.rejection_metrics(rows, name, bounds, advantages, turns(batch[2]))
    assert_metrics(named(correction), {f"rollout_rs_{name}_{key}": value for key, value in expected.items()})


@given(batches_of_probabilities(), st.lists(st.sampled_from(CRITERIA), min_size=2, max_size=4, unique=True))
def test_several_criteria_keep_what_each_keeps(batch, names):
    bounds, (*batch, advantages) = [bounds_of(name) for name in names], batch
    correction = correct(*batch, advantages, rollout_is=None, rollout_rs=names, rollout_rs_threshold=bounds)
    rows = sequences(*batch)
    kept = [[True] * len(row) for row in rows]
    for name, bound in zip(names, bounds, strict=True):
        kept = [
            [a and b for a, b in zip(*row, strict=True)]
            for row in zip(kept, reference.keeps(rows, name, bound, advantages.tolist(), turns(batch[2])), strict=True)
        ]
    assert torch.equal(correction.keep, spread(kept, batch[2]).bool())
    expected = 1 - correction.keep.sum() / batch[2].sum()
    assert named(correction)["rollout_rs_masked_fraction"] == pytest.approx(expected)


@given(
    batches(), st.sampled_from([math.nan, math.inf, -math.inf, 1e30, 0.0]), st.sampled_from([math.nan, -math.inf, 7.0])
)
def test_padding_never_matters(batch, train_padding, rollout_padding):
    fields = {
        "rollout_is": "sequence",
        "rollout_rs": ["token_k1", "seq_max_k3"],
        "rollout_rs_threshold": [[0.5, 2.0], 1.0],
        "rollout_rs_renormalize": True,
        "rollout_is_batch_normalize": True,
    }
    train, rollout, mask = batch
    clean = correct(*batch, **fields)
    padded = correct(
        train.masked_fill(~mask, train_padding), rollout.masked_fill(~mask, rollout_padding), mask, **fields
    )
    assert torch.equal(clean.weights, padded.weights)
    assert torch.equal(clean.keep, padded.keep)
    assert torch.equal(clean.coefficients, padded.coefficients)
    assert clean.metrics() == pytest.approx(padded.metrics(), nan_ok=True)


@given(batches(max_rows=6), st.integers(1, 5), st.sampled_from(["sequence", "turn"]))
def test_metrics_do_not_depend_on_the_split(batch, chunk, level):
    names = OF_TURNS if level == "turn" else ["token_k1", "seq_sum_k3"]
    bounds = [1.5 if name.endswith("k1") else 0.3 for name in names]
    fields = {"rollout_is": level, "rollout_rs": names, "rollout_rs_threshold": bounds}
    whole = correct(*batch, **fields)
    parts = [correct(*(x[i : i + chunk] for x in batch), **fields).statistics for i in range(0, len(batch[0]), chunk)]
    added = parts[0]
    for part in parts[1:]:
        added = added + part
    gathered = parts[0].combine(torch.stack([part.vector for part in parts]))
    assert added.finish() == pytest.approx(whole.metrics(), rel=1e-9, abs=1e-12, nan_ok=True)
    assert gathered.finish() == pytest.approx(whole.metrics(), rel=1e-9, abs=1e-12, nan_ok=True)


@given(batches(max_rows=6), st.booleans())
def test_normalisation_over_ranks_equals_normalisation_over_the_whole(batch, token_level):
    fields = {
        "rollout_is": "token" if token_level else "sequence",
        "rollout_is_batch_normalize": True,
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": [0.5, 2.0],
        "rollout_rs_renormalize": True,
    }
    whole = correct(*batch, **fields)
    config = RolloutCorrectionConfig(**fields)
    ranks = [[x[i : i + 1] for x in batch] for i in range(len(batch[0]))]
    contributions = []
    for rank in ranks:  # what each rank would hand to the collective
        compute_rollout_correction(*rank, config, sum_over_ranks=lambda t: contributions.append(t) or t)
    totals = torch.stack(contributions).sum(0)
    split = [compute_rollout_correction(*rank, config, sum_over_ranks=lambda t: totals).coefficients for rank in ranks]
    torch.testing.assert_close(torch.cat(split), whole.coefficients, rtol=1e-9, atol=1e-12)


@given(batches(), st.sampled_from(LEVELS), st.booleans(), st.booleans())
def test_the_effective_learning_rate_is_the_mean_coefficient(batch, level, normalize, renormalize):
    fields = {"rollout_is": level, "rollout_is_batch_normalize": normalize, "rollout_rs_renormalize": renormalize}
    correction = correct(*batch, **fields, rollout_rs="token_k1", rollout_rs_threshold=[0.5, 2.0])
    expected = (correction.coefficients.sum() / batch[2].sum()).item()
    assert named(correction)["effective_lr"] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(batches_of_probabilities(), st.booleans())
def test_the_divergence_by_sign_of_the_advantage_equals_the_loops(batch, per_token):
    train, rollout, mask, advantages = batch
    given_as = advantages[:, None].expand(mask.shape) if per_token else advantages
    found = {key: value for key, value in named(correct(train, rollout, mask, given_as)).items() if "advantage" in key}
    expected = reference.direction_metrics(sequences(train, rollout, mask), advantages.tolist())
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
    parts = [correct(*(x[i : i + 1] for x in (train, rollout, mask, given_as))).statistics for i in range(len(mask))]
    together = parts[0].combine(torch.stack([part.vector for part in parts])).finish()
    assert {key: together[PREFIX + key] for key in found} == pytest.approx(found, rel=1e-9, abs=1e-9)


@given(batches_of_probabilities())
def test_the_divergence_by_sign_takes_the_advantage_of_each_token(batch):
    """Also where the signs alternate within a completion, whose mean advantage says nothing."""
    train, rollout, mask, advantages = batch
    of_token = advantages[:, None] * torch.where(torch.arange(mask.shape[1]) % 2 == 0, 1.0, -2.0)
    found = {key: value for key, value in named(correct(train, rollout, mask, of_token)).items() if "advantage" in key}
    alone = [[token] for row in sequences(train, rollout, mask) for token in row]
    expected = reference.direction_metrics(alone, of_token[mask != 0].tolist())
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_advantages_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"`advantages` must be of shape \(3,\) or \(3, 2\), got \(2,\)"):
        correct(torch.zeros(3, 2), torch.zeros(3, 2), torch.ones(3, 2), torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_extreme_log_ratios_stay_finite(dtype, level, gap):
    train = torch.tensor([[0.0, gap, 0.0], [gap, gap, gap]], dtype=dtype)
    rollout = torch.zeros(2, 3, dtype=dtype)
    for criterion in CRITERIA:
        bound = reference.threshold_of(criterion, 2.0)
        fields = {"rollout_rs": criterion, "rollout_rs_threshold": bound, "rollout_is_threshold": math.inf}
        advantages = torch.tensor([1.0, gap])
        correction = correct(train, rollout, torch.ones(2, 3), advantages, rollout_is=level, **fields)
        assert correction.weights.isfinite().all()
        assert correction.coefficients.isfinite().all()
        assert all(math.isfinite(value) for value in correction.metrics().values())
        if criterion in RATIO_CRITERIA:
            assert not correction.keep[1].any()


def test_bfloat16_is_widened_before_the_difference():
    train, rollout = torch.tensor([[-8.0]], dtype=torch.bfloat16), torch.tensor([[-8.03125]])
    weights = correct(train, rollout, torch.ones(1, 1), rollout_is="token").weights
    assert weights.dtype == torch.float32
    assert weights.item() == pytest.approx(math.exp(0.03125))


def test_nothing_carries_a_gradient():
    train = torch.zeros(2, 3, requires_grad=True)
    correction = correct(train, torch.full((2, 3), -0.1), torch.ones(2, 3))
    assert not correction.weights.requires_grad
    assert not correction.coefficients.requires_grad


def test_everything_rejected_is_zero_and_says_so():
    fields = {"rollout_is": "token", "rollout_is_threshold": [0.9, 1.1], "rollout_rs": "seq_sum_k1"}
    correction = correct(
        torch.full((2, 3), 3.0), torch.zeros(2, 3), torch.ones(2, 3), rollout_rs_threshold=1.5, **fields
    )
    metrics = named(correction)
    assert not correction.keep.any()
    assert correction.coefficients.abs().sum() == 0
    assert metrics["effective_lr"] == 0.0
    assert metrics["rollout_is_eff_sample_size"] == 0.0  # verl divides by zero here
    assert metrics["rollout_rs_masked_fraction"] == 1.0
    renormalized = correct(
        torch.full((2, 3), 3.0), torch.zeros(2, 3), torch.ones(2, 3), rollout_rs_threshold=1.5,
        rollout_rs_renormalize=True, rollout_is_batch_normalize=True, **fields,
    )  # fmt: skip
    assert renormalized.coefficients.abs().sum() == 0


def test_an_empty_mask_gives_nan_metrics_and_no_error():
    correction = correct(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3))
    assert correction.coefficients.abs().sum() == 0
    assert all(math.isnan(value) or value == 0 for value in correction.metrics().values())


def test_log_ratios_at_the_bounds_are_kept():
    train = torch.tensor([[math.log(0.5), math.log(2.0), 0.0]])
    correction = correct(
        train, torch.zeros(1, 3), torch.ones(1, 3), rollout_is="token", rollout_is_threshold=[0.5, 2.0],
        rollout_rs="token_k1", rollout_rs_threshold=[0.5, 2.0],
    )  # fmt: skip
    assert correction.keep.all()
    assert (correction.weights > 0).all()


def test_a_window_ends_with_the_token_and_has_sixteen_tokens_of_the_completion():
    d = torch.full((2, 40), 0.1)
    d[0, 3], d[1, 20:22] = -2.0, math.nan
    mask = torch.ones(2, 40)
    mask[1, 10:15] = 0  # as the answer of a tool
    weights = correct(d, torch.zeros(2, 40), mask, rollout_is="window", rollout_is_threshold=math.inf).weights
    counts = torch.where((mask != 0) & d.isfinite(), d, 0.0).double()
    expected = torch.stack([counts[:, max(t - 15, 0) : t + 1].sum(1).exp() for t in range(40)], 1)
    torch.testing.assert_close(weights.double(), expected * (mask != 0) * d.isfinite(), rtol=1e-5, atol=0)
    assert weights[0, 18] < 1 < weights[0, 19]  # the token of -2 leaves the window


# Broken log-probabilities ---------------------------------------------------------------------------------------------

BROKEN = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", BROKEN)
def test_drop_takes_the_token_out_of_everything(value, level):
    train, rollout, mask = torch.zeros(1, 4) - 1, torch.tensor([[-1.2, value, -0.7, -1.4]]), torch.ones(1, 4)
    bounds = [reference.threshold_of(name, 3.0) for name in CRITERIA]
    fields = {"rollout_is": level, "rollout_rs": list(CRITERIA), "rollout_rs_threshold": bounds}
    advantages = torch.ones(1)
    broken = correct(train, rollout, mask, advantages, **fields)
    without = correct(train[:, [0, 2, 3]], rollout[:, [0, 2, 3]], mask[:, [0, 2, 3]], advantages, **fields)
    assert broken.coefficients[0, 1] == 0
    assert not broken.keep[0, 1]
    assert torch.equal(broken.coefficients[:, [0, 2, 3]], without.coefficients)
    expected = without.metrics() | {f"{PREFIX}nonfinite_fraction": 0.25}
    assert broken.metrics() == pytest.approx(expected)


@pytest.mark.parametrize("value", BROKEN)
def test_neutralize_takes_the_ratio_as_one(value):
    train, rollout, mask = torch.zeros(1, 4) - 1, torch.tensor([[-1.2, value, -0.7, -1.1]]), torch.ones(1, 4)
    broken = correct(train, rollout, mask, rollout_is="token", rollout_nan_policy="neutralize")
    neutral = correct(train, torch.tensor([[-1.2, -1.0, -0.7, -1.1]]), mask, rollout_is="token")
    assert broken.coefficients[0, 1] == 1
    assert torch.equal(broken.weights, neutral.weights)
    assert broken.metrics() == pytest.approx(neutral.metrics() | {f"{PREFIX}nonfinite_fraction": 0.25})


@pytest.mark.parametrize("value", BROKEN)
def test_raise_names_the_count_and_the_way_out(value):
    rollout = torch.tensor([[-1.2, value, -0.7]])
    with pytest.raises(ValueError, match=r"1 of 3 tokens.*`rollout_nan_policy` is 'raise'.*'drop'"):
        correct(torch.zeros(1, 3), rollout, torch.ones(1, 3), rollout_nan_policy="raise")
    correct(torch.zeros(1, 3), rollout, torch.tensor([[1, 0, 1]]), rollout_nan_policy="raise")  # padding is no error


def test_a_broken_trainer_cannot_be_neutralised():
    train = torch.tensor([[-1.0, math.nan]])
    correction = correct(train, torch.zeros(1, 2) - 1, torch.ones(1, 2), rollout_nan_policy="neutralize")
    assert correction.coefficients.tolist() == [[1, 0]]
    assert math.isfinite(named(correction)["training_ppl"])


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (2,), (2, 0)])
def test_shapes_that_differ_are_an_error(shape):
    with pytest.raises(ValueError, match=r"one shape \(B, T\).*`mask`"):
        correct(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(shape))


# Defects of other implementations -------------------------------------------------------------------------------------


def test_k1_bounds_are_bounds_on_the_ratio():
    ratio = torch.tensor([[0.59, 0.61, 1.0, 1.59, 1.61]])
    keep = correct(
        ratio.log(), torch.zeros(1, 5), torch.ones(1, 5), rollout_is=None, rollout_rs="token_k1",
        rollout_rs_threshold=[0.6, 1.6],
    ).keep  # fmt: skip
    assert keep.tolist() == [[False, True, True, True, False]]


def test_veto_drops_the_sequence_of_a_catastrophic_token():
    train = torch.tensor([[0.0, -10.0], [0.0, 10.0], [0.0, -9.0]])
    correction = correct(
        train, torch.zeros(3, 2), torch.ones(3, 2), rollout_is=None, rollout_rs="seq_max_k1",
        rollout_rs_threshold=[1e-4, math.inf],
    )  # fmt: skip
    assert correction.keep.tolist() == [[False, False], [True, True], [True, True]]
    metrics = named(correction)
    assert metrics["rollout_is_veto_fraction"] == pytest.approx(1 / 3)
    assert metrics["rollout_is_catastrophic_token_fraction"] == pytest.approx(1 / 6)


def test_veto_reaches_below_the_safety_bound():
    train = torch.tensor([[0.0, -22.0], [0.0, -24.0]])  # exp(-23) = 1e-10
    keep = correct(
        train, torch.zeros(2, 2), torch.ones(2, 2), rollout_is=None, rollout_rs="seq_max_k1",
        rollout_rs_threshold=[1e-10, math.inf],
    ).keep  # fmt: skip
    assert keep.tolist() == [[True, True], [False, False]]


# Extremes, and sums of different layouts -------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=50), st.floats(1e-4, 1.0))
def test_extremes_are_exact(values, scale):
    values = [value * scale for value in values]
    d = torch.tensor([values], dtype=torch.float64)
    metrics = named(correct(d, torch.zeros_like(d), torch.ones_like(d), rollout_is=None))
    assert metrics["log_ratio_min"] == pytest.approx(min(values))
    assert metrics["log_ratio_max"] == pytest.approx(max(values))


def test_sums_of_a_batch_are_few():
    """They are gathered over all ranks at every optimizer step."""
    assert len(correct(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3)).statistics.vector) < 60


def test_statistics_of_different_configurations_do_not_add():
    one = correct(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), rollout_is=None).statistics
    other = correct(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1)).statistics
    with pytest.raises(ValueError, match="different configurations"):
        one + other


def test_bounds_of_k2_are_in_nats():
    train = torch.tensor([[0.0, math.log(9.3)], [0.0, math.log(9.4)]])
    zeros, ones = torch.zeros(2, 2), torch.ones(2, 2)
    of_k2 = correct(train, zeros, ones, rollout_is=None, rollout_rs="seq_max_k2", rollout_rs_threshold=2.5)
    assert of_k2.keep.any(-1).tolist() == [True, False]
    of_ratio = correct(train, zeros, ones, rollout_is=None, rollout_rs="seq_max_k1", rollout_rs_threshold=2.5)
    assert not of_ratio.keep.any()


# Blocks of rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"rollout_correction": "auto"},
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
        {"bypass_mode": True, "rollout_loss_type": "reinforce"},
        {"rollout_rs": ["seq_max_k2"], "rollout_rs_threshold": 0.5, "rollout_rs_renormalize": True},
    ],
)
def test_rows_in_blocks_are_corrected_like_all_rows_at_once(fields, monkeypatch):
    dice = torch.Generator().manual_seed(0)
    rollout = -torch.rand(7, 5, generator=dice, dtype=torch.float64).mul(3)
    train = rollout + torch.randn(7, 5, generator=dice, dtype=torch.float64).mul(0.3)
    batch = train, rollout, torch.rand(7, 5, generator=dice) < 0.8, torch.randn(7, generator=dice)
    whole = correct(*batch, **fields)
    monkeypatch.setattr("trl_rollout_corr.correction.functional._BLOCK_ON_CPU", 10)  # two rows
    made, new_empty = [], torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *a, **k: made.append(x) or new_empty(x, *a, **k))
    in_blocks = correct(*batch, **fields)
    assert len(made) <= 4  # one for each tensor of the result
    for name in ("weights", "keep", "valid", "log_ratio", "coefficients"):
        found, expected = getattr(in_blocks, name), getattr(whole, name)
        assert (found is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(found, expected)
    assert (whole.log_ratio is None) == ("bypass_mode" not in fields)
    assert_metrics(named(in_blocks), named(whole))


# Turns ----------------------------------------------------------------------------------------------------------------

THRESHOLDS = {
    f"turn_{how}_{divergence}": bound
    for how, bounds in {"sum": (1.3, 0.1, 0.1), "mean": (1.002, 0.0012, 0.0012), "max": (1.13, 0.0075, 0.0075)}.items()
    for divergence, bound in zip(("k1", "k2", "k3"), bounds, strict=True)
}


@pytest.mark.parametrize("name", OF_TURNS)
def test_with_one_turn_a_turn_is_the_sequence_bit_for_bit(name):
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(5, 300, generator=generator) * 3
    train = rollout + 0.05 * torch.randn(5, 300, generator=generator)
    train[0, 3] = math.nan
    ends = torch.tensor([0, 1, 37, 200, 300])[:, None]
    mask = (torch.arange(300) < ends) & (torch.arange(300) >= torch.tensor([0, 0, 5, 9, 0])[:, None])
    found = []
    for unit, level in (("turn", "turn"), ("seq", "sequence")):
        rejection = {"rollout_rs": name.replace("turn", unit), "rollout_rs_threshold": THRESHOLDS[name]}
        found.append(correct(train, rollout, mask, rollout_is=level, **rejection))
    of_turn, of_sequence = found
    assert torch.equal(of_turn.keep, of_sequence.keep)
    assert 0 < of_turn.keep.sum() < of_turn.valid.sum()
    assert torch.equal(of_turn.weights, of_sequence.weights)
    expected = {
        key.replace(f"rs_seq_{name[5:]}", f"rs_{name}"): x
        for key, x in named(of_sequence).items()
        if not re.search("veto|catastrophic", key)
    }
    assert named(of_turn) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_turn_ids_take_the_place_of_runs():
    train, rollout, mask = (
        torch.tensor([[0.1, 0.2, 0.4, 0.8, 1.6]]),
        torch.zeros(1, 5),
        torch.tensor([[1, 1, 0, 1, 1]]),
    )

    def sums(turn_ids):
        config = RolloutCorrectionConfig(rollout_is="turn", rollout_is_threshold=math.inf)
        ids = None if turn_ids is None else torch.tensor([turn_ids])
        weights = compute_rollout_correction(train, rollout, mask, config, turn_ids=ids).weights[0]
        return weights.log()[mask[0] > 0].tolist()

    assert sums(None) == pytest.approx([0.3, 0.3, 2.4, 2.4])
    assert sums([0, 1, 1, 1, 5]) == pytest.approx([0.1, 1.0, 1.0, 1.6])  # one turn around the answer of a tool
    assert sums([3, 3, 3, 3, 3]) == pytest.approx([2.7] * 4)
    assert sums([0, 0, 7, 7, 7]) == sums(None)
    with pytest.raises(ValueError, match=r"one shape .*`turn_ids` \(1, 3\)"):
        sums([0, 1, 2])


@pytest.mark.parametrize(("d", "scale"), [([0.0, 0.1, 3.0, math.nan], 1.5), ([3.0, 3.0, 3.0, math.nan], 1.0)])
def test_renormalized_rejection_makes_the_mean_one_over_kept_tokens(d, scale):
    """Or leaves it alone, if no token is kept."""
    config = RolloutCorrectionConfig(
        rollout_is=None, rollout_rs="token_k1", rollout_rs_threshold=[0.1, 10.0], rollout_rs_renormalize=True
    )
    train = torch.tensor([d])
    found = compute_rollout_correction(train, torch.zeros_like(train), torch.ones_like(train), config)
    assert found.scale == scale
    kept = torch.tensor([[abs(x) < 1 for x in d]])
    torch.testing.assert_close(found.coefficients, kept * scale)
    assert found.metrics()[f"{PREFIX}effective_lr"] == pytest.approx(float(kept.any()))


# A criterion or weights of the user ------------------------------------------------------------------------------------


def corrected(**fields):
    """Three tokens, of which the settings reject the first, and a hole. Weights are 2 and 0.5 where they keep."""
    d = torch.tensor([[3.0, math.log(2.0), math.nan, -math.log(2.0)]])
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold=9.0, rollout_rs="token_k1", rollout_rs_threshold=[0.1, 10.0], **fields
    )
    return compute_rollout_correction(d, torch.zeros_like(d), torch.ones_like(d), config)


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ([[True, True, True, False]], [0.0, 2.0, 0.0, 0.0]),  # what the settings reject stays rejected
        ([[True]], [0.0, 2.0, 0.0, 0.5]),
        ([[False]], [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_a_token_needs_both_the_settings_and_the_criterion_of_the_user(keep, left):
    found = corrected().adjusted(keep=torch.tensor(keep))
    torch.testing.assert_close(found.coefficients, torch.tensor([left]))
    assert found.metrics()[f"{PREFIX}effective_lr"] == pytest.approx(sum(left) / 3)


@pytest.mark.parametrize("fields", [{}, {"bypass_mode": True}])
def test_weights_of_the_user_replace_those_of_the_settings(fields):
    """Also where the mode does not apply weights of the settings."""
    weights = torch.tensor([[7.0, 3.0, 7.0, 0.25]], requires_grad=True)
    found = corrected(**fields).adjusted(weights=weights)
    assert not found.weights.requires_grad
    torch.testing.assert_close(found.weights, torch.tensor([[7.0, 3.0, 0.0, 0.25]]))
    torch.testing.assert_close(found.coefficients, torch.tensor([[0.0, 3.0, 0.0, 0.25]]))
    assert found.metrics()[f"{PREFIX}effective_lr"] == pytest.approx(3.25 / 3)


def test_a_criterion_of_the_user_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"`keep` must have the shape \(1, 4\) or \(1, 1\), got \(4,\)"):
        corrected().adjusted(keep=torch.ones(4))
    with pytest.raises(ValueError, match=r"`weights` must have the shape \(1, 4\), got \(1, 1\)"):
        corrected().adjusted(weights=torch.ones(1, 1))


# Memory ---------------------------------------------------------------------------------------------------------------

LONG = (4, 32_768)  # tokens


def peak_of(compute, folder):
    """Largest number of bytes that a computation has at once beyond its inputs, and what it returns."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        found = compute()
    path = str(folder / "trace.json")
    profiled.export_chrome_trace(path)
    with open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("name") == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    assert peak > 0
    return peak, found


@pytest.mark.parametrize("block", [2**17, 2**15])
@pytest.mark.parametrize(
    "fields",
    [
        {"rollout_correction": "auto"},
        {"rollout_correction": "decoupled_token_is"},
        {"rollout_is": "sequence"},
        {
            "rollout_is": "token",
            "rollout_rs": "token_k1,seq_max_k2,token_tv",
            "rollout_rs_threshold": "0.5_2.0,4.0,0.2",
        },
    ],
)
@pytest.mark.filterwarnings("ignore::trl_rollout_corr.messages.SettingWarning")
def test_rows_of_many_tokens_need_the_memory_of_few_tensors(fields, block, monkeypatch, tmp_path):
    """
    Correction, metrics and groups take rows in blocks, so that they need at most 20 tensors of a block beside what they
    return, however many rows there are.
    """
    monkeypatch.setattr(functional, "_BLOCK_ON_CPU", block)
    torch.manual_seed(0)
    rollout = -3 * torch.rand(LONG)
    train, mask, advantages = rollout + 0.05 * torch.randn(LONG), torch.ones(LONG), torch.randn(len(rollout))
    settings = RolloutCorrectionConfig(**fields).settings

    def computed():
        found = compute_rollout_correction(train, rollout, mask, settings, advantages=advantages, fresh=advantages > 0)
        groups = add_up_groups(found.valid, found.keep, found.coefficients, advantages, advantages)
        return found, groups

    peak, _ = peak_of(computed, tmp_path)
    one = 4 * block
    returned = 3 * 4 * rollout.numel()  # weights, coefficients, and two masks
    assert peak < 20 * one + returned
