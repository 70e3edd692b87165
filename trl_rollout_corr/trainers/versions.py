"""
Supported releases of TRL, the differences between them, and TRL's own correction, which changes from release to release.
"""

import dataclasses
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from ..messages import warn
from ..settings.presets import DEFAULT


if TYPE_CHECKING:  # an older TRL may have none of them, and `trl-rollout-corr check` says so
    from trl import GRPOConfig, RLOOConfig


OLDEST, NEWEST_TESTED, FIRST_UNSUPPORTED = "1.15", "1.16", "2"
# Advice of messages about a TRL that is not one of them
TESTED = "the tested releases: `pip install --constraint constraints.txt .` in a clone of trl-rollout-corr"


def release() -> Version:
    """Installed release of TRL. A development version counts as the release that follows it."""
    return Version(Version(version("trl")).base_version)


INSTALLED = release()


def outside_window(trl: Version, named: str) -> str | None:
    """Error message about a release of TRL that is too old or too new; `None` if it is neither."""
    if Version(OLDEST) <= trl < Version(FIRST_UNSUPPORTED):
        return None
    return f"trl-rollout-corr works with trl>={OLDEST},<{FIRST_UNSUPPORTED}, got trl {named}. Install {TESTED}."


def is_untested(trl: Version) -> bool:
    """True if a release of TRL is newer than those that this package was tested with."""
    return trl.release[:2] > Version(NEWEST_TESTED).release


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
