"""
Train TRL's trainers and ours on the same completions, and look at what came out.

As in `tiny.py`, TRL is imported when it is needed.
"""

import functools
import importlib.metadata
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from types import ModuleType
from typing import Any

import pytest
import torch

import trl_rollout_corr
from tests.launching import benchmarks, free_port
from tests.tiny import StaleSampler, length_reward, load_model, prompts
from trl_rollout_corr import RolloutCorrectionConfig
from trl_rollout_corr.correction.metrics import Statistics
from trl_rollout_corr.correction.sums import Sums
from trl_rollout_corr.pushes.reloading import push


# Accelerate reads the metadata of packages at every forward pass, which takes a fifth of the time that a tiny model trains
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)


class Trainers(Mapping[str, tuple[type, type]]):
    """Our trainers and their configurations by name, imported when one is asked for."""

    def __getitem__(self, name: str) -> tuple[type, type]:
        prefix = "RolloutCorrectedAsyncGRPO" if name == "async_grpo" else f"RolloutCorrected{name.upper()}"
        return getattr(trl_rollout_corr, f"{prefix}Trainer"), getattr(trl_rollout_corr, f"{prefix}Config")

    def __iter__(self) -> Iterator[str]:
        return iter(("grpo", "rloo"))

    def __len__(self) -> int:
        return 2


TRAINERS = Trainers()


def push_by_reload(generation):
    """As the benchmarks do: TRL's own trainers cannot push weights to a vLLM on a CPU."""
    _reloading().push_by_reload(generation)


@functools.cache
def _reloading() -> ModuleType:
    with benchmarks("") as load:
        return load("reloading")


# (gradient_accumulation_steps, steps_per_generation, num_iterations)
SCHEDULES = {
    "aligned": (2, 2, 1),
    "several generations per step": (4, 2, 1),
    "several steps per generation": (2, 4, 1),
    "not a multiple": (3, 2, 1),
    "two iterations": (2, 2, 2),
    "two iterations within a step": (4, 2, 2),
}
# Schedules in which every sample is visited before the first update since its generation
VISITED_BEFORE_UPDATE = [name for name, (ga, spg, _) in SCHEDULES.items() if ga % spg == 0]


# A colocated vLLM. What it samples depends on the processor, so there are sixteen completions a step: in any sample, some of
# them are what a test looks for.
VLLM = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_max_model_length": 64,
    "temperature": 1.0,
    "beta": 0.0,
    "per_device_train_batch_size": 8,
}


# On a CPU, with nothing written, shown or tracked
# TRL checkpoints activations by default, which takes a seventh of a small training. Tests of it set it
PLAIN = {
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "gradient_checkpointing": False,
}


def config_fields(output_dir, schedule: str = "aligned", **fields) -> dict[str, Any]:
    accumulation, per_generation, iterations = SCHEDULES[schedule]
    return {
        "output_dir": str(output_dir),
        **PLAIN,
        "logging_steps": 1,
        "rollout_monitor": None,  # these samplers are ill on purpose
        "max_steps": 3,
        "learning_rate": 3e-4,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": per_generation,
        "num_iterations": iterations,
        **fields,
    }


def build(trainer_class, config_class, model, folder, *, sampler=None, schedule="aligned", extra=None, **fields):
    """
    A trainer on the tiny model. `extra` are arguments of the trainer, `fields` those of its configuration, which corrects with
    `auto` unless they name a correction.
    """
    arguments = {"reward_funcs": length_reward, "train_dataset": prompts(64), **(extra or {})}
    if sampler is not None:
        arguments["rollout_func"] = sampler
    fields = config_fields(**{"output_dir": folder, "schedule": schedule, **fields})
    if not issubclass(config_class, RolloutCorrectionConfig):
        del fields["rollout_monitor"]
    elif fields.keys().isdisjoint({"rollout_correction", "rollout_is", "rollout_rs"}):
        fields["rollout_correction"] = "auto"
    return trainer_class(model, args=config_class(**fields), **arguments)


def build_with_dropout(path: str, folder, **fields):
    """A trainer whose model drops a part of its attention, and whose sampler does not."""
    from transformers import AutoModelForCausalLM

    trainer = trl_rollout_corr.RolloutCorrectedGRPOTrainer, trl_rollout_corr.RolloutCorrectedGRPOConfig
    model = AutoModelForCausalLM.from_pretrained(path, attention_dropout=0.3)
    sampler = StaleSampler(path, noise=0.0, min_length=8)
    with pytest.warns(UserWarning, match=r"`attention_dropout=0\.0` where you load it"):
        return build(*trainer, model, folder, sampler=sampler, model_init_kwargs=None, **fields)


def build_checked(*args, **fields):
    """A trainer that checks its pushes, but raises no alarm: these samplers are ill on purpose."""
    trainer = build(*args, **{"rollout_monitor": "warn", **fields})
    trainer.remove_callback(trl_rollout_corr.RolloutCorrectionMonitor)
    return trainer


def asking_vllm(prompts, trainer):
    """A `rollout_func` that samples with the trainer's vLLM, as TRL's documents do."""
    from vllm import SamplingParams

    prompt_ids = trainer.processing_class(prompts)["input_ids"]
    params = SamplingParams(max_tokens=8, logprobs=0)
    outputs = trainer.vllm_generation.llm.generate([{"prompt_token_ids": ids} for ids in prompt_ids], params)
    texts = [output.outputs[0] for output in outputs]
    logprobs = [[ranked[token].logprob for token, ranked in zip(x.token_ids, x.logprobs, strict=True)] for x in texts]
    return {"prompt_ids": prompt_ids, "completion_ids": [list(x.token_ids) for x in texts], "logprobs": logprobs}


def losses(trainer) -> list[tuple[float, float]]:
    """Train, and return loss and gradient norm of each step."""
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def assert_same_steps(found: list[tuple[float, float]], expected: list[tuple[float, float]]):
    """Losses and gradient norms are equal, but for the rounding of float32, which Adam carries from step to step."""
    assert found == [pytest.approx(step, rel=1e-4, abs=1e-5) for step in expected]


def window(trainer, kind: type[Sums] = Statistics):
    """Sums of the current logging window so far."""
    return trainer._observer.windows["train"].sums[kind]


def assert_same_metrics(found: dict[str, float], expected: dict[str, float], rel: float = 1e-4, abs: float = 1e-5):
    """Metrics are equal, but for rounding."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=rel, abs=abs, nan_ok=True), key


def watcher(trainer, kind: type):
    """The watcher of a trainer of this class."""
    return next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind))


def logged(trainer, key: str) -> list[float]:
    return [entry[f"rollout_corr/{key}"] for entry in trainer.state.log_history if f"rollout_corr/{key}" in entry]


def assert_trains(trainer):
    """Train, and see that losses are finite, parameters move and metrics are reported."""
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    steps = losses(trainer)
    assert all(math.isfinite(x) for step in steps for x in step)
    assert any(gradient > 0 for _, gradient in steps)
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters() if p.requires_grad)
    assert logged(trainer, "kl")


def assert_in_step(trainer):
    """See that the sampler gave every token the probability that the trainer gives it, up to rounding."""
    assert max(map(abs, logged(trainer, "log_ratio_max") + logged(trainer, "log_ratio_min"))) < 1e-4


def evaluation() -> dict[str, Any]:
    """Arguments of `build` that add an evaluation at the second step."""
    return {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
        "extra": {"eval_dataset": prompts(8)},
    }


def assert_evaluates(trainer):
    """Train three steps with `evaluation()`, and see that training and evaluation report metrics of their own."""
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluations
    assert all(math.isfinite(entry["eval_rollout_corr/k3_kl"]) for entry in evaluations)
    assert not any("rollout_corr/kl" in entry for entry in evaluations)
    assert len(logged(trainer, "kl")) == 3


def messages(caplog) -> list[str]:
    """Warnings and errors of the run so far, each in one line."""
    return [text for level, text in _logged(caplog) if level > logging.INFO]


def told(caplog) -> list[str]:
    """What the run said of itself so far, each message in one line."""
    return [text for level, text in _logged(caplog) if level == logging.INFO]


def _logged(caplog) -> list[tuple[int, str]]:
    of_package = [record for record in caplog.records if record.name == "trl_rollout_corr"]
    return [(record.levelno, " ".join(record.getMessage().split())) for record in of_package]


def said_of_pushes(caplog) -> list[str]:
    """Messages without alarms about other things, such as a policy that moves too fast, and without those of the start."""
    alarm = re.compile(r"[▲✖●] step .*\[(?!fresh_gap)\w+ [<>]")
    return [x for x in messages(caplog) if not alarm.match(x) and "vLLM rounds" not in x]


@contextmanager
def saying(caplog, pattern: str):
    """See that a message of the run contains a pattern."""
    caplog.clear()
    yield
    assert [message for message in messages(caplog) if re.search(pattern, message)], messages(caplog)


@contextmanager
def counting_forwards(trainer):
    """Counts forward passes of the policy, in chunks as TRL makes them."""
    count = {"forwards": 0}

    def hook(*_):
        count["forwards"] += 1

    handle = trainer.model.register_forward_pre_hook(hook)
    try:
        yield count
    finally:
        handle.remove()


def gradients(trainer, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients of TRL's loss on one micro-batch."""
    return backward(trainer.model, trainer.compute_loss(trainer.model, batch))


@contextmanager
def corrected_batches(trainer) -> Iterator[list[torch.Tensor]]:
    """The coefficients, `(B, T)`, of each batch that is corrected meanwhile."""
    found: list[torch.Tensor] = []
    record = trainer._record

    def keep(corrected):
        found.append(corrected.coefficients)
        record(corrected)

    trainer._record = keep
    yield found
    trainer._record = record


def policy_logps(model, batch: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities of the completions under a model, with gradient, without any of TRL's code."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    length = batch["completion_ids"].size(1)
    logits = model(ids, attention_mask=attention_mask).logits[:, -length - 1 : -1]
    return logits.log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)


def plain_model(path: str, weights: dict[str, torch.Tensor], dtype=torch.float32):
    """A model of transformers that TRL has not touched."""
    model = load_model(path, dtype).eval()
    model.load_state_dict(weights)
    return model


def backward(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of a loss."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]):
    """Equal up to float32, relative to the largest gradient."""
    scale = max(gradient.abs().max() for gradient in expected.values())
    assert scale > 0
    for name, gradient in expected.items():
        difference = (found[name].double() - gradient.double()).abs().max() / scale
        assert difference < 2e-5, f"{name}: {difference}"


def micro_batches(trainer) -> list[dict[str, Any]]:
    """The first generation batch, split as in training."""
    torch.manual_seed(0)  # TRL shuffles
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    generation_batch = next(iter(trainer.get_train_dataloader()))
    trainer._prepare_inputs(generation_batch)
    return trainer._buffered_inputs


@contextmanager
def sharing_engines():
    """
    Make TRL build one vLLM engine per model and process, and use it in every trainer: in float32, or in the type that
    `rollout_engine_kwargs` asks for.
    """
    from transformers import AutoConfig
    from trl.generation import vllm_generation

    engine_class, engines = vllm_generation.LLM, {}

    def shared(model: str, *, dtype: str = "float32", **options):
        key = model, dtype, options.get("quantization")
        if key not in engines:
            if not torch.distributed.is_initialized():
                os.environ["MASTER_PORT"] = str(free_port())
            # blocks of the cache: else it is a gigabyte
            context = AutoConfig.from_pretrained(model).get_text_config().max_position_embeddings
            room = min(256, context)
            small = {"max_num_seqs": 64, "max_model_len": room, "num_gpu_blocks_override": 256}
            options = {**options, **small, "dtype": dtype, "enforce_eager": True}
            with torch.random.fork_rng():  # the first trainer draws what the others draw
                engines[key] = engine_class(model, **options)
        return engines[key]

    vllm_generation.LLM = shared
    try:
        yield
    finally:
        vllm_generation.LLM = engine_class


def freeze_sampler(trainer, spread: float) -> dict[str, torch.Tensor]:
    """
    Give vLLM weights of its own, which are returned, and never push the trainer's. A spread of NaN breaks the head alone:
    in the layers below, NaN would stay in the cache of keys and values after better weights are pushed.
    """
    generator, below = torch.Generator().manual_seed(0), 0.0 if math.isnan(spread) else spread
    weights = [
        (
            name,
            p
            + torch.randn(p.shape, generator=generator) * p.std().nan_to_num() * (spread if "head" in name else below),
        )
        for name, p in trainer.vllm_generation._iter_named_params()
    ]
    push(trainer.vllm_generation.llm, weights)
    trainer.vllm_generation.sync_weights = lambda: None
    return dict(weights)


# Weights that a push loses, by the number of the push and the name of the weight
LOST: dict[str, Callable[[int, str], bool]] = {
    "everything": lambda push, name: True,
    "the head": lambda push, name: name == "lm_head.weight",
    "one layer": lambda push, name: ".layers.1." in name,
    "norms": lambda push, name: "norm" in name,
    "keys": lambda push, name: "k_proj.weight" in name,  # which vLLM fuses with queries and values
    "half of the keys": lambda push, name: "k_proj.weight" in name,
    "one row of the head": lambda push, name: name == "lm_head.weight",
    "experts": lambda push, name: ".experts." in name,
    "one expert": lambda push, name: ".experts." in name,
    "every second push": lambda push, name: push % 2 == 1,
    "every third push": lambda push, name: push % 3 == 1,
    "all but every third push": lambda push, name: push % 3 != 0,
    "all but every fourth push": lambda push, name: push % 4 != 0,
    "pushes from the tenth on": lambda push, name: push >= 10,
}


@contextmanager
def losing(lost: str, held: dict[str, torch.Tensor] | None = None) -> Iterator[None]:
    """
    Some of the weights that are pushed do not arrive, and nothing says so. The first push is complete, unless the weights that
    the sampler holds before are given.
    """
    from trl_rollout_corr.pushes import to_vllm

    count_of_push, holds = count(0 if held is None else 1), dict(held or {})

    def push_some(llm, weights):
        n = next(count_of_push)
        for name, weight in weights:
            if n == 0 or not LOST[lost](n, name):
                holds[name] = weight.detach().clone()
            elif lost == "one expert":  # the experts of a layer are one tensor
                holds[name] = torch.cat([holds[name][:1], weight.detach()[1:]])
            elif lost in ("half of the keys", "one row of the head"):  # the rest of the rows arrives
                n = 1 if "row" in lost else len(weight) // 2
                holds[name] = torch.cat([weight.detach()[:-n], holds[name][-n:]])
        push(llm, holds.items())

    to_vllm.push = push_some
    try:
        yield
    finally:
        to_vllm.push = push


class BrokenSampler(StaleSampler):
    """A sampler whose log-probabilities are changed by a function before they are returned."""

    def __init__(self, model_path: str, change: Callable[[dict], None], **kwargs):
        super().__init__(model_path, **kwargs)
        self.change = change

    def sample(self, *args, **kwargs) -> dict:
        output = super().sample(*args, **kwargs)
        self.change(output)
        return output
