"""`rollout_rs_exclude_from_baseline`: sequences that are rejected as a whole leave their group's baseline."""

import pytest
import torch
from trl import RLOOConfig, RLOOTrainer

from tests.tiny import prompts
from tests.training import BrokenSampler, build, counting_forwards, freeze_sampler, logged, losses
from trl_rollout_corr import (
    RolloutCorrectedGRPOConfig,
    RolloutCorrectedGRPOTrainer,
    RolloutCorrectedRLOOConfig,
    RolloutCorrectedRLOOTrainer,
)


REJECTION = {"rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 2.0}


def rewards(completions, **kwargs):
    """100, 1, 2, 3 in every group of four; the first is the one to be rejected."""
    return [(100.0, 1.0, 2.0, 3.0)[i % 4] for i in range(len(completions))]


def shift_the_first(logprobs):
    return [[x - 3.0 for x in row] if i % 4 == 0 else row for i, row in enumerate(logprobs)]


def scored(trainer):
    """The scored generation batch, unshuffled."""
    torch.manual_seed(0)
    trainer.model.train()
    return trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))


@pytest.fixture
def grpo(tiny_model_path, tmp_path):
    def grpo(**fields):
        def change(output):
            output["logprobs"] = shift_the_first(output["logprobs"])
            output["env_mask"] = [[1] * len(ids) for ids in output["completion_ids"]]

        sampler = BrokenSampler(tiny_model_path, change, noise=0.0)
        fields = {"extra": {"reward_funcs": rewards}, "scale_rewards": "none", **REJECTION, **fields}
        return build(
            RolloutCorrectedGRPOTrainer,
            RolloutCorrectedGRPOConfig,
            tiny_model_path,
            tmp_path,
            sampler=sampler,
            **fields,
        )

    return grpo


@pytest.fixture
def rloo(tiny_model_path, tmp_path, shared_engine):
    def rloo(trainer_class=RolloutCorrectedRLOOTrainer, **fields):
        config_class = RLOOConfig if trainer_class is RLOOTrainer else RolloutCorrectedRLOOConfig
        fields = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": 64,
            "beta": 0.0,
            **REJECTION,
            **fields,
        }
        trainer = build(
            trainer_class, config_class, tiny_model_path, tmp_path, extra={"reward_funcs": rewards}, **fields
        )
        freeze_sampler(trainer, 0.0)
        generate = trainer.vllm_generation.generate

        def shifted(**kwargs):
            output = generate(**kwargs)
            trainer._record_logprobs(shift_the_first(trainer._pass.logprobs), trainer._pass.prompts)
            return output

        trainer.vllm_generation.generate = shifted
        return trainer

    return rloo


@pytest.fixture
def make(request):
    """The function of this name that builds a trainer."""
    return request.getfixturevalue(request.param)


BOTH = ["grpo", pytest.param("rloo", marks=pytest.mark.vllm)]
# With a reward of 100, 1, 2 and 3: minus their mean in GRPO, minus the mean of the other three in RLOO
WITH_ALL = {
    RolloutCorrectedGRPOTrainer: [73.5, -25.5, -24.5, -23.5],
    RolloutCorrectedRLOOTrainer: [98.0, -34.0, -32.6666667, -31.3333333],
}
WITHOUT_THE_FIRST = {
    RolloutCorrectedGRPOTrainer: [0.0, -1.0, 0.0, 1.0],
    RolloutCorrectedRLOOTrainer: [0.0, -1.5, 0.0, 1.5],
}


def assert_advantages(trainer, expected):
    advantages = scored(trainer)["advantages"].view(-1, 4)
    torch.testing.assert_close(advantages, torch.tensor(expected[type(trainer)]).expand_as(advantages))


@pytest.mark.parametrize("make", BOTH, indirect=True)
def test_baseline_with_the_rejected(make):
    assert_advantages(make(), WITH_ALL)


@pytest.mark.parametrize("schedule", ["aligned", "several steps per generation"])
@pytest.mark.parametrize("make", BOTH, indirect=True)
def test_baseline_without_the_rejected(make, schedule):
    assert_advantages(make(rollout_rs_exclude_from_baseline=True, schedule=schedule), WITHOUT_THE_FIRST)


def test_grpo_group_of_two_with_one_rejected(grpo, tiny_model_path):
    fields = {"num_generations": 2, "rollout_rs_exclude_from_baseline": True}
    trainer = grpo(**fields)
    trainer.reward_funcs[0] = lambda completions, **kwargs: [(100.0, 1.0)[i % 2] for i in range(len(completions))]
    advantages = scored(trainer)["advantages"].view(-1, 4)  # the first of every second group is rejected
    torch.testing.assert_close(advantages, torch.tensor([0.0, 0.0, 49.5, -49.5]).expand_as(advantages))


def test_a_partly_rejected_sequence_stays(grpo):
    trainer = grpo(rollout_rs="token_k1", rollout_rs_threshold=2.0, rollout_rs_exclude_from_baseline=True)
    sample = trainer.rollout_func.sample

    def keep_one_token(*args, **kwargs):
        output = sample(*args, **kwargs)
        output["logprobs"] = [[row[0] + 3.0 * (i % 4 == 0), *row[1:]] for i, row in enumerate(output["logprobs"])]
        return output

    trainer.rollout_func.sample = keep_one_token
    advantages = scored(trainer)["advantages"].view(-1, 4)
    torch.testing.assert_close(advantages[0], torch.tensor([100.0, 1.0, 2.0, 3.0]) - 26.5)


def test_results_of_tools_do_not_keep_a_sequence(grpo):
    trainer = grpo(rollout_rs="token_k1", rollout_rs_threshold=2.0, rollout_rs_exclude_from_baseline=True)
    trainer.rollout_func.lengths = (2, 8)
    sample = trainer.rollout_func.sample

    def begin_with_a_result(*args, **kwargs):
        output = sample(*args, **kwargs)
        output["logprobs"] = [[row[0] + 3.0 * (i % 4 == 0), *row[1:]] for i, row in enumerate(output["logprobs"])]
        output["env_mask"] = [[0, *row[1:]] for row in output["env_mask"]]
        return output

    trainer.rollout_func.sample = begin_with_a_result
    advantages = scored(trainer)["advantages"].view(-1, 4)
    torch.testing.assert_close(advantages, torch.tensor([0.0, -1.0, 0.0, 1.0]).expand_as(advantages))


def test_it_pays_the_forward_at_generation_and_trains(grpo):
    trainer = grpo(rollout_rs_exclude_from_baseline=True, learning_rate=1e-5)
    with counting_forwards(trainer) as count:
        steps = losses(trainer)
    assert count["forwards"] == 3 * (2 + 2)
    assert all(gradient > 0 for _, gradient in steps)
    assert logged(trainer, "rejected/reward_mean") == [pytest.approx(100.0)] * 3


@pytest.mark.vllm
def test_rloo_trains_without_the_rejected(rloo):
    steps = losses(rloo(rollout_rs_exclude_from_baseline=True, num_iterations=2, learning_rate=1e-5))
    assert all(gradient > 0 for _, gradient in steps)


def test_in_evaluation_the_reward_is_that_of_every_completion(grpo):
    fields = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "max_steps": 1}
    extra = {"reward_funcs": rewards, "eval_dataset": prompts(4)}
    trainer = grpo(rollout_rs_exclude_from_baseline=True, extra=extra, **fields)
    trainer.train()
    (training,) = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    (evaluation,) = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert training == pytest.approx((1 + 2 + 3) / 3)
    assert evaluation == pytest.approx((100 + 1 + 2 + 3) / 4)
