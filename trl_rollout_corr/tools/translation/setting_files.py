"""Files and arguments with settings, of this package and of other tools, and their translation. No torch."""

import math
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import yaml

from ...messages import SelfContainedError, SettingError, warn
from ...settings.config import RolloutCorrectionConfig
from ...settings.effects import OF_TRL, effects
from ...settings.fields import FIELDS
from ...settings.of_trl import DEFAULTS_OF_TRL, given_to_trl
from ...settings.presets import DEFAULT, VERL_PRESETS
from ...settings.resolve import Settings, resolve
from ..decision import decide, in_words
from ..formats import yaml_lines
from .counterparts import TRAINERS, counterpart, suspects, suspicious_options, to_trl
from .skyrl import from_skyrl, is_skyrl
from .trl import TRL_KEYS, from_trl
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
    "gradient_accumulation_steps",
    "learning_rate",
    "max_completion_length",
    "max_steps",
    "model_name_or_path",
    "num_generations",
    "num_iterations",
    "num_train_epochs",
    "output_dir",
    "per_device_train_batch_size",
    "plugins",
    "reward_funcs",
    "steps_per_generation",
    "use_vllm",
    "vllm_mode",
}
# Names that only one of TRL's trainers has
_OF_GRPO = {
    *("cast_lm_head_to_fp32", "delta", "importance_sampling_level", "loss_type", "multi_objective_aggregation"),
    *("off_policy_mask_threshold", "scale_rewards", "top_entropy_quantile", "use_bias_correction_kl"),
}
_OF_RLOO = {"normalize_advantages", "reward_clip_range"}
_OF_ASYNCHRONOUS = {
    "max_inflight_tasks",
    "max_staleness",
    "queue_maxsize",
    "vllm_server_base_url",
    "weight_sync_steps",
}
# The command of a script that starts the training, such as `python3 -m verl.trainer.main_ppo`
_STARTS = re.compile(r"\b(?:python\d?|uv run)\b[^\n\\|;&#]*? -m (?!pip|uv|venv|ensurepip|http)[\w.]+")
# Settings of the form that verl and SkyRL read
_KEYS_IN_SCRIPT = re.compile(
    r"verl|skyrl|\brollout_(?:is|rs|correction)\b|(?<![-\w])[+~]{0,2}[a-z]\w*\.[\w.]+=", re.IGNORECASE
)
# Options of slime and miles for its correction
_OPTIONS = {
    "use-tis": "`rollout_is: token`",
    "tis-clip": "the upper bound, `rollout_is_threshold`",
    "tis-clip-low": "the lower bound of a pair with `rollout_is_clamp: true`, if it is above 0",
    "use-rollout-logprobs": "`rollout_correction: bypass_ppo_clip`",
    "custom-tis-function-path": "a correction of its own (IcePop is `rollout_correction: decoupled_token_icepop`)",
}
_NAMES = {"grpo": "GRPO", "rloo": "RLOO", "async_grpo": "asynchronous GRPO"}
_PLUGIN = "trl_rollout_corr.axolotl.RolloutCorrectionPlugin"


def read_yaml(text: str) -> Any:
    """Content of YAML. Raises a `ValueError` of one line for anything else, such as a shell script."""
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
    """Advice about a shell script: which command of it starts the training, or that none of its settings are known."""
    if not _KEYS_IN_SCRIPT.search(text):
        options = suspicious_options(re.findall(r"--[\w.-]+", text))
        about = f" {_about_options(options)}" if options else ""
        return (
            f"This is a shell script without settings of verl or SkyRL, such as `algorithm.adv_estimator=grpo`.{about}"
        )
    started = _STARTS.search(text)
    command = f"`{' '.join(started[0].split())}`" if started else "the command that is given the settings"
    return (
        f"This is a shell script: put `trl-rollout-corr convert` in the place of {command} in a copy of it, and run "
        "that. Then the shell expands its variables."
    )


def _about_options(options: list[str]) -> str:
    """What to write instead of options of slime, miles and others, which are not translated."""
    known = {name: field for name, field in _OPTIONS.items() if f"--{name}" in options}
    written = "; ".join(f"`--{name}` is {field}" for name, field in known.items())
    of_known = f" In slime and miles, {written}." if known else ""
    named = ", ".join(f"`{option}`" for option in options)
    return (
        f"{named} {'is' if len(options) == 1 else 'are'} not translated: `convert` reads verl, SkyRL, TRL and Axolotl."
        f"{of_known} Write the fields into a YAML file, or choose a preset (`trl-rollout-corr docs choosing`)."
    )


def read_file(path: str) -> str:
    """Text of a file of settings, or of standard input for `-`. Raises a `ValueError` of one line if it is no text."""
    try:
        if path == "-":
            return sys.stdin.read()
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"not YAML: {error}") from None


# Settings of other tools ---------------------------------------------------------------------------------------------


def convert(arguments: list[str], trainer: str | None = None) -> str:
    """
    Translate a YAML file of another tool (its path, or `-` for standard input), or arguments of a training script of
    verl or SkyRL, to YAML of this package and of TRL. A warning names each omitted setting. YAML of TRL or Axolotl is
    returned as a whole; `trainer` is the one that reads it, where its settings do not tell.
    """
    if len(arguments) == 1 and not _OVERRIDE.fullmatch(arguments[0]) and not _is_option(arguments[0]):
        text = read_file(arguments[0])
        content, node = read_document(text)
        if isinstance(content, Mapping):
            of_trl = content["trl"] if isinstance(content.get("trl"), Mapping) else content
            if content.keys() & (_OF_TRL | _OF_RLOO | _OF_ASYNCHRONOUS) or any(
                str(key).startswith(OF_TRL) for key in of_trl
            ):
                return _convert_trl(text, content, node, of_trl, trainer)
        _refuse_trainer(trainer)
        return _convert_settings(dict(_leaves(content)), _ONLY_VERL)
    _refuse_trainer(trainer)
    settings, options = _read_overrides(arguments)
    return _convert_settings(settings, _OF_VERL, options)


def _refuse_trainer(trainer: str | None) -> None:
    if trainer is not None:
        allowed = "the trainer of verl and SkyRL is in their settings: set `algorithm.adv_estimator` to grpo or rloo"
        raise SelfContainedError(f"`--trainer {trainer}` is for files of TRL and Axolotl, and {allowed}.")


def _is_option(argument: str) -> bool:
    return argument.startswith("-") and argument != "-"


def system_of(content: Mapping[str, Any]) -> str:
    """Name of the system whose whole configuration a file is; empty for TRL and unknown systems."""
    settings = dict(_leaves(content))
    if is_skyrl(settings):
        return "SkyRL"
    if any(name.startswith((*_ONLY_VERL, "algorithm.rollout_correction")) for name in settings):
        return "verl"
    return "Axolotl" if "base_model" in content and isinstance(content.get("trl"), Mapping) else ""


def _convert_trl(
    text: str, content: Mapping[str, Any], node: yaml.Node | None, of_trl: Mapping[str, Any], named: str | None
) -> str:
    """
    The YAML of TRL, or of Axolotl, for the trainer that is `named`, or that its settings tell. Otherwise it is taken
    for GRPO's, and a warning says so if another trainer would change the answer.
    """
    trainer = named or _trainer_of(of_trl) or _estimator_of(content) or ("grpo" if of_trl is not content else None)
    if trainer is not None:
        return _convert_for(trainer, text, content, node, of_trl)
    answers = {}
    for name in _NAMES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                answers[name] = _convert_for(name, text, content, node, of_trl), caught
            except (ValueError, TypeError):
                if name == "grpo":
                    raise
    answer, said = answers.pop("grpo")
    for warning in said:
        warnings.warn(warning.message, stacklevel=2)
    of_answer = answer, [str(warning.message) for warning in said]
    others = [name for name, (text, more) in answers.items() if (text, [str(x.message) for x in more]) != of_answer]
    if others:
        written = " or ".join(f"`--trainer {name}` if it is {_NAMES[name]}" for name in others)
        warn(
            "The file is taken for one of GRPO, because no setting in it tells the trainer, and another trainer gets "
            f"another answer: add {written}."
        )
    return answer


def _convert_for(
    trainer: str, text: str, content: Mapping[str, Any], node: yaml.Node | None, of_trl: Mapping[str, Any]
) -> str:
    """
    The YAML of TRL, or of Axolotl with TRL's fields below `trl`, plus the line that keeps TRL's own correction, or the
    fields for a section of verl or SkyRL in it, which is removed. Comments and all other lines stay.
    """
    sections = _sections_beside(content)
    ours = [name for name in content if name in FIELDS and name not in sections]
    if ours and sections:
        remedy = "Remove one of the two."
        raise SettingError(
            ours[0], content[ours[0]], f"beside `{sections[0]}`, a section of verl or SkyRL", remedy=remedy
        )
    if ours:
        named = f"fields of this package already (`{ours[0]}`)"
        warn(f"The file has {named}, needs no conversion, and is printed as it is.")
        _warn_about_effects({name: content[name] for name in ours}, of_trl, trainer)
        return text
    of_correction = {key: value for key, value in of_trl.items() if str(key).startswith(OF_TRL)}
    from_trl(of_correction)  # an error if one is refused
    if of_correction.get(f"{OF_TRL}cap") is not None:
        new = f"{OF_TRL}clip_max"
        warn(f"`{OF_TRL}cap` is an old name, which TRL 2 will remove: write `{new}`.", f"{OF_TRL}cap")
    kept = {name: value for name, value in content.items() if name not in sections}
    fields: dict[str, Any] = {"rollout_correction": "trl"}
    added: dict[str, Any] = {}
    if sections:
        fields, added = _translate({name: content[name] for name in sections}, kept, trainer)
    _warn_about_effects(fields, {**added, **of_trl}, trainer)
    expected = {**kept, **added, **fields}
    text = _without_lines(text, node, sections)
    lines = yaml_lines({**added, **fields})
    if of_trl is not content and _PLUGIN not in (plugins := content.get("plugins") or []):
        if not isinstance(plugins, list):
            raise SettingError("plugins", plugins, allowed="a list of names")
        expected["plugins"] = [*plugins, _PLUGIN]
        lines += "" if plugins else f"plugins:\n- {_PLUGIN}\n"
        text = _with_plugin(text, read_document(text)[1]) if plugins else text
    edited = text.rstrip() + "\n" + lines
    with suppress(ValueError):
        if read_yaml(edited) == expected:
            return edited
    warn("The file cannot be edited line by line, so that it is written anew, without its comments.")
    return yaml.safe_dump(expected, sort_keys=False, allow_unicode=True, width=1000, default_flow_style=False)


def _trainer_of(of_trl: Mapping[str, Any]) -> str | None:
    """The only trainer whose configuration takes one of these fields of TRL; `None` without such a field."""
    if not _OF_ASYNCHRONOUS.isdisjoint(of_trl):
        return "async_grpo"
    if not _OF_RLOO.isdisjoint(of_trl):
        return "rloo"
    is_grpo = not _OF_GRPO.isdisjoint(of_trl) or any(str(name).startswith(OF_TRL) for name in of_trl)
    return "grpo" if is_grpo else None


def _estimator_of(settings: Mapping[str, Any]) -> str | None:
    """The trainer that verl's or SkyRL's estimator of the advantage tells; `None` without one of TRL's."""
    values = [str(x) for name, x in _leaves(settings) if counterpart(name) == "algorithm.adv_estimator"]
    return values[0] if values and values[0] in TRAINERS else None


def _sections_beside(content: Mapping[str, Any]) -> list[str]:
    """Names of the sections of verl or SkyRL in a file of TRL that have settings of a correction."""
    found = []
    for name in ("rollout_correction", "algorithm", "actor_rollout_ref", "trainer"):
        if isinstance(content.get(name), Mapping):
            inside = dict(_leaves({name: content[name]}))
            section = split_verl(inside)[0] if name != "trainer" else NOT_SET
            if section is not NOT_SET or is_skyrl(inside) or name == "actor_rollout_ref":
                found.append(name)
    return found


def _translate(
    sections: Mapping[str, Any], kept: Mapping[str, Any], trainer: str
) -> tuple[dict[str, Any], dict[str, object]]:
    """
    Fields for sections of verl or SkyRL, and fields of TRL's `trainer` for their other settings that the rest of the
    file lacks.
    """
    settings = dict(_leaves(sections))
    fields, others = from_skyrl(settings) if is_skyrl(settings) else _read_verl(settings, _ONLY_VERL)
    added = to_trl(others, trainer)
    for name in added.keys() & kept.keys():
        value = added.pop(name)
        if value != kept[name]:
            warn(
                f"`{name}` is {kept[name]!r} in the file, and {value!r} in a section of verl or SkyRL, which is left "
                "out.",
                name,
            )
    named = ", ".join(f"`{name}`" for name in sections)
    warn(f"{named}: this section of verl or SkyRL, which no trainer of TRL reads, is translated and removed.")
    return fields, added


def _without_lines(text: str, node: yaml.Node | None, names: list[str]) -> str:
    """The text of a file without the lines of some of its settings."""
    if not names or not isinstance(node, yaml.MappingNode):
        return text
    lines = text.splitlines(keepends=True)
    for key, value in reversed(node.value):
        if key.value in names:
            del lines[key.start_mark.line : _last_line(value) + 1]
    return "".join(lines)


def _last_line(node: yaml.Node) -> int:
    """Number of the last line of a value. A block ends with its last value, before blank lines and comments."""
    if not isinstance(node, yaml.CollectionNode) or node.flow_style or not node.value:
        mark = node.end_mark
        return int(mark.line - (mark.column == 0 and mark.line > node.start_mark.line))
    last = node.value[-1]
    return _last_line(last[1] if isinstance(last, tuple) else last)


def _warn_about_effects(fields: Mapping[str, Any], of_trl: Mapping[str, Any], trainer: str = "grpo") -> None:
    """Warn about what fields of this package and of TRL do to the loss, as the trainer does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the fields alone, for which the trainer has a check as well
        config = RolloutCorrectionConfig(**fields)
    own = {key: value for key, value in of_trl.items() if key in TRL_KEYS}
    default = "trl" if given_to_trl(own) else DEFAULT  # as the configuration of a trainer decides
    # TRL's other losses have no weights
    settings = resolve(config._parsed, default, lambda: from_trl(own) if trainer == "grpo" else {})
    written = {**of_trl, **fields}
    for effect in effects(settings, written):
        decision = decide(settings, {**DEFAULTS_OF_TRL, "use_vllm": True, **written}, is_harmed=True)
        warn(f"{effect.text} {in_words(decision)}" if effect.is_harm else effect.text, effect.field)


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


def _convert_settings(settings: Mapping[str, object], of_verl: tuple[str, ...], options: Sequence[str] = ()) -> str:
    """
    Fields of this package and of TRL for dotted names of SkyRL, or of verl, whose sections are `of_verl`, next to
    `options` of the command.
    """
    doubtful_options = suspicious_options(options)
    if doubtful_options and not settings:
        raise ValueError(_about_options(doubtful_options))
    fields, others = from_skyrl(settings) if is_skyrl(settings) else _read_verl(settings, of_verl)
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
                f"{_about_options(doubtful_options)}"
            )
        if is_skyrl(settings):
            warn("SkyRL does not correct with these settings, so that correction is off here as well.")
    trl = to_trl(others)
    _warn_about_effects(fields, {"use_vllm": True, **trl})
    trainer = TRAINERS.get(_estimator_of(others) or "")
    preset = None if "rollout_correction" in fields else preset_of(in_effect)
    lines = [f"# for {trainer}"] * bool(trainer) + ["use_vllm: true"]
    lines += [f"# the settings of the preset {preset}"] * bool(preset)
    return "\n".join([*lines, yaml_lines({**fields, **trl}).rstrip()]) + "\n"


def preset_of(settings: Settings) -> str | None:
    """Name of the preset whose settings these are, up to rounding; `None` for settings of no preset."""
    for name in VERL_PRESETS:
        values = asdict(RolloutCorrectionConfig(rollout_correction=name).settings)
        same = all(
            _is_close(value, values[field])
            for field, value in asdict(settings).items()
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


def _read_verl(settings: Mapping[str, object], of_verl: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, object]]:
    """Fields for dotted names of verl, and the remaining settings."""
    section, others = split_verl(settings)
    if section is NOT_SET:
        if not any(name.startswith(of_verl) or (of_verl is _OF_VERL and counterpart(name)) for name in settings):
            doubtful = suspects(others)
            of_others = f", and `{doubtful[0]}` is not translated" if doubtful else ""
            raise ValueError(
                "it has no settings of verl (`actor_rollout_ref`, `algorithm.rollout_correction`) or SkyRL "
                f"(`trainer.algorithm`), and none of TRL's `{OF_TRL}*`{of_others}"
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


def _read_overrides(arguments: list[str]) -> tuple[dict[str, object], list[str]]:
    """
    Dotted name and value of each argument of the form `key=value`, and the other options of the command, which share
    one warning.
    """
    settings: dict[str, object] = {}
    options: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        match = _OVERRIDE.fullmatch(argument)
        if argument.startswith("-") or (match is None and before.startswith("-") and "=" not in before):
            options.append(argument)
        elif match is None and argument:
            raise ValueError(
                f"{argument!r}: it is neither `key=value` nor an option. A file is converted alone. A backslash with "
                "blanks behind it does not continue a line, so that what follows is lost."
            )
        elif match is not None:
            for key, value in _leaves(_read_argument(*match.groups()), match[1]):
                if settings.get(key, value) != value:
                    warn(f"`{key}` is given again: {settings[key]!r} has no effect, and {value!r} counts.", key)
                settings[key] = value
    if options:
        warn(f"{' '.join(options)}: options of Python and Hydra are left out. A file that they name is not read.")
    return settings, options


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


# Settings of this package --------------------------------------------------------------------------------------------


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
