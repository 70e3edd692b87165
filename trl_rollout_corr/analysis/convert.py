"""`python -m trl_rollout_corr convert`: settings of another tool as YAML of this package. No torch."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from ..config import RolloutCorrectionConfig
from ..migrate import from_legacy, from_trl, from_verl


# Keys that only the first releases of verl had
_LEGACY_ONLY = ("rollout_is_level", "rollout_is_mode", "rollout_is_threshold_lower", "rollout_is_veto_threshold")
_VERL_ONLY = ("rollout_rs", "bypass_mode", "loss_type", "rollout_is_batch_normalize")


def find_settings(document: Any) -> tuple[Callable[[Mapping], dict], Mapping[str, Any] | None]:
    """
    Find the settings of rollout correction in a configuration of another tool.

    Args:
        document (`Any`):
            Content of a YAML file.

    Returns:
        `tuple[Callable, Mapping or None]`: the translator of [`migrate`](migrate.py) that understands them, and the settings.

    Raises:
        `ValueError`: if there are none.
    """
    if isinstance(document, Mapping):
        section = document.get("algorithm", document)
        if isinstance(section, Mapping):
            if isinstance(section.get("rollout_correction", ""), (Mapping, type(None))):
                return from_verl, section["rollout_correction"]
            trl = {key: value for key, value in section.items() if str(key).startswith("vllm_importance_sampling_")}
            if trl:
                return from_trl, trl
            ours = {key: value for key, value in section.items() if str(key).startswith(("rollout_is", "rollout_rs"))}
            if any(key in section for key in _LEGACY_ONLY) or isinstance(ours.get("rollout_is"), bool):
                return from_legacy, ours
            if ours or any(key in section for key in _VERL_ONLY):
                return from_verl, section
    raise ValueError(
        "no settings of rollout correction found: neither verl's `algorithm.rollout_correction`, nor the `rollout_is*` keys "
        "of its first releases, nor TRL's `vllm_importance_sampling_*`."
    )


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
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        document = yaml.safe_load(text)
    except OSError as error:
        raise ValueError(error.strerror) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"not YAML: {str(error).splitlines()[0]}") from None
    translate, settings = find_settings(document)
    fields = translate(settings)
    RolloutCorrectionConfig(**fields)  # says what is wrong, if anything is
    return "".join(f"{key}: {_in_one_line(value)}\n" for key, value in fields.items())


def _in_one_line(value: Any) -> str:
    return yaml.safe_dump([value], default_flow_style=True, width=1000).strip()[1:-1]
