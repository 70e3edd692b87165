"""Output of training, and alarms of the monitor in trackers."""

import logging
import re
from pathlib import Path

import pytest
from transformers import PrinterCallback, ProgressCallback

from tests.test_reporting import finished_wandb_records
from tests.tiny import StaleSampler
from tests.training import TRAINERS, build, evaluation
from trl_rollout_corr.messages import logger


LINE = re.compile(
    r"^step (\d)/3 +(\d+:\d\d:\d\d) left  loss (\S+) +grad_norm (\S+) +reward (-?\d\.\d+)  k3_kl (\S+) +ESS (\d\.\d+)  "
    r"rejected +([\d.]+)%  effective_lr (\d\.\d+)( +\d alarms?)?$"
)


UNCORRECTED = {"rollout_correction": "disabled", "rollout_rs": None, "rollout_rs_threshold": None}


@pytest.fixture
def make(tiny_model_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(noise=0.2, **fields):
        fields = {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.5, "rollout_monitor": "warn", **fields}
        sampler = StaleSampler(tiny_model_path, noise=noise)
        return build(*TRAINERS["grpo"], tiny_model_path, tmp_path / "out", sampler=sampler, **fields)

    return make


@pytest.mark.parametrize("bar", [False, True])
def test_a_step_is_one_line(make, capsys, bar):
    trainer = make(disable_tqdm=not bar)
    trainer.train()
    title, *lines, end = capsys.readouterr().out.strip().splitlines()
    assert title.startswith(
        "Rollout correction 0.1.0: decoupled_token_is with changes; token weights up to 2; token_k1 in ["
    )
    assert re.fullmatch(r"3 steps in 0:00:\d\d", end)
    assert max(map(len, lines)) < 140
    found = [LINE.match(line) for line in lines]
    assert all(found), lines
    assert [match[1] for match in found] == ["1", "2", "3"]
    for match, logged in zip(found, trainer.state.log_history, strict=False):
        assert len(logged) > 60  # what trackers get
        assert float(match[3]) == pytest.approx(logged["loss"], rel=0.05)
        assert float(match[4]) == pytest.approx(logged["grad_norm"], rel=0.05)
        assert float(match[5]) == pytest.approx(logged["reward"], abs=1e-3)
        assert float(match[6]) == pytest.approx(logged["rollout_corr/k3_kl"], rel=0.05)
        assert float(match[8]) == pytest.approx(100 * logged["rollout_corr/rollout_rs_masked_fraction"], abs=0.1)
        alarms = int(match[10].split()[0]) if match[10] else 0
        assert alarms == logged["rollout_corr/monitor/alarms"]
    assert found[0][2] != "0:00:00" or found[2][2] == "0:00:00"


def test_an_evaluation_is_one_line_and_a_log_of_the_user_stays_as_it_is(make, capsys):
    trainer = make(**evaluation())
    trainer.log({"mine": 1.0})
    trainer.train()
    out = capsys.readouterr().out
    assert "{'mine': 1.0" in out
    assert re.search(r"^step 2/3 .* eval  loss .* reward .* k3_kl ", out, re.MULTILINE)


def test_who_wants_every_metric_gets_it(make, capsys):
    make(extra={"callbacks": [PrinterCallback()]}, max_steps=1).train()
    assert "'rollout_corr/chi2_token'" in capsys.readouterr().out
    trainer = make(max_steps=1)
    trainer.remove_callback(PrinterCallback)  # the usual way to print nothing
    trainer.train()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("bar", [False, True])
def test_a_switch_leaves_the_output_to_transformers(make, capsys, monkeypatch, bar):
    monkeypatch.setenv("TRL_ROLLOUT_CORR_CONSOLE", "0")
    trainer = make(max_steps=1, disable_tqdm=not bar)
    kind = ProgressCallback if bar else PrinterCallback
    assert [
        type(x) for x in trainer.callback_handler.callbacks if isinstance(x, (PrinterCallback, ProgressCallback))
    ] == [kind]
    trainer.train()
    out = capsys.readouterr().out
    assert "'rollout_corr/chi2_token'" in out
    assert "Rollout correction" not in out
    assert "step 1/1" not in out


def test_messages_go_through_logging_and_do_not_tear_the_bar(make, capsys, monkeypatch):
    monkeypatch.setattr(logger, "propagate", False)  # as without pytest, nobody listens
    trainer = make(noise=1.0, **UNCORRECTED, disable_tqdm=False, max_steps=2)
    assert any(isinstance(callback, ProgressCallback) for callback in trainer.callback_handler.callbacks)
    trainer.train()
    out, err = capsys.readouterr()
    assert "▲" not in out + "✖" not in out
    (head,) = [line for line in re.split(r"[\r\n]", err) if "[k3_high" in line]
    assert head.strip().startswith("✖ step 2: k3_kl is")
    assert "/monitor.py" not in err
    assert max(map(len, err[err.index("✖") :].split("\n")[1:4])) <= 110
    assert logger.handlers == []


def test_handlers_of_the_user_get_messages(make, capsys):
    records = []

    class Mine(logging.Handler):
        def emit(self, record):
            records.append(record)

    handler = Mine()
    logger.addHandler(handler)
    try:
        make(noise=1.0, **UNCORRECTED, max_steps=2).train()
    finally:
        logger.removeHandler(handler)
    assert "ERROR" in {record.levelname for record in records}
    assert "k3_high" not in capsys.readouterr().err


# Alerts -----------------------------------------------------------------------------------------------------------------


def test_alerts_in_wandb(make, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    make(noise=1.0, **UNCORRECTED, report_to=["wandb"], run_name="run", max_steps=2).train()
    alerts = [record.alert for record in finished_wandb_records(lambda record: record.HasField("alert"))]
    (alert,) = [alert for alert in alerts if alert.title.startswith("k3_high at step 2")]
    assert alert.level == "ERROR"
    assert re.search(r"`k3_kl` is .* above 0.03, .* Set `rollout_correction`", alert.text)


def test_alerts_in_trackio(make, capsys):
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    make(noise=1.0, **UNCORRECTED, report_to=["trackio"], project="alerts", run_name="run", max_steps=2).train()
    (alert,) = [a for a in SQLiteStorage.get_alerts("alerts") if a["title"] == "k3_high at step 2"]
    assert alert["level"] == "error"
    assert "`k3_kl` is" in alert["text"]
    assert "[TRACKIO" not in capsys.readouterr().out


def test_without_such_a_tracker_there_is_no_alert(make, tmp_path):
    make(noise=1.0, **UNCORRECTED, max_steps=2).train()
    assert [path.name for path in Path(tmp_path).iterdir()] in ([], ["out"])
