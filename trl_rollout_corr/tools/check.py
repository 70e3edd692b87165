"""Command `trl-rollout-corr check`: a look at the installed TRL, or at a file of settings."""

import inspect
import json
import logging
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from importlib.metadata import packages_distributions, version
from typing import Any, NoReturn

from ..messages import SelfContainedError, SettingError, __version__, nearest
from ..settings.effects import rounds_cache
from ..settings.names import instead_of
from ..settings.presets import DEFAULT
from ..settings.resolve import Settings
from ..settings.trl_correction import DEFAULTS_OF_TRL
from ..settings.words import description_of
from .bands import ROUNDED
from .formats import visible
from .translation.dotted_settings import system_of
from .translation.setting_files import lines_of, read_document, read_file, with_line


_PACKAGES = ("torch", "trl", "transformers", "accelerate", "vllm")
_MISSPELT = 0.8  # similarity from which a name counts as misspelt, and not as the user's own
_REMEDIES = {
    "Axolotl": "Axolotl checks them itself: `axolotl train`",
    "SkyRL": "`trl-rollout-corr docs verl#coming-from-skyrl` says what to write for each",
    "accelerate": "Give the file to `accelerate launch --config_file`",
}
_TRAINERS = {"grpo": "GRPO", "rloo": "RLOO", "async_grpo": "AsyncGRPO"}


# The installation ----------------------------------------------------------------------------------------------------


def check_installation(*, as_json: bool = False) -> tuple[str, bool]:
    """Report on the installed packages, and `True` if the trainers work with them."""
    with _importing("look at the installed packages"):
        return _check_installation(as_json)


def _check_installation(as_json: bool) -> tuple[str, bool]:
    of = packages_distributions()  # vLLM's distributions carry other names
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


@contextmanager
def _importing(purpose: str) -> Iterator[None]:
    """Print what takes so long, and hide vLLM's messages below an error during the import."""
    sys.stderr.write(f"Importing PyTorch, TRL and vLLM to {purpose}. This may take a minute or two.\n")
    sys.stderr.flush()
    vllm, level = logging.getLogger("vllm"), os.environ.get("VLLM_LOGGING_LEVEL")
    before = vllm.level
    if level is None:  # vLLM's level for its logger; without its handlers, Python's level counts
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        vllm.setLevel(logging.ERROR)
    try:
        yield
    finally:
        if level is None:
            del os.environ["VLLM_LOGGING_LEVEL"]
            vllm.setLevel(before)


def _cuda() -> str:
    import torch

    built = torch.version.cuda or torch.version.hip
    if not torch.cuda.is_available():
        return f"not available: {'torch finds no GPU or no driver' if built else 'this torch is a build for CPUs'}"
    return f"{built}, {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


def _problem_of_trl() -> str | None:
    """The reason why the trainers do not start; `None` if they do."""
    from ..trainers.versions import outside_window, release

    if outside := outside_window(release(), version("trl")):  # modules may be missing
        return outside
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TRL warns about the versions above
            from ..trainers import trl_interface
    except Exception as error:  # any import error stops the trainers, too
        return f"trl {version('trl')} cannot be imported: {type(error).__name__}: {error}"
    return trl_interface.refusal((trl_interface.GRPOTrainer, trl_interface.RLOOTrainer))


def _untested() -> str:
    from ..trainers.versions import NEWEST_TESTED, OLDEST, is_untested, release

    return f" It is newer than the tested releases ({OLDEST} to {NEWEST_TESTED})." if is_untested(release()) else ""


# A file of settings --------------------------------------------------------------------------------------------------


def check_file(path: str, trainer: str | None = None, *, as_json: bool = False) -> tuple[str, bool]:
    """
    Report on a YAML file, read as a training script with TRL's parser would read it, and `True` if it is free of
    mistakes, each behind the line of its setting. The default `trainer` is the one that knows most keys of the file.
    """
    settings, of_keys, places = _read(path)
    with _importing(f"read {visible(path)} as the trainer would"):
        return _check_settings(path, settings, of_keys, places, trainer, as_json)


def _check_settings(
    path: str,
    settings: dict[str, Any],
    of_keys: list[str],
    places: Mapping[str, int],
    trainer: str | None,
    as_json: bool,
) -> tuple[str, bool]:
    if problem := _problem_of_trl():
        raise SelfContainedError(problem)
    fitting = [trainer] if trainer else _fitting(settings)
    is_named = trainer is not None
    trainer = fitting[0]
    is_open = len(fitting) > 1 and "async_grpo" in fitting  # the others demand what this one refuses
    mistakes, remarks = _unknown_names(settings, trainer)
    config, refused, warned = _build(_config_class(trainer), settings)
    mistakes += refused
    in_effect = None if config is None else config.settings
    remarks += [*warned, *_repeated_defaults(in_effect, settings), *_unknown_loss(config)]
    correction = "" if in_effect is None or is_open else description_of(in_effect, vars(config))
    if is_open:
        remarks.append(
            "This file fits GRPO, RLOO and asynchronous GRPO, which correct differently. Say which: add "
            "`--trainer async_grpo` to the command, or `use_vllm: true` to a file of GRPO or RLOO."
        )
    if in_effect is not None and trainer != "async_grpo":
        mistakes += _refused_by_trainer(config, settings)
        remarks += [] if is_open else _warned_about_sampler(config, trainer, given="use_vllm" in settings)
        remarks += _rounding_of_experts(in_effect.rollout_engine_kwargs or {})
        remarks += _rounding_of_cache(in_effect.rollout_engine_kwargs or {})
    remarks += _dropout_of_adapter(settings)
    mistakes = [*of_keys, *(with_line(mistake, places) for mistake in mistakes)]
    if as_json:
        report = {"file": path, "trainer": trainer, "mistakes": mistakes, "remarks": remarks, "correction": correction}
        return json.dumps(report, indent=2) + "\n", not mistakes
    lines = [visible(f"error: {mistake}") for mistake in mistakes]
    lines += [visible(f"warning: {remark}") for remark in remarks]
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes) or 'no'} mistakes"
    others = " or ".join(f"`--trainer {name}`" for name in _TRAINERS if name != trainer)
    read = f"{count}, read as settings of {trainer}.{'' if is_named else f' For another trainer: {others}.'}"
    lines.append(f"{visible(path)}: {f'{count} so far; its trainer is not known.' if is_open else read}")
    without = " without these mistakes" if mistakes else ""
    lines += [f"Correction{without}: {correction}"] if correction else []
    return "\n".join(lines) + "\n", not mistakes


def _fitting(settings: Mapping[str, Any]) -> list[str]:
    """The trainers that know most keys of a file."""
    known = {name: len(settings.keys() & _fields(_config_class(name))) for name in _TRAINERS}
    return [name for name in _TRAINERS if known[name] == max(known.values())]


def _unknown_names(settings: Mapping[str, Any], trainer: str) -> tuple[list[str], list[str]]:
    """Sentences about names that no field has: mistakes, and remarks on those that a script may know."""
    config_class = _config_class(trainer)
    known = _fields(config_class) | _fields_of_scripts()
    others = {other: _config_class(other) for other in _TRAINERS if other != trainer}
    mistakes: list[str] = []
    remarks: list[str] = []
    for name in [name for name in settings if name not in known]:
        if knowing := {other: cls.__name__ for other, cls in others.items() if name in _fields(cls)}:
            mistakes.append(
                f"`{name}` is a field of {' and '.join(knowing.values())}, and {config_class.__name__} refuses it. "
                f"Remove it, or train with {' or '.join(knowing)}."
            )
        elif name.startswith("rollout") or get_close_matches(name, known, cutoff=_MISSPELT):
            mistakes.append(f"`{name}` is not a field of the configuration.{instead_of(name, known)}")
        else:
            remarks.append(
                f"`{name}` is not a field of the trainer or of TRL's scripts, so your own script must define it."
            )
    return mistakes, remarks


def _read(path: str) -> tuple[dict[str, Any], list[str], dict[str, int]]:
    """Settings of a YAML file, sentences about wrong keys, and the line of each setting."""
    try:
        settings, node = read_document(read_file(path))
    except ValueError as error:
        raise SelfContainedError(f"{path}: {error}") from None
    if not isinstance(settings, dict) or node is None:
        raise SelfContainedError(f"{path}: a file must have one setting in each line, such as `learning_rate: 1e-6`.")
    if system := system_of(settings):
        remedy = _REMEDIES.get(system, f"`trl-rollout-corr convert {path}` translates them")
        raise SelfContainedError(f"{path}: these are settings of {system}, which no script of TRL reads. {remedy}.")
    places = lines_of(node)
    given: dict[str, list[int]] = {}
    for key, _ in node.value:
        given.setdefault(key.value, []).append(key.start_mark.line + 1)
    mistakes = [
        f"lines {', '.join(map(str, at[:-1]))} and {at[-1]}: `{key}` is set {len(at)} times, and the last one counts."
        for key, at in given.items()
        if len(at) > 1
    ]
    if not isinstance(settings.pop("env", {}), dict):  # TRL's parser puts it into the environment
        wrong = "`env` must be a section of variables, such as `env: {WANDB_PROJECT: a}`."
        mistakes.append(with_line(wrong, places))
    return {str(name): value for name, value in settings.items()}, mistakes, places


def _config_class(trainer: str) -> Any:
    import trl_rollout_corr

    return getattr(trl_rollout_corr, f"RolloutCorrected{_TRAINERS[trainer]}Config")


def _fields_of_scripts() -> set[str]:
    from trl import DatasetMixtureConfig, ModelConfig
    from trl.scripts.grpo import GRPOScriptArguments

    return _fields(GRPOScriptArguments) | _fields(ModelConfig) | _fields(DatasetMixtureConfig)


def _fields(cls: Any) -> set[str]:
    return {field.name for field in fields(cls) if field.init}


def _refused_by_trainer(config: Any, settings: Mapping[str, Any]) -> list[str]:
    """Errors that a trainer raises at its start about settings that the configuration accepts."""
    whole = [field.name for field in fields(config) if type(field.default) is int]
    numbers = [(name, settings[name]) for name in whole if isinstance(settings.get(name), float)]
    mistakes = [f"`{name}` is {x}, and must be a whole number." for name, x in numbers if not x.is_integer()]
    mistakes += [
        f"`{name}` is NaN, which is no number." for name, x in settings.items() if isinstance(x, float) and x != x
    ]
    packed = [name for name in ("load_in_4bit", "load_in_8bit") if settings.get(name)]
    if packed and settings.get("use_peft") and config.use_vllm and config.vllm_mode == "server":
        mistakes.append(
            f"`{packed[0]}` is true with `use_peft` and `vllm_mode: server`, and a server cannot read packed weights "
            "in a push. Set `vllm_mode` to colocate, or remove it."
        )
    if getattr(config, "sync_ref_model", False) and config.beta == 0:
        mistakes.append("`sync_ref_model` is true while `beta` is 0, so that there is no reference model. Remove it.")
    return mistakes


def _warned_about_sampler(config: Any, trainer: str, *, given: bool) -> list[str]:
    """Sentences about a file that does not make vLLM the sampler."""
    if config.use_vllm:
        return []
    state = "is false" if given else "is not set, and false by default"
    unless = "" if trainer == "rloo" else ", or passes a `rollout_func`"
    return [
        f"`use_vllm` {state}. Then there are no log-probabilities of a sampler, and the trainer refuses to start, "
        f"unless your script sets it{unless}. Add `use_vllm: true`."
    ]


def _rounding_of_experts(kwargs: Mapping[str, Any]) -> list[str]:
    """A sentence about a scheme that rounds experts alone: the file does not tell whether the model has any."""
    from .engine_checks import schemes_of_experts

    scheme = kwargs.get("quantization")
    if scheme is None or scheme not in schemes_of_experts():
        return []
    return [
        f"`rollout_engine_kwargs` sets `quantization: {scheme}`, by which vLLM rounds experts alone. In a model "
        "without experts it rounds nothing, and the run samples in the type of the model. vLLM has no scheme that "
        "rounds a dense model to int8 while it loads the weights: use an FP8 scheme (`trl-rollout-corr docs "
        "models#which-scheme`)."
    ]


def _rounding_of_cache(kwargs: Mapping[str, Any]) -> list[str]:
    """A sentence about keys and values of 8 bits or fewer, which no correction was compared for."""
    dtype = kwargs.get("kv_cache_dtype")
    if not rounds_cache(dtype):
        return []
    return [
        f"`rollout_engine_kwargs` sets `kv_cache_dtype: {dtype}`, which opens a gap of its own: `k3_kl` was up to "
        f"{ROUNDED['cache']:g} in our measurements. Remove it: the cache then has the type of the model."
    ]


def _dropout_of_adapter(settings: Mapping[str, Any]) -> list[str]:
    """A sentence about dropout of an adapter, which TRL's scripts switch on unless the file says otherwise."""
    from trl import ModelConfig

    dropout = settings.get("lora_dropout", ModelConfig.lora_dropout)
    if not settings.get("use_peft") or settings.get("disable_dropout") or not dropout:
        return []
    state = f"is {dropout}" if "lora_dropout" in settings else f"is not set, and {dropout} by default"
    return [
        f"`lora_dropout` {state}. Dropout is on in the trainer and off in the sampler, so the two are different "
        "policies even with equal weights. Set `lora_dropout: 0`."
    ]


def _repeated_defaults(in_effect: Settings | None, settings: Mapping[str, Any]) -> list[str]:
    """
    A sentence about a file that names TRL's own correction and repeats its defaults. The configuration cannot tell
    such a file from one that names nothing, but its author may want that correction.
    """
    repeated = [name for name in settings if name in DEFAULTS_OF_TRL]
    is_named = {"rollout_correction", "rollout_is", "rollout_rs", "bypass_mode"} & settings.keys()
    if in_effect is None or not repeated or is_named or in_effect.rollout_correction != DEFAULT:
        return []
    has = "has its default value" if len(repeated) == 1 else "have their default values"
    return [
        f"{', '.join(f'`{name}`' for name in repeated)} {has}, as if the file did not name TRL's correction, so "
        f"`{DEFAULT}` replaces it. To keep TRL's correction, set `rollout_correction: trl`."
    ]


def _unknown_loss(config: Any) -> list[str]:
    """A sentence about a `loss_type` that TRL's loss does not know."""
    loss_type = getattr(config, "loss_type", None)
    if loss_type is None:
        return []
    from trl import GRPOTrainer

    # TRL has no list of them. Its loss compares `loss_type` with each, and raises an error after the last
    compared = [line for line in inspect.getsource(GRPOTrainer._compute_loss).splitlines() if "loss_type" in line]
    known = re.findall(r'"(\w+)"', "\n".join(compared))
    if not known or loss_type in known:
        return []
    return [
        f"`loss_type` is {loss_type!r}, which TRL {version('trl')} does not know: training ends with an error at the "
        f"first loss, unless your trainer computes the loss itself.{nearest(loss_type, known)}"
    ]


def _build(config_class: Any, settings: Mapping[str, Any]) -> tuple[Any, list[str], list[str]]:
    """
    A configuration, or `None`, its errors and its warnings. After an error the configuration is built again without
    the setting that the error is about, so that the next error is found.
    """
    import torch

    # The file may be for a machine with a GPU
    here: dict[str, Any] = {} if torch.accelerator.is_available() else {"use_cpu": True, "tf32": None}
    known = _fields(config_class)
    given = {"output_dir": "output", **{name: x for name, x in settings.items() if name in known}, **here}
    gone: set[str] = set()
    errors: list[str] = []
    while True:
        try:
            config, shown = _parse(config_class, given)
        except (ArithmeticError, ValueError, TypeError, ImportError, OSError) as error:
            message, words = _about(error, {name: x for name, x in given.items() if name not in here})
            if gone.isdisjoint(words):  # otherwise an omitted setting may cause it
                errors.append(message)
            about = next((word for word in words if word in given and word not in here), None)
            if about is None:
                return None, errors, []
            # Also fields that mean nothing without it, such as `rollout_rs_threshold` without `rollout_rs`
            parts = {name for name in given if name == about or name.startswith(f"{about}_")}
            gone |= parts
            given = {name: value for name, value in given.items() if name not in parts}
        else:
            return (None, errors, []) if errors else (config, [], shown)


def _about(error: Exception, given: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The message of an error in one line, and the words in it that may be the names of the settings it is about."""
    if isinstance(error, ZeroDivisionError):  # which names none
        zeros = [name for name, x in given.items() if x == 0 and x is not False]
        if zeros:
            listed = ", ".join(f"`{name}`" for name in zeros)
            return f"TRL divides by one of these settings, which are 0: {listed}.", zeros
    of_field = [error.field] if isinstance(error, SettingError) else []
    return " ".join(str(error).split()), [*of_field, *re.findall(r"\w+", str(error))]


def _parse(config_class: Any, given: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """A configuration as TRL's scripts build it from a file, and its warnings."""
    from trl import TrlParser

    class Parser(TrlParser):
        def error(self, message: str) -> NoReturn:  # argparse would exit
            raise ValueError(message)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parser = Parser((config_class,))
        parser.set_defaults_with_config(**given)
        (config,) = parser.parse_args_into_dataclasses([])
    shown = [str(warning.message) for warning in caught if issubclass(warning.category, (UserWarning, FutureWarning))]
    return config, list(dict.fromkeys(shown))
