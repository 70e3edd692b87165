"""Command `trl-rollout-corr check`: a look at the installed TRL, or at a file of settings."""

import json
import platform
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ..messages import SelfContainedError, SettingError, __version__, nearest


_PACKAGES = ("torch", "trl", "transformers", "accelerate", "vllm")
_MISSPELT = 0.8  # similarity from which a name is taken for a misspelt one, and not for a name of the user
_TRAINERS = {"grpo": "GRPO", "rloo": "RLOO", "async_grpo": "AsyncGRPO"}


# The installation -----------------------------------------------------------------------------------------------------


def check_installation(*, as_json: bool = False) -> tuple[str, bool]:
    """Report on the installed packages, and `True` if the trainers work with them."""
    of = packages_distributions()  # vLLM has distributions of other names
    versions = {"python": platform.python_version(), "trl-rollout-corr": __version__}
    versions |= {name: version(of[name][0]) if name in of else "not installed" for name in _PACKAGES}
    versions["cuda"] = _cuda()
    problem = _problem_of_trl()
    verdict = problem or f"trl {versions['trl']} can be corrected.{_untested()}"
    if as_json:
        report = {"versions": versions, "usable": problem is None, "verdict": verdict}
        return json.dumps(report, indent=2) + "\n", problem is None
    lines = [f"{name:<17} {value}" for name, value in versions.items()]
    return "\n".join([*lines, "", verdict]) + "\n", problem is None


def _cuda() -> str:
    """State of CUDA, as PyTorch sees it."""
    import torch

    built = torch.version.cuda or torch.version.hip
    if not torch.cuda.is_available():
        return f"not available: {'torch finds no GPU or no driver' if built else 'this torch is a build for CPUs'}"
    return f"{built}, {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def _problem_of_trl() -> str | None:
    """The reason why the trainers do not start, if there is one."""
    from ..trainers.versions import outside_window, release

    if outside := outside_window(release(), version("trl")):  # modules may be missing
        return outside
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TRL's, about the versions above
            from ..trainers import trl_interface
    except Exception as error:  # any error of the import stops the trainers, too
        return f"trl {version('trl')} cannot be imported: {type(error).__name__}: {error}"
    return trl_interface.refusal((trl_interface.GRPOTrainer, trl_interface.RLOOTrainer))


def _untested() -> str:
    from ..trainers.versions import NEWEST_TESTED, OLDEST, is_untested, release

    return f" It is newer than the tested releases ({OLDEST} to {NEWEST_TESTED})." if is_untested(release()) else ""


# A file of settings ---------------------------------------------------------------------------------------------------


def check_file(path: str, trainer: str | None = None, *, as_json: bool = False) -> tuple[str, bool]:
    """
    Report on a YAML file, read as a training script with TRL's parser would read it, and `True` if it has no mistake. Without
    a `trainer`, it is the one that knows most keys of the file.
    """
    settings, mistakes = _read(path)
    if problem := _problem_of_trl():
        raise SelfContainedError(problem)
    guessed = "" if trainer else " (--trainer names another)"
    trainer = trainer or max(_TRAINERS, key=lambda name: len(settings.keys() & _fields(_config_class(name))))
    config_class = _config_class(trainer)
    known = _fields(config_class) | _fields_of_scripts()
    remarks: list[str] = []
    for name in [name for name in settings if name not in known]:
        if name.startswith("rollout") or get_close_matches(name, known, cutoff=_MISSPELT):
            mistakes.append(f"`{name}` is not a field of the configuration.{nearest(name, known)}")
        else:
            remarks.append(f"`{name}` is no field of the trainer or of TRL's scripts. Your script must know it.")
    refused, warned, correction = _build(config_class, settings)
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
    except RecursionError:
        raise ValueError("not YAML that a person wrote: its brackets are nested too deeply") from None
    except yaml.YAMLError as error:
        raise SelfContainedError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict) or node is None:
        raise SelfContainedError(f"{path} must have one setting in each line, such as `learning_rate: 1e-6`.")
    settings.pop("env", None)  # TRL's parser puts it into the environment
    keys = [key.value for key, _ in node.value]
    twice = [f"`{key}` is set {n} times, and the last one counts." for key, n in Counter(keys).items() if n > 1]
    return {str(name): value for name, value in settings.items()}, twice


def _config_class(trainer: str) -> Any:
    import trl_rollout_corr

    return getattr(trl_rollout_corr, f"RolloutCorrected{_TRAINERS[trainer]}Config")


def _fields_of_scripts() -> set[str]:
    from trl import DatasetMixtureConfig, ModelConfig
    from trl.scripts.grpo import GRPOScriptArguments

    return _fields(GRPOScriptArguments) | _fields(ModelConfig) | _fields(DatasetMixtureConfig)


def _fields(cls: Any) -> set[str]:
    return {field.name for field in fields(cls) if field.init}


def _build(config_class: Any, settings: Mapping[str, Any]) -> tuple[list[str], list[str], str]:
    """
    Errors and warnings of a configuration, and its description. After an error the configuration is built again without the
    setting that the error is about, so that the next error is found.
    """
    import torch
    from trl import TrlParser

    class Parser(TrlParser):
        def error(self, message: str) -> NoReturn:  # argparse would leave
            raise ValueError(message)

    # The file may be for a machine with a GPU
    here: dict[str, Any] = {} if torch.accelerator.is_available() else {"use_cpu": True, "tf32": None}
    known = _fields(config_class)
    given = {"output_dir": "output", **{name: x for name, x in settings.items() if name in known}, **here}
    gone: set[str] = set()
    errors: list[str] = []
    while True:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                parser = Parser((config_class,))
                parser.set_defaults_with_config(**given)
                (config,) = parser.parse_args_into_dataclasses([])
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
