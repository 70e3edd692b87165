"""Settings in files: whose they are, and what they say here. No torch."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import yaml

from ..config import RolloutCorrectionConfig
from ..migrate import from_legacy, from_trl, from_verl


FIELDS = frozenset(field.name for field in dataclasses.fields(RolloutCorrectionConfig))
# Keys that only the first releases of verl had. A boolean `rollout_is` is theirs, too.
_RENAMED = {"rollout_monitor_thresholds": "rollout_monitor_bounds"}  # of dumps that are older
_LEGACY_ONLY = ("rollout_is_level", "rollout_is_mode", "rollout_is_threshold_lower", "rollout_is_veto_threshold")


class Foreign(NamedTuple):
    """Settings of another tool, and what translates them. Verl's section, on its own, may be ours: it has our names."""

    tool: str
    translate: Callable[..., dict[str, Any]]
    settings: Mapping[str, Any] | None
    maybe_ours: bool = False


def find_foreign(document: Any) -> Foreign | None:
    """
    Find the settings of rollout correction in a configuration of another tool.

    Args:
        document (`Any`):
            Content of a YAML file: the whole configuration, or only its part about rollout correction.

    Returns:
        [`Foreign`] or `None`: the settings, if there are any.
    """
    section = document.get("algorithm", document) if isinstance(document, Mapping) else None
    if not isinstance(section, Mapping):
        return None
    flat = {key: value for key, value in section.items() if str(key).startswith(("rollout_is", "rollout_rs"))}
    trl = {key: value for key, value in section.items() if str(key).startswith("vllm_importance_sampling_")}
    legacy = any(key in section for key in _LEGACY_ONLY) or isinstance(section.get("rollout_is"), bool)
    maybe_ours = section is document and not legacy
    named = section.get("rollout_correction", "")
    if named is None or isinstance(named, Mapping):
        return Foreign("verl", from_verl, named, maybe_ours and named is None)
    if trl:
        return Foreign("TRL's own correction", from_trl, trl, maybe_ours and not FIELDS.isdisjoint(document))
    if legacy:
        return Foreign("verl's first releases", from_legacy, flat)
    if flat or "bypass_mode" in section or "loss_type" in section:
        return Foreign("verl", from_verl, section, maybe_ours)
    return None


def read_yaml(file: Path | TextIO) -> Any:
    """Content of a YAML file or stream. A `ValueError` in one line says why it cannot be read."""
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8") if isinstance(file, Path) else file.read())
    except OSError as error:
        raise ValueError(error.strerror) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"not YAML: {str(error).splitlines()[0]}") from None


def read_config(path: str) -> RolloutCorrectionConfig:
    """
    Settings of ours in a YAML file, such as a recipe. Other keys are ignored. A `ValueError` in one line names a file that
    cannot be used, and says why.
    """
    try:
        return RolloutCorrectionConfig(**_own_fields(read_yaml(Path(path))))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {_in_one_line(error)}") from None


def _own_fields(document: Any) -> dict[str, Any]:
    if not isinstance(document, Mapping):
        raise ValueError("no settings, which would be lines such as `rollout_correction: decoupled_token_is`")
    foreign = find_foreign(document)
    tool = None if foreign is None or foreign.maybe_ours else foreign.tool
    if isinstance(document.get("algorithm"), Mapping):  # a whole configuration, whatever is in it
        tool = "verl"
    if tool:
        raise ValueError(f"a configuration of {tool}; translate it with `python -m trl_rollout_corr convert`")
    unknown = [key for key in document if str(key).startswith("rollout_") and key not in FIELDS]
    if unknown:
        raise ValueError(f"`{unknown[0]}` is not a field of rollout correction")
    fields = {key: value for key, value in document.items() if key in FIELDS}
    if not fields:
        raise ValueError("no field of rollout correction in it, such as `rollout_correction`")
    return fields


def config_of_run(settings: Mapping[str, Any], complaint: str) -> RolloutCorrectionConfig:
    """Configuration that a dump was made with. A `ValueError` in one line begins with the complaint, and says why."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about settings without effect: the run has warned already
        try:
            return RolloutCorrectionConfig(**{_RENAMED.get(key, key): value for key, value in settings.items()})
        except (ValueError, TypeError) as error:
            raise ValueError(f"{complaint}: {_in_one_line(error)}") from None


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
