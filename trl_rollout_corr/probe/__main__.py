"""A process of the command `probe`: `python -m trl_rollout_corr.probe request.json`."""

import os
import sys

import torch


def start() -> None:
    """Carry out a request, without compiling on a CPU, which would take longer than everything else."""
    if not torch.accelerator.is_available():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before anything that compiles is imported
    from .process import main

    main(sys.argv[1])


if __name__ == "__main__":
    start()
