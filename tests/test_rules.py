"""The health rules: each alone on small histories, the advice that follows, and both on the runs of the published logs."""

import json
import lzma
import math
import re

import pytest

from tests.dumps import make_dump
from tests.launching import ROOT
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.settings.criteria import CRITERIA
from trl_rollout_corr.settings.presets import PRESETS
from trl_rollout_corr.tools.monitor.bands import HEALTHY
from trl_rollout_corr.tools.monitor.examine import Examiner, examine, parse_bounds
from trl_rollout_corr.tools.monitor.rules import BOUNDS, RULES, SILENCED
from trl_rollout_corr.tools.monitor.texts import ADVISED, fill, preset_for
from trl_rollout_corr.tools.monitor.windows import Window


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
    "bit_equal": 1.0,
    "staleness_max": 4.0,
}
WEIGHTS = {
    "rollout_is_mean": 0.99,
    "rollout_is_std": 0.05,
    "rollout_is_eff_sample_size": 0.98,
    "rollout_is_ratio_fraction_high": 0.001,
}
REJECTION = {"rollout_rs_masked_fraction": 0.05, "rollout_is_veto_fraction": 0.01}
CORRECTED = {**HEALTHY_WINDOW, **WEIGHTS, **REJECTION}

# By bound: settings, what differs from a healthy window, and the same just within the bounds
ILL = {
    "no_tokens": ({}, {"nonfinite_fraction": math.nan}, {"nonfinite_fraction": 0.0}),
    "nonfinite_many": ({}, {"nonfinite_fraction": 0.11}, {"nonfinite_fraction": 0.0}),
    "nonfinite": ({}, {"nonfinite_fraction": 1e-6}, {"nonfinite_fraction": 0.0}),
    "everything_rejected": ({}, {"effective_lr": 0.0}, {"effective_lr": 0.51}),
    "k3_high": (DISABLED, {"k3_kl": 0.031, "kl": 0.031}, {"k3_kl": 0.014, "kl": 0.014}),
    "k3_corrected": ({}, {"k3_kl": 0.031, "kl": 0.031}, {"k3_kl": 0.029, "kl": 0.029}),
    "k3_uncorrected": (DISABLED, {"k3_kl": 0.016, "kl": 0.016}, {"k3_kl": 0.014, "kl": 0.014}),
    "biased_ratio": ({}, {"kl": 0.02, "k3_kl": 0.0006}, {"kl": 0.0104, "k3_kl": 0.0006}),
    "bit_equal": ({"rollout_monitor_bounds": {"bit_equal": 1.0}}, {"bit_equal": 0.999}, {"bit_equal": 1.0}),
    "staleness": ({}, {"staleness_max": 17.0}, {"staleness_max": 16.0}),
    "weight_mean_low": ({}, {"rollout_is_mean": 0.49}, {"rollout_is_mean": 0.51}),
    "weight_mean_high": (SEQUENCE, {"rollout_is_mean": 2.1}, {"rollout_is_mean": 1.9}),
    "effective_sample_size": ({}, {"rollout_is_eff_sample_size": 0.29}, {"rollout_is_eff_sample_size": 0.31}),
    "rejected": ({}, {"rollout_rs_masked_fraction": 0.51}, {"rollout_rs_masked_fraction": 0.49}),
    "vetoed": (VETO, {"rollout_is_veto_fraction": 0.11}, {"rollout_is_veto_fraction": 0.09}),
}


def config(**fields):
    """Settings in effect of a configuration."""
    return RolloutCorrectionConfig(**fields).settings


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
    alone = {"unlearning", "gap_stays", "gap_clipped"}
    assert set(ILL) | alone == set(BOUNDS)
    assert len(BOUNDS) == sum(map(len, RULES))


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


KNOWN = {"unknown": None, "auto": config(), "sequence": config(**SEQUENCE), "off": config(**DISABLED)}
STATES = {"open": {}, "old": {"staleness_max": 8.0}, "start": {"k3_kl": 0.3, "kl": 0.3, "staleness_max": 0.0}}


def texts(name, settings, **metrics):
    """The observation, the reason and the advice of a bound."""
    window, bound = _window({**CORRECTED, "staleness_max": 0.0, **metrics}, settings), BOUNDS[name]
    window.course.add(window)
    return [fill(text, window, value=0.5, limit=0.1, side="above") for text in (bound.seen, bound.why, bound.advice)]


@pytest.mark.parametrize("name", BOUNDS)
def test_what_an_alarm_says(name):
    fields = {*RolloutCorrectionConfig.__dataclass_fields__, *(other.key for other in BOUNDS.values())}
    for settings in KNOWN.values():
        for state in STATES.values():
            for text in texts(name, settings, **state):
                assert re.fullmatch(r"[A-Z`].*\.", text)
                assert not re.search(r"\. [a-z]|  |[{}]|\.\.", text)
                assert len(re.findall(r"\.(?= |$)", text)) <= 3, text
                assert {*re.findall(r"`((?:rollout|bypass)_\w+)`", text)} <= fields | {
                    "rollout_func",
                    "rollout_is_oob_ratio",
                }
                assert {*re.findall(r"\b(?:token|seq)_(?:\w+_)?k[123]\b", text)} <= {*CRITERIA}


def test_a_gap_from_the_first_step_is_not_put_down_to_a_stale_sampler():
    for settings in KNOWN.values():
        for name in BOUNDS.keys() - {"staleness"}:
            said = " ".join(texts(name, settings, **STATES["start"]))
            assert not re.search(r"\bstale\b|\bold\b|lost push|were not pushed", said), said
    for name in ("k3_high", "k3_corrected"):
        assert "there from the first step" in texts(name, KNOWN["auto"], **STATES["start"])[2]


def test_a_gap_of_a_sampler_that_says_how_old_it_is_is_explained():
    for name in ("k3_high", "k3_uncorrected", "k3_corrected"):
        _, why, advice = texts(name, KNOWN["off"], **STATES["old"])
        assert "The sampler is 8 steps old, which explains it" in why
        assert not re.search("dropout|precision|not pushed", why + advice)
        assert "Push weights to the sampler more often" in advice or "push weights to the sampler more often" in advice
        assert "`trainer.rollout_step`" in texts(name, KNOWN["off"])[2]  # announced ages are 0


def test_without_settings_both_are_said():
    gap = history(*[{**CORRECTED, "k3_kl": 0.05, "kl": 0.05}] * 3)
    (alarm,) = examine(gap)
    assert (alarm.bound, alarm.severity) == ("k3_corrected", "warning")
    assert "not known whether the run corrects" in alarm.seen
    assert "without a correction, it biases" in alarm.seen
    assert "harmless" in alarm.why
    weights = history(*[{**CORRECTED, "rollout_is_mean": 3.0}] * 3)
    assert examine(weights)[0].seen.startswith("If the correction is applied: ")
    assert examine(weights, config(**SEQUENCE))[0].seen.startswith("The mean")
    measured = config(**SEQUENCE, rollout_metrics_only=True)
    assert examine(weights, measured)[0].seen.startswith("If the correction were applied: ")


def test_no_token_in_the_loss_names_the_setting_that_did_it():
    empty = {"nonfinite_fraction": math.nan, "kl": math.nan, "effective_lr": math.nan}
    log = history(*[CORRECTED, empty, empty, empty] * 3)
    (alarm,) = examine(log, config())
    assert (alarm.bound, alarm.step) == ("no_tokens", 4)
    assert "`mask_truncated_completions`" in alarm.advice
    assert "`stop`" in alarm.advice
    ended = examine([{**entry, "completions/clipped_ratio": 0.0} for entry in log], config())[0]
    assert "`mask_truncated_completions`" not in ended.advice
    assert "`env_mask`" in ended.advice
    assert found(history(*[CORRECTED, CORRECTED, empty] * 5), config()) == []


@pytest.mark.parametrize(
    ("fields", "preset"),
    [
        ({}, "auto"),
        ({"rollout_correction": "decoupled_geo_rs_token_tis"}, "auto"),
        ({"rollout_correction": "bypass_ppo_clip_geo_rs"}, "bypass_ppo_clip"),
        ({"rollout_correction": "bypass_pg_is"}, "bypass_pg_token_icepop"),
    ],
)
def test_the_advised_preset_keeps_the_mode(fields, preset):
    assert preset_for(config(**fields)) == preset
    assert config(rollout_correction=preset).mode == config(**fields).mode
    assert set(ADVISED.values()) <= set(PRESETS)
    assert preset_for(None) == "auto"
    assert f"Set `rollout_correction` to {preset}" in texts("k3_high", config(**fields))[2]


def test_the_diagnosis_advises_the_same(tmp_path, capsys):
    runs = {
        "auto": {"rollout_correction": "disabled"},
        "bypass_ppo_clip": {"rollout_correction": "bypass_ppo_clip_geo_rs", "rollout_metrics_only": True},
    }
    for preset, settings in runs.items():
        folder = make_dump(tmp_path / preset, spread=0.03, settings=settings)
        main(["diagnose", str(folder), "--json"])
        presets = {cause["preset"] for cause in json.loads(capsys.readouterr().out)["causes"]}
        assert preset in presets
        assert presets <= {preset, None}


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
    log = history(*[{**HEALTHY_WINDOW, "k3_kl": 0.05, "kl": 0.05}] * 5)
    assert found(log, config(**DISABLED)) == ["k3_high"]
    assert found(log, config(**DISABLED, rollout_monitor_bounds={"k3_high": None})) == ["k3_uncorrected"]


def test_a_window_without_gradient_is_no_proof_of_harm():
    """With an eight-bit cache, the bounds of a preset rejected all completions of some steps, as they were short."""
    (alarm,) = examine(history(*[{**CORRECTED, "effective_lr": 0.0}] * 60), config())
    assert (alarm.bound, alarm.severity) == ("everything_rejected", "warning")
    assert "may be chance" in alarm.why


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


@pytest.mark.parametrize(("spacing", "windows"), [(1, 6), (2, 6), (9, 6), (10, 1)])
def test_a_policy_that_loses_what_was_rewarded_is_critical(spacing, windows):
    before, after = ({**CORRECTED, **STALE, REWARDED: value} for value in (0.0, 0.022))
    log = history(*[before] * 20, *[after] * 6, spacing=spacing)
    assert severe(examine(log, config())) == [("unlearning", (20 + windows) * spacing)]
    assert severe(examine(log, config(**DISABLED))) == [("unlearning", (20 + windows) * spacing)]
    almost = {**before, REWARDED: 0.02}
    assert examine(history(*[before] * 20, *[almost] * 5, spacing=spacing), config()) == []
    assert examine(history(*[before] * 20, *[after, before, before] * 5, spacing=1), config()) == []


def test_what_was_rewarded_is_looked_at_while_the_lag_fills():
    filling = [{**CORRECTED, "staleness_max": float(age), REWARDED: 0.2} for age in range(8)]
    assert severe(examine(history(*filling), config())) == [("unlearning", 6)]
    assert examine(history(*filling[:3], *[{**CORRECTED, **STALE, REWARDED: 0.0}] * 20), config()) == []


def test_a_gap_of_rewarded_tokens_that_shrinks_is_no_loss():
    """As in the first steps of runs that kept their accuracy."""
    shrinking = [0.0, 0.23, 0.12, 0.06, 0.05, 0.1, 0.035, 0.03, 0.028, 0.04, 0.03, 0.02, *[0.0] * 20]
    growing = [0.0, 0.03, 0.03, 0.04, 0.05, 0.05, 0.06, 0.08]
    logs = [history(*[{**CORRECTED, **STALE, REWARDED: value} for value in values]) for values in (shrinking, growing)]
    assert [severe(examine(log, config())) for log in logs] == [[], [("unlearning", 7)]]


def test_a_large_gap_of_the_start_may_vary():
    broken = {**CORRECTED, **STALE, "kl": 0.4, "k3_kl": 0.35}
    varies, grows = ([{**broken, REWARDED: value} for value in values] for values in ([0.3, 0.55, 0.5], [0.62] * 3))
    assert severe(examine(history(*varies * 10), config())) == []
    assert severe(examine(history(*varies * 10, *grows * 10), config())) == [("unlearning", 36)]


def test_a_gap_that_is_all_where_the_advantage_is_negative_is_none():
    severity = {
        rewarded: severe(gaps([*SETTLING, *[0.04] * 40], **{REWARDED: rewarded})) for rewarded in (0.0, 0.01, 0.02)
    }
    assert severity == {0.0: [], 0.01: [], 0.02: [("gap_stays", 13)]}
    later = [{**CORRECTED, **STALE, "kl": 0.04, "k3_kl": 0.04, REWARDED: 0.02 * (step >= 30)} for step in range(60)]
    quiet = {**CORRECTED, **STALE, REWARDED: 0.0}
    # most of seven windows
    assert severe(examine(history(quiet, quiet, quiet, *later), config())) == [("gap_stays", 37)]


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
    clipped = config(rollout_correction="bypass_ppo_clip")
    assert severe(examine(log, clipped)) == [("unlearning", 26)]
    assert severe(examine(log, clipped, num_iterations=4)) == []
    assert severe(examine(log, config(), num_iterations=4)) == [("unlearning", 26)]


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


def test_a_gap_that_was_there_at_the_start_is_no_gap_that_stays():
    for start in (0.025, 0.05, 0.2, 0.75):
        assert severe(gaps([start] * 60)) == []
    assert severe(gaps([0.025, 0.02, 0.03, *[0.04] * 60])) == []
    assert severe(gaps([0.025, 0.02, 0.03, *[0.06] * 60])) == [("gap_stays", 13)]


def test_samples_from_a_part_of_the_policy_are_no_gap():
    truncated = gaps([0.06] * 3 + [0.08] * 40, k3_kl=0.002)
    assert severe(truncated) == []
    assert [finding.bound for finding in truncated] == ["biased_ratio"]


def test_clipping_around_the_sampler_bears_more():
    clipped = config(rollout_correction="bypass_ppo_clip")
    assert severe(gaps([*SETTLING, *[0.06] * 40], clipped)) == []
    assert severe(gaps([*SETTLING, *[0.07] * 40], clipped)) == [("gap_clipped", 13)]
    assert severe(gaps([*SETTLING, *[0.06] * 40], config(rollout_correction="bypass_pg_is"))) == [("gap_stays", 13)]


FILLERS = [(0.75, 0.52), (0.71, 0.5), (0.78, 0.54), (0.74, 0.5)]  # `kl` and `k3_kl`; the mean ratio is about 0.77


def test_fillers_in_a_quarter_of_the_tokens_are_named_as_a_bias():
    log = history(*[{**CORRECTED, "kl": kl, "k3_kl": k3, "staleness_max": 0.0} for kl, k3 in FILLERS * 3])
    alarms = {alarm.bound: alarm for alarm in examine(log, config())}
    assert list(alarms) == ["k3_corrected", "biased_ratio"]
    assert alarms["biased_ratio"].value == pytest.approx(0.23, abs=0.01)
    assert (alarms["k3_corrected"].last_step, alarms["biased_ratio"].step) == (8, 9)  # one of the two speaks
    assert not any(re.search(r"\bstale|push", str(alarm)) for alarm in alarms.values())


def test_a_gap_without_a_bias_has_none():
    fp8 = [(0.04, 0.045), (0.05, 0.044), (0.043, 0.047), (0.05, 0.048)]
    later = [(0.001, 0.001)] * 3 + FILLERS * 3
    for pairs in (fp8 * 5, later):
        log = history(*[{**CORRECTED, "kl": kl, "k3_kl": k3, "staleness_max": 0.0} for kl, k3 in pairs])
        assert "biased_ratio" not in found(log, config())


def test_log_probabilities_that_go_wrong_later_are_left_to_the_correction():
    broken = {"kl": -0.6, "k3_kl": 1000.0}
    log = history(*[CORRECTED] * 5, *[{**CORRECTED, **broken}] * 9, *[CORRECTED] * 5)
    assert {(f.bound, f.severity) for f in examine(log, config())} == {("biased_ratio", "warning")}
    assert severe(examine(log, config(**DISABLED))) == [("k3_high", 7)]


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "alarms"),
    [
        (DISABLED, ["k3_uncorrected"]),
        ({}, []),
        ({"rollout_metrics_only": True}, ["k3_uncorrected"]),
        ({"rollout_correction": "bypass_ppo_clip"}, []),
        (None, []),  # unknown
    ],
)
def test_settings_decide_whether_a_run_is_corrected(fields, alarms):
    gap = {**HEALTHY_WINDOW, **WEIGHTS, "k3_kl": 0.02, "kl": 0.02}  # the log does not
    assert found(history(*[gap] * 5), None if fields is None else config(**fields)) == alarms


def test_rules_about_weights_are_silent_where_weights_do_not_act():
    window = {
        **CORRECTED,
        "rollout_is_mean": 0.1,
        "rollout_is_eff_sample_size": 0.01,
        "rollout_is_std": 9.0,
    }
    clipped = config(rollout_correction="bypass_ppo_clip", rollout_is="token")
    assert found(history(*[window] * 9), clipped) == []
    weighted = config(bypass_mode=True, rollout_loss_type="reinforce")
    assert set(found(history(*[window] * 9), weighted)) == {"effective_sample_size", "weight_mean_low"}


def test_samples_that_were_trained_on_have_no_mean_ratio_of_one():
    window = {**HEALTHY_WINDOW, "kl": 0.02, "k3_kl": 0.0006}
    log, bypass = history(*[window] * 9), config(rollout_correction="bypass_ppo_clip")
    assert (
        found(log, bypass) == [alarm.bound for alarm in examine(log, config(), num_iterations=4)] == ["biased_ratio"]
    )
    assert examine(log, bypass, num_iterations=4) == []


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
    windows = [{**dict.fromkeys(CORRECTED, value), "nonfinite_fraction": 0.0}] * 30
    assert found(history(*windows)) == []
    ill = {**HEALTHY_WINDOW, "k3_kl": 0.2, "kl": 0.2}
    assert found(history(*[ill, *windows, ill]), config(**DISABLED)) == ["k3_high"]


# Thresholds -----------------------------------------------------------------------------------------------------------


def test_bounds_can_be_changed_and_rules_switched_off():
    log = history(*[{**CORRECTED, "k3_kl": 0.04, "kl": 0.04}] * 9)
    assert found(log, config()) == ["k3_corrected"]
    assert found(log, config(rollout_monitor_bounds={"k3_corrected": 0.05})) == []
    assert found(log, config(rollout_monitor_bounds={"k3_corrected": None})) == []
    assert found(log, config(rollout_monitor_bounds={"staleness": 3.0})) == ["k3_corrected", "staleness"]
    strict = examine(log, config(rollout_monitor_bounds={"k3_corrected": 0.001}))[0]
    assert strict.seen == "`k3_kl` is 0.04, above 0.001, and the run corrects for it."


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"k3": 0.1}, "`rollout_monitor_bounds` is .*, and 'k3' is not a bound. .*Available bounds: no_tokens, "),
        ({"k3_high": "much"}, "`rollout_monitor_bounds` for 'k3_high' must be a number, or None to .*, got 'much'"),
        ({"k3_high": True}, "'k3_high' must be a number, .* got True"),
        ({"k3_high": math.nan}, "'k3_high' must be a number, .* got nan"),
        ([0.1], r"must be numbers, or None, by name of a bound, such as \{\"staleness\": 32\}, got \[0.1\]"),
        ("k3_high=0.1", "by name of a bound, .* got 'k3_high=0.1'"),
    ],
)
def test_bounds_that_cannot_be_meant_are_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        parse_bounds(bounds)


# Published runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs():
    """Runs of the second comparison, each with its correction, its course and its alarms, by name."""
    text = lzma.decompress((ROOT / "benchmarks/arena/runs.jsonl.xz").read_bytes()).decode()
    return {
        run["name"]: summary(run) for run in map(json.loads, text.splitlines()) if PREFIX + "k3_kl" in run["history"]
    }


def summary(run):
    history = run["history"]
    log = [dict(zip(history, values, strict=True)) for values in zip(*history.values(), strict=True)]
    options = run["settings"]["options"]
    name = options.get("rollout_correction", "auto")
    fields = {key: value for key, value in options.items() if key in RolloutCorrectionConfig.__dataclass_fields__}
    settings = config(**fields) if name in PRESETS or name in ("disabled", None) else None
    best = [max(run["accuracy"][: i + 1]) for i in range(len(run["accuracy"]))]
    low = [now <= top - 0.1 for now, top in zip(run["accuracy"], best, strict=True)]
    fall = next((step for step, a, b in zip(run["steps"], low, low[1:], strict=False) if a and b), None)
    uncorrected = settings is not None and not settings.corrects
    return {"settings": settings, "uncorrected": uncorrected, "keeps": not any(low), "fall": fall,
            "alarms": examine(log, settings)}  # fmt: skip


# Runs that were made after the rules were set, in most of which the policy moves fast
LATER = re.compile("-(before|rot02|countdowns)-|-fp8-|unpack-lag_(4|16)-")


def test_a_critical_alarm_is_seldom_false_where_the_run_corrects_or_is_never_stale(runs):
    kept = {x: run for x, run in runs.items() if run["keeps"] and (not run["uncorrected"] or "on_policy" in x)}
    false = [name for name, run in kept.items() if any(alarm.severity == "critical" for alarm in run["alarms"])]
    known, later = (
        [name for name in names if bool(LATER.search(name)) == x] for x, names in ((False, kept), (True, kept))
    )
    assert len(known) > 300
    assert len({*false} & {*known}) <= 0.03 * len(known)
    assert len({*false} & {*later}) <= 0.2 * len(later)  # 5 of 37, which dipped for a while


def test_garbage_tokens_are_named_as_a_bias(runs):
    """In runs with garbage, every second completion has a token with a wrong log-probability, from the first step on."""
    biased = {name for name, run in runs.items() if any(alarm.bound == "biased_ratio" for alarm in run["alarms"])}
    assert biased >= {name for name in runs if "garbage" in name}
    others = {name for name, run in runs.items() if run["keeps"] and not re.search("garbage|burst", name)}
    assert len(biased & others) <= 0.1 * len(others)


def test_an_uncorrected_fall_is_announced(runs):
    falls = [run for run in runs.values() if run["fall"] and run["uncorrected"]]
    before = [
        run
        for run in falls
        if min((a.step for a in run["alarms"] if a.severity == "critical"), default=999) < run["fall"]
    ]
    assert len(falls) >= 10
    assert len(before) >= 0.8 * len(falls)


# The document ---------------------------------------------------------------------------------------------------------


def test_the_document_has_a_row_about_each_alarm():
    """`test_docs` compares what is in it."""
    page = (ROOT / "docs/debugging.md").read_text()
    rows = dict(re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \| \w+ \| .* \| (.*) \|$", page, re.MULTILINE))
    assert rows.keys() == BOUNDS.keys()
    assert all(rows.values())  # whether it can be ignored is written by hand


def test_the_message_about_low_precision_has_the_largest_gap_that_was_measured():
    gaps = json.loads((ROOT / "benchmarks/language_model/results.json").read_text())["gap"]
    largest = max(row["k3"] for row in gaps if "fp8 cache" in row["sampler"])
    assert f"an 8-bit KV cache gave up to {largest:.2f}." in texts("k3_high", None)[1]
