"""Shared fixtures: a tiny model and tokenizer made on the spot, and prompts. Nothing is downloaded."""

import gc
import importlib.util
import os
import sys
import tempfile
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads of a tiny model mostly wait for each other
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# vLLM on a CPU: a small cache, and the engine in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# compiled, vLLM's sampler draws other numbers while it is being compiled than afterwards
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import pytest
import torch

from tests.launching import HAS_ASYNCHRONOUS, ROOT, output_of


collect_ignore = [] if HAS_ASYNCHRONOUS else ["test_async_trainer.py", "test_async_server.py"]
torch.set_num_threads(1)


def pytest_configure(config):
    """A warning of this package is an error in tests, except that the installed TRL is newer than the tested ones."""
    from trl_rollout_corr.trainers.versions import INSTALLED, is_untested

    if is_untested(INSTALLED):
        config.addinivalue_line("filterwarnings", "ignore:.*is newer than the releases that")


trackio_folder, wandb_folder = tempfile.TemporaryDirectory(), tempfile.TemporaryDirectory()  # one for each process
os.environ["TRACKIO_DIR"], os.environ["WANDB_DIR"] = trackio_folder.name, wandb_folder.name


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """
    What is there before a file of tests, kept out of garbage collection: `Trainer.train()` collects, which would cost more
    than a tiny model's training, and the more the more files a process has run.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # or extension modules report leaks at exit


@pytest.fixture(scope="session")
def imported_trl():
    from trl import GRPOTrainer, RLOOTrainer  # noqa: F401


@pytest.fixture(scope="session")
def tiny_model_path(imported_trl, tmp_path_factory) -> str:
    from tests.tiny import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tied_model_path(imported_trl, tmp_path_factory) -> str:
    """As `tiny_model_path`, with a head that is the embedding."""
    from tests.tiny import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def shared_engine():
    """One float32 vLLM engine for all tests of a process: it takes half a minute to start."""
    from tests.training import sharing_engines

    with sharing_engines():
        yield


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """A folder with wheel and source distribution, built with what the development tools bring."""
    for module in ("build", "hatchling"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed; `make setup` brings it")
    folder = tmp_path_factory.mktemp("dist")
    output_of(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    return folder
