"""
Translation of the names in verl's first versions of rollout correction: flat `rollout_is*` keys, and later ten presets.

A function of a preset also accepts fields as arguments. These fields override the values of the preset.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..messages import SettingError, warn, warn_idle
from .criteria import FIRST_NAMES
from .migrate import OFF, add_veto, plain
from .presets import settings_of
from .thresholds import parse_number, parse_rejection_thresholds, parse_weight_threshold


# Flat keys, of the first releases ---------------------------------------------------------------------------------------


# Keys that act only with a threshold, and their defaults
_DEFAULTS = {
    "rollout_is_level": "token",
    "rollout_is_mode": "truncate",
    "rollout_is_threshold_lower": None,
    "rollout_is_veto_threshold": None,
}
_KEYS = ("rollout_is_threshold", "rollout_is", *_DEFAULTS)


def is_legacy(section: Mapping[str, object]) -> bool:
    """`True` for keys of verl's first releases, of which a boolean `rollout_is` is one."""
    boolean = section.get("rollout_is")
    if isinstance(boolean, str):  # of a shell script
        boolean = {"true": True, "false": False}.get(boolean.strip().lower(), boolean)
    return any(key in section for key in _DEFAULTS) or isinstance(boolean, bool)


def from_legacy(settings: Mapping[str, object]) -> dict[str, Any]:
    """
    Translate the flat `rollout_is*` keys of verl's first releases.

    | key | default |
    | --- | --- |
    | `rollout_is_threshold` | None: everything off |
    | `rollout_is` | False: compute and report, apply nothing |
    | `rollout_is_level` | `"token"`, also `"sequence"`, `"geometric"` |
    | `rollout_is_mode` | `"truncate"`; `"mask"` (in some early versions `"clip"`) rejects outside `[lower, upper]` |
    | `rollout_is_threshold_lower` | 1 / upper; acts in mask mode only |
    | `rollout_is_veto_threshold` | None; a sequence with a token of lower ratio is dropped |

    Early releases set weights outside the bounds to 0 and later ones removed the tokens from the mask. With TRL's
    denominators, which a rejected token does not leave, the two are the same. The veto was on by default (1e-4) in the
    first releases: set it, if the run to port relied on that.
    """
    settings = {**_DEFAULTS, **plain(settings, _KEYS, "the legacy `rollout_is` keys")}
    upper, lower = settings.get("rollout_is_threshold"), settings["rollout_is_threshold_lower"]
    if upper is None:
        if settings.get("rollout_is"):
            warn(
                "`rollout_is` is true but `rollout_is_threshold` is missing, which switched everything off in verl, and here "
                "too. For token weights set `rollout_correction` to decoupled_token_is.",
                "rollout_is",
            )
        for name, default in _DEFAULTS.items():
            if settings[name] != default:
                warn_idle(name, settings[name], "`rollout_is_threshold` is None")
        return dict(OFF)
    upper = parse_number(upper, "rollout_is_threshold")
    level, mode = settings["rollout_is_level"], settings["rollout_is_mode"]
    if level not in [*FIRST_NAMES]:  # a list has no hash
        raise SettingError("rollout_is_level", level, allowed=f"one of {', '.join(FIRST_NAMES)}")
    criteria, thresholds = [], []
    if mode in ("mask", "clip"):
        criteria = [FIRST_NAMES[level]]
        thresholds = parse_rejection_thresholds([[1 / upper if lower is None else lower, upper]], criteria)
    elif mode != "truncate":
        raise SettingError("rollout_is_mode", mode, allowed="'truncate', 'mask' or 'clip'")
    elif lower is not None:
        message = f"`rollout_is_threshold_lower` is {lower}, but verl never applied it in mode 'truncate', so it is left out."
        warn(message, "rollout_is_threshold_lower")
    if settings["rollout_is_veto_threshold"] is not None:
        criteria, thresholds = add_veto(criteria, thresholds, settings, "rollout_is_veto_threshold")
    fields: dict[str, Any] = {"rollout_is": level, "rollout_is_threshold": parse_weight_threshold(upper)}
    if criteria:
        fields.update(rollout_rs=criteria, rollout_rs_threshold=thresholds)
    if not settings.get("rollout_is", False):
        fields["rollout_metrics_only"] = True
    return fields


# Presets, of the pull request that introduced rollout correction ----------------------------------------------------------
# Its class methods `RolloutCorrectionConfig.token_is(threshold=2.0)` and so on, as functions that return fields


def _token_is(threshold: float = 2.0, **fields: Any) -> dict[str, Any]:
    return {"rollout_correction": "decoupled_token_is", "rollout_is_threshold": threshold, **fields}


def _seq_is(threshold: float = 2.0, **fields: Any) -> dict[str, Any]:
    return {"rollout_correction": "decoupled_seq_is", "rollout_is_threshold": threshold, **fields}


def _seq_is_rs(
    is_threshold: float = 2.0, rs_threshold: float = 2.0, rs_threshold_lower: float | None = None, **fields: Any
) -> dict[str, Any]:
    bounds = _bounds(rs_threshold_lower, rs_threshold)
    weights = {"rollout_correction": "decoupled_seq_is_rs", "rollout_is_threshold": is_threshold}
    return {**weights, "rollout_rs_threshold": [bounds], **fields}


def _seq_mis(threshold: float = 2.0, **fields: Any) -> dict[str, Any]:
    return _seq_is_rs(threshold, threshold, 0.0, **fields)  # only a product above the threshold is rejected


def _geo_rs(
    rs_threshold: float = 1.001,
    rs_threshold_lower: float | None = None,
    veto_threshold: float | None = 1e-4,
    **fields: Any,
) -> dict[str, Any]:
    criteria, bounds = ["seq_mean_k1"], [_bounds(rs_threshold_lower, rs_threshold)]
    if veto_threshold is not None:
        criteria, bounds = [*criteria, "seq_max_k1"], [*bounds, [veto_threshold, float("inf")]]
    rejection = {"rollout_rs": criteria, "rollout_rs_threshold": bounds}
    return {"rollout_correction": "decoupled_geo_rs", **rejection, **fields}


def _geo_mis(
    rs_threshold: float = 1.001,
    rs_threshold_lower: float = 0.999,
    veto_threshold: float | None = 1e-4,
    **fields: Any,
) -> dict[str, Any]:
    return _geo_rs(rs_threshold, rs_threshold_lower, veto_threshold, **fields)


def _ppo_is_bypass(threshold: float = 2.0, **fields: Any) -> dict[str, Any]:
    # The weights are only reported: PPO clipping around the sampler is the correction
    weights = {"rollout_is": "token", "rollout_is_threshold": threshold}
    return {"rollout_correction": "bypass_ppo_clip", **weights, **fields}


def _pure_is(threshold: float = 2.0, **fields: Any) -> dict[str, Any]:
    return {"rollout_correction": "bypass_pg_is", "rollout_is_threshold": threshold, **fields}


def _disabled(**fields: Any) -> dict[str, Any]:
    return {"rollout_correction": "disabled", **fields}


def _bounds(lower: float | None, upper: float) -> list[float]:
    """Bounds on a ratio. A missing lower one is the reciprocal of the upper one."""
    return [1 / upper if lower is None else lower, upper]


class _OnClass:
    """
    Class method that builds a configuration from the fields of a function. Instances do not have it: `config.disabled` would
    be a method, which is true.
    """

    def __init__(self, fields_of: Callable[..., dict[str, Any]]) -> None:
        self.fields_of = fields_of

    def __get__(self, instance: object, owner: Callable[..., Any]) -> Callable[..., Any]:
        if instance is not None:
            raise AttributeError("a configuration has no class methods of presets; its class has them")
        return lambda *arguments, **fields: owner(**self.fields_of(*arguments, **fields))


class FirstPresets:
    """The ten presets as class methods. They are also values of `rollout_correction`, see [`first_preset`]."""

    token_is = token_tis = _OnClass(_token_is)
    seq_is = _OnClass(_seq_is)
    seq_is_rs = _OnClass(_seq_is_rs)
    seq_mis = _OnClass(_seq_mis)
    geo_rs = _OnClass(_geo_rs)
    geo_mis = _OnClass(_geo_mis)
    ppo_is_bypass = _OnClass(_ppo_is_bypass)
    pure_is = _OnClass(_pure_is)
    disabled = _OnClass(_disabled)


def first_preset(name: object) -> dict[str, Any] | None:
    """Today's preset and the fields that differ from it, for the name of a first preset; `None` for any other name."""
    method = vars(FirstPresets).get(name) if isinstance(name, str) else None
    if not isinstance(method, _OnClass):
        return None
    fields = method.fields_of()
    preset = settings_of(fields["rollout_correction"])
    return {key: value for key, value in fields.items() if key not in preset or preset[key] != value}
