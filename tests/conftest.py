"""Shared fixtures: a tiny model and tokenizer made on the spot, and prompts. Nothing is downloaded."""

import os
import tempfile


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads of a tiny model mostly wait for each other
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TRACKIO_DIR", tempfile.mkdtemp())
# vLLM on a CPU: a small cache, and the engine in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# compiled, vLLM's sampler draws other numbers while it is being compiled than afterwards
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import gc

import pytest
import torch


torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def frozen_imports():
    """Keep what is imported out of garbage collection: `Trainer.train()` collects, and that would cost more than training."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory) -> str:
    from tests.tiny import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def shared_engine():
    """One float32 vLLM engine for all tests of a process: it takes half a minute to start."""
    from tests.training import sharing_engines

    with sharing_engines():
        yield
