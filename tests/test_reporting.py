"""Every backend gets every metric; those that draw histograms get that of the log-ratio."""

import json
import math
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import StaleSampler, prompts
from tests.training import build
from trl_rollout_corr import (
    RolloutCorrectedGRPOConfig,
    RolloutCorrectedGRPOTrainer,
    RolloutCorrectionConfig,
    compute_rollout_correction,
)
from trl_rollout_corr.correction.histogram import BINS
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.trainers.reporting import coarser


@pytest.fixture
def train(tiny_model_path, tmp_path, monkeypatch):
    """Train four steps with evaluation, reporting to one backend, and return what was logged."""
    monkeypatch.chdir(tmp_path)

    def train(backend: str):
        trainer = build(
            RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig, tiny_model_path, tmp_path / "out",
            sampler=StaleSampler(tiny_model_path), report_to=[backend], run_name="run", max_steps=4, logging_steps=2,
            eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=4, extra={"eval_dataset": prompts(4)},
            rollout_rs=["token_k1", "seq_max_k1"], rollout_rs_threshold=[[0.5, 2.0], [1e-4, math.inf]],
            rollout_is_batch_normalize=True,
        )  # fmt: skip
        trainer.train()
        return trainer.state.log_history

    return train


def expected(history: list[dict]) -> tuple[list[dict], dict]:
    """Our metrics of the training logs, and of the evaluation."""
    training = [{k: v for k, v in e.items() if k.startswith(PREFIX)} for e in history if "loss" in e]
    evaluation = next(e for e in history if "eval_loss" in e)
    return training, {k: v for k, v in evaluation.items() if k.startswith(f"eval_{PREFIX}")}


def test_json(train, tmp_path):
    training, evaluation = expected(train("none"))
    assert len(training) == 2
    assert len(training[0]) > 60
    # a window has no share of a group that it has no token of
    seen = {key for entry in [*training, evaluation] for key in entry if "rejected/" in key or "downweighted/" in key}
    assert {f"eval_{key}" for key in training[0]} ^ set(evaluation) <= seen | {f"eval_{key}" for key in seen}
    assert all(math.isfinite(value) for entry in [*training, evaluation] for value in entry.values())
    json.dumps([*training, evaluation], allow_nan=False)


def test_tensorboard(train, tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    training, evaluation = expected(train("tensorboard"))
    (file,) = tmp_path.rglob("events.out.tfevents*")
    events = event_accumulator.EventAccumulator(str(file), size_guidance={"histograms": 0})
    events.Reload()
    for key in training[0]:
        found = [event.value for event in events.Scalars(f"train/{key}")]
        assert found == pytest.approx([entry[key] for entry in training if key in entry], rel=1e-5, abs=1e-12)
    for key, value in evaluation.items():
        (event,) = events.Scalars(f"eval/{key.removeprefix('eval_')}")
        assert event.value == pytest.approx(value, rel=1e-5, abs=1e-12)
    histograms = events.Histograms(f"train/{PREFIX}log_ratio")
    assert [event.step for event in histograms] == [2, 4]
    assert histograms[0].histogram_value.num > 10
    assert len(events.Histograms(f"eval/{PREFIX}log_ratio")) == 1


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
    for key in training[0]:
        found = [row[f"train/{key}"] for row in losses if f"train/{key}" in row]
        assert found == pytest.approx([entry[key] for entry in training if key in entry])
    (evaluated,) = [row for row in rows if "eval/loss" in row]
    for key, value in evaluation.items():
        assert evaluated[f"eval/{key.removeprefix('eval_')}"] == pytest.approx(value)
    assert any(
        key.startswith(f"train/{PREFIX}log_ratio") and "histogram" in json.dumps(losses[0][key]) for key in losses[0]
    )


def test_trackio(train):
    trackio = pytest.importorskip("trackio")
    training, _ = expected(train("trackio"))
    files = [path for path in Path(trackio.utils.TRACKIO_DIR).rglob("*") if path.is_file()]
    text = b"".join(path.read_bytes() for path in files)
    for key in training[0]:
        assert f"train/{key}".encode() in text
    assert b"trackio.histogram" in text


def test_the_coarser_histogram_counts_the_same_tokens():
    d = torch.randn(4, 500, generator=torch.Generator().manual_seed(0)) * 0.1
    config = RolloutCorrectionConfig(rollout_is=None)
    correction = compute_rollout_correction(d, torch.zeros_like(d), torch.ones_like(d), config)
    counts, edges = coarser(*correction.statistics.histogram())
    assert counts.sum() == 2000
    assert len(edges) == len(counts) + 1 < BINS / 10
    assert (np.diff(edges) > 0).all()
    exact, _ = np.histogram(d.double().numpy(), bins=edges)
    np.testing.assert_array_equal(counts, exact)
