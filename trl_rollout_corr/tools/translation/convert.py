"""Conversion of a file or of arguments of another tool, for the command `convert`. No torch."""

from collections.abc import Mapping

import yaml

from ...messages import SelfContainedError
from .dotted_settings import convert_settings
from .setting_files import OVERRIDE, leaves, lines_of, read_document, read_file, read_overrides, with_line
from .trl_files import convert_trl_file, is_of_trl


def convert(arguments: list[str], trainer: str | None = None) -> str:
    """
    Translate a YAML file of another tool (its path, or `-` for standard input), or arguments of a training script of
    verl, to YAML of this package and of TRL. A warning names each omitted setting, and an error about a file
    its line. YAML of TRL or Axolotl is returned as a whole; `trainer` is the one that reads it, where its settings do
    not tell.
    """
    if len(arguments) == 1 and not OVERRIDE.fullmatch(arguments[0]) and not _is_option(arguments[0]):
        text = read_file(arguments[0])
        content, node = read_document(text)
        try:
            return _convert_file(text, content, node, trainer)
        except SelfContainedError:
            raise
        except (ValueError, TypeError) as error:
            raise ValueError(with_line(str(error), lines_of(node))) from error
    _refuse_trainer(trainer)
    settings, options = read_overrides(arguments)
    return convert_settings(settings, options, from_command=True)


def _convert_file(text: str, content: object, node: yaml.Node | None, trainer: str | None) -> str:
    if isinstance(content, Mapping):
        of_trl = content["trl"] if isinstance(content.get("trl"), Mapping) else content
        if is_of_trl(content, of_trl):
            return convert_trl_file(text, content, node, of_trl, trainer)
    _refuse_trainer(trainer)
    return convert_settings(dict(leaves(content)), from_command=False)


def _refuse_trainer(trainer: str | None) -> None:
    if trainer is not None:
        allowed = "the trainer of verl is in its settings: set `algorithm.adv_estimator` to grpo or rloo"
        raise SelfContainedError(f"`--trainer {trainer}` is for files of TRL and Axolotl, and {allowed}.")


def _is_option(argument: str) -> bool:
    return argument.startswith("-") and argument != "-"
