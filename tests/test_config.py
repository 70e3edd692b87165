"""Fields, presets, strict parsing, and the ways of a setting from the user to the settings in effect."""

import ast
import copy
import dataclasses
import json
import math
import pickle
import re
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import HfArgumentParser
from trl import TrlParser

import trl_rollout_corr
from tests.dumps import make_dump, read_dump
from tests.launching import HAS_ASYNCHRONOUS
from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedRLOOConfig, RolloutCorrectionConfig
from trl_rollout_corr.messages import SettingError, SettingWarning
from trl_rollout_corr.settings.criteria import CRITERIA, LEVELS
from trl_rollout_corr.settings.presets import PRESETS, UNSET, VERL_PRESETS, values_of_preset
from trl_rollout_corr.settings.resolve import FIELDS, PARSERS
from trl_rollout_corr.settings.trl_correction import OF_TRAINER
from trl_rollout_corr.settings.words import description_of
from trl_rollout_corr.tools.dump.folder import write_rows
from trl_rollout_corr.tools.dump.in_effect import read_settings, settings_in_effect
from trl_rollout_corr.tools.report.run import read_run


MACHINE = {"output_dir": "output", "use_cpu": True, "bf16": False, "report_to": []}
TRL = "vllm_importance_sampling_"
CLASSES = ["GRPO", "RLOO", *(["AsyncGRPO"] if HAS_ASYNCHRONOUS else [])]


def grpo(**fields):
    return RolloutCorrectedGRPOConfig(**MACHINE, **fields)


def settings(**fields):
    return RolloutCorrectionConfig(**fields).settings


quietly = pytest.mark.filterwarnings("ignore::trl_rollout_corr.messages.SettingWarning")


# A value of the user is never replaced --------------------------------------------------------------------------------


def bounds_of(criteria):
    """Thresholds that no preset has, for some criteria."""
    pairs = {"k1": [0.25, 3.0], "token_tv": [0.4, 0.6], "token_kl": [0.4, 0.6]}
    return [next((bounds for end, bounds in pairs.items() if name.endswith(end)), 0.75) for name in criteria]


def other_values(name, preset):
    """Fields with another value than the preset's for one of them, beside what this value needs."""
    value = preset[name]
    return {
        "rollout_is": [{"rollout_is": "geometric"}, {"rollout_is": None}],
        "rollout_is_threshold": [{"rollout_is_threshold": [[0.25, 4.0], [0.5, 3.0]]}, {"rollout_is_threshold": 7.0}],
        # without clamping, bounds that are equal would leave no weight
        "rollout_is_clamp": [{"rollout_is_clamp": not value, "rollout_is_threshold": [0.25, 4.0]}],
        "rollout_rs": [{"rollout_rs": ["turn_max_k2"], "rollout_rs_threshold": [0.7]}, {"rollout_rs": None}],
        "rollout_rs_threshold": [{"rollout_rs_threshold": bounds_of(preset["rollout_rs"] or ["token_k1"])}],
        "rollout_is_stale_only": [{"rollout_is_stale_only": not value}],
        "bypass_mode": [{"bypass_mode": not value}],
        "rollout_loss_type": [{"rollout_loss_type": "reinforce" if value == "ppo_clip" else "ppo_clip"}],
    }[name]


def takes_fields(name):
    """Whether fields may be given beside a preset."""
    try:
        settings(rollout_correction=name, rollout_is=values_of_preset(name)["rollout_is"])
    except SettingError:
        return False
    return True


def cases():
    """Presets, each with every field that it decides, equal to its value and different; and with all fields at once."""
    for name in PRESETS:
        if not takes_fields(name):
            yield {"rollout_correction": name}
            continue
        preset = values_of_preset(name)
        equal = {key: value for key, value in preset.items() if value is not None or key != "rollout_rs_threshold"}
        others = [other for field in UNSET for other in other_values(field, preset)]
        in_order = sorted(UNSET, key=lambda field: field == "rollout_rs")  # its threshold is that of these criteria
        everything = {key: value for field in in_order for key, value in other_values(field, preset)[0].items()}
        for given_fields in [*({key: value} for key, value in equal.items()), equal, *others, everything]:
            yield {"rollout_correction": name, **given_fields}


CASES = [*cases()]


def as_text(value):
    """A value on a command line, in verl's form."""
    if isinstance(value, list):
        return ",".join("_".join(map(str, part)) if isinstance(part, list) else str(part) for part in value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def as_threshold(value):
    """A pair of bounds stands alone in verl's form."""
    return as_text([value] if isinstance(value, list) and not isinstance(value[0], list | str) else value)


def on_command_line(config_class, fields):
    words = [
        word
        for name, value in fields.items()
        for word in (f"--{name}", as_threshold(value) if name == "rollout_is_threshold" else as_text(value))
    ]
    machine = ["--output_dir", "output", "--use_cpu", "--bf16", "false", "--report_to", "none"]
    return HfArgumentParser(config_class).parse_args_into_dataclasses([*machine, *words])[0]


def in_yaml(config_class, fields, file):
    file.write_text(yaml.safe_dump({**MACHINE, **fields}))
    return TrlParser(config_class).parse_args_and_config(["--config", str(file)])[0]


def replaced(config, **fields):
    """A copy with other fields. TRL refuses to build a configuration from values that it has derived itself."""
    derived = {name: None for name in ("generation_batch_size",) if hasattr(config, name)}
    return dataclasses.replace(config, **derived, **fields)


def saved_and_loaded(config):
    saved = json.loads(config.to_json_string())
    return type(config)(**MACHINE, **{name: saved[name] for name in FIELDS})


def check(config, fields):
    """Assert that fields given beside a preset have their values, and all others those of the preset."""
    found, preset = config.settings, values_of_preset(fields["rollout_correction"])
    if found.by_trl:
        preset |= OF_TRAINER[config._trainer](vars(config))
    if fields.get("rollout_rs", preset["rollout_rs"]) != preset["rollout_rs"]:
        preset["rollout_rs_threshold"] = None  # of other criteria
    for name, value in {**preset, **fields}.items():
        assert getattr(found, name) == value, name
    assert found.given == {name for name in fields if name not in UNSET or fields[name] != UNSET[name]}


@quietly
@pytest.mark.parametrize("name", CLASSES)
def test_a_value_of_the_user_is_never_replaced(name, tmp_path):
    config_class = getattr(trl_rollout_corr, f"RolloutCorrected{name}Config")
    other = config_class(**MACHINE, rollout_correction="decoupled_k3_rs")
    parsed = set()  # values that have passed the two parsers, which are slow
    for fields in CASES:
        config = config_class(**MACHINE, **fields)
        assert {key: getattr(config, key) for key in fields} == fields  # nothing is written back
        check(config, fields)
        values = {(key, repr(value)) for key, value in fields.items()}
        if name == "GRPO" and not values <= parsed:
            parsed |= values
            check(on_command_line(config_class, fields), fields)
            check(in_yaml(config_class, fields, tmp_path / "recipe.yaml"), fields)
        if len(fields) > len(UNSET) - 1:  # all at once
            check(replaced(other, **fields), fields)
            check(replaced(config, learning_rate=1e-5), fields)
            check(saved_and_loaded(config), fields)
            check(copy.deepcopy(config), fields)
            check(pickle.loads(pickle.dumps(config)), fields)


@quietly
@pytest.mark.parametrize("name", CLASSES)
def test_settings_in_effect_come_back_from_a_dump_as_they_are(name, tmp_path):
    config_class, found = getattr(trl_rollout_corr, f"RolloutCorrected{name}Config"), {}
    (row,) = read_dump(make_dump(tmp_path / "other", steps=1, rows=1, length=8, tools=False)).rows
    trl = [{f"{TRL}mode": mode} for mode in ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")]
    trl += [
        {f"{TRL}mode": "token_truncate", f"{TRL}clip_max": None, f"{TRL}clip_min": 0.9},
        {f"{TRL}correction": False},
    ]
    runs = [{"rollout_correction": name} for name in (*PRESETS, None)]
    runs += [{"rollout_correction": "trl", **fields} for fields in trl if name == "GRPO"]
    runs += [{"rollout_is": "geometric"}, {"rollout_correction": "trl", "rollout_nan_policy": "raise"}]
    for i, fields in enumerate(runs):
        config = config_class(**MACHINE, **fields)
        write_rows(tmp_path / str(i), 1, 0, [row], settings_in_effect(config, config.settings))
        assert read_run(str(tmp_path / str(i))).settings == config.settings, fields
        found[str(fields)] = config.settings
    assert len({*map(str, found.values())}) > len(PRESETS)


@pytest.mark.parametrize("name", CLASSES)
def test_the_correction_of_trl_is_that_of_its_trainer(name):
    config_class = getattr(trl_rollout_corr, f"RolloutCorrected{name}Config")
    colocated = {} if name == "AsyncGRPO" else {"use_vllm": True}
    found = config_class(**MACHINE, rollout_correction="trl", **colocated).settings
    kept = {
        "GRPO": ("decoupled", "sequence", [0.0, 3.0]),
        "RLOO": ("decoupled", None, 2.0),
        "AsyncGRPO": ("ppo_clip", None, 2.0),
    }
    assert (found.mode, found.rollout_is, found.rollout_is_threshold) == kept[name]
    assert found.rollout_clip_ratio_c == (None if name == "AsyncGRPO" else 3.0)


def test_what_to_do_with_broken_tokens_may_be_set_beside_the_correction_of_trl():
    assert settings(rollout_correction="trl").rollout_nan_policy == "neutralize"  # as TRL does
    assert settings(rollout_correction="trl", rollout_nan_policy="raise").rollout_nan_policy == "raise"


def test_a_dump_may_name_a_part_of_its_settings(tmp_path):
    assert read_settings({}) is None
    for fields in ({"rollout_correction": "trl"}, {"rollout_correction": "auto", "rollout_is": "window"}):
        assert read_settings(fields) == settings(**fields)
    of_trl = {"rollout_correction": "trl", "rollout_is": "token", "rollout_is_threshold": 2.0}
    assert read_settings(of_trl).bounding[:3] == ("token", None, 2.0)
    written = settings(rollout_correction="auto").fields
    decided = {
        "in_effect": True,
        "rollout_correction": "auto",
        "rollout_rs": ["token_k3"],
        "rollout_rs_threshold": 0.1,
    }
    assert read_settings(decided).bounding is None
    assert read_settings({**decided, "in_effect": False}).bounding == settings(rollout_correction="auto").bounding
    older = {key: value for key, value in written.items() if key != "rollout_diagnose"}
    assert read_settings(older) == settings(rollout_correction="auto")
    stopped = {**written, "rollout_monitor": "stop"}  # of an earlier release
    assert read_settings(stopped) == settings(rollout_correction="auto")
    given = {field.name: field.default for field in dataclasses.fields(RolloutCorrectionConfig)}
    assert read_settings(given) == settings()  # of a configuration, not of a run
    for name, value in [("rollout_is", 3), ("rollout_rs_threshold", [2.0]), ("rollout_magic", 1)]:
        with pytest.raises(ValueError, match=f"^`{name}` .*"):
            read_settings({**written, name: value})


@quietly
@given(st.data())
def test_no_combination_of_fields_replaces_a_value_of_the_user(data):
    preset = data.draw(st.sampled_from([*sorted(filter(takes_fields, PRESETS)), None]))
    of_preset = values_of_preset(preset)
    rows = {
        "rollout_is": [of_preset["rollout_is"], None, *LEVELS],
        "rollout_is_threshold": [of_preset["rollout_is_threshold"], 7.0, [0.25, 4.0], [[0.25, 4.0], [0.5, 3.0]]],
        "rollout_is_clamp": [True, False],
        "rollout_rs": [of_preset["rollout_rs"], None, ["token_k1"], ["seq_mean_k3", "token_tv"]],
        "bypass_mode": [True, False],
        "rollout_loss_type": ["ppo_clip", "reinforce"],
    }
    drawn = {name: data.draw(st.sampled_from([UNSET[name], *values])) for name, values in rows.items()}
    fields = {name: value for name, value in drawn.items() if value != UNSET[name]}
    in_effect = {**of_preset, **fields}
    bounds = in_effect["rollout_is_threshold"]
    equal = isinstance(bounds, list) and [1.0, 1.0] in bounds
    assume(in_effect["rollout_is"] is None or in_effect["rollout_is_clamp"] or not equal)  # no weight would be left
    if in_effect["rollout_rs"] != of_preset["rollout_rs"] or data.draw(st.booleans()):
        fields["rollout_rs_threshold"] = bounds_of(in_effect["rollout_rs"] or ["token_k1"])
    check(RolloutCorrectionConfig(rollout_correction=preset, **fields), {"rollout_correction": preset, **fields})


# What no preset is named for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "preset"),
    [
        ({}, "auto"),
        ({"rollout_nan_policy": "raise"}, "auto"),
        ({"rollout_diagnose": True}, "auto"),
        ({"rollout_metrics_only": True}, "auto"),
        ({"vllm_importance_sampling_mode": "token_truncate"}, "trl"),
        ({"vllm_importance_sampling_correction": False}, "trl"),
        ({"loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"}, "trl"),
    ],
)
def test_the_default_is_auto_and_trl_for_who_sets_its_correction(other, preset):
    of_trl = any(not name.startswith("rollout_") for name in other)
    for build in (partial(grpo, use_vllm=True),) if of_trl else (RolloutCorrectionConfig, grpo):
        assert build(**other).settings == build(rollout_correction=preset, **other).settings
        assert build(**other).settings.rollout_correction == preset
        assert build(**other).rollout_correction == "default"


@pytest.mark.parametrize(
    "field",
    [
        {"rollout_is_threshold": 3.0},
        {"rollout_is_clamp": True},
        {"rollout_is_batch_normalize": True},
        {"rollout_rs_threshold": [0.3, [0.01, 10.0]]},
        {"rollout_rs_renormalize": True},
        {"rollout_rs_exclude_from_baseline": True},
        {"rollout_loss_type": "reinforce"},
    ],
    ids=str,
)
def test_a_field_that_belongs_to_no_correction_is_refused(field):
    """It would be guessed which one is meant. Named, or with weights or a mode, it is clear."""
    ((name, _),) = field.items()
    for build in (RolloutCorrectionConfig, grpo):
        with pytest.raises(
            ValueError, match=rf"`{name}` is .*, but no correction is named.* `rollout_correction` to auto"
        ):
            build(**field)
        with pytest.raises(ValueError, match=f"`{name}` is .*, but `rollout_correction: trl` keeps the loss of TRL"):
            build(rollout_correction="trl", **field)


@pytest.mark.parametrize(
    ("fields", "level", "upper", "criteria"),
    [
        ({"rollout_is": "token"}, "token", 2.0, []),
        ({"rollout_is": "sequence", "rollout_is_threshold": 3.0}, "sequence", 3.0, []),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": 1.0}, None, 2.0, ["token_k2"]),
        ({"rollout_is": "token", "rollout_rs": "token_k2", "rollout_rs_threshold": 1.0}, "token", 2.0, ["token_k2"]),
        ({"rollout_is": None}, None, 2.0, []),
        ({"rollout_rs": "none"}, None, 2.0, []),
    ],
)
def test_weights_or_rejection_without_a_preset_are_all_that_is_done(fields, level, upper, criteria):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = settings(**fields)
    assert (found.rollout_is, found.rollout_is_threshold, found.rollout_rs or []) == (level, upper, criteria)
    assert (found.rollout_correction, found.mode) == (None, "decoupled")


@pytest.mark.parametrize("off", [None, False, "null", "none", "None", "false", "off"])
def test_off_is_off_and_fields_beside_it_act(off):
    assert not settings(rollout_correction=off).corrects
    assert settings(rollout_correction=off).rollout_correction is None
    rejecting = settings(rollout_correction=off, rollout_rs="token_k1", rollout_rs_threshold=2.0)
    assert (rejecting.rollout_is, rejecting.rollout_rs) == (None, ["token_k1"])


@quietly
def test_a_subclass_may_replace_a_default():
    @dataclasses.dataclass
    class Mine(RolloutCorrectedGRPOConfig):
        rollout_correction: str | None = "bypass_pg_is"
        rollout_is: str | None = "geometric"

    found = Mine(**MACHINE).settings
    assert (found.rollout_correction, found.rollout_is, found.mode) == ("bypass_pg_is", "geometric", "reinforce")
    assert Mine(**MACHINE, rollout_is=None).settings.bounding is None
    assert on_command_line(Mine, {"rollout_correction": "auto"}).settings.rollout_is == "geometric"


# Thresholds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "bounds"),
    [
        (3, (None, 3.0)),
        ("2.5", (None, 2.5)),
        (math.inf, (None, math.inf)),
        ([0.5, 5.0], (0.5, 5.0)),
        ((0, 3), (0.0, 3.0)),
        ("0.5_5.0", (0.5, 5.0)),
        ("[0.5, 5.0]", (0.5, 5.0)),
        (["5e-1", "inf"], (0.5, math.inf)),  # PyYAML reads 5e-1 and inf as text
    ],
)
def test_weight_thresholds(written, bounds):
    assert settings(rollout_is="token", rollout_is_threshold=written).bounding[1:3] == bounds


@pytest.mark.parametrize(
    "written", [[[0, 1], [1, 1]], "0_1,1_1", "[[0, 1], [1, 1]]", ["0_1", "1_1"], ((0, 1), (1, 1))]
)
def test_weight_thresholds_by_sign_of_the_advantage(written):
    bounding = settings(rollout_is="token", rollout_is_threshold=written, rollout_is_clamp=True).bounding
    assert (bounding.lower, bounding.upper, bounding.positive, bounding.drops) == (0.0, 1.0, (1.0, 1.0), False)
    with pytest.raises(ValueError, match=r"`rollout_is_threshold` is .*Set `rollout_is_clamp` to True, or wider"):
        settings(rollout_is="token", rollout_is_threshold=written)


@pytest.mark.parametrize("clamp", [{}, {"rollout_is_clamp": True}])
@pytest.mark.parametrize("bounds", [[[0, 1], [1, 2]], [[0, 3], [1, 1]]])
def test_bounds_beside_a_preset_keep_its_clamp(bounds, clamp):
    """A weight outside the bounds must not become 0 because the bounds have changed."""
    bounding = settings(rollout_correction="auto", rollout_is_threshold=bounds, **clamp).bounding
    assert [[bounding.lower, bounding.upper], [*bounding.positive]] == bounds
    assert bounding.clamps


@pytest.mark.parametrize(
    "written",
    [0.52, 0, -1, math.nan, True, "abc", "", "0.5_2_3", "1_000", "a_b", [2.0], [0.5, 2.0, 3.0], [2.0, 0.5], [1.5, 2.0],
     [0.2, 0.9], [-0.5, 2.0], [[0.5, 2.0], 3.0], {"upper": 2.0}, "[0.5_2, 3]", "nan",
     pytest.param(-(10**400), id="beyond all floats")],
)  # fmt: skip
def test_weight_thresholds_that_cannot_be_meant(written):
    with pytest.raises(ValueError, match="`rollout_is_threshold`"):
        RolloutCorrectionConfig(rollout_is_threshold=written)


@pytest.mark.parametrize("field", [{}, {"rollout_rs": "token_k1"}, {"rollout_rs": ["token_k1", "seq_mean_k1"]}])
@pytest.mark.parametrize(
    ("written", "explained"), [(0.52, True), ("0.52", True), (0.9995, True), (0.5, False), (0, False), ("abc", False)]
)
def test_the_yaml_trap_is_explained(field, written, explained):
    name = "rollout_rs_threshold" if field else "rollout_is_threshold"  # 0.52 is what YAML makes of 0.5_2
    with pytest.raises(ValueError, match=f"`{name}`") as error:
        RolloutCorrectionConfig(**field, **{name: written})
    assert ("unquoted 0.5_2 as the number 0.52: write the pair as [0.5, 2.0]" in str(error.value)) == explained


@pytest.mark.parametrize(
    ("criteria", "written", "parsed"),
    [
        ("token_k1", 2.0, [[0.5, 2.0]]),
        ("token_k1", [0.6, 1.6], [[0.6, 1.6]]),
        ("token_k1", "0.6_1.6", [[0.6, 1.6]]),
        ("token_k3", 0.01, [0.01]),
        (["token_k1", "seq_max_k2"], "0.6_1.6,2.5", [[0.6, 1.6], 2.5]),
        (["token_k1", "seq_max_k2"], ["0.6_1.6", "2.5"], [[0.6, 1.6], 2.5]),
        ("token_k1, seq_max_k2", "[[0.6, 1.6], 2.5]", [[0.6, 1.6], 2.5]),
        (["token_k1,seq_max_k2"], 2.0, [[0.5, 2.0], 2.0]),
        (["token_k1", "seq_mean_k1"], "0.5_2.0", [[0.5, 2.0], [0.5, 2.0]]),
        (["token_k1", "seq_mean_k1"], [2.0, 4.0], [[0.5, 2.0], [0.25, 4.0]]),
        ("seq_max_k1", ["1e-4", "inf"], [[1e-4, math.inf]]),
    ],
)
def test_rejection_thresholds(criteria, written, parsed):
    assert settings(rollout_rs=criteria, rollout_rs_threshold=written).rollout_rs_threshold == parsed


@pytest.mark.parametrize(
    ("criteria", "written", "message"),
    [
        ("token_k1", None, r"`rollout_rs_threshold` is not set"),
        ("token", 2.0, r"`rollout_rs` is .* 'token' is not a criterion. verl calls it 'token_k1' today. Allowed"),
        ("token_k4", 2.0, r"Allowed names"),
        (["token_k2", "token_k2"], 2.0, r"twice"),
        (3, 2.0, r"`rollout_rs` must be a list of names, got 3"),
        ("token_k1", 0.5, r"pair of bounds on the ratio.*got 0.5"),
        ("token_k1", [1.1, 2.0], r"0 <= lower <= 1 <= upper, got \[1.1, 2.0\]"),
        ("token_k2", [0.5, 2.0], r"`rollout_rs_threshold` for `token_k2` must be one upper bound"),
        ("token_k3", 0.0, r"positive upper bound"),
        ("token_k3", "many", r"made of numbers, got 'many'"),
        ("seq_max_k1", "0.0001_", r"is '0.0001_', which lacks a bound"),
        ("token_k3", True, r"made of numbers, got True"),
        ("token_tv", 1.5, r"`rollout_rs_threshold` for `token_tv` must be below 1"),
        (["token_k1", "token_k2", "token_k3"], [2.0, 0.1], r"one entry for each of the 3 criteria.*: 2 entries"),
        (["token_k1", "token_k2"], [0.6, 1.6], r"\[\[0.5, 2.0\], \[0.5, 2.0\]\]"),
        (["token_tv", "token_k1"], 0.3, r"for `token_k1` must be .* got 0.3"),
        ("token_k1", "[0.6, 1.6", r"not a list of numbers"),
        ("token_k1", "[0.5_2, 3]", r"got '0.5_2'. Write a pair as \[0.5, 2.0\].$"),
    ],
)
def test_rejection_thresholds_that_cannot_be_meant(criteria, written, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig(rollout_rs=criteria, rollout_rs_threshold=written)


@pytest.mark.parametrize("criteria", [["token_k1"], ["seq_mean_k1", "seq_max_k1"], "seq_sum_k2"])
def test_a_threshold_of_a_preset_is_not_that_of_other_criteria(criteria):
    with pytest.raises(ValueError, match="`rollout_rs_threshold` is not set"):
        settings(rollout_correction="decoupled_geo_rs_token_tis", rollout_rs=criteria)


# Values that are refused, or have no effect ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"rollout_is": "tokn"},
            "`rollout_is` must be one of token, window, turn, sequence, geometric, preset or None, got ",
        ),
        ({"rollout_loss_type": "grpo"}, "`rollout_loss_type` must be one of ppo_clip, reinforce or None, got 'grpo'"),
        ({"rollout_nan_policy": "ignore"}, "`rollout_nan_policy` must be one of drop, raise, neutralize"),
        ({"bypass_mode": "maybe"}, "`bypass_mode` must be true or false, got 'maybe'"),
        ({"rollout_rs_renormalize": 1}, "`rollout_rs_renormalize` must be true or false, got 1"),
        ({"rollout_correction": "best"}, "`rollout_correction` is 'best', which is not a preset. Common presets are "),
        ({"rollout_correction": "decoupled_tokn_is"}, "which is not a preset. Did you mean 'decoupled_token_is'"),
        (
            {"rollout_correction": "trl", "rollout_is": "token"},
            "`rollout_is` is 'token', but `rollout_correction: trl` keeps",
        ),
        ({"rollout_correction": True}, "`rollout_correction` must be the name of a preset, or None"),
        ({"rollout_correction": {"rollout_is": "token"}}, "`trl-rollout-corr convert` translates a section of verl"),
        (
            {"rollout_correction": "bypass_ppo_clip_k3_rs", "rollout_rs_exclude_from_baseline": True},
            "`rollout_rs_exclude_from_baseline` is True, but `bypass_mode`",
        ),
        (
            {"rollout_correction": "auto", "rollout_rs_exclude_from_baseline": True},
            "is True, but 'token_tv' in `rollout_rs` depends on the advantages",
        ),
        ({"rollout_monitor": "shout"}, "`rollout_monitor` must be one of warn or None, got 'shout'"),
        ({"rollout_monitor": "stop"}, "`rollout_monitor` must be one of warn or None, got 'stop'"),
        ({"rollout_routing": "repeat"}, "`rollout_routing` must be one of replay or None, got 'repeat'"),
        ({"rollout_monitor_bounds": "k3"}, "`rollout_monitor_bounds` must be numbers, or None, .* got 'k3'"),
        ({"rollout_monitor_bounds": '{"k3_high": "x"}'}, "for 'k3_high' must be a number, .* got 'x'"),
    ],
)
def test_wrong_values_name_the_field_and_the_way_out(wrong, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig(**wrong)


def test_a_refused_setting_is_data():
    with pytest.raises(SettingError) as caught:
        RolloutCorrectionConfig(rollout_rs="token_k2", rollout_rs_threshold=-1.0)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.field, error.value, error.allowed) == ("rollout_rs_threshold", -1.0, "a positive upper bound")
        assert str(error) == "`rollout_rs_threshold` for `token_k2` must be a positive upper bound, got -1.0."


@pytest.mark.parametrize(
    ("idle", "reason"),
    [
        ({"rollout_is": "token", "rollout_is_clamp": True}, "`rollout_is_threshold` is not a pair"),
        ({"rollout_clip_ratio_c": 2.0}, "in `bypass_mode` with `rollout_loss_type='ppo_clip'`"),
        ({"rollout_is": None, "rollout_is_threshold": 5.0}, "`rollout_is` is None"),
        ({"rollout_is": None, "rollout_is_batch_normalize": True}, "`rollout_is` is None"),
        (
            {"rollout_is": "token", "rollout_is_batch_normalize": True, "bypass_mode": True},
            "the weights are reported, not applied",
        ),
        ({"rollout_is": "token", "rollout_rs_threshold": 2.0}, "`rollout_rs` is not set"),
        ({"rollout_is": "token", "rollout_rs_renormalize": True}, "`rollout_rs` is not set"),
        ({"rollout_is": "token", "rollout_rs_exclude_from_baseline": True}, "`rollout_rs` is not set"),
        ({"rollout_is": "token", "rollout_loss_type": "reinforce"}, "`bypass_mode` is False"),
        ({"rollout_correction": "disabled", "rollout_metrics_only": True}, "there is no correction"),
        ({"rollout_monitor_bounds": {"k3_high": 1.0}, "rollout_monitor": None}, "`rollout_monitor` is None"),
        ({"rollout_dump_steps": 5}, "`rollout_dump_dir` is None"),
    ],
)
@pytest.mark.parametrize("build", [RolloutCorrectionConfig, grpo])
def test_fields_without_effect_are_warned_about_once(build, idle, reason):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(**idle)
    (message,) = [str(warning.message) for warning in caught]
    assert "has no effect" in message
    assert reason in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rollout_correction": "auto", "bypass_mode": True},
            "`bypass_mode` .* does not go with 'auto': its importance",
        ),
        (
            {"rollout_correction": "auto", "rollout_is": "sequence"},
            "`rollout_is` is 'sequence', but the bounds .* 'auto'",
        ),
        (
            {"rollout_correction": "disabled", "rollout_rs": "token_k2", "rollout_rs_threshold": 1.0},
            "`rollout_correction` is 'disabled', but `rollout_rs` is .*, which acts",
        ),
        ({"rollout_correction": "disabled", "rollout_is": "token"}, "is 'disabled', but `rollout_is` is 'token'"),
        ({"rollout_correction": "disabled", "bypass_mode": True}, "is 'disabled', but `bypass_mode` is True"),
    ],
)
def test_fields_that_do_not_go_together_are_warned_about_once(fields, message):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        RolloutCorrectionConfig(**fields)
    (found,) = [str(warning.message) for warning in caught]
    assert re.search(message, found)


@pytest.mark.parametrize(
    "fields",
    [
        {"rollout_correction": "auto", "rollout_is": "sequence", "rollout_is_threshold": 2.0},
        {"rollout_correction": "decoupled_token_is", "rollout_is": "sequence"},
        {"rollout_correction": "auto", "bypass_mode": True, "rollout_loss_type": "reinforce"},
        {"rollout_correction": None, "rollout_rs": "token_k2", "rollout_rs_threshold": 1.0},
    ],
)
def test_fields_that_go_together_are_not(fields):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RolloutCorrectionConfig(**fields)


# Presets --------------------------------------------------------------------------------------------------------------

EXPECTED_PRESETS = {
    "decoupled_token_is": ("token", 2.0, None, None, False),
    "decoupled_seq_is": ("sequence", 2.0, None, None, False),
    "decoupled_token_icepop": ("token", [0.5, 5.0], None, None, False),
    "decoupled_seq_is_rs": ("sequence", 2.0, ["seq_sum_k1"], [[0.5, 2.0]], False),
    "decoupled_geo_rs": (None, 2.0, ["seq_mean_k1"], [[0.999, 1.001]], False),
    "decoupled_geo_rs_seq_tis": ("sequence", 2.0, ["seq_mean_k1"], [[0.999, 1.001]], False),
    "decoupled_geo_rs_token_tis": ("token", 2.0, ["seq_mean_k1"], [[0.999, 1.001]], False),
    "decoupled_k3_rs": (None, 2.0, ["seq_mean_k3"], [0.01], False),
    "decoupled_k3_rs_seq_tis": ("sequence", 2.0, ["seq_mean_k3"], [0.01], False),
    "decoupled_k3_rs_token_tis": ("token", 2.0, ["seq_mean_k3"], [0.01], False),
    "bypass_ppo_clip": (None, 2.0, None, None, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": (None, 2.0, ["seq_mean_k1"], [[0.999, 1.001]], "ppo_clip"),
    "bypass_ppo_clip_k3_rs": (None, 2.0, ["seq_mean_k3"], [0.01], "ppo_clip"),
    "bypass_pg_is": ("sequence", 2.0, None, None, "reinforce"),
    "bypass_pg_token_icepop": ("token", [0.5, 5.0], None, None, "reinforce"),
    "bypass_pg_geo_rs": (None, 2.0, ["seq_mean_k1"], [[0.999, 1.001]], "reinforce"),
    "bypass_pg_geo_rs_seq_tis": ("sequence", 2.0, ["seq_mean_k1"], [[0.999, 1.001]], "reinforce"),
    "bypass_pg_geo_rs_token_tis": ("token", 2.0, ["seq_mean_k1"], [[0.999, 1.001]], "reinforce"),
    "disabled": (None, 2.0, None, None, False),
    "bypass_dppo_tv": ("token", 20.0, ["token_tv"], [[0.2, 0.2]], "reinforce"),
    "bypass_dppo_kl": ("token", 20.0, ["token_kl"], [[0.05, 0.05]], "reinforce"),
    "decoupled_kpop": ("token", math.inf, ["token_binary_kl"], [0.1], False),
    "decoupled_intellect3": ("token", [0.5, 5.0], ["seq_max_k1"], [[1e-5, math.inf]], False),
    "bypass_flash_reinforce": ("token", 20.0, ["seq_mean_binary_kl"], [0.003], "reinforce"),
    "trl": ("sequence", [0.0, 3.0], None, None, False),
    "auto": ("window", [[0.0, 1.0], [1.0, 1.0]], ["token_tv", "token_k1"], [[0.2, 0.2], [0.001, math.inf]], False),
}


@dataclasses.dataclass
class ConfigOfAUser(RolloutCorrectedGRPOConfig):
    mine: int = 0


@pytest.mark.parametrize("config_class", [RolloutCorrectionConfig, RolloutCorrectedRLOOConfig, ConfigOfAUser])
def test_a_warning_points_to_the_line_of_the_user(config_class, tmp_path):
    of_trl = {} if config_class is RolloutCorrectionConfig else {"output_dir": str(tmp_path), "bf16": False}
    with pytest.warns(SettingWarning, match="`rollout_dump_worst` is set to 9 but has no effect") as warned:
        config_class(rollout_dump_worst=9, **of_trl)
    (warning,) = [w for w in warned if issubclass(w.category, SettingWarning)]
    assert warning.filename == __file__
    assert "config_class(rollout_dump_worst" in Path(__file__).read_text().splitlines()[warning.lineno - 1]


EXPECTED_FLAGS = {"auto": (True, True)}  # `rollout_is_clamp`, `rollout_is_stale_only`; other presets set neither


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_values_of_the_reference_and_warn_about_nothing(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = settings(rollout_correction=name)
    mode = found.bypass_mode and found.rollout_loss_type
    weights = (found.rollout_is, found.rollout_is_threshold)
    assert (*weights, found.rollout_rs, found.rollout_rs_threshold, mode) == EXPECTED_PRESETS[name]
    assert (found.rollout_is_clamp, found.rollout_is_stale_only) == EXPECTED_FLAGS.get(name, (False, False))
    assert found.corrects == (name != "disabled")
    assert len(VERL_PRESETS) == 19
    assert "rollout_is" in PRESETS[name]  # every row states its weights


def test_presets_do_not_share_their_lists():
    found = settings(rollout_correction="decoupled_geo_rs")
    found.rollout_rs_threshold[0][0] = 0.5
    found.rollout_rs.append("token_k1")
    assert settings(rollout_correction="decoupled_geo_rs").rollout_rs_threshold == [[0.999, 1.001]]
    assert PRESETS["decoupled_geo_rs"]["rollout_rs"] == ["seq_mean_k1"]


AROUND_OLD = "PPO clips around the trainer's old policy"


@quietly
@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"rollout_correction": "trl"},
            "trl (TRL's loss, unchanged): each completion is weighted by its ratio (trainer to sampler), or by 0 outside "
            f"[0, 3]. {AROUND_OLD}.",
        ),
        (
            {"rollout_correction": "auto"},
            "auto: token importance weights (products of 16 ratios) while vLLM is behind, at most 1 for negative advantages "
            "and exactly 1 for positive ones. Tokens are rejected if the update would push them further out of a region of "
            "0.2 around vLLM's probability (token_tv), or if their ratio is below 0.001 (token_k1).",
        ),
        (
            {"rollout_is": "token", "rollout_is_stale_only": True},
            f"while vLLM is behind, each token is weighted by its ratio (trainer to sampler), at most 2. {AROUND_OLD}.",
        ),
        (
            {"rollout_is": "token"},
            f"each token is weighted by its ratio (trainer to sampler), at most 2. {AROUND_OLD}.",
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": [0.5, 2.0], "rollout_is_clamp": True},
            f"each token is weighted by its ratio (trainer to sampler), kept within [0.5, 2]. {AROUND_OLD}.",
        ),
        (
            {"rollout_correction": "decoupled_token_icepop", "rollout_is": "geometric"},
            "decoupled_token_icepop with changes: each completion is weighted by its mean ratio (trainer to sampler), or by 0 "
            f"outside [0.5, 5]. {AROUND_OLD}.",
        ),
        (
            {"rollout_correction": "bypass_pg_is", "rollout_loss_type": "ppo_clip"},
            "bypass_pg_is with changes: each completion is weighted by its ratio (trainer to sampler), at most 2, which is "
            "only reported. PPO clips around the sampler.",
        ),
        (
            {"rollout_rs": ["seq_mean_k1", "turn_max_k2"], "rollout_rs_threshold": [[0.5, 2.0], 0.1]},
            "completions are rejected if their mean ratio is outside [0.5, 2] (seq_mean_k1), and turns if their max k2 is "
            f"above 0.1 (turn_max_k2). {AROUND_OLD}.",
        ),
        (
            {"rollout_correction": "bypass_pg_is", "rollout_is": None, "rollout_metrics_only": True},
            "bypass_pg_is with changes (measured only): the loss is REINFORCE, without clipping.",
        ),
        ({"rollout_correction": "disabled"}, "disabled: no correction."),
        ({"rollout_correction": None}, "no correction."),
    ],
)
def test_the_line_of_a_run_says_what_is_done(fields, line):
    assert RolloutCorrectionConfig(**fields).description == line


@quietly
def test_the_line_of_a_run_with_trls_loss_names_what_is_not_its_default():
    mode = "vllm_importance_sampling_mode"
    for value, says in (
        ("sequence_mask", "TRL's loss, unchanged"),
        ("token_mask", f"TRL's loss with your `{mode}: token_mask`"),
    ):
        config = RolloutCorrectedGRPOConfig(**MACHINE, use_vllm=True, rollout_correction="trl", **{mode: value})
        assert config.description.startswith(f"trl ({says}): each ")


@quietly
@pytest.mark.parametrize(
    ("correction", "ends"),
    [
        (
            "auto",
            [
                "(token_k1)",
                "with GSPO, a completion gets the mean of its tokens' factors, where a rejected token counts 0.",
            ],
        ),
        ("decoupled_token_is", ["at most 2. ", "a completion gets the mean"]),
        ("decoupled_seq_is", ["at most 2. PPO clips around the trainer's old policy."]),
    ],
)
def test_the_line_of_a_run_with_gspo_says_what_a_completion_gets(correction, ends):
    fields = {"rollout_correction": correction, "importance_sampling_level": "sequence", "loss_type": "grpo"}
    line = grpo(**fields).description
    assert [end for end in ends if end.lower() not in line.lower()] == []
    assert ("GSPO" in line) == (correction != "decoupled_seq_is")
    assert "GSPO" not in grpo(rollout_correction=correction).description
    assert "GSPO" not in grpo(**{**fields, "loss_type": "cispo"}).description  # each token keeps its own gradient
    with warnings.catch_warnings():
        warnings.simplefilter("error", SettingWarning)
        grpo(**fields)


# Python, YAML, command line, files ------------------------------------------------------------------------------------


def test_what_is_assigned_is_in_effect_and_checked():
    config = RolloutCorrectionConfig()
    given = config.settings.given
    config.rollout_is_threshold, config.rollout_is_clamp = "0.5_2.0", False
    config.rollout_rs, config.rollout_rs_threshold = "token_k1, seq_max_k2", "0.6_1.6,2.5"
    assert config.check() == config.settings
    names = {"rollout_is_threshold", "rollout_is_clamp", "rollout_rs", "rollout_rs_threshold"}
    assert config.settings.given == {*given, *names}
    assert config.rollout_rs == "token_k1, seq_max_k2"
    assert [criterion.name for criterion in config.settings.criteria] == ["token_k1", "seq_max_k2"]
    config.rollout_rs = ["token_k1", "token_k2", "token_k3"]
    with pytest.raises(ValueError, match="one entry for each of the 3 criteria"):
        config.check()


@pytest.mark.parametrize("fields", [{}, {"rollout_correction": "bypass_pg_is"}, {"rollout_is": "token"}], ids=str)
def test_every_field_is_parsed_once_when_fields_are_checked(fields, monkeypatch):
    parsed = Counter()

    def counting(parse, value, name):
        parsed[name] += 1
        return parse(value, name)

    for name, parse in PARSERS.items():
        monkeypatch.setitem(PARSERS, name, partial(counting, parse))
    RolloutCorrectionConfig(**fields)
    assert parsed == dict.fromkeys(FIELDS, 1)
    parsed.clear()
    config = grpo(**fields)
    assert parsed == dict.fromkeys(FIELDS, 2)  # alone, and beside TRL's fields
    parsed.clear()
    settings = config.check()
    assert description_of(settings, vars(config))
    assert parsed == dict.fromkeys(FIELDS, 1)


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_command_line(parser):
    def parse(*words):
        words = ["--output_dir", "out", "--use_cpu", "--bf16", "false", *words]
        return parser(RolloutCorrectedGRPOConfig).parse_args_into_dataclasses(words)[0].settings

    weights = ("--rollout_is", "token")
    assert parse("--rollout_is", "none").rollout_is is None
    assert parse(*weights, "--rollout_is_threshold", "0.5_2").rollout_is_threshold == [0.5, 2.0]
    assert parse(*weights, "--rollout_is_threshold", "1", "5").rollout_is_threshold == [1.0, 5.0]
    assert parse("--rollout_correction", "bypass_ppo_clip", "--bypass_mode", "false").bypass_mode is False
    assert parse("--bypass_mode", "--rollout_loss_type", "reinforce").mode == "reinforce"
    assert parse("--rollout_correction", "auto", "--rollout_is_clamp", "true").rollout_is_clamp is True
    for criteria in (["token_k1", "seq_max_k2"], ["token_k1,seq_max_k2"]):
        for bounds in (["0.6_1.6,2.5"], ["[[0.6, 1.6], 2.5]"], ["0.6_1.6", "2.5"]):
            found = parse("--rollout_rs", *criteria, "--rollout_rs_threshold", *bounds)
            assert found.rollout_rs_threshold == [[0.6, 1.6], 2.5]
    found = parse("--rollout_rs", "seq_mean_k1", "--rollout_rs_threshold", "0.9", "1.1")
    assert found.rollout_rs_threshold == [[0.9, 1.1]]
    assert parse("--rollout_correction", "none").corrects is False
    assert parse("--rollout_clip_ratio_c", "none").rollout_clip_ratio_c is None
    assert parse("--rollout_monitor", "none").rollout_monitor is None
    assert parse("--rollout_routing", "none", "--rollout_dump_dir", "none").rollout_routing is None
    for bounds in ('{"k3_high": 1e-1, "staleness": null}', "{k3_high: 0.1, staleness: null}"):
        assert parse("--rollout_monitor_bounds", bounds).rollout_monitor_bounds == {"k3_high": 0.1, "staleness": None}
    colocated = ("--use_vllm", "--vllm_mode", "colocate")
    for arguments in ('{"dtype": "float16"}', "{dtype: float16}"):
        found = parse(*colocated, "--rollout_engine_kwargs", arguments).rollout_engine_kwargs
        assert found == {"dtype": "float16"}
    number = settings(rollout_engine_kwargs='{"gpu_memory_utilization": 1e-1}').rollout_engine_kwargs
    assert number == {"gpu_memory_utilization": 0.1}  # which is text in YAML


def test_help_and_docstring_have_every_field(capsys):
    with pytest.raises(SystemExit):
        HfArgumentParser(RolloutCorrectedGRPOConfig).parse_args_into_dataclasses(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Level of the importance weights" in text
    assert "100% " not in text
    for field in dataclasses.fields(RolloutCorrectionConfig):
        assert len(field.metadata["help"]) > 30
    assert [field.name for field in dataclasses.fields(RolloutCorrectionConfig)] == list(FIELDS)
    assert len(CRITERIA) == 26


def test_the_docstring_has_the_default_of_each_field():
    argument = r"^        (\w+) \(`.*?, \*optional\*(?:, defaults to `(.+)`)?\):$"
    found = re.findall(argument, RolloutCorrectionConfig.__doc__, re.MULTILINE)
    defaults = [(field.name, field.default) for field in dataclasses.fields(RolloutCorrectionConfig)]
    assert [(name, ast.literal_eval(default or "None")) for name, default in found] == defaults


# With TRL's fields ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"rollout_correction": "auto", "loss_type": "vespo"},
            "`loss_type` is 'vespo'.* or set `rollout_correction` to trl, or only measure",
        ),
        (
            {"use_vllm": True, "loss_type": "vespo"},
            "is 'sequence_mask', which TRL refuses .* Set it to token_truncate",
        ),
        (
            {"rollout_correction": "bypass_dppo_tv", "importance_sampling_level": "sequence"},
            "`importance_sampling_level` is 'sequence'.* the loss of `bypass_dppo_tv` .* Set `rollout_correction` to auto",
        ),
        (
            {"bypass_mode": True, "rollout_loss_type": "reinforce", "importance_sampling_level": "sequence"},
            "the loss of `rollout_loss_type='reinforce'` is a sum over tokens. Set it to 'token'",
        ),
        (
            {
                "rollout_correction": "bypass_pg_is",
                "rollout_is_batch_normalize": True,
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 8,
            },
            "its weight would always be 1. Set `per_device_train_batch_size` to 2 or more",
        ),
    ],
)
def test_combinations_that_cannot_work(wrong, message):
    with pytest.raises(ValueError, match=message):
        grpo(**wrong)


@pytest.mark.parametrize("config_class", [RolloutCorrectedGRPOConfig, RolloutCorrectedRLOOConfig])
@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"rollout_correction": "bypass_pg_is"}, True),
        ({"rollout_correction": "bypass_pg_is", "num_iterations": 1}, False),
        ({"rollout_correction": "bypass_pg_is", "rollout_metrics_only": True}, False),
        ({"rollout_correction": "bypass_ppo_clip"}, False),
        ({"rollout_correction": "decoupled_seq_is"}, False),
        ({"rollout_correction": "bypass_dppo_tv"}, False),  # a trust region, in the place of clipping
    ],
)
def test_reinforce_over_several_iterations_is_warned_about(config_class, options, warned):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config_class(**{**MACHINE, "num_iterations": 2, **options})
    found = [str(warning.message) for warning in caught if "has no clipping" in str(warning.message)]
    assert len(found) == warned
    if warned:
        assert found[0].startswith("`num_iterations` is 2 with `rollout_loss_type='reinforce'`")


CONFIGS = {
    "grpo": RolloutCorrectedGRPOConfig,
    "rloo": RolloutCorrectedRLOOConfig,
    **({"async": trl_rollout_corr.RolloutCorrectedAsyncGRPOConfig} if HAS_ASYNCHRONOUS else {}),
}
DPPO = {"rollout_correction": "bypass_dppo_tv"}


@pytest.mark.parametrize("trainer", CONFIGS)
@pytest.mark.parametrize(
    ("fields", "idle"),
    [
        ({**DPPO, "epsilon_high": 0.28}, ["epsilon_high"]),
        ({**DPPO, "epsilon": 0.1}, ["epsilon"]),
        ({**DPPO, "epsilon": 0.2}, []),  # the default
        ({"rollout_correction": "bypass_pg_is", "epsilon": 0.1, "epsilon_high": 0.3}, ["epsilon", "epsilon_high"]),
        ({"bypass_mode": True, "rollout_loss_type": "reinforce", "rollout_is": "token", "epsilon": 3e-4}, ["epsilon"]),
        ({**DPPO, "rollout_metrics_only": True, "epsilon_high": 0.28}, []),
        *[
            ({"rollout_correction": x, "epsilon_high": 0.28}, [])
            for x in ("trl", "auto", "bypass_ppo_clip", "disabled")
        ],
        ({**DPPO, "delta": 2.0}, ["delta"]),
        ({**DPPO, "delta": 0.5}, []),  # which stops every gradient, and so has an effect
        ({**DPPO, "loss_type": "cispo", "epsilon_high": 5.0}, []),  # which it demands
    ],
    ids=str,
)
def test_a_bound_of_ppo_without_effect_is_warned_about(trainer, fields, idle):
    if trainer != "grpo" and fields.keys() & {"delta", "loss_type"}:
        pytest.skip("a field of GRPO")

    def told(**more):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            CONFIGS[trainer](**MACHINE, **{**fields, **more})
        return [x.message for x in caught if isinstance(x.message, SettingWarning) and "clipped" in str(x.message)]

    found = told()
    assert [warning.field for warning in found] == idle
    for warning, name in zip(found, idle, strict=True):
        assert str(warning).startswith(f"`{name}` is set to {fields[name]!r} but has no effect: ")
        (remedy,) = re.findall(r"Remove it, or to clip set `(\w+)` to '?(\w+)", str(warning))
        assert told(**dict([remedy])) == []


# What cannot be meant -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["none", "null", "None"])
@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(RolloutCorrectionConfig)])
def test_a_command_line_takes_none_where_yaml_does(name, word, capsys):
    try:
        expected = settings(**{name: None})
    except ValueError:
        return  # no value of this field in YAML either
    (config,) = HfArgumentParser(RolloutCorrectionConfig).parse_args_into_dataclasses([f"--{name}", word])
    assert config.settings == expected


HUGE = 10**400
CANNOT_BE_MEANT = {
    "empty folder": ({"rollout_dump_dir": ""}, r"`rollout_dump_dir` must be the path .* got ''. .* current folder"),
    "blank folder": ({"rollout_dump_dir": " "}, r"`rollout_dump_dir` must be the path"),
    "empty preset": ({"rollout_correction": ""}, r"`rollout_correction` must be the name of a preset"),
    "huge limit": ({"rollout_monitor_bounds": {"staleness": HUGE}}, r"`rollout_monitor_bounds` for 'staleness' must"),
    "huge limit as JSON": ({"rollout_monitor_bounds": f'{{"staleness": {HUGE}}}'}, r"`rollout_monitor_bounds` for"),
    "huge dump": ({"rollout_dump_max_gb": HUGE}, r"`rollout_dump_max_gb` must be a number above 0"),
    "huge cap": ({"rollout_clip_ratio_c": HUGE}, r"`rollout_clip_ratio_c` must be a number"),
    "huge text": ({"rollout_is": "token", "rollout_is_threshold": str(HUGE)}, r"`rollout_is_threshold` must be made of"),
    "a change of 1.5": ({"rollout_rs": "seq_mean_tv", "rollout_rs_threshold": 1.5}, r"`seq_mean_tv` must be below 1"),
    "verl's first name": ({"rollout_rs": "geometric", "rollout_rs_threshold": 2.0}, r"verl calls it 'seq_mean_k1' today"),
}  # fmt: skip


@pytest.mark.parametrize("name", CANNOT_BE_MEANT)
def test_what_cannot_be_meant_is_refused(name):
    fields, message = CANNOT_BE_MEANT[name]
    with pytest.raises(SettingError, match=message):
        RolloutCorrectionConfig(**fields)


AUTO = {"rollout_correction": "auto"}
HARDLY_MEANT = {
    "a weight of 2000": ({"rollout_is": "token", "rollout_is_threshold": 2000}, r"`rollout_is_threshold` allows weights up"),
    "a weight by sign": ({**AUTO, "rollout_is_threshold": [[0, 500], [1, 1]]}, r"allows weights up to 500"),
    "a mean k3 of 5": ({"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 5}, r"`seq_mean_k3` is 5.0: .* about 0.001"),
    "a veto on a mean": ({"rollout_rs": "turn_mean_k1", "rollout_rs_threshold": [[1e-4, math.inf]]}, r"take `turn_max_k1`"),
    "no bound": ({"rollout_rs": "token_k1", "rollout_rs_threshold": math.inf}, r"so that nothing is rejected"),
    "no bound of k3": ({"rollout_rs": "token_k3", "rollout_rs_threshold": math.inf}, r"so that nothing is rejected"),
    "a cap of 1e6": ({"rollout_correction": "bypass_ppo_clip", "rollout_clip_ratio_c": 1e6}, r"`rollout_clip_ratio_c` is 1e"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARDLY_MEANT)
def test_what_can_hardly_be_meant_is_warned_about_once(name):
    fields, message = HARDLY_MEANT[name]
    with pytest.warns(UserWarning, match=message) as caught:
        RolloutCorrectionConfig(**fields)
    assert len(caught) == 1


OF_ONE_SIDE = {"rollout_correction": "decoupled_geo_rs", "rollout_rs_threshold": [[0.0, 1.01]]}


@pytest.mark.parametrize("fields", [*({"rollout_correction": name} for name in PRESETS), OF_ONE_SIDE])
def test_no_preset_and_no_missing_bound_is_warned_about(fields):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RolloutCorrectionConfig(**fields)


@pytest.mark.parametrize(("value", "allowed"), [(-9999, False), (0.5, False), (math.nan, False), (math.inf, True)])
def test_bounds_of_trl_are_refused_by_their_own_name(value, allowed):
    fields = {"rollout_correction": "trl", "use_vllm": True, "vllm_importance_sampling_clip_max": value}
    if allowed:
        assert grpo(**fields).settings.bounding.upper == value
    else:
        with pytest.raises(ValueError, match=r"^`vllm_importance_sampling_clip_max` must be"):
            grpo(**fields)


@pytest.mark.parametrize(
    ("config_class", "name", "hint"),
    [
        (RolloutCorrectionConfig, "rollout_token_veto_threshold", r"`rollout_rs: \[seq_max_k1\]`"),
        (RolloutCorrectedGRPOConfig, "rollout_is_veto_threshold", r"`rollout_rs: \[seq_max_k1\]`"),
        (RolloutCorrectionConfig, "rollout_is_level", r"Write the level as `rollout_is`"),
        (
            RolloutCorrectionConfig,
            "rollout_is_levle",
            r"Did you mean 'rollout_is_level', which is no field here either",
        ),
        (RolloutCorrectedGRPOConfig, "tis_imp_ratio_cap", r"`rollout_is: token`"),
        (RolloutCorrectedRLOOConfig, "loss_type", r"only GRPO has it"),
        (RolloutCorrectedRLOOConfig, "vllm_importance_sampling_mode", r"a field of TRL's GRPOConfig alone"),
        (
            RolloutCorrectionConfig,
            "use_vllm",
            r"a field for GRPO and RLOO. An asynchronous run always samples with a vLLM",
        ),
        (RolloutCorrectedGRPOConfig, "rollout_iss", r"Did you mean 'rollout_is'\?"),
    ],
)
def test_hints_about_names_lead_the_right_way(config_class, name, hint):
    machine = {} if config_class is RolloutCorrectionConfig else MACHINE
    with pytest.raises(TypeError, match=f"`{name}` is not a field of {config_class.__name__}.*{hint}"):
        config_class(**machine, **{name: "x"})


@pytest.mark.skipif(not HAS_ASYNCHRONOUS, reason="TRL's asynchronous trainer does not import")
@pytest.mark.parametrize(
    ("correction", "clips"),
    [("auto", False), ("decoupled_token_is", False), ("bypass_ppo_clip", True), ("trl", True), ("disabled", True)],
)
def test_in_asynchronous_training_a_decoupled_correction_clips_nothing(correction, clips):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trl_rollout_corr.RolloutCorrectedAsyncGRPOConfig(
            **MACHINE, rollout_correction=correction, epsilon=0.1, epsilon_high=0.28
        )
    told = [x.message.field for x in caught if isinstance(x.message, SettingWarning)]
    assert told == ([] if clips else ["epsilon", "epsilon_high"])


@pytest.mark.skipif(not HAS_ASYNCHRONOUS, reason="TRL's asynchronous trainer does not import")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_staleness": -1}, r"`max_staleness` must be 0 or more, got -1"),
        ({"weight_sync_steps": 0}, r"`weight_sync_steps` must be 1 or more, got 0"),
        ({"temperature": 0.0}, r"`temperature` must be a number of at least 0.01, got 0.0"),
    ],
)
def test_what_an_asynchronous_run_cannot_follow_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        trl_rollout_corr.RolloutCorrectedAsyncGRPOConfig(**MACHINE, **fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rollout_correction": "trl", "max_completion_length": 1024}, "keeps 59 % to 32 % of its loss on average"),
        ({TRL + "clip_max": 4.0, "max_completion_length": 16384}, r"keeps 1\.1 % to less than 0\.1 % of its loss"),
        (
            {TRL + "clip_max": None, "max_completion_length": 8192},
            r"the effective sample size of completions of `max_completion_length` \(8,192 tokens\) is less than 0\.1 %",
        ),
        (
            {"rollout_correction": "decoupled_seq_is", "max_completion_length": 4096},
            "of its loss on average. Set `rollout_correction` to auto: ",
        ),
        (
            {"rollout_correction": "trl", "max_completion_length": 4096},
            "Or set `vllm_importance_sampling_mode` to token_truncate, another correction of TRL's own: ",
        ),
        (
            {"rollout_is": "turn", "max_completion_length": 4096},
            "gives a turn one weight, .* of its loss on average. Set `rollout_correction` to auto and remove `rollout_is`: ",
        ),
        (
            {"rollout_rs": "turn_sum_k1", "rollout_rs_threshold": [0.5, 2.0], "max_completion_length": 8192},
            r"`turn_sum_k1` rejects 97 to 100 % of the healthy turns of `max_completion_length` \(8,192 tokens\)",
        ),
        (
            {"rollout_correction": "decoupled_seq_is_rs", "max_completion_length": 8192},
            "`seq_sum_k1` rejects 97 to 100 %",
        ),
        (
            {TRL + "correction": False, TRL + "mode": "token_mask", "max_completion_length": 8192},
            "`vllm_importance_sampling_correction` is False, so that nothing corrects the loss. Remove it",
        ),
        (  # as null in a file
            {TRL + "correction": None, TRL + "mode": "token_mask", "max_completion_length": 8192},
            "so that nothing corrects the loss. Remove it",
        ),
        ({"max_completion_length": 16384}, None),
        ({"rollout_correction": "trl", "max_completion_length": 256}, None),
        # rejects 30 percent with the smaller gap of healthy runs, and 55 with the larger one
        ({"rollout_correction": "decoupled_seq_is_rs", "max_completion_length": 256}, None),
        ({TRL + "mode": "token_truncate", "max_completion_length": 16384}, None),
        ({TRL + "correction": False, "max_completion_length": 16384}, None),
        ({"rollout_correction": "decoupled_token_is", "max_completion_length": 16384}, None),
        ({"rollout_correction": "disabled", "max_completion_length": 16384}, None),
        ({"rollout_is": "sequence", "rollout_metrics_only": True, "max_completion_length": 16384}, None),
    ],
)
def test_the_configuration_says_before_the_run_what_it_does_to_the_loss(fields, named):
    """The calculation of `docs/trl.md`. It speaks only of weights and bounds that act."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        grpo(use_vllm=True, **fields)
    told = [str(one.message) for one in caught if isinstance(one.message, SettingWarning)]
    assert any(re.search(named, message) for message in told) if named else told == []
    if HAS_ASYNCHRONOUS and fields.get("rollout_correction") == "trl":  # neither has weights
        with warnings.catch_warnings():
            warnings.simplefilter("error", SettingWarning)
            trl_rollout_corr.RolloutCorrectedAsyncGRPOConfig(**MACHINE, **fields)
            RolloutCorrectedRLOOConfig(**MACHINE, use_vllm=True, **fields)


# What works together --------------------------------------------------------------------------------------------------

REINFORCE = [name for name, fields in PRESETS.items() if fields.get("rollout_loss_type") == "reinforce"]
TOGETHER = {  # columns of the table in docs/choosing.md
    "RLOO": [{}],
    "asynchronous": [{}],
    "GSPO": [{"importance_sampling_level": "sequence"}],
    "another `loss_type`": [{"loss_type": name} for name in ("dr_grpo", "bnpo", "grpo", "sapo", "vespo", "cispo")],
    "`epsilon_high`, `delta`": [{"epsilon_high": 0.28}, {"delta": 2.0}],
}


def outcome(column: str, preset: str, fields: dict) -> str:
    """The word of the table for one configuration that is built."""
    classes = {"RLOO": "RLOO", "asynchronous": "AsyncGRPO"}
    config = getattr(trl_rollout_corr, f"RolloutCorrected{classes.get(column, 'GRPO')}Config")
    vllm = {} if column == "asynchronous" else {"use_vllm": True}
    if preset == "trl with token_truncate":
        preset, fields = "trl", {**fields, TRL + "mode": "token_truncate"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config(**MACHINE, rollout_correction=preset, **{**vllm, **fields})
        except (TypeError, ValueError) as error:
            return "`TypeError`" if isinstance(error, TypeError) else "error"
    told = [one.message for one in caught if isinstance(one.message, SettingWarning)]
    return "warning" if any(one.field != "max_completion_length" for one in told) else "works"


@pytest.mark.parametrize("column", TOGETHER)
def test_the_table_tells_what_works_together(column):
    """Each cell of the table in docs/choosing.md begins with what happens, and names the values that are refused."""
    if column == "asynchronous" and not HAS_ASYNCHRONOUS:
        pytest.skip("no asynchronous trainer")
    section = Path("docs/presets.md").read_text().split("## What works together")[1].split("\nGSPO is")[0]
    head, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    assert len(rows) == 7
    for row in rows:
        cell = row[head.index(column)]
        presets = ["trl with token_truncate"] if "with `token" in row[0] else re.findall("`([^`]+)`", row[0])
        for preset in [*presets[:-1], *REINFORCE] if "reinforce" in presets else presets:
            for fields in TOGETHER[column]:
                found = outcome(column, preset, fields)
                if column == "another `loss_type`":
                    assert (found == "error") == (f"`{fields['loss_type']}`" in cell), (preset, fields, found)
                else:
                    assert re.split("[,:;]", cell)[0] == found, (preset, fields, found)
