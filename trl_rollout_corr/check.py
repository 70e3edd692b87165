"""Command `trl-rollout-corr check`: a look at the installed TRL, or at a file of settings."""

import json
import platform
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import yaml

from .messages import SelfContainedError, SettingError, __version__, nearest


_PACKAGES = ("torch", "trl", "transformers", "accelerate", "vllm")
_MISSPELT = 0.8  # similarity from which a name is taken for a misspelt one, and not for a name of the user
TRAINERS = ("grpo", "rloo", "async_grpo")


# The installation -----------------------------------------------------------------------------------------------------


def check_installation(*, as_json: bool = False) -> tuple[str, bool]:
    """Report on the installed packages, and `True` if the trainers work with them."""
    versions = {"python": platform.python_version(), "trl-rollout-corr": __version__}
    versions |= {name: _installed(name) or "not installed" for name in _PACKAGES}
    cuda = _cuda()
    changes, problem = _look_at_trl()
    usable, verdict = problem is None, problem or f"trl {versions['trl']} can be corrected.{_untested()}"
    if as_json:
        report = {"versions": versions, "cuda": cuda, "changes": changes, "usable": usable, "verdict": verdict}
        return json.dumps(report, indent=2) + "\n", usable
    lines = [f"{name:<17} {value}" for name, value in {**versions, "cuda": cuda}.items()]
    names = [f"{owner:<17} {' '.join(found) or 'all names in use are there'}" for owner, found in changes.items()]
    return "\n".join([*lines, "", *names, "", verdict]) + "\n", usable


def _installed(package: str) -> str | None:
    """Version of a package; `None` if it is not installed."""
    for distribution in (package, f"{package}-cpu"):  # vLLM has a distribution for CPUs
        try:
            return version(distribution)
        except PackageNotFoundError:
            pass
    return None


def _cuda() -> str:
    """State of CUDA, as PyTorch sees it."""
    import torch

    built = torch.version.cuda or torch.version.hip
    if not torch.cuda.is_available():
        return f"not available: {'torch finds no GPU or no driver' if built else 'this torch is a build for CPUs'}"
    return f"{built}, {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def _look_at_trl() -> tuple[dict[str, list[str]], str | None]:
    """Names of TRL in use that have changed, by class, and the reason why the trainers do not start, if there is one."""
    if _installed("trl") is None:
        return {}, "trl is not installed: `pip install trl`."
    from .trainers.versions import outside_window, release

    outside = outside_window(release(), version("trl"))
    if outside:  # modules may be missing
        return {}, outside
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TRL's, about the versions above
            from .trainers import trl_interface
    except Exception as error:  # any error of the import stops the trainers, too
        return {}, f"trl {_installed('trl')} cannot be imported: {type(error).__name__}: {error}"
    changes = {owner.__name__: trl_interface.changes(owner) for owner in trl_interface.METHODS}
    return changes, trl_interface.refusal((trl_interface.GRPOTrainer, trl_interface.RLOOTrainer))


def _untested() -> str:
    from .trainers.versions import NEWEST_TESTED, OLDEST, is_untested, release

    return f" It is newer than the tested releases ({OLDEST} to {NEWEST_TESTED})." if is_untested(release()) else ""


# A file of settings ---------------------------------------------------------------------------------------------------


def check_file(path: str, trainer: str | None = None, *, as_json: bool = False) -> tuple[str, bool]:
    """
    Report on a YAML file, read as a training script with TRL's parser would read it, and `True` if it has no mistake. Without
    a `trainer`, it is the one that knows most keys of the file.
    """
    settings, mistakes = _read(path)
    _, problem = _look_at_trl()
    if problem is not None:
        raise SelfContainedError(problem)
    guessed = "" if trainer else " (--trainer names another)"
    trainer = trainer or max(TRAINERS, key=lambda name: len(settings.keys() & _known(name)))  # the first of equals
    known = _known(trainer)
    remarks: list[str] = []
    for name in [name for name in settings if name not in known]:
        del settings[name]
        if name.startswith("rollout") or get_close_matches(name, known, cutoff=_MISSPELT):
            mistakes.append(f"`{name}` is not a field of the configuration.{nearest(name, known)}")
        else:
            remarks.append(f"`{name}` is no field of the trainer or of TRL's scripts. Your script must know it.")
    refused, warned, correction = _build(trainer, settings)
    mistakes += refused
    remarks += warned
    if as_json:
        report = {"file": path, "trainer": trainer, "mistakes": mistakes, "remarks": remarks, "correction": correction}
        return json.dumps(report, indent=2) + "\n", not mistakes
    lines = [f"error: {mistake}" for mistake in mistakes] + [f"warning: {remark}" for remark in remarks]
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes) or 'no'} mistakes"
    lines.append(f"{path}: {count}, read for the trainer {trainer}{guessed}.")
    lines += [f"Correction: {correction}"] if correction else []
    return "\n".join(lines) + "\n", not mistakes


def _read(path: str) -> tuple[dict[str, Any], list[str]]:
    """Settings of a YAML file, and its keys that stand there twice."""
    text = Path(path).read_text(encoding="utf-8")
    try:
        settings, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise SelfContainedError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict) or node is None:
        raise SelfContainedError(f"{path} must have one setting in each line, such as `learning_rate: 1e-6`.")
    settings.pop("env", None)  # TRL's parser puts it into the environment
    keys = [key.value for key, _ in node.value]
    counts = {key: keys.count(key) for key in keys}
    twice = [f"`{key}` is set {n} times, and the last one counts." for key, n in counts.items() if n > 1]
    return {str(name): value for name, value in settings.items()}, twice


def _classes(trainer: str) -> tuple[Any, ...]:
    """Dataclasses of a training script: of TRL's scripts, the trainer and the model."""
    from trl import DatasetMixtureConfig, ModelConfig
    from trl.scripts.grpo import GRPOScriptArguments

    from . import RolloutCorrectedAsyncGRPOConfig, RolloutCorrectedGRPOConfig, RolloutCorrectedRLOOConfig

    configs = (RolloutCorrectedGRPOConfig, RolloutCorrectedRLOOConfig, RolloutCorrectedAsyncGRPOConfig)
    config = dict(zip(TRAINERS, configs, strict=True))[trainer]
    # The asynchronous trainer has a `dtype` of its own. A parser takes no name twice, and a class variable is no field
    both = dict.fromkeys(_fields(config) & _fields(ModelConfig), ClassVar)
    model: Any = dataclass(type("ModelConfig", (ModelConfig,), {"__annotations__": both}))
    return GRPOScriptArguments, config, model, DatasetMixtureConfig


def _known(trainer: str) -> set[str]:
    return set().union(*map(_fields, _classes(trainer)))


def _fields(cls: Any) -> set[str]:
    return {field.name for field in fields(cls) if field.init}


def _build(trainer: str, settings: Mapping[str, Any]) -> tuple[list[str], list[str], str]:
    """
    Errors and warnings of the configuration of a trainer, and its description. After an error the configuration is built
    again without the setting that the error is about, so that the next error is found.
    """
    import torch
    from trl import TrlParser

    class Parser(TrlParser):
        def error(self, message: str) -> NoReturn:  # argparse would leave
            raise ValueError(message)

    # The file may be for a machine with a GPU
    here: dict[str, Any] = {} if torch.accelerator.is_available() else {"use_cpu": True, "tf32": None}
    given: dict[str, Any] = {"output_dir": "output", **settings, **here}
    gone: set[str] = set()
    errors: list[str] = []
    while True:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                parser = Parser(_classes(trainer))
                parser.set_defaults_with_config(**given)
                _, config, *_ = parser.parse_args_into_dataclasses([])
        except (ValueError, TypeError, ImportError, OSError) as error:
            words = [error.field] if isinstance(error, SettingError) else []
            words += re.findall(r"\w+", str(error))
            if gone.isdisjoint(words):  # otherwise it may come from what was left out
                errors.append(" ".join(str(error).split()))
            about = next((word for word in words if word in given and word not in here), None)
            if about is None:
                return errors, [], ""
            # Also fields that mean nothing without it, as `rollout_rs_threshold` without `rollout_rs`
            parts = {name for name in given if name == about or name.startswith(f"{about}_")}
            gone |= parts
            given = {name: value for name, value in given.items() if name not in parts}
        else:
            told = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
            return errors, [] if errors else list(dict.fromkeys(told)), "" if errors else config.description
