"""Fields, presets, strict parsing, and the round trips through YAML, command line and JSON."""

import dataclasses
import json
import math
import pickle
import re
import warnings

import pytest
from transformers import HfArgumentParser
from trl import TrlParser

from trl_rollout_corr import (
    RolloutCorrectedGRPOConfig,
    RolloutCorrectedRLOOConfig,
    RolloutCorrectionConfig,
)
from trl_rollout_corr.messages import SettingError
from trl_rollout_corr.settings.criteria import CRITERIA
from trl_rollout_corr.settings.presets import PRESETS, VERL_PRESETS


def fields(config):
    own = {f.name for f in dataclasses.fields(RolloutCorrectionConfig)}
    return {key: value for key, value in dataclasses.asdict(config).items() if key in own}


def grpo(**kwargs):
    return RolloutCorrectedGRPOConfig("output", use_cpu=True, bf16=False, report_to=[], **kwargs)


def test_what_no_preset_and_no_field_decides_are_truncated_token_weights():
    config = RolloutCorrectionConfig(rollout_is="token")
    assert (config.rollout_is, config.rollout_is_threshold) == ("token", 2.0)
    assert config.rollout_rs is None
    assert config.bypass_mode is False
    assert type(config.rollout_is) is str  # plain values, which JSON and YAML can hold
    assert type(config.rollout_is_threshold) is float
    assert config.settings.corrects


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
    assert RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=written).settings.bounding[1:3] == bounds


@pytest.mark.parametrize(
    "written", [[[0, 1], [1, 1]], "0_1,1_1", "[[0, 1], [1, 1]]", ["0_1", "1_1"], ((0, 1), (1, 1))]
)
def test_weight_thresholds_by_sign_of_the_advantage(written):
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=written, rollout_is_clamp=True)
    assert config.settings.bounding[1:3] == (0.0, 1.0)
    assert config.settings.bounding.positive == (1.0, 1.0)
    assert "token weights clamped to [0, 1], for positive advantages [1, 1];" in config.description
    with pytest.raises(
        ValueError, match=r"`rollout_is_threshold` is .*Set `rollout_is_clamp` to True, or wider bounds"
    ):
        RolloutCorrectionConfig(rollout_is_threshold=written)


def test_bounds_set_beside_a_preset_are_not_clamped_because_its_own_were():
    assert PRESETS["auto"]["rollout_is_clamp"]
    config = RolloutCorrectionConfig(rollout_correction="auto", rollout_is_threshold=[0.5, 5.0])
    assert config.settings.bounding.drops


@pytest.mark.parametrize(
    "written",
    [0.52, 0, -1, math.nan, True, "abc", "", "0.5_2_3", "1_000", "a_b", [2.0], [0.5, 2.0, 3.0], [2.0, 0.5], [1.5, 2.0],
     [0.2, 0.9], [-0.5, 2.0], [[0.5, 2.0], 3.0], {"upper": 2.0}, "[0.5_2, 3]", "nan", None,
     pytest.param(-(10**400), id="beyond all floats")],
)  # fmt: skip
def test_weight_thresholds_that_cannot_be_meant(written):
    with pytest.raises(ValueError, match="`rollout_is_threshold`"):
        RolloutCorrectionConfig(rollout_is_threshold=written)


@pytest.mark.parametrize(
    "field", [{}, {"rollout_rs": "token_k1"}, {"rollout_is": "token", "rollout_rs": ["token_k1", "seq_mean_k1"]}]
)
@pytest.mark.parametrize(
    ("written", "explained"),
    [(0.52, True), ("0.52", True), (0.9995, True), (0.5, False), (0, False), (-1, False), (0.001, False), ("abc", False),
     (True, False)],
)  # fmt: skip
def test_the_yaml_trap_is_explained(field, written, explained):
    name = "rollout_rs_threshold" if field else "rollout_is_threshold"  # 0.52 is what YAML makes of 0.5_2
    with pytest.raises(ValueError, match=f"`{name}`") as error:
        RolloutCorrectionConfig(**field, **{name: written})
    assert ("unquoted 0.5_2 as the number 0.52: write the pair as [0.5, 2.0]" in str(error.value)) == explained


def test_a_pair_within_a_list_of_text_is_told_how_to_be_written():
    with pytest.raises(ValueError, match=r"got '0.5_2'. Write a pair as \[0.5, 2.0\].$"):
        RolloutCorrectionConfig(rollout_is_threshold="[0.5_2, 3]")


@pytest.mark.parametrize(
    ("criteria", "written", "parsed"),
    [
        ("token_k1", 2.0, [[0.5, 2.0]]),
        ("token_k1", [0.6, 1.6], [[0.6, 1.6]]),
        ("token_k1", "0.6_1.6", [[0.6, 1.6]]),
        ("token_k3", 0.01, [0.01]),
        (["token_k1", "seq_max_k2"], "0.6_1.6,2.5", [[0.6, 1.6], 2.5]),
        (["token_k1", "seq_max_k2"], [[0.6, 1.6], 2.5], [[0.6, 1.6], 2.5]),
        ("token_k1, seq_max_k2", "[[0.6, 1.6], 2.5]", [[0.6, 1.6], 2.5]),
        (["token_k1,seq_max_k2"], 2.0, [[0.5, 2.0], 2.0]),
        (["token_k1", "seq_mean_k1"], "0.5_2.0", [[0.5, 2.0], [0.5, 2.0]]),
        (["token_k1", "seq_mean_k1"], [2.0, 4.0], [[0.5, 2.0], [0.25, 4.0]]),
        ("seq_max_k1", [1e-4, math.inf], [[1e-4, math.inf]]),
        ("seq_max_k1", ["1e-4", "inf"], [[1e-4, math.inf]]),
    ],
)
def test_rejection_thresholds(criteria, written, parsed):
    config = RolloutCorrectionConfig(rollout_is=None, rollout_rs=criteria, rollout_rs_threshold=written)
    assert config.rollout_rs_threshold == parsed
    assert RolloutCorrectionConfig(**fields(config)) == config


@pytest.mark.parametrize(
    ("criteria", "written", "message"),
    [
        ("token_k1", None, r"`rollout_rs_threshold` is not set"),
        ("token", 2.0, r"`rollout_rs` is .* 'token' is not a criterion.*Allowed names: token_k1"),
        ("token_k4", 2.0, r"Allowed names"),
        (["token_k2", "token_k2"], 2.0, r"twice"),
        (3, 2.0, r"`rollout_rs` must be a list of names, got 3"),
        ("token_k1", 0.5, r"pair of bounds on the ratio.*got 0.5"),
        ("token_k1", 0, r"got 0"),
        ("token_k1", [1.1, 2.0], r"0 <= lower <= 1 <= upper, got \[1.1, 2.0\]"),
        ("token_k2", [0.5, 2.0], r"`rollout_rs_threshold` for `token_k2` must be one upper bound"),
        ("token_k3", 0.0, r"positive upper bound"),
        ("token_k3", "many", r"made of numbers, got 'many'"),
        ("token_k3", True, r"made of numbers, got True"),
        (["token_k1", "token_k2", "token_k3"], [2.0, 0.1], r"one entry for each of the 3 criteria.*: 2 entries"),
        (["token_k1", "token_k2"], [0.6, 1.6], r"\[\[0.5, 2.0\], \[0.5, 2.0\]\]"),
        (["token_k1", "token_k2"], [[0.6, 1.6]], r"`token_k2` must be one upper bound"),
        ("token_k1", "[0.6, 1.6", r"not a list of numbers"),
    ],
)
def test_rejection_thresholds_that_cannot_be_meant(criteria, written, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig(rollout_rs=criteria, rollout_rs_threshold=written)


@pytest.mark.parametrize(
    ("first", "today"), [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")]
)
def test_criteria_by_their_first_names_are_told_the_name_today(first, today):
    for names in (first, [first], f"token_k2,{first}"):
        with pytest.raises(
            ValueError, match=rf"'{first}' is not a criterion. Did you mean '{today}', its present name\? Allowed"
        ):
            grpo(rollout_rs=names, rollout_rs_threshold=2.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rollout_is": "tokn"}, "`rollout_is` must be one of token, turn, sequence, geometric or None, got 'tokn'"),
        ({"rollout_loss_type": "grpo"}, "`rollout_loss_type` must be one of ppo_clip, reinforce, got 'grpo'"),
        ({"rollout_nan_policy": "ignore"}, "`rollout_nan_policy` must be one of drop, raise, neutralize"),
        ({"bypass_mode": "yes"}, "`bypass_mode` must be true or false, got 'yes'"),
        (
            {"rollout_correction": "best"},
            "`rollout_correction` is 'best', which is not a preset. Common presets are auto, ",
        ),
        (
            {"rollout_is": None, "rollout_rs_exclude_from_baseline": True, "bypass_mode": True},
            "`rollout_rs_exclude_from_baseline` is True, but `bypass_mode`",
        ),
    ],
)
def test_wrong_values_name_the_field_and_the_way_out(wrong, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig(**wrong)


@pytest.mark.parametrize(
    ("idle", "reason"),
    [
        ({"rollout_is": "token", "rollout_is_clamp": True}, "`rollout_is_threshold` is not a pair"),
        ({"rollout_clip_ratio_c": 2.0}, "in `bypass_mode` with `rollout_loss_type='ppo_clip'`"),
        ({"rollout_is": None, "rollout_is_threshold": 5.0}, "`rollout_is` is None"),
        ({"rollout_is": None, "rollout_is_batch_normalize": True}, "`rollout_is` is None"),
        ({"rollout_is_batch_normalize": True, "bypass_mode": True}, "reported, not applied"),
        ({"rollout_is": "token", "rollout_rs_threshold": 2.0}, "`rollout_rs` is not set"),
        ({"rollout_is": "token", "rollout_rs_renormalize": True}, "`rollout_rs` is not set"),
        ({"rollout_is": "token", "rollout_rs_exclude_from_baseline": True}, "`rollout_rs` is not set"),
        ({"rollout_is": "token", "rollout_loss_type": "reinforce"}, "`bypass_mode` is False"),
    ],
)
def test_options_without_effect_are_warned_about(idle, reason):
    with pytest.warns(UserWarning, match=f"has no effect.*{reason}"):
        RolloutCorrectionConfig(**idle)


# Presets --------------------------------------------------------------------------------------------------------------


def test_there_are_nineteen_presets_of_verl():
    assert len(VERL_PRESETS) == 19


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_warns_about_nothing(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = RolloutCorrectionConfig.from_preset(name)
        assert RolloutCorrectionConfig(**fields(config)) == config
    for key, value in PRESETS[name].items():
        assert getattr(config, key) == value
    assert config.settings.corrects == (name != "disabled")


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
    "auto": ("token", [[0.0, 1.0], [1.0, 1.0]], ["token_tv", "token_k1"], [[0.2, 0.2], [0.001, math.inf]], False),
}
# Those of verl's first version, and the names of today's presets that they come from
FIRST_PRESETS = {
    "token_is": ("decoupled_token_is", ("token", 2.0, None, None, False)),
    "token_tis": ("decoupled_token_is", ("token", 2.0, None, None, False)),
    "seq_is": ("decoupled_seq_is", ("sequence", 2.0, None, None, False)),
    "seq_is_rs": ("decoupled_seq_is_rs", ("sequence", 2.0, ["seq_sum_k1"], [[0.5, 2.0]], False)),
    "seq_mis": ("decoupled_seq_is_rs", ("sequence", 2.0, ["seq_sum_k1"], [[0.0, 2.0]], False)),
    "geo_rs": (
        "decoupled_geo_rs",
        (None, 2.0, ["seq_mean_k1", "seq_max_k1"], [[1 / 1.001, 1.001], [1e-4, math.inf]], False),
    ),
    "geo_mis": (
        "decoupled_geo_rs",
        (None, 2.0, ["seq_mean_k1", "seq_max_k1"], [[0.999, 1.001], [1e-4, math.inf]], False),
    ),
    "ppo_is_bypass": ("bypass_ppo_clip", ("token", 2.0, None, None, "ppo_clip")),
    "pure_is": ("bypass_pg_is", ("sequence", 2.0, None, None, "reinforce")),
    "disabled": ("disabled", (None, 2.0, None, None, False)),
}


@pytest.mark.parametrize("name", [*PRESETS, *FIRST_PRESETS])
def test_presets_have_the_values_of_the_reference(name):
    config = RolloutCorrectionConfig.from_preset(name)
    mode = config.bypass_mode and config.rollout_loss_type
    found = (config.rollout_is, config.rollout_is_threshold, config.rollout_rs, config.rollout_rs_threshold, mode)
    today, expected = FIRST_PRESETS.get(name, (name, EXPECTED_PRESETS.get(name)))
    assert found == expected
    assert config.rollout_correction == today


def test_fields_set_beside_a_preset_override_it_even_with_a_default_value():
    config = RolloutCorrectionConfig(rollout_correction="decoupled_seq_is", rollout_is="token")
    assert config.rollout_is == "token"
    config = RolloutCorrectionConfig.from_preset(
        "bypass_pg_geo_rs_seq_tis", bypass_mode=False, rollout_loss_type="ppo_clip"
    )
    assert not config.bypass_mode
    config = RolloutCorrectionConfig.from_preset("decoupled_token_icepop", rollout_is_threshold=2.0)
    assert config.rollout_is_threshold == 2.0
    config = RolloutCorrectionConfig.from_preset("decoupled_geo_rs_token_tis", rollout_rs=None)
    assert (config.rollout_rs, config.rollout_rs_threshold) == (None, None)
    config = RolloutCorrectionConfig.from_preset("decoupled_geo_rs", rollout_rs_threshold=[0.95, 1.05])
    assert config.rollout_rs_threshold == [[0.95, 1.05]]


def test_presets_do_not_share_their_lists():
    config = RolloutCorrectionConfig.from_preset("decoupled_geo_rs")
    config.rollout_rs_threshold[0][0] = 0.5
    config.rollout_rs.append("token_k1")
    assert RolloutCorrectionConfig.from_preset("decoupled_geo_rs").rollout_rs_threshold == [[0.999, 1.001]]
    assert PRESETS["decoupled_geo_rs"]["rollout_rs"] == ["seq_mean_k1"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("decoupled_tokn_is", ["decoupled_token_is"]),
        ("icepop", ["bypass_pg_token_icepop", "decoupled_token_icepop"]),
        ("token_icepop", ["bypass_pg_token_icepop", "decoupled_token_icepop"]),
        ("decoupled_icepop", ["decoupled_token_icepop"]),
        ("tis", ["token_tis", "decoupled_k3_rs_seq_tis", "decoupled_geo_rs_seq_tis", "bypass_pg_geo_rs_seq_tis"]),
        (
            "Token-TIS",
            ["token_tis", "decoupled_k3_rs_token_tis", "decoupled_geo_rs_token_tis", "bypass_pg_geo_rs_token_tis"],
        ),
        ("dppo", ["bypass_dppo_tv", "bypass_dppo_kl"]),
    ],
)
def test_an_unknown_preset_is_told_the_nearest_names_and_not_all(name, meant):
    with pytest.raises(ValueError, match="is not a preset") as error:
        RolloutCorrectionConfig(rollout_correction=name)
    assert {*PRESETS, *FIRST_PRESETS} & set(re.findall("'(.+?)'", str(error.value))) == set(meant)
    assert str(error.value).endswith("?")


def test_a_single_threshold_of_several_criteria_that_does_not_fit_all_asks_for_one_each():
    with pytest.raises(ValueError, match=r"for `token_k1` must be .* write one for each of token_tv, token_k1"):
        RolloutCorrectionConfig(rollout_correction="auto", rollout_rs_threshold=0.3)


@pytest.mark.parametrize("off", [None, False, "null", "none", "None", "false", "off"])
def test_off_is_off_and_fields_beside_it_override(off):
    config = RolloutCorrectionConfig(rollout_correction=off)
    assert not config.settings.corrects
    assert config.rollout_correction is None
    rejecting = RolloutCorrectionConfig(rollout_correction=off, rollout_rs="token_k1", rollout_rs_threshold=2.0)
    assert (rejecting.rollout_is, rejecting.rollout_rs) == (None, ["token_k1"])


def test_the_default_has_a_name():
    assert RolloutCorrectionConfig().description == RolloutCorrectionConfig(rollout_correction="auto").description
    assert (
        RolloutCorrectionConfig(rollout_metrics_only=True).rollout_correction == "auto"
    )  # the preset does not decide it
    assert grpo().rollout_correction == "auto"


@pytest.mark.parametrize(
    "mode",
    [
        {"bypass_mode": True},
        {"bypass_mode": False},
        {"bypass_mode": True, "rollout_loss_type": "reinforce"},
        {"bypass_mode": True, "rollout_loss_type": "ppo_clip"},
    ],
)
@pytest.mark.parametrize("build", [RolloutCorrectionConfig, grpo])
def test_the_mode_alone_leaves_the_default(build, mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = build(**mode)
    assert fields(config) == fields(build(rollout_correction="auto", **mode))
    assert config.rollout_rs == ["token_tv", "token_k1"]


def test_a_level_of_the_weights_is_a_whole_correction():
    for level in ("token", "sequence", None):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            config = RolloutCorrectionConfig(rollout_is=level)
        assert config == RolloutCorrectionConfig(rollout_correction="decoupled_token_is", rollout_is=level)
    assert grpo(rollout_is="token", rollout_is_threshold=3.0).rollout_rs is None


@pytest.mark.parametrize(
    "own",
    [
        {"rollout_is_threshold": 3.0},
        {"rollout_is_clamp": False},
        {"rollout_rs": ["token_k2"], "rollout_rs_threshold": 1.0},
        {"bypass_mode": True, "rollout_rs": ["token_k2"], "rollout_rs_threshold": 1.0},
        {"rollout_rs": None},
    ],
)
def test_a_change_of_no_preset_says_what_is_changed(own):
    first = next(name for name in own if name != "bypass_mode")
    rest = "so all other fields come from 'decoupled_token_is', not from the default 'auto'"
    with pytest.warns(UserWarning, match=f"`{first}` is set without a preset, {rest}"):
        config = RolloutCorrectionConfig(**own)
    assert config == RolloutCorrectionConfig(rollout_correction="decoupled_token_is", **own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RolloutCorrectionConfig(rollout_correction="decoupled_token_is", **own)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (True, "`rollout_correction` must be the name of a preset, a section of verl, "),
        (3, "`rollout_correction` must be"),
        (["decoupled_token_is"], "`rollout_correction` must be"),
        ({"rollout_iss": "token"}, "`rollout_iss` is 'token', which does not belong to a verl `rollout_correction`"),
        ({"loss_type": "x", "rollout_nan_policy": "drop"}, "`rollout_nan_policy` is 'drop', which does not belong"),
    ],
)
def test_what_cannot_be_a_correction_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig(rollout_correction=wrong)


def test_a_section_of_verl_as_rollout_correction():
    section = {"rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0", "bypass_mode": "true",
               "loss_type": "reinforce"}  # fmt: skip
    config = RolloutCorrectionConfig(rollout_correction=section)
    expected = RolloutCorrectionConfig.from_verl(section)
    for key in ("rollout_is", "rollout_rs", "rollout_rs_threshold", "bypass_mode", "rollout_loss_type"):
        assert getattr(config, key) == getattr(expected, key)
    assert (
        RolloutCorrectionConfig(rollout_correction={}).settings.corrects is False
    )  # verl's class computes no weights without a level
    assert RolloutCorrectionConfig(rollout_correction=section, rollout_is=None).rollout_is is None


def nested(tmp_path, text):
    """A configuration of GRPO from a YAML file with a mapping in it."""
    path = tmp_path / "recipe.yaml"
    path.write_text(f"output_dir: out\nuse_cpu: true\nbf16: false\n{text}")
    (config,) = TrlParser(RolloutCorrectedGRPOConfig).parse_args_and_config(["--config", str(path)])
    return config


def decided(config):
    return {name: getattr(config, name) for name in ("rollout_is", "rollout_rs", "bypass_mode", "rollout_nan_policy")}


def test_a_nested_section_in_a_yaml_file(tmp_path):
    section = "rollout_correction:\n  rollout_is: sequence\n  rollout_rs: seq_max_k2\n  rollout_rs_threshold: 2.5\n"
    config = nested(tmp_path, f"{section}  bypass_mode: true\n  loss_type: reinforce\nloss_type: grpo\n")
    assert decided(config) == {
        "rollout_is": "sequence", "rollout_rs": ["seq_max_k2"], "bypass_mode": True, "rollout_nan_policy": "drop"
    }  # fmt: skip
    assert (config.rollout_loss_type, config.loss_type) == ("reinforce", "grpo")
    assert nested(tmp_path, f"{section}rollout_is: token\n").rollout_is == "token"  # what stands beside it
    for field in ("rollout_iss", "rollout_nan_policy"):  # the second stands beside the section
        with pytest.raises(ValueError, match=f"`{field}` is 'raise', which does not belong to a verl"):
            nested(tmp_path, f"rollout_correction:\n  {field}: raise\n")


@pytest.mark.parametrize("name", ["bypass_pg_geo_rs_token_tis", "auto", "decoupled_k3_rs_seq_tis"])
def test_a_configuration_that_is_assigned_to_rollout_correction(name):
    given = RolloutCorrectionConfig.from_preset(name, rollout_is_threshold=4.0, rollout_nan_policy="raise")
    config = grpo(rollout_correction="decoupled_seq_is")
    config.rollout_correction = given
    config.check()
    assert fields(config) == fields(grpo(rollout_correction=given)) == fields(given)
    config.rollout_correction = "decoupled_token_is"
    config.check()
    assert (config.rollout_is, config.rollout_rs, config.bypass_mode) == ("token", None, False)
    own = grpo(rollout_is="geometric")
    own.rollout_correction = {"rollout_is": "token", "rollout_rs": "token_k2", "rollout_rs_threshold": 0.1}
    own.check()
    assert (own.rollout_is, own.rollout_rs) == ("geometric", ["token_k2"])  # what the user has set stays


@pytest.mark.parametrize("name", PRESETS)
def test_a_configuration_as_rollout_correction(name):
    given = RolloutCorrectionConfig.from_preset(name, rollout_is="geometric", rollout_nan_policy="raise")
    config = grpo(rollout_correction=given)
    assert fields(config) == fields(given)
    assert grpo(rollout_correction=given, rollout_nan_policy="neutralize").rollout_nan_policy == "neutralize"


# The line that describes a run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"rollout_is": "token"}, "decoupled_token_is; token weights up to 2; no rejection; decoupled"),
        (
            {"rollout_is": "token", "rollout_is_threshold": 3.0},
            "decoupled_token_is with changes; token weights up to 3; no rejection; decoupled",
        ),
        (
            {"rollout_is": "sequence", "bypass_mode": True, "rollout_loss_type": "reinforce"},
            "sequence weights up to 2; no rejection; bypass, reinforce",
        ),
        ({"rollout_is": None}, "no weights; no rejection; decoupled"),
        (
            {"rollout_correction": "ppo_is_bypass"},
            "bypass_ppo_clip with changes; token weights up to 2 (reported only); no rejection; bypass, ppo_clip",
        ),
        (
            {"rollout_correction": "bypass_pg_is", "rollout_loss_type": "ppo_clip"},
            "sequence weights up to 2 (reported only); no rejection; bypass, ppo_clip",
        ),
        (
            {"rollout_correction": "decoupled_k3_rs", "rollout_rs": "token_k3", "rollout_rs_threshold": 0.1},
            "no weights; token_k3 up to 0.1; decoupled",
        ),
        ({"rollout_correction": "disabled"}, "disabled; no weights; no rejection; decoupled"),
        (
            {"rollout_correction": "disabled", "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
            "no weights; token_k1 in [0.5, 2]; decoupled",
        ),
        ({"rollout_correction": None}, "no weights; no rejection; decoupled"),
        (
            {"rollout_correction": "decoupled_seq_is", "bypass_mode": True, "rollout_loss_type": "reinforce"},
            "sequence weights up to 2; no rejection; bypass, reinforce",
        ),
        (
            {"rollout_correction": "bypass_ppo_clip", "rollout_rs": "token_k2", "rollout_rs_threshold": 0.1},
            "bypass_ppo_clip with changes; no weights; token_k2 up to 0.1; bypass, ppo_clip",
        ),
    ],
)
def test_the_line_of_a_run_names_the_preset_as_far_as_it_is_in_effect(options, line):
    assert RolloutCorrectionConfig(**options).description == line


def test_the_line_of_a_run_follows_what_is_assigned():
    config = RolloutCorrectionConfig(rollout_correction="decoupled_geo_rs_token_tis")
    config.rollout_is = "sequence"
    assert config.description == (
        "decoupled_geo_rs_token_tis with changes; sequence weights up to 2; seq_mean_k1 in [0.999, 1.001]; decoupled"
    )
    config.rollout_rs = None
    assert config.description == "sequence weights up to 2; no rejection; decoupled"


# Bounds that are too narrow for the completions ----------------------------------------------------------------------------


@pytest.mark.parametrize("config_class", [RolloutCorrectedGRPOConfig, RolloutCorrectedRLOOConfig])
@pytest.mark.parametrize(
    ("length", "options", "share"),
    [
        # of the table of docs/choosing.md, for a spread of 0.04: 73 percent at 200 tokens, 46 at 1600
        (200, {"rollout_correction": "decoupled_geo_rs_token_tis"}, "73%"),
        (200, {"rollout_correction": "bypass_pg_geo_rs"}, "73%"),
        (1600, {"rollout_correction": "decoupled_geo_rs_token_tis"}, None),
        (200, {"rollout_correction": "decoupled_geo_rs_token_tis", "rollout_rs_threshold": [0.99, 1.01]}, None),
        (200, {"rollout_correction": "decoupled_geo_rs_token_tis", "rollout_metrics_only": True}, None),
        (200, {"rollout_correction": "auto"}, None),
    ],
)
def test_bounds_that_reject_most_of_a_healthy_batch_are_warned_about(config_class, length, options, share):
    fields = {"use_cpu": True, "bf16": False, "report_to": [], "max_completion_length": length, **options}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config_class("output", **fields)
    found = [str(w.message) for w in caught if "seq_mean_k1" in str(w.message)]
    assert len(found) == (share is not None)
    if share:
        assert f"{share} of completions would be rejected" in found[0]
        bounds = [float(x) for x in re.search(r"Set \[([\d.]+), ([\d.]+)\]", found[0]).groups()]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what it says to set is not warned about
            config_class("output", **fields, rollout_rs_threshold=bounds)


# Several visits without clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("config_class", [RolloutCorrectedGRPOConfig, RolloutCorrectedRLOOConfig])
@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"rollout_correction": "bypass_pg_is"}, True),
        ({"rollout_correction": "bypass_pg_token_icepop", "num_iterations": 4}, True),
        ({"rollout_correction": "bypass_pg_is", "num_iterations": 1}, False),
        ({"rollout_correction": "bypass_pg_is", "rollout_metrics_only": True}, False),
        ({"rollout_correction": "bypass_ppo_clip"}, False),
        ({"rollout_correction": "decoupled_seq_is"}, False),
        ({"rollout_correction": "bypass_dppo_tv"}, False),  # a trust region, in the place of clipping
    ],
)
def test_reinforce_over_several_iterations_is_warned_about(config_class, options, warned):
    fields = {"use_cpu": True, "bf16": False, "report_to": [], "num_iterations": 2, **options}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config_class("output", **fields)
    found = [str(warning.message) for warning in caught if "has no clipping" in str(warning.message)]
    assert len(found) == warned
    if warned:
        assert found[0].startswith(
            f"`num_iterations` is {fields['num_iterations']} with `rollout_loss_type='reinforce'`"
        )


# What is changed afterwards -------------------------------------------------------------------------------------------


def replaced(config, name):
    return dataclasses.replace(config, rollout_correction=name)


def edited(config, name):
    return RolloutCorrectionConfig(**{**json.loads(json.dumps(fields(config))), "rollout_correction": name})


def assigned(config, name):
    config.rollout_correction = name
    config.check()  # as a trainer does when it is built
    return config


@pytest.mark.parametrize("change", [replaced, edited, assigned])
@pytest.mark.parametrize("before", ["decoupled_token_is", "bypass_pg_geo_rs_seq_tis", "disabled"])
@pytest.mark.parametrize("after", ["decoupled_geo_rs", "bypass_ppo_clip", "disabled", None])
def test_a_preset_that_is_set_afterwards_takes_effect(change, before, after):
    expected = RolloutCorrectionConfig(rollout_correction=after)
    assert fields(change(RolloutCorrectionConfig.from_preset(before), after)) == fields(expected)
    own = RolloutCorrectionConfig.from_preset(before, rollout_is="geometric")
    assert change(own, after).rollout_is == "geometric"  # what the user has set stays


def test_a_field_that_is_edited_in_a_saved_configuration_takes_effect():
    saved = fields(RolloutCorrectionConfig.from_preset("decoupled_seq_is"))
    assert RolloutCorrectionConfig(**{**saved, "rollout_is": "geometric"}).rollout_is == "geometric"


def test_an_assigned_threshold_means_what_it_means_in_the_constructor():
    assigned, given = RolloutCorrectionConfig(), RolloutCorrectionConfig("auto", rollout_is_threshold=[0.5, 5.0])
    assigned.rollout_is_threshold = [0.5, 5.0]
    assigned.check()
    assert assigned.description == given.description
    assert not assigned.rollout_is_clamp
    own = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=[0.5, 2.0], rollout_is_clamp=True)
    own.rollout_is_threshold = [0.5, 5.0]
    own.check()
    assert own.rollout_is_clamp


def test_what_is_assigned_is_parsed():
    config = RolloutCorrectionConfig()
    config.rollout_is_threshold = "0.5_2.0"
    config.rollout_rs, config.rollout_rs_threshold = "token_k1, seq_max_k2", "0.6_1.6,2.5"
    config.check()
    assert config.settings.bounding[1:3] == (0.5, 2.0)
    assert [criterion.name for criterion in config.settings.criteria] == ["token_k1", "seq_max_k2"]
    assert config.settings.criteria[1].upper == 2.5
    config.rollout_is = "tokens"
    with pytest.raises(ValueError, match="`rollout_is` must be one of"):
        config.check()
    config.rollout_is, config.rollout_rs = "token", ["token_k1", "token_k2", "token_k3"]
    with pytest.raises(ValueError, match="one entry for each of the 3 criteria"):
        config.check()


def test_the_class_methods_of_the_first_version():
    def settings(config):
        return config.rollout_is, config.rollout_is_threshold, config.rollout_rs, config.rollout_rs_threshold

    assert settings(RolloutCorrectionConfig.token_is(threshold=3.0)) == ("token", 3.0, None, None)
    assert settings(RolloutCorrectionConfig.token_tis(3.0)) == ("token", 3.0, None, None)
    assert settings(RolloutCorrectionConfig.seq_is(4.0)) == ("sequence", 4.0, None, None)
    assert settings(RolloutCorrectionConfig.seq_is_rs(is_threshold=3.0, rs_threshold=4.0)) == (
        "sequence", 3.0, ["seq_sum_k1"], [[0.25, 4.0]]
    )  # fmt: skip
    assert settings(RolloutCorrectionConfig.seq_mis(4.0)) == ("sequence", 4.0, ["seq_sum_k1"], [[0.0, 4.0]])
    assert settings(RolloutCorrectionConfig.geo_rs(1.25, veto_threshold=1e-3)) == (
        None, 2.0, ["seq_mean_k1", "seq_max_k1"], [[0.8, 1.25], [1e-3, math.inf]]
    )  # fmt: skip
    assert settings(RolloutCorrectionConfig.geo_mis(1.1, 0.8, None)) == (None, 2.0, ["seq_mean_k1"], [[0.8, 1.1]])
    assert RolloutCorrectionConfig.ppo_is_bypass(3.0).settings.clips_around_sampler
    assert RolloutCorrectionConfig.pure_is(3.0).rollout_loss_type == "reinforce"
    assert not RolloutCorrectionConfig.disabled().settings.corrects
    assert settings(RolloutCorrectionConfig.seq_is(rollout_is="token")) == ("token", 2.0, None, None)
    with pytest.raises(TypeError):
        RolloutCorrectionConfig.disabled(2.0)
    for name in FIRST_PRESETS:
        assert fields(getattr(RolloutCorrectionConfig, name)()) == fields(RolloutCorrectionConfig.from_preset(name))
        # `config.disabled` would be a method, and true
        assert not hasattr(RolloutCorrectionConfig(), name)


@pytest.mark.parametrize("given", ["seq_mis", {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}])
def test_a_criterion_does_not_get_the_threshold_of_the_one_that_it_replaces(given):
    with pytest.raises(ValueError, match="`rollout_rs_threshold` is not set"):
        RolloutCorrectionConfig(rollout_correction=given, rollout_rs="token_k2")
    assert RolloutCorrectionConfig(rollout_correction=given, rollout_rs=None).settings.criteria == ()


# YAML, command line, JSON ---------------------------------------------------------------------------------------------


def test_yaml(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "output_dir: out\nuse_cpu: true\nbf16: false\nrollout_correction: decoupled_seq_is\nrollout_is: token\n"
        "rollout_rs: [token_k1, seq_max_k1]\nrollout_rs_threshold: [[0.6, 1.6], [1e-4, inf]]\nbypass_mode: false\n"
    )
    (config,) = TrlParser(RolloutCorrectedGRPOConfig).parse_args_and_config(["--config", str(path)])
    assert config.output_dir == "out"
    assert config.rollout_is == "token"
    assert config.rollout_rs_threshold == [[0.6, 1.6], [1e-4, math.inf]]


def test_yaml_null_is_none_and_unset_fields_come_from_the_preset(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "output_dir: out\nuse_cpu: true\nbf16: false\nrollout_correction: bypass_pg_is\nrollout_is: null\n"
    )
    (config,) = TrlParser(RolloutCorrectedGRPOConfig).parse_args_and_config(["--config", str(path)])
    assert config.rollout_is is None
    assert config.rollout_loss_type == "reinforce"


def test_misspelt_yaml_keys_are_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("output_dir: out\nuse_cpu: true\nbf16: false\nrollout_iss: token\n")
    with pytest.raises(ValueError, match="rollout_iss"):
        TrlParser(RolloutCorrectedGRPOConfig).parse_args_and_config(["--config", str(path)])


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_command_line(parser):
    def parse(*arguments):
        arguments = ["--output_dir", "out", "--use_cpu", "--bf16", "false", *arguments]
        return parser(RolloutCorrectedGRPOConfig).parse_args_into_dataclasses(arguments)[0]

    weights = ("--rollout_is", "token")
    assert parse().rollout_is == "token"
    assert parse("--rollout_correction", "decoupled_seq_is").rollout_is == "sequence"
    assert parse("--rollout_correction", "decoupled_seq_is", "--rollout_is", "token").rollout_is == "token"
    assert parse("--rollout_is", "none").rollout_is is None
    assert parse("--rollout_is", "token", "--rollout_is_threshold", "0.5_5.0").rollout_is_threshold == [0.5, 5.0]
    assert parse("--bypass_mode").bypass_mode is True
    assert parse("--rollout_correction", "bypass_ppo_clip", "--bypass_mode", "false").bypass_mode is False
    config = parse(*weights, "--rollout_rs", "token_k1", "seq_max_k2", "--rollout_rs_threshold", "0.6_1.6,2.5")
    assert config.rollout_rs_threshold == [[0.6, 1.6], 2.5]
    config = parse(*weights, "--rollout_rs", "token_k1,seq_max_k2", "--rollout_rs_threshold", "[[0.6, 1.6], 2.5]")
    assert config.rollout_rs_threshold == [[0.6, 1.6], 2.5]
    assert parse("--rollout_is", "token", "--rollout_is_threshold", "1", "5").rollout_is_threshold == [1.0, 5.0]
    config = parse(*weights, "--rollout_rs", "seq_mean_k1", "--rollout_rs_threshold", "0.9", "1.1")
    assert config.rollout_rs_threshold == [[0.9, 1.1]]
    config = parse(*weights, "--rollout_rs", "token_k1", "seq_max_k2", "--rollout_rs_threshold", "0.6_1.6", "2.5")
    assert config.rollout_rs_threshold == [[0.6, 1.6], 2.5]
    assert parse("--rollout_correction", "none").settings.corrects is False
    assert parse("--rollout_clip_ratio_c", "none").rollout_clip_ratio_c is None
    assert parse("--rollout_routing", "none").rollout_routing is None
    assert parse("--rollout_routing", "replay").rollout_routing == "replay"
    with pytest.raises(ValueError, match="`rollout_routing` must be one of replay or None, got 'repeat'"):
        parse("--rollout_routing", "repeat")
    with pytest.raises(ValueError, match="at least 1"):
        parse("--rollout_is_threshold", "0.52")


def test_help_shows_the_defaults(capsys):
    with pytest.raises(SystemExit):
        HfArgumentParser(RolloutCorrectedGRPOConfig).parse_args_into_dataclasses(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "token, turn, sequence, geometric, or none. (default: token)" in text
    assert "in place of the old policy's. (default: False)" in text


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip(name):
    config = RolloutCorrectionConfig.from_preset(name)
    assert RolloutCorrectionConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    saved = json.loads(grpo(rollout_correction=name).to_json_string())
    assert RolloutCorrectionConfig(**{key: saved[key] for key in fields(config)}) == config


# With TRL's fields ----------------------------------------------------------------------------------------------------


def test_positional_output_dir_and_both_post_inits():
    config = RolloutCorrectedGRPOConfig.from_preset("decoupled_geo_rs", output_dir="o", use_cpu=True, bf16=False)
    assert config.output_dir == "o"
    assert config.steps_per_generation == config.gradient_accumulation_steps  # set by GRPOConfig.__post_init__
    assert config.rollout_rs == ["seq_mean_k1"]
    assert grpo().output_dir == "output"


def test_trl_correction_is_replaced():
    assert grpo().vllm_importance_sampling_correction is False
    with pytest.warns(UserWarning, match="`vllm_importance_sampling_clip_max=5.0` has no effect.*from_trl"):
        grpo(vllm_importance_sampling_clip_max=5.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"loss_type": "vespo"}, "`loss_type` is 'vespo'"),
        (
            {"rollout_correction": "bypass_pg_is", "importance_sampling_level": "sequence"},
            "`importance_sampling_level` is 'sequence'",
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


def test_vespo_can_be_measured():
    assert grpo(loss_type="vespo", rollout_metrics_only=True).loss_type == "vespo"
    assert grpo(loss_type="vespo", rollout_correction="disabled").loss_type == "vespo"


def test_every_field_has_help_and_every_criterion_is_documented():
    for field in dataclasses.fields(RolloutCorrectionConfig):
        assert field.metadata["help"]
        assert f"{field.name} (`" in RolloutCorrectionConfig.__doc__
    assert len(CRITERIA) == 24


@pytest.mark.parametrize("criteria", [["token_k1"], ["token_k1", "seq_max_k1"], "seq_sum_k2"])
def test_a_threshold_of_a_preset_is_not_that_of_other_criteria(criteria):
    with pytest.raises(ValueError, match="`rollout_rs_threshold` is not set"):
        RolloutCorrectionConfig(rollout_correction="decoupled_geo_rs_token_tis", rollout_rs=criteria)
    same = RolloutCorrectionConfig(rollout_correction="decoupled_geo_rs_token_tis", rollout_rs=["seq_mean_k1"])
    assert same.rollout_rs_threshold == [[0.999, 1.001]]


# Monitor and dump -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_monitor": "shout"}, "`rollout_monitor` must be one of warn, stop or None, got 'shout'"),
        ({"rollout_tracked_metrics": "some"}, "`rollout_tracked_metrics` must be one of essential, all"),
        ({"rollout_monitor_bounds": {"k3": 1}}, "`rollout_monitor_bounds` has 'k3', which is not a bound"),
        ({"rollout_monitor_bounds": '{"k3_high": "x"}'}, "sets 'k3_high' to 'x', which must be a number"),
        ({"rollout_monitor_bounds": "k3_high"}, "such as .* on a command line; got 'k3_high'"),
    ],
)
def test_monitors_that_cannot_be_meant(fields, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig(**fields)


def test_a_monitor_from_a_command_line():
    assert RolloutCorrectionConfig(rollout_monitor="none").rollout_monitor is None
    thresholds = RolloutCorrectionConfig(rollout_monitor_bounds='{"k3_high": 0.1, "staleness": null}')
    assert thresholds.rollout_monitor_bounds == {"k3_high": 0.1, "staleness": None}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rollout_monitor_bounds": {"k3_high": 1.0}, "rollout_monitor": None}, "`rollout_monitor` is None"),
        ({"rollout_dump_steps": 5}, "`rollout_dump_dir` is None"),
    ],
)
def test_options_of_what_is_off_are_warned_about(fields, reason):
    with pytest.warns(UserWarning, match=f"has no effect: {reason}"):
        RolloutCorrectionConfig(**fields)


def test_a_refused_setting_is_data():
    with pytest.raises(SettingError) as caught:
        RolloutCorrectionConfig(rollout_rs="token_k2", rollout_rs_threshold=-1.0)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.field, error.value, error.allowed) == ("rollout_rs_threshold", -1.0, "a positive upper bound")
        assert str(error) == "`rollout_rs_threshold` for `token_k2` must be a positive upper bound, got -1.0."


def test_a_correction_of_trl_that_is_switched_off_does_not_switch_off_ours_in_silence(tmp_path):
    """A user who moves a script may expect a run without correction."""
    machine = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": []}
    off = {**machine, "vllm_importance_sampling_correction": False}
    with pytest.warns(UserWarning, match=r"switches TRL's own correction off.* Its own correction is 'auto'"):
        args = RolloutCorrectedGRPOConfig(**off)
    assert args.settings.corrects
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for named in ({"rollout_correction": "auto"}, {"rollout_correction": "disabled"}, {"rollout_is": "token"}):
            RolloutCorrectedGRPOConfig(**off, **named)
        RolloutCorrectedGRPOConfig(**machine)
        pickle.loads(pickle.dumps(args))
