"""Values of a sampler or of a `rollout_func`: what is refused, what is warned about, and what simply works."""

import math
import warnings
from itertools import cycle

import numpy as np
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from tests.training import (
    TRAINERS,
    VLLM,
    BrokenSampler,
    build,
    freeze_sampler,
    logged,
    losses,
    micro_batches,
    push_by_reload,
    saying,
)


@pytest.fixture
def make(tiny_model_path, tmp_path):
    """A GRPO trainer whose `rollout_func` returns what a function has changed."""

    def make(change, **fields):
        sampler = BrokenSampler(tiny_model_path, change, noise=0.0, min_length=3)
        return build(*TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=sampler, **fields)

    return make


def put(key, value, *, at=None):
    """A change of the result of a `rollout_func`: another value of a key, or at a place in it."""

    def change(output):
        if at is None:
            output[key] = value(output[key]) if callable(value) else value
            return
        *places, last = at
        part = output[key]
        for place in places:
            part = part[place]
        part[last] = value(part[last]) if callable(value) else value

    return change


def masks(value):
    return lambda output: output.update({"env_mask": [[value] * len(ids) for ids in output["completion_ids"]]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("logprobs", None), "came without log-probabilities"),
        (put("logprobs", lambda rows: rows[:-1]), r"`logprobs` must have one list per completion, got 7 lists for 8"),
        (put("logprobs", "text"), "`logprobs` must be a list with one list per completion, got 'text'"),
        (put("logprobs", None, at=[1]), r"`logprobs\[1\]` must be a list with one entry per token .*, got None"),
        (put("logprobs", -0.5, at=[2]), r"`logprobs\[2\]` must be a list with one entry per token .*, got -0.5"),
        (put("logprobs", lambda row: row[:-1], at=[1]), r"`logprobs\[1\]` must have one entry per token"),
        (put("logprobs", lambda row: [[x] for x in row], at=[1]), r"`logprobs\[1\]` must be a flat list"),
        (put("logprobs", "-0.5", at=[1, 2]), r"`logprobs\[1\]\[2\]` must be a number or None, got '-0.5'"),
        (put("logprobs", 1.0, at=[1, 2]), r"`logprobs\[1\]\[2\]` is 1, but a log-probability is at most 0"),
        (put("logprobs", float("inf"), at=[1, 2]), r"`logprobs\[1\]\[2\]` is inf, but a log-probability is at most 0"),
        (put("logprobs", lambda row: [math.exp(x) for x in row], at=[0]), r"`logprobs\[0\]\[\d\]` is 0\.\d+, but a log-"),
        (put("logprobs", lambda row: torch.tensor(row).neg(), at=[3]), r"`logprobs\[3\]\[0\]` is \d.*, but a log-prob"),
        (put("completion_ids", None), "`completion_ids` must have one list of tokens for each of the 8 prompts, got None"),
        (put("completion_ids", lambda rows: rows[:-1]), "`completion_ids` must have one list .* got 7 lists"),
        (put("completion_ids", None, at=[1]), r"`completion_ids\[1\]` must be a list"),
        (put("completion_ids", "abc", at=[1]), r"`completion_ids\[1\]` must be a list .*, got 'abc'"),
        (put("completion_ids", [], at=[1]), r"`completion_ids\[1\]` is empty"),
        (put("completion_ids", 0.5, at=[1, 0]), r"`completion_ids\[1\]\[0\]` must be a whole number, got 0.5"),
        (put("prompt_ids", [[3]], at=[1]), r"`prompt_ids\[1\]\[0\]` must be a whole number, got \[3\]"),
        (lambda output: (masks(1)(output), put("env_mask", None, at=[1])(output)), r"`env_mask\[1\]` must be a list"),
        (lambda output: (masks(1)(output), output["env_mask"][1].pop()), r"`env_mask\[1\]` must have one entry per token"),
        (masks(0.5), r"`env_mask\[0\]\[0\]` must be 1 on a token of the model and 0 on any other, got 0.5"),
        (lambda output: output.update(turn_ids=[None] * 8), r"`turn_ids\[0\]` must be a list"),
        (lambda output: output.update(calls=[1, 2]), "`calls` has 2 entries for 8 completions"),
    ],
)  # fmt: skip
def test_malformed_values_are_named_with_their_place(make, change, message):
    with pytest.raises(ValueError, match=message) as raised:
        make(change).train()
    assert "\n" not in str(raised.value)


def test_a_function_that_returns_no_dictionary_is_refused(tiny_model_path, tmp_path):
    trainer = build(*TRAINERS["grpo"], tiny_model_path, tmp_path, sampler=lambda prompts, trainer: None)
    with pytest.raises(ValueError, match="`rollout_func` must return a dictionary, got None"):
        trainer.train()


def as_arrays(output):
    for key, values in output.items():
        output[key] = [np.asarray(row) for row in values]


def as_tensors(output):
    for key, values in output.items():
        output[key] = tuple(torch.tensor(row) for row in values)


def as_numbers_of_numpy(output):
    for key, values in output.items():
        output[key] = [[np.asarray(x)[()] for x in row] for row in values]


def test_tensors_and_arrays_train_as_lists_do(make):
    expected = losses(make(masks(1)))
    for form in (as_arrays, as_tensors, as_numbers_of_numpy):
        assert losses(make(lambda output, form=form: (masks(1)(output), form(output)))) == expected


def test_what_stands_at_tokens_of_tools_does_not_matter(make):
    def answered(value):
        def change(output):
            masks(1)(output)
            for row, logps in zip(output["env_mask"], output["logprobs"], strict=True):
                row[0], logps[0] = 0, value

        return change

    assert losses(make(answered(1.0))) == losses(make(answered(0.0)))


def test_rounding_above_zero_is_no_error(make):
    trainer = make(put("logprobs", 1e-3, at=[1, 2]), rollout_correction="disabled", max_steps=1)
    trainer.train()
    assert logged(trainer, "nonfinite_fraction") == [0.0]


# Masks that TRL drops -------------------------------------------------------------------------------------------------


def middle_masked(key, form=list, prompt=False, value=0):
    def change(output):
        output[key] = [
            form([1 - value] * len(p) * prompt + [1, value, *[1] * (len(ids) - 2)])
            for p, ids in zip(output["prompt_ids"], output["completion_ids"], strict=True)
        ]

    return change


@pytest.mark.parametrize(
    "key", ["action_mask", "tool_mask", "loss_mask", "response_mask", "assistant_masks", "generated"]
)
@pytest.mark.parametrize("form", [list, np.array, lambda row: torch.tensor(row).bool()])
def test_a_mask_of_tokens_that_trl_drops_is_named_once(make, key, form):
    with pytest.warns(UserWarning, match=f"`rollout_func` returns `{key}`.* and no `env_mask`") as warned:
        make(middle_masked(key, form), max_steps=2).train()
    assert len([x for x in warned if "env_mask" in str(x.message)]) == 1


def test_a_mask_of_prompt_and_completion_is_named(make):
    with pytest.warns(UserWarning, match="`loss_mask`, which has a 0 or 1 for prompt and completion"):
        micro_batches(make(middle_masked("loss_mask", prompt=True, value=0)))


@pytest.mark.parametrize(
    "change",
    [
        middle_masked("is_digit", value=0.5),  # for a reward function
        middle_masked("completion_mask", value=1),  # leaves nothing out
        lambda output: output.update(solved=[i % 2 for i in range(len(output["prompt_ids"]))]),
        lambda output: output.update(calls=[[0, 1]] * 8, name="a", tables={"a": [0, 1]}, labels=[["0"]] * 8),
        lambda output: (middle_masked("env_mask")(output), middle_masked("action_mask")(output)),
    ],
)
def test_other_values_for_reward_functions_are_silent(make, change):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*env_mask")
        micro_batches(make(change))


# Minus infinity of a server -------------------------------------------------------------------------------------------


BELOW = [-9999.0, -9999, np.float32(-9999.0), -math.inf, None, math.nan]


@pytest.mark.filterwarnings("ignore:Step", "ignore:A fraction of")
@pytest.mark.parametrize("value", BELOW)
def test_minus_infinity_of_a_rollout_function_is_no_number(make, value):
    change = put("logprobs", value, at=[1, 1])
    trainer = make(change, max_steps=1, rollout_nan_policy="drop")
    trainer.train()
    assert 0 < logged(trainer, "nonfinite_fraction")[0] < 0.5
    assert logged(trainer, "kl")[0] == pytest.approx(0.0, abs=0.01)
    with pytest.raises(ValueError, match="rollout_nan_policy"):
        make(change, rollout_nan_policy="raise").train()


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore:Step", "ignore:A fraction of")
@pytest.mark.parametrize("kind", TRAINERS)
def test_minus_infinity_of_a_server_is_no_number(kind, tiny_model_path, tmp_path, shared_engine, monkeypatch):
    """vLLM's server has no other way to write it."""
    generate = VLLMGeneration.generate

    def served(self, *args, **kwargs):
        prompt_ids, completion_ids, logprobs, *others = generate(self, *args, **kwargs)
        logprobs[0][0] = [-9999.0]
        return prompt_ids, completion_ids, logprobs, *others

    monkeypatch.setattr(VLLMGeneration, "generate", served)
    fields = {**VLLM, "max_steps": 1, "rollout_correction": "decoupled_token_is"}
    trainer = build(*TRAINERS[kind], tiny_model_path, tmp_path, **fields, rollout_nan_policy="drop")
    trainer.train()
    assert 0 < logged(trainer, "nonfinite_fraction")[0] < 0.5
    assert logged(trainer, "kl")[0] == pytest.approx(0.0, abs=0.01)
    trainer = build(*TRAINERS[kind], tiny_model_path, tmp_path, **fields, rollout_nan_policy="raise")
    with pytest.raises(ValueError, match="rollout_nan_policy"):
        trainer.train()


MODES = {
    "token_truncate": {"mode": "token_truncate", "clip_max": 1.2},
    "token_mask": {"mode": "token_mask", "clip_max": 1.2},
    "sequence_truncate": {"mode": "sequence_truncate", "clip_max": 1.5},
    "sequence_mask": {"mode": "sequence_mask", "clip_max": 1.5},
    "off": {"correction": False},
}


@pytest.mark.vllm
@pytest.mark.parametrize("mode", MODES)
def test_trl_keeps_its_loss_where_a_log_probability_is_no_number(make_broken, mode, caplog):
    """Loss, gradient and weights are TRL's bit for bit, and TRL's metrics and ours are finite."""
    fields = {f"vllm_importance_sampling_{name}": x for name, x in MODES[mode].items()}
    # TRL then drops a completion with a negative advantage and no log-probability, one with -9999, and any healthy one,
    # and keeps one with minus infinity
    fields |= {"off_policy_mask_threshold": -5000.0} if mode == "off" else {}
    theirs = make_broken(GRPOTrainer, GRPOConfig, **fields)
    expected = losses(theirs)
    ours = make_broken(*TRAINERS["grpo"], rollout_correction="trl", rollout_monitor="warn", **fields)
    with saying(caplog, "came without a finite log-probability"):
        assert losses(ours) == expected
    assert min(gradient for _, gradient in expected) > 0
    weights = dict(theirs.model.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in ours.model.named_parameters())
    assert 0 < logged(ours, "nonfinite_fraction")[0] < 0.5
    assert all(math.isfinite(x) for entry in ours.state.log_history for x in entry.values() if isinstance(x, float))
    if mode != "off":
        assert not math.isfinite(theirs.state.log_history[0]["sampling/sampling_logp_difference/max"])


@pytest.fixture
def make_broken(tiny_model_path, tmp_path, shared_engine, monkeypatch):
    """Trainers of a vLLM with weights of its own, which returns minus infinity, -9999 and NaN for a token each."""
    generate = VLLMGeneration.generate

    def served(self, *args, **kwargs):
        prompt_ids, completion_ids, logprobs, *others = generate(self, *args, **kwargs)
        for row, value in zip(logprobs, cycle((-math.inf, -9999.0, None)), strict=False):
            row[0] = [value]
        return prompt_ids, completion_ids, logprobs, *others

    def make(*trainer, **fields):
        trainer = build(*trainer, tiny_model_path, tmp_path, **{**VLLM, "max_steps": 2, **fields})
        push_by_reload(trainer.vllm_generation)
        freeze_sampler(trainer, 0.1)
        return trainer

    monkeypatch.setattr(VLLMGeneration, "generate", served)
    return make
