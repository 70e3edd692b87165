"""Parts of TRL in use: methods, parameters, dictionary keys and the order of reads. Run these on a new TRL first."""

import inspect
import re

import pytest
import torch
from packaging.version import Version
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import utils

from tests.launching import HAS_ASYNCHRONOUS
from tests.tiny import StaleSampler
from tests.training import TRAINERS, BrokenSampler, build, micro_batches
from trl_rollout_corr import RolloutCorrectedGRPOConfig, RolloutCorrectedGRPOTrainer, RolloutCorrectedRLOOTrainer
from trl_rollout_corr.trainers import trl_interface, versions


pytestmark = pytest.mark.seam


@pytest.fixture
def make(tiny_model_path, tmp_path):
    def make(trainer_class=GRPOTrainer, sampler=None, **fields):
        config_class = GRPOConfig if trainer_class is GRPOTrainer else RolloutCorrectedGRPOConfig
        sampler = sampler or StaleSampler(tiny_model_path)
        return build(trainer_class, config_class, tiny_model_path, tmp_path, sampler=sampler, **fields)

    return make


# Attributes of an object, and keys of a batch
ATTRIBUTES = (
    "beta", "num_iterations", "reward_weights", "temperature", "use_vllm", "vllm_generation", "vllm_mode", "_metrics",
    "_step", "_buffered_inputs", "_last_loaded_step",
)  # fmt: skip
KEYS = ("advantages", "completion_ids", "completion_mask", "prompt_ids", "prompt_mask")
NAMES = {
    GRPOTrainer: (
        (*ATTRIBUTES, "rollout_func", "top_entropy_quantile"),
        (*KEYS, "old_per_token_logps", "sampling_per_token_logps", "tool_mask"),
    ),
    RLOOTrainer: (ATTRIBUTES, (*KEYS, "old_logps")),
    VLLMGeneration: (("accelerator", "llm", "logprobs", "mode", "vllm_client"), ()),
}
OF_ASYNCHRONOUS = (
    ("_metrics", "_rollout_dataset", "model_version", "rollout_worker", "vllm_client", "weight_transfer"),
    ("advantages", "old_log_probs", "token_index"),
)


def source_of(owner: type) -> str:
    """Source of the modules of a class of TRL and of its bases in TRL."""
    modules = {inspect.getmodule(cls) for cls in owner.__mro__ if cls.__module__.startswith("trl.")}
    return "".join(inspect.getsource(module) for module in modules)


def missing(owner: type, attributes: tuple[str, ...], keys: tuple[str, ...]) -> list[str]:
    source, mentions = source_of(owner), [*(f"self.{name}" for name in attributes), *(f'"{name}"' for name in keys)]
    return [mention for mention in mentions if not re.search(rf"{re.escape(mention)}(?!\w)", source)]


@pytest.mark.parametrize("owner", trl_interface.METHODS)
def test_everything_is_where_it_was(owner):
    assert trl_interface.changes(owner) == []
    assert missing(owner, *NAMES[owner]) == []


@pytest.mark.parametrize("name", ["grpo", "rloo", *(["async_grpo"] if HAS_ASYNCHRONOUS else [])])
def test_models_of_every_trainer_are_found_by_the_name_of_the_package(name):
    assert {"trl", "rollout-correction", "trl-rollout-corr"} <= set(TRAINERS[name][0]._tag_names)


def overridden(ours: type) -> set[str]:
    """Methods of TRL's trainer that one of our classes overrides, wherever it stands among the bases."""
    of_this_package = [cls for cls in ours.__mro__ if cls.__module__.startswith("trl_rollout_corr.")]
    return {
        name
        for cls in of_this_package
        for name, member in vars(cls).items()
        if inspect.isfunction(member) and hasattr(ours._trl_class, name) and name != "__init__"
    }


@pytest.mark.parametrize("ours", [RolloutCorrectedGRPOTrainer, RolloutCorrectedRLOOTrainer])
def test_every_overridden_method_is_in_the_contract(ours):
    assert "training_step" in overridden(ours)  # of a base of the mixin
    assert overridden(ours) <= set(trl_interface.METHODS[ours._trl_class])


@pytest.mark.skipif(not HAS_ASYNCHRONOUS, reason="TRL's asynchronous trainer does not import")
def test_every_overridden_method_of_the_asynchronous_trainer_is_in_the_contract():
    from trl_rollout_corr import RolloutCorrectedAsyncGRPOTrainer
    from trl_rollout_corr.asynchronous.trl_parts import METHODS

    assert "log" in overridden(RolloutCorrectedAsyncGRPOTrainer)  # of a base
    assert overridden(RolloutCorrectedAsyncGRPOTrainer) <= set(METHODS)
    assert missing(RolloutCorrectedAsyncGRPOTrainer._trl_class, *OF_ASYNCHRONOUS) == []


def test_what_only_a_probe_touches_is_where_it_was():
    for owner in (GRPOTrainer, RLOOTrainer):
        assert "self._last_loaded_step" in source_of(owner)
        for name in ("_prepare_inputs", "get_train_dataloader", "compute_loss_context_manager"):
            assert callable(getattr(owner, name))
    for name in ("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "enable_sleep_mode"):
        assert f"self.{name}" in source_of(VLLMGeneration)
    rows = utils.split_tensor_dict({"ids": torch.eye(2), "none": None}, 2)
    assert [(row["ids"].tolist(), row["none"]) for row in rows] == [([[1.0, 0.0]], None), ([[0.0, 1.0]], None)]


@pytest.mark.skipif(Version("1.16") > versions.INSTALLED, reason="TRL computes logits, and has no such head")
def test_the_head_for_texts_that_are_scored_alone_is_where_it_was():
    """Without it, scores are computed from logits, as before TRL 1.16."""
    assert {"temperature", "cast_lm_head_to_fp32"} <= set(inspect.signature(utils.add_fused_lm_head).parameters)


def test_keys_of_a_scored_batch(make, tiny_model_path):
    def add_mask(output):
        output["env_mask"] = [[1] * len(ids) for ids in output["completion_ids"]]

    sampler = BrokenSampler(tiny_model_path, add_mask)
    batch = micro_batches(make(sampler=sampler, schedule="several steps per generation", beta=0.1))[0]
    shape = batch["completion_ids"].shape
    for key in (
        "completion_mask",
        "tool_mask",
        "old_per_token_logps",
        "sampling_per_token_logps",
        "ref_per_token_logps",
    ):
        assert batch[key].shape == shape
    assert batch["advantages"].shape == shape[:1]
    assert batch["num_items_in_batch"].dim() == 0
    assert {"prompt_ids", "prompt_mask"} <= batch.keys()


def test_the_old_pass_is_the_first_and_depends_on_the_iterations(make):
    for schedule, expected in (("aligned", 1), ("two iterations", 2)):
        trainer, calls = make(schedule=schedule, beta=0.1), []
        forward = trainer._get_per_token_logps_and_entropies
        trainer._get_per_token_logps_and_entropies = lambda model, *args, calls=calls, forward=forward, **kwargs: (
            calls.append(model) or forward(model, *args, **kwargs)
        )
        micro_batches(trainer)
        assert len(calls) == expected
        assert calls[-1] is trainer.ref_model
        assert calls[0] is (trainer.model if expected == 2 else trainer.ref_model)


def test_rewards_are_calculated_after_the_old_pass_and_gathered():
    for trainer in (GRPOTrainer, RLOOTrainer):
        source = inspect.getsource(trainer._generate_and_score_completions)
        assert source.index("old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies") < source.index(
            "rewards_per_func = self._calculate_rewards(inputs, prompts, completions, completion_ids_list)"
        )
        assert inspect.getsource(trainer._calculate_rewards).rstrip().endswith("return rewards_per_func")


def test_the_reward_of_a_completion_is_the_weighted_sum_over_functions_and_ranks():
    for trainer in (GRPOTrainer, RLOOTrainer):
        source = inspect.getsource(trainer._generate_and_score_completions)
        assert "(rewards_per_func * self.reward_weights.to(device).unsqueeze(0)).nansum(dim=1)" in source
        assert "self.accelerator.process_index * len(prompts)" in source  # which of them are this rank's


def test_rloo_always_makes_its_old_pass_first():
    source = inspect.getsource(RLOOTrainer._generate_and_score_completions)
    assert source.count("self._get_per_token_logps_and_entropies(") == 3  # old, reference model, reference adapter
    assert "old_logps = (old_per_token_logps * completion_mask).sum(1)" in source
    loss = inspect.getsource(RLOOTrainer._compute_loss)
    assert loss.index("self._get_per_token_logps_and_entropies(") < loss.index('inputs["old_logps"]')
    assert loss.index("self._get_per_token_logps_and_entropies(") < loss.index('inputs["advantages"]')


def test_num_iterations_is_read_by_scoring_for_nothing_else():
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert source.count("self.num_iterations") == 1
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in source


class Reads(dict):
    """A batch that remembers the order in which its keys are read."""

    def __init__(self, *args):
        super().__init__(*args)
        self.order = []

    def __getitem__(self, key):
        self.order.append(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.order.append(key)
        return super().get(key, default)


def test_the_loss_reads_anchor_and_advantages_after_the_forward(make):
    trainer = make(schedule="several steps per generation")
    batch = Reads(micro_batches(trainer)[0])
    forward = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
        batch.order.append("forward") or forward(*args, **kwargs)
    )
    trainer.compute_loss(trainer.model, batch)
    position = batch.order.index
    assert position("completion_mask") < position("forward") < position("advantages")
    assert position("forward") < position("old_per_token_logps")
    assert batch.order.count("forward") == 1


def test_the_loss_takes_advantages_per_token(make):
    trainer = make()
    batch = micro_batches(trainer)[0]
    shape = batch["completion_ids"].shape
    per_token = {**batch, "advantages": batch["advantages"][:, None].expand(shape)}
    assert trainer.compute_loss(trainer.model, per_token) == trainer.compute_loss(trainer.model, batch)


def test_the_buffer_returns_the_same_object_at_every_visit(make):
    trainer = make(schedule="two iterations")
    batches = micro_batches(trainer)
    trainer._step = 2  # the second visit of the first micro-batch
    assert trainer._prepare_inputs([]) is batches[0]


def test_generate_returns_completions_and_log_probabilities_where_they_are_read(make):
    generated = make()._generate(["12 ab=", "3 4="])
    assert [len(ids) for ids in generated[1]] == [len(logprobs) for logprobs in generated[4]]


def test_names_of_the_sampler():
    assert {"mode", "accelerator", "logprobs", "generation_kwargs"} <= set(
        inspect.signature(VLLMGeneration.__init__).parameters
    ) | {"accelerator"}
    assert "logprob_token_ids" in VLLMGeneration.generate.__doc__
    assert "= extract_logprobs(all_outputs)" in source_of(VLLMGeneration)  # of which the trainer for Axolotl keeps NaN
    assert hasattr(VLLMClient, "get_server_info") or "self.session = " in inspect.getsource(VLLMClient.__init__)


def test_names_that_only_the_check_of_pushes_uses():
    """Without one of them, a push is not checked."""
    assert "self.tp_group" in source_of(VLLMGeneration)
    for name in ("base_url", "model"):
        assert f"self.{name} = " in inspect.getsource(VLLMClient.__init__)
    if HAS_ASYNCHRONOUS:
        from trl_rollout_corr.asynchronous.trl_parts import AsyncGRPOTrainer

        assert callable(AsyncGRPOTrainer._streaming_iter)
        for name in ("_lora_dir", "_lora_name", "_lora_sync"):
            assert f"self.{name} = " in source_of(AsyncGRPOTrainer)


def test_a_forward_pass_more_while_scoring_is_an_error(make):
    class Changed(RolloutCorrectedGRPOTrainer):
        def _calculate_rewards(self, *args):
            ids = torch.ones(1, 4, dtype=torch.long)
            self._get_per_token_logps_and_entropies(self.model, ids, ids, 2)
            return super()._calculate_rewards(*args)

    with pytest.raises(RuntimeError, match="`Changed` made 2 forward passes while scoring where 1 were expected"):
        micro_batches(make(Changed))


def test_a_correction_that_was_never_reached_is_an_error(make):
    class Changed(RolloutCorrectedGRPOTrainer):
        def _compute_loss(self, model, inputs):
            return torch.zeros((), requires_grad=True)  # no forward through the choke point

    trainer = make(Changed)
    with pytest.raises(RuntimeError, match="did not run the policy through `_get_per_token_logps_and_entropies`"):
        trainer.compute_loss(trainer.model, micro_batches(trainer)[0])


@pytest.mark.skipif(Version("1.15") > versions.INSTALLED, reason="TRL computes log-probabilities in chunks itself")
def test_liger_leaves_the_head_and_the_loss_to_trl(make):
    """A fused loss of Liger would compute no log-probabilities for the correction."""
    with pytest.warns(FutureWarning, match="`use_liger_kernel=True` is deprecated"):
        trainer = make(RolloutCorrectedGRPOTrainer, use_liger_kernel=True)
    assert trainer.args.liger_kernel_config == {"fused_linear_cross_entropy": False}
    for owner in (GRPOTrainer, RLOOTrainer):
        assert '"fused_linear_cross_entropy": False' in source_of(owner)


def test_liger_has_no_loss_that_the_correction_does_not_reach(make, monkeypatch):
    has_fused_loss = Version("1.14") > versions.INSTALLED
    assert hasattr(GRPOTrainer, "compute_liger_loss") == has_fused_loss
    assert "liger_loss" not in source_of(RLOOTrainer)
    if not has_fused_loss:
        assert "liger_loss" not in source_of(GRPOTrainer)
        monkeypatch.setattr(GRPOTrainer, "compute_liger_loss", None, raising=False)
    with pytest.raises(ValueError, match=r"`use_liger_kernel` is True: trl .* Set it to False, or install trl 1.14"):
        make(RolloutCorrectedGRPOTrainer, use_liger_kernel=True)
