"""`report --follow`: a page that is written again while its run goes on."""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dumps import make_dump
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.tools.dump.folder import LOGS, files_of


def dumped(output: Path) -> str:
    """The steps that a page is about."""
    found = re.search("<dt>Dumped steps</dt><dd>(.*?),", output.read_text())
    return found.group(1) if found else ""


def until(condition, seconds: float = 300.0):
    """Wait until a condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


# The command, with less time between two pages
QUICK = """
import sys
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.tools.report import follow
follow.PAUSE = follow._SHARE = 0.2
sys.exit(main(sys.argv[1:]))
"""


class Command:
    """The command in a process of its own."""

    def __init__(self, *arguments):
        call = [sys.executable, "-c", QUICK, "report", "--follow", *map(str, arguments)]
        # a shell starts jobs in the background with Ctrl-C ignored, and tests may be such a job
        self.process = subprocess.Popen(
            call,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.first = self.process.stderr.readline()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def end(self) -> tuple[int, str, str]:
        """Exit code and output after Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


def test_a_page_follows_a_run_that_starts_later_and_is_written_while_it_is_read(tmp_path):
    recorded, dump, output = make_dump(tmp_path / "recorded", rows=8, length=12), tmp_path / "run", tmp_path / "p.html"
    files, log = files_of(recorded), (recorded / LOGS).read_text().splitlines(keepends=True)
    with Command(dump, "-o", output) as followed:
        assert followed.first == f"{output} follows {dump}. Ctrl-C ends it.\n"
        until(lambda: output.exists() and f"Waiting for {dump}: {dump}: no such file" in output.read_text())
        dump.mkdir()
        shutil.copy(files[0], dump)
        (dump / LOGS).write_text(log[0] + log[1][:30])
        until(lambda: dumped(output) == "1")
        assert output.read_text().count('<meta http-equiv="refresh" content="5">') == 1
        (dump / files[1].name).write_bytes(files[1].read_bytes()[:100])  # half written, so that it is left out
        time.sleep(2)
        assert dumped(output) == "1"
        shutil.copy(files[1], dump)
        (dump / LOGS).write_text("".join(log[:2]))
        until(lambda: dumped(output) == "1 to 2")
        shutil.rmtree(dump)
        time.sleep(2)
        assert dumped(output) == "1 to 2"  # the last page stays
        code, out, err = followed.end()
    assert (code, out) == (0, f"{output} is up to date.\n")
    assert {line.partition(":")[0] for line in err.splitlines()} == {f"Waiting for {dump}"}
    assert "http-equiv" not in output.read_text()


@pytest.mark.parametrize(
    ("output", "message"),
    [("run.png", "a picture cannot follow a run"), ("no/where.html", "there is no folder")],
)
def test_options_that_cannot_be_followed_end_with_one_line(output, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", ".", "--follow", "-o", output]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


TRAINING = """
import sys, time
from pathlib import Path
from transformers import TrainerCallback
from tests.tiny import StaleSampler
from tests.training import TRAINERS, build

class Pause(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        while state.global_step == 5 and not (folder / "seen").exists():
            time.sleep(0.1)

model, folder = sys.argv[1], Path(sys.argv[2])
trainer = build(*TRAINERS["grpo"], model, folder, sampler=StaleSampler(model), max_steps=10,
                rollout_dump_dir=str(folder / "dump"), rollout_dump_steps=1, extra={"callbacks": [Pause()]})
trainer.train()
"""


@pytest.mark.slow
def test_a_page_follows_a_training_and_is_a_plain_report_in_the_end(tiny_model_path, tmp_path):
    run, output = tmp_path / "run", tmp_path / "page.html"
    with Command(run, "-o", output) as followed:
        run.mkdir()
        call = [sys.executable, "-c", TRAINING, str(tiny_model_path), str(run)]
        training = subprocess.Popen(call, cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL)
        until(lambda: output.exists() and dumped(output) == "1 to 4")
        (run / "seen").touch()
        assert training.wait(300) == 0
        until(lambda: dumped(output) == "1 to 10")
        time.sleep(12)  # the last entries of the log
        code, _, err = followed.end()
    assert (code, err) == (0, "")
    assert main(["report", str(run), "-o", str(tmp_path / "after.html")]) == 0
    assert output.read_text() == (tmp_path / "after.html").read_text()
