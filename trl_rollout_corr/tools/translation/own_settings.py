"""Settings of this package: read from a file, recognised as a preset, and what they do to the loss. No torch."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

from ...messages import SelfContainedError, warn
from ...settings.config import RolloutCorrectionConfig, settings_from, settings_of_preset
from ...settings.effects import effects
from ...settings.presets import VERL_PRESETS
from ...settings.resolve import FIELDS, Settings
from ...settings.trl_correction import DEFAULTS_OF_TRL
from ..decision import decide, in_words
from .setting_files import read_file, read_yaml
from .trl import TRL_KEYS, read_trl


def read_config(path: str) -> RolloutCorrectionConfig:
    """
    Read settings of this package from a YAML file, such as a recipe. Other keys are ignored. Messages name the file.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            document = read_yaml(read_file(path))
            fields = own_fields(document) if isinstance(document, Mapping) else {}
            if not fields or isinstance(fields.get("rollout_correction"), Mapping):
                ours = "it has no setting of this package, such as `rollout_correction: auto`"
                raise ValueError(f"{ours}. `trl-rollout-corr convert` translates those of verl and TRL")
            config = RolloutCorrectionConfig(**fields)
        except (ValueError, TypeError) as error:
            raise SelfContainedError(f"{path}: {in_one_line(error)}") from None
    for warning in caught:
        warn(f"{path}: {warning.message}")
    return config


def own_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of this package, and misspelt ones, among settings of TRL, which never share their prefix."""
    return {key: value for key, value in settings.items() if key in FIELDS or str(key).startswith("rollout_")}


def in_one_line(error: Exception) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split())


def preset_of(settings: Settings) -> str | None:
    """Name of the preset whose settings these are, up to rounding; `None` for settings of no preset."""
    for name in VERL_PRESETS:
        values = settings_of_preset(name).fields
        same = all(
            _is_close(value, values[field])
            for field, value in settings.fields.items()
            if field != "rollout_correction"
        )
        if same and settings.corrects:
            return name
    return None


def _is_close(value: object, other: object) -> bool:
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_close, value, other))
    if isinstance(value, int | float) and isinstance(other, int | float):
        return value == other or math.isclose(value, other, rel_tol=1e-5)
    return value == other


def tell_effects(fields: Mapping[str, Any], of_trl: Mapping[str, Any], trainer: str = "grpo") -> None:
    """Warn about what fields of this package and of TRL do to the loss, as the `trainer` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the fields alone, for which the trainer has a check as well
        config = RolloutCorrectionConfig(**fields)
    own = read_trl({name: value for name, value in of_trl.items() if name in TRL_KEYS})
    settings = settings_from({**of_trl, **own, **vars(config)}, trainer)
    written = {**of_trl, **fields}
    for effect in effects(settings, written):
        decision = decide(settings, {**DEFAULTS_OF_TRL, "use_vllm": True, **written}, is_harmed=True)
        warn(f"{effect.text} {in_words(decision)}" if effect.is_harm else effect.text, effect.field)
