"""`report --follow`: the page of an unfinished run, written again every few seconds."""

import html
import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from ...messages import progress
from ..formats import write_whole


PAUSE = 5.0  # seconds between two pages
_SHARE = 4  # the pause is at least this many times the time to build a page
_HEAD = '<head>\n<meta http-equiv="refresh" content="5">'
_EMPTY = (
    "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<title>Rollout "
    "report</title>\n</head>\n<body><p>{}</p></body>\n</html>\n"
)


def follow(build: Callable[[], str], output: Path, subject: str) -> str:
    """
    Write the page again and again until Ctrl-C, which writes it a last time, without the tag that reloads it. `build`
    returns the page. If it fails, the previous page stays, because a file of the run may be half written. Returns the
    last line to print.
    """
    torch.set_num_threads(1)
    with suppress(OSError, AttributeError):  # as on Windows, which lacks `nice`
        os.nice(10)  # the run comes first
    page, said = "", ""
    try:
        progress(f"{output} follows {subject}. Ctrl-C ends it.")
        while True:
            start = time.monotonic()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a page names damaged parts itself
                    page, problem = build(), ""
            except Exception as error:
                problem = f"Waiting for {subject}: {' '.join(str(error).split())}"
            if problem not in ("", said):
                progress(problem)
            said = problem
            shown = page or _EMPTY.format(html.escape(problem))
            with suppress(OSError):  # such as a full disk; the next page may succeed
                _write(output, shown.replace("<head>", _HEAD, 1))
            time.sleep(max(PAUSE, _SHARE * (time.monotonic() - start)))
    except KeyboardInterrupt:
        if page:
            _write(output, page)
        return f"{output} is {'up to date' if page else 'empty: there was nothing to show'}.\n"


def _write(output: Path, page: str) -> None:
    write_whole(output, lambda file: file.write(page.encode()))
