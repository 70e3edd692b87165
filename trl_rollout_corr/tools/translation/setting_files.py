"""Reading of files of settings, and of arguments of a training script. No torch."""

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from ...messages import SettingError, warn
from .counterparts import suspicious_options


OVERRIDE = re.compile(r"\+{0,2}([^\s=~+-][^\s=]*)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"^#!.*python|^import \w|^from [\w.]+ import ", re.MULTILINE)
_SHELL = re.compile(r"^#!.*sh\b|^\s*(export )?\+{0,2}[\w.]+=\S|verl\.trainer", re.MULTILINE)
# The command of a script that starts the training, such as `python3 -m verl.trainer.main_ppo`
_STARTS = re.compile(r"\b(?:python\d?|uv run)\b[^\n\\|;&#]*? -m (?!pip|uv|venv|ensurepip|http)[\w.]+")
# Settings of the form that verl reads
_KEYS_IN_SCRIPT = re.compile(
    r"verl|\brollout_(?:is|rs|correction)\b|(?<![-\w])[+~]{0,2}[a-z]\w*\.[\w.]+=", re.IGNORECASE
)
_KEY_OF_SKYRL = re.compile(r"(?<![\w.])trainer\.algorithm\.")
ABOUT_SKYRL = (
    "settings of SkyRL (`trainer.algorithm`) are not translated. A table says what to write for each: "
    "`trl-rollout-corr docs verl#coming-from-skyrl`"
)
# Options of slime and miles for its correction
_OPTIONS = {
    "use-tis": "`rollout_is: token`",
    "tis-clip": "the upper bound, `rollout_is_threshold`",
    "tis-clip-low": "the lower bound of a pair with `rollout_is_clamp: true`, if it is above 0",
    "use-rollout-logprobs": "`rollout_correction: bypass_ppo_clip`",
    "custom-tis-function-path": "a correction of its own (IcePop is `rollout_correction: decoupled_token_icepop`)",
}


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


def lines_of(node: yaml.Node | None) -> dict[str, int]:
    """
    Line of each setting in the tree of a file, by its dotted name, and by the last part of it where this part stands
    in one line only. A setting that is given twice has its last line, which is the one that counts.
    """
    dotted: dict[str, int] = {}
    last: dict[str, dict[str, int]] = {}
    for name, line in _keys(node, set()):
        dotted[name] = line
        last.setdefault(name.rpartition(".")[2], {})[name] = line
    return {**{name: line for name, of in last.items() if len(of) == 1 for line in of.values()}, **dotted}


def _keys(node: yaml.Node | None, seen: set[int], above: str = "") -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode) or id(node) in seen:  # an alias may name what it stands in
        return
    seen.add(id(node))
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            name = f"{above}.{key.value}" if above else key.value
            yield name, key.start_mark.line + 1
            yield from _keys(value, seen, name)


def with_line(message: str, lines: Mapping[str, int]) -> str:
    """A message, behind the line of the first setting that it names; unchanged if the file has none of them."""
    names = re.findall(r"`([\w.]+)", message) or re.findall(r"\w+", message)  # argparse and TRL write no backticks
    line = next((lines[name] for name in names if name in lines), None)
    return message if line is None else f"line {line}: {message}"


def _about_script(text: str) -> str:
    """Advice about a shell script: which command of it starts the training, or that none of its settings are known."""
    if _KEY_OF_SKYRL.search(text):
        return ABOUT_SKYRL
    if not _KEYS_IN_SCRIPT.search(text):
        options = suspicious_options(re.findall(r"--[\w.-]+", text))
        about = f" {about_options(options)}" if options else ""
        return f"This is a shell script without settings of verl, such as `algorithm.adv_estimator=grpo`.{about}"
    started = _STARTS.search(text)
    command = f"`{' '.join(started[0].split())}`" if started else "the command that is given the settings"
    return (
        f"This is a shell script: put `trl-rollout-corr convert` in the place of {command} in a copy of it, and run "
        "that. Then the shell expands its variables."
    )


def about_options(options: list[str]) -> str:
    """What to write instead of options of slime, miles and others, which are not translated."""
    known = {name: field for name, field in _OPTIONS.items() if f"--{name}" in options}
    written = "; ".join(f"`--{name}` is {field}" for name, field in known.items())
    of_known = f" In slime and miles, {written}." if known else ""
    if any("advantage.is_correction" in option for option in options):
        place = "verl#coming-from-openrlhf-slime-or-another-trainer"
        of_known = f" `trl-rollout-corr docs {place}` says what OpenRLHF's options are here."
    named = ", ".join(f"`{option}`" for option in options)
    return (
        f"{named} {'is' if len(options) == 1 else 'are'} not translated: `convert` reads verl, TRL and Axolotl."
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


def leaves(content: object, above: str = "") -> Iterator[tuple[str, object]]:
    """Dotted name and value of each setting. An empty section counts as a value."""
    if isinstance(content, Mapping) and (content or not above):
        for key, value in content.items():
            yield from leaves(value, f"{above}.{key}" if above else str(key))
    elif above:
        yield above, content


def read_overrides(arguments: list[str]) -> tuple[dict[str, object], list[str]]:
    """
    Dotted name and value of each argument of the form `key=value`, and the other options of the command, which share
    one warning.
    """
    settings: dict[str, object] = {}
    options: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        match = OVERRIDE.fullmatch(argument)
        if argument.startswith("-") or (match is None and before.startswith("-") and "=" not in before):
            options.append(argument)
        elif match is None and argument:
            raise ValueError(
                f"{argument!r}: it is neither `key=value` nor an option. A file is converted alone. A backslash with "
                "blanks behind it does not continue a line, so that what follows is lost."
            )
        elif match is not None:
            for key, value in leaves(_read_argument(*match.groups()), match[1]):
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
