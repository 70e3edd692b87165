"""The trainers on a real vLLM engine, on the CPU, colocated."""

import math
import sys
from textwrap import dedent

import pytest
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from tests.launching import output_of
from tests.tiny import build_tiny_model
from tests.training import (
    SCHEDULES,
    VISITED_BEFORE_UPDATE,
    VLLM,
    assert_in_step,
    assert_same_steps,
    build,
    counting_forwards,
    freeze_sampler,
    logged,
    losses,
    push_by_reload,
)
from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer
from trl_rollout_corr.tools.diagnosis import diagnose, read_tokens
from trl_rollout_corr.tools.diagnosis.text import sure
from trl_rollout_corr.tools.translation.trl import from_trl


pytestmark = pytest.mark.vllm


@pytest.fixture
def make(tiny_model_path, tied_model_path, tmp_path, shared_engine):
    def make(trainer_class=RolloutCorrectedGRPOTrainer, tied=False, **fields):
        config_class = GRPOConfig if trainer_class is GRPOTrainer else RolloutCorrectedGRPOConfig
        path = tied_model_path if tied else tiny_model_path
        trainer = build(trainer_class, config_class, path, tmp_path, **{**VLLM, **fields})
        push_by_reload(trainer.vllm_generation)  # TRL's own push of weights fails on a CPU
        return trainer

    return make


@pytest.mark.seam
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("peft", [False, True])
def test_a_synced_float32_sampler_agrees_with_the_trainer(make, peft, tied):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian") if peft else None
    trainer = make(learning_rate=1e-2, max_steps=4, tied=tied, extra={"peft_config": lora} if peft else None)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    moved = max((p - before[name]).abs().max() for name, p in trainer.model.named_parameters() if name in before)
    assert moved > 1e-3  # an unsynced sampler would show
    assert_in_step(trainer)
    assert logged(trainer, "rollout_is_eff_sample_size") == [pytest.approx(1.0)] * 4


@pytest.mark.parametrize("correction", ["auto", "trl"])
def test_a_second_training_begins_with_a_push(make, correction):
    """TRL takes a push at this step, which counts from 0 again, for one of these weights."""
    trainer = make(learning_rate=1e-2, max_steps=1, rollout_correction=correction)
    trainer.train()
    assert_in_step(trainer)
    trainer.train()
    assert len(logged(trainer, "k3_kl")) == 1  # of the second training
    assert_in_step(trainer)


def test_a_tied_head_is_pushed_to_a_bfloat16_sampler(make):
    with pytest.warns(UserWarning, match="computes in float32 and the sampler in bfloat16"):
        trainer = make(learning_rate=1e-2, max_steps=4, tied=True, rollout_engine_kwargs={"dtype": "bfloat16"})
    trainer.train()
    assert max(map(abs, logged(trainer, "log_ratio_max") + logged(trainer, "log_ratio_min"))) < 0.1  # 0.5 without


@pytest.mark.slow  # vLLM has to be new: it prepares for experts, or does not, once per process
def test_experts_are_pushed_as_vllm_packs_them(tmp_path):
    path = build_tiny_model(tmp_path / "model", experts=4)
    script = f"""
        from pathlib import Path
        from tests.training import VLLM, assert_in_step, build, sharing_engines
        from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer

        trainer = RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig
        with sharing_engines():
            trainer = build(*trainer, {path!r}, Path({str(tmp_path)!r}), **VLLM, learning_rate=1e-2, max_steps=3)
            trainer.train()
        assert_in_step(trainer)
    """
    output_of(sys.executable, "-c", dedent(script))


def test_a_prompt_that_is_cached_is_read_again_with_new_weights(make):
    from datasets import Dataset

    long = Dataset.from_dict({"prompt": ["abcd" * 40 + "="] * 64})  # vLLM caches blocks of 128 tokens
    trainer = make(learning_rate=1e-2, vllm_max_model_length=256, extra={"train_dataset": long})
    trainer.train()
    assert_in_step(trainer)


@pytest.mark.parametrize("cleared", [True, False])
def test_an_old_cache_of_prefixes_is_seen_after_a_push(make, cleared, monkeypatch, caplog, tmp_path):
    from datasets import Dataset

    long = Dataset.from_dict({"prompt": ["abcd" * 40 + "="] * 64})
    dump = {"rollout_dump_dir": str(tmp_path / "dump"), "rollout_dump_sampled": 16}
    fields = {"rollout_monitor": "warn", "rollout_correction": "trl", **dump}
    trainer = make(learning_rate=3e-2, vllm_max_model_length=256, extra={"train_dataset": long}, **fields)
    llm = trainer.vllm_generation.llm
    llm.reset_prefix_cache()  # of tests before
    if not cleared:
        monkeypatch.setattr(llm, "reset_prefix_cache", lambda: True)
    trainer.train()
    llm.reset_prefix_cache()
    told = [record.getMessage() for record in caplog.records if "from its cache of prefixes" in record.getMessage()]
    assert [message[:70] for message in told] == (
        [] if cleared else ["After the push at optimizer step 1, vLLM took 128 tokens of its first "]
    )
    found = {x.name: sure(x) for x in diagnose(read_tokens(tmp_path / "dump")).findings}
    assert found.get("prefix_cache") == (None if cleared else "certain"), found


def asking(way: str):
    """A `rollout_func` that asks the trainer's vLLM, which may fill the cache of prefixes before it is read."""
    from vllm import SamplingParams

    def rollout(prompts, trainer):
        trainer.vllm_generation.sync_weights()
        n = trainer.num_generations
        llm = trainer.vllm_generation.llm
        ids = [trainer.processing_class(prompt).input_ids for prompt in prompts]
        requests = [{"prompt_token_ids": x} for x in ids]
        params = {"temperature": 1.0, "max_tokens": 8, "logprobs": 0}
        if way == "a request before":
            engine = llm.llm_engine
            engine.add_request("before", requests[0], SamplingParams(max_tokens=1))
            while engine.has_unfinished_requests():
                engine.step()
        if way == "several completions of a request":
            requests, params = requests[::n], {**params, "n": n}
        outputs = [
            x for output in llm.generate(requests, SamplingParams(**params), use_tqdm=False) for x in output.outputs
        ]
        assert len(outputs) == len(prompts)
        return {
            "prompt_ids": ids,
            "completion_ids": [[*x.token_ids] for x in outputs],
            "logprobs": [
                [place[token].logprob for token, place in zip(x.token_ids, x.logprobs, strict=True)] for x in outputs
            ],
        }

    return rollout


@pytest.mark.parametrize("cleared", [True, False])
@pytest.mark.parametrize("way", ["several completions of a request", "a request before", "a completion per request"])
def test_a_cache_that_the_same_step_has_filled_is_not_taken_for_an_old_one(
    make, way, cleared, monkeypatch, caplog, tmp_path
):
    from datasets import Dataset

    long = Dataset.from_dict({"prompt": ["abcd" * 40 + "="] * 64})
    extra = {"train_dataset": long, "rollout_func": asking(way)}
    fields = {"rollout_monitor": "warn", "rollout_dump_dir": str(tmp_path / "dump")}
    trainer = make(learning_rate=3e-2, vllm_max_model_length=256, extra=extra, **fields)
    llm = trainer.vllm_generation.llm
    llm.reset_prefix_cache()  # of tests before
    if not cleared:
        monkeypatch.setattr(llm, "reset_prefix_cache", lambda: True)
    trainer.train()
    llm.reset_prefix_cache()
    told = [record.getMessage() for record in caplog.records if "from its cache of prefixes" in record.getMessage()]
    seen = way != "several completions of a request" and not cleared
    assert len(told) == seen, told
    assert ("old_prefixes" in trainer._about) == seen
    assert not any(hasattr(method, "when_noted") for method in (llm.llm_engine.add_request, llm.llm_engine.step))


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_log_probabilities_are_those_after_temperature(make, temperature):
    trainer = make(temperature=temperature)
    trainer.train()
    assert_in_step(trainer)


# TRL's mode, and how far the sampler is from the trainer: far enough to reach the bound of 2
TRUNCATIONS = {"decoupled_token_is": ("token_truncate", 0.15), "decoupled_seq_is": ("sequence_truncate", 0.1)}


@pytest.mark.parametrize("preset", TRUNCATIONS)
@pytest.mark.parametrize(
    "fields", [{}, {"beta": 0.1, "loss_type": "grpo"}, {"loss_type": "dr_grpo", "num_iterations": 2}]
)
def test_truncation_equals_trl_with_one_forward_per_micro_batch_fewer(make, preset, fields):
    mode, spread = TRUNCATIONS[preset]
    theirs = make(
        GRPOTrainer,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=2.0,
        **fields,
    )
    freeze_sampler(theirs, spread)
    with counting_forwards(theirs) as their_count:
        expected = losses(theirs)
    ours = make(rollout_correction=preset, **fields)
    freeze_sampler(ours, spread)
    with counting_forwards(ours) as our_count:
        found = losses(ours)
    assert_same_steps(found, expected)
    assert max(logged(ours, "rollout_is_ratio_fraction_high")) > 0  # the bound was reached
    generations = math.ceil(3 / fields.get("num_iterations", 1))
    assert their_count["forwards"] - our_count["forwards"] == 2 * generations


@pytest.mark.parametrize("schedule", sorted({*SCHEDULES} - {*VISITED_BEFORE_UPDATE}))
def test_truncation_equals_trl_where_samples_are_visited_after_an_update(make, schedule):
    fields = {"schedule": schedule, "learning_rate": 1e-3, "max_steps": 4}
    theirs = make(
        GRPOTrainer, vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0, **fields
    )
    freeze_sampler(theirs, 0.15)
    with counting_forwards(theirs) as their_count:
        expected = losses(theirs)
    ours = make(rollout_correction="decoupled_token_is", **fields)
    freeze_sampler(ours, 0.15)
    with counting_forwards(ours) as our_count:
        found = losses(ours)
    assert_same_steps(found, expected)
    assert their_count == our_count  # the old policy cannot be had for less


def test_a_translated_default_of_trl_equals_it(make):
    theirs = make(GRPOTrainer)  # sequence_mask, clip_max 3
    freeze_sampler(theirs, 0.15)
    expected = losses(theirs)
    settings = {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0}
    ours = make(**from_trl(settings))
    freeze_sampler(ours, 0.15)
    assert_same_steps(losses(ours), expected)


MODES = {
    "decoupled": {"rollout_correction": "decoupled_geo_rs_token_tis", "rollout_rs_threshold": [0.7, 1.4]},
    "ppo_clip": {"rollout_correction": "bypass_ppo_clip"},
    "reinforce": {"rollout_correction": "bypass_pg_is", "rollout_is_batch_normalize": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_trains_end_to_end(make, mode):
    trainer = make(**MODES[mode], schedule="several steps per generation", max_steps=4)
    freeze_sampler(trainer, 0.05)
    steps = losses(trainer)
    assert all(math.isfinite(x) for step in steps for x in step)
    assert any(gradient > 0 for _, gradient in steps)
    assert all(value > 0 for value in logged(trainer, "k3_kl"))


@pytest.mark.filterwarnings("ignore:A fraction of", "ignore:Every token")
def test_an_engine_with_broken_weights(make):
    trainer = make()
    freeze_sampler(trainer, math.nan)
    assert losses(trainer) == [(0.0, 0.0)] * 3
    assert logged(trainer, "nonfinite_fraction") == [1.0] * 3
