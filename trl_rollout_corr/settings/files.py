"""Settings in files: whose they are, and what they say here. No torch."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..messages import SelfContainedError, warn
from .config import RolloutCorrectionConfig
from .documents import read_document
from .migrate import VERL_KEYS, from_legacy, from_trl, from_verl
from .presets import PRESETS


FIELDS = frozenset(field.name for field in dataclasses.fields(RolloutCorrectionConfig))
# Fields in dumps of earlier versions
_RENAMED = {"rollout_monitor_thresholds": "rollout_monitor_bounds"}
_REMOVED = ("rollout_compile",)
# Keys that only the first releases of verl had. A boolean `rollout_is` is theirs, too.
_LEGACY_ONLY = ("rollout_is_level", "rollout_is_mode", "rollout_is_threshold_lower", "rollout_is_veto_threshold")


class Foreign(NamedTuple):
    """
    Settings of another tool.

    Args:
        tool (`str`):
            Whose they are.
        translate (`Callable`):
            What translates them.
        settings (`Mapping` or `None`):
            The settings.
        above (`tuple[str, ...]`):
            Keys under which they stand.
        maybe_ours (`bool`, *optional*, defaults to `False`):
            Whether they may be ours: verl's section, on its own, has our names.
    """

    tool: str
    translate: Callable[..., dict[str, Any]]
    settings: Mapping[str, Any] | None
    above: tuple[str, ...] = ()
    maybe_ours: bool = False


def find_foreign(document: Any) -> Foreign | None:
    """
    Find the settings of rollout correction in a configuration of another tool.

    Args:
        document (`Any`):
            Content of a file: the whole configuration, or only its part about rollout correction.

    Returns:
        [`Foreign`] or `None`: the settings, if there are any.
    """
    section = document.get("algorithm", document) if isinstance(document, Mapping) else None
    if not isinstance(section, Mapping):
        return None
    above = () if section is document else ("algorithm",)
    legacy = is_legacy(section)
    maybe_ours = section is document and not legacy
    named = section.get("rollout_correction", "")
    if isinstance(named, Mapping) and is_legacy(named):
        return Foreign("verl's first releases", from_legacy, named, (*above, "rollout_correction"))
    if named is None or isinstance(named, Mapping):
        return Foreign("verl", from_verl, named, (*above, "rollout_correction"), maybe_ours and named is None)
    if above and named in PRESETS:
        return Foreign("verl", lambda name: {"rollout_correction": name}, named, (*above, "rollout_correction"))
    flat = {key: value for key, value in section.items() if str(key).startswith(("rollout_is", "rollout_rs"))}
    trl = {key: value for key, value in section.items() if str(key).startswith("vllm_importance_sampling_")}
    if trl:
        return Foreign("TRL's own correction", from_trl, trl, above, maybe_ours and not FIELDS.isdisjoint(document))
    if legacy:
        return Foreign("verl's first releases", from_legacy, flat, above)
    if flat or not section.keys().isdisjoint(VERL_KEYS):
        verl = {key: value for key, value in section.items() if key in VERL_KEYS or key in flat}
        return Foreign("verl", from_verl, verl, above, maybe_ours)
    return None


def is_legacy(section: Mapping[str, Any]) -> bool:
    """Whether keys are those of verl's first releases."""
    boolean = section.get("rollout_is")
    if isinstance(boolean, str):  # of a shell script
        boolean = {"true": True, "false": False}.get(boolean.strip().lower(), boolean)
    return any(key in section for key in _LEGACY_ONLY) or isinstance(boolean, bool)


def read_config(path: str) -> RolloutCorrectionConfig:
    """
    Settings of ours in a YAML file, such as a recipe. Other keys are ignored. Errors in one line, and warnings, name the file.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config = RolloutCorrectionConfig(**_own_fields(read_document(Path(path)).content))
        except (ValueError, TypeError) as error:
            raise SelfContainedError(f"{path}: {_in_one_line(error)}") from None
    for warning in caught:
        warn(f"{path}: {warning.message}")
    return config


def _own_fields(document: Any) -> dict[str, Any]:
    if not isinstance(document, Mapping):
        raise ValueError("no settings, which would be lines such as `rollout_correction: decoupled_token_is`")
    foreign = find_foreign(document)
    tool = None if foreign is None or foreign.maybe_ours else foreign.tool
    if isinstance(document.get("algorithm"), Mapping):  # a whole configuration, whatever is in it
        tool = "verl"
    if tool:
        raise ValueError(f"a configuration of {tool}; translate it with `trl-rollout-corr convert`")
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
            # beside settings of TRL, of which none begins like this
            ours = {_RENAMED.get(key, key): value for key, value in settings.items() if key not in _REMOVED}
            return RolloutCorrectionConfig(
                **{key: value for key, value in ours.items() if key in FIELDS or key.startswith("rollout_")}
            )
        except (ValueError, TypeError) as error:
            raise ValueError(f"{complaint}: {_in_one_line(error)}") from None


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
