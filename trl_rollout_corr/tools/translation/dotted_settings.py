"""Settings of verl by their dotted names, converted to fields of this package and of TRL. No torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...messages import SettingError, warn
from ...settings.config import RolloutCorrectionConfig
from ...settings.trl_correction import PREFIX_OF_TRL
from ..formats import yaml_lines
from .counterparts import TRAINERS, counterpart, suspects, suspicious_options, to_trl
from .own_settings import preset_of, tell_effects
from .setting_files import ABOUT_SKYRL, about_options, leaves
from .verl import NOT_SET, from_verl, split_verl, with_divergence


# The section that only verl uses, and the sections of arguments of its command
_ONLY_VERL = ("actor_rollout_ref.",)
_OF_COMMAND = ("algorithm.", "actor_rollout_ref.", "data.", "trainer.")


def convert_settings(settings: Mapping[str, object], options: Sequence[str] = (), *, from_command: bool) -> str:
    """
    Fields of this package and of TRL for dotted names of verl, from a file or from a command, next to its `options`.
    """
    refuse_skyrl(settings)
    doubtful_options = suspicious_options(options)
    if doubtful_options and not settings:
        raise ValueError(about_options(doubtful_options))
    fields, others = read_verl(settings, from_command=from_command)
    in_effect = RolloutCorrectionConfig(**fields).settings
    if not (in_effect.corrects or in_effect.rollout_metrics_only):
        if doubtful := suspects(others):
            raise SettingError(
                doubtful[0],
                others[doubtful[0]],
                "which may correct for the sampler, and cannot be translated. Nothing else does, so that the result "
                "would train without a correction",
                remedy="Choose one (`trl-rollout-corr docs choosing`), or leave this setting out.",
            )
        if doubtful_options:
            raise ValueError(
                "the result would train without a correction, although the command has one: "
                f"{about_options(doubtful_options)}"
            )
    trl = to_trl(others)
    tell_effects(fields, {"use_vllm": True, **trl})
    trainer = TRAINERS.get(estimator_of(others) or "")
    preset = None if "rollout_correction" in fields else preset_of(in_effect)
    lines = [f"# for {trainer}"] * bool(trainer) + ["use_vllm: true"]
    lines += [f"# the settings of the preset {preset}"] * bool(preset)
    return "\n".join([*lines, yaml_lines({**fields, **trl}).rstrip()]) + "\n"


def read_verl(settings: Mapping[str, object], *, from_command: bool) -> tuple[dict[str, Any], dict[str, object]]:
    """Fields for dotted names of verl, from a file or from a command, and the remaining settings."""
    section, others = split_verl(settings)
    if section is NOT_SET:
        sections = _OF_COMMAND if from_command else _ONLY_VERL
        if not any(name.startswith(sections) or (from_command and counterpart(name)) for name in settings):
            doubtful = suspects(others)
            of_others = f", and `{doubtful[0]}` is not translated" if doubtful else ""
            raise ValueError(
                "it has no settings of verl (`actor_rollout_ref`, `algorithm.rollout_correction`), and none of TRL's "
                f"`{PREFIX_OF_TRL}*`{of_others}"
            )
        warn("verl does not correct without `algorithm.rollout_correction`, so that correction is off here as well.")
        section = None
    return with_divergence(from_verl(section), others), others


def is_skyrl(settings: Mapping[str, object]) -> bool:
    """`True` for dotted names of SkyRL."""
    return any(name.startswith("trainer.algorithm.") for name in settings)


def refuse_skyrl(settings: Mapping[str, object]) -> None:
    """Raise a `ValueError` of one line for dotted names of SkyRL."""
    if is_skyrl(settings):
        raise ValueError(ABOUT_SKYRL)


def estimator_of(settings: Mapping[str, Any]) -> str | None:
    """The trainer that verl's estimator of the advantage tells; `None` without one of TRL's."""
    values = [str(x) for name, x in leaves(settings) if counterpart(name) == "algorithm.adv_estimator"]
    return values[0] if values and values[0] in TRAINERS else None


def system_of(content: Mapping[str, Any]) -> str:
    """Name of the system whose whole configuration a file is; empty for TRL and unknown systems."""
    settings = dict(leaves(content))
    if is_skyrl(settings):
        return "SkyRL"
    if any(name.startswith((*_ONLY_VERL, "algorithm.rollout_correction")) for name in settings):
        return "verl"
    if "compute_environment" in content or "distributed_type" in content:
        return "accelerate"
    return "Axolotl" if "base_model" in content and isinstance(content.get("trl"), Mapping) else ""
