"""`report --follow`: the page of a run that goes on, built again when its files change, on a local address or in a file."""

import html
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Hashable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from ...dumps.files import write_whole
from ...messages import SelfContainedError, printable


_ADDRESS = "127.0.0.1"
_PAUSE = 3.0  # seconds between two looks at the files
_SHARE = 4  # times as long as a page took to build, no other one is built
_RELOAD = 10  # seconds after which a page without JavaScript, or in a file, loads itself again

# A server is asked whether it has another page, whose body takes the place of the old one: the window stays where it is. A
# file cannot be asked: it is loaded again, and the window goes back to where it was
_SCRIPT = """
const opened = () => [...document.querySelectorAll("details")].map((x) => x.open);
const open = (all) => document.querySelectorAll("details").forEach((x, i) => { x.open = Boolean(all[i]); });
if (location.protocol === "file:") {
  const key = "window of " + location.pathname;
  setTimeout(() => location.reload(), RELOAD);
  addEventListener("pagehide", () => sessionStorage.setItem(key, JSON.stringify([scrollX, scrollY, opened()])));
  addEventListener("DOMContentLoaded", () => {
    const [x, y, all] = JSON.parse(sessionStorage.getItem(key) ?? "[0, 0, []]");
    open(all);
    scrollTo(x, y);
  });
} else {
  let tag = "TAG";
  setInterval(async () => {
    try {
      const answer = await fetch(location.pathname, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (!answer.ok) return;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const all = opened();
      tag = answer.headers.get("ETag");
      document.title = fresh.title;
      document.body.replaceWith(fresh.body);
      open(all);
    } catch {
      tag = "";  // when the command answers again, its page takes the place of this one
      document.getElementById("followed").textContent = "The command that made this page has ended.";
    }
  }, PAUSE);
}
"""


class Follower:
    """
    The latest page of a run.

    Args:
        build (`Callable[[], str]`):
            Returns the page. An error, of any kind, leaves the page before in place: it may be that a file is being written.
        look (`Callable[[], Hashable]`):
            Returns the state of the files: another value where they have changed.
        subject (`str`):
            The runs, by their names.
    """

    def __init__(self, build: Callable[[], str], look: Callable[[], Hashable], subject: str) -> None:
        self._build, self._look, self.subject = build, look, subject
        self._seen: Hashable = None  # state of the files of the latest page
        self._not_before = 0.0
        self.made = ""  # when
        self.page = ""  # without the bar
        self.problem = ""  # why there is no page of the present files; empty if there is one
        self.number = 0  # counts pages and problems

    def update(self) -> bool:
        """Build the page if files have changed, and enough time has passed. True if the page is another one, or its bar."""
        if time.monotonic() < self._not_before:
            return False
        before, start = (self.page, self.problem), time.monotonic()
        try:
            state = self._look()
            if state == self._seen and not self.problem:
                return False
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a page names damaged parts itself
                self.page = self._build()
            self._seen, self.problem, self.made = state, "", time.strftime("%Y-%m-%d %H:%M:%S")
        except Exception as error:
            self.problem = printable(" ".join(str(error).split())).rstrip(".") or type(error).__name__
        self._not_before = time.monotonic() + _SHARE * (time.monotonic() - start)
        changed = (self.page, self.problem) != before
        self.number += changed
        return changed

    def live(self, *, in_file: bool) -> str:
        """The page with a bar that says when it was made, and what loads it again."""
        if self.page:
            text = f"This page was made at {self.made}, and it changes with the run."
            text += f" Newer files cannot be read yet: {self.problem}." if self.problem else ""
        else:
            reason = (
                f"There is nothing to show yet: {self.problem}" if self.problem else "The first page is being made"
            )
            text = f"Waiting for {self.subject}. {reason}."
        script = _SCRIPT.replace("RELOAD", f"{_RELOAD * 1000}").replace("PAUSE", f"{_PAUSE * 1000:g}")
        refresh = f'<noscript><meta http-equiv="refresh" content="{_RELOAD}"></noscript>'
        head = f"{refresh}\n<script>{script.replace('TAG', '' if in_file else self.tag)}</script>\n</head>"
        bar = f'<body>\n<p id="followed" role="status">{html.escape(text)}</p>'
        page = self.page or _EMPTY
        return page.replace("</head>", head, 1).replace("<body>", bar, 1)

    @property
    def tag(self) -> str:
        """Name of the page for a browser that asks whether there is another one."""
        return f"{os.getpid()}-{self.number}"


_EMPTY = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Rollout report</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
</head>
<body>
</body>
</html>
"""


def follow(follower: Follower, output: Path | None, port: int = 0) -> str:
    """
    Keep the page of a run up to date until Ctrl-C.

    Args:
        follower ([`Follower`]):
            The page.
        output (`Path` or `None`):
            The file to write, which loads itself again in a browser, and after Ctrl-C no more. `None` serves the page instead.
        port (`int`, *optional*, defaults to `0`):
            Port of the address, which only this machine can reach. 0 takes a free one.

    Returns:
        `str`: the last line to print.

    Raises:
        `ValueError`: in one line, if the port is taken or the file cannot be written at first.
    """
    torch.set_num_threads(1)
    with suppress(OSError, AttributeError):  # as on Windows, which has no such thing
        os.nice(10)  # the run comes first
    server = _serve(follower, port) if output is None else None
    where = f"http://{_ADDRESS}:{server.server_port}/" if server else str(output)
    said = ""
    try:
        if output is not None:
            _write(output, follower.live(in_file=True))
        _say(f"{where} follows {follower.subject}. Ctrl-C ends it.")
        while True:
            if follower.update() and output is not None:
                with suppress(OSError):  # as of a full disk: the next page is tried again
                    _write(output, follower.live(in_file=True))
            if follower.problem not in ("", said):
                _say(f"Waiting: {follower.problem}.")
            said = follower.problem
            time.sleep(_PAUSE)
    except KeyboardInterrupt:
        if output is not None and follower.page:
            with suppress(OSError):
                _write(output, follower.page)
        last = f"the last page was made at {follower.made}" if follower.page else "there was nothing to show"
        return f"{where} has ended: {last}.\n"
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()


def _write(output: Path, page: str) -> None:
    write_whole(output, lambda file: file.write(page.encode()))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _serve(follower: Follower, port: int) -> ThreadingHTTPServer:
    """Serve the page in a thread, to this machine alone."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # a page of another site whose name was made to lead here must not read prompts and completions
            host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            if host not in (_ADDRESS, "localhost"):
                self.send_error(403, f"Ask for http://{_ADDRESS}")
            elif self.path.partition("?")[0] != "/":
                self.send_error(404)
            elif self.headers.get("If-None-Match") == follower.tag:
                self.send_response(304)
                self.end_headers()
            else:
                tag, content = follower.tag, follower.live(in_file=False).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("ETag", tag)
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Requests are not printed."""

        def handle(self) -> None:
            with suppress(OSError):  # a browser that went away
                super().handle()

    try:
        server = ThreadingHTTPServer((_ADDRESS, port), Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SelfContainedError(
            f"--port {port}: the address {_ADDRESS}:{port} cannot be served: {reason}. Name another port, or none, "
            "which takes a free one"
        ) from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
