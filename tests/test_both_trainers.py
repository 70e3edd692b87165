"""What holds for GRPO and for RLOO, on the real TRL, with a sampler that is not the trainer's policy."""

import pytest

from tests.tiny import StaleSampler
from tests.training import (
    TRAINERS,
    VLLM,
    assert_evaluates,
    assert_same_steps,
    build,
    evaluation,
    freeze_sampler,
    logged,
    losses,
    saying,
)


BOTH = ["grpo", pytest.param("rloo", marks=pytest.mark.vllm)]
MODES = {
    "decoupled": {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": [0.5, 2.0]},
    "ppo_clip": {"bypass_mode": True, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": [0.5, 2.0]},
    "reinforce": {"bypass_mode": True, "rollout_loss_type": "reinforce", "rollout_is": "sequence"},
}


@pytest.fixture(params=BOTH)
def kind(request) -> str:
    return request.param


@pytest.fixture
def make(kind, tiny_model_path, tmp_path, request):
    """Build a trainer: GRPO with a `rollout_func`, and RLOO, which has none, with a vLLM frozen at other weights."""
    if kind == "rloo":
        request.getfixturevalue("shared_engine")

    def make(far=False, **fields):
        if kind == "grpo":
            sampler = StaleSampler(tiny_model_path, noise=2.0 if far else 0.3)
            return build(*TRAINERS[kind], tiny_model_path, tmp_path, sampler=sampler, **fields)
        trainer = build(*TRAINERS[kind], tiny_model_path, tmp_path, **{**VLLM, **fields})
        freeze_sampler(trainer, 0.3 if far else 0.05)
        return trainer

    return make


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_has_its_own_metrics(make, mode):
    assert_evaluates(make(**MODES[mode], **evaluation()))


@pytest.mark.parametrize("schedule", ["aligned", "several generations per step"])
def test_resuming_gives_the_losses_of_an_uninterrupted_run(make, tmp_path, schedule):
    fields = {"schedule": schedule, "max_steps": 4, "rollout_rs": "token_k1", "rollout_rs_threshold": 1.5, "seed": 1}
    uninterrupted = losses(make(**fields))
    output = {"output_dir": str(tmp_path / "run"), "save_strategy": "steps", "save_steps": 2}
    make(**fields, **output).train()
    resumed = make(**fields, **output)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    history = [(entry["loss"], entry["grad_norm"]) for entry in resumed.state.log_history if "loss" in entry]
    assert_same_steps(history, uninterrupted)
    assert len(logged(resumed, "kl")) == 4


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_where_everything_is_rejected_teaches_nothing(make, mode, caplog):
    fields = {**MODES[mode], "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.000001, "rollout_monitor": "warn"}
    trainer = make(far=True, **fields)
    with saying(caplog, "All tokens were rejected or have no gradient"):
        assert losses(trainer) == [(0.0, 0.0)] * 3
    assert logged(trainer, "effective_lr") == [0.0] * 3
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_no_sampler_at_all(kind, tiny_model_path, tmp_path):
    of_function = ", pass a `rollout_func` .*" if kind == "grpo" else ""  # which RLOO does not take
    remedy = rf"Set `use_vllm=True`{of_function}, or use `{kind.upper()}Trainer`"
    with pytest.raises(ValueError, match=rf"`use_vllm` is False.*{remedy}"):
        build(*TRAINERS[kind], tiny_model_path, tmp_path)
