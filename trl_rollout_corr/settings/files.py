"""Files with settings: YAML and shell scripts, of this package and of other tools, and their translation. No torch."""

import difflib
import math
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
from .migrate import VERL_KEYS, counterpart, from_trl, from_verl
from .presets import PRESETS


# First part of the names of settings that stand alone in a script
_OF_CORRECTION = ("rollout_", "bypass_", "loss_type", "use_pure_rollout_correction", "vllm_importance_sampling_")
Key = tuple[str, ...]

_ARGUMENT = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_YAML_KEY = re.compile(r"^\s*[\w.]+:(\s|$)", re.MULTILINE)

# Limits of a file with settings, far above those in use: characters, and nodes of YAML with each alias written out
_LARGEST, _MOST_NODES = 1_000_000, 100_000


class Document(NamedTuple):
    """A configuration."""

    content: Any  # arguments of a shell script are nested mappings of text
    lines: dict[Key, int]  # line of each key by its path, counted from 1
    replaced: dict[Key, list[int]] = {}  # earlier lines that set a key to another value
    variables: dict[str, tuple[str, int]] = {}  # value and line of each variable that no other setting uses

    def line(self, *path: str) -> int | None:
        """Line of a key, or of the nearest key above it with a line."""
        lines = [self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines]
        return lines[0] if lines else None


def read_document(file: Path | TextIO) -> Document:
    """Read a YAML file, or a shell script with arguments such as `algorithm.gamma=1.0`. A `ValueError` has one line."""
    try:
        text = read_text(file) if isinstance(file, Path) else _bounded(file)
        return _from_yaml(text)
    except OSError as error:
        raise ValueError(error.strerror) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not YAML: {error}") from None
    except RecursionError:
        raise ValueError("not YAML: it has too many levels") from None
    except yaml.YAMLError as error:
        script = _from_script(text)
        if script is None or (not script.content and _YAML_KEY.search(text)):
            mark = getattr(error, "problem_mark", None)
            where = f"line {mark.line + 1}: " if mark else ""
            raise ValueError(f"{where}not YAML: {getattr(error, 'problem', None) or error}") from None
        return script


def read_text(path: Path) -> str:
    """Text of a file with settings. A pipe or a device, which may have no end, is a `ValueError`."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe or a device"
        raise ValueError(f"it is {what}. Pass a regular file with settings")
    with path.open(encoding="utf-8") as file:
        return _bounded(file)


def _bounded(file: TextIO) -> str:
    text = file.read(_LARGEST + 1)
    if len(text) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST:,} characters, which is too large for a file with settings")
    return text


def load_yaml(text: str) -> tuple[Any, yaml.Node | None]:
    """
    Content of YAML and its first node. A few nested aliases can stand for more nodes than there is memory, so they are counted
    before they are written out: too many, or an alias within itself, are a `ValueError`.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        if _count(node, {}) > _MOST_NODES:
            raise ValueError("its aliases (`*name`) stand for too many values; write them out, or remove them")
        return loader.construct_document(node), node
    finally:
        loader.dispose()


def _count(node: yaml.Node, counted: dict[int, float]) -> float:
    """Number of nodes of a tree in which each alias is written out; infinite for an alias within itself."""
    if id(node) not in counted:
        counted[id(node)] = math.inf
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        below = [x for part in parts for x in (part if isinstance(part, tuple) else (part,))]
        counted[id(node)] = 1 + sum(_count(x, counted) for x in below)
    return counted[id(node)]


def _from_yaml(text: str) -> Document:
    content, node = load_yaml(text)
    if isinstance(content, str):
        return _from_script(text) or Document(content, {})
    document = Document(content, {}, {})
    _note_lines(node, document, {})
    return document


def _note_lines(node: yaml.Node | None, document: Document, values: dict[Key, str], above: Key = ()) -> None:
    """Note the line of each key, and earlier lines with another value. Of two equal keys, the last one counts."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        path, line = (*above, str(key.value)), key.start_mark.line + 1
        text = value.value if isinstance(value, yaml.ScalarNode) else str(id(value))
        if values.get(path, text) != text:
            document.replaced.setdefault(path, []).append(document.lines[path])
        values[path], document.lines[path] = text, line
        _note_lines(value, document, values, path)


def _from_script(text: str) -> Document | None:
    """Arguments of a command and assignments to variables, `None` if there are none."""
    document = Document({}, {}, {}, {})
    values: dict[str, str] = {}  # of variables
    used: set[str] = set()
    for word, line in _words(text):
        match = _ARGUMENT.fullmatch(word)
        if match is None:
            continue
        name, value = match.group(1), _expand(match.group(2), values)
        used.update(_VARIABLE.findall(match.group(2)))
        values[name] = value
        if "." in name or name.startswith(_OF_CORRECTION):
            _set(document, tuple(name.split(".")), value, line)
        else:
            document.variables.setdefault(name, (value, line))
    for name in used:  # a variable may have the name of a setting
        document.variables.pop(name, None)
        if (name,) in document.lines:
            del document.content[name], document.lines[(name,)]
    return document if document.content or document.variables else None


def _set(document: Document, key: Key, value: str, line: int) -> None:
    section = document.content
    for part in key[:-1]:
        if not isinstance(section.get(part), dict):
            section[part] = {}
        section = section[part]
    if key in document.lines and section.get(key[-1]) != value:
        document.replaced.setdefault(key, []).append(document.lines[key])
    section[key[-1]] = value
    document.lines[key] = line


def _words(text: str) -> Iterator[tuple[str, int]]:
    """Words of a script without quotes and comments, with their lines."""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.rstrip().removesuffix("\\")
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quote that the line does not close
            words = line.split("#")[0].split()
        for word in words:
            yield word, number


def _expand(value: str, variables: Mapping[str, str]) -> str:
    text = _VARIABLE.sub(lambda match: variables.get(match.group(1), match.group(0)), value)
    return text.strip("\\'\"")


# Settings of other tools ----------------------------------------------------------------------------------------------


_TRL = "TRL's own correction"


class Foreign(NamedTuple):
    """Settings of another tool."""

    tool: str
    translate: Callable[..., dict[str, Any]]
    settings: Mapping[str, object] | str | None
    above: Key = ()  # keys under which they stand
    maybe_ours: bool = False  # a section of verl alone has the names of fields of this package


def find_foreign(document: object) -> Foreign | None:
    """Find the settings of another tool in its whole configuration, or in only the part about rollout correction."""
    if not isinstance(document, Mapping):
        return None
    algorithm = document.get("algorithm")
    inside = _find_in(algorithm, ("algorithm",)) if isinstance(algorithm, Mapping) else None
    return inside or _find_in(document, ())


def _find_in(section: Mapping[str, object], above: Key) -> Foreign | None:
    """Find the settings of another tool in a section under some keys."""
    nested = (*above, "rollout_correction")
    legacy = is_legacy(section)
    maybe_ours = not above and not legacy
    named = section.get("rollout_correction", "")
    if isinstance(named, Mapping) and is_legacy(named):
        return Foreign("verl's first releases", from_legacy, named, nested)
    if named is None or isinstance(named, Mapping):
        return Foreign("verl", from_verl, named, nested, maybe_ours and named is None)
    if above and isinstance(named, str):
        preset = first_preset(named) or ({"rollout_correction": named} if named in PRESETS else None)
        if preset:
            return Foreign("verl", lambda _: preset, named, nested)
    trl = {key: value for key, value in section.items() if str(key).startswith("vllm_importance_sampling_")}
    if trl:
        return Foreign(_TRL, from_trl, trl, above, maybe_ours and not FIELDS.isdisjoint(section))
    flat = {key: value for key, value in section.items() if str(key).startswith(("rollout_is", "rollout_rs"))}
    if legacy:
        return Foreign("verl's first releases", from_legacy, flat, above)
    verl = flat | {key: value for key, value in section.items() if key in VERL_KEYS}
    return Foreign("verl", from_verl, verl, above, maybe_ours) if verl else None


# Translation -----------------------------------------------------------------------------------------------------------


def convert(path: str) -> str:
    """
    Translate a configuration of another tool to YAML of fields of [`RolloutCorrectionConfig`]. It is a YAML file, a shell
    script with arguments for verl, or `-` for standard input. A warning names every setting that is left out, its line, and
    TRL's counterpart where [`~trl_rollout_corr.settings.migrate.counterpart`] knows one.
    """
    document = read_document(sys.stdin if path == "-" else Path(path))
    foreign = find_foreign(document.content)
    _refuse_ours(document.content, foreign)
    if foreign is None:
        raise ValueError(
            "it has no settings of rollout correction: neither verl's `algorithm.rollout_correction`, nor the `rollout_is*` "
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
        raise ValueError("it is already a configuration of this package and needs no conversion")


def _line(document: Document, foreign: Foreign, field: str | None) -> int | None:
    """Line of a setting. verl's `loss_type` is our `rollout_loss_type`."""
    names = () if field is None else (field, field.removeprefix("rollout_"))
    return next((line for name in names if (line := document.lines.get((*foreign.above, name)))), None)


def _left_out(document: Document, foreign: Foreign) -> Iterator[tuple[int, str]]:
    """Lines and messages about the settings that are not translated. Those without a message of their own share one."""
    others: dict[str, list[tuple[str, int]]] = {}
    for path, value, line in _not_taken(document, foreign):
        name = ".".join(path)
        matches = difflib.get_close_matches(name, [*VERL_KEYS, *FIELDS], 1, 0.85)
        if name in matches:
            yield line, f"`{name}` is left out, because the settings of `{'.'.join(foreign.above)}` are translated."
        elif matches and foreign.tool != _TRL:
            yield line, f"`{name}` is left out. Did you mean `{matches[0]}`?"
        elif foreign.tool != _TRL and (message := counterpart(path, value)):
            yield line, f"`{name}` is left out: {message}."
        else:
            others.setdefault(path[0] if len(path) > 1 else "", []).append((name, line))
    reason = "not about rollout correction"
    if foreign.tool == _TRL:
        reason = "not about TRL's own correction, so keep name and value"
    for names in others.values():
        listed, several = ", ".join(f"`{name}`" for name, _ in names), len(names) > 1
        listed += " are left out: they are" if several else " is left out: it is"
        yield names[0][1], f"{listed} {reason}."


def _not_taken(document: Document, foreign: Foreign) -> Iterator[tuple[Key, object, int]]:
    """Path, value and line of each setting outside the translated ones."""
    settings = foreign.settings
    taken = [(*foreign.above, str(key)) for key in settings] if isinstance(settings, Mapping) else [foreign.above]
    for path, value in _leaves(document.content):
        if not any(path[: len(key)] == key for key in taken):
            yield path, value, document.line(*path) or 1
    for name, (value, line) in document.variables.items():
        yield (name,), value, line


def _leaves(content: object, above: Key = ()) -> Iterator[tuple[Key, object]]:
    """Path and value of each setting. An empty section has none."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _leaves(value, (*above, str(key)))
    elif above:
        yield above, content


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
        raise ValueError(
            "it has no settings. Write one setting in each line, such as `rollout_correction: decoupled_token_is`"
        )
    foreign = find_foreign(document)
    tool = None if foreign is None or foreign.maybe_ours else foreign.tool
    if isinstance(document.get("algorithm"), Mapping):  # a whole configuration, with any content
        tool = "verl"
    if tool:
        raise ValueError(f"it is a configuration of {tool}. Translate it with `trl-rollout-corr convert`")
    unknown = [key for key in document if str(key).startswith("rollout_") and key not in FIELDS]
    if unknown:
        name = unknown[0]
        remedy = nearest(name, FIELDS).strip()
        raise SettingError(name, document[name], "which is not a field of rollout correction", remedy=remedy)
    fields = {key: value for key, value in document.items() if key in FIELDS}
    if not fields:
        raise ValueError(
            "it does not set any field of rollout correction. Add one, such as `rollout_correction: auto`"
        )
    return fields


def config_of_run(settings: Mapping[str, Any], complaint: str) -> RolloutCorrectionConfig:
    """Configuration of the run that wrote a dump. Errors are a `ValueError` of one line that begins with the complaint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run has warned already
        try:
            # beside settings of TRL, of which none begins like this
            fields = {key: value for key, value in settings.items() if key in FIELDS or key.startswith("rollout_")}
            return RolloutCorrectionConfig(**fields)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{complaint}: {_in_one_line(error)}") from None


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
