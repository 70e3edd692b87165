"""
Files and arguments with settings, of this package and of other tools, and their translation. No
torch.
"""

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import yaml

from ...messages import SelfContainedError, SettingError, warn
from ...settings.config import RolloutCorrectionConfig
from ...settings.fields import FIELDS
from ...settings.presets import UNSET, settings_of
from ...settings.resolve import Settings
from ..text import yaml_lines
from .counterparts import TRAINERS, comment, counterpart, suspects, to_trl
from .of_trl import from_trl
from .skyrl import from_skyrl, is_skyrl
from .verl import NOT_SET, from_verl, split_verl, with_divergence


_OVERRIDE = re.compile(r"\+{0,2}([^\s=~+-][^\s=]*)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"^#!.*python|^import \w|^from [\w.]+ import ", re.MULTILINE)
_SHELL = re.compile(r"^#!.*sh\b|^\s*(export )?\+{0,2}[\w.]+=\S|verl\.trainer", re.MULTILINE)
# The section that only verl uses, and the sections of arguments of its command
_ONLY_VERL = ("actor_rollout_ref.",)
_OF_VERL = ("algorithm.", "actor_rollout_ref.", "data.", "trainer.")
# Names any of which marks a file as TRL's or Axolotl's
_OF_TRL = {
    "base_model",
    "model_name_or_path",
    "num_generations",
    "output_dir",
    "per_device_train_batch_size",
    "plugins",
    "use_vllm",
    "vllm_mode",
}
# The command of a script that starts the training, such as `python3 -m verl.trainer.main_ppo`
_STARTS = re.compile(r"\b(?:python\d?|uv run)\b[^\n\\|;&#]*? -m (?!pip|uv|venv|ensurepip|http)[\w.]+")
_TRL = "vllm_importance_sampling_"
# Values in effect for the fields that no preset decides
_DEFAULTS = {name: value for name, value in asdict(RolloutCorrectionConfig().settings).items() if name not in UNSET}
_PLUGIN = "trl_rollout_corr.axolotl.RolloutCorrectionPlugin"


def read_yaml(text: str) -> Any:
    """
    Content of YAML. Raises a `ValueError` of one line for anything else, such as a shell script.
    """
    return read_document(text)[0]


def read_document(text: str) -> tuple[Any, yaml.Node | None]:
    """Content of YAML, and the tree that it was read from."""
    problem, content, node = "", None, None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None:
            content = loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = f"{f'line {mark.line + 1}: ' if mark else ''}not YAML: {getattr(error, 'problem', None) or error}"
    except Exception as error:  # PyYAML checks few values
        problem = f"not YAML that can be read: {error}"
    if not isinstance(content, Mapping):
        if _PYTHON.search(text):
            raise ValueError(
                "This is a Python file: copy its settings into a YAML file, one `key: value` in each line."
            )
        if _SHELL.search(text):
            raise ValueError(_about_script(text))
    if problem:
        raise ValueError(problem)
    return content, node


def _about_script(text: str) -> str:
    """Advice about a shell script: which command of it starts the training."""
    started = _STARTS.search(text)
    command = f"`{' '.join(started[0].split())}`" if started else "the command that is given the settings"
    return (
        f"This is a shell script: put `trl-rollout-corr convert` in the place of {command} in a copy of it, and run that. "
        "Then the shell expands its variables."
    )


def read_file(path: str) -> str:
    """
    Text of a file of settings, or of standard input for `-`. Raises a `ValueError` of one line if it is no text.
    """
    try:
        if path == "-":
            return sys.stdin.read()
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"not YAML: {error}") from None


# Settings of other tools ----------------------------------------------------------------------------------------------


def convert(arguments: list[str]) -> str:
    """
    Translate a YAML file of another tool (its path, or `-` for standard input), or arguments of a
    training script of verl or SkyRL, to YAML of this package and of TRL. A warning names each
    omitted setting. YAML of TRL or Axolotl is returned as a whole.
    """
    if len(arguments) == 1 and not _OVERRIDE.fullmatch(arguments[0]):
        text = read_file(arguments[0])
        content, node = read_document(text)
        if isinstance(content, Mapping):
            of_trl = content["trl"] if isinstance(content.get("trl"), Mapping) else content
            has_trl = any(str(key).startswith(_TRL) for key in of_trl)
            if has_trl and FIELDS.isdisjoint(content):
                return _convert_trl(text, content, node, of_trl)
            if has_trl or content.keys() & _OF_TRL:
                found = "fields of this package" if has_trl else f"none of TRL's `{_TRL}*`"
                raise ValueError(f"it has {found} and needs no conversion")
        return _convert_settings(dict(_leaves(content)), _ONLY_VERL)
    return _convert_settings(_read_overrides(arguments), _OF_VERL)


def system_of(content: Mapping[str, Any]) -> str:
    """Name of the system whose whole configuration a file is; empty for TRL and unknown systems."""
    settings = dict(_leaves(content))
    if is_skyrl(settings):
        return "SkyRL"
    if any(name.startswith((*_ONLY_VERL, "algorithm.rollout_correction")) for name in settings):
        return "verl"
    return "Axolotl" if "base_model" in content and isinstance(content.get("trl"), Mapping) else ""


def _convert_trl(text: str, content: Mapping[str, Any], node: yaml.Node | None, of_trl: Mapping[str, Any]) -> str:
    """
    The YAML of TRL, or of Axolotl with TRL's fields below `trl`, plus the line that keeps TRL's own
    correction. Comments and all other lines stay.
    """
    from_trl({key: value for key, value in of_trl.items() if str(key).startswith(_TRL)})  # an error if one is refused
    expected = {**content, "rollout_correction": "trl"}
    lines = "rollout_correction: trl\n"
    if of_trl is not content and _PLUGIN not in (plugins := content.get("plugins") or []):
        if not isinstance(plugins, list):
            raise SettingError("plugins", plugins, allowed="a list of names")
        expected["plugins"] = [*plugins, _PLUGIN]
        lines += "" if plugins else f"plugins:\n- {_PLUGIN}\n"
        text = _with_plugin(text, node) if plugins else text
    edited = text.rstrip() + "\n" + lines
    with suppress(ValueError):
        if read_yaml(edited) == expected:
            return edited
    warn("The file cannot be edited line by line, so that it is written anew, without its comments.")
    return yaml.safe_dump(expected, sort_keys=False, allow_unicode=True, width=1000, default_flow_style=False)


def _with_plugin(text: str, node: yaml.Node | None) -> str:
    """The text of a file of Axolotl with one more entry in its list of plugins."""
    assert isinstance(node, yaml.MappingNode)
    [plugins] = [value for key, value in node.value if key.value == "plugins"]
    last = plugins.value[-1]
    if plugins.flow_style:
        return f"{text[: last.end_mark.index]}, {_PLUGIN}{text[last.end_mark.index :]}"
    lines = text.splitlines(keepends=True)
    lines[last.end_mark.line] = lines[last.end_mark.line].rstrip("\n") + "\n"
    return "".join(
        [
            *lines[: last.end_mark.line + 1],
            f"{' ' * plugins.start_mark.column}- {_PLUGIN}\n",
            *lines[last.end_mark.line + 1 :],
        ]
    )


def _convert_settings(settings: Mapping[str, object], of_verl: tuple[str, ...]) -> str:
    """
    Fields of this package and of TRL for dotted names of SkyRL, or of verl, whose sections are
    `of_verl`.
    """
    fields, others = from_skyrl(settings) if is_skyrl(settings) else _read_verl(settings, of_verl)
    in_effect = RolloutCorrectionConfig(**fields).settings
    if not (in_effect.corrects or in_effect.rollout_metrics_only):
        if doubtful := suspects(others):
            raise SettingError(
                doubtful[0],
                others[doubtful[0]],
                "which may correct for the sampler, and cannot be translated. Nothing else does, so that the result would "
                "train without a correction",
                remedy="Choose one (`trl-rollout-corr docs choosing`), or leave this setting out.",
            )
        if is_skyrl(settings):
            warn("SkyRL does not correct with these settings, so that correction is off here as well.")
    trl = to_trl(others)
    trainer = TRAINERS.get(
        str(next((x for name, x in others.items() if counterpart(name) == "algorithm.adv_estimator"), ""))
    )
    lines = ["use_vllm: true", yaml_lines(fields).rstrip()]
    for field, value in trl.items():
        note = comment(field, value)
        lines.append(yaml_lines({field: value}).rstrip() + (f"  # {note}" if note else ""))
    return "\n".join([f"# for {trainer}"] * bool(trainer) + lines) + "\n"


def _read_verl(settings: Mapping[str, object], of_verl: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, object]]:
    """Fields for dotted names of verl, and the remaining settings."""
    section, others = split_verl(settings)
    if section is NOT_SET:
        if not any(name.startswith(of_verl) or (of_verl is _OF_VERL and counterpart(name)) for name in settings):
            doubtful = suspects(others)
            of_others = f", and `{doubtful[0]}` is not translated" if doubtful else ""
            raise ValueError(
                "it has no settings of verl (`actor_rollout_ref`, `algorithm.rollout_correction`) or SkyRL "
                f"(`trainer.algorithm`), and none of TRL's `{_TRL}*`{of_others}"
            )
        warn("verl does not correct without `algorithm.rollout_correction`, so that correction is off here as well.")
        section = None
    return with_divergence(from_verl(section), others), others


def _leaves(content: object, above: str = "") -> Iterator[tuple[str, object]]:
    """Dotted name and value of each setting. An empty section counts as a value."""
    if isinstance(content, Mapping) and (content or not above):
        for key, value in content.items():
            yield from _leaves(value, f"{above}.{key}" if above else str(key))
    elif above:
        yield above, content


def _read_overrides(arguments: list[str]) -> dict[str, object]:
    """
    Dotted name and value of each argument of the form `key=value`. Other options of the command
    share one warning.
    """
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
    """Value of an argument: text without quotes that the shell left, a list or a mapping."""
    if text[:1] in ("[", "{", "'", '"'):
        try:
            return read_yaml(text)
        except ValueError:
            raise SettingError(key, text, "which is not closed", remedy="Check its quotes and brackets.") from None
    if re.search(r"\s[+~]{0,2}[\w.]+=", text):
        remedy = 'Write the variable that holds them without quotes, or an array as `"${ARGUMENTS[@]}"`.'
        raise SettingError(key, text, "which has several arguments in it", remedy=remedy)
    return text


# Settings of this package ---------------------------------------------------------------------------------------------


def read_config(path: str) -> RolloutCorrectionConfig:
    """
    Read settings of this package from a YAML file, such as a recipe. Other keys are ignored.
    Messages name the file.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            document = read_yaml(read_file(path))
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
    Settings in effect of the run that wrote a dump. A dump from elsewhere may name only a part of
    them, as a configuration does. Raises a `ValueError` of one line that begins with the complaint.
    """
    own = _own_fields(written)
    in_effect = written.get("in_effect") is True
    if not in_effect:
        if own.get("rollout_correction") == "trl":  # no configuration of ours can name its weights
            own = {**asdict(RolloutCorrectionConfig(rollout_correction="trl").settings), **own}
        in_effect = _look_decided(own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run warned already
        try:
            if in_effect and own.keys() <= FIELDS:
                return Settings.read({**settings_of(None), **_DEFAULTS, **own})
            return RolloutCorrectionConfig(**own).settings
        except (ValueError, TypeError) as error:
            raise ValueError(f"{complaint}: {_in_one_line(error)}") from None


def _look_decided(own: Mapping[str, Any]) -> bool:
    """True if no preset has a field to decide, as in a dump that does not say what it names."""
    decided = UNSET.keys() - {"rollout_rs_threshold"}
    return "rollout_correction" in own and all(own.get(name, UNSET[name]) != UNSET[name] for name in decided)


def _own_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """
    Fields of this package, and misspelt ones, among settings of TRL, which never share their
    prefix.
    """
    return {key: value for key, value in settings.items() if key in FIELDS or str(key).startswith("rollout_")}


def has_settings(fields: Mapping[str, Any]) -> bool:
    """True if the run that wrote a dump recorded settings of the correction."""
    return bool(_own_fields(fields))


def settings_of_run(fields: Mapping[str, Any]) -> Settings | None:
    """Settings in effect of the run that wrote a dump; `None` if missing or unreadable."""
    if not has_settings(fields):
        return None
    with suppress(ValueError):
        return read_settings(fields, "the settings in the dump")
    return None


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
