"""How tests start processes."""

import subprocess
import time

import psutil
import pytest

from tests.launching import run


def goes_on(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_nothing_is_left_of_a_command_that_takes_too_long(tmp_path):
    """What it has started has a session of its own, as a rank of `accelerate launch`."""
    started = tmp_path / "started"
    with pytest.raises(subprocess.TimeoutExpired):
        run("sh", "-c", f"setsid sleep 300 & echo $! > {started}; wait", timeout=2)
    process, deadline = int(started.read_text()), time.monotonic() + 10
    while goes_on(process):
        assert time.monotonic() < deadline
        time.sleep(0.05)
