"""The health rules: each alone on small histories, and all of them on recorded runs."""

import json
import math
import re
import statistics
from argparse import Namespace
from dataclasses import asdict

import pytest
from transformers import TrainerControl, TrainerState

from tests.launching import ROOT, benchmarks
from tests.training import TRAINERS
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.health.bands import HEALTHY
from trl_rollout_corr.health.examine import Examiner, examine, parse_bounds
from trl_rollout_corr.health.placeholders import placeholders
from trl_rollout_corr.health.rules import BOUNDS, RULES, SILENCED
from trl_rollout_corr.health.windows import Window
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.settings.criteria import CRITERIA
from trl_rollout_corr.settings.presets import PRESETS
from trl_rollout_corr.recording.monitor import RolloutCorrectionMonitor


DISABLED = {"rollout_correction": "disabled"}
SEQUENCE = {"rollout_is": "sequence"}
VETO = {"rollout_rs": ["seq_max_k1"], "rollout_rs_threshold": [[1e-4, math.inf]]}

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

# By bound: settings, what differs from a healthy window, and the same just within the bounds
ILL = {
    "nonfinite_many": ({}, {"nonfinite_fraction": 0.11}, {"nonfinite_fraction": 0.0}),
    "nonfinite": ({}, {"nonfinite_fraction": 1e-6}, {"nonfinite_fraction": 0.0}),
    "everything_rejected": ({}, {"effective_lr": 0.0}, {"effective_lr": 0.51}),
    "k3_high": (DISABLED, {"k3_kl": 0.031, "kl": 0.031}, {"k3_kl": 0.014, "kl": 0.014}),
    "k3_corrected": ({}, {"k3_kl": 0.031, "kl": 0.031}, {"k3_kl": 0.029, "kl": 0.029}),
    "k3_uncorrected": (DISABLED, {"k3_kl": 0.016, "kl": 0.016}, {"k3_kl": 0.014, "kl": 0.014}),
    "kl_negative": (DISABLED, {"kl": -0.11, "k3_kl": 0.02}, {"kl": -0.004, "k3_kl": 0.004}),
    "biased_ratio": ({}, {"kl": 0.02, "k3_kl": 0.0006}, {"kl": 0.0104, "k3_kl": 0.0006}),
    "staleness": ({}, {"staleness_max": 17.0}, {"staleness_max": 16.0}),
    "weight_mean_low": ({}, {"rollout_is_mean": 0.49}, {"rollout_is_mean": 0.51}),
    "weight_mean_high": (SEQUENCE, {"rollout_is_mean": 2.1}, {"rollout_is_mean": 1.9}),
    "effective_sample_size": ({}, {"rollout_is_eff_sample_size": 0.29}, {"rollout_is_eff_sample_size": 0.31}),
    "weights_at_bound": (
        {"rollout_is": "token"},
        {"rollout_is_ratio_fraction_high": 0.11},
        {"rollout_is_ratio_fraction_high": 0.09},
    ),
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
    return HEALTHY_WINDOW if settings == DISABLED else CORRECTED


def found(log, settings=None):
    return [finding.bound for finding in examine(log, settings)]


# One rule at a time ---------------------------------------------------------------------------------------------------


def test_every_bound_is_tested():
    alone = {"endless", "k3_growth", "unlearning", "gap_stays", "gap_clipped"}
    assert set(ILL) | alone == set(BOUNDS)
    assert len(BOUNDS) == sum(len(rule.bounds) for rule in RULES)


@pytest.mark.parametrize("name", ILL)
def test_an_alarm_is_raised_out_of_bounds_and_not_within(name):
    fields, ill, well = ILL[name]
    window, settings = healthy(fields), config(**fields)
    assert found(history(*[window] * 60), settings) == []
    assert found(history(*[{**window, **well}] * 60), settings) == []
    finding = examine(history(*[{**window, **ill}] * 60), settings)[0]
    bound = BOUNDS[name]
    assert finding.bound == name
    assert (finding.severity, finding.key) == (bound.severity, PREFIX + bound.key)
    assert (finding.step, finding.last_step) == (bound.patience // 2 + 1, 60)
    assert finding.value == pytest.approx(bound.value(_window({**window, **ill}, settings)))


def _window(window, settings):
    return Window({PREFIX + key: value for key, value in window.items()}, settings)


@pytest.mark.parametrize("name", [name for name in ILL if BOUNDS[name].patience > 1])
def test_a_single_window_is_forgiven_and_most_of_several_are_not(name):
    fields, ill, _ = ILL[name]
    window, patience = healthy(fields), BOUNDS[name].patience
    ill = {**window, **ill}
    alone = [window] * (patience - 1) + [ill]
    assert name not in found(history(*alone * 20), config(**fields))
    most = [ill] * (patience // 2 + 1) + [window] * (patience // 2)
    assert name in found(history(*most * 2), config(**fields))


@pytest.mark.parametrize("name", BOUNDS)
def test_what_an_alarm_says(name):
    bound = BOUNDS[name]
    texts = [_advice(name, settings) for settings in (None, config(), config(**SEQUENCE), config(**DISABLED))]
    for text in texts:
        assert re.fullmatch(r"[A-Z`].*\.", text)
        assert not re.search(r"\. [a-z]|  |[{}]|\.\.", text)
    said = f"{bound.seen} {bound.why} {' '.join(texts)}"
    assert all(text.endswith(".") for text in (bound.seen, bound.why))
    assert bound.severity in ("warning", "critical")
    assert bound.patience % 2 == 1
    assert set(bound.covers) < set(BOUNDS)
    fields = set(re.findall(r"`((?:rollout|bypass)\w*)`", said))
    keys = {other.key for other in BOUNDS.values()}
    assert fields <= set(RolloutCorrectionConfig.__dataclass_fields__) | keys
    assert set(re.findall(r"\b(?:token|seq)_(?:\w+_)?k[123]\b", said)) <= {*CRITERIA}


def _advice(name, settings, **metrics):
    """The advice of a bound in a run with these settings."""
    window = _window({**CORRECTED, **metrics}, settings)
    return " ".join(BOUNDS[name].advice.format(**placeholders(window)).split())


def args(trainer="grpo", **fields):
    """A configuration of a trainer, with the settings of TRL."""
    config_class = TRAINERS[trainer][1]
    plain = {"use_cpu": True, "bf16": False, "report_to": []}
    return config_class("unused", **{**plain, "rollout_correction": "auto", **fields})


@pytest.mark.parametrize("trainer", ["grpo", "async_grpo"])
@pytest.mark.parametrize("name", BOUNDS)
def test_a_run_is_not_told_about_options_that_it_does_not_have(name, trainer):
    settings = args(trainer)
    text = _advice(name, settings)
    assert "`rollout_is`" not in text  # is token
    fields = {*settings.__dataclass_fields__, *(other.key for other in BOUNDS.values())}
    named = {word for word in re.findall(r"`([a-z]\w*)`", text) if word not in {"log_ratio_min", "lora_dropout", "kl"}}
    assert named <= fields | ({"mask_truncated_completions"} if trainer == "async_grpo" else set())
    assert "seq_mean" not in text  # its criteria are of tokens
    assert "lower `rollout_is_threshold`" not in text  # no weight is above 1
    assert "processed_logprobs" not in text or trainer == "async_grpo"


def test_the_advice_names_the_options_that_the_run_can_change():
    low = "effective_lr_low"
    assert "set the bounds of seq_mean_k1 in `rollout_rs_threshold` to bounds made from the spread" in _advice(
        low, config(rollout_correction="decoupled_geo_rs")
    )
    assert _advice(low, config(rollout_correction="decoupled_seq_is")).startswith("Set `rollout_is` to token. To make")
    unknown = _advice(low, None)
    assert unknown.startswith("If `rollout_is` is sequence, set it to token. If as many")
    spread = "effective_sample_size"
    assert "lower `rollout_is_threshold`" in _advice(spread, config(rollout_correction="decoupled_token_is"))
    dropped = _advice(spread, config(rollout_correction="decoupled_token_icepop"), rollout_is_oob_ratio=0.4)
    assert "A share of 0.4 of the tokens has a ratio outside of `rollout_is_threshold`" in dropped
    assert "A higher bound never helps" not in dropped
    assert "widen `rollout_is_threshold`" in _advice(
        "everything_rejected", config(rollout_correction="decoupled_token_icepop"), rollout_is_oob_ratio=1.0
    )
    high = _advice("effective_lr_high", config(rollout_correction="decoupled_geo_rs", rollout_rs_renormalize=True))
    assert high.startswith("`rollout_rs_renormalize` divides by the share of tokens")


def test_newer_weights_are_had_in_the_way_of_the_trainer():
    assert _advice("staleness", args()) == "Push weights to the sampler more often."
    assert _advice("staleness", args(num_iterations=2)) == "Lower `num_iterations`."
    both = args(steps_per_generation=4, gradient_accumulation_steps=2, num_iterations=2)
    assert _advice("staleness", both) == "Lower `steps_per_generation` or `num_iterations`."
    assert _advice("staleness", args("async_grpo")) == "Lower `weight_sync_steps` or `max_staleness`."


@pytest.mark.filterwarnings("ignore")
def test_only_options_that_distort_the_sampler_are_named():
    name = "biased_ratio"
    assert _advice(name, args()).startswith("Check the temperature")
    assert _advice(name, args(top_p=0.9)).startswith("Set `top_p` to its default. You can also set `rollout_support`")
    assert "rollout_support" not in _advice(name, args(repetition_penalty=1.1))
    served = {"use_vllm": True, "vllm_mode": "server"}
    assert "rollout_support" not in _advice(name, args(top_p=0.9, **served))
    assert "`min_p`, `repetition_penalty` to their defaults" in _advice(name, None)


def test_a_warning_silences_nothing_critical():
    for name, silenced in SILENCED.items():
        assert BOUNDS[name].severity == "critical" or {BOUNDS[other].severity for other in silenced} <= {"warning"}
        assert not any(name in SILENCED[other] for other in silenced)  # both would be silent


def test_the_healthy_bands_lie_within_the_bounds():
    for bound in BOUNDS.values():
        if bound.measure is None and bound.key in HEALTHY:
            lower, upper = HEALTHY[bound.key]
            assert (lower if bound.below else upper) is not None
            assert bound.limit <= lower if bound.below else bound.limit >= upper


def test_of_a_rule_the_first_bound_that_is_passed_speaks():
    ill = {"rollout_is_eff_sample_size": 0.1, "chi2_seq": 99.0}
    assert found(history(*[{**CORRECTED, **ill}] * 5), config(**SEQUENCE)) == ["effective_sample_size"]
    off = config(**SEQUENCE, rollout_monitor_bounds={"effective_sample_size": None})
    assert found(history(*[{**CORRECTED, **ill}] * 5), off) == ["chi2_seq"]


def test_a_window_without_gradient_is_no_proof_of_harm():
    """With an eight-bit cache, the bounds of a preset rejected all completions of some steps, as they were short."""
    (alarm,) = examine(history(*[{**CORRECTED, "effective_lr": 0.0}] * 60), config())
    assert (alarm.bound, alarm.severity) == ("everything_rejected", "warning")
    assert "may be chance" in alarm.why


def test_a_gap_of_a_sampler_that_announces_no_staleness_has_more_causes():
    for fields in ({}, DISABLED):
        for staleness, more in ((0.0, True), (4.0, False)):
            window = {**healthy(fields), "k3_kl": 0.05, "kl": 0.05, "staleness_max": staleness}
            alarm = examine(history(*[window] * 3), config(**fields))[0]
            assert alarm.key == f"{PREFIX}k3_kl"
            assert ("`trainer.rollout_step`" in alarm.advice) is more


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


def endings(unfinished, rewards):
    """Alarms of a run with these shares of completions that are cut, and these rewards."""
    pairs = zip(unfinished, rewards, strict=True)
    return found([
        {"step": step, "rollout_corr/k3_kl": 1e-4, "rollout_corr/kl": 1e-4, "completions/clipped_ratio": cut, "reward": reward}
        for step, (cut, reward) in enumerate(pairs, 1)
    ])  # fmt: skip


def test_completions_that_stop_ending_while_the_reward_rises():
    rising, rewards = [step / 60 for step in range(60)], [0.1 + step / 100 for step in range(60)]
    assert endings(rising, rewards) == ["endless"]
    assert endings(rising, rewards[::-1]) == []  # the reward shows it already
    assert endings(rising[::-1], rewards) == []
    assert endings([0.9] * 60, rewards) == []  # from the start on
    assert endings([0.0, 0.5, 0.25, 0.75, 0.0] * 12, rewards) == []  # a batch of four completions
    assert endings(rising[:19], rewards[:19]) == []  # too early


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


# The course of the gap ------------------------------------------------------------------------------------------------

STALE = {"staleness_max": 8.0}
SETTLING = [0.0005 * step**2 for step in range(1, 9)]  # while the lag fills


def gaps(values, settings=None, **others):
    """Findings in a corrected run with these values of `kl`."""
    windows = [{**CORRECTED, **STALE, "kl": value, "k3_kl": value, **others} for value in values]
    return examine(history(*windows), settings or config())


def severe(findings):
    return [(finding.bound, finding.step) for finding in findings if finding.severity == "critical"]


def test_a_gap_that_opens_and_closes_is_not_critical():
    closing = [0.06, 0.05, 0.04, 0.02, 0.03, 0.02, 0.01, *[0.005] * 40]
    findings = gaps([*SETTLING, *closing])
    assert severe(findings) == []
    assert [finding.bound for finding in findings] == ["k3_corrected"]


def test_a_gap_that_stays_is():
    assert severe(gaps([*SETTLING, *[0.04] * 40])) == [("gap_stays", 13)]
    assert severe(gaps([*SETTLING, *[0.04, 0.04, 0.04, 0.04, 0.02] * 8])) == []
    assert severe(gaps([*SETTLING, *[0.002] * 40, *[0.04] * 5])) == [("gap_stays", 53)]


REWARDED = "kl_advantage_positive"


@pytest.mark.parametrize(("spacing", "windows"), [(1, 5), (2, 5), (9, 5), (10, 1)])
def test_a_policy_that_loses_what_was_rewarded_is_critical(spacing, windows):
    before, after = ({**CORRECTED, **STALE, REWARDED: value} for value in (0.0, 0.022))
    log = history(*[before] * 20, *[after] * 5, spacing=spacing)
    assert severe(examine(log, config())) == [("unlearning", (20 + windows) * spacing)]
    assert severe(examine(log, config(**DISABLED))) == [("unlearning", (20 + windows) * spacing)]
    almost = {**before, REWARDED: 0.02}
    assert examine(history(*[before] * 20, *[almost] * 5, spacing=spacing), config()) == []
    assert examine(history(*[before] * 20, *[after, before, before] * 5, spacing=1), config()) == []


def test_what_was_rewarded_is_looked_at_while_the_lag_fills():
    filling = [{**CORRECTED, "staleness_max": float(age), REWARDED: 0.2} for age in range(8)]
    assert severe(examine(history(*filling), config())) == [("unlearning", 5)]
    assert examine(history(*filling[:3], *[{**CORRECTED, **STALE, REWARDED: 0.0}] * 20), config()) == []


def test_a_large_gap_of_the_start_may_vary():
    broken = {**CORRECTED, **STALE, "kl": 0.4, "k3_kl": 0.35}
    varies, grows = ([{**broken, REWARDED: value} for value in values] for values in ([0.3, 0.55, 0.5], [0.62] * 3))
    assert severe(examine(history(*varies * 10), config())) == []
    assert severe(examine(history(*varies * 10, *grows * 10), config())) == [("gap_stays", 34), ("unlearning", 35)]


def test_a_gap_that_is_all_where_the_advantage_is_negative_is_none():
    severity = {
        rewarded: severe(gaps([*SETTLING, *[0.04] * 40], **{REWARDED: rewarded})) for rewarded in (0.0, 0.01, 0.02)
    }
    assert severity == {0.0: [], 0.01: [], 0.02: [("gap_stays", 13)]}
    later = [{**CORRECTED, **STALE, "kl": 0.04, "k3_kl": 0.04, REWARDED: 0.02 * (step >= 30)} for step in range(60)]
    quiet = {**CORRECTED, **STALE, REWARDED: 0.0}
    # most of seven windows
    assert severe(examine(history(quiet, quiet, quiet, *later), config())) == [("gap_stays", 37)]


def test_truncation_at_one_is_not_truncation_of_outliers():
    half = {**CORRECTED, "rollout_is_ratio_fraction_high": 0.5}
    assert "weights_at_bound" in found(history(*[{**half, "rollout_is_max": 2.0}] * 5), config(rollout_is="token"))
    assert "weights_at_bound" not in found(history(*[{**half, "rollout_is_max": 1.0}] * 5), config())
    # `rollout_is_max` is the ratio before its bound, but for token weights
    of_completions = config(rollout_is="sequence", rollout_is_threshold=1.0)
    assert "weights_at_bound" not in found(history(*[{**half, "rollout_is_max": 1.4}] * 5), of_completions)


def test_what_was_so_from_the_start_is_not_unlearnt():
    same = {**CORRECTED, "kl": 0.1, "staleness_max": 0.0}
    dropout, truncated = ({**same, "k3_kl": k3, REWARDED: 0.1} for k3 in (0.1, 0.01))
    assert "unlearning" not in found(history(*[dropout] * 40), config())
    assert "unlearning" not in found(history(*[truncated] * 40), config())
    low_precision = {**CORRECTED, **STALE, "kl": 0.02, "k3_kl": 0.02, REWARDED: 0.02}
    apart = {**low_precision, "kl": 0.06, "k3_kl": 0.06}
    assert severe(examine(history(*[low_precision] * 20, *[apart] * 20), config())) == []
    assert severe(examine(history(*[low_precision] * 20, *[{**apart, REWARDED: 0.04}] * 20), config())) == [
        ("gap_stays", 25)
    ]


def test_updates_of_the_policy_itself_are_not_what_was_unlearnt():
    log = history(*[{**CORRECTED, **STALE, REWARDED: value} for value in (*[0.0] * 20, *[0.2] * 20)])
    clipped = {"bypass_mode": True, "rollout_loss_type": "ppo_clip"}
    assert severe(examine(log, {**clipped, "num_iterations": 1})) == [("unlearning", 25)]
    assert severe(examine(log, {**clipped, "num_iterations": 4})) == []


def test_it_is_given_as_many_steps_as_the_sampler_is_behind():
    assert severe(gaps([0.001, 0.002, *[0.04] * 6])) == []
    assert severe(gaps([0.001, 0.002, *[0.04] * 6], staleness_max=2.0)) == [("gap_stays", 7)]
    # as it fills, completions get older with every step
    filling = [{**CORRECTED, "kl": 0.04, "k3_kl": 0.04, "staleness_max": float(min(age, 8))} for age in range(30)]
    filling[0] |= {"kl": 0.001, "k3_kl": 0.001}
    assert severe(examine(history(*filling), config())) == [("gap_stays", 14)]


@pytest.mark.parametrize(("spacing", "windows"), [(1, 5), (3, 5), (5, 3), (10, 2), (100, 1)])
def test_windows_of_several_steps_need_not_be_as_many(spacing, windows):
    before = [{**CORRECTED, **STALE}] * 20
    wide = [{**CORRECTED, **STALE, "kl": 0.04, "k3_kl": 0.04}] * 5
    findings = examine(history(*before, *wide, spacing=spacing), config())
    assert severe(findings) == [("gap_stays", (20 + windows) * spacing)]


def test_what_the_engines_differed_by_at_the_start_is_taken_off():
    assert severe(gaps([0.025] * 60)) == severe(gaps([0.05] * 60)) == []
    assert severe(gaps([0.025, 0.02, 0.03, *[0.04] * 60])) == []
    assert severe(gaps([0.025, 0.02, 0.03, *[0.06] * 60])) == [("gap_stays", 13)]
    assert severe(gaps([0.2] * 60)) == [("gap_stays", 13)]  # no low precision is as low as that


def test_samples_from_a_part_of_the_policy_are_no_gap():
    truncated = gaps([0.06] * 3 + [0.08] * 40, k3_kl=0.002)
    assert severe(truncated) == []
    assert [finding.bound for finding in truncated] == ["biased_ratio"]


def test_clipping_around_the_sampler_bears_more():
    clipped = config(rollout_correction="bypass_ppo_clip")
    assert severe(gaps([*SETTLING, *[0.06] * 40], clipped)) == []
    assert severe(gaps([*SETTLING, *[0.07] * 40], clipped)) == [("gap_clipped", 13)]
    assert severe(gaps([*SETTLING, *[0.06] * 40], config(rollout_correction="bypass_pg_is"))) == [("gap_stays", 13)]


def test_updates_of_the_policy_are_not_the_samplers_fault():
    clipped = {"bypass_mode": True, "num_iterations": 4}
    own = {"engine_kl": 0.002, "engine_k3_kl": 0.002}
    assert gaps([*SETTLING, *[0.5] * 40], clipped, **own) == []
    assert gaps([*SETTLING, *[0.5] * 40], clipped) == []  # nobody knows how much of it is
    grows = [{**CORRECTED, **STALE, "engine_kl": gap, "engine_k3_kl": gap} for gap in [*SETTLING, *[0.2] * 40]]
    assert severe(examine(history(*grows), clipped)) == [("gap_clipped", 13)]
    assert severe(gaps([*SETTLING, *[0.5] * 40], {**clipped, "num_iterations": 1})) == [("gap_clipped", 13)]


@pytest.mark.parametrize(("later", "alarms"), [(0.4, []), (0.58, []), (0.62, [("gap_clipped", 25)])])
def test_a_sampler_that_is_broken_from_the_start_has_no_gap_that_stays(later, alarms):
    assert severe(gaps([*[0.4] * 20, *[later] * 20], {"bypass_mode": True})) == alarms


def test_log_probabilities_that_go_wrong_later_are_left_to_the_correction():
    broken = {"kl": -0.6, "k3_kl": 1000.0}
    log = history(*[CORRECTED] * 5, *[{**CORRECTED, **broken}] * 9, *[CORRECTED] * 5)
    assert {(f.bound, f.severity) for f in examine(log, config())} == {
        ("k3_corrected", "warning"),
        ("biased_ratio", "warning"),
    }
    assert severe(examine(log, config(**DISABLED))) == [("k3_high", 7), ("kl_negative", 7)]
    assert severe(examine(history(*[{**CORRECTED, **broken}] * 9), config())) == [("kl_negative", 2)]


def test_advice_has_the_numbers_of_the_run():
    geo = config(rollout_correction="decoupled_geo_rs_token_tis")
    window = {**CORRECTED, "rollout_rs_masked_fraction": 0.6, "log_ppl_abs_diff": 0.02}
    log = [{**entry, "completions/mean_length": 212.0} for entry in history(*[window] * 9) if "loss" in entry]
    advice = examine(log, geo)[0].advice
    assert (
        "[0.926, 1.079] (they keep nearly all completions of this window, whose mean log-ratio is 0.02 in size at 212 tokens)."
        in advice
    )
    narrow = {**window, "log_ppl_abs_diff": 0.0002}
    assert "[0.99924, 1.00077]" in examine(history(*[narrow] * 9), geo)[0].advice
    assert "bounds made from the spread" in examine(history(*[{**window, "log_ppl_abs_diff": 0.0}] * 9), geo)[0].advice


def test_advised_bounds_keep_nearly_all():
    # of a normal distribution 3.8 mean sizes are three standard deviations
    values = [statistics.NormalDist(0, 0.03).inv_cdf((i + 0.5) / 2000) for i in range(2000)]
    size = statistics.fmean(map(abs, values))
    low, high = re.search(
        r"\[(.*), (.*)\] ", placeholders(_window({"log_ppl_abs_diff": size}, None))["widen"]
    ).groups()
    kept = sum(float(low) <= math.exp(value) <= float(high) for value in values) / len(values)
    assert 0.99 < kept < 1


# Settings -------------------------------------------------------------------------------------------------------------


def test_settings_decide_whether_a_run_is_corrected():
    gap = {**HEALTHY_WINDOW, "k3_kl": 0.02, "kl": 0.02}
    for settings, window, expected in (
        (config(**DISABLED), gap, ["k3_uncorrected"]),
        (config(), gap, []),
        (config(rollout_metrics_only=True), {**gap, **WEIGHTS}, ["k3_uncorrected"]),
        (asdict(config(**DISABLED).settings), gap, ["k3_uncorrected"]),
        (asdict(config().settings), gap, []),
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
    clipped = config(rollout_correction="bypass_ppo_clip", rollout_is="token")
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


def test_one_finding_per_cause():
    ill = {**CORRECTED, "effective_lr": 0.0, "rollout_rs_masked_fraction": 1.0, "staleness_max": 40.0}
    findings = examine(history(*[ill] * 9), config())
    assert [finding.bound for finding in findings] == ["staleness", "everything_rejected"]


def test_a_finding_lasts_until_its_last_unhealthy_window():
    ill = {**CORRECTED, "staleness_max": 40.0}
    finding = examine(history(ill, ill, CORRECTED, ill, CORRECTED, CORRECTED))[0]
    assert (finding.step, finding.last_step) == (2, 4)


def test_a_milder_finding_stays_if_it_came_before():
    few, many = ({**HEALTHY_WINDOW, "nonfinite_fraction": share} for share in (0.01, 0.5))
    findings = examine(history(few, few, many, many, many))
    assert [(f.bound, f.step, f.last_step) for f in findings] == [("nonfinite_many", 4, 5), ("nonfinite", 1, 3)]


def test_entries_without_our_metrics_are_passed_over():
    examiner = Examiner()
    for entry in ({}, {"loss": 1.0}, {"eval_rollout_corr/k3_kl": 9.0, "step": 3}, {"rollout_corr/monitor/alarms": 2}):
        assert examiner.observe(entry) == []
    assert examine([]) == examine(history()) == []


@pytest.mark.parametrize("value", [math.nan, None, "broken", True])
def test_values_that_are_no_numbers_are_passed_over(value):
    windows = [dict.fromkeys(CORRECTED, value)] * 30
    assert found(history(*windows)) == []
    ill = {**HEALTHY_WINDOW, "k3_kl": 0.2, "kl": 0.2}
    assert found(history(*[ill, *windows, ill]), config(**DISABLED)) == ["k3_high"]


def test_an_infinite_value_is_unhealthy():
    assert found(history(*[{**CORRECTED, "rollout_is_mean": math.inf}] * 3)) == ["weight_mean_high"]


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
    assert found(log, config()) == ["k3_corrected"]
    assert found(log, config(rollout_monitor_bounds={"k3_corrected": 0.05})) == []
    assert found(log, config(rollout_monitor_bounds={"k3_corrected": None})) == []
    assert found(log, {"rollout_monitor_bounds": {"staleness": 3.0}}) == ["k3_corrected", "staleness"]
    strict = examine(log, config(rollout_monitor_bounds={"k3_corrected": 0.001}))[0]
    assert strict.seen == "`k3_kl` is 0.04, above 0.001, and the run corrects for it."


def test_bounds_as_json():
    assert parse_bounds('{"k3_high": 0.1, "staleness": null}') == {"k3_high": 0.1, "staleness": None}
    assert parse_bounds(None) == {}


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"k3": 0.1}, "`rollout_monitor_bounds` has 'k3', which is not a bound. Available bounds: nonfinite_many, "),
        (
            {"k3_high": "much"},
            "`rollout_monitor_bounds` sets 'k3_high' to 'much', which must be a number, or None",
        ),
        (
            {"k3_kl": 0.1},
            "'k3_kl', which is not a bound. This rule has the bounds k3_high, k3_uncorrected, k3_corrected",
        ),
        ({"k3_high": True}, "'k3_high' to True, which must be a number"),
        ({"k3_high": math.nan}, "'k3_high' to nan, which must be a number"),
        ({"k3_high": [0.1, 0.2]}, "which must be a number"),
        ([0.1], r"must have a number, or None, by name of a bound, such as \{\"staleness\": 32\} .*; got \[0.1\]"),
        ("k3_high=0.1", "by name of a bound, .*; got 'k3_high=0.1'"),
        ("[0.1]", r"got \[0.1\]"),
    ],
)
def test_bounds_that_cannot_be_meant_are_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        parse_bounds(bounds)


# Recorded runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def leads():
    with benchmarks("monitor") as load:
        yield load("leads")


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
    assert "k3_uncorrected" in {finding.bound for finding in findings}
    assert "k3_high" in {finding.bound for finding in findings}
    assert min(finding.step for finding in findings) <= fall - 10
    assert min(finding.step for finding in findings if finding.severity == "critical") < fall


def test_the_table_is_that_of_the_recorded_runs(leads):
    assert leads.table(RECORDING) in (ROOT / "benchmarks/monitor/README.md").read_text(), leads.table(RECORDING)


def test_a_fall_is_one_that_lasts(leads):
    run = {"steps": [0, 5, 10, 15, 20, 25], "accuracy": [0.5, 0.3, 0.5, 0.3, 0.3, 0.5]}
    assert leads.fall(run) == 15
    assert leads.fall({**run, "accuracy": [0.5, 0.3, 0.5, 0.3, 0.45, 0.3]}) is None


# Runs of the arena ----------------------------------------------------------------------------------------------------


@pytest.fixture
def arena(leads):
    import arena

    return arena


def run_of_the_arena(kl, accuracy=(0.5, 0.6, 0.4, 0.4), **options):
    steps = range(1, len(kl) + 1)
    history = {"step": [float(step) for step in steps], f"{PREFIX}staleness_max": [8.0] * len(kl)}
    history |= {f"{PREFIX}kl": list(kl), f"{PREFIX}k3_kl": list(kl)}
    settings = {"task": "sort", "options": {"rollout_correction": "decoupled_token_is", **options}}
    return {
        "arm": "token_is",
        "settings": settings,
        "steps": [0, 10, 20, 30],
        "accuracy": accuracy,
        "history": history,
    }


def test_what_the_monitor_says_about_a_run_of_the_arena(arena):
    record = run_of_the_arena([0.001] * 9 + [0.04] * 21)
    # windows 11 and 14, read one step later
    assert arena.alarms(record) == [(12, "warning", "k3_corrected"), (15, "critical", "gap_stays")]
    assert arena.alarms(run_of_the_arena([0.04] * 30, rollout_correction="disabled")) == [(3, "critical", "k3_high")]
    logged = run_of_the_arena([0.001] * 8 + [0.04] * 22, rollout_correction="disabled")
    assert arena.alarms(logged)[0] == (10, "critical", "k3_high")
    trl = {**record, "history": {"step": [1.0], "reward": [0.5]}}
    assert arena.alarms(trl) == []
    assert not arena.is_watched(trl)


def test_metrics_of_trl_are_those_of_the_last_log(arena):
    record = run_of_the_arena([0.001] * 60)
    record["history"] |= {"reward": [0.5] * 60, "completions/clipped_ratio": [0.0] * 30 + [0.9] * 30}
    # read with the log of step 40, then nine more steps until its mean of ten windows is above the limit
    ((step, *alarm),) = arena.alarms(record)
    assert alarm == ["warning", "endless"]
    assert 40 < step <= 50


@pytest.mark.parametrize(
    ("accuracy", "course"),
    [
        ([0.5, 0.6, 0.55, 0.7], ("keeps", None)),
        ([0.5, 0.6, 0.49, 0.7], ("dips", 20)),
        ([0.5, 0.6, 0.7, 0.5], ("dips", 30)),
        ([0.5, 0.7, 0.6, 0.55], ("falls", 20)),
        ([0.5, 0.35, 0.3, 0.6], ("falls", 10)),
    ],
)
def test_what_became_of_accuracy(arena, accuracy, course):
    assert arena.course({"steps": [0, 10, 20, 30], "accuracy": accuracy}) == course


def test_alarms_are_false_early_or_late(arena):
    assert [arena.verdict(*case) for case in (("keeps", None, None), ("keeps", None, 9))] == ["silent", "false"]
    assert [arena.verdict("falls", 20, step) for step in (19, 20, None)] == ["before", "late", "missed"]
    record = run_of_the_arena([0.001] * 9 + [0.04] * 21)
    row = arena.summary("run", record)
    assert (row["course"], row["at"], row["critical"], row["rule"], row["verdict"]) == (
        "falls", 20, 15, "gap_stays", "before"
    )  # fmt: skip
    line = "| `run` | 0.50, 0.60, 0.47 | - | falls at 20 | 12 | 15 `gap_stays` | - | before, 5 steps |"
    assert line in arena.table([row])


@pytest.mark.parametrize(
    ("rewards", "ended"), [([0.5, 0.6] * 20 + [0.0] * 20, True), ([0.5, 0.6] * 30, False), ([None] * 60, False)]
)
def test_a_run_is_ended_where_the_reward_falls(arena, rewards, ended):
    record = run_of_the_arena([0.04] * 60, rollout_correction="disabled")
    record["history"]["reward"] = rewards
    step = arena.replay(record)[1]
    assert (40 < step < 55) if ended else step is None


@pytest.mark.parametrize(
    ("arm", "reference", "course"),
    [("auto", 0.6, "stunted"), ("auto", 0.59, "keeps"), ("none", 0.6, "stunted"), ("on_policy", 0.6, "keeps")],
)
def test_a_run_that_learns_less_is_stunted(arena, arm, reference, course):
    record = {**run_of_the_arena([0.001] * 9 + [0.04] * 21, accuracy=(0.5, 0.5, 0.5, 0.5)), "arm": arm}
    row = arena.summary("run", record, reference)
    assert row["course"] == course
    assert row["verdict"] == {"stunted": "stunted", "keeps": "false"}[course]
    assert "`run`" in arena.table([row])


def test_a_rise_of_the_gap_is_found(arena):
    run, record = (
        Namespace(at=Namespace(rung=Namespace(lag=8))),
        run_of_the_arena([0.001 * 2**step for step in range(10)]),
    )
    assert arena.slope([1.0, 3.0, 5.0]) == pytest.approx(2.0)
    # the mean of the first four is 0.00375, of the next 0.0075
    assert arena.rises(run, record, 4, 0.69, 0.005) == 6
    assert arena.rises(run, record, 4, 0.7, 0.005) is None
    assert arena.rises(run, record, 2, 0.69, 0.005, full=True) == 10


def test_a_tally_counts_falls_and_false_alarms(arena):
    rows = [
        {"correction": "none", "course": "falls", "at": 20},
        {"correction": "none", "course": "falls", "at": 20},
        {"correction": "none", "course": "keeps", "at": None},
        {"correction": "corrected", "course": "dips", "at": 20},
    ]
    found = arena.tally("rule", rows, [15, 16, None, 3].__getitem__)
    assert found["none"] == {"falls": 2, "before": 2, "early": 1, "kept": 1, "false": 0}
    assert arena.tally("rule", rows, [20, None, 3, 3].__getitem__)["none"] == {
        "falls": 2, "before": 0, "early": 0, "kept": 1, "false": 1
    }  # fmt: skip


SECOND = json.loads((ROOT / "benchmarks/monitor/second.json").read_text())


def test_the_tables_are_those_of_the_result_files(arena):
    first = json.loads((ROOT / "benchmarks/monitor/arena.json").read_text())
    readme = (ROOT / "benchmarks/monitor/README.md").read_text()
    tables = arena.tables(SECOND, first)
    for name, part in tables.items():
        assert f"<!-- {name} -->\n\n{part}\n\n<!-- end -->" in readme, name
    assert arena.insert(readme, tables) == readme
    assert arena.insert(readme, {"first": "other"}) != readme


def test_the_results_are_those_of_the_published_logs(arena, tmp_path):
    runs = arena.load("second_tuning", tmp_path)
    assert len(runs) >= len(SECOND["stages"]["second_tuning"]) > 100
    rows = {row["run"]: row for row in arena.rows_of(runs)}
    for row in SECOND["stages"]["second_tuning"]:
        assert rows[row["run"]] == row


def test_on_tuning_runs_the_monitor_reaches_its_goals():
    rows = SECOND["stages"]["second_tuning"]
    kept = [row["verdict"] for row in rows if row["course"] == "keeps" and row["correction"] != "none"]
    assert kept.count("false") <= 5 / 143 * len(kept)
    falls = [row for row in rows if row["course"] == "falls"]
    assert (
        sum(row["verdict"] == "before" and row["at"] - row["critical"] >= 5 for row in falls)
        >= 32 / 41 * len(falls)
        > 9
    )


# The document ---------------------------------------------------------------------------------------------------------


DOCUMENT = (ROOT / "docs/monitoring.md").read_text()
QUESTIONS = ("What it means.", "How sure it is.", "What to do.", "Can I ignore it?")


def duration(bound) -> str:
    """Optimizer steps for which a bound must be passed, as the document writes it."""
    if bound.lasting:
        return f"{bound.patience} steps in a row"
    return "1 step" if bound.patience == 1 else f"{bound.patience // 2 + 1} of {bound.patience} steps"


def below(heading: str) -> str:
    """Text of the document below a heading, up to the next one."""
    return re.split(r"^#+ ", DOCUMENT.split(f"\n{heading}\n")[1], flags=re.MULTILINE)[0]


@pytest.mark.parametrize("name", BOUNDS)
def test_the_document_has_a_row_and_a_section_about_each_alarm(name):
    bound = BOUNDS[name]
    table = below("### Critical alarms" if bound.severity == "critical" else "### Warnings")
    ((anchor, fires, how_long, ignore),) = re.findall(
        rf"^\| \[`{name}`\]\(#([\w-]+)\) \| (.+?) \| (.+?) \| (.+?) \|$", table, re.MULTILINE
    )
    assert re.search(rf"\b{bound.key}`", fires)
    assert re.search(rf"\b{'below' if bound.below else 'above'} {re.escape(f'{bound.limit:g}')}\D", fires)
    assert how_long == duration(bound)
    assert ignore.endswith(".")
    (heading,) = re.findall(rf"^### .*`{name}`.*", DOCUMENT, re.MULTILINE)
    assert anchor == re.sub(r"[^\w -]", "", heading.removeprefix("### ")).replace(" ", "-")
    assert re.findall(r"^\*\*(.+?)\*\*", below(heading), re.MULTILINE) == [*QUESTIONS]


def test_the_document_has_no_alarm_that_the_code_has_not():
    assert set(re.findall(r"^\| \[`(\w+)`\]\(#", DOCUMENT, re.MULTILINE)) == {*BOUNDS}


def test_the_document_says_which_alarms_are_silent_while_another_is_raised():
    rows = re.findall(r"^ {4}\| `(\w+)` \| (`.+`) \|$", below("## Details of the rules"), re.MULTILINE)
    assert sorted(rows) == sorted(
        (name, ", ".join(f"`{other}`" for other in bound.covers)) for name, bound in BOUNDS.items() if bound.covers
    )


def test_the_document_says_what_each_rule_was_tested_on():
    for rule in RULES:
        names = ", ".join(f"`{bound.name}`" for bound in rule.bounds)
        assert f"\n| {names} | {rule.detects} |\n" in DOCUMENT, f"| {names} | {rule.detects} |"


def test_the_messages_in_the_document_are_those_of_the_run(leads, caplog):
    monitor, control, state = RolloutCorrectionMonitor(), TrainerControl(), TrainerState()
    monitor.on_train_begin(leads.settings_of(RUNS["none_1"]["options"]), state, control)
    for entry in leads.entries(RUNS["none_1"]):
        state.global_step = entry["step"]
        monitor.on_log(None, state, control, logs=dict(entry))
    first = "\n".join(caplog.messages[:3])
    assert f"<!-- alarms of none_1 -->\n\n```text\n{first}\n```\n" in DOCUMENT, first


def test_the_message_about_low_precision_has_the_largest_gap_that_was_measured():
    gaps = json.loads((ROOT / "benchmarks/language_model/results.json").read_text())["gap"]
    largest = max(row["k3"] for row in gaps if "fp8 cache" in row["sampler"])
    assert f"an 8-bit KV cache gave up to {largest:.2f}." in BOUNDS["k3_high"].why


def test_the_document_counts_what_became_of_runs_with_a_critical_alarm(arena):
    rows = json.loads((ROOT / "benchmarks/monitor/arena.json").read_text())
    rows = [row for row in rows if row["task"] not in arena.TUNING and row["logging_steps"] == 1]
    for rule in {row["rule"] for row in rows} - {None}:
        verdicts = [row["verdict"] for row in rows if row["rule"] == rule]
        numbers = " | ".join(str(verdicts.count(verdict)) for verdict in ("before", "late", "dips", "false"))
        assert f"\n| `{rule}` | {numbers} |\n" in DOCUMENT, f"| `{rule}` | {numbers} |"
    kept = [row for row in rows if row["course"] == "keeps" and row["arm"] != "none"]
    warned = sum(row["warning"] is not None for row in kept)
    assert f"Of these {len(kept)} runs, {warned} had a warning" in DOCUMENT
    old = [row for row in rows if "-lag_32-" in row["run"] and row["arm"] not in ("none", "on_policy")]
    assert (
        f"the {len(old)} corrected runs whose sampler was 32 steps old, {sum(x in kept for x in old)} kept" in DOCUMENT
    )


def test_what_a_rule_detects_is_there(leads, arena):
    """Runs that are named have its alarm before accuracy falls, and faults exist."""
    rows = {row["run"]: row for row in json.loads((ROOT / "benchmarks/monitor/arena.json").read_text())[::-1]}
    with benchmarks("diagnose") as load:
        faults = load("faults").FAULTS
    for rule in RULES:
        own = {bound.name for bound in rule.bounds}
        for name in re.findall(r"`([\w-]+)`", rule.detects):
            if name in RUNS:
                steps = [alarm.step for alarm in leads.alarms(RUNS[name]) if alarm.bound in own]
                assert steps
                assert rule.name == "k3_growth" or min(steps) < leads.fall(RUNS[name])
            elif name in rows and rule.name == "staleness":
                assert rows[name]["at"] - rows[name]["warning"] == 61
            elif name in rows:
                assert rows[name]["rule"] in own
                assert rows[name]["verdict"] == "before"
            else:
                assert name in {*faults, *PRESETS, *(other.name for other in RULES), *BOUNDS, "kl"}
