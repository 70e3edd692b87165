"""Logs of trackers: `diagnose`, `report` and `examine` read them as they read the state of the trainer."""

import csv
import itertools
import json
import math
import sys

import numpy as np
import pandas as pd
import pytest

from tests.dumps import make_dump
from tests.test_trl_log import FLAT
from trl_rollout_corr import RolloutCorrectionConfig, examine
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.tools.monitor.rules import BOUNDS
from trl_rollout_corr.tools.monitor.stock import GAP, LENGTH, RATIO


ENTRIES = [
    {"step": step, "loss": 0.1, "reward": 0.4, "learning_rate": 1e-6, RATIO: ratio, GAP: 0.006, LENGTH: 90.0}
    for step, ratio in FLAT.items()
]
# As Transformers gives them to a tracker, with rows of other calls between them
ROWS = [
    row
    for entry in ENTRIES
    for row in (
        {**{f"train/{key}": x for key, x in entry.items() if key != "step"}, "train/global_step": entry["step"]},
        {"profiling/Time taken: _prepare_inputs": 0.1},
        {"eval/reward": 0.9, f"eval/{RATIO}": 0.1, "train/global_step": entry["step"]},
    )
]
NUMBERED = [{**row, "_step": i, "_timestamp": 1.7e9 + i} for i, row in enumerate(ROWS)]
TABLE = pd.DataFrame(NUMBERED)


def write_chart(path):
    """A chart of W&B with two metrics."""
    metrics = {f"calm-sun-1 - train/{name}": name for name in (RATIO, LENGTH, GAP)}
    columns = ["train/global_step", *(f"{name}{end}" for name in metrics for end in ("", "__MIN", "__MAX"))]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(columns)
        for entry in ENTRIES:
            values = [entry[name] for name in metrics.values()]
            writer.writerow([entry["step"], *(x for x in values for _ in range(3))])


def write_tensorboard(folder):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder / "runs" / "Nov28_host") as writer:
        for entry in ENTRIES:
            for name, value in entry.items():
                if name != "step":
                    writer.add_scalar(f"train/{name}", value, entry["step"])


WRITTEN = {
    "scan.json": lambda path: path.write_text(json.dumps(NUMBERED)),
    "scan.jsonl": lambda path: path.write_text("".join(f"{json.dumps(row)}\n" for row in NUMBERED)),
    "cut.jsonl": lambda path: path.write_text("".join(f"{json.dumps(row)}\n" for row in NUMBERED) + '{"train/lo'),
    "pandas.json": lambda path: TABLE.to_json(path),
    "split.json": lambda path: TABLE.to_json(path, orient="split"),
    "records.json": lambda path: TABLE.to_json(path, orient="records"),
    "history.csv": lambda path: TABLE.to_csv(path),
    "history.tsv": lambda path: TABLE.to_csv(path, sep="\t", index=False),
    "history.parquet": lambda path: TABLE.to_parquet(path),
    "chart.csv": write_chart,
    "board": write_tensorboard,
}


@pytest.fixture(scope="module")
def state_file(tmp_path_factory):
    """What `diagnose` says of the state of the trainer."""
    path = tmp_path_factory.mktemp("run") / "trainer_state.json"
    path.write_text(json.dumps({"log_history": ENTRIES}))
    return str(path)


def diagnosed(capsys, source):
    code = main(["diagnose", str(source), "--json"])
    output = capsys.readouterr()
    assert code == 1, output.err
    return json.loads(output.out), output.err


def same(found, expected):
    """TensorBoard rounds to 32 bits."""
    assert [cause["cause"] for cause in found["causes"]] == [cause["cause"] for cause in expected["causes"]]
    assert found["steps"] == expected["steps"] == [10, 1490]
    assert found["ratio"] == pytest.approx(expected["ratio"], rel=1e-5)
    assert found["ratio"]["entries"] == len(ENTRIES)


@pytest.mark.parametrize("name", WRITTEN)
def test_an_export_is_read_as_the_state_of_the_trainer(name, state_file, tmp_path, capsys):
    if name == "board":
        pytest.importorskip("tensorboard")
    WRITTEN[name](tmp_path / name)
    found, said = diagnosed(capsys, tmp_path / name)
    same(found, diagnosed(capsys, state_file)[0])
    assert said == ""
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / name), "-o", str(page)]) == 0
    assert "weight_of_completions" in page.read_text()
    state, diagnosis, last = capsys.readouterr().out.splitlines()
    assert state.startswith("Look into it. The mean importance weight of completions of 90 tokens on average is ")
    assert diagnosis == "Diagnosis: Possible: weights of whole completions, which shrink with length."
    assert last == str(page)


def test_an_offline_run_of_wandb_is_read(state_file, tmp_path, capsys, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="p", dir=tmp_path, mode="offline", settings=wandb.Settings(x_disable_stats=True)) as run:
        for row in ROWS:
            run.log(row)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    expected = diagnosed(capsys, state_file)[0]
    for source in (folder, tmp_path, *folder.glob("*.wandb")):
        same(diagnosed(capsys, source)[0], expected)
    (path,) = folder.glob("*.wandb")
    path.write_bytes(path.read_bytes()[:-100])  # as after a crash
    assert diagnosed(capsys, folder)[0]["causes"]
    monkeypatch.setitem(sys.modules, "wandb.proto", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["diagnose", str(folder)]) == 2
    assert "can be read by the library wandb, which is missing: pip install wandb" in capsys.readouterr().err


def test_a_project_of_trackio_is_read_run_by_run(state_file, tmp_path, capsys, monkeypatch):
    storage = pytest.importorskip("trackio.sqlite_storage")
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path)
    for run in ("first", "second"):
        rows = ROWS if run == "second" else ROWS[: len(ROWS) // 2]
        storage.SQLiteStorage.bulk_log("project", run, rows, steps=[*range(len(rows))])
    (path,) = tmp_path.glob("*.db")
    expected = diagnosed(capsys, state_file)[0]
    for source in (path, tmp_path):
        found, said = diagnosed(capsys, source)
        same(found, expected)
        assert "also contains the runs `first`, and the latest, `second`, is read" in said
    found, said = diagnosed(capsys, f"{path}#first")
    assert found["steps"][1] < 800
    assert said == ""
    assert main(["diagnose", f"{path}#third"]) == 2
    assert "has no run 'third'. Its runs are 'first', 'second'" in capsys.readouterr().err


def test_numbers_that_are_none_are_read_in_the_words_of_trackers(tmp_path, capsys):
    rows = [{**row, f"train/{RATIO}": "NaN"} if f"train/{RATIO}" in row else row for row in ROWS]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pd.DataFrame(rows).to_csv(tmp_path / "a.csv")
    for name in ("a.json", "a.csv"):
        assert [cause["cause"] for cause in diagnosed(capsys, tmp_path / name)[0]["causes"]] == ["not_a_number"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.json",
            '{"lr": 1}',
            "neither the state of a trainer, which contains a `log_history`, nor the rows of a history",
        ),
        ("a.json", "[1, 2]", "nor the rows of a history"),
        ("a.json", '[{"train/loss": 1, "_step": 1}]', "and none of TRL's `sampling/*`"),
        ("a.json", json.dumps([{f"train/{RATIO}": 0.5}]), "does not tell the optimizer step: it needs a column"),
        ("a.jsonl", "x\ny\n", "damaged or not JSON"),
        ("a.csv", "no table\n", "is no table: its first line must name a column"),
        ("a.csv", "Name,State,Created,train/loss\nr,finished,x,1\n", "is W&B's table of runs"),
        ("a.csv", "a,b\n1,2\n", "and none of TRL's `sampling/*`"),
        ("a.wandb", "x", "is no run of W&B"),
        ("a.db", "x" * 2000, "it is no database of Trackio"),
        ("a.db", "", "a database, but not one of Trackio"),
    ],
)
@pytest.mark.parametrize("command", ["diagnose", "report"])
def test_what_is_no_log_is_one_line(command, name, text, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    assert main([command, name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert "unexpected" not in line


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.jsonl", "trainer_state.json"])
def test_compare_says_that_a_log_holds_no_completions(name, tmp_path, capsys):
    (tmp_path / name).write_text("{}")
    assert main(["compare", str(tmp_path / name)]) == 2
    assert "is a log, and `compare` needs the completions of a dump" in capsys.readouterr().err


def test_compare_says_so_of_the_folder_of_a_run_of_trl(tmp_path, capsys):
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": ENTRIES}))
    assert main(["compare", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "this folder contains a log and no dump, and `compare` needs the completions of a dump" in said
    assert "`trl-rollout-corr diagnose` and `report` read the log" in said


def test_a_dump_comes_before_the_logs_beside_it(tmp_path, capsys):
    folder = make_dump(tmp_path / "run" / "dump", steps=1).parent
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": ENTRIES}))
    write_tensorboard(folder)
    assert main(["diagnose", str(folder)]) in (0, 1)
    assert "A log contains means only" not in capsys.readouterr().out


# examine ----------------------------------------------------------------------------------------------------------------


def test_examine_finds_in_a_log_of_trl_what_report_finds(tmp_path):
    names = [[alarm.bound for alarm in examine(log)] for log in (ENTRIES, ROWS, NUMBERED)]
    assert names[0] == names[1] == names[2]
    assert "weight_of_completions" in names[0]
    healthy = [{**entry, RATIO: 0.99} for entry in ENTRIES]
    assert examine(healthy) == []


def test_examine_reads_the_metrics_of_this_package_with_the_prefix_of_a_tracker():
    log = [{"step": step, "rollout_corr/k3_kl": 2.0, "rollout_corr/kl": 2.0} for step in range(1, 10)]
    of_tracker = [
        {**{f"train/{key}": x for key, x in entry.items() if key != "step"}, "train/global_step": entry["step"]}
        for entry in log
    ]
    assert (
        [(alarm.bound, alarm.step) for alarm in examine(of_tracker)] == [(a.bound, a.step) for a in examine(log)] != []
    )


def with_evaluations(windows):
    """Rows of training, each followed by one of an evaluation, as Transformers gives them to a tracker."""
    of_training = [{"train/global_step": step, "train/loss": 0.1, **window} for step, window in enumerate(windows, 1)]
    return [row for entry in of_training for row in (entry, {"train/global_step": 1, "eval/loss": 0.1})]


@pytest.mark.parametrize("columns", [None, "rollout_corr|global_step"])
def test_examine_takes_no_cell_that_a_table_leaves_empty_for_a_number(columns):
    """`run.history()` of W&B is a table of pandas, whose rows of evaluations are NaN in the columns of training."""
    measured = {"kl": 0.001, "k3_kl": 0.001, "nonfinite_fraction": 0.0, "effective_lr": 1.0}
    window = {f"train/rollout_corr/{key}": x for key, x in measured.items()}
    later_visits = {"train/rollout_corr/update_k3_kl": 0.001}
    table = pd.DataFrame(with_evaluations([window, later_visits] * 8))
    rows = (table if columns is None else table.filter(regex=columns)).to_dict("records")
    assert any(math.isnan(row["train/rollout_corr/nonfinite_fraction"]) for row in rows)
    assert examine(rows) == []
    empty = {**window, **dict.fromkeys(window, math.nan)}
    table = pd.DataFrame(with_evaluations([window, empty, empty] * 8))
    assert [alarm.bound for alarm in examine(table.to_dict("records"))] == ["no_tokens"]


def test_a_ratio_that_is_missing_in_a_table_is_not_one_that_is_no_number(tmp_path, capsys):
    (tmp_path / "rows.json").write_text(json.dumps(TABLE.to_dict("records")))
    assert "NaN" in (tmp_path / "rows.json").read_text()
    assert "not_a_number" not in [cause["cause"] for cause in diagnosed(capsys, tmp_path / "rows.json")[0]["causes"]]
    rows = [{**row, f"train/{RATIO}": math.nan} if f"train/{RATIO}" in row else row for row in ROWS]
    (tmp_path / "rows.json").write_text(json.dumps(pd.DataFrame(rows).to_dict("records")))
    assert [cause["cause"] for cause in diagnosed(capsys, tmp_path / "rows.json")[0]["causes"]] == ["not_a_number"]


@pytest.mark.parametrize("step", [math.nan, math.inf, "nan", None, "x"])
def test_examine_takes_a_step_that_is_no_number_for_unknown(step):
    log = [{"step": step, "loss": 0.1, "rollout_corr/k3_kl": 2.0, "rollout_corr/kl": 2.0}] * 9
    assert [alarm.step for alarm in examine(log)] == [0] * len(examine(log)) != []


def test_examine_reads_numbers_of_numpy():
    log = [{"step": step, "rollout_corr/k3_kl": 2.0, "rollout_corr/kl": 2.0} for step in range(1, 10)]
    of_numpy = [{key: np.float32(x) if key != "step" else np.int64(x) for key, x in row.items()} for row in log]
    assert examine(of_numpy) == examine(log) != []


NUMBERS = (math.inf, -math.inf, math.nan, 1e308, -1e308, 1e-320, 0.0, -1.0)


@pytest.mark.parametrize(
    "metric", sorted({bound.metric for bound in BOUNDS.values()} | {"rollout_corr/kl", "entropy"})
)
@pytest.mark.parametrize("correction", ["disabled", "auto"])
def test_no_number_in_a_log_raises_an_error(metric, correction):
    healthy = dict.fromkeys(("kl", "k3_kl", "kl_advantage_positive", "kl_advantage_negative", "surprise"), 0.2)
    settings = RolloutCorrectionConfig(rollout_correction=correction).settings
    for number, other in itertools.product(NUMBERS, (0.2, math.inf, 1e308)):
        log = [
            {
                **{"step": step, "loss": 0.1, "entropy": 0.2, LENGTH: 90.0},
                **{f"rollout_corr/{key}": x for key, x in healthy.items()},
                metric: number if step % 2 else other,
            }
            for step in range(1, 25)
        ]
        for alarm in examine(log, settings):
            assert str(alarm)


@pytest.mark.parametrize("key", ["kl", "k3_kl"])
def test_report_reads_a_log_with_infinity(key, tmp_path, capsys):
    log = [
        {"step": step, "rollout_corr/k3_kl": 0.5, "rollout_corr/kl": 0.2, "reward": 0.1}
        | {f"rollout_corr/{key}": math.inf if step % 2 else 0.2}
        for step in range(1, 12)
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    assert "Infinity" in (tmp_path / "trainer_state.json").read_text()
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 0
    assert capsys.readouterr().out.startswith("Act now. `k3_kl` has been at least")


def test_an_empty_answer_of_examine_means_healthy():
    with pytest.raises(ValueError, match="`history` contains no `rollout_corr/` metrics, and none of TRL's"):
        examine([{"step": 1, "loss": 0.1}])
    assert examine([]) == []
