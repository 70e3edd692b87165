"""`report --follow`: a page that changes with its run."""

import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.dumps import make_dump
from trl_rollout_corr.__main__ import main
from trl_rollout_corr.analysis.report import command, follow
from trl_rollout_corr.dumps.files import LOGS, files_of, rewind


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Pages are built as often as they are asked for."""
    monkeypatch.setattr(follow, "_SHARE", 0)


@pytest.fixture
def recorded(tmp_path):
    return make_dump(tmp_path / "recorded", steps=4, rows=8, length=12)


def dumped(page: str) -> str:
    """The steps that a page is about."""
    return re.search("<dt>Dumped steps</dt><dd>(.*?),", page).group(1)


def test_a_page_follows_a_run_that_starts_later_and_is_written_while_it_is_read(recorded, tmp_path):
    dump = tmp_path / "run" / "dump"
    follower = command.make_follower([str(tmp_path / "run")])
    assert follower.update()
    assert "Waiting for" in (page := follower.live(in_file=False))
    assert "no such file or folder" in page

    dump.mkdir(parents=True)
    assert follower.update()
    assert "neither a dump" in follower.live(in_file=False)
    assert not follower.update()  # nothing new, and the same reason

    files, log = files_of(recorded), (recorded / LOGS).read_text().splitlines(keepends=True)
    (dump / files[0].name).write_bytes(files[0].read_bytes()[:100])  # cut short, and the only file
    assert follower.update()
    assert follower.page == ""

    shutil.copy(files[0], dump)
    (dump / LOGS).write_text(log[0] + log[1][:30])
    assert follower.update()
    assert dumped(follower.page) == "1"
    assert "line 2 of 2 is cut short" in follower.page
    assert "changes with the run" in follower.live(in_file=False)
    assert not follower.update()

    shutil.copy(files[1], dump)
    (dump / LOGS).write_text("".join(log[:2]))
    assert follower.update()
    assert dumped(follower.page) == "1 to 2"
    assert "cut short" not in follower.page


def test_a_page_follows_a_run_that_is_rewound_and_goes_on(recorded):
    follower = command.make_follower([str(recorded)])
    follower.update()
    assert dumped(follower.page) == "1 to 4"
    lost = files_of(recorded)[-1].read_bytes()
    rewind(recorded, 2)
    follower.update()
    assert dumped(follower.page) == "1 to 2"
    (recorded / "step-00000003-rank-00000.parquet").write_bytes(lost)
    follower.update()
    assert dumped(follower.page) == "1 to 4"  # what the file holds


def test_the_last_page_stays_when_the_files_cannot_be_read(recorded):
    follower = command.make_follower([str(recorded)])
    follower.update()
    before = follower.page
    shutil.rmtree(recorded)
    assert follower.update()
    assert follower.page == before
    page = follower.live(in_file=True)
    assert follower.made in page
    assert "Newer files cannot be read yet" in page
    assert "no such file or folder" in page


def test_an_error_of_any_kind_leaves_the_page(recorded, monkeypatch):
    follower = command.make_follower([str(recorded)])
    follower.update()
    before = follower.page
    monkeypatch.setattr(follower, "_build", lambda: 1 / 0)
    (recorded / LOGS).write_text("")
    assert follower.update()
    assert (follower.page, follower.problem) == (before, "division by zero")


def test_a_page_that_took_long_is_not_built_again_soon(recorded, monkeypatch):
    monkeypatch.setattr(follow, "_SHARE", 1e6)
    follower = command.make_follower([str(recorded)])
    assert follower.update()
    (recorded / LOGS).write_text("")
    assert not follower.update()


def test_a_page_without_javascript_loads_itself_again_and_a_plain_report_does_not(recorded, tmp_path):
    follower = command.make_follower([str(recorded)])
    follower.update()
    refresh = re.compile(r'<noscript><meta http-equiv="refresh" content="\d+"></noscript>')
    assert all(refresh.search(follower.live(in_file=in_file)) for in_file in (True, False))
    main(["report", str(recorded), "-o", str(tmp_path / "plain.html")])
    assert (tmp_path / "plain.html").read_text() == follower.page
    assert "<script" not in follower.page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--follow", "-o", "run.png"], "a picture cannot follow a run"),
        (["--follow", "-o", "no/where.html"], "there is no folder"),
        (["--port", "8000"], "--port 8000 has an effect only with --follow"),
        (["--follow", "--port", "70000"], "--port 70000: "),
        (["--follow", "--port", "TAKEN"], "cannot be served: Address already in use. Name another port"),
    ],
)
def test_options_that_cannot_be_followed_end_with_one_line(options, message, recorded, capsys, monkeypatch):
    monkeypatch.chdir(recorded)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setattr(follow.os, "nice", lambda _: None)
        assert main(["report", ".", *(port if option == "TAKEN" else option for option in options)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


# The command ------------------------------------------------------------------------------------------------------------


class Command:
    """The command in a process of its own."""

    def __init__(self, *arguments):
        call = [sys.executable, "-m", "trl_rollout_corr", "report", "--follow", *map(str, arguments)]
        # a shell starts jobs in the background with Ctrl-C ignored, and tests may be such a job
        self.process = subprocess.Popen(
            call,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.first = self.process.stdout.readline()

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

    def get(self, **headers) -> tuple[int, str, str]:
        """Status, tag and page."""
        request = urllib.request.Request(self.first.split()[0], headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.headers["ETag"], answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, "", ""


def until(condition, seconds: float = 300.0):
    """The value of a condition, once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return value


def test_the_page_is_served_to_this_machine_alone_until_ctrl_c(recorded):
    with Command(recorded) as served:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/ follows \S+\. Ctrl-C ends it\.\n", served.first)
        page = until(lambda: "Dumped steps" in (text := served.get()[2]) and text)
        assert dumped(page) == "1 to 4"
        _, tag, _ = served.get()
        assert served.get(**{"If-None-Match": tag})[0] == 304
        assert served.get(Host="elsewhere.example")[0] == 403
        files_of(recorded)[-1].unlink()
        until(lambda: dumped(served.get(**{"If-None-Match": "another"})[2]) == "1 to 3")
        assert served.get(**{"If-None-Match": tag})[0] == 200
        code, out, err = served.end()
    assert (code, err) == (0, "")
    assert re.fullmatch(r"http://\S+ has ended: the last page was made at [-0-9: ]+\.\n", out)


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
def test_a_file_follows_a_training_and_is_a_plain_report_in_the_end(tiny_model_path, tmp_path):
    run, output = tmp_path / "run", tmp_path / "page.html"
    with Command(run, "-o", output) as followed:
        until(lambda: "no such file or folder" in output.read_text())
        run.mkdir()
        call = [sys.executable, "-c", TRAINING, str(tiny_model_path), str(run)]
        training = subprocess.Popen(call, cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL)
        until(lambda: "<dt>Dumped steps</dt><dd>1 to 4," in output.read_text())
        (run / "seen").touch()
        assert training.wait(300) == 0
        until(lambda: "<dt>Dumped steps</dt><dd>1 to 10," in output.read_text())
        time.sleep(2 * follow._PAUSE)  # the last entries of the log
        code, _, err = followed.end()
    assert (code, err) == (0, "")
    assert main(["report", str(run), "-o", str(tmp_path / "after.html")]) == 0
    assert output.read_text() == (tmp_path / "after.html").read_text()
