"""Settings of verl, of its first releases, and of TRL."""

import math
import warnings

import pytest
import torch

from trl_rollout_corr import RolloutCorrectionConfig, compute_rollout_correction


def describe(config):
    return (config.rollout_is, config.rollout_is_threshold, config.rollout_rs, config.rollout_rs_threshold)


def test_verl_off():
    assert not RolloutCorrectionConfig.from_verl(None).settings.corrects
    assert not RolloutCorrectionConfig.from_verl({}).settings.corrects


def test_verl_section():
    with pytest.warns(
        UserWarning, match=r"`token_k1` to the inverse.*\[0.6, 1.6\] there keeps ratios in \[0.625, 1.66667\]"
    ):
        config = RolloutCorrectionConfig.from_verl(
            {
                "_target_": "verl.trainer.config.RolloutCorrectionConfig",
                "rollout_is": "token",
                "rollout_is_threshold": 2.0,
                "rollout_is_batch_normalize": False,
                "rollout_rs": "token_k1,seq_max_k2",
                "rollout_rs_threshold": "0.6_1.6,2.5",
                "bypass_mode": True,
                "loss_type": "ppo_clip",
            }
        )
    assert describe(config) == ("token", 2.0, ["token_k1", "seq_max_k2"], [[1 / 1.6, 1 / 0.6], 2.5])
    assert config.bypass_mode


@pytest.mark.parametrize("bounds", ["0.5_2.0", "2.0"])
def test_reciprocal_bounds_need_no_translation(bounds):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = RolloutCorrectionConfig.from_verl({"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": bounds})
    assert config.rollout_rs_threshold == [[0.5, 2.0]]


@pytest.mark.filterwarnings("ignore:verl applies")
def test_a_ported_run_rejects_what_verl_rejected():
    # measured on verl 0.9.1 with token_k1 0.6_1.6
    ratios, kept = torch.tensor([[0.61, 0.63, 1.62, 1.66, 1.70]]), [False, True, True, True, False]
    config = RolloutCorrectionConfig.from_verl({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.6"})
    keep = compute_rollout_correction(ratios.log(), torch.zeros(1, 5), torch.ones(1, 5), config).keep
    assert keep.tolist() == [kept]


def test_one_sided_verl_bounds_are_inverted_too():
    with pytest.warns(UserWarning, match="inverse"):
        config = RolloutCorrectionConfig.from_verl({"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_inf"})
    assert config.rollout_rs_threshold == [[0.0, 2.0]]


@pytest.mark.parametrize(
    ("criterion", "bounds", "read"),
    [
        ("token_tv", 0.2, [0.2, 0.2]),
        ("token_tv", "0.1_0.3", [0.1, 0.3]),
        ("token_kl", [0.05, 0.05], [0.05, 0.05]),
        ("token_binary_kl", 0.1, 0.1),
        ("seq_max_k1", [1e-4, math.inf], [1e-4, math.inf]),
        ("seq_max_k1", "0.6_1.6", [0.6, 1.6]),
        ("token_k1", [0.0, 5.0], [0.0, 5.0]),  # verl refuses a lower bound of 0
    ],
)
def test_bounds_that_verl_does_not_know_mean_what_they_say(criterion, bounds, read):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = RolloutCorrectionConfig.from_verl({"rollout_rs": criterion, "rollout_rs_threshold": bounds})
    assert config.rollout_rs_threshold == [read]


@pytest.mark.filterwarnings("ignore:verl applies the bounds of `token_k1`")
def test_beside_a_criterion_of_ours_the_bounds_of_verls_are_still_verls():
    section = {"rollout_rs": "token_k1,token_tv", "rollout_rs_threshold": "0.6_1.6,0.2"}
    assert RolloutCorrectionConfig.from_verl(section).rollout_rs_threshold == [[1 / 1.6, 1 / 0.6], [0.2, 0.2]]


def test_criteria_of_ours_in_a_section_have_the_bounds_of_ours():
    section = {
        "rollout_is": "token",
        "rollout_rs": ["token_tv", "token_k1"],
        "rollout_rs_threshold": [[0.2, 0.2], [0.0, 5.0]],
    }
    ours = RolloutCorrectionConfig(**section)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configs = [RolloutCorrectionConfig.from_verl(section), RolloutCorrectionConfig(rollout_correction=section)]
    assert [describe(config) for config in configs] == [describe(ours)] * 2
    ratios = torch.tensor([[0.1, 0.5, 1.0, 2.0, 6.0]])
    train_logps, rollout_logps = ratios.log() - 2, torch.full((1, 5), -2.0)
    keeps = [
        compute_rollout_correction(train_logps, rollout_logps, torch.ones(1, 5), config, advantages=torch.ones(1)).keep
        for config in (ours, *configs)
    ]
    assert [keep.tolist() for keep in keeps] == [[[True, True, True, True, False]]] * 3


def test_a_lower_bound_on_the_ratio_is_none_on_a_difference_of_probabilities():
    section = {"rollout_rs": "token_tv", "rollout_rs_threshold": 0.2, "rollout_rs_threshold_lower": 0.5}
    with pytest.raises(
        ValueError, match=r"`rollout_rs_threshold_lower` is 0.5, which is a lower bound on the ratio, but 'token_tv'"
    ):
        RolloutCorrectionConfig.from_verl(section)


def test_values_of_a_shell_script():
    config = RolloutCorrectionConfig.from_verl(
        {"rollout_is": "sequence", "rollout_is_batch_normalize": "true", "rollout_rs": "null", "bypass_mode": "true",
         "loss_type": "reinforce"}
    )  # fmt: skip
    assert describe(config) == ("sequence", 2.0, None, None)
    assert config.rollout_is_batch_normalize
    assert config.rollout_loss_type == "reinforce"


def test_weights_without_a_threshold_are_off_as_in_verl():
    with pytest.warns(UserWarning, match="`rollout_is_threshold` is null"):
        config = RolloutCorrectionConfig.from_verl({"rollout_is": "token", "rollout_is_threshold": None})
    assert config.rollout_is is None


def test_repeated_names_are_dropped_as_in_verl():
    config = RolloutCorrectionConfig.from_verl({"rollout_rs": "token_k2,token_k2", "rollout_rs_threshold": "0.1"})
    assert config.rollout_rs == ["token_k2"]


IDLE = {
    "pure without bypass": (
        {"rollout_is": "sequence", "use_pure_rollout_correction": True},
        "`use_pure_rollout_correction` is set to True but has no effect: `bypass_old_logprob_for_rollout` is False.",
    ),
    "loss without bypass": (
        {"rollout_is": "token", "loss_type": "reinforce"},
        "`loss_type` is set to 'reinforce' but has no effect: `bypass_mode` is False.",
    ),
    "threshold alone": (
        {"rollout_is_threshold": 2.0},
        "`rollout_is_threshold` is set to 2.0 but has no effect: `rollout_is` is None.",
    ),
    "threshold without a level": (
        {"rollout_is": "null", "rollout_is_threshold": 5.0},
        "`rollout_is_threshold` is set to 5.0 but has no effect: `rollout_is` is None.",
    ),
    "normalisation without a level": (
        {"rollout_is": None, "rollout_is_batch_normalize": "true"},
        "`rollout_is_batch_normalize` is set to True but has no effect: `rollout_is` is None.",
    ),
    "normalisation of weights that are reported": (
        {"rollout_is": "token", "rollout_is_batch_normalize": True, "bypass_mode": True},
        "`rollout_is_batch_normalize` is set to True but has no effect: with `bypass_mode` and "
        "`rollout_loss_type='ppo_clip'` the weights are reported, not applied.",
    ),
    "bounds without a criterion": (
        {"rollout_is": "token", "rollout_rs": None, "rollout_rs_threshold": "0.6_1.6"},
        "`rollout_rs_threshold` is set to '0.6_1.6' but has no effect: `rollout_rs` is not set.",
    ),
    "a lower bound without a criterion": (
        {"rollout_is": "token", "rollout_rs_threshold_lower": 0.5},
        "`rollout_rs_threshold_lower` is set to 0.5 but has no effect: `rollout_rs` is not set.",
    ),
}


@pytest.mark.parametrize("case", IDLE)
def test_settings_of_verl_without_effect_are_warned_about_once(case):
    section, message = IDLE[case]
    for build in (
        RolloutCorrectionConfig.from_verl,
        lambda section: RolloutCorrectionConfig(rollout_correction=section),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = build(section)
        assert [str(warning.message) for warning in caught] == [message]
        assert config.rollout_loss_type == "ppo_clip"  # without effect, as in verl


def test_the_words_are_those_of_the_configuration():
    with pytest.warns(UserWarning, match="has no effect") as ours:
        RolloutCorrectionConfig(rollout_is=None, rollout_is_threshold=5.0, rollout_rs_threshold=[0.5, 2.0])
    with pytest.warns(UserWarning, match="has no effect") as theirs:
        RolloutCorrectionConfig.from_verl({"rollout_is_threshold": 5.0, "rollout_rs_threshold": [0.5, 2.0]})
    assert [str(warning.message) for warning in ours] == [str(warning.message) for warning in theirs]


@pytest.mark.parametrize(
    "section",
    [
        {"rollout_is": None, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False, "rollout_rs": None,
         "rollout_rs_threshold": None, "bypass_mode": False, "loss_type": "ppo_clip"},  # verl's YAML, with every default
        {"rollout_is": "token", "rollout_rs_threshold": "null", "use_pure_rollout_correction": "false"},
        {"rollout_is": None, "rollout_is_threshold": "2.0"},
    ],
)  # fmt: skip
def test_defaults_of_verl_are_not_warned_about(section):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RolloutCorrectionConfig.from_verl(section)


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({"rollout_is_veto_threshold": 1e-3}, "`rollout_is_veto_threshold` is set to 0.001"),
        ({"rollout_is_threshold": None, "rollout_is_level": "sequence"}, "`rollout_is_level` is set to 'sequence'"),
        ({"rollout_is_mode": "mask", "rollout_is": False}, "`rollout_is_mode` is set to 'mask'"),
        ({"rollout_is_threshold_lower": 0.5}, "`rollout_is_threshold_lower` is set to 0.5"),
    ],
)
def test_legacy_settings_that_are_switched_off_are_warned_about(settings, idle):
    with pytest.warns(UserWarning, match="has no effect") as caught:
        assert not RolloutCorrectionConfig.from_legacy(settings).settings.corrects
    assert [str(warning.message) for warning in caught] == [
        f"{idle} but has no effect: `rollout_is_threshold` is None."
    ]


def test_first_typed_configuration():
    config = RolloutCorrectionConfig.from_verl(
        {"rollout_is": None, "rollout_rs": "geometric", "rollout_rs_threshold": 1.001, "rollout_rs_threshold_lower": 0.9,
         "rollout_token_veto_threshold": 1e-4, "bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": True}
    )  # fmt: skip
    assert describe(config) == (None, 2.0, ["seq_mean_k1", "seq_max_k1"], [[0.9, 1.001], [1e-4, math.inf]])
    assert config.rollout_loss_type == "reinforce"


def test_first_names_bound_the_ratio_itself():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = RolloutCorrectionConfig.from_verl({"rollout_rs": "token", "rollout_rs_threshold": "0.6_1.6"})
    assert config.rollout_rs_threshold == [[0.6, 1.6]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"rollout_is_level": "token"},
            r"`rollout_is_level` is 'token', which does not belong to a verl.*Known keys: rollout_is",
        ),
        ({"rollout_rs": "token_k1"}, "`rollout_rs_threshold` is not set"),
        ({"rollout_rs": "token_k9", "rollout_rs_threshold": 1}, "'token_k9' is not a criterion"),
    ],
)
def test_verl_settings_that_cannot_be_translated(settings, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig.from_verl(settings)


def test_overrides_win():
    assert RolloutCorrectionConfig.from_verl({"rollout_is": "token"}, rollout_is="sequence").rollout_is == "sequence"


# The five examples of the first documents, in order -------------------------------------------------------------------

LEGACY = {
    "full correction": (
        {"rollout_is_threshold": 2.0, "rollout_is": True, "rollout_is_level": "token", "rollout_is_mode": "truncate",
         "rollout_is_veto_threshold": 1e-4},
        ("token", 2.0, ["seq_max_k1"], [[1e-4, math.inf]]),
    ),
    "metrics only": (
        {"rollout_is_threshold": 2.0, "rollout_is": False, "rollout_is_level": "token", "rollout_is_mode": "truncate"},
        ("token", 2.0, None, None),
    ),
    "geometric mask": (
        {"rollout_is_threshold": 1.0002, "rollout_is": True, "rollout_is_threshold_lower": 0.9998,
         "rollout_is_level": "geometric", "rollout_is_mode": "mask", "rollout_is_veto_threshold": 1e-4},
        ("geometric", 1.0002, ["seq_mean_k1", "seq_max_k1"], [[0.9998, 1.0002], [1e-4, math.inf]]),
    ),
    "sequence truncate": (
        {"rollout_is_threshold": 5.0, "rollout_is": True, "rollout_is_threshold_lower": None,
         "rollout_is_level": "sequence", "rollout_is_mode": "truncate", "rollout_is_veto_threshold": 1e-4},
        ("sequence", 5.0, ["seq_max_k1"], [[1e-4, math.inf]]),
    ),
    "asymmetric": (
        {"rollout_is_threshold": 5.0, "rollout_is": True, "rollout_is_threshold_lower": 0.8,
         "rollout_is_level": "token", "rollout_is_mode": "mask"},
        ("token", 5.0, ["token_k1"], [[0.8, 5.0]]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEGACY)
def test_legacy_examples(name):
    settings, expected = LEGACY[name]
    config = RolloutCorrectionConfig.from_legacy(settings)
    assert describe(config) == expected
    assert config.settings.corrects == (name != "metrics only")


def test_both_meanings_of_the_legacy_mask_give_the_same_coefficients():
    train = torch.tensor([[0.3, -0.5, 1.9], [0.1, 0.0, -0.1]])
    settings = LEGACY["asymmetric"][0]
    removed = RolloutCorrectionConfig.from_legacy(settings)
    zeroed = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=[0.8, 5.0])
    coefficients = [
        compute_rollout_correction(train, torch.zeros(2, 3), torch.ones(2, 3), config).coefficients
        for config in (removed, zeroed)
    ]
    assert torch.equal(*coefficients)


def test_legacy_switch_and_name_of_two_weeks():
    with pytest.warns(UserWarning, match="`rollout_is_threshold` is missing"):
        assert not RolloutCorrectionConfig.from_legacy(
            {"rollout_is_threshold": None, "rollout_is": True}
        ).settings.corrects
    clip = RolloutCorrectionConfig.from_legacy(
        {"rollout_is_threshold": 2.0, "rollout_is": True, "rollout_is_mode": "clip"}
    )
    assert clip.rollout_rs_threshold == [[0.5, 2.0]]


def test_legacy_bound_that_never_acted():
    with pytest.warns(UserWarning, match="never applied it in mode 'truncate'"):
        RolloutCorrectionConfig.from_legacy({"rollout_is_threshold": 2.0, "rollout_is_threshold_lower": 0.2})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_is_threshold": 2.0, "rollout_is_level": "turn"}, "`rollout_is_level` must be one of token"),
        ({"rollout_is_threshold": 2.0, "rollout_is_mode": "zero"}, "`rollout_is_mode` must be 'truncate'"),
        ({"rollout_rs": "token_k1"}, "does not belong to the legacy"),
    ],
)
def test_legacy_settings_that_cannot_be_translated(settings, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig.from_legacy(settings)


# TRL ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({}, ("sequence", [0.0, 3.0])),  # TRL's default: sequence_mask, clip_max 3
        ({"vllm_importance_sampling_correction": False}, (None, 2.0)),
        ({"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}, ("token", 2.0)),
        ({"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_cap": 4.0}, ("sequence", 4.0)),
        (
            {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.5,
             "vllm_importance_sampling_clip_max": None},
            ("token", [0.5, math.inf]),
        ),
    ],
)  # fmt: skip
def test_trl_settings(settings, weights):
    config = RolloutCorrectionConfig.from_trl(settings)
    assert (config.rollout_is, config.rollout_is_threshold, config.rollout_is_clamp) == (*weights, False)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_trl_truncation_with_a_lower_bound_clamps(level):
    settings = {"vllm_importance_sampling_mode": f"{level}_truncate", "vllm_importance_sampling_clip_min": 0.5}
    config = RolloutCorrectionConfig.from_trl(settings)
    assert (config.rollout_is, config.rollout_is_threshold, config.rollout_is_clamp) == (level, [0.5, 3.0], True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm_importance_sampling_mode": "turn_mask"}, "must be token_truncate"),
        ({"importance_sampling_level": "token"}, "does not belong to TRL"),
    ],
)
def test_trl_settings_that_cannot_be_translated(settings, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig.from_trl(settings)
