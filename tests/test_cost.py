"""The step never waits for the device on behalf of the correction."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from trl import GRPOConfig, GRPOTrainer

from tests.reference import threshold_of
from tests.tiny import StaleSampler
from tests.training import build
from trl_rollout_corr import (
    RolloutCorrectedGRPOConfig,
    RolloutCorrectedGRPOTrainer,
    RolloutCorrectionConfig,
    compute_rollout_correction,
)
from trl_rollout_corr.settings.criteria import CRITERIA
from trl_rollout_corr.settings.presets import PRESETS


EVERYTHING = {
    "rollout_is": "token",
    "rollout_rs": list(CRITERIA),
    "rollout_rs_threshold": [threshold_of(name, 1e6) for name in CRITERIA],
    "rollout_is_batch_normalize": True,
    "rollout_rs_renormalize": True,
}
CONFIGS = {
    **{name: {"rollout_correction": name} for name in PRESETS},
    "everything, token": EVERYTHING,
    "everything, sequence": {**EVERYTHING, "rollout_is": "sequence", "rollout_is_threshold": [0.5, 2.0]},
    "everything, turn": {**EVERYTHING, "rollout_is": "turn", "rollout_is_threshold": [0.5, 2.0]},
    "everything, geometric": {**EVERYTHING, "rollout_is": "geometric", "rollout_nan_policy": "neutralize"},
    "everything, bypass": {**EVERYTHING, "bypass_mode": True, "rollout_loss_type": "reinforce"},
}


def correct_without_values(config: RolloutCorrectionConfig):
    """On fake tensors, which have shapes but no values: reading one is an error."""
    with FakeTensorMode():
        train, rollout, mask = torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3)
        correction = compute_rollout_correction(train, rollout, mask, config, advantages=torch.ones(2))
        return correction.statistics + correction.statistics


@pytest.mark.parametrize("name", CONFIGS)
def test_the_computation_reads_no_value(name):
    correct_without_values(RolloutCorrectionConfig(**CONFIGS[name]))


def test_only_the_policy_that_raises_reads_a_value():
    with pytest.raises(DataDependentOutputException):
        correct_without_values(RolloutCorrectionConfig(rollout_nan_policy="raise"))


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for the device, by the operators and methods that read values."""

    OPERATORS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.is_nonzero")
    METHODS = ("cpu", "tolist", "numpy")

    def __enter__(self):
        self.count, self.paused, self.patch = 0, False, pytest.MonkeyPatch()
        for name in self.METHODS:
            self.patch.setattr(torch.Tensor, name, self.counting(getattr(torch.Tensor, name)))
        return super().__enter__()

    def __exit__(self, *exception):
        self.patch.undo()
        return super().__exit__(*exception)

    def counting(self, method):
        def counted(*args, **kwargs):
            self.count += not self.paused
            return method(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not self.paused and str(function).startswith(self.OPERATORS)
        return function(*args, **(kwargs or {}))


MODES = {
    "measured": {"rollout_correction": "disabled"},
    "decoupled": {"rollout_correction": "decoupled_token_is"},
    "decoupled, whole batch": EVERYTHING,
    "bypass, clipped": {"rollout_correction": "bypass_ppo_clip"},
    "bypass, reinforce": {"rollout_correction": "bypass_pg_is", **EVERYTHING},
}


def reads_outside_the_model(trainer) -> int:
    reads = HostReads()
    trainer.model.register_forward_pre_hook(lambda *_: setattr(reads, "paused", True))
    trainer.model.register_forward_hook(lambda *_: setattr(reads, "paused", False))
    with reads:
        trainer.train()
    return reads.count


COMMON = {"max_steps": 4, "logging_steps": 2}


@pytest.fixture(scope="module")
def reads_of_trl(tiny_model_path, tmp_path_factory) -> Callable[[str], int]:
    """How often TRL's own trainer reads in a schedule. It is trained once for all modes."""

    @cache
    def counted(schedule: str) -> int:
        plain = build(
            GRPOTrainer,
            GRPOConfig,
            tiny_model_path,
            tmp_path_factory.mktemp("plain"),
            vllm_importance_sampling_correction=False,
            sampler=StaleSampler(tiny_model_path),
            schedule=schedule,
            **COMMON,
        )
        return reads_outside_the_model(plain)

    return counted


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["aligned", "two iterations"])
def test_training_reads_as_often_as_without_correction_and_once_per_log(
    reads_of_trl, tiny_model_path, tmp_path, mode, schedule
):
    trainer = RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig
    sampler = StaleSampler(tiny_model_path)
    ours = build(*trainer, tiny_model_path, tmp_path, sampler=sampler, schedule=schedule, **COMMON, **MODES[mode])
    logs, reads = 2, 4  # per log one transfer, and looks at each kind of sums that was transferred
    arrival = ours.args.settings.corrects  # once, at the first step: whether the correction reached the loss
    visits = 8 if schedule == "two iterations" else 0  # looks at the flags of a micro-batch, which are on the CPU
    assert reads_outside_the_model(ours) == reads_of_trl(schedule) + logs * reads + arrival + visits
