"""
Differences between the supported releases of TRL, and nothing else.

Each part names a release. When [`OLDEST`] has reached it, the part can be deleted.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import torch
from packaging.version import Version

from ..messages import warn
from ..replay.protocol import Logprobs
from ..settings.presets import DEFAULT


if TYPE_CHECKING:  # an older TRL may have none of them, and `trl-rollout-corr check` says so
    from trl import GRPOConfig, RLOOConfig


OLDEST, NEWEST_TESTED, FIRST_UNSUPPORTED = "1.10", "1.16", "2"
# Advice of messages about a TRL that is not one of them
TESTED = "the tested releases: `pip install --constraint constraints.txt .` in a clone of trl-rollout-corr"


def release() -> Version:
    """Installed release of TRL. A development version counts as the release that follows it."""
    return Version(Version(version("trl")).base_version)


INSTALLED = release()


def before(other: str) -> bool:
    """True if the installed TRL is older than a release."""
    return Version(other) > INSTALLED


def outside_window(trl: Version, named: str) -> str | None:
    """Error message about a release of TRL that is too old or too new; `None` if it is neither."""
    if Version(OLDEST) <= trl < Version(FIRST_UNSUPPORTED):
        return None
    return f"trl-rollout-corr works with trl>={OLDEST},<{FIRST_UNSUPPORTED}, got trl {named}. Install {TESTED}."


def is_untested(trl: Version) -> bool:
    """True if a release of TRL is newer than those that this package was tested with."""
    return trl.release[:2] > Version(NEWEST_TESTED).release


# Until 1.11 -----------------------------------------------------------------------------------------------------------

# Method that names the weights pushed to vLLM, with its leading parameters
PUSHES_WEIGHTS = (
    {"_push_param_to_vllm": ["self", "name", "param"]} if before("1.11") else {"_iter_named_params": ["self"]}
)


def named_weights(generation: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Weights of the trainer under the names of vLLM. From 1.11 on `generation._iter_named_params()`."""
    if hasattr(generation, "_iter_named_params"):
        return cast(Iterable[tuple[str, torch.Tensor]], generation._iter_named_params())
    pushed: list[tuple[str, torch.Tensor]] = []
    # TRL gathers a parameter before the push and releases it afterwards, so a copy is kept
    generation._push_param_to_vllm = lambda name, param: pushed.append((name, param.clone()))
    try:
        type(generation).sync_weights(generation)
    finally:
        del generation._push_param_to_vllm
    return pushed


def without_none(logprobs: Logprobs) -> Logprobs:
    """NaN in place of `None`, the form of NaN in vLLM's output. TRL from 1.11 on replaces it itself."""
    if not before("1.11"):
        return logprobs
    return [[math.nan if logprob is None else logprob for logprob in sequence] for sequence in logprobs]


# Until 1.14 -----------------------------------------------------------------------------------------------------------

# Options with which the loss does not call `_get_per_token_logps_and_entropies`, which rollout correction overrides, and the
# first release in which it does
PASSES_BY = {"use_liger_kernel": "1.14"}


def check_passes_by(config: "GRPOConfig") -> None:
    """Refuse options of older releases of TRL whose loss cannot be corrected."""
    for name, since in PASSES_BY.items():
        if before(since) and getattr(config, name, False):
            raise ValueError(
                f"`{name}` is {getattr(config, name)!r}, and trl {INSTALLED} then computes its loss in one kernel, which "
                f"cannot be corrected. Set `{name}` to False, or install trl {since} or newer."
            )


# Until 1.16 -----------------------------------------------------------------------------------------------------------


def server_configuration(client: Any) -> Any:
    """
    Configuration of the vLLM server that a `client` of TRL is connected to; `None` if the server does not tell it, as the
    server of TRL 1.10. From 1.16 on `client.get_server_info()`.
    """
    if hasattr(client, "get_server_info"):
        return client.get_server_info()
    response = client.session.get(f"{client.base_url}/server_info", params={"config_format": "json"})
    return response.json()["vllm_config"] if response.ok else None


# TRL's own correction, which changes from release to release ----------------------------------------------------------

_OF_TRL = "vllm_importance_sampling_"  # how the fields of TRL's own correction begin
_SWITCH = f"{_OF_TRL}correction"


def check_switched_off(config: Any) -> None:
    """Warn if TRL's own correction is switched off and the correction of this package is the default, which is on."""
    chosen = config.given & {"rollout_correction", "rollout_is", "rollout_rs", "bypass_mode"}
    if getattr(config, _SWITCH, True) is False and not chosen:
        warn(
            f"`{_SWITCH}=False` switches TRL's own correction off, which this trainer does in any case. Its own correction "
            f"is {DEFAULT!r}, the default. To train without any correction, set `rollout_correction` to disabled. If you want "
            f"{DEFAULT!r}, set it, and this warning goes away.",
            _SWITCH,
        )


def replace_trl_correction(config: "GRPOConfig | RLOOConfig") -> None:
    """Switch TRL's own correction off before TRL validates it, and warn if it was configured or is unknown to this package."""
    fields = {f.name: f.default for f in dataclasses.fields(config) if f.name.startswith(_OF_TRL)}
    defaults = dict(fields)
    if _SWITCH in defaults:
        del defaults[_SWITCH]
        setattr(config, _SWITCH, False)
    acting = {name: getattr(config, name) for name in defaults if getattr(config, name) != defaults[name]}
    acting |= {name: True for name in defaults if getattr(config, name) is True}
    for name in acting:
        if acting[name] is True:
            setattr(config, name, False)
    if acting:
        settings = ", ".join(f"`{name}={value!r}`" for name, value in acting.items())
        warn(
            f"{settings} has no effect: rollout correction replaces TRL's. `trl-rollout-corr convert` translates most "
            "settings of TRL."
        )


def refuse_weights(batch: Mapping[str, Any]) -> None:
    """Refuse importance weights of TRL, whose correction is switched off."""
    weights = [key for key in batch if key.startswith("importance_sampling")]
    if weights:
        raise RuntimeError(
            f"trl {INSTALLED} put {', '.join(f'`{key}`' for key in weights)} into the batch: a correction of its own, "
            f"although `{_SWITCH}` is switched off. Completions would be corrected twice. Switch it off in your "
            f"configuration, or install {TESTED}."
        )


# Until the release whose trainers score through a head that is fused with the logarithm, and never call the head itself ----


@contextmanager
def float32_fused_head(model: Any, temperature: float) -> Iterator[None]:
    """Let TRL's fused head compute in float32, as with `cast_lm_head_to_fp32`. No effect if TRL has no fused head."""
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError:
        yield
        return
    had = "forward" in model.__dict__
    forward = model.forward
    add_fused_lm_head(model, temperature=temperature, cast_lm_head_to_fp32=True, outputs=("log_probs", "entropy"))
    try:
        yield
    finally:
        if had:
            model.forward = forward
        else:
            del model.forward
