"""Start processes as users do, and import what the benchmarks are made of."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from packaging.version import Version


ROOT = Path(__file__).parent.parent
ACCELERATE = str(Path(sys.executable).with_name("accelerate"))
UNCOMPILED = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_AOT_COMPILE": "0",
}  # a compiled engine takes half a minute to start
# Older releases of TRL have another asynchronous trainer, or none, and ours refuses them
HAS_ASYNCHRONOUS = Version(version("trl")) >= Version("1.16.0.dev0")


def clean_environment(**environment: str) -> dict[str, str]:
    """The environment of this process without what TRL and `conftest.py` put into it, and with something else."""
    # TRL sets the first five when it starts vLLM in this process, and `conftest.py` the last
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHDYNAMO_DISABLE")
    return {**{name: value for name, value in os.environ.items() if name not in ours}, **environment}


def run(*command: str, timeout: int = 1000, **environment: str) -> subprocess.CompletedProcess:
    """Run a command in the checkout and capture what it prints. Nothing that it started is left."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:  # also Ctrl-C, and the limit of `pytest-timeout`
            end(process)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def end(process: subprocess.Popen):
    """Kill a process and all that it has started, also in sessions of their own, as torch starts ranks."""
    if process.poll() is None:
        first = psutil.Process(process.pid)
        for one in [*first.children(recursive=True), first]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def free_port() -> int:
    """A port that nobody listens on. TRL's own choice for vLLM is the same in all processes that choose at one time."""
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def output_of(*command: str, **options) -> str:
    """Output of a command, which must succeed."""
    process = run(*command, **options)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-8000:]
    return process.stdout


@contextmanager
def serving(model: str, log: Path, *options: str, **environment: str) -> Iterator[str]:
    """A vLLM server with a model in float32, as the examples start one. Yields its address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        from serving import vllm_server
    always = ["--dtype", "float32", "--enforce-eager", "--weight-transfer-config", '{"backend":"nccl"}']
    with vllm_server(model, log, [*always, *options], environment) as url:
        yield url


@contextmanager
def benchmarks(*folders: str) -> Iterator[Callable[[str], ModuleType]]:
    """Import from folders of the benchmarks, several of which have modules of the same name, and forget them afterwards."""
    paths = [str(ROOT / "benchmarks" / folder) for folder in folders]
    for path in paths:  # an example may have a module of the same name
        for module in Path(path).glob("*.py"):
            sys.modules.pop(module.stem, None)
    sys.path[:0] = paths
    try:
        yield import_module
    finally:
        for path in paths:
            sys.path.remove(path)
        _forget_benchmarks()


def _forget_benchmarks():
    folder = str(ROOT / "benchmarks")
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]
