"""Messages of a run and of commands: each on one channel, once, and above the progress bars."""

import os
import subprocess
import sys

import pytest


SAY = """
import logging, sys
from tqdm import tqdm
{set_up}
from trl_rollout_corr.messages import notify, progress, tell
bar = tqdm(total=3, file=sys.stderr, ncols=40, miniters=1, mininterval=0)
{do}
"""
HANDLER = "logging.basicConfig(level=logging.{level}, stream=sys.stdout, format='%(name)s %(levelname)s %(message)s')"
QUIET = "logging.getLogger('trl_rollout_corr').setLevel(logging.WARNING)"


def said(set_up: str = "", do: str = "tell('begins'); notify('is odd')", **variables) -> tuple[list[str], list[str]]:
    """Lines on standard output and on standard error, each as it stands in the end."""
    call = [sys.executable, "-c", SAY.format(set_up=set_up, do=do)]
    found = subprocess.run(call, capture_output=True, check=True, env={**os.environ, **variables})
    texts = (output.decode() for output in (found.stdout, found.stderr))
    return tuple([line.rpartition("\r")[2] for line in text.split("\n") if line] for text in texts)


def test_without_a_handler_messages_go_to_standard_error_above_the_bar():
    out, err = said()
    assert out == []
    assert [line for line in err if "%|" not in line] == ["begins", "is odd"]
    assert "0/3" in err[-1]


@pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING"])
def test_with_a_handler_they_go_there_only(level):
    out, err = said(HANDLER.format(level=level))
    assert out == ["trl_rollout_corr INFO begins", "trl_rollout_corr WARNING is odd"]
    assert not [line for line in err if "begins" in line or "odd" in line]


@pytest.mark.parametrize("handler", ["", HANDLER.format(level="INFO")])
def test_the_level_of_the_logger_says_what_is_shown(handler):
    out, err = said(f"{handler}\n{QUIET}")
    assert not [line for line in out + err if "begins" in line]
    assert [line for line in out + err if "is odd" in line]


def test_one_rank_speaks():
    out, err = said(RANK="1")
    assert [line for line in out + err if "begins" in line or "odd" in line] == []


def test_the_progress_of_a_command_is_no_part_of_its_answer():
    out, err = said(do="progress('at work'); print('answer')")
    assert out == ["answer"]
    assert [line for line in err if "at work" in line]
