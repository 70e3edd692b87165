"""The health rules: each alone on small histories, the advice that follows, and both on the runs of the published logs."""

import dataclasses
import json
import lzma
import math
import random
import re
import statistics

import pytest

from tests.launching import ROOT, benchmarks
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.settings.criteria import CRITERIA
from trl_rollout_corr.tools.bands import HEALTHY, ROUNDED
from trl_rollout_corr.tools.monitor.examine import Examiner, examine, parse_bounds
from trl_rollout_corr.tools.monitor.rules import BOUNDS, RULES, SILENCED
from trl_rollout_corr.tools.monitor.texts import HUGE, LARGE_K3, fill
from trl_rollout_corr.tools.monitor.windows import Course, Window


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

FRESH = {"staleness_max": 0.0}

# By bound: settings, what differs from a healthy window, and the same just within the bounds
ILL = {
    "no_tokens": ({}, {"nonfinite_fraction": math.nan}, {"nonfinite_fraction": 0.0}),
    "nothing_to_learn": ({}, {"zero_advantage_fraction": 1.0}, {"zero_advantage_fraction": 0.99}),
    "k3_at_start": (DISABLED, {**FRESH, "k3_kl": 0.101, "kl": 0.1}, {**FRESH, "k3_kl": 0.0049, "kl": 0.0049}),
    "nonfinite_many": ({}, {"nonfinite_fraction": 0.11}, {"nonfinite_fraction": 0.0}),
    "nonfinite": ({}, {"nonfinite_fraction": 1e-6}, {"nonfinite_fraction": 0.0}),
    "everything_rejected": ({}, {"effective_lr": 0.0}, {"effective_lr": 0.51}),
    "k3_high": (DISABLED, {"k3_kl": 0.031, "kl": 0.031}, {"k3_kl": 0.014, "kl": 0.014}),
    "k3_corrected": ({}, {"k3_kl": 0.031, "kl": 0.031}, {"k3_kl": 0.029, "kl": 0.029}),
    "k3_uncorrected": (DISABLED, {"k3_kl": 0.016, "kl": 0.016}, {"k3_kl": 0.014, "kl": 0.014}),
    "biased_ratio": ({}, {"kl": 0.02, "k3_kl": 0.0006}, {"kl": 0.0104, "k3_kl": 0.0006}),
    "bit_equal": ({"rollout_monitor_bounds": {"bit_equal": 1.0}}, {"bit_equal": 0.999}, {"bit_equal": 1.0}),
    "staleness": ({}, {"staleness_max": 17.0}, {"staleness_max": 16.0}),
    "weight_of_completions": (SEQUENCE, {"rollout_is_mean": 0.79}, {"rollout_is_mean": 0.81}),
    "weight_mean_low": ({}, {"rollout_is_mean": 0.49}, {"rollout_is_mean": 0.51}),
    "weight_mean_high": (SEQUENCE, {"rollout_is_mean": 2.1}, {"rollout_is_mean": 1.9}),
    "effective_sample_size": ({}, {"rollout_is_eff_sample_size": 0.29}, {"rollout_is_eff_sample_size": 0.31}),
    "rejected": ({}, {"rollout_rs_masked_fraction": 0.51}, {"rollout_rs_masked_fraction": 0.49}),
    "vetoed": (VETO, {"rollout_is_veto_fraction": 0.11}, {"rollout_is_veto_fraction": 0.09}),
}


def config(**fields):
    """Settings in effect of a configuration, of `auto` if it names no correction."""
    named = fields.keys() & {"rollout_correction", "rollout_is", "rollout_rs"}
    return RolloutCorrectionConfig(**({} if named else {"rollout_correction": "auto"}), **fields).settings


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
    alone = {"unlearning", "gap_stays", "gap_clipped", "fresh_gap", "k3_lasting", "gap_by_sign", "cut", "clipped"}
    alone |= {"other_draws", "k3_early"}
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
    assert (finding.step, finding.last_step) == (bound.lasting or bound.most, 60)
    seen = _window({**window, **ill}, settings)
    seen.course.add(seen)
    assert finding.value == pytest.approx(bound.value(seen))


def _window(window, settings):
    return Window({"step": 1, **{PREFIX + key: value for key, value in window.items()}}, settings)


ALONE = [name for name in ILL if BOUNDS[name].patience > 1 and not BOUNDS[name].lasting]


@pytest.mark.parametrize("name", ALONE)
def test_a_single_window_is_forgiven_and_most_of_several_are_not(name):
    fields, ill, _ = ILL[name]
    window, bound = healthy(fields), BOUNDS[name]
    ill = {**window, **ill}
    alone = [window] * 11 + [ill]
    assert name not in found(history(*alone * 20), config(**fields))
    most = [ill] * bound.most + [window] * (bound.patience - bound.most)
    assert name in found(history(*most * 2), config(**fields))


@pytest.mark.parametrize("name", ALONE)
def test_a_fault_that_comes_back_is_an_alarm_unless_chance_brings_it_back(name):
    fields, ill, _ = ILL[name]
    window = healthy(fields)
    third = [window, window, {**window, **ill}]
    alarms = [alarm for alarm in examine(history(*third * 10), config(**fields)) if alarm.bound == name]
    assert [(alarm.step, alarm.last_step) for alarm in alarms] == ([(12, 30)] if BOUNDS[name].returns else [])


FAR = {
    "k3_high": {"k3_kl": 0.31, "kl": 0.3},
    "k3_corrected": {"k3_kl": 0.31, "kl": 0.3},
    "nonfinite_many": {"nonfinite_fraction": 0.51},
    "weight_of_completions": {"rollout_is_mean": 0.079},
    "weight_mean_low": {"rollout_is_mean": 0.049},
    "weight_mean_high": {"rollout_is_mean": 20.1},
    "effective_sample_size": {"rollout_is_eff_sample_size": 0.029},
    "vetoed": {"rollout_is_veto_fraction": 0.51},
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_single_window_far_beyond_the_limit_is_enough(name):
    assert (name in FAR) == (BOUNDS[name].far < math.inf)
    if name in FAR:
        fields, near, _ = ILL[name]
        window = healthy(fields)
        quiet, later = [window] * 9, [window] * 9
        far = examine(history(*quiet, {**window, **FAR[name]}, *later), config(**fields))
        assert (name, 10, 10) in [(alarm.bound, alarm.step, alarm.last_step) for alarm in far]
        assert name not in found(history(*quiet, {**window, **near}, *later), config(**fields))


def test_a_gap_in_every_third_step_is_no_healthy_run():
    """The steps of a public report, with 0 between them."""
    gaps = [0.0, 0.0, 10.7, 0.0, 0.0, 11.0, 0.0, 0.0, 13.6, 0.0, 0.0, 16.7]
    windows = [{**CORRECTED, **FRESH, "k3_kl": gap, "kl": gap} for gap in gaps]
    for settings, name in ((config(), "k3_corrected"), (config(**DISABLED), "k3_high")):
        (alarm,) = examine(history(*windows), settings)
        assert (alarm.bound, alarm.step, alarm.last_step) == (name, 3, 12)
        assert not re.search("harmless|Not every run", alarm.why)


@pytest.mark.parametrize("settings", [DISABLED, {"rollout_correction": "auto"}])
def test_a_small_gap_that_lasts_with_fresh_weights_is_told(settings):
    settings = config(**settings)

    def log(gap, **more):
        return history(*[{**healthy(DISABLED), **FRESH, "k3_kl": gap, "kl": gap, **more}] * 60)

    alarms = examine(log(0.009), settings)
    assert [(alarm.bound, alarm.step) for alarm in alarms] == [("k3_lasting", 41)]
    assert "trl-rollout-corr diagnose" in str(alarms[0])
    assert found(log(0.0049), settings) == []
    assert found(log(0.009, staleness_max=1.0), settings) == []  # its age explains it
    # the updates on a generation are no age of the ratios
    assert found(log(0.009, staleness_max=1.0, stale_fraction=0.0), settings) == ["k3_lasting"]
    later = {f"{PREFIX}staleness_max": 1.0, f"{PREFIX}update_k3_kl": 1e-3}
    visits = [entry for step in log(0.009, stale_fraction=0.0) for entry in (step, later)]
    again = history(*[{key.removeprefix(PREFIX): x for key, x in entry.items() if key != "step"} for entry in visits])
    assert found(again, settings) == ["k3_lasting"]
    assert found(log(0.009, staleness_max=None), settings) == ["k3_lasting"]
    grown = log(0.009, staleness_max=None)
    for entry in grown[:3]:
        entry[f"{PREFIX}k3_kl"] = 0.001
    assert found(grown, settings) == []  # the sampler may have grown old
    spikes = log(0.002)
    for entry in spikes[20:60:3]:
        entry[f"{PREFIX}k3_kl"] = 0.012
    assert found(spikes, settings) == []
    rounding = config(rollout_correction="auto", rollout_engine_kwargs={"quantization": "fp8"})
    assert found(log(0.009), rounding) == []


def test_a_gap_that_depends_on_the_sign_of_the_advantage_is_told_if_weights_are_fresh():
    dice = random.Random(0)

    def log(age, negative):
        windows = [
            {**CORRECTED, "staleness_max": age, "k3_kl": 0.002, "kl": 0.002 + dice.gauss(0, 5e-4),
             "kl_advantage_positive": dice.gauss(0, 1e-3), "kl_advantage_negative": negative + dice.gauss(0, 1e-3)}
            for _ in range(40)
        ]  # fmt: skip
        return history(*windows)

    assert found(log(0.0, 0.005), config()) == ["gap_by_sign"]
    assert found(log(0.0, -0.005), config()) == ["gap_by_sign"]
    assert found(log(0.0, 0.0), config()) == []
    assert found(log(4.0, 0.005), config()) == []


def test_tokens_of_another_distribution_are_told_by_the_entropy():
    dice = random.Random(0)

    def log(surprise, k3=0.0008, entropy=2.0):
        entries = history(*[{**CORRECTED, **FRESH, "surprise": surprise + dice.gauss(0, 0.1), "k3_kl": k3, "kl": k3}
                            for _ in range(20)])  # fmt: skip
        return [{**entry, "entropy": entropy} if "loss" in entry else entry for entry in entries]

    for surprise in (1.5, 2.5):
        [alarm] = examine(log(surprise), config())
        assert (alarm.bound, alarm.step, alarm.value) == ("other_draws", 9, pytest.approx(0.25, abs=0.05))
    assert found(log(2.1), config()) == []
    assert found(log(2.5, entropy=None), config()) == []
    assert found(log(2.5, k3=0.01), config()) == []  # the gap makes them differ
    assert found(log(2.5), config(rollout_support="replay")) == []  # the probabilities are of the kept tokens


def test_old_weights_do_not_count_as_tokens_of_another_distribution():
    """
    A policy that becomes surer finds the tokens of an older sampler less likely than its own: `zigzag` of the arena, 8
    steps old with noise, whose `k3_kl` stays small.
    """
    path = ROOT / "benchmarks" / "arena" / "runs.jsonl.xz"
    runs = map(json.loads, lzma.decompress(path.read_bytes()).decode().splitlines())
    logs = [run["history"] for run in runs if run["name"].startswith("grpo-zigzag-lag_8-fast-mid-noise-")]
    logs = [log for log in logs if f"{PREFIX}surprise" in log]
    assert len(logs) == 5
    for log in logs:
        entries = [dict(zip(log, values, strict=True)) for values in zip(*log.values(), strict=True)]
        apart = [entry[f"{PREFIX}surprise"] / entry["entropy"] - 1 for entry in entries]
        assert max(statistics.fmean(apart[i : i + 8]) for i in range(8, len(apart) - 8)) > 0.3
        assert "other_draws" not in found(entries, config())


def test_answers_that_are_cut_are_told_before_nothing_is_learned():
    windows = [{**CORRECTED, **FRESH}] * 20
    log = history(*windows)
    for entry in log[:20]:
        entry["completions/clipped_ratio"] = 0.1 if entry["step"] < 4 else 0.95
    [alarm] = examine(log, config())
    assert (alarm.bound, alarm.step, alarm.key) == ("cut", 6, "completions/clipped_ratio")
    assert "and 0.1 at the start" in str(alarm)
    for share in (0.7, 1.0):  # from the start
        for entry in log[:20]:
            entry["completions/clipped_ratio"] = share
        assert examine(log, config()) == []


def test_clipping_at_the_first_visit_is_told_in_bypass_mode():
    def log(share, age=0.0):
        entries = history(*[{**HEALTHY_WINDOW, "staleness_max": age}] * 20)
        for entry in entries[:20]:
            entry["clip_ratio/region_mean"] = share
        return entries

    bypass = config(rollout_correction="bypass_ppo_clip")
    assert found(log(0.5), bypass) == ["clipped"]
    assert found(log(0.2), bypass) == []
    assert found(log(0.5, age=4.0), bypass) == []
    assert found(log(0.5), config()) == []  # around the old policy


def test_the_log_of_trls_own_trainer_is_examined():
    ratio = "sampling/importance_sampling_ratio/mean"
    log = [{"step": step, ratio: 0.3, "completions/mean_length": 900.0} for step in range(1, 30)]
    assert "weight_of_completions" in found(log) or "weight_mean_low" in found(log)
    assert found([{**entry, ratio: 0.99} for entry in log]) == []


@pytest.mark.parametrize(
    ("kl", "high", "says"),
    [
        (
            -0.005,
            0.9,
            "The trainer finds the completions likelier than the sampler does (`kl` is -0.005): 90 % of the ",
        ),
        (
            0.005,
            0.031,
            "shrinks with length even if nothing is wrong; 3.1 % of the weights exceed the upper bound, and ",
        ),
        (0.005, 0.9, "shrinks with length even if nothing is wrong; 90 % of the weights exceed the upper bound, and "),
        (0.005, 0.0, "shrinks with length even if nothing is wrong. Set"),
    ],
)
def test_a_low_weight_of_completions_is_explained_by_the_numbers_of_its_window(kl, high, says):
    low = {"rollout_is_mean": 0.5, "kl": kl, "rollout_is_ratio_fraction_high": high}
    settings = RolloutCorrectionConfig(rollout_correction="trl").settings
    log = history(*[{**CORRECTED, **low}] * 10)
    [alarm] = [x for x in examine(log, settings) if x.bound == "weight_of_completions"]
    assert says in str(alarm)
    assert ("likelier" in str(alarm)) == (kl < 0)
    assert ("shrinks with length" in str(alarm)) == (kl >= 0)
    truncates = config(rollout_is="sequence", rollout_is_threshold=3.0)  # a weight above the bound is not dropped
    [alarm] = [x for x in examine(log, truncates) if x.bound == "weight_of_completions"]
    assert "dropped" not in str(alarm)
    assert "likelier" not in str(alarm)


def test_the_message_of_the_tutorial_says_what_its_log_says():
    log = [json.loads(line) for line in (ROOT / "benchmarks/tutorial/long.jsonl").read_text().splitlines()]
    settings = RolloutCorrectionConfig(rollout_correction="trl").settings
    alarm = next(x for x in examine(log[:2], settings) if x.bound == "weight_of_completions")
    assert log[1][f"{PREFIX}kl"] > 0  # the trainer finds the completions less likely
    share = log[1][f"{PREFIX}rollout_is_ratio_fraction_high"]
    assert f"; {100 * share:.2g} % of the weights exceed the upper bound, and are dropped." in str(alarm)
    assert "likelier" not in str(alarm)


@pytest.mark.parametrize(
    ("fields", "by_length"),
    [({}, False), ({"rollout_correction": "decoupled_token_is"}, False), ({"rollout_is": "turn"}, True), (None, True)],
)
def test_weights_of_tokens_do_not_shrink_with_length(fields, by_length):
    settings = None if fields is None else config(**fields)
    alarms = examine(history(*[{**CORRECTED, "rollout_is_mean": 0.4}] * 10), settings)
    [why] = [alarm.why for alarm in alarms if alarm.bound == "weight_mean_low"]
    assert why.startswith("Sampler and trainer are far apart")
    assert ("shrink with length" in why) == by_length


def test_fresh_weights_are_not_advised_to_be_fresher():
    window = {**CORRECTED, **FRESH, "rollout_is_mean": 0.4}
    [alarm] = [x for x in examine(history(*[window] * 10), config()) if x.bound == "weight_mean_low"]
    assert "Push weights" not in str(alarm)
    assert "push weights" not in str(alarm)


def test_a_jump_of_the_gap_with_equal_weights_is_told_at_once():
    def log(*fresh):
        return history(*[{**CORRECTED, **({} if x is None else {"fresh_k3_kl": x})} for x in fresh])

    assert found(log(4e-4, None, 6e-4, None, 3e-3, None, 7.9e-3), config()) == []
    finding = examine(log(4e-4, None, 6e-4, None, None, 8.1e-3, None), config())[0]
    assert (finding.bound, finding.step, finding.last_step) == ("fresh_gap", 6, 6)
    assert found(log(1e-10, 5e-9, 1.9e-4), config()) == []  # rounding
    assert found(log(1e-10, 2.1e-4), config()) == ["fresh_gap"]
    assert found(log(5.8, 3.2, 6.9), config()) == ["fresh_gap"]  # pushes that were lost from the first score on
    for age, expected in ((None, []), (1e-4, ["fresh_gap"]), (1e-2, [])):  # of a sampler that stands still, or moves
        moved = {} if age is None else {"age_k3_kl": age}
        first, last = ({**CORRECTED, "fresh_k3_kl": x} for x in (1e-4, 1.5e-3))
        assert found(history(first, {**last, **moved}), config()) == expected


KNOWN = {"unknown": None, "auto": config(), "sequence": config(**SEQUENCE), "off": config(**DISABLED)}
STATES = {
    "open": {},
    "old": {"staleness_max": 8.0},
    "start": {"k3_kl": 0.3, "kl": 0.3},
    "large": {"k3_kl": 5.0, "kl": 5.0, "staleness_max": 8.0},
}


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
            said = texts(name, settings, **state)
            # what, why, and one thing to do; `docs/alarms.md` has the rest
            assert [len(re.findall(r"\.(?= |$)", text)) for text in said] == [1, 1, 1]
            for text in said:
                assert re.fullmatch(r"[A-Z`].*\.", text)
                assert not re.search(r"\. [a-z]|  |[{}]|\.\.", text)
                assert {*re.findall(r"`((?:rollout|bypass)_\w+)(?:: true)?`", text)} <= fields | {
                    "rollout_func",
                    "rollout_is_oob_ratio",
                }
                assert {*re.findall(r"\b(?:token|seq)_(?:\w+_)?k[123]\b", text)} <= {*CRITERIA}


def test_a_gap_from_the_first_step_is_not_put_down_to_a_stale_sampler():
    for settings in KNOWN.values():
        for name in BOUNDS.keys() - {"staleness"}:
            said = " ".join(texts(name, settings, **STATES["start"]))
            assert not re.search(r"\bstale\b|\bold\b|lost push|were not pushed", said), said


def test_a_gap_of_a_sampler_that_says_how_old_it_is_is_explained():
    for name in ("k3_high", "k3_uncorrected", "k3_corrected"):
        _, why, advice = texts(name, KNOWN["off"], **STATES["old"])
        assert re.search("[Tt]he sampler is 8 steps old, which explains (it|the gap) unless", why)
        assert not re.search("dropout|precision|not pushed", why + advice)
        assert "steps old" not in texts(name, KNOWN["off"])[1]  # announced ages are 0


def test_without_settings_both_are_said():
    gap = history(CORRECTED, *[{**CORRECTED, "k3_kl": 0.05, "kl": 0.05}] * 3)
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
    ended = examine([{**entry, "completions/clipped_ratio": 0.0} for entry in log], config())[0]
    assert "`mask_truncated_completions`" not in ended.advice
    assert "`env_mask`" in ended.advice
    assert found(history(*[CORRECTED, CORRECTED, empty] * 5), config()) == []


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
    assert "only momentum" in alarm.why


# The course of the gap ------------------------------------------------------------------------------------------------

STALE = {"staleness_max": 8.0}
SETTLING = [0.0005 * step**2 for step in range(1, 9)]  # while the lag fills


def gaps(values, settings=None, **others):
    """Findings in a corrected run with these values of `kl`."""
    windows = [{**CORRECTED, **STALE, "kl": value, "k3_kl": value, **others} for value in values]
    return examine(history(*windows), settings or config())


def severe(findings):
    """Alarms that foretell a collapse."""
    return [(finding.bound, finding.step) for finding in findings if BOUNDS[finding.bound].foretells_collapse]


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
    assert severe(examine(log, clipped, fields={"num_iterations": 4})) == []
    assert severe(examine(log, config(), fields={"num_iterations": 4})) == [("unlearning", 26)]


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


@pytest.mark.parametrize(
    ("fields", "support", "said"),
    [
        ({}, None, "Set `top_p`, `top_k`, `min_p` and `repetition_penalty` to their defaults; if they are, check"),
        ({"top_p": 0.9, "top_k": 0}, None, "Leave `top_p=0.9` at the default"),
        ({"top_p": 0.9}, "replay", "Check that log-probabilities are taken after temperature"),
        ({"top_p": 1.0}, None, "Check that log-probabilities are taken after temperature"),
        ({"top_p": 0.9, "use_vllm": False}, None, "Check that log-probabilities are taken after temperature"),
    ],
)
def test_a_biased_ratio_names_the_options_that_the_run_sets(fields, support, said):
    settings = dataclasses.replace(config(), rollout_support=support)
    log = history(*[{**CORRECTED, "kl": 0.06, "k3_kl": 0.002}] * 20)
    (alarm,) = examine(log, settings, fields=fields)
    assert (alarm.bound, alarm.advice[: len(said)]) == ("biased_ratio", said)


def test_clipping_around_the_sampler_bears_more():
    clipped = config(rollout_correction="bypass_ppo_clip")
    assert severe(gaps([*SETTLING, *[0.06] * 40], clipped)) == []
    assert severe(gaps([*SETTLING, *[0.07] * 40], clipped)) == [("gap_clipped", 13)]
    assert severe(gaps([*SETTLING, *[0.06] * 40], config(rollout_correction="bypass_pg_is"))) == [("gap_stays", 13)]


FILLERS = [(0.75, 0.52), (0.71, 0.5), (0.78, 0.54), (0.74, 0.5)]  # `kl` and `k3_kl`; the mean ratio is about 0.77


def test_fillers_in_a_quarter_of_the_tokens_are_named_as_a_bias():
    log = history(*[{**CORRECTED, "kl": kl, "k3_kl": k3, "staleness_max": 0.0} for kl, k3 in FILLERS * 3])
    alarms = {alarm.bound: alarm for alarm in examine(log, config())}
    assert list(alarms) == ["k3_at_start", "biased_ratio"]
    assert alarms["biased_ratio"].value == pytest.approx(0.23, abs=0.01)
    assert (alarms["k3_at_start"].step, alarms["biased_ratio"].step) == (1, 9)
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
    alarms = {(f.bound, f.severity, f.step) for f in examine(log, config())}
    assert alarms == {("k3_corrected", "warning", 6), ("biased_ratio", "warning", 7)}
    assert severe(examine(log, config(**DISABLED))) == [("k3_high", 6)]


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
        found(log, bypass)
        == [alarm.bound for alarm in examine(log, config(), fields={"num_iterations": 4})]
        == ["biased_ratio"]
    )
    assert examine(log, bypass, fields={"num_iterations": 4}) == []


@pytest.mark.parametrize(
    ("ages", "fresh"),
    [([0.0], False), ([0.0, 0.0], True), ([2.0, 0.0], False), ([0.0, 2.0], False), ([None, None], False),
     ([0.0, None], False)],
)  # fmt: skip
def test_weights_are_known_to_be_fresh_from_the_second_step_on(ages, fresh):
    """In the first step, all weights are fresh, whatever follows."""
    course = Course()
    for step, age in enumerate(ages, 1):
        window = Window({"step": step, f"{PREFIX}staleness_max": age}, None, course)
        course.add(window)
    assert window.is_fresh == fresh


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


@pytest.mark.parametrize(("value", "told"), [(16.4, "16.4"), (17.0, "17")])
def test_a_value_is_not_written_as_the_limit_that_it_has_passed(value, told):
    """ "0.8, below 0.8" was said of 0.798, and "up to 16 optimizer steps" of a bound of 16."""
    [finding] = examine(history(*[{**CORRECTED, "staleness_max": value}] * 3), config())
    assert f"up to {told} optimizer steps" in finding.seen
    low = {**CORRECTED, "rollout_is_mean": 0.4998}
    [finding] = examine(history(*[low] * 6), config())
    assert "is 0.4998, below 0.5" in finding.seen


@pytest.mark.parametrize(("age", "harmless"), [(0.0, False), (4.0, True), (math.nan, True)])
def test_no_age_is_a_comfort_about_fresh_weights(age, harmless):
    """ "With a stale sampler the gap grows at first and shrinks later" was said of a sampler of age 0."""
    healthy = {**CORRECTED, "k3_kl": 0.001, "kl": 0.001, "staleness_max": age}
    ill = {**healthy, "k3_kl": 0.06, "kl": 0.06}
    [finding] = [x for x in examine(history(*[healthy] * 8, *[ill] * 3), config()) if x.bound == "k3_corrected"]
    assert ("harmless" in finding.why) == harmless
    assert ("no age explains it" in finding.why) == (not harmless)


def test_one_finding_per_cause():
    ill = {**CORRECTED, "effective_lr": 0.0, "rollout_rs_masked_fraction": 1.0, "staleness_max": 40.0}
    findings = examine(history(*[ill] * 9), config())
    assert [finding.bound for finding in findings] == ["staleness", "everything_rejected"]


def test_the_alarm_about_missing_numbers_says_where_they_may_be_missing():
    broken = {**HEALTHY_WINDOW, "nonfinite_fraction": 0.01}
    [finding] = examine(history(broken), config())
    assert "returns None" in finding.why
    assert "-9999" in finding.why


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
    assert examine([]) == []
    with pytest.raises(ValueError, match="contains no `rollout_corr/` metrics"):
        examine(history())


@pytest.mark.parametrize(
    ("fields", "ages", "said"),
    [
        ({}, FRESH, "with fresh weights the run only leaves out what is beyond its bounds."),
        ({"rollout_correction": "auto", "rollout_rs": None}, FRESH, "with fresh weights nothing corrects for it."),
        ({"rollout_is_stale_only": False}, FRESH, "the run corrects for it."),
        ({}, {"staleness_max": 2.0}, "the run corrects for it."),
        ({}, {}, "the run corrects for it."),  # an unknown age counts as old
    ],
)
def test_weights_that_act_on_old_samples_correct_no_gap_of_fresh_ones(fields, ages, said):
    window = {**CORRECTED, "k3_kl": 0.05, "kl": 0.05, **ages}
    alarms = examine(history(*[window] * 9), config(**fields))
    assert [alarm.seen for alarm in alarms if alarm.bound == "k3_corrected"] == [
        f"`k3_kl` is 0.05, above 0.03, and {said}"
    ]


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
def arena():
    with benchmarks("arena", "") as load:
        yield load("alarms")


@pytest.fixture(scope="module")
def runs(arena):
    """Published runs, each with its kind, its course and its alarms."""
    return arena.replays()


# Runs that were made after the limits were set, in most of which the policy moves fast
LATER = re.compile("-(before|rot02|countdowns)-|-fp8-|unpack-lag_(4|16)-")


def test_the_published_record_is_that_of_the_rules(arena, runs):
    """`python benchmarks/arena/alarms.py` writes it."""
    assert json.loads(arena.DATA.read_text()) == arena.counted(runs)


def test_an_alarm_is_called_silent_only_where_a_log_has_its_number(arena, runs):
    """A metric that no log has was not measured, except for shares that the archive drops because all are 0."""
    assert all({alarm.bound for alarm in run.alarms} <= run.compared for run in runs)
    logged = {key for run in runs for key in run.record["history"]}
    restored = {"nonfinite_fraction", "zero_advantage_fraction", "rollout_rs_masked_fraction"}
    unknown = {name for name, bound in BOUNDS.items() if bound.metric not in logged and bound.key not in restored}
    assert "fresh_gap" in unknown
    compared = arena.counted(runs)["compared"]
    assert {compared[name]["all"] for name in unknown} == {0}
    having = [run for run in runs if f"{PREFIX}surprise" in run.record["history"]]
    assert 0 < compared["other_draws"]["all"] <= len(having) < len(runs)
    assert compared["nonfinite"]["all"] == len(runs)
    page = (ROOT / "docs/alarms.md").read_text()
    cells = dict(re.findall(r"^\| \[`(\w+)`\].* \| (.*) \| .* \|$", page, re.MULTILINE))
    assert {cells[name] for name in unknown} == {"not measured"}
    assert cells["other_draws"] == f"0 of {compared['other_draws']['corrected']}"
    assert "none" not in cells.values()


def test_a_critical_alarm_is_never_false(runs):
    """A sampler that reports wrong log-probabilities has one from the first step on, and no other run has any."""
    critical = {x.record["name"]: x for x in runs if any(alarm.severity == "critical" for alarm in x.alarms)}
    assert critical.keys() == {run.record["name"] for run in runs if run.kind == "faulty"}
    assert len(critical) >= 50
    assert {alarm.step for run in critical.values() for alarm in run.alarms if alarm.severity == "critical"} == {1}


def test_an_alarm_that_foretells_a_collapse_is_seldom_false_where_the_run_corrects(runs):
    healthy = [run for run in runs if run.course == "healthy" and run.kind in ("corrected", "fresh")]
    false = [run for run in healthy if run.foretold]
    for later, share in ((False, 0.03), (True, 0.2)):  # the later ones dipped for a while
        shown, of = (
            [run for run in some if bool(LATER.search(run.record["name"])) == later] for some in (false, healthy)
        )
        assert len(of) > 50
        assert len(shown) <= share * len(of)


def test_a_healthy_run_with_fresh_weights_has_no_alarm(runs):
    fresh = [run for run in runs if run.kind == "fresh" and run.course == "healthy"]
    assert len(fresh) > 70
    assert [run.record["name"] for run in fresh if run.alarms] == []


def test_garbage_tokens_are_named_as_a_bias(runs):
    """In runs with garbage, every second completion has a token with a wrong log-probability, from the first step on."""
    biased = {run.record["name"] for run in runs if any(alarm.bound == "biased_ratio" for alarm in run.alarms)}
    assert biased >= {run.record["name"] for run in runs if run.kind == "faulty" and run.course == "healthy"}
    others = {run.record["name"] for run in runs if run.kind != "faulty" and run.course == "healthy"}
    assert len(biased & others) <= 0.1 * len(others)


def test_an_uncorrected_collapse_is_announced(runs):
    falls = [run for run in runs if run.course == "collapse" and run.kind == "uncorrected"]
    assert len(falls) >= 10
    early = [[alarm.bound for alarm in run.alarms if run.announces(alarm)] for run in falls]
    assert sum(any(BOUNDS[name].foretells_collapse for name in names) for names in early) >= 0.8 * len(falls)


def test_what_messages_say_about_large_gaps_is_what_runs_show(arena):
    """Most runs with a gap above the number in the text lost accuracy."""
    rows = {row["k3_kl"]: row for row in json.loads(arena.DATA.read_text())["gaps"]}
    collapsed = rows[LARGE_K3]["uncorrected"]
    assert collapsed["collapse"] > sum(collapsed.values()) / 2
    lost = rows[HUGE]["corrected"]
    assert lost["collapse"] + lost["dip"] > sum(lost.values()) / 2


# The document ---------------------------------------------------------------------------------------------------------


def test_the_document_has_a_row_about_each_alarm():
    """`test_docs` compares what is in it."""
    page = (ROOT / "docs/alarms.md").read_text()
    rows = dict(re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \| \w+ \| .* \| (.*) \|$", page, re.MULTILINE))
    assert rows.keys() == BOUNDS.keys()
    assert all(rows.values())  # whether it can be ignored is written by hand


def test_the_message_about_low_precision_has_the_largest_gap_that_was_measured():
    gaps = json.loads((ROOT / "benchmarks/language_model/results.json").read_text())["gap"]
    plain = max(row["k3"] for row in gaps if row["sampler"] == row["trainer"] == "bfloat16")
    cache = max(row["k3"] for row in gaps if "fp8 cache" in row["sampler"])
    int8 = max(row["k3"] for row in gaps if "int8 weights" in row["sampler"])
    judged = json.loads((ROOT / "benchmarks/arena/results.json").read_text())["eight_bits"]["rows"]
    fp8 = max(row["k3"] for row in judged if "in_step" in row["cell"] and row["cell"].endswith("fp8"))
    assert {"": round(plain, 3), "cache": round(cache, 2), "weights": round(max(int8, fp8), 3)} == ROUNDED


ENGINES = {
    "cache": {"kv_cache_dtype": "fp8"},
    "weights": {"quantization": "online", "quantization_config": {"linear": "fp8_per_channel"}},
    "few bits": {"quantization": "awq"},
    "": {"dtype": "float32"},
}


@pytest.mark.parametrize("what", ENGINES)
def test_rounding_comforts_only_the_run_that_rounds_and_only_up_to_its_number(what):
    settings = config(rollout_engine_kwargs=ENGINES[what])
    for gap in (0.012, 0.04, 0.06, 0.2, 1e24):
        alarms = examine(history(*[{**CORRECTED, **FRESH, "k3_kl": gap, "kl": gap}] * 3), settings)
        said = " ".join(f"{alarm.why} {alarm.advice}" for alarm in alarms)
        critical = what == "" and gap > 0.1
        assert [alarm.bound for alarm in alarms] == (
            ["k3_at_start"] if critical else ["k3_corrected"] if gap > 0.03 else []
        )
        assert ("harmless" in said) == (0.03 < gap <= ROUNDED.get(what, 0.0))
        assert ("KV cache gave" in said) == (what == "cache" and gap > 0.03)
        assert ("INT8 weights gave" in said) == (what == "weights" and gap > 0.03)
        assert ("Rounding does not explain it" in said) == critical


def test_a_gap_of_the_first_steps_of_fresh_weights_is_told_with_its_doubt_first():
    def log(*gaps, **more):
        return history(*[{**CORRECTED, **FRESH, "k3_kl": gap, "kl": gap, **more} for gap in gaps])

    for settings in (config(), config(rollout_correction="trl"), None):
        (alarm,) = examine(log(*[0.02] * 8), settings)
        assert (alarm.bound, alarm.severity, alarm.step) == ("k3_early", "warning", 3)
        assert alarm.why.startswith("This may be harmless")
        assert "trl-rollout-corr diagnose" in alarm.advice
    assert found(log(*[0.014] * 8), config()) == []
    assert found(log(0.0003, 0.02, 0.034, *[0.02] * 9), config()) == []  # as a model that learns a new format
    assert found(log(*[0.02] * 8, staleness_max=None), config()) == []
    assert found(log(*[0.02] * 8, staleness_max=1.0), config()) == []
    assert found(log(*[0.02] * 8), config(**DISABLED)) == ["k3_uncorrected"]
    for engine in (engine for what, engine in ENGINES.items() if what):
        assert found(log(*[0.02] * 8), config(rollout_engine_kwargs=engine)) == []
    assert found(log(*[0.02] * 60), config()) == ["k3_early", "k3_lasting"]


def test_a_large_gap_of_fresh_weights_is_critical_at_once():
    for gap in (0.11, 0.29, 1.7, 1e24):
        for settings in (config(), config(**DISABLED), config(rollout_correction="trl"), None):
            window = {**CORRECTED, **FRESH, "k3_kl": gap, "kl": gap}
            alarm = examine(history(window), settings)[0]
            assert (alarm.bound, alarm.severity, alarm.step) == ("k3_at_start", "critical", 1)
            assert "Rounding does not explain it" in alarm.why
            assert "`rollout_diagnose: true`" in alarm.advice
            assert not re.search("harmless|8-bit|cache", str(alarm))
            later = examine(history(*[{**CORRECTED, **FRESH}] * 3, window, window), settings)
            assert "k3_at_start" not in [alarm.bound for alarm in later]
    diagnosed = examine(history({**CORRECTED, **FRESH, "k3_kl": 1.7}), config(rollout_diagnose=True))[0]
    assert diagnosed.advice.startswith("Read what `rollout_diagnose` says")


# How public reports and other fillers look: `kl` and `k3_kl`
BIASED = {
    "0.0 in 99.8 % of the places, of a public run": (0.0032, 1635.0),
    "the mean of the sequence": (0.0, 1.7),
    "another token": (-5.0, 4000.0),
}


@pytest.mark.parametrize("name", BIASED)
def test_fillers_make_the_mean_ratio_differ_from_1(name):
    kl, k3 = BIASED[name]
    ill = {**CORRECTED, **FRESH, "kl": kl, "k3_kl": k3}
    for quiet in (0, 20):
        log = history(*[{**CORRECTED, **FRESH}] * quiet, *[ill] * 9)
        assert "biased_ratio" in found(log, config())


@pytest.mark.parametrize("share", [0.98, 1.0, 1.04])
def test_the_ratio_of_healthy_runs_is_no_bias(share):
    for k3 in (0.001, 0.02, 0.2):
        log = history(*[{**CORRECTED, "kl": share * k3, "k3_kl": k3}] * 60)
        assert "biased_ratio" not in found(log, config())


def test_nothing_to_learn_names_answers_that_are_cut():
    idle = {**CORRECTED, "zero_advantage_fraction": 1.0}
    log = history(*[idle] * 7)
    (alarm,) = examine(log, config())
    assert (alarm.bound, alarm.severity, alarm.step) == ("nothing_to_learn", "warning", 7)
    assert "cut" not in alarm.advice
    (cut,) = examine([{**entry, "completions/clipped_ratio": 0.98} for entry in log], config())
    assert "A share of 0.98 of the completions is cut" in cut.advice
    learns = {**idle, "zero_advantage_fraction": 0.5}
    assert found(history(*[idle] * 6, learns, *[idle] * 6), config()) == []
    assert found(history(*[idle, {**idle, "zero_advantage_fraction": 0.9}] * 30), config()) == []
    # rounding leaves advantages of equal rewards, which TRL counts as a group without a spread
    rounded = [{**entry, "frac_reward_zero_std": 1.0} for entry in history(*[CORRECTED] * 7)]
    assert found(rounded, config()) == ["nothing_to_learn"]
