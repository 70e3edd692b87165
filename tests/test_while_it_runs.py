"""Events around a run: settings that change, logs that are cut short or are not JSON, monitors that come late."""

import gc
import math
import re
import warnings

import pytest
import torch
from transformers import TrainerCallback

from tests.tiny import StaleSampler, build_tiny_model, length_reward, load_model, prompts
from tests.training import (
    TRAINERS,
    VLLM,
    BrokenSampler,
    assert_gradients_equal,
    backward,
    build,
    config_fields,
    evaluation,
    freeze_sampler,
    gradients,
    logged,
    losses,
    micro_batches,
    policy_logps,
    saying,
    told,
)
from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectionMonitor
from trl_rollout_corr.tools.dump.folder import files_of
from trl_rollout_corr.tools.monitor.rule import ALARMS


@pytest.fixture
def make(tiny_model_path, tmp_path):
    def make(sampler=None, model=tiny_model_path, **fields):
        sampler = sampler or StaleSampler(tiny_model_path)
        return build(*TRAINERS["grpo"], model, tmp_path, sampler=sampler, **fields)

    return make


# Settings that change ---------------------------------------------------------------------------------------------------


class Changing(TrainerCallback):
    """Changes settings in the middle of a logging window."""

    def __init__(self, **fields):
        self.fields = fields

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            for name, value in self.fields.items():
                setattr(args, name, value)


@pytest.mark.parametrize(
    "fields",
    [
        {"rollout_rs": ["token_k1"], "rollout_rs_threshold": [[0.8, 1.2]]},
        {"rollout_is_threshold": [0.5, 2.0]},
        {"rollout_correction": None},
        {"bypass_mode": True},
        {"rollout_metrics_only": True},
    ],
)
def test_settings_are_read_when_the_trainer_is_built_and_do_not_change_in_a_run(make, fields):
    expected = losses(make(max_steps=4))
    trainer = make(max_steps=4, extra={"callbacks": [Changing(**fields)]})
    assert losses(trainer) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout_correction", None),
        ("rollout_rs_threshold", [0.5, 3.0]),
        ("rollout_monitor", "warn"),
        ("rollout_dump_dir", "elsewhere"),
    ],
)
def test_a_setting_that_is_changed_after_the_trainer_was_built_is_an_error(make, name, value):
    trainer = make(max_steps=1, rollout_rs="token_k1", rollout_rs_threshold=[0.5, 2.0])
    before = getattr(trainer.args, name)
    before = list(before) if isinstance(before, list) else before
    if isinstance(before, list):  # edited in place
        getattr(trainer.args, name)[:] = value
    else:
        setattr(trainer.args, name, value)
    changed = re.escape(f"`{name}` is {value!r}, but was {before!r} when the trainer was built")
    with pytest.raises(ValueError, match=f"{changed}.*Build the trainer with the new value"):
        trainer.train()
    setattr(trainer.args, name, before)
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_list_that_is_edited_in_place_is_an_error(make):
    trainer = make(max_steps=1, rollout_rs="token_k1", rollout_rs_threshold=[0.5, 2.0])
    trainer.args.rollout_rs_threshold[1] = 3.0
    with pytest.raises(ValueError, match=r"`rollout_rs_threshold` is \[0.5, 3.0\], but was \[0.5, 2.0\]"):
        trainer.train()


def test_what_is_assigned_before_the_trainer_is_built_acts(tiny_model_path, tmp_path, caplog):
    trainer_class, config_class = TRAINERS["grpo"]
    args = config_class(**config_fields(tmp_path, max_steps=2))
    args.rollout_is, args.rollout_rs, args.rollout_rs_threshold = "sequence", "token_k1", 1.1
    args.rollout_monitor, args.rollout_diagnose, args.rollout_dump_dir = "warn", True, tmp_path / "dump"
    sampler = StaleSampler(tiny_model_path)
    trainer = trainer_class(tiny_model_path, length_reward, args, train_dataset=prompts(64), rollout_func=sampler)
    trainer.train()
    assert all(x > 0 for x in logged(trainer, "rollout_rs_token_k1_masked_fraction"))
    assert len(logged(trainer, "rollout_is_mean")) == 2
    assert any(ALARMS in entry for entry in trainer.state.log_history)
    assert [x for x in told(caplog) if x.startswith("Diagnosis of step 1. ")]
    assert files_of(tmp_path / "dump")


def test_what_is_assigned_before_the_trainer_is_built_is_checked(tiny_model_path, tmp_path):
    trainer_class, config_class = TRAINERS["grpo"]
    args = config_class(**config_fields(tmp_path, rollout_correction="bypass_pg_is", rollout_is_batch_normalize=True))
    args.per_device_train_batch_size = 1
    with pytest.raises(ValueError, match="its weight would always be 1"):
        trainer_class(tiny_model_path, length_reward, args, train_dataset=prompts(8), rollout_func=len)


def test_a_monitor_that_was_removed_stays_removed(make):
    trainer = make(rollout_monitor="warn", max_steps=1)
    trainer.remove_callback(RolloutCorrectionMonitor)
    trainer.train()
    assert not any(ALARMS in entry for entry in trainer.state.log_history)


# Logs -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_window_that_is_cut_short_is_logged_at_the_end(make, evaluates):
    trainer = make(max_steps=5, logging_steps=2, **(evaluation() if evaluates else {}))
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "rollout_corr/kl" in entry] == [2, 4, 5]
    assert "train_runtime" in trainer.state.log_history[-1]
    assert math.isfinite(trainer.state.log_history[-1]["rollout_corr/kl"])


# Monitors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [True, False])
def test_a_monitor_that_is_given_takes_the_place_of_the_default_one(make, late, caplog):
    mine = RolloutCorrectionMonitor(bounds={"k3_high": 0.0})
    trainer = make(rollout_correction="disabled", rollout_monitor="warn", extra={} if late else {"callbacks": [mine]})
    if late:
        trainer.add_callback(mine)
    with saying(caplog, r"\[k3_high > 0\]"):
        trainer.train()
    monitors = [x for x in trainer.callback_handler.callbacks if isinstance(x, RolloutCorrectionMonitor)]
    assert monitors == [mine]


# The ratio --------------------------------------------------------------------------------------------------------------


def one_token_far_off(output):
    """The trainer finds one token of each completion much more likely than the sampler says it did."""
    for sequence in output["logprobs"]:
        sequence[0] -= 9.0


def test_a_ratio_beyond_the_dual_clip_has_no_gradient_where_the_advantage_is_negative(make, tiny_model_path):
    def gradient(**fields):
        sampler = BrokenSampler(tiny_model_path, one_token_far_off)
        return max(
            norm for _, norm in losses(make(sampler, rollout_correction="bypass_ppo_clip", max_steps=1, **fields))
        )

    bounded, unbounded = gradient(), gradient(rollout_clip_ratio_c=None)
    assert unbounded > 100 * bounded


@pytest.mark.parametrize(
    ("loss_type", "delta", "reason"),
    [
        ("cispo", None, "`loss_type` is 'cispo', which has its own bound on the ratio"),
        ("sapo", None, "`loss_type` is 'sapo', which has its own bound on the ratio"),
        ("grpo", 5.0, "`delta` is 5.0, which is the same bound and takes precedence"),
        ("grpo", None, None),
    ],
)
def test_a_dual_clip_that_the_loss_does_not_look_at_is_warned_about(make, tiny_model_path, loss_type, delta, reason):
    def steps(c):
        sampler = BrokenSampler(tiny_model_path, one_token_far_off)
        fields = {"rollout_correction": "bypass_ppo_clip", "loss_type": loss_type, "epsilon_high": 5.0, "delta": delta}
        return losses(make(sampler, **fields, rollout_clip_ratio_c=c, max_steps=1))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bounded = steps(1.5)
    found = [str(warning.message) for warning in caught if "rollout_clip_ratio_c" in str(warning.message)]
    assert found == ([f"`rollout_clip_ratio_c` is set to 1.5 but has no effect: {reason}."] if reason else [])
    assert (bounded == steps(3.0)) == (reason is not None)  # the default, of which nothing is said


def verl_loss(ratio, advantages, c):
    """PPO with dual clip, as verl's default loss: per token."""
    clipped = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    return torch.where(advantages < 0, torch.min(clipped, -advantages * c), clipped)


@pytest.mark.parametrize("c", [3.0, 1.5])
def test_grpo_around_the_sampler_is_verl_with_dual_clip(make, tiny_model_path, c):
    sampler = BrokenSampler(tiny_model_path, one_token_far_off)
    trainer = make(sampler, rollout_correction="bypass_ppo_clip", rollout_clip_ratio_c=c, loss_type="bnpo")
    batch = micro_batches(trainer)[0]
    assert trainer.args.delta is None
    found = gradients(trainer, batch)
    loss = trainer.compute_loss(trainer.model, batch)
    logps, mask = policy_logps(trainer.model, batch), batch["completion_mask"]
    ratio = torch.where(mask.bool(), (logps - batch["sampling_per_token_logps"]).exp(), 1.0)
    expected = (verl_loss(ratio, batch["advantages"][:, None], c) * mask).sum() / mask.sum()
    assert (ratio > c).any()
    torch.testing.assert_close(loss * 2, expected, rtol=1e-4, atol=1e-4)  # TRL divides by the accumulation steps
    assert_gradients_equal(found, backward(trainer.model, expected / 2))


@pytest.mark.vllm
@pytest.mark.parametrize("c", [3.0, 1.001, None])
def test_rloo_around_the_sampler_is_bounded_at_the_ratio_of_a_completion(shared_engine, tiny_model_path, tmp_path, c):
    trainer_class, config_class = TRAINERS["rloo"]
    trainer = build(
        trainer_class, config_class, tiny_model_path, tmp_path, rollout_correction="bypass_ppo_clip",
        rollout_clip_ratio_c=c, **{**VLLM, "per_device_train_batch_size": 16},
    )  # fmt: skip
    freeze_sampler(trainer, 0.1)
    batch = micro_batches(trainer)[0]
    found = gradients(trainer, batch)
    logps, mask = policy_logps(trainer.model, batch), batch["completion_mask"]
    ratio = ((logps - batch["sampling_per_token_logps"]) * mask).sum(1).exp()
    negative = (batch["advantages"] < 0) & (ratio > 1.001)
    assert negative.any()
    assert_gradients_equal(found, backward(trainer.model, verl_loss(ratio, batch["advantages"], c or math.inf).mean()))


def test_clipping_at_the_level_of_completions_is_counted_as_trl_counts_it(make):
    fields = {
        "importance_sampling_level": "sequence",
        "schedule": "two iterations",
        "learning_rate": 3e-3,
        "max_steps": 4,
        "epsilon": 0.01,
    }
    plain, corrected = (
        make(rollout_correction="disabled", **fields),
        make(rollout_is="sequence", rollout_is_threshold=1.0, **fields),
    )
    for trainer in (plain, corrected):
        losses(trainer)
    shares = [
        [entry.get("clip_ratio/region_mean") for entry in t.state.log_history if "loss" in entry]
        for t in (plain, corrected)
    ]
    assert shares[1][1] > 0
    assert all((share * 8) % 1 == 0 for share in shares[1])  # of eight completions, and not of their tokens


# Dropout ----------------------------------------------------------------------------------------------------------------


def test_dropout_is_warned_about_by_name(make, tmp_path):
    from peft import LoraConfig

    model = load_model(build_tiny_model(tmp_path / "model"))
    model.config.attention_dropout = 0.1
    with pytest.warns(
        UserWarning, match=r"Dropout is on .*in attention \(0\.1\).*`attention_dropout=0\.0` where you load"
    ):
        make(model=model)
    lora = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.05)
    with pytest.warns(UserWarning, match=r"of the LoRA adapter among them.*disable_dropout=True"):
        make(extra={"peft_config": lora})
    make(disable_dropout=True, extra={"peft_config": LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.05)})


@pytest.mark.parametrize("name", ["reinforce", "ppo_clip"])
def test_a_loss_of_ours_as_trl_loss_is_refused_at_once(tmp_path, name):
    with pytest.raises(ValueError, match=f"`loss_type` is '{name}'.*`rollout_loss_type`"):
        RolloutCorrectedGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, loss_type=name)


@pytest.mark.parametrize("logs", [{"logging_strategy": "no"}, {"logging_steps": 1000}])
def test_memory_does_not_grow_until_the_next_log(make, logs):
    held = {}

    class Counting(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            gc.collect()
            held[state.global_step] = sum(x.nbytes for x in gc.get_objects() if type(x) is torch.Tensor)

    trainer = make(rollout_monitor="warn", max_steps=12, **logs)
    trainer.add_callback(Counting())
    trainer.train()
    assert held[12] - held[6] < 2**15
