"""Configurations in files, with the line that each key stands in: YAML, and arguments in a shell script."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import yaml


Key = tuple[str, ...]

_ARGUMENT = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


class Document(NamedTuple):
    """
    A configuration.

    Args:
        content (`Any`):
            What is in it. Arguments of a shell script are nested mappings of text.
        lines (`dict[tuple[str, ...], int]`):
            Line of each key, by its path. From 1.
        replaced (`dict[tuple[str, ...], list[int]]`):
            Lines that set a key to another value before, by its path. From 1.
    """

    content: Any
    lines: dict[Key, int]
    replaced: dict[Key, list[int]] = {}

    def line(self, *path: str) -> int | None:
        """Line of a key, or of the nearest above it that has one."""
        found = [self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines]
        return found[0] if found else None


def read_document(file: Path | TextIO) -> Document:
    """A YAML file, or a shell script with arguments such as `algorithm.gamma=1.0`. A `ValueError` in one line says why not."""
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
            raise ValueError(f"not YAML: {str(error).splitlines()[0]}") from None
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
    """Arguments of a command and assignments to variables. `None` if there is neither."""
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
    """Words of a script, without quotes and comments, and their lines. A line whose quotes do not match is left out."""
    for number, line in enumerate(text.splitlines(), 1):
        try:
            for word in shlex.split(line.rstrip().removesuffix("\\"), comments=True):
                yield word, number
        except ValueError:
            continue


def _expand(value: str, variables: Mapping[str, str]) -> str:
    known = re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match.group(1), match.group(0)), value)
    return known.strip("\\'\"")
