"""Files with settings: YAML and shell scripts, of this package and of other tools, and their translation. No torch."""

import difflib
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import yaml

from ..messages import SelfContainedError, SettingError, nearest, warn, yaml_lines
from .config import RolloutCorrectionConfig
from .fields import FIELDS
from .legacy import first_preset, from_legacy, is_legacy
from .migrate import VERL_KEYS, from_trl, from_verl
from .presets import PRESETS


# Fields in dumps of earlier versions
_RENAMED = {"rollout_monitor_thresholds": "rollout_monitor_bounds"}
_REMOVED = ("rollout_compile", "rollout_lr_scaling", "rollout_monitor_preset", "rollout_proximal")
Key = tuple[str, ...]

_ARGUMENT = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


class Document(NamedTuple):
    """A configuration."""

    content: Any  # arguments of a shell script are nested mappings of text
    lines: dict[Key, int]  # line of each key by its path, counted from 1
    replaced: dict[Key, list[int]] = {}  # earlier lines that set a key to another value

    def line(self, *path: str) -> int | None:
        """Line of a key, or of the nearest key above it with a line."""
        found = [self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines]
        return found[0] if found else None


def read_document(file: Path | TextIO) -> Document:
    """Read a YAML file, or a shell script with arguments such as `algorithm.gamma=1.0`. A `ValueError` has one line."""
    try:
        text = file.read_text(encoding="utf-8") if isinstance(file, Path) else file.read()
        return _from_yaml(text)
    except OSError as error:
        raise ValueError(error.strerror) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not YAML: {error}") from None
    except yaml.YAMLError as error:
        script = _from_script(text)
        if script is None:
            mark = getattr(error, "problem_mark", None)
            where = f"line {mark.line + 1}: " if mark else ""
            raise ValueError(f"{where}not YAML: {getattr(error, 'problem', None) or error}") from None
        return script


def _from_yaml(text: str) -> Document:
    content = yaml.safe_load(text)
    if isinstance(content, str):
        return _from_script(text) or Document(content, {})
    return Document(content, dict(_lines(yaml.compose(text, Loader=yaml.SafeLoader))))


def _lines(node: yaml.Node | None, above: Key = ()) -> Iterator[tuple[Key, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*above, str(key.value))
            yield path, key.start_mark.line + 1
            yield from _lines(value, path)


def _from_script(text: str) -> Document | None:
    """Arguments of a command and assignments to variables, `None` if there are none."""
    content: dict[str, Any] = {}
    lines: dict[Key, int] = {}
    replaced: dict[Key, list[int]] = {}
    variables: dict[str, str] = {}
    for word, line in _words(text):
        match = _ARGUMENT.fullmatch(word)
        if match is None:
            continue
        name, value = match.group(1), _expand(match.group(2), variables)
        variables[name] = value
        if "." not in name and not name.startswith(("rollout_", "bypass_mode", "loss_type")):
            continue
        *above, last = name.split(".")
        section = content
        for part in above:
            section = section.setdefault(part, {}) if isinstance(section.get(part, {}), dict) else {}
        key = (*above, last)
        if key in lines and section[last] != value:
            replaced.setdefault(key, []).append(lines[key])
        section[last] = value
        lines[key] = line
    return Document(content, lines, replaced) if content else None


def _words(text: str) -> Iterator[tuple[str, int]]:
    """Words of a script without quotes and comments, with their lines. Lines with unmatched quotes are left out."""
    for number, line in enumerate(text.splitlines(), 1):
        try:
            for word in shlex.split(line.rstrip().removesuffix("\\"), comments=True):
                yield word, number
        except ValueError:
            continue


def _expand(value: str, variables: Mapping[str, str]) -> str:
    known = re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match.group(1), match.group(0)), value)
    return known.strip("\\'\"")


# Settings of other tools ----------------------------------------------------------------------------------------------


class Foreign(NamedTuple):
    """Settings of another tool."""

    tool: str
    translate: Callable[..., dict[str, Any]]
    settings: Mapping[str, object] | None
    above: Key = ()  # keys under which they stand
    maybe_ours: bool = False  # a section of verl alone has the names of fields of this package


def find_foreign(document: object) -> Foreign | None:
    """Find the settings of another tool in its whole configuration, or in only the part about rollout correction."""
    section = document.get("algorithm", document) if isinstance(document, Mapping) else None
    if not isinstance(section, Mapping):
        return None
    above: Key = () if section is document else ("algorithm",)
    nested = (*above, "rollout_correction")
    legacy = is_legacy(section)
    maybe_ours = section is document and not legacy
    named = section.get("rollout_correction", "")
    if isinstance(named, Mapping) and is_legacy(named):
        return Foreign("verl's first releases", from_legacy, named, nested)
    if named is None or isinstance(named, Mapping):
        return Foreign("verl", from_verl, named, nested, maybe_ours and named is None)
    if above and (preset := first_preset(named) or ({"rollout_correction": named} if named in PRESETS else None)):
        return Foreign("verl", lambda _: preset, named, nested)
    trl = {key: value for key, value in section.items() if str(key).startswith("vllm_importance_sampling_")}
    if trl:
        return Foreign("TRL's own correction", from_trl, trl, above, maybe_ours and not FIELDS.isdisjoint(section))
    flat = {key: value for key, value in section.items() if str(key).startswith(("rollout_is", "rollout_rs"))}
    if legacy:
        return Foreign("verl's first releases", from_legacy, flat, above)
    verl = flat | {key: value for key, value in section.items() if key in VERL_KEYS}
    return Foreign("verl", from_verl, verl, above, maybe_ours) if verl else None


# Translation -----------------------------------------------------------------------------------------------------------


# Keys of verl's `algorithm` section that are not about rollout correction, and their counterparts in TRL
_ELSEWHERE = {
    "gamma": "it discounts rewards per token, and TRL's trainers give one reward to the whole completion",
    "lam": "it is a parameter of GAE",
    "use_kl_in_reward": "RLOO does that with `beta`; GRPO puts the divergence into the loss",
    "kl_ctrl": "TRL has `beta`",
    "kl_penalty": "TRL has `beta`",
    "norm_adv_by_std_in_grpo": "TRL has `scale_rewards`",
}
_ESTIMATORS = {
    "grpo": "train with `RolloutCorrectedGRPOTrainer`",
    "rloo": "train with `RolloutCorrectedRLOOTrainer`",
    "gae": "TRL has neither GAE nor a value model. GRPO and RLOO compare completions of the same prompt instead",
}


def convert(path: str) -> str:
    """
    Translate a configuration of another tool to YAML of fields of [`RolloutCorrectionConfig`]. It is a YAML file, a shell
    script with arguments for verl, or `-` for standard input. A warning with its line names every key that is left out.
    """
    document = read_document(sys.stdin if path == "-" else Path(path))
    foreign = find_foreign(document.content)
    _refuse_ours(document.content, foreign)
    if foreign is None:
        raise ValueError(
            "no settings of rollout correction found: neither verl's `algorithm.rollout_correction`, nor the `rollout_is*` "
            "keys of its first releases, nor TRL's `vllm_importance_sampling_*`."
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fields = foreign.translate(foreign.settings)
            RolloutCorrectionConfig(**fields)  # raises an error if a value is refused
        except ValueError as error:
            line = _line(document, foreign, getattr(error, "field", None))
            raise ValueError(f"line {line}: {error}" if line else str(error)) from None
    for warning in caught:
        line = _line(document, foreign, getattr(warning.message, "field", None)) or document.line(*foreign.above) or 1
        warn(f"{path}:{line}: {warning.message}")
    for key, lines in document.replaced.items():
        for line in lines:
            warn(f"{path}:{line}: `{key[-1]}` has no effect: line {document.lines[key]} sets it again.")
    for line, message in _left_out(document, foreign):
        warn(f"{path}:{line}: {message}")
    return yaml_lines(fields)


def _refuse_ours(content: object, foreign: Foreign | None) -> None:
    """A recipe of this package has nothing to convert."""
    keys = set(content) if isinstance(content, Mapping) else set()
    named = isinstance(content, Mapping) and isinstance(content.get("rollout_correction"), str)
    ours = named or (keys & FIELDS and {"output_dir", "model_name_or_path"} & keys)
    if ours and (foreign is None or foreign.maybe_ours):
        raise ValueError("a configuration of this package already: there is nothing to convert")


def _line(document: Document, foreign: Foreign, field: str | None) -> int | None:
    """Line of a setting. verl's `loss_type` is our `rollout_loss_type`."""
    names = () if field is None else (field, field.removeprefix("rollout_"))
    return next((line for name in names if (line := document.lines.get((*foreign.above, name)))), None)


def _left_out(document: Document, foreign: Foreign) -> Iterator[tuple[int, str]]:
    """Lines and messages about the other keys of a configuration of verl. TRL's other fields need no translation."""
    if "algorithm" not in document.content:
        for key in (
            str(key) for key in document.content if key not in (foreign.settings or ()) and key not in foreign.above
        ):
            if known := difflib.get_close_matches(key, [*VERL_KEYS, *FIELDS], 1, 0.85):
                yield document.line(key) or 1, f"`{key}` is left out. Did you mean `{known[0]}`?"
        return
    algorithm = document.content["algorithm"]
    taken = set(foreign.settings or ()) if foreign.above == ("algorithm",) else {"rollout_correction"}
    for key in (key for key in algorithm if key not in taken):
        reason = _ESTIMATORS.get(str(algorithm[key])) if key == "adv_estimator" else _ELSEWHERE.get(key)
        line = document.line("algorithm", str(key)) or 1
        yield line, f"`algorithm.{key}` is left out: {reason or 'it is not about rollout correction'}."
    for key, value in document.content.items():
        if key != "algorithm" and value:
            count = f" ({len(value)} keys)" if isinstance(value, Mapping) else ""
            line = min(line for path, line in document.lines.items() if path[0] == str(key))
            yield line, f"`{key}`{count} is left out: it is not about rollout correction."


# Settings of this package ---------------------------------------------------------------------------------------------


def read_config(path: str) -> RolloutCorrectionConfig:
    """Read settings of this package from a YAML file, such as a recipe. Other keys are ignored. Messages name the file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config = RolloutCorrectionConfig(**_own_fields(read_document(Path(path)).content))
        except (ValueError, TypeError) as error:
            raise SelfContainedError(f"{path}: {_in_one_line(error)}") from None
    for warning in caught:
        warn(f"{path}: {warning.message}")
    return config


def _own_fields(document: object) -> dict[str, Any]:
    if not isinstance(document, Mapping):
        raise ValueError("no settings in it; a setting is a line such as `rollout_correction: decoupled_token_is`")
    foreign = find_foreign(document)
    tool = None if foreign is None or foreign.maybe_ours else foreign.tool
    if isinstance(document.get("algorithm"), Mapping):  # a whole configuration, with any content
        tool = "verl"
    if tool:
        raise ValueError(f"a configuration of {tool}; translate it with `trl-rollout-corr convert`")
    unknown = [key for key in document if str(key).startswith("rollout_") and key not in FIELDS]
    if unknown:
        name = unknown[0]
        remedy = nearest(name, FIELDS).strip()
        raise SettingError(name, document[name], "but there is no such field", remedy=remedy)
    fields = {key: value for key, value in document.items() if key in FIELDS}
    if not fields:
        raise ValueError("no field of rollout correction in it, such as `rollout_correction`")
    return fields


def config_of_run(settings: Mapping[str, Any], complaint: str) -> RolloutCorrectionConfig:
    """Configuration of the run that wrote a dump. Errors are a `ValueError` of one line that begins with the complaint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run has warned already
        try:
            # beside settings of TRL, of which none begins like this
            ours = {_RENAMED.get(key, key): value for key, value in settings.items() if key not in _REMOVED}
            fields = {key: value for key, value in ours.items() if key in FIELDS or key.startswith("rollout_")}
            return RolloutCorrectionConfig(**fields)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{complaint}: {_in_one_line(error)}") from None


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
