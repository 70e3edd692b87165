"""The benchmarks run, and measure what they say."""

import json
import re
import runpy
import sys

import pytest
import torch

from tests.launching import ROOT, output_of


@pytest.fixture
def computation(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import computation

    return computation


def test_memory_is_that_of_the_largest_moment(computation):
    def three_alive():
        a = torch.zeros(64, 64)
        b = a + 1
        del a
        c = b.view(-1) * 2  # `a` is gone, and a view is no tensor of its own
        return [x.exp() for x in (b, c)][:1]

    assert computation.peak_tensors(three_alive, (64, 64), "cpu") == 4  # b, c, and an exponential of each


def test_host_reads_are_counted(computation):
    assert computation.host_reads(lambda: torch.ones(3).sum().item() + torch.ones(2).max().item()) == 2
    batch = computation.make_batch("4x16", "cpu")
    ours = computation.contestants(batch, computation.CASES["token, two criteria"], verl=None)["ours"]
    assert computation.host_reads(ours) == 0


def test_batches_are_ragged(computation):
    train, rollout, mask = computation.make_batch("8x64", "cpu")
    assert train.shape == rollout.shape == mask.shape == (8, 64)
    assert len(set(mask.sum(1).tolist())) > 3


def test_gather(tmp_path):
    output = output_of(
        sys.executable,
        "benchmarks/gather.py",
        "--ranks",
        "1",
        "2",
        "--rounds",
        "2",
        "--output",
        str(tmp_path / "out.json"),
    )
    assert re.search(r"512 ranks on paper: \d+\.\d+ MB received", output)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {row["ranks"] for row in rows} == {1, 2, 8, 64, 512}


@pytest.mark.slow
@pytest.mark.vllm
def test_step(tmp_path):
    output_of(
        sys.executable, "benchmarks/step.py", "--hidden", "64", "--layers", "1", "--completion_length", "8", "--rounds", "1",
        "--steps", "1", "--output", str(tmp_path / "out.json"),
    )  # fmt: skip
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(rows) == 9
    assert all(float(row["step, s"]) > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.vllm
def test_headline(tmp_path):
    output = output_of(
        sys.executable, "benchmarks/headline/run.py", "--arms", "none", "random_rs", "trl_default", "--seeds", "0",
        "--steps", "2", "--workers", "1", "--output_dir", str(tmp_path),
    )  # fmt: skip
    assert "3 of 3 runs to do" in output
    assert len(list((tmp_path / "runs").glob("*.json"))) == 3
    assert (tmp_path / "headline.png").stat().st_size > 10_000
    again = output_of(
        sys.executable, "benchmarks/headline/run.py", "--arms", "none", "random_rs", "trl_default", "--seeds", "0",
        "--steps", "2", "--workers", "1", "--output_dir", str(tmp_path),
    )  # fmt: skip
    assert "0 of 3 runs to do" in again


@pytest.mark.slow
@pytest.mark.vllm
def test_asynchronous(tmp_path):
    output = output_of(
        sys.executable, "benchmarks/asynchronous/run.py", "--smoke", "--accuracy", "0", "--output_dir", str(tmp_path)
    )
    rows = [line.split("|")[1:-1] for line in output.splitlines() if line.startswith("| ")][2:]
    assert [row[0].strip() for row in rows] == ["synchronous", "weights_8"]
    assert all(row[2].strip() == "0" for row in rows)  # any accuracy will do, so that it is there at the start
    assert all(float(row[4]) > 0 for row in rows)
    assert float(rows[1][6]) > 0  # it is behind


def test_the_time_to_an_accuracy_is_that_of_the_first_look_at_it(tmp_path):
    report = runpy.run_path(str(ROOT / "benchmarks/asynchronous/run.py"))["report"]
    for seed, slowness in enumerate((1.0, 3.0, 2.0)):
        record = {
            "steps": [0, 10, 20, 30],
            "seconds_at": [0.0, 10 * slowness, 20 * slowness, 30 * slowness],
            "accuracy": [0.4, 0.7, 0.5, 0.8],
            "history": [{"rollout_corr/staleness_mean": 4.0}],
        }
        (tmp_path / f"weights_8-{seed}.json").write_text(json.dumps(record))
    assert report(tmp_path, 0.6).splitlines()[-1] == "| weights_8 | 3 | 20 | 10 | 2.00 | 0.80 | 4.00 | 0.00 |"
    assert "not by all" in report(tmp_path, 0.9)
