"""Routing replay: `rollout_routing`."""

import copy
import sys
from textwrap import dedent

import numpy as np
import pytest
import torch

from tests.launching import output_of
from tests.routes_on_a_cpu import ARGUMENTS
from tests.tiny import StaleSampler, build_tiny_model
from tests.training import (
    TRAINERS,
    VLLM,
    assert_gradients_equal,
    evaluation,
    gradients,
    logged,
    losses,
    messages,
    micro_batches,
    saying,
    watcher,
)
from tests.training import backward as backward_of
from tests.training import build as build_trainer
from trl_rollout_corr.replay.capture import RecordingEngine
from trl_rollout_corr.replay.router_hooks import RouterHooks
from trl_rollout_corr.replay.routers import ROUTERS, chosen_experts, find_routers, take
from trl_rollout_corr.replay.sampled_experts import SampledRoutes
from trl_rollout_corr.tools.diagnosis.first_step import FirstStepDiagnosis
from trl_rollout_corr.trainers.keys import AGAIN_LOGPS


SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
LATENT = {
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Model by router class, and what its configuration needs beyond `SIZES`
MODELS = {
    "Qwen2MoeTopKRouter": ("Qwen2Moe", {"num_experts": 8}),
    "Qwen3MoeTopKRouter": ("Qwen3Moe", {"num_experts": 8}),
    "Qwen3NextTopKRouter": ("Qwen3Next", {"num_experts": 8, **LINEAR}),
    "Qwen3_5MoeTopKRouter": ("Qwen3_5Moe", {"num_experts": 8, **LINEAR}),
    "MixtralTopKRouter": ("Mixtral", {"num_local_experts": 8}),
    "OlmoeTopKRouter": ("Olmoe", {"num_experts": 8}),
    "FlexOlmoTopKRouter": ("FlexOlmo", {"num_experts": 8}),
    "GptOssTopKRouter": ("GptOss", {"num_local_experts": 8}),
    "GraniteMoeTopKRouter": ("GraniteMoe", {"num_local_experts": 8}),
    "Glm4MoeTopkRouter": ("Glm4Moe", {"n_routed_experts": 8, "first_k_dense_replace": 1}),
    "Glm4MoeLiteTopkRouter": ("Glm4MoeLite", LATENT),
    "DeepseekV3TopkRouter": ("DeepseekV3", LATENT),
    "MiniMaxM2TopKRouter": ("MiniMaxM2", {"num_local_experts": 8}),
}


def build(kind: str, **more) -> torch.nn.Module:
    import transformers

    text = "Text" if kind == "Qwen3_5Moe" else ""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}{text}Config")(**{**SIZES, **more})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for router in find_routers(model).values():
        torch.nn.init.normal_(router.weight)  # experts that are far from equal
    return model


def routes_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Experts that a model chooses itself, `(B, S, L, k)`."""
    found = {}
    handles = [
        router.register_forward_hook(lambda module, args, out, i=i: found.update({i: chosen_experts(module, out)}))
        for i, router in find_routers(model).items()
    ]
    with torch.no_grad():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return torch.stack([found[i] for i in sorted(found)], 1).view(*ids.shape, len(found), -1).to(torch.uint8)


def backward(model: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(input_ids=ids).logits
    logits.float().log_softmax(-1)[..., 3].sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


IDS = torch.tensor([[3, 7, 9, 4, 11, 30], [5, 6, 8, 2, 21, 10]])


def test_every_router_of_the_table_has_a_model():
    assert set(MODELS) == set(ROUTERS)


@pytest.mark.parametrize("router", MODELS)
def test_replaying_its_own_choice_changes_no_bit(router):
    model = build(MODELS[router][0], **MODELS[router][1])
    assert {type(found).__name__ for found in find_routers(model).values()} == {router}
    routes = routes_of(model, IDS)
    expected, gradients = backward(model, IDS)
    replay = RouterHooks(find_routers(model))
    with replay.over(model, routes) as flipped:
        found, replayed = backward(model, IDS)
    assert torch.equal(found, expected)
    assert not torch.cat(flipped).any()
    assert replayed.keys() == gradients.keys()
    assert all(torch.equal(replayed[name], gradients[name]) for name in gradients)
    replay.end()
    with replay.over(model, (routes + 1) % 8) as flipped:  # other experts
        other, replayed = backward(model, IDS)
    assert not torch.allclose(other, expected, atol=1e-4)
    assert torch.cat(flipped).all()
    routers = [name for name in replayed if any(name.startswith(at) for at in _names(model))]
    assert routers
    assert all(replayed[name].abs().sum() > 0 for name in routers if name.endswith("weight"))
    replay.end()
    assert torch.equal(backward(model, IDS)[0], expected)  # and the choice is the model's again


def _names(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ in ROUTERS]


@pytest.mark.parametrize("router", ["Qwen3MoeTopKRouter", "GptOssTopKRouter", "DeepseekV3TopkRouter"])
def test_gradients_of_the_router_are_those_of_autograd_under_fixed_experts(router):
    model = build(MODELS[router][0], **MODELS[router][1]).double()
    module = next(iter(find_routers(model).values()))
    hidden = torch.randn(5, 32, dtype=torch.float64)
    experts = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [7, 0]])

    def weights(matrix):
        before, module.weight.data = module.weight.data, matrix
        try:
            logits = torch.nn.functional.linear(hidden, matrix, getattr(module, "bias", None))
            output = module(hidden)
            replaced = list(output)
            replaced[ROUTERS[router].places[0]] = logits
            return take(module, tuple(replaced), experts)[1].double()
        finally:
            module.weight.data = before

    matrix = module.weight.detach().clone().requires_grad_()
    slopes = torch.autograd.grad(weights(matrix)[:, 0].sum(), matrix)[0]
    step = 1e-3 * torch.randn(matrix.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (weights(matrix + step)[:, 0].sum() - weights(matrix - step)[:, 0].sum()).item() / 2
    assert slopes.abs().sum() > 0
    assert (slopes * step).sum().item() == pytest.approx(difference, rel=5e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_replays_again(reentrant):
    model = build("Qwen3Moe", num_experts=8)
    routes = (routes_of(model, IDS) + 1) % 8
    replay = RouterHooks(find_routers(model))
    with replay.over(model, routes):
        _, expected = backward(model, IDS)
    replay.end()
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with replay.over(model, routes):
        loss = model(input_ids=IDS).logits.float().log_softmax(-1)[..., 3].sum()
    with torch.no_grad(), replay.over(model, routes.flip(0)):  # another pass before the backward pass
        model(input_ids=IDS)
    model.zero_grad()
    loss.backward()
    found = dict(model.named_parameters())
    for name in expected:
        torch.testing.assert_close(found[name].grad, expected[name], rtol=1e-4, atol=1e-6)


def test_chunks_take_their_own_rows():
    model = build("Qwen3Moe", num_experts=8)
    routes = (routes_of(model, IDS) + torch.tensor([1, 3])[:, None, None, None]) % 8
    replay = RouterHooks(find_routers(model))
    with torch.no_grad():
        with replay.over(model, routes):
            whole = model(input_ids=IDS).logits
        with replay.over(model, routes) as flipped:
            parts = [model(input_ids=part).logits for part in IDS.split(1)]
    torch.testing.assert_close(torch.cat(parts), whole)
    assert len(flipped) == 2
    with (
        pytest.raises(RuntimeError, match="a batch with gradient runs several forward passes"),
        replay.over(model, routes),
    ):
        model(input_ids=IDS[:1])


def test_other_routers_are_refused_by_name():
    from transformers import GraniteMoeSharedConfig, GraniteMoeSharedForCausalLM, Qwen2Config, Qwen2ForCausalLM

    with torch.device("meta"):
        granite = GraniteMoeSharedForCausalLM(GraniteMoeSharedConfig(**SIZES, num_local_experts=4))
    with pytest.raises(ValueError, match=r"the model routes with .*`GraniteMoeSharedTopKRouter`"):
        find_routers(granite)
    with pytest.raises(ValueError, match="the model contains no router"):
        find_routers(Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in SIZES.items() if "moe" not in k})))


# The reader -----------------------------------------------------------------------------------------------------------

TOKENS = [3, 4, 5, 6]


def rows(n: int = 3) -> np.ndarray:
    """Experts of three decoder layers, the first of which has no router."""
    found = np.zeros((n, 3, 2), dtype=np.uint8)
    found[:, 1:] = [[1, 2], [3, 4]]
    return found


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        (None, "enable_return_routed_experts: true}`, or `rollout_routing` to None"),
        (rows() * 0, "The largest expert in the routes of a completion is 0.*moe_backend"),
        (rows(2), "2 rows for 3 tokens.*enable_prefix_caching: false"),
        (
            np.where(np.arange(3)[:, None, None] == 1, -1, rows().astype(int)),
            "2 rows for 3 tokens.*prefix_caching",
        ),
        (rows() + 6, "is 10, but must be 1 to 7"),
        (rows()[:, :2], "at least 3"),
        (rows()[..., :1], "and 2 experts"),
        (rows()[0], "have shape"),
    ],
)
def test_routes_that_do_not_fit_are_refused(experts, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        SampledRoutes([1, 2], 8, 2).keep(TOKENS, experts)


def test_routes_stand_at_the_tokens_of_their_layer():
    sampled = SampledRoutes([1, 2], 8, 2)
    sampled.keep(TOKENS, np.concatenate([rows(), rows()]))  # an engine may run ahead
    other = rows()
    other[:, 1] = [5, 6]
    sampled.keep(TOKENS, other)  # the same tokens, sampled again
    ids = torch.tensor([[0, 0, *TOKENS, 0], [0, *TOKENS, 0, 0], [0, 0, 9, 9, 9, 9, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0, 0]])
    placed = sampled.place(ids, mask, 3)
    assert placed.dtype == torch.uint8
    assert placed.shape == (3, 7, 2, 2)
    assert placed[0, 2:5].tolist() == [[[1, 2], [3, 4]]] * 3
    assert placed[1, 1:4].tolist() == [[[5, 6], [3, 4]]] * 3
    for row, known in enumerate([range(2, 5), range(1, 4), range(0)]):  # the last completion is masked as a whole
        assert all((placed[row, i] == 255).all() == (i not in known) for i in range(7))


def chosen(sampled: SampledRoutes, tokens: list[int]) -> list[int]:
    """First expert of each token, 255 for none."""
    ids = torch.tensor([[0, *tokens]])
    return sampled.place(ids, ids > 0, len(tokens) - 1)[0, 1:, 0, 0].tolist()


def test_a_part_of_a_sequence_has_the_routes_of_the_whole():
    sampled = SampledRoutes([0], 255, 1)

    def keep(tokens, first):
        sampled.keep(tokens, np.arange(first, first + len(tokens) - 1)[:, None, None])

    keep([1, 2, 3, 4, 5], 10)
    keep([1, 2, 3, 9], 20)
    keep([1, 2, 3, 4, 6, 7], 30)
    keep([8, 2], 40)
    assert chosen(sampled, [1, 2, 3, 4]) == [30, 31, 32, 255]  # the sequence that was generated last
    assert chosen(sampled, [1, 2]) == [30, 255]
    keep([1, 2, 3, 4, 5], 50)  # now it is this one
    assert chosen(sampled, [1, 2, 3, 4]) == [50, 51, 52, 255]
    assert chosen(sampled, [1, 2, 3, 9]) == [20, 21, 22, 255]
    # tokens that the sampler has not read
    assert chosen(sampled, [1, 2, 3, 9, 9, 9]) == [20, 21, 22, 255, 255, 255]
    assert chosen(sampled, [1, 2, 3, 4, 6, 9, 9]) == [30, 31, 32, 33, 34, 255, 255]
    assert chosen(sampled, [7, 7]) == [255, 255]
    assert chosen(SampledRoutes([0], 255, 1), [7, 7]) == [255, 255]


def test_one_expert_per_token_may_be_the_first_one():
    sampled = SampledRoutes([0], 8, 1)
    sampled.keep([1, 2, 3], np.zeros((2, 1, 1)))  # a router that has collapsed
    assert chosen(sampled, [1, 2, 3]) == [0, 0, 255]
    with pytest.raises(ValueError, match="must be 0 to 7"):
        sampled.keep([1, 2], np.full((1, 1, 1), 8))


def test_many_experts_have_a_larger_type():
    sampled = SampledRoutes([0], 256, 2)
    sampled.keep([1, 2], np.array([[[255, 0]]]))
    assert sampled.place(torch.tensor([[1, 2]]), torch.ones(1, 2), 1)[0, 0, 0].tolist() == [255, 0]


# The trainers ---------------------------------------------------------------------------------------------------------


class RoutedSampler(StaleSampler):
    """A sampler with the weights of the trainer, whose experts are `shift` places from those that it would choose."""

    def __init__(self, path: str, shift: int, cut: bool = False, turn: str = "whole", **options):
        super().__init__(path, noise=0.0, **options)
        self.cut = cut  # completions that end before their last token
        self.turn = turn  # what has routes: the completion, or more ("cut"), less ("followed") or nothing ("unknown")
        self.shift, self.trainer = shift, None
        self.replay = RouterHooks(find_routers(self.model))

    def __call__(self, prompts, trainer) -> dict:
        self.trainer = trainer
        return super().__call__(prompts, trainer)

    def sample(self, prompts, tokenizer, key: str) -> dict:
        found = super().sample(prompts, tokenizer, key)
        for i in range(0, len(prompts) if self.cut else 0, 2):
            if len(found["completion_ids"][i]) > 1:
                found["completion_ids"][i].pop()
                found["logprobs"][i] = self.score_alone(found["prompt_ids"][i], found["completion_ids"][i])
        return found

    def score(self, prompts: list[list[int]], completions: list[list[int]]) -> list[list[float]]:
        return [*map(self.score_alone, prompts, completions)]

    @torch.no_grad()
    def score_alone(self, prompt: list[int], completion: list[int]) -> list[float]:
        ids = torch.tensor([prompt + completion])
        routes = (routes_of(self.model, ids) + self.shift) % 8
        with self.replay.over(self.model, routes):
            logits = self.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        tokens, rows = ids[0].tolist(), routes[0, :-1]
        if self.turn == "cut":  # the sampler went on for two tokens
            tokens, rows = [*tokens, 3, 4], torch.cat([routes[0], routes[0, -1:]])
        elif self.turn == "followed":  # by a token that the sampler has not read
            tokens, rows = tokens[:-1], rows[:-1]
        if self.trainer.args.rollout_routing is not None and self.turn != "unknown":
            self.trainer.keep_routes(tokens, rows.numpy())
        return logits.log_softmax(-1)[range(len(completion)), completion].tolist()


@pytest.fixture(scope="module")
def moe_path(imported_trl, tmp_path_factory) -> str:
    return build_tiny_model(tmp_path_factory.mktemp("moe"), experts=8)


@pytest.fixture
def make(moe_path, tmp_path):
    def make(shift: int = 1, turn: str = "whole", **fields):
        fields = {"rollout_routing": "replay", "learning_rate": 0.0, "max_steps": 2, **fields}
        sampler = RoutedSampler(moe_path, shift, cut=fields.get("mask_truncated_completions", False), turn=turn)
        return build_trainer(*TRAINERS["grpo"], moe_path, tmp_path, sampler=sampler, **fields)

    return make


def far_off(trainer) -> float:
    return max(map(abs, logged(trainer, "log_ratio_max") + logged(trainer, "log_ratio_min")))


def test_without_replay_other_experts_are_a_gap(make):
    trainer = make(rollout_routing=None)
    assert trainer._metadata()["experts"] == "routed"
    trainer.train()
    assert far_off(trainer) > 0.1
    assert not logged(trainer, "routing_flipped_fraction")


def _lora() -> dict:
    from peft import LoraConfig

    on_experts = {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    return {"extra": {"peft_config": LoraConfig(r=2, **on_experts)}}


@pytest.mark.parametrize(
    "fields",
    [
        {"beta": 0.1, "schedule": "two iterations", "max_steps": 4},
        {"schedule": "several steps per generation", "gradient_checkpointing": True},
        {"rollout_correction": "bypass_ppo_clip", "mask_truncated_completions": True, "rollout_diagnose": True},
        {"beta": 0.1, "lora": True},
        {"schedule": "several generations per step", **evaluation()},
        {"turn": "cut", "schedule": "several steps per generation", "mask_truncated_completions": True},
    ],
    ids=["reference", "old pass", "bypass", "lora", "evaluation", "cut turns"],
)
def test_every_pass_takes_the_experts_of_the_sampler(make, fields):
    fields = dict(fields)
    extra = _lora() if fields.pop("lora", False) else {}
    trainer = make(**fields, **extra)
    trainer.train()
    assert far_off(trainer) < 1e-3
    assert logged(trainer, "routing_flipped_fraction") == [1.0] * trainer.args.max_steps
    if "beta" in fields:
        assert all(abs(entry["kl"]) < 1e-5 for entry in trainer.state.log_history if "kl" in entry)


@pytest.mark.parametrize("normalizes", [False, True])
def test_the_second_look_takes_the_experts_of_the_sampler(make, normalizes):
    # normalised weights are computed before the loss runs
    trainer = make(rollout_diagnose=True, max_steps=1, rollout_is_batch_normalize=normalizes)
    diagnosis, seen = watcher(trainer, FirstStepDiagnosis), []
    corrected = diagnosis.on_batch_corrected
    diagnosis.on_batch_corrected = lambda now, one: (corrected(now, one), seen.append(one))
    trainer.train()
    differences = [
        (one.train_logps - one.batch[AGAIN_LOGPS]).nan_to_num(0.0) for one in seen if AGAIN_LOGPS in one.batch
    ]
    assert differences
    assert max(x.abs().max() for x in differences) < 1e-4


def test_replaying_its_own_choice_leaves_training_alone(make):
    fields = {"learning_rate": 1e-2, "max_steps": 3}
    expected = losses(make(0, rollout_routing=None, **fields))
    trainer = make(0, **fields)
    assert losses(trainer)[0] == expected[0]  # later, the sampler has the weights of the start
    assert logged(trainer, "routing_flipped_fraction")[0] == 0


def test_a_resumed_run_replays(make, tmp_path):
    # an adapter: transformers does not find merged experts in a checkpoint
    fields = {"learning_rate": 1e-3, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, **_lora()}
    expected = losses(make(**fields))
    resumed = make(**fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    found = [(entry["loss"], entry["grad_norm"]) for entry in resumed.state.log_history if "loss" in entry]
    assert found == [pytest.approx(step, rel=1e-4) for step in expected]


def test_a_sampler_without_routes_is_refused_at_its_first_generation(make):
    with pytest.raises(ValueError, match=r"\d+ of \d+ tokens of the loss lack routes, so nothing .*keep_routes"):
        make(turn="unknown").train()


@pytest.mark.parametrize("turn", ["unknown", "followed"])
def test_missing_routes_do_not_end_a_run_that_replays(make, caplog, turn):
    """From the second step on, a sampler has no routes, or none of the last tokens."""
    trainer = make(max_steps=3)
    sample = trainer.rollout_func

    def losing(prompts, trainer):
        sample.turn = turn if trainer.state.global_step else "whole"
        return sample(prompts, trainer)

    trainer.rollout_func = losing
    with saying(caplog, r"tokens of the loss lack routes: the trainer chooses their experts itself"):
        trainer.train()
    assert len([message for message in messages(caplog) if "lack routes" in message]) == 1
    assert len(logged(trainer, "routing_flipped_fraction")) == 3
    assert far_off(trainer) > 1e-3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_loss_by_hand_leaves_the_model_alone(make, checkpointing):
    trainer = make(gradient_checkpointing=checkpointing)
    batches = micro_batches(trainer)
    expected = []
    for batch in batches:
        expected.append(gradients(trainer, batch))
        trainer._replays.experts.end()
    with torch.no_grad():
        own = trainer.model(input_ids=IDS).logits
        ids = torch.cat([batches[0]["prompt_ids"], batches[0]["completion_ids"]], 1)
        of_batch = trainer.model(input_ids=ids).logits
    for batch, gradient in zip(batches, expected, strict=True):
        loss = trainer.compute_loss(trainer.model, batch)
        with torch.no_grad():  # of another size than the batch, and of the same
            assert torch.equal(trainer.model(input_ids=IDS).logits, own)
            assert torch.equal(trainer.model(input_ids=ids).logits, of_batch)
        assert_gradients_equal(backward_of(trainer.model, loss), gradient)


def test_answers_without_routes_outside_of_training_are_no_error():
    from types import SimpleNamespace as Object

    answers = [Object(token_ids=[4, 5], routed_experts=found) for found in (None, rows(1), rows(2))]
    llm = Object(
        generate=lambda *args, **kwargs: [Object(prompt_token_ids=[3], request_id="0", outputs=answers)],
        llm_engine=Object(vllm_config=Object(model_config=Object(enable_return_routed_experts=True))),
    )
    sampled = SampledRoutes([1, 2], 8, 2)
    RecordingEngine(llm, sampled).generate()
    assert "vLLM returned no routes" in sampled.problem
    assert not sampled.without(sampled.place(torch.tensor([[3, 4, 5]]), torch.ones(1, 3), 2), torch.ones(1, 2)).any()


def test_replay_is_set_before_the_trainer_is_built(make):
    trainer = make(rollout_routing=None)
    with pytest.raises(ValueError, match="`rollout_routing` is None, so routes have no effect"):
        trainer.keep_routes([1, 2], None)
    trainer.args.rollout_routing = "replay"
    with pytest.raises(ValueError, match="`rollout_routing` is 'replay', but was None when the trainer was built"):
        trainer.train()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"vllm_mode": "server"}, "TRL's client drops the routes"),
        ({"vllm_tensor_parallel_size": 2}, "`vllm_tensor_parallel_size` is above 1"),
        ({"rollout_routing": "replya"}, "must be one of replay or None"),
    ],
)
def test_samplers_whose_routes_do_not_arrive_are_refused(make, fields, said):
    with pytest.raises(ValueError, match=said):
        make(**{**VLLM, **fields})


@pytest.mark.parametrize("place", ["aux_output_config", "model_config"])  # by release of vLLM
def test_an_engine_that_hides_routes_is_refused(place):
    from types import SimpleNamespace as Object

    config = Object(**{"model_config": Object(), place: Object(enable_return_routed_experts=False)})
    llm = Object(llm_engine=Object(vllm_config=config))
    with pytest.raises(ValueError, match=r"vLLM does not return its routes.*enable_return_routed_experts: true"):
        RecordingEngine(llm, SampledRoutes([0], 8, 2))
    getattr(config, place).enable_return_routed_experts = True
    assert RecordingEngine(llm, SampledRoutes([0], 8, 2)).llm_engine is llm.llm_engine


def test_a_model_that_was_replaced_is_refused(make):
    trainer = make()
    trainer.model = trainer.model_wrapped = copy.deepcopy(trainer.model)
    with pytest.raises(RuntimeError, match="no router of the model was called in a forward pass of the policy"):
        trainer.train()


def test_a_dense_model_is_refused(tiny_model_path, tmp_path):
    with pytest.raises(ValueError, match="the model contains no router"):
        build_trainer(
            *TRAINERS["grpo"],
            tiny_model_path,
            tmp_path,
            sampler=StaleSampler(tiny_model_path),
            rollout_routing="replay",
        )


# vLLM -----------------------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.slow
def test_agents_whose_turns_are_cut_replay(moe_path, tmp_path):
    script = f"""
        from pathlib import Path

        import torch

        from tests.routes_on_a_cpu import ARGUMENTS, returning_routes
        from tests.test_agents import SOURCES
        from tests.tiny import build_tiny_tokenizer, with_tools
        from tests.training import TRAINERS, VLLM, build, evaluation, logged

        kwargs = {{**ARGUMENTS, "dtype": "float32"}}  # the trainer's
        fields = {{
            **VLLM, **evaluation(), "learning_rate": 0.0, "vllm_max_model_length": 128, "max_completion_length": 24,
            "max_tool_calling_iterations": 3, "rollout_routing": "replay", "rollout_engine_kwargs": kwargs,
            "gradient_checkpointing": True,
        }}
        tools = {{**SOURCES["tools"], "eval_dataset": SOURCES["tools"]["train_dataset"].select(range(8))}}
        extra = {{**tools, "processing_class": with_tools(build_tiny_tokenizer(), "look", "place")}}
        with returning_routes():
            trainer = build(*TRAINERS["grpo"], {moe_path!r}, Path({str(tmp_path)!r}), **{{**fields, "extra": extra}})
        place, cut = trainer._replays.experts.sampled.place, []

        def counting(ids, mask, n):
            rows = [tuple(row[found.bool()].tolist()) for row, found in zip(ids, mask)]
            cut.extend(row for row in rows if row not in trainer._replays.experts.sampled._rows)
            return place(ids, mask, n)

        trainer._replays.experts.sampled.place = counting
        trainer.train()
        assert cut
        assert not trainer._replays.experts._warned_unrouted
        assert logged(trainer, "routing_flipped_fraction") == [0.0] * 3
        assert max(logged(trainer, "k3_kl")) < 1e-6
    """
    output_of(sys.executable, "-c", dedent(script))


@pytest.mark.vllm
@pytest.mark.slow  # vLLM has to be new: it prepares for experts, or does not, once per process
def test_vllm_gives_its_experts_to_the_trainer(moe_path, tmp_path):
    script = f"""
        from pathlib import Path
        from tests.routes_on_a_cpu import ARGUMENTS, returning_routes
        from tests.training import TRAINERS, VLLM, build, logged, sharing_engines

        shared = dict(VLLM, learning_rate=0.0, max_steps=3, rollout_engine_kwargs=ARGUMENTS)
        with sharing_engines(), returning_routes():
            for name in TRAINERS:
                trainer = build(*TRAINERS[name], {moe_path!r}, Path({str(tmp_path)!r}), **shared, rollout_routing="replay")
                sampled, kept = trainer._replays.experts.sampled, []
                keep = sampled.keep
                sampled.keep = lambda tokens, experts: kept.append((tokens, experts)) or keep(tokens, experts)
                trainer.train()
                assert logged(trainer, "routing_flipped_fraction") == [0.0] * 3  # in float32 on both sides
                assert max(logged(trainer, "k3_kl")) < 1e-6
                # experts that are moved by one are taken by the trainer, so they come from the sampler's routes
                moved = build(*TRAINERS[name], {moe_path!r}, Path({str(tmp_path)!r}), **shared, rollout_routing="replay")
                keep = moved._replays.experts.sampled.keep
                moved._replays.experts.sampled.keep = lambda tokens, experts: keep(tokens, (experts + 1) % 8)
                moved.train()
                assert logged(moved, "routing_flipped_fraction") == [1.0] * 3
                assert min(logged(moved, "k3_kl")) > 1e-5
                assert all(len(tokens) - 1 == len(experts) for tokens, experts in kept)
                # both sides of a token: its experts, and the tokens that `top_k` kept
                both = dict(shared, rollout_routing="replay", rollout_support="replay", top_k=5)
                cut = build(*TRAINERS[name], {moe_path!r}, Path({str(tmp_path)!r}), **both)
                cut.train()
                assert logged(cut, "routing_flipped_fraction") == [0.0] * 3
                assert max(logged(cut, "k3_kl")) < 1e-6
    """
    output_of(sys.executable, "-c", dedent(script))


@pytest.mark.vllm
@pytest.mark.slow
def test_two_ranks_replay_their_own_completions(moe_path, tmp_path):
    from tests.distributed.test_ranks import launch_and_read

    case = {
        "trainer": "grpo",
        "model": moe_path,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 64,
        "learning_rate": 0.0,
        "rollout_routing": "replay",
        "rollout_engine_kwargs": ARGUMENTS,
    }
    for rank in launch_and_read({"replay": case}, tmp_path / "ranks", 2)["replay"]:
        entries = [entry for entry in rank["history"] if "rollout_corr/routing_flipped_fraction" in entry]
        assert entries
        assert all(entry["rollout_corr/routing_flipped_fraction"] == 0.0 for entry in entries)
        assert all(entry["rollout_corr/k3_kl"] < 1e-6 for entry in entries)
