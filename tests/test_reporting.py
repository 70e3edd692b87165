"""Every backend gets the metrics that are tracked; those that draw histograms get that of the log-ratio."""

import json
import math
import os
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from tests.asynchronous import WorkerHere, build_ours
from tests.launching import HAS_ASYNCHRONOUS
from tests.tiny import StaleSampler, prompts
from tests.training import TRAINERS, VLLM, build, losses, messages
from trl_rollout_corr import (
    RolloutCorrectedGRPOConfig,
    RolloutCorrectedGRPOTrainer,
    RolloutCorrectionConfig,
    compute_rollout_correction,
)
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.correction.histogram import BINS
from trl_rollout_corr.dumps.files import read_logs
from trl_rollout_corr.health.bands import ESSENTIAL
from trl_rollout_corr.messages import PREFIX
from trl_rollout_corr.recording.trackers import coarser


ROOT = Path(__file__).parent.parent


@pytest.fixture
def train(tiny_model_path, tmp_path, monkeypatch):
    """Train four steps with evaluation, reporting to one backend, and return the log of the trainer."""
    monkeypatch.chdir(tmp_path)

    def train(backend: str, **fields):
        trainer = build(
            RolloutCorrectedGRPOTrainer, RolloutCorrectedGRPOConfig, tiny_model_path, tmp_path / "out",
            sampler=StaleSampler(tiny_model_path), report_to=[backend], run_name="run", max_steps=4, logging_steps=2,
            eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=4, extra={"eval_dataset": prompts(4)},
            rollout_rs=["token_k1", "seq_max_k2", "seq_max_k1"],
            rollout_rs_threshold=[[0.5, 2.0], 2.5, [1e-4, math.inf]],
            rollout_is_batch_normalize=True, **fields,
        )  # fmt: skip
        trainer.train()
        return trainer.state.log_history

    return train


def expected(history: list[dict], tracked: str = "all") -> tuple[list[dict], dict]:
    """Our metrics that are tracked, of the training logs and of the evaluation."""

    def ours(entry: dict, prefix: str) -> dict:
        metrics = {k: v for k, v in entry.items() if k.startswith(prefix)}
        return {k: v for k, v in metrics.items() if tracked == "all" or k.removeprefix(prefix) in documented()}

    training = [ours(e, PREFIX) for e in history if "loss" in e]
    evaluation = next(e for e in history if "eval_loss" in e)
    return training, ours(evaluation, f"eval_{PREFIX}")


def documented(*, all_runs: bool = False) -> set[str]:
    """Metrics that `docs/metrics.md` lists as essential; with `all_runs` those that every corrected run has."""
    text = (ROOT / "docs/metrics.md").read_text().partition("## What trackers get")[2].partition("\n## ")[0]
    rows = {row[1].strip(): row[2] for row in (line.split("|") for line in text.splitlines() if line.startswith("| "))}
    del rows["about"], rows["---"]
    conditional = rows.pop("where it applies")
    keys = set(re.findall(r"`([^`]+)`", " ".join(rows.values())))
    return keys if all_runs else keys | set(re.findall(r"`([^`]+)` \(", conditional))


def events_of(folder: Path):
    """Events that TensorBoard has on the disk."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (file,) = folder.rglob("events.out.tfevents*")
    events = event_accumulator.EventAccumulator(str(file), size_guidance={"histograms": 0})
    events.Reload()
    return events


def ours_in(keys: Iterable[str]) -> set[str]:
    """Our metrics among the keys of a backend."""
    metrics = {key.partition(PREFIX)[2] for key in keys if key.startswith(f"train/{PREFIX}")}
    return {name for name in metrics if name.split(".")[0] != "log_ratio"}  # the histogram


def test_json(train, tmp_path):
    training, evaluation = expected(train("none"))
    assert len(training) == 2
    assert len(training[0]) > 60
    # a window has no share of a group that it has no token of
    seen = {key for entry in [*training, evaluation] for key in entry if "rejected/" in key or "downweighted/" in key}
    assert {f"eval_{key}" for key in training[0]} ^ set(evaluation) <= seen | {f"eval_{key}" for key in seen}
    assert all(math.isfinite(value) for entry in [*training, evaluation] for value in entry.values())
    json.dumps([*training, evaluation], allow_nan=False)


# Metrics that verl's documents name, under the names of `docs/migration.md`
OF_VERL = {
    *("training_ppl", "rollout_ppl", "ppl_ratio", "log_ppl_diff", "kl", "k3_kl", "chi2_token", "chi2_seq"),
    *("rollout_is_mean", "rollout_is_std", "rollout_is_max", "rollout_is_min", "rollout_is_eff_sample_size"),
    *("rollout_is_ratio_fraction_high", "rollout_is_ratio_fraction_low", "rollout_is_batch_norm_factor"),
    *("rollout_is_veto_fraction", "rollout_is_catastrophic_token_fraction"),
    *("log_ratio_p25", "log_ratio_p50", "log_ratio_p75"),
    *(
        "rollout_probs_diff_mean",
        "rollout_probs_diff_std",
        "rollout_probs_diff_max",
        "rollout_actor_probs_pearson_corr",
    ),
    *("rollout_rs_masked_fraction", "rollout_rs_token_k1_mean", "rollout_rs_seq_max_k2_mean"),
}


@pytest.mark.parametrize("tracked", ["essential", "all"])
def test_tensorboard(train, tmp_path, tracked):
    training, evaluation = expected(train("tensorboard", rollout_tracked_metrics=tracked), tracked)
    events = events_of(tmp_path)
    tags = events.Tags()["scalars"]
    assert ours_in(tags) == {key.removeprefix(PREFIX) for entry in training for key in entry}
    assert {tag for tag in tags if PREFIX in tag and tag.startswith("eval/")} == {
        f"eval/{key.removeprefix('eval_')}" for key in evaluation
    }
    assert {"train/loss", "train/reward", "eval/reward"} <= set(tags)
    assert (ours_in(tags) >= OF_VERL) == (tracked == "all")
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
    training, evaluation = expected(train("wandb"), "essential")
    rows = [logged_row(record) for record in finished_wandb_records(lambda record: "eval/loss" in logged_row(record))]
    losses = [row for row in rows if "train/loss" in row]
    assert ours_in(losses[0]) == {key.removeprefix(PREFIX) for key in training[0]}
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
    training, _ = expected(train("trackio", rollout_tracked_metrics="all"))
    files = [path for path in Path(trackio.utils.TRACKIO_DIR).rglob("*") if path.is_file()]
    text = b"".join(path.read_bytes() for path in files)
    for key in training[0]:
        assert f"train/{key}".encode() in text
    assert b"trackio.histogram" in text


# The metrics that are tracked --------------------------------------------------------------------------------------------


def test_the_essential_metrics_are_documented():
    assert documented() == set(ESSENTIAL)
    assert len(ESSENTIAL) <= 20


@pytest.fixture(
    params=["grpo", pytest.param("rloo", marks=pytest.mark.vllm), *(["async_grpo"] if HAS_ASYNCHRONOUS else [])]
)
def make_any(request, tiny_model_path, tmp_path, monkeypatch):
    """Build a trainer that reports to TensorBoard, with the default correction and monitor."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))

    def make(**fields):
        fields = {
            "report_to": ["tensorboard"],
            "rollout_monitor": "warn",
            "logging_steps": 1,
            "max_steps": 2,
            **fields,
        }
        if request.param == "rloo":
            request.getfixturevalue("shared_engine")
        if request.param == "async_grpo":
            return build_ours(tiny_model_path, tmp_path, WorkerHere(tiny_model_path), **fields)
        sampled = VLLM if request.param == "rloo" else {"sampler": WithSteps(tiny_model_path)}
        return build(*TRAINERS[request.param], tiny_model_path, tmp_path / "run", **sampled, **fields)

    return make


class WithSteps(StaleSampler):
    """A sampler that tells the optimizer step of its weights."""

    def __call__(self, prompts, trainer):
        trainer.rollout_step = 0
        return super().__call__(prompts, trainer)


def test_trackers_get_the_documented_metrics_by_default(make_any, tmp_path, request):
    asynchronous = "async_grpo" in request.node.name
    trainer = make_any()
    trainer.train()
    tracked = ours_in(events_of(tmp_path / "events").Tags()["scalars"])
    assert tracked == documented(all_runs=True) | ({"stale_dropped/fraction"} if asynchronous else set())
    kept = {key for entry in trainer.state.log_history for key in entry if key.startswith(PREFIX)}
    assert len(kept) > 60


class Recorder(TrainerCallback):
    """A callback of a user."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def test_nothing_but_trackers_depends_on_the_tracked_metrics(tiny_model_path, tmp_path, monkeypatch, caplog, capsys):
    """Losses, alarms, the log of the trainer, callbacks of the user, the dump and the report."""

    def run(tracked: str):
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / tracked / "events"))
        caplog.clear()
        recorder = Recorder()
        trainer = build(
            *TRAINERS["grpo"], tiny_model_path, tmp_path / tracked / "run",
            sampler=StaleSampler(tiny_model_path, noise=1.0), report_to=["tensorboard"], max_steps=4,
            rollout_tracked_metrics=tracked, rollout_dump_dir=str(tmp_path / tracked / "run" / "dump"),
            save_strategy="steps", save_steps=4, extra={"callbacks": [recorder]},
            # of a rule on a metric that is not essential
            rollout_correction="decoupled_token_is", rollout_monitor="warn", rollout_monitor_bounds={"weights_at_bound": 0.0},
        )  # fmt: skip
        steps = losses(trainer)
        page = tmp_path / f"{tracked}.html"
        main(["report", str(tmp_path / tracked / "run"), "-o", str(page)])
        history = [without_times(entry) for entry in trainer.state.log_history]
        kept = read_logs(tmp_path / tracked / "run" / "dump")
        logs = [list(map(without_times, entries)) for entries in (recorder.logs, kept)]
        text = page.read_text().replace("rollout_tracked_metrics: all\n", "")  # it lists the settings of the run
        shown = ours_in(events_of(tmp_path / tracked / "events").Tags()["scalars"])
        return shown, (steps, history, logs, messages(caplog), text)

    (essential, found), (everything, others) = run("essential"), run("all")
    assert found == others
    assert essential < everything
    _, history, (seen, kept), said, text = found
    assert any("[weights_at_bound > 0]" in message for message in said)
    for entries in (history, seen, kept):
        assert {key.removeprefix(PREFIX) for entry in entries for key in entry if key.startswith(PREFIX)} == everything
    assert "Percentiles of d" in text
    assert "KL divergence by the sign of the advantage" in text


def without_times(entry: dict) -> dict:
    return {key: value for key, value in entry.items() if not re.search("time|per_second", key)}


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
