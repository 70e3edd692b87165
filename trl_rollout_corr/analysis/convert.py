"""`python -m trl_rollout_corr convert`: settings of another tool, as YAML of this package. No torch."""

import sys
from pathlib import Path

from ..config import RolloutCorrectionConfig
from .settings import find_foreign, read_yaml
from .text import yaml_lines


def convert(path: str) -> str:
    """
    Translate a configuration of another tool.

    Args:
        path (`str`):
            A YAML file, or `-` for standard input.

    Returns:
        `str`: YAML of fields of [`RolloutCorrectionConfig`].

    Raises:
        `ValueError`: if it cannot be read or translated.
    """
    foreign = find_foreign(read_yaml(sys.stdin if path == "-" else Path(path)))
    if foreign is None:
        raise ValueError(
            "no settings of rollout correction found: neither verl's `algorithm.rollout_correction`, nor the `rollout_is*` "
            "keys of its first releases, nor TRL's `vllm_importance_sampling_*`."
        )
    fields = foreign.translate(foreign.settings)
    RolloutCorrectionConfig(**fields)  # says what is wrong, if anything is
    return yaml_lines(fields)
