"""Every backend gets the metrics."""

import json
import math
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.asynchronous import WorkerHere, build_ours
from tests.launching import HAS_ASYNCHRONOUS
from tests.test_docs import documented_keys, documented_name
from tests.tiny import StaleSampler, prompts
from tests.training import TRAINERS, VLLM, BrokenSampler, build
from trl_rollout_corr import (
    RolloutCorrectedGRPOConfig,
    RolloutCorrectedGRPOTrainer,
)
from trl_rollout_corr.messages import PREFIX


@pytest.fixture
def train(tiny_model_path, tmp_path, monkeypatch):
    """Train four steps with evaluation, reporting to one backend, and return the log of the trainer."""
    monkeypatch.chdir(tmp_path)

    def train(backend: str, **fields):
        trainer = build(
            RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig, tiny_model_path, tmp_path / "out",
            sampler=StaleSampler(tiny_model_path), report_to=[backend], run_name="run", max_steps=4, logging_steps=2,
            eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=4, extra={"eval_dataset": prompts(4)},
            rollout_is="token", rollout_rs=["token_k1", "seq_max_k2", "seq_max_k1"],
            rollout_rs_threshold=[[0.5, 2.0], 2.5, [1e-4, math.inf]],
            rollout_is_batch_normalize=True, **fields,
        )  # fmt: skip
        trainer.train()
        return trainer.state.log_history

    return train


def ours(entry: dict, prefix: str = PREFIX) -> dict:
    return {key: value for key, value in entry.items() if key.startswith(prefix)}


def expected(history: list[dict]) -> tuple[list[dict], dict]:
    """Our metrics of the training logs and of the evaluation."""
    evaluation = next(entry for entry in history if "eval_loss" in entry)
    return [ours(entry) for entry in history if "loss" in entry], ours(evaluation, f"eval_{PREFIX}")


def events_of(folder: Path):
    """Events that TensorBoard has on the disk."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (file,) = folder.rglob("events.out.tfevents*")
    events = event_accumulator.EventAccumulator(str(file))
    events.Reload()
    return events


def ours_in(keys: Iterable[str]) -> set[str]:
    """Our metrics among the keys of a backend."""
    return {key.partition(PREFIX)[2] for key in keys if key.startswith(f"train/{PREFIX}")}


def test_json(train):
    training, evaluation = expected(train("none"))
    assert len(training) == 2
    # a window has no metric of a group that it has no token of
    seen = {key for entry in [*training, evaluation] for key in entry if "rejected/" in key or "downweighted/" in key}
    assert {f"eval_{key}" for key in training[0]} ^ set(evaluation) <= seen | {f"eval_{key}" for key in seen}
    assert all(math.isfinite(value) for entry in [*training, evaluation] for value in entry.values())
    json.dumps([*training, evaluation], allow_nan=False)


# Metrics that verl's documents name, under the names of `docs/verl.md`
OF_VERL = {
    *("training_ppl", "rollout_ppl", "ppl_ratio", "log_ppl_diff", "kl", "k3_kl", "chi2_token", "chi2_seq"),
    *("rollout_is_mean", "rollout_is_std", "rollout_is_max", "rollout_is_min", "rollout_is_eff_sample_size"),
    *("rollout_is_ratio_fraction_high", "rollout_is_ratio_fraction_low", "rollout_is_batch_norm_factor"),
    *("rollout_is_veto_fraction", "rollout_is_catastrophic_token_fraction"),
    *("rollout_rs_masked_fraction", "rollout_rs_token_k1_mean", "rollout_rs_seq_max_k2_mean"),
}


def test_tensorboard(train, tmp_path):
    training, evaluation = expected(train("tensorboard"))
    events = events_of(tmp_path)
    tags = events.Tags()["scalars"]
    assert ours_in(tags) == {key.removeprefix(PREFIX) for entry in training for key in entry} > OF_VERL
    assert {tag for tag in tags if PREFIX in tag and tag.startswith("eval/")} == {
        f"eval/{key.removeprefix('eval_')}" for key in evaluation
    }
    for key in training[0]:
        found = [event.value for event in events.Scalars(f"train/{key}")]
        assert found == pytest.approx([entry[key] for entry in training if key in entry], rel=1e-5, abs=1e-12)


def finished_wandb_records(is_last: Callable[[Any], bool], seconds: int = 120) -> list:
    """
    Finish the run of W&B, and return its records, with one that is awaited: W&B's service, which writes them, may be a moment
    behind.
    """
    import wandb

    name, deadline = f"run-*{wandb.run.id}.wandb", time.monotonic() + seconds
    wandb.finish()
    while True:
        records = [record for file in Path(os.environ["WANDB_DIR"]).rglob(name) for record in read_wandb(file)]
        if any(map(is_last, records)) or time.monotonic() > deadline:
            return records
        time.sleep(0.1)


def read_wandb(path: Path) -> Iterator:
    """Records of a W&B run file: a LevelDB log, in blocks of 32 kB, of protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    data, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # the rest of a block is padding
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def logged_row(record) -> dict:
    items = record.history.item
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_wandb_offline(train, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    training, evaluation = expected(train("wandb"))
    rows = [logged_row(record) for record in finished_wandb_records(lambda record: "eval/loss" in logged_row(record))]
    losses = [row for row in rows if "train/loss" in row]
    assert ours_in(losses[0]) == {key.removeprefix(PREFIX) for key in training[0]}
    for key in training[0]:
        found = [row[f"train/{key}"] for row in losses if f"train/{key}" in row]
        assert found == pytest.approx([entry[key] for entry in training if key in entry])
    (evaluated,) = [row for row in rows if "eval/loss" in row]
    for key, value in evaluation.items():
        assert evaluated[f"eval/{key.removeprefix('eval_')}"] == pytest.approx(value)


def test_trackio(train):
    trackio = pytest.importorskip("trackio")
    training, _ = expected(train("trackio"))
    files = [path for path in Path(trackio.utils.TRACKIO_DIR).rglob("*") if path.is_file()]
    text = b"".join(path.read_bytes() for path in files)
    for key in training[0]:
        assert f"train/{key}".encode() in text


# The keys of a run ---------------------------------------------------------------------------------------------------------


@pytest.fixture(
    params=["grpo", pytest.param("rloo", marks=pytest.mark.vllm), *(["async_grpo"] if HAS_ASYNCHRONOUS else [])]
)
def make_any(request, tiny_model_path, tmp_path):
    """Build a trainer with the monitor."""

    def make(**fields):
        fields = {"rollout_monitor": "warn", "logging_steps": 1, "max_steps": 4, **fields}
        if request.param == "async_grpo":
            return build_ours(tiny_model_path, tmp_path, WorkerHere(tiny_model_path), **fields)
        if request.param == "rloo":
            request.getfixturevalue("shared_engine")
        sampled = VLLM if request.param == "rloo" else {"sampler": WithSteps(tiny_model_path, call_a_tool)}
        fields["schedule"] = "two iterations"
        return build(*TRAINERS[request.param], tiny_model_path, tmp_path, **sampled, **fields)

    return make


class WithSteps(BrokenSampler):
    """A sampler that tells the optimizer step of its weights."""

    def __call__(self, prompts, trainer):
        trainer.rollout_step = 0
        return super().__call__(prompts, trainer)


def call_a_tool(output):
    output["env_mask"] = [[int(t != 1) for t in range(len(ids))] for ids in output["completion_ids"]]


RUNS = {
    "auto": {},
    "measured": {"rollout_correction": "disabled"},
    "rejection": {
        "rollout_is": "token",
        "rollout_rs": ["token_k1", "seq_max_k2"],
        "rollout_rs_threshold": [[0.6, 1.6], 2.5],
    },
}


@pytest.mark.parametrize("run", RUNS)
def test_a_run_logs_few_keys_and_each_is_documented(make_any, run, request):
    trainer = make_any(**RUNS[run])
    trainer.train()
    keys = {key for entry in trainer.state.log_history for key in ours(entry)}
    assert {documented_name(key) for key in keys} <= documented_keys()
    of_turns = {key for key in keys if "/turn_" in key}
    assert bool(of_turns) == ("[grpo-" in request.node.name)  # whose sampler calls a tool
    assert len(keys - of_turns) <= (31 if run == "measured" else 50)  # with `stale_fraction`
