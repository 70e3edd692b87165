"""Parts of a training script: a parser, and errors of one line, printed once per job. Used in `examples/run.py`."""

import dataclasses
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, NoReturn

import yaml
from trl import GRPOConfig, ModelConfig, RLOOConfig, TrlParser

from ..messages import is_first_rank, nearest


INPUT_ERRORS = (ValueError, TypeError, ImportError, OSError, yaml.YAMLError)
_PACKAGE = Path(__file__).parents[1]
_PATIENCE = 60  # seconds that other ranks wait before they print an error, too


class ScriptParser(TrlParser):
    """[`~trl.TrlParser`] that raises a `ValueError` of one line for bad options, with the nearest known option."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def parse_args_and_config(self, args: Iterable[str] | None = None, **kwargs: object) -> tuple:
        """
        Parse a command line, and the YAML file that its `--config` names.

        Args:
            args (`Iterable[str]`, *optional*):
                Command line. By default it is the command line of the process.
            kwargs:
                Further arguments of [`~trl.TrlParser.parse_args_and_config`].

        Returns:
            `tuple`: one instance per dataclass.

        Raises:
            `ValueError`: if an option or a key is unknown, a value is invalid, or the file cannot be read.
        """
        given = sys.argv[1:] if args is None else args
        args = [part for arg in given for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
        if args and args[-1] == "--config":
            raise ValueError("`--config` is set without a value. Name a YAML file after it.")
        *parsed, in_file, on_line = super().parse_args_and_config(
            args, **kwargs, return_remaining_strings=True, separate_remaining_strings=True
        )
        file = args[args.index("--config") + 1] if "--config" in args else ""
        for where, rest in ((file, in_file), ("the command line", on_line)):
            if unknown := [word for word in rest if word.startswith("--")] or rest:
                options = {action.dest for action in self._actions}
                name = unknown[0].removeprefix("--").split("=")[0]
                hint = nearest(name, options) if unknown[0].startswith("--") else " An option starts with --."
                raise ValueError(f"`{name}` in {where} is not an option of this script.{hint}")
        return tuple(parsed)


def model_config(config_class: type) -> type:
    """TRL's `ModelConfig` without the options of `config_class`, such as `dtype` of the asynchronous trainer."""
    own = {field.name for field in dataclasses.fields(config_class)}
    fields: Any = [
        (field.name, field.type, copy(field)) for field in dataclasses.fields(ModelConfig) if field.name not in own
    ]
    namespace = {"__post_init__": ModelConfig.__post_init__, "__doc__": ModelConfig.__doc__}
    return dataclasses.make_dataclass("ModelConfig", fields, namespace=namespace)


def model_init_kwargs(args: GRPOConfig | RLOOConfig, model_args: ModelConfig) -> dict[str, object]:
    """
    Arguments for loading the model of a trainer, from the configurations of trainer and model.

    Args:
        args ([`~trl.GRPOConfig`]):
            Configuration of the trainer. Its `model_init_kwargs` take precedence.
        model_args ([`~trl.ModelConfig`]):
            Configuration of the model.

    Returns:
        `dict[str, Any]`: `model_init_kwargs`.
    """
    return {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        **({"dtype": model_args.dtype} if hasattr(model_args, "dtype") else {}),
        **(args.model_init_kwargs or {}),
    }


@contextmanager
def one_line_errors(*, of_package: bool = False) -> Iterator[None]:
    """
    End the script with exit code 2 and one line about an error of its input, once per job instead of once per rank, and print
    warnings of this package in one line.

    Args:
        of_package (`bool`, *optional*, defaults to `False`):
            Handle only errors that this package raises. Others keep their traceback.
    """
    with package_warnings(lambda message: print(f"warning: {message}", file=sys.stderr)):  # noqa: T201
        try:
            yield
        except INPUT_ERRORS as error:
            if of_package and not _is_ours(traceback.extract_tb(error.__traceback__)[-1].filename):
                raise
            if (
                not is_first_rank()
            ):  # a launcher ends all ranks with the first that ends: let rank 0 print and end first
                time.sleep(_PATIENCE)
            print(f"error: {in_one_line(error)}", file=sys.stderr, flush=True)  # noqa: T201
            sys.exit(2)


def _is_ours(file: str) -> bool:
    return Path(file).is_relative_to(_PACKAGE)


def in_one_line(error: Exception) -> str:
    """The message of an error, with the file that it is about."""
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    return " ".join(text.split())


@contextmanager
def package_warnings(tell: Callable[[str], object]) -> Iterator[None]:
    """Pass warnings of this package to a function. Others are shown as always."""
    show = warnings.showwarning

    def show_or_tell(
        message: Any, category: Any, filename: Any, lineno: Any, file: Any = None, line: Any = None
    ) -> None:
        if _is_ours(filename):
            tell(str(message))
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_or_tell
    try:
        yield
    finally:
        warnings.showwarning = show
