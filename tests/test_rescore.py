"""Completions scored once more after a push: what the two numbers show of it, in runs with a real vLLM."""

import math
import sys
from contextlib import contextmanager
from functools import partial
from itertools import count
from textwrap import dedent
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig

from tests.launching import ROOT, output_of
from tests.tiny import build_tiny_model
from tests.training import (
    TRAINERS,
    VLLM,
    build,
    build_checked,
    counting_forwards,
    logged,
    losing,
    losses,
    messages,
    said_of_pushes,
    saying,
)
from trl_rollout_corr.pushes import colocated_engine as engine
from trl_rollout_corr.pushes import scoring_sampler, to_vllm
from trl_rollout_corr.pushes.merged_adapters import MergedWeights
from trl_rollout_corr.pushes.rescore import FEW, MOST, SURE, choose, is_due
from trl_rollout_corr.pushes.scoring_sampler import OF_SERVER
from trl_rollout_corr.tools.diagnosis import read_tokens


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*changes the distribution", "ignore:The trainer computes", "ignore:Dropout"),
]


@pytest.fixture
def make(tiny_model_path, tied_model_path, tmp_path, shared_engine):
    def make(kind="grpo", tied=False, build=build_checked, **fields):
        path = tied_model_path if tied else tiny_model_path
        fields = {**VLLM, "max_steps": 9, "learning_rate": 1e-2, "lr_scheduler_type": "constant", **fields}
        trainer = build(*TRAINERS[kind], path, tmp_path, **fields)
        if trainer._pushes.checks is not None:
            trainer._pushes.checks.weights.done = True  # which would end the run first
        return trainer

    return make


def numbers(trainer) -> tuple[list[float], list[float]]:
    trainer.train()
    return logged(trainer, "fresh_k3_kl"), logged(trainer, "age_k3_kl")


@pytest.mark.vllm
@pytest.mark.parametrize("kind", TRAINERS)
def test_after_each_push_kernels_and_age_are_two_numbers(make, kind, caplog):
    fresh, age = numbers(make(kind))
    assert len(fresh) == len(age) == 4  # pushes 1, 2, 4 and 8
    assert max(fresh) < 1e-5
    assert age[0] < 1e-5  # at the first push, the sampler scores what it has just sampled
    assert min(age[1:]) > 1e-4
    assert not messages(caplog)


@pytest.mark.vllm
@pytest.mark.parametrize("fields", [{"temperature": 0.7}, {"top_k": 8}], ids=str)
def test_what_changes_the_values_of_the_sampler_leaves_no_number_of_its_age(make, fields):
    """vLLM scores a text at temperature 1 and without options."""
    fresh, age = numbers(make(max_steps=2, **fields))
    assert len(fresh) == 2
    assert age == []


@pytest.mark.vllm
def test_a_push_that_fails_makes_the_sampler_no_newer(make):
    trainer = make(max_steps=3)
    sync, steps = trainer._pushes._sync_weights, []

    def failing_at_last(*args, **kwargs):
        steps.append(trainer.state.global_step)
        if len(steps) == 3:
            raise ConnectionError
        sync(*args, **kwargs)

    trainer._pushes._sync_weights = failing_at_last
    with pytest.raises(ConnectionError):
        trainer.train()
    assert trainer.rollout_step == steps[1] < trainer.state.global_step


@pytest.mark.vllm
def test_a_run_is_the_same_bit_for_bit_with_and_without_it(make):
    """And the trainer makes no forward pass more than eight at each of the first three looks, and two at the fourth."""
    runs, forwards = [], []
    for monitor in ("warn", None):
        trainer = make(rollout_monitor=monitor, model_init_kwargs={"attention_dropout": 0.1})
        with counting_forwards(trainer) as count:
            torch.manual_seed(0)
            runs.append((losses(trainer), [x["completions/mean_length"] for x in trainer.state.log_history[:-1]]))
            forwards.append(count["forwards"])
    assert runs[0] == runs[1]
    assert forwards[0] - forwards[1] == SURE * MOST + FEW


@pytest.mark.vllm
@pytest.mark.parametrize("chunked", [True, False])
def test_a_score_makes_vllm_compute_the_logits_of_few_tokens_at_once(make, monkeypatch, chunked):
    """vLLM has the logits of all tokens that it reads in a step, twice and for the whole vocabulary."""
    monkeypatch.setattr(engine, "AT_ONCE", 9)  # more than texts, as a step also has logits of the last token of each
    trainer = make(max_steps=2, max_completion_length=16)
    config = trainer.vllm_generation.llm.llm_engine.vllm_config.scheduler_config
    monkeypatch.setattr(config, "enable_chunked_prefill", chunked)  # without, the scheduler reads whole prompts
    model = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.get_model()
    compute_logits, score, at_once, texts = model.compute_logits, scoring_sampler.score_in_process, [], []

    def noting(hidden, *args, **kwargs):
        at_once[-1].append(len(hidden))
        return compute_logits(hidden, *args, **kwargs)

    def scoring(generation, asked):
        at_once.append([])
        texts.extend(asked)
        with patch.object(model, "compute_logits", noting):
            return score(generation, asked)

    monkeypatch.setattr(scoring_sampler, "score_in_process", scoring)
    fresh, _ = numbers(trainer)
    assert max(fresh) < 1e-8
    assert max(map(len, texts)) > 9
    assert {max(of_look) for of_look in at_once} == {9}


@pytest.mark.vllm
def test_an_engine_that_computes_all_logits_at_once_is_not_asked_and_says_so_once(make, monkeypatch, caplog):
    """As the second runner of vLLM does without chunked prefill."""
    monkeypatch.setattr(engine, "OF_PROMPTS", "_unknown")
    trainer = make()
    config = trainer.vllm_generation.llm.llm_engine.vllm_config.scheduler_config
    monkeypatch.setattr(config, "enable_chunked_prefill", False)
    assert numbers(trainer) == ([], [])
    assert ["logits of a whole text at once" in x for x in said_of_pushes(caplog)] == [True]


@pytest.mark.parametrize(("prompt", "texts", "tokens"), [(100, 8, 156), (250, 8, 64), (500, 8, 12), (3000, 1, 64)])
def test_a_server_reads_short_texts_however_long_its_prompts_are(prompt, texts, tokens):
    ones = torch.ones(8, 2000, dtype=torch.long)
    batch = {"prompt_ids": ones[:, :1].repeat(1, prompt), "completion_ids": ones, "completion_mask": ones}
    batch["prompt_mask"] = batch["prompt_ids"]
    found = choose(batch, ones, ones.float(), None, OF_SERVER)
    assert [len(text.completion) for text in found] == [tokens] * texts
    assert {len(text.ids) for text in found} == {prompt + tokens}
    alone = choose(batch, ones, ones.float(), None, None)
    assert [len(text.completion) for text in alone] == [min({1: 4096, 8: 512}[texts] - prompt, 2000)] * texts


def test_scores_come_after_odd_and_even_pushes():
    assert [*filter(is_due, range(1, 150))] == [1, 2, 4, 8, 16, 33, 66, 99, 132]


# Faults of a push -----------------------------------------------------------------------------

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BFLOAT16 = {"model_init_kwargs": {"dtype": "bfloat16"}, "rollout_engine_kwargs": {"dtype": "bfloat16"}}
QUANTISED = {"rollout_engine_kwargs": {"quantization": "fp8_per_channel", "dtype": "bfloat16"}}


def adapter(**options):
    return {"extra": {"peft_config": LoraConfig(r=4, target_modules=LINEAR, **options)}}


def sending_the_base_alone():
    return patch.object(MergedWeights, "__getitem__", lambda self, parameter: parameter)


def sending_twice_the_adapter():
    from peft.tuners.lora.layer import Linear

    delta = Linear.get_delta_weight
    return patch.object(Linear, "get_delta_weight", lambda self, name: 2 * delta(self, name))


@contextmanager
def keeping_old_scales():
    """As a push that loads values into tensors of 8 bits, whose scales are those of the first push."""
    push, scales = to_vllm.push, {}

    def push_values(llm, weights):
        push(llm, weights)
        held = dict(llm.llm_engine.model_executor.driver_worker.get_model().named_parameters())
        for name in [name for name in held if name.endswith("weight_scale")]:
            weight, scale = held[name.removesuffix("_scale")].data, held[name].data
            old = scales.setdefault(name, scale.clone())
            exact = weight.float() * scale.reshape(1, -1)
            weight.copy_((exact / old.reshape(1, -1)).clamp(-448, 448).to(weight.dtype))
            scale.copy_(old)

    with patch.object(to_vllm, "push", push_values):
        yield


def monitored(*args, **fields):
    """A trainer with the alarm, whose other checks would end a run first."""
    trainer = build(*args, **{"rollout_monitor": "warn", **fields})
    trainer._pushes.checks.weights.done = True
    return trainer


FAULTS = {
    **{lost: (partial(losing, lost), {}) for lost in ("everything", "one layer", "the head", "every second push")},
    "the adapter": (sending_the_base_alone, adapter()),
    "the adapter, bfloat16": (sending_the_base_alone, adapter() | BFLOAT16 | {"learning_rate": 1e-3}),
    "a wrong scale of the adapter": (sending_twice_the_adapter, adapter()),
    "a wrong scale of the adapter, bfloat16": (
        sending_twice_the_adapter,
        adapter() | BFLOAT16 | {"learning_rate": 1e-3},
    ),
    # the scales are too small only after weights have moved far
    "old scales of 8 bits": (keeping_old_scales, QUANTISED | {"learning_rate": 7e-2}),
}


@pytest.mark.vllm
@pytest.mark.parametrize("fault", FAULTS)
def test_a_push_that_does_not_arrive_as_it_is_raises_the_alarm(make, fault, caplog):
    begin, fields = FAULTS[fault]
    trainer = make(build=monitored, **{"max_steps": 5, **fields})
    with begin():
        fresh, age = numbers(trainer)
    assert len(fresh) == 3
    assert max(fresh) > 50 * fresh[0]
    assert max(fresh) > 0.001 * max(age)
    assert any("fresh_gap" in message for message in said_of_pushes(caplog))


@pytest.mark.vllm
def test_a_fault_that_comes_late_is_measured_on_all_eight_completions(make, caplog):
    """Where two of them are enough as long as their gap is usual."""
    trainer = make(build=monitored, max_steps=17, learning_rate=1e-3)
    with losing("pushes from the tenth on"), counting_forwards(trainer) as count:
        fresh, _ = numbers(trainer)
    assert len(fresh) == 5  # pushes 1, 2, 4, 8 and 16
    assert fresh[4] > 1e-3 > 100 * max(fresh[:4]), fresh
    assert count["forwards"] == 17 * 2 + SURE * MOST + FEW + MOST
    assert any("fresh_gap" in message for message in said_of_pushes(caplog))


@pytest.mark.vllm
def test_a_resumed_run_whose_pushes_are_lost_is_told(make, tmp_path, caplog):
    """The run before the checkpoint has told how large the gap is with equal weights."""
    trainer = make(max_steps=2, save_strategy="steps", save_steps=2)
    first = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    trainer = make(build=monitored, max_steps=4)
    with losing("everything", held=first), saying(caplog, "fresh_gap"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    fresh = logged(trainer, "fresh_k3_kl")  # with that of the first two steps
    assert max(fresh[2:]) > 1000 * max(fresh[:2])


@pytest.mark.vllm
@pytest.mark.slow  # vLLM prepares for experts, or does not, once per process
def test_an_expert_that_is_lost_is_told_and_other_runs_with_experts_hear_nothing(tmp_path):
    path = build_tiny_model(tmp_path / "model", experts=4)
    script = f"""
        from contextlib import nullcontext
        from pathlib import Path
        from tests.test_rescore import BFLOAT16, monitored
        from tests.training import TRAINERS, VLLM, logged, losing, sharing_engines

        fields = dict(VLLM, max_steps=9, lr_scheduler_type="constant", learning_rate=1e-3)
        with sharing_engines():
            for fault in (nullcontext, lambda: losing("one expert")):
                for more in ({{}}, {BFLOAT16!r}):
                    trainer = monitored(*TRAINERS["grpo"], {path!r}, Path({str(tmp_path)!r}), **fields, **more)
                    trainer._pushes.checks.weights.done = True  # which would end the run first
                    with fault():
                        trainer.train()
                    print("fresh", *logged(trainer, "fresh_k3_kl"))
    """
    found = output_of(sys.executable, "-c", dedent(script)).splitlines()
    healthy, in_bfloat16, lost, lost_in_bfloat16 = (
        [float(x) for x in line.split()[1:]] for line in found if line.startswith("fresh ")
    )
    assert max(healthy) < 1e-9
    assert max(in_bfloat16) < 20 * min(in_bfloat16[:3])
    assert max(lost) > 1e-3
    assert max(lost_in_bfloat16) > 20 * min(lost_in_bfloat16[:3])


@contextmanager
def scoring_wrongly(change, looks=lambda n: True):
    """A vLLM whose log-probabilities of the first text are changed, at some of the looks."""
    score, number = scoring_sampler.score_in_process, count(1)

    def scored(generation, texts):
        logps = score(generation, texts)
        return [change(logps[0]), *logps[1:]] if looks(next(number)) else logps

    with patch.object(scoring_sampler, "score_in_process", scored):
        yield


@pytest.mark.vllm
@pytest.mark.parametrize("far", [-89.0, -1e4])
def test_a_token_far_apart_keeps_the_numbers_finite(make, far, tmp_path):
    """Where the ratio of one token overflows, in the log of the run and in its diagnosis."""
    trainer = make(build=monitored, max_steps=3, rollout_dump_dir=str(tmp_path / "dump"))
    with scoring_wrongly(lambda logps: [*logps[:-1], logps[-1] + far]):
        fresh, age = numbers(trainer)
    assert len(fresh) == len(age) == 2
    assert all(1e20 < x < 1e30 for x in fresh)
    assert all(map(math.isfinite, age))
    assert len(read_tokens(tmp_path / "dump").log.scored_again) == 2


@pytest.mark.vllm
def test_one_text_that_is_scored_wrongly_is_no_push_that_was_lost(make, caplog):
    trainer = make(build=monitored, max_steps=5)
    with scoring_wrongly(lambda logps: [x - 2.0 for x in logps], looks=lambda n: n >= 2):
        fresh, _ = numbers(trainer)
    assert fresh[0] < 1e-5 < 1e-2 < min(fresh[1:])
    said = next(message for message in said_of_pushes(caplog) if "fresh_gap" in message)
    assert "1 of 8 texts has all of the gap" in said
    assert "did not arrive, or only in part" not in said


# Samplers that are old, and why ---------------------------------------------------------------------------------------


def lagging(trainer, announced: bool):
    """As the examples and benchmarks do: weights of some pushes ago are sent."""
    from quickstart import Lag

    lag = Lag(trainer, 4)
    send = trainer.vllm_generation._iter_named_params

    def silent():
        yield from send()
        trainer.rollout_step = trainer.state.global_step

    if not announced:
        trainer.vllm_generation._iter_named_params = silent
    return lag


def holding_back(trainer):
    """Three of four pushes are not made."""
    push, number = trainer.vllm_generation.sync_weights, count()
    trainer.vllm_generation.sync_weights = lambda: push() if next(number) % 4 == 0 else None


def sending_nothing(trainer):
    """Three of four pushes are made, and nothing is in them."""
    send, number = trainer.vllm_generation._iter_named_params, count()
    trainer.vllm_generation._iter_named_params = lambda: send() if next(number) % 4 == 0 else iter(())


@pytest.mark.vllm
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_sampler_that_is_older_and_says_so_has_no_fresh_number_and_no_alarm(make, kind, monkeypatch, caplog):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    trainer = make(kind, build=monitored)
    trainer._pushes.checks.weights.done = False
    lagging(trainer, announced=True)
    fresh, age = numbers(trainer)
    assert len(fresh) == len(age) == 1  # of the first push, which is no older
    assert max(logged(trainer, "k3_kl")) > 0.1
    assert not said_of_pushes(caplog)


@pytest.mark.vllm
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("way", ["silent", "held back", "nothing sent"])
def test_a_sampler_that_is_older_and_does_not_say_so_ends_no_run(make, way, tied, monkeypatch, caplog):
    """Older weights may be wanted. What is said of them is a warning that names this first."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    fields = {"tied": True, **BFLOAT16} if tied else {}
    trainer = make(build=monitored, max_steps=12, **fields)
    trainer._pushes.checks.weights.done = False
    {"silent": lambda x: lagging(x, announced=False), "held back": holding_back, "nothing sent": sending_nothing}[way](
        trainer
    )
    numbers(trainer)
    said = said_of_pushes(caplog)
    if way == "held back":
        assert not said  # each push that is made arrives
    else:
        assert any("may be older on purpose" in message and "fresh_gap" in message for message in said)
    assert trainer.state.global_step == 12


# Healthy runs of many kinds -------------------------------------------------------------------------------------------

QUICK = {
    "rloo, bfloat16": ("rloo", BFLOAT16),
    "min_tokens, tied head, bfloat16": ("grpo", {"tied": True, "generation_kwargs": {"min_tokens": 6}, **BFLOAT16}),
    "trainer in float32, sampler in bfloat16": ("grpo", {"rollout_engine_kwargs": {"dtype": "bfloat16"}}),
    "rsLoRA, several steps per generation": (
        "grpo",
        {**adapter(use_rslora=True), "schedule": "several steps per generation", "learning_rate": 1e-3},
    ),
    "DoRA, bfloat16, temperature": ("grpo", {**adapter(use_dora=True), **BFLOAT16, "temperature": 0.7}),
    "8 bits, top_k": ("grpo", {**QUANTISED, "top_k": 8}),
}


@pytest.mark.vllm
@pytest.mark.parametrize("case", QUICK)
def test_healthy_runs_hear_nothing_of_their_pushes(make, case, caplog):
    """`test_weight_check_runs.py` has many more kinds."""
    kind, fields = QUICK[case]
    trainer = make(kind, build=monitored, **{"max_steps": 5, "learning_rate": 1e-3, **fields})
    trainer._pushes.checks.weights.done = False
    fresh, _ = numbers(trainer)
    assert len(fresh) >= 2
    assert max(fresh) < 10 * max(fresh[0], 1e-5)
    assert not said_of_pushes(caplog)
