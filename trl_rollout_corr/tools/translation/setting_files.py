"""Files and arguments with settings, of this package and of other tools, and their translation. No torch."""

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ...messages import SelfContainedError, SettingError, warn
from ...settings.config import RolloutCorrectionConfig
from ...settings.fields import FIELDS
from ...settings.presets import UNSET
from ...settings.resolve import Settings
from ..text import yaml_lines
from .counterparts import TRAINERS, comment, counterpart, to_trl
from .of_trl import from_trl
from .verl import NOT_SET, from_verl, split_verl


_OVERRIDE = re.compile(r"\+{0,2}([^\s=~+-][^\s=]*)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"^#!.*python|^import \w|^from [\w.]+ import ", re.MULTILINE)
_SHELL = re.compile(r"^#!.*sh\b|^\s*(export )?\+{0,2}[\w.]+=\S|verl\.trainer", re.MULTILINE)
_OF_VERL = ("algorithm.", "actor_rollout_ref.", "data.", "trainer.")
_TRL = "vllm_importance_sampling_"
# In effect of the fields that no preset decides
_DEFAULTS = {name: value for name, value in asdict(RolloutCorrectionConfig().settings).items() if name not in UNSET}
_PLUGIN = "trl_rollout_corr.axolotl.RolloutCorrectionPlugin"


def read_yaml(text: str) -> Any:
    """Content of YAML. A shell script or a Python file, and text that is neither, are a `ValueError` of one line."""
    problem, content = "", None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = f"{f'line {mark.line + 1}: ' if mark else ''}not YAML: {getattr(error, 'problem', None) or error}"
    except RecursionError:
        problem = "not YAML that a person wrote: its brackets are nested too deeply"
    if not isinstance(content, Mapping):
        if _PYTHON.search(text):
            raise ValueError(
                "This is a Python file: copy its settings into a YAML file, one `key: value` in each line."
            )
        if _SHELL.search(text):
            raise ValueError(
                "This is a shell script: put `trl-rollout-corr convert` in the place of `python3 -m verl.trainer.main_ppo` in "
                "it, and run it. Then the shell expands its variables."
            )
    if problem:
        raise ValueError(problem)
    return content


def _read_file(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not YAML: {error}") from None


# Settings of other tools ----------------------------------------------------------------------------------------------


def convert(arguments: list[str]) -> str:
    """
    Translate a YAML file of another tool (its path, or `-` for standard input), or arguments of a training script of verl, to
    YAML of this package and of TRL. A warning names each setting of verl that is left out. The whole YAML of TRL or Axolotl
    comes back.
    """
    if len(arguments) == 1 and not _OVERRIDE.fullmatch(arguments[0]):
        content = read_yaml(_read_file(arguments[0]))
        if isinstance(content, Mapping):
            of_trl = content["trl"] if isinstance(content.get("trl"), Mapping) else content
            has_trl = any(str(key).startswith(_TRL) for key in of_trl)
            if has_trl and FIELDS.isdisjoint(content):
                return _convert_trl(content, of_trl)
            if has_trl or content.keys() & {"output_dir", "model_name_or_path", "plugins"}:
                found = "fields of this package" if has_trl else f"none of TRL's `{_TRL}*`"
                raise ValueError(f"it has {found} and needs no conversion")
        return _convert_verl(dict(_leaves(content)))
    return _convert_verl(_read_overrides(arguments))


def _convert_trl(content: Mapping[str, Any], of_trl: Mapping[str, Any]) -> str:
    """The whole YAML of TRL, or of Axolotl with TRL's fields below `trl`, with our fields in the place of TRL's."""
    theirs = {key: value for key, value in of_trl.items() if str(key).startswith(_TRL)}
    fields = from_trl(theirs)
    RolloutCorrectionConfig(**fields)  # raises an error if a value is refused
    changed = {key: value for key, value in content.items() if key not in theirs}
    if of_trl is not content:
        changed["trl"] = {key: value for key, value in of_trl.items() if key not in theirs}
        changed["plugins"] = list(dict.fromkeys([*(content.get("plugins") or []), _PLUGIN]))
    return yaml.safe_dump(
        {**changed, **fields}, sort_keys=False, allow_unicode=True, width=1000, default_flow_style=None
    )


def _convert_verl(settings: Mapping[str, object]) -> str:
    """Fields of this package and of TRL for dotted names of verl."""
    section, others = split_verl(settings)
    if section is NOT_SET:
        if not any(counterpart(name) or name.startswith(_OF_VERL) for name in others):
            raise ValueError(
                f"it has no settings of verl, such as `algorithm.rollout_correction`, and none of TRL's `{_TRL}*`"
            )
        warn("verl does not correct without `algorithm.rollout_correction`, so that correction is off here as well.")
        section = None
    fields = from_verl(section)
    trl = to_trl(others)
    RolloutCorrectionConfig(**fields)
    trainer = TRAINERS.get(str(next((x for name, x in others.items() if name.endswith("adv_estimator")), "")))
    lines = ["use_vllm: true", yaml_lines(fields).rstrip()]
    for field, value in trl.items():
        note = comment(field, value)
        lines.append(yaml_lines({field: value}).rstrip() + (f"  # {note}" if note else ""))
    return "\n".join([f"# for {trainer}"] * bool(trainer) + lines) + "\n"


def _leaves(content: object, above: str = "") -> Iterator[tuple[str, object]]:
    """Dotted name and value of each setting. An empty section is a value."""
    if isinstance(content, Mapping) and (content or not above):
        for key, value in content.items():
            yield from _leaves(value, f"{above}.{key}" if above else str(key))
    elif above:
        yield above, content


def _read_overrides(arguments: list[str]) -> dict[str, object]:
    """Dotted name and value of each argument of the form `key=value`. Other options of the command share one warning."""
    settings: dict[str, object] = {}
    options: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        match = _OVERRIDE.fullmatch(argument)
        if argument.startswith("-") or (match is None and before.startswith("-") and "=" not in before):
            options.append(argument)
        elif match is None and argument:
            reason = "it is neither `key=value` nor an option. A file is converted alone. A backslash with blanks behind it "
            raise ValueError(f"{argument!r}: {reason}does not continue a line, so that what follows is lost.")
        elif match is not None:
            for key, value in _leaves(_read_argument(*match.groups()), match[1]):
                if settings.get(key, value) != value:
                    warn(f"`{key}` is given again: {settings[key]!r} has no effect, and {value!r} counts.", key)
                settings[key] = value
    if options:
        warn(f"{' '.join(options)}: options of Python and Hydra are left out. A file that they name is not read.")
    return settings


def _read_argument(key: str, text: str) -> object:
    """Value of an argument: text, without quotes that the shell has left, or a list or a mapping."""
    if text[:1] in ("[", "{", "'", '"'):
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            raise SettingError(key, text, "which is not closed", remedy="Check its quotes and brackets.") from None
    if re.search(r"\s[+~]{0,2}[\w.]+=", text):
        remedy = 'Write the variable that holds them without quotes, or an array as `"${ARGUMENTS[@]}"`.'
        raise SettingError(key, text, "which has several arguments in it", remedy=remedy)
    return text


# Settings of this package ---------------------------------------------------------------------------------------------


def read_config(path: str) -> RolloutCorrectionConfig:
    """Read settings of this package from a YAML file, such as a recipe. Other keys are ignored. Messages name the file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            document = read_yaml(_read_file(path))
            fields = _own_fields(document) if isinstance(document, Mapping) else {}
            if not fields or isinstance(fields.get("rollout_correction"), Mapping):
                ours = "it has no setting of this package, such as `rollout_correction: auto`"
                raise ValueError(f"{ours}. `trl-rollout-corr convert` translates those of verl and TRL")
            config = RolloutCorrectionConfig(**fields)
        except (ValueError, TypeError) as error:
            raise SelfContainedError(f"{path}: {_in_one_line(error)}") from None
    for warning in caught:
        warn(f"{path}: {warning.message}")
    return config


def read_settings(written: Mapping[str, Any], complaint: str) -> Settings:
    """
    Settings in effect of the run that wrote a dump. A dump that was not written by a run may name a part of them, as a
    configuration does. Errors are a `ValueError` of one line that begins with the complaint.
    """
    own = _own_fields(written)
    if own.get("rollout_correction") == "trl":  # whose weights no configuration of ours can name
        own = {**asdict(RolloutCorrectionConfig(rollout_correction="trl").settings), **own}
    decided = UNSET.keys() - {"rollout_rs_threshold"}
    in_effect = "rollout_correction" in own and all(own.get(name, UNSET[name]) != UNSET[name] for name in decided)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run has warned already
        try:
            if in_effect and own.keys() <= FIELDS:
                return Settings.read({"rollout_rs_threshold": None, **_DEFAULTS, **own})
            return RolloutCorrectionConfig(**own).settings
        except (ValueError, TypeError) as error:
            raise ValueError(f"{complaint}: {_in_one_line(error)}") from None


def _own_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of this package, and misspelt ones, beside settings of TRL, of which none begins like them."""
    return {key: value for key, value in settings.items() if key in FIELDS or str(key).startswith("rollout_")}


def settings_of_run(fields: Mapping[str, Any]) -> Settings | None:
    """Settings in effect of the run that wrote a dump; `None` if the dump does not name them, or they cannot be read."""
    if FIELDS.isdisjoint(fields):
        return None
    with suppress(ValueError):
        return read_settings(fields, "the settings in the dump")
    return None


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
