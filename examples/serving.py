"""A vLLM server that lives as long as the program that needs it."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import requests


# What `accelerate launch` tells the processes of a training run; the server is none of them
_OF_THE_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NEEDED = {
    "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, and new weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # new adapters
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # its engine has a process of its own, also if this program has none
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",  # the rollout worker keeps connections while its queue is full
}
# Packs all weights again when new ones come, on a CPU
_EXTENSION = ["--worker-extension-cls", "trl_rollout_corr.worker.PackingWorker"]
# Stops the server when the pipe to this program closes, be it because the program was killed. The server waits for requests
# that are under way, which may be paused for ever
_WATCHED = 'exec 3<&0; (cat <&3 >/dev/null; kill -TERM $$; sleep 20; kill -KILL -$$) & exec "$@" 3<&- </dev/null'


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def vllm_server(
    model: str,
    log: Path,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
    start_timeout: float = 600.0,
) -> Iterator[str]:
    """
    Start vLLM's server, and stop it at the end, also after an error.

    Args:
        model (`str`):
            Model to serve.
        log (`Path`):
            File for the output of the server.
        options (`Sequence[str]`, *optional*):
            Further options of the server's command line.
        environment (`Mapping[str, str]`, *optional*):
            Further variables of its environment, for instance `CUDA_VISIBLE_DEVICES`.
        port (`int`, *optional*):
            Where it listens; by default a port that nobody else does.
        start_timeout (`float`, *optional*, defaults to `600.0`):
            Seconds that it may take to start.

    Returns:
        `Iterator[str]`: its address, when it answers.

    Raises:
        `RuntimeError`: if it does not start; the message ends with its last output.
    """
    port = port or free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--logprobs-mode", "processed_logprobs", *_EXTENSION, *options]
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_THE_LAUNCHER}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output, _terminating():
        server = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHED, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**inherited, **_NEEDED, **(environment or {})},
            start_new_session=True,  # so that Ctrl-C reaches this program, which then stops the server
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_it_answers(server, url, log, start_timeout)
            yield url
        finally:
            _stop(server)


@contextmanager
def _terminating() -> Iterator[None]:
    """Let SIGTERM end the program as an exception does, so that processes it has started are stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_until_it_answers(server: subprocess.Popen, url: str, log: Path, timeout: float):
    deadline = time.monotonic() + timeout
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(requests.RequestException):
            if requests.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    why = "did not answer in time" if server.poll() is None else f"ended with exit code {server.returncode}"
    raise RuntimeError(f"The vLLM server {why}. It printed to {log}:\n{log.read_text(errors='replace')[-3000:]}")


def _stop(server: subprocess.Popen, patience: float = 20.0):
    """Ask the server to end, which ends its engine, and then make both."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):  # SIGKILL in any case: for the rest of its group
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal_number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(patience)
    server.stdin.close()
