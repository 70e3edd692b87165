"""The health rules: each alone on small histories, and all of them on recorded runs."""

import json
import math
import re
from dataclasses import asdict

import pytest

from tests.launching import ROOT
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.criteria import CRITERIA
from trl_rollout_corr.health import Examiner, Finding, Growth, Window
from trl_rollout_corr.keys import PREFIX
from trl_rollout_corr.rules import HEALTHY, RULES, examine, parse_bounds


DISABLED = {"rollout_correction": "disabled"}
SEQUENCE = {"rollout_is": "sequence"}
VETO = {"rollout_rs": ["seq_max_k1"], "rollout_rs_threshold": [[1e-4, math.inf]]}
ICEPOP = {"rollout_is_threshold": [0.5, 5.0]}

HEALTHY_WINDOW = {
    "kl": 0.0008,
    "k3_kl": 0.0008,
    "chi2_token": 0.002,
    "chi2_seq": 3.0,
    "effective_lr": 0.97,
    "nonfinite_fraction": 0.0,
    "staleness_max": 4.0,
}
WEIGHTS = {
    "rollout_is_mean": 0.99,
    "rollout_is_std": 0.05,
    "rollout_is_eff_sample_size": 0.98,
    "rollout_is_ratio_fraction_high": 0.001,
}
REJECTION = {
    "rollout_rs_masked_fraction": 0.05,
    "rollout_is_veto_fraction": 0.01,
    "rejected/long_positive": 0.06,
    "rejected/others": 0.05,
}
CORRECTED = {**HEALTHY_WINDOW, **WEIGHTS, **REJECTION}

# By rule: settings, what differs from a healthy window, and the same just within the bounds
ILL = {
    "nonfinite_many": ({}, {"nonfinite_fraction": 0.11}, {"nonfinite_fraction": 0.0}),
    "nonfinite": ({}, {"nonfinite_fraction": 1e-6}, {"nonfinite_fraction": 0.0}),
    "everything_rejected": ({}, {"effective_lr": 0.0}, {"effective_lr": 0.51}),
    "k3_high": ({}, {"k3_kl": 0.031, "kl": 0.031}, {"k3_kl": 0.029, "kl": 0.029}),
    "k3_uncorrected": (DISABLED, {"k3_kl": 0.016, "kl": 0.016}, {"k3_kl": 0.014, "kl": 0.014}),
    "kl_negative": ({}, {"kl": -0.11, "k3_kl": 0.02}, {"kl": -0.004, "k3_kl": 0.004}),
    "kl_high": ({}, {"kl": 0.11, "k3_kl": 0.02}, {"kl": 0.039, "k3_kl": 0.02}),
    "biased_ratio": ({}, {"kl": 0.02, "k3_kl": 0.0006}, {"kl": 0.0104, "k3_kl": 0.0006}),
    "staleness": ({}, {"staleness_max": 17.0}, {"staleness_max": 16.0}),
    "weight_mean_low": ({}, {"rollout_is_mean": 0.49}, {"rollout_is_mean": 0.51}),
    "weight_mean_high": (SEQUENCE, {"rollout_is_mean": 2.1}, {"rollout_is_mean": 1.9}),
    "effective_sample_size": ({}, {"rollout_is_eff_sample_size": 0.29}, {"rollout_is_eff_sample_size": 0.31}),
    "weight_std": ({}, {"rollout_is_std": 1.1}, {"rollout_is_std": 0.9}),
    "weights_at_bound": ({}, {"rollout_is_ratio_fraction_high": 0.11}, {"rollout_is_ratio_fraction_high": 0.09}),
    "icepop_dropped": (ICEPOP, {"rollout_is_oob_ratio": 0.31}, {"rollout_is_oob_ratio": 0.29}),
    "chi2_token": ({}, {"chi2_token": 1.1}, {"chi2_token": 0.9}),
    "chi2_seq": (SEQUENCE, {"chi2_seq": 11.0}, {"chi2_seq": 9.0}),
    "rejected": ({}, {"rollout_rs_masked_fraction": 0.51}, {"rollout_rs_masked_fraction": 0.49}),
    "vetoed": (VETO, {"rollout_is_veto_fraction": 0.11}, {"rollout_is_veto_fraction": 0.09}),
    "effective_lr_low": ({}, {"effective_lr": 0.49}, {"effective_lr": 0.51}),
    "effective_lr_high": ({}, {"effective_lr": 1.51}, {"effective_lr": 1.49}),
    "selection": (
        {},
        {"rejected/long_positive": 0.21, "rejected/others": 0.06},
        {"rejected/long_positive": 0.21, "rejected/others": 0.08},
    ),
}


def config(**fields):
    return RolloutCorrectionConfig(**fields)


def history(*windows, spacing=1):
    """A log of windows, with the entries of an evaluation and of the end of training."""
    log = [
        {"loss": 0.0, "step": step, **{PREFIX + key: value for key, value in window.items()}}
        for step, window in enumerate(windows, 1)
    ]
    for entry in log:
        entry["step"] *= spacing
    return [*log, {"eval_loss": 1.0, "eval_rollout_corr/k3_kl": 9.0, "step": 1}, {"train_runtime": 1.0, "step": 1}]


def healthy(settings):
    if settings == ICEPOP:
        return {**CORRECTED, "rollout_is_oob_ratio": 0.01}
    return HEALTHY_WINDOW if settings == DISABLED else CORRECTED


def found(log, settings=None):
    return [finding.rule for finding in examine(log, settings)]


# One rule at a time ---------------------------------------------------------------------------------------------------


def test_every_rule_is_tested():
    assert set(ILL) | {"k3_growth"} == set(RULES)


@pytest.mark.parametrize("rule", ILL)
def test_a_rule_fires_out_of_its_bounds_and_not_within(rule):
    fields, ill, well = ILL[rule]
    window, settings = healthy(fields), config(**fields)
    assert found(history(*[window] * 60), settings) == []
    assert found(history(*[{**window, **well}] * 60), settings) == []
    finding = examine(history(*[{**window, **ill}] * 60), settings)[0]
    assert finding.rule == rule
    assert (finding.severity, finding.key) == (RULES[rule].severity, PREFIX + RULES[rule].key)
    assert (finding.step, finding.last_step) == (RULES[rule].patience // 2 + 1, 60)
    assert finding.value == pytest.approx(RULES[rule].value(_window({**window, **ill}, settings)))


def _window(window, settings):
    return Window({PREFIX + key: value for key, value in window.items()}, settings, Growth())


@pytest.mark.parametrize("rule", [rule for rule in ILL if RULES[rule].patience > 1])
def test_a_single_window_is_forgiven_and_most_of_several_are_not(rule):
    fields, ill, _ = ILL[rule]
    window, patience = healthy(fields), RULES[rule].patience
    ill = {**window, **ill}
    alone = [window] * (patience - 1) + [ill]
    assert rule not in found(history(*alone * 20), config(**fields))
    most = [ill] * (patience // 2 + 1) + [window] * (patience // 2)
    assert rule in found(history(*most * 2), config(**fields))


@pytest.mark.parametrize("rule", RULES)
def test_what_a_rule_says(rule):
    rule = RULES[rule]
    said = str(Finding(rule.name, rule.severity, rule.key, 1, 1, 0.5, rule.seen, rule.why, rule.advice, "> 0.1"))
    assert said.endswith(".")
    assert rule.severity in ("warning", "critical")
    assert rule.patience % 2 == 1
    assert set(rule.covers) < set(RULES)
    fields = set(re.findall(r"`((?:rollout|bypass)\w*)`", said))
    keys = {other.key for other in RULES.values()}
    assert fields <= set(RolloutCorrectionConfig.__dataclass_fields__) | keys
    assert set(re.findall(r"\b(?:token|seq)_(?:\w+_)?k[123]\b", rule.advice)) <= {*CRITERIA}


def test_severe_rules_come_before_those_they_cover():
    for rule in RULES.values():
        for name in rule.covers:
            assert rule.severity == "critical" or RULES[name].severity == "warning"


def test_the_healthy_bands_lie_within_the_bounds():
    for rule in RULES.values():
        if rule.measure is None and rule.key in HEALTHY:
            lower, upper = HEALTHY[rule.key]
            assert (lower if rule.below else upper) is not None
            assert rule.bound <= lower if rule.below else rule.bound >= upper


# Growth ---------------------------------------------------------------------------------------------------------------


def k3(values, settings=None, **others):
    return found(history(*[{**CORRECTED, "k3_kl": value, "kl": value, **others} for value in values]), settings)


def noisy(values):
    """Up and down by a factor of 3, as between windows of a small batch."""
    return [value * (3.0, 0.5, 1.0, 0.4, 1.6)[i % 5] for i, value in enumerate(values)]


@pytest.mark.parametrize("noise", [list, noisy])
def test_growth_is_seen_and_a_level_is_not(noise):
    assert k3(noise([0.001] * 200)) == []
    assert k3(noise([0.001 * 1.02**step for step in range(100)])) == ["k3_growth"]
    assert k3(noise([0.00001 * 1.02**step for step in range(200)])) == []  # small, though it grows


@pytest.mark.parametrize("lag", [1, 8, 16, 24])
def test_a_sampler_that_falls_behind_and_stays_there_does_not_grow(lag):
    behind = [2e-5 + 0.01 * min(step / lag, 1) ** 2 for step in range(200)]
    assert k3(behind) == []
    assert k3(noisy(behind)) == []


def test_a_sampler_that_is_far_behind_is_given_time_to_get_there():
    behind = [2e-5 + 0.01 * min(step / 60, 1) ** 2 for step in range(200)]
    assert "k3_growth" in k3(behind)
    assert k3(behind, config(rollout_monitor_bounds={"staleness": None}), staleness_max=60.0) == []


def test_logging_steps_of_any_spacing():
    growing = [{**CORRECTED, "k3_kl": 0.001 * 1.02**step} for step in range(100)]
    steps = [examine(history(*growing, spacing=spacing))[0].step for spacing in (1, 10, 500)]
    assert steps == [steps[0], 10 * steps[0], 500 * steps[0]]


# Settings -------------------------------------------------------------------------------------------------------------


def test_settings_decide_whether_a_run_is_corrected():
    gap = {**HEALTHY_WINDOW, "k3_kl": 0.02, "kl": 0.02}
    for settings, window, expected in (
        (config(**DISABLED), gap, ["k3_uncorrected"]),
        (config(), gap, []),
        (config(rollout_metrics_only=True), {**gap, **WEIGHTS}, ["k3_uncorrected"]),
        (asdict(config(**DISABLED)), gap, ["k3_uncorrected"]),
        (asdict(config()), gap, []),
        ({"rollout_is": "token", "rollout_metrics_only": True}, gap, ["k3_uncorrected"]),
        ({"bypass_mode": True}, gap, []),
        # unknown: the log has to tell
        (None, gap, ["k3_uncorrected"]),
        (None, {**gap, **WEIGHTS}, []),
        (None, {**gap, **REJECTION}, []),
        ({"rollout_is": None}, gap, ["k3_uncorrected"]),
        (DISABLED, gap, ["k3_uncorrected"]),
        ({"rollout_correction": "bypass_ppo_clip"}, gap, []),
        ({}, {**gap, **WEIGHTS}, []),
    ):
        assert found(history(*[window] * 5), settings) == expected, settings


def test_rules_about_weights_are_silent_where_weights_do_not_act():
    window = {
        **CORRECTED,
        "rollout_is_mean": 0.1,
        "rollout_is_eff_sample_size": 0.01,
        "rollout_is_std": 9.0,
        "chi2_seq": 99.0,
    }
    clipped = config(bypass_mode=True)
    assert found(history(*[window] * 9), clipped) == []
    weighted = config(bypass_mode=True, rollout_loss_type="reinforce")
    assert set(found(history(*[window] * 9), weighted)) == {"effective_sample_size", "weight_mean_low"}


def test_samples_that_were_trained_on_have_no_mean_ratio_of_one():
    window = {**HEALTHY_WINDOW, "kl": 0.02, "k3_kl": 0.0006}
    assert found(history(*[window] * 9), {"bypass_mode": True, "num_iterations": 1}) == ["biased_ratio"]
    assert found(history(*[window] * 9), {"bypass_mode": True, "num_iterations": 4}) == []
    assert found(history(*[window] * 9), {"bypass_mode": False, "num_iterations": 4}) == ["biased_ratio"]


def test_chi2_of_sequences_is_nothing_to_token_weights():
    window = {**CORRECTED, "chi2_seq": 1e9}
    assert found(history(*[window] * 9), config()) == []
    assert found(history(*[window] * 9), config(rollout_is="sequence")) == ["chi2_seq"]


def test_a_tight_lower_bound_is_no_veto():
    window = {**CORRECTED, "rollout_is_veto_fraction": 0.4}
    tight = config(rollout_rs=["seq_max_k1"], rollout_rs_threshold=[[0.4, 2.5]])
    assert found(history(*[window] * 9), tight) == []
    assert found(history(*[window] * 9), config(**VETO)) == ["vetoed"]
    assert found(history(*[window] * 9)) == ["vetoed"]


def test_a_run_without_correction_is_not_told_about_its_effective_learning_rate():
    window = {**CORRECTED, "effective_lr": 0.0}
    assert found(history(*[window] * 9), config(rollout_metrics_only=True)) == []


# Several --------------------------------------------------------------------------------------------------------------


def test_one_finding_per_cause_and_the_most_serious_first():
    ill = {**CORRECTED, "effective_lr": 0.0, "rollout_rs_masked_fraction": 1.0, "staleness_max": 40.0}
    findings = examine(history(*[ill] * 9), config())
    assert [finding.rule for finding in findings] == ["everything_rejected", "staleness"]


def test_a_finding_lasts_until_its_last_unhealthy_window():
    ill = {**CORRECTED, "staleness_max": 40.0}
    finding = examine(history(ill, ill, CORRECTED, ill, CORRECTED, CORRECTED))[0]
    assert (finding.step, finding.last_step) == (2, 4)


def test_a_milder_finding_stays_if_it_came_before():
    few, many = ({**HEALTHY_WINDOW, "nonfinite_fraction": share} for share in (0.01, 0.5))
    findings = examine(history(few, few, many, many, many))
    assert [(f.rule, f.step, f.last_step) for f in findings] == [("nonfinite_many", 4, 5), ("nonfinite", 1, 3)]


def test_entries_without_our_metrics_are_passed_over():
    examiner = Examiner(RULES)
    for entry in ({}, {"loss": 1.0}, {"eval_rollout_corr/k3_kl": 9.0, "step": 3}, {"rollout_corr/monitor/alarms": 2}):
        assert examiner.observe(entry) == []
    assert examine([]) == examine(history()) == []


@pytest.mark.parametrize("value", [math.nan, None, "broken", True])
def test_values_that_are_no_numbers_are_passed_over(value):
    windows = [dict.fromkeys(CORRECTED, value)] * 30
    assert found(history(*windows)) == []
    ill = {**CORRECTED, "k3_kl": 0.2, "kl": 0.2}
    assert found(history(*[ill, *windows, ill])) == ["k3_high"]


def test_an_infinite_value_is_unhealthy():
    assert found(history(*[{**CORRECTED, "chi2_token": math.inf}] * 3)) == ["chi2_token"]


def test_entries_without_a_step():
    entry = {f"{PREFIX}k3_kl": 0.2, f"{PREFIX}kl": 0.2}
    assert found([entry] * 3) == ["k3_high"]


def test_sentences_have_the_values_in_them():
    finding = examine(history(*[{**CORRECTED, "rollout_is_eff_sample_size": 0.123}] * 3))[0]
    assert finding.seen == "The effective sample size of the weights is 0.12, below 0.3."
    assert str(finding).startswith(finding.seen)
    assert str(finding).endswith("A higher bound never helps.")


# Thresholds -----------------------------------------------------------------------------------------------------------


def test_bounds_can_be_changed_and_rules_switched_off():
    log = history(*[{**CORRECTED, "k3_kl": 0.04, "kl": 0.04}] * 9)
    assert found(log, config()) == ["k3_high"]
    assert found(log, config(rollout_monitor_bounds={"k3_high": 0.05})) == []
    assert found(log, config(rollout_monitor_bounds={"k3_high": None})) == []
    assert found(log, {"rollout_monitor_bounds": {"staleness": 3.0}}) == ["k3_high", "staleness"]
    strict = examine(log, config(rollout_monitor_bounds={"k3_high": 0.001}))[0]
    assert strict.seen == "`k3_kl` is 0.04, above 0.001."


def test_bounds_as_json():
    assert parse_bounds('{"k3_high": 0.1, "staleness": null}') == {"k3_high": 0.1, "staleness": None}
    assert parse_bounds(None) == {}


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"k3": 0.1}, "`rollout_monitor_bounds` has 'k3', which is no rule. Available rules: nonfinite_many, "),
        (
            {"k3_high": "much"},
            "`rollout_monitor_bounds` sets 'k3_high' to 'much', which must be a number, or None",
        ),
        ({"k3_high": True}, "'k3_high' to True, which must be a number"),
        ({"k3_high": math.nan}, "'k3_high' to nan, which must be a number"),
        ({"k3_high": [0.1, 0.2]}, "which must be a number"),
        ([0.1], r"must have a number, or None, by name of a rule, such as \{'k3_high': 0.1\}; got \[0.1\]"),
        ("k3_high=0.1", "'k3_high=0.1', which is not JSON"),
        ("[0.1]", r"got \[0.1\]"),
    ],
)
def test_bounds_that_cannot_be_meant_are_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        parse_bounds(bounds)


# Recorded runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def leads(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/monitor"))
    import leads

    return leads


RECORDING = json.loads((ROOT / "benchmarks/monitor/recorded.json").read_text())
RUNS = RECORDING["runs"]
UNCORRECTED = [name for name in RUNS if re.match(r"(rloo_)?none_", name)]
LEARNING = [name for name in RUNS if re.match(r"on_policy|(rloo_)?geo_rs_tis|token_tis|bypass|fp8", name)]


def test_there_are_runs_of_both_kinds():
    assert len(UNCORRECTED) >= 4
    assert len(LEARNING) >= 9


@pytest.mark.parametrize("name", LEARNING)
def test_the_monitor_is_silent_on_a_run_that_goes_well(leads, name):
    assert leads.fall(RUNS[name]) is None
    assert leads.alarms(RUNS[name]) == []


@pytest.mark.parametrize("name", UNCORRECTED)
def test_the_monitor_alarms_before_accuracy_falls(leads, name):
    findings, fall = leads.alarms(RUNS[name]), leads.fall(RUNS[name])
    assert "k3_uncorrected" in {finding.rule for finding in findings}
    assert "k3_high" in {finding.rule for finding in findings}
    assert min(finding.step for finding in findings) <= fall - 10
    assert min(finding.step for finding in findings if finding.severity == "critical") < fall


def test_the_table_is_that_of_the_recorded_runs(leads):
    assert leads.table(RECORDING) in (ROOT / "benchmarks/monitor/README.md").read_text(), leads.table(RECORDING)


def test_a_fall_is_one_that_lasts(leads):
    run = {"steps": [0, 5, 10, 15, 20, 25], "accuracy": [0.5, 0.3, 0.5, 0.3, 0.3, 0.5]}
    assert leads.fall(run) == 15
    assert leads.fall({**run, "accuracy": [0.5, 0.3, 0.5, 0.3, 0.45, 0.3]}) is None


# The document ---------------------------------------------------------------------------------------------------------


def rules_table() -> str:
    lines = ["| rule | fires if | windows | |", "| --- | --- | --- | --- |"]
    for rule in RULES.values():
        measure = DESCRIPTIONS.get(rule.name, f"`{rule.key}`")
        sign = "below" if rule.below else "above"
        windows = "1" if rule.patience == 1 else f"{rule.patience // 2 + 1} of {rule.patience}"
        severity = "**critical**" if rule.severity == "critical" else "warning"
        lines.append(f"| `{rule.name}` | {measure} {sign} {rule.bound:g} | {windows} | {severity} |")
    return "\n".join(lines)


DESCRIPTIONS = {
    "k3_uncorrected": "nothing is corrected, `k3_kl`",
    "k3_growth": "`k3_kl` against early in the run",
    "biased_ratio": "distance of `1 + k3_kl - kl` from 1",
    "everything_rejected": "the run is corrected, `effective_lr`",
    "chi2_seq": "sequence weights, `chi2_seq`",
    "selection": "`rejected/long_positive` 3 times `rejected/others`, and",
}


def test_the_table_of_rules_is_that_of_the_code():
    assert rules_table() in (ROOT / "docs/monitoring.md").read_text(), rules_table()
