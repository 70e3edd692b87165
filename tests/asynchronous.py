"""
TRL's asynchronous trainer and ours on the same samples, without a server: a rollout worker in this process.

As in `tiny.py`, TRL is imported when it is needed.
"""

import asyncio
import queue
import random
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import trl_rollout_corr
from tests.launching import ROOT
from tests.tiny import PROMPTS, StaleSampler, load_model, prompts
from tests.training import PLAIN
from trl_rollout_corr.messages import notify


class WeightsStay:
    """A weight transfer that transfers nothing."""

    def init_weight_transfer(self):
        pass

    pause = resume = destroy = init_weight_transfer

    def send_weights(self, iterator):
        for _ in iterator:
            pass


class ReplicasHere(WeightsStay):
    """
    A weight transfer to two models in this process, which score texts as the replicas of a server. The second one misses the
    pushes of these numbers, counted from 1.
    """

    def __init__(self, model_path, misses=()):
        self.models = [load_model(model_path).eval() for _ in range(2)]
        self.misses, self.pushes = misses, 0

    def send_weights(self, iterator):
        self.pushes += 1
        weights = {name: weight.detach().clone() for name, weight in iterator}
        for number, model in enumerate(self.models):
            if number == 0 or self.pushes not in self.misses:
                model.load_state_dict(weights)

    @torch.no_grad()
    def score(self, url, name, text, replica):
        """As `pushes.server_api.score_on_server`."""
        logps = self.models[replica](torch.tensor([text])).logits[0, :-1].log_softmax(-1)
        return logps.gather(1, torch.tensor(text[1:])[:, None])[:, 0].tolist()


class WorkerHere:
    """
    A rollout worker in this process, which makes a sample whenever one is taken from its queue. The same ones every time.

    Args:
        model_path (`str`):
            Model of the sampler.
        lags (`tuple[int]`):
            Versions that samples are behind the trainer's, in turns.
        change (`Callable`, *optional*):
            Changes each sample, or returns another.
        turns (`int`, *optional*, defaults to `1`):
            Turns of a conversation, with two tokens of a tool between them.
        end (`int`, *optional*):
            Number of samples after which there are none.
    """

    def __init__(self, model_path, *, lags=(0, 1, 2), change=None, group=4, turns=1, end=None, seed=0, **sampling):
        from transformers import AutoTokenizer

        self.sampler, self.tokenizer = StaleSampler(model_path, **sampling), AutoTokenizer.from_pretrained(model_path)
        self.lags, self.change, self.group, self.turns, self.end, self.seed = lags, change, group, turns, end, seed
        self.rollout_buffer, self.metrics_queue = self, queue.Queue()
        self.model_version, self.made = 0, 0
        self.samples, self.stopped = [], False

    def start(self):
        pass

    def stop(self):
        self.stopped = True

    def update_model_version(self, model_version):
        self.model_version = model_version

    def check_health(self, stale_after_s):
        raise RuntimeError("the worker has no more samples")

    def qsize(self):
        return 0

    def get(self, timeout=None):
        if self.made == self.end:
            raise queue.Empty
        sample = self.sample(self.made)
        self.made += 1
        if self.change is not None:
            sample = self.change(sample) or sample
        self.samples.append(sample)
        return sample

    def sample(self, i: int):
        from trl_rollout_corr.asynchronous.trl_parts import RolloutSample

        group, dice = i // self.group, random.Random(f"{self.seed} {i}")
        ids = self.tokenizer(PROMPTS[group % len(PROMPTS)]).input_ids
        mask, logps = [0] * len(ids), [0.0] * len(ids)
        for turn in range(self.turns):
            if turn:
                ids, mask, logps = [*ids, 5, 6], [*mask, 0, 0], [*logps, 0.0, 0.0]
            tokens = self.sampler.draw(self.tokenizer, random.Random(f"{self.seed} {i} {turn}"))
            (scored,) = self.sampler.score([ids], [tokens])
            noise = [self.sampler.noise * dice.gauss(0, 1) for _ in tokens]
            ids, mask = [*ids, *tokens], [*mask, *[1] * len(tokens)]
            logps = [*logps, *(min(x + y, 0.0) for x, y in zip(scored, noise, strict=True))]
        reward = dice.choice([0.0, 1.0])
        return RolloutSample(
            prompt=[],
            completion=[],
            input_ids=np.array(ids),
            completion_mask=np.array(mask),
            old_log_probs=np.array(logps, dtype=np.float32),
            advantage=(-1) ** i * abs(dice.gauss(0, 1)),  # one of each sign, of any two
            model_version=max(self.model_version - self.lags[i % len(self.lags)], 0),
            group_id=group,
            metrics={"reward": reward},
        )


def fields(output_dir, **more) -> dict[str, Any]:
    return {
        "output_dir": str(output_dir),
        **PLAIN,
        "max_steps": 3,
        "learning_rate": 3e-4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "token_budget": 0,  # a fixed number of samples
        "max_staleness": 8,
        "max_completion_length": 64,  # with TRL's 2,048, weights of completions warn
        **more,
    }


def build_ours(model, folder, worker=None, *, extra=None, trainer_class=None, **more):
    """Our trainer on the tiny model. `extra` are arguments of the trainer, `more` fields of its configuration."""
    trainer_class = trainer_class or trl_rollout_corr.RolloutCorrectedAsyncGRPOTrainer
    args = trl_rollout_corr.RolloutCorrectedAsyncGRPOConfig(**fields(folder, **{"rollout_monitor": None, **more}))
    arguments = {"rollout_worker": worker or WorkerHere(model), "weight_transfer": WeightsStay(), **(extra or {})}
    with parts_for_a_cpu().on_a_cpu():
        return trainer_class(model, args=args, train_dataset=prompts(64), **arguments)


def build_theirs(model, folder, worker=None, **more):
    """TRL's trainer on the tiny model, with what a CPU needs."""
    from trl_rollout_corr.asynchronous import trl_parts

    args = trl_parts.AsyncGRPOConfig(**fields(folder, **more))
    with parts_for_a_cpu().on_a_cpu():
        return trl_parts.AsyncGRPOTrainer(
            model,
            args=args,
            train_dataset=prompts(64),
            rollout_worker=worker or WorkerHere(model),
            weight_transfer=WeightsStay(),
        )


def parts_for_a_cpu() -> ModuleType:
    """The module of the examples with what the asynchronous trainer needs on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        return import_module("async_on_cpu")


class Flood:
    """Loop of TRL's rollout worker that warns, puts more into its queue than a pipe holds, and waits until it is stopped."""

    def __init__(self, rollout_buffer, **kwargs):
        self.buffer, self._loop, self._stop_event = rollout_buffer, asyncio.new_event_loop(), asyncio.Event()

    def run(self):
        notify("a warning of the worker")
        for _ in range(32):
            self.buffer.put(bytes(10_000))
        self._loop.run_until_complete(self._stop_event.wait())
