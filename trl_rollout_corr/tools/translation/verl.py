"""
Settings of verl, translated to fields of [`RolloutCorrectionConfig`] by `from_verl`.

A setting without an exact counterpart causes a warning. An unknown key or a value that cannot be translated raises a
`ValueError`.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from ...messages import SettingError, warn, warn_idle
from ...settings.criteria import FIRST_NAMES
from ...settings.thresholds import TRUTH, parse_number, parse_rejection_thresholds, parse_truth, parse_weight_threshold
from .trl import OFF, read_keys, read_value


# Names of verl, as data ----------------------------------------------------------------------------------------------

# Today's keys of verl's section, then the keys of its first version, then one that existed for a few weeks
VERL_KEYS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
    "bypass_mode",
    "loss_type",
    "rollout_rs_threshold_lower",
    "rollout_token_veto_threshold",
    "bypass_old_logprob_for_rollout",
    "use_pure_rollout_correction",
    "use_policy_gradient",
)
# Keys of verl's first releases and their defaults, next to `rollout_is` (true or false) and `rollout_is_threshold`
FIRST_KEYS = {
    "rollout_is_level": "token",
    "rollout_is_mode": "truncate",
    "rollout_is_threshold_lower": None,
    "rollout_is_veto_threshold": None,
}
_INF = float("inf")
_GEO_VETO = {"rollout_correction": "decoupled_geo_rs", "rollout_rs": ["seq_mean_k1", "seq_max_k1"]}
# Presets of the section's first version in today's names, with the fields that differ
FIRST_PRESETS: dict[str, dict[str, Any]] = {
    "token_is": {"rollout_correction": "decoupled_token_is"},
    "token_tis": {"rollout_correction": "decoupled_token_is"},
    "seq_is": {"rollout_correction": "decoupled_seq_is"},
    "seq_is_rs": {"rollout_correction": "decoupled_seq_is_rs"},
    "seq_mis": {"rollout_correction": "decoupled_seq_is_rs", "rollout_rs_threshold": [[0.0, 2.0]]},
    "geo_rs": {**_GEO_VETO, "rollout_rs_threshold": [[1 / 1.001, 1.001], [1e-4, _INF]]},
    "geo_mis": {**_GEO_VETO, "rollout_rs_threshold": [[0.999, 1.001], [1e-4, _INF]]},
    # The weights were only reported: PPO clipping around the sampler is the correction
    "ppo_is_bypass": {"rollout_correction": "bypass_ppo_clip", "rollout_is": "token", "rollout_is_threshold": 2.0},
    "pure_is": {"rollout_correction": "bypass_pg_is"},
}
# Criteria whose bounds verl applies to the inverse of the ratio. By their first names they bounded the ratio itself.
_INVERTED = ("token_k1", "seq_sum_k1", "seq_mean_k1")
# Loss of bypass mode in the first version of the section, and in its next one
_PURE = ("use_pure_rollout_correction", "use_policy_gradient")
# The place where verl's loss reads the section, and the cap of token weights in its first weeks and in FlashRL's patch
_IN_LOSS = "actor_rollout_ref.actor.policy_loss."
_CAPS = ("tis_imp_ratio_cap", "imp_ratio_cap")
_LOSSES = ("ppo_clip", "reinforce")  # other systems use a `loss_type`, too
NOT_SET = object()


# verl ----------------------------------------------------------------------------------------------------------------


def from_verl(section: object) -> dict[str, Any]:
    """Fields for the `rollout_correction` section of verl: today's or older keys, a preset, or null."""
    if isinstance(section, str):
        section = TRUTH.get(section.strip().lower(), read_value(section, "rollout_correction"))
    if section is None or section is False:
        return dict(OFF)
    if isinstance(section, str):
        return dict(FIRST_PRESETS.get(section) or {"rollout_correction": section})
    if not isinstance(section, Mapping):
        raise SettingError("rollout_correction", section, allowed="a section, the name of a preset, or null")
    if is_first(section):
        return _from_first(section)
    settings = read_keys(section, VERL_KEYS, "a verl `rollout_correction` section")
    for name, needed in (("rollout_is_threshold", "rollout_is"), ("rollout_rs_threshold", "rollout_rs")):
        if settings.get(needed) is None and settings.get(name) not in (None, 2.0, "2.0"):  # written next to null
            warn_idle(name, settings[name], f"`{needed}` is not set")
    fields = {**_verl_weights(settings), **_verl_rejection(settings)}
    pure = any(settings.get(name) for name in _PURE)
    loss = settings.get("loss_type", "ppo_clip")
    if settings.get("bypass_mode") or settings.get("bypass_old_logprob_for_rollout"):
        return {**fields, "bypass_mode": True, "rollout_loss_type": "reinforce" if pure else loss or "ppo_clip"}
    for name in ("loss_type", *_PURE):
        if settings.get(name) not in ("ppo_clip", None, False):
            warn_idle(name, settings[name], "`bypass_mode` is False")
    return fields


def is_first(section: Mapping[str, object]) -> bool:
    """`True` for keys of verl's first releases, such as a truth value of `rollout_is`."""
    value = section.get("rollout_is")
    return any(key in section for key in FIRST_KEYS) or str(value).strip().lower() in TRUTH


def _from_first(section: Mapping[str, object]) -> dict[str, Any]:
    """Fields for the flat keys of verl's first releases, where a missing threshold switched everything off."""
    # Early releases set weights outside the bounds to 0, and later ones removed the tokens from the mask. The two
    # agree with TRL's denominators, which still count rejected tokens.
    keys = ("rollout_is_threshold", "rollout_is", *FIRST_KEYS)
    settings = {**FIRST_KEYS, **read_keys(section, keys, "the `rollout_is*` keys of verl's first releases")}
    given = settings.get("rollout_is")
    applies = settings["rollout_is"] = given is not None and parse_truth(given, "rollout_is")
    upper, lower = settings.get("rollout_is_threshold"), settings["rollout_is_threshold_lower"]
    if upper is None:
        return dict(OFF)
    upper = parse_number(upper, "rollout_is_threshold")
    level, mode = settings["rollout_is_level"], settings["rollout_is_mode"]
    if level not in [*FIRST_NAMES]:  # a list cannot be hashed
        raise SettingError("rollout_is_level", level, allowed=f"one of {', '.join(FIRST_NAMES)}")
    criteria, thresholds = [], []
    if mode in ("mask", "clip"):
        criteria = [FIRST_NAMES[level]]
        thresholds = parse_rejection_thresholds([[1 / upper if lower is None else lower, upper]], criteria)
    elif mode != "truncate":
        raise SettingError("rollout_is_mode", mode, allowed="'truncate', 'mask' or 'clip'")
    elif lower is not None:
        warn_idle("rollout_is_threshold_lower", lower, "`rollout_is_mode` is 'truncate'")
    fields: dict[str, Any] = {"rollout_is": level, "rollout_is_threshold": parse_weight_threshold(upper)}
    fields |= _rejection(criteria, thresholds, settings, "rollout_is_veto_threshold")
    return fields if applies else {**fields, "rollout_metrics_only": True}


def _rejection(criteria: list[str], thresholds: list, settings: Mapping[str, object], veto: str) -> dict[str, Any]:
    """Fields of rejection. A veto rejects a completion if the ratio of any of its tokens is below its threshold."""
    if settings.get(veto) is not None:
        criteria = [*criteria, "seq_max_k1"]
        thresholds = [*thresholds, [parse_number(settings[veto], veto), _INF]]
    return {"rollout_rs": criteria, "rollout_rs_threshold": thresholds} if criteria else {}


def _verl_weights(settings: dict[str, Any]) -> dict[str, Any]:
    level, threshold = settings.get("rollout_is"), settings.get("rollout_is_threshold", 2.0)
    if level is None or threshold is None:
        if level is not None:
            message = (
                "`rollout_is_threshold` is null, which makes verl compute no weights: `rollout_is` is set to None."
            )
            warn(message, "rollout_is_threshold")
        return {"rollout_is": None}
    normalize = {"rollout_is_batch_normalize": True} if settings.get("rollout_is_batch_normalize") else {}
    return {"rollout_is": level, "rollout_is_threshold": parse_weight_threshold(threshold), **normalize}


def _verl_rejection(settings: dict[str, Any]) -> dict[str, Any]:
    names = settings.get("rollout_rs")
    criteria: list[str] = []
    thresholds: list[Any] = []
    if names is not None:
        names = names.strip("[]").split(",") if isinstance(names, str) else names
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            remedy = "Write the names in one list, such as `rollout_rs: [token_k1]`, without a list in it."
            raise SettingError("rollout_rs", names, allowed="a list of names", remedy=remedy)
        names = list(dict.fromkeys(name.strip(" '\"") for name in names if name.strip()))  # verl drops repeated names
        criteria = [FIRST_NAMES.get(name, name) for name in names]
        thresholds = _verl_thresholds(settings, names, criteria)
    return _rejection(criteria, thresholds, settings, "rollout_token_veto_threshold")


def _verl_thresholds(settings: dict[str, Any], names: list[str], criteria: list[str]) -> list[Any]:
    threshold, lower = settings.get("rollout_rs_threshold"), settings.get("rollout_rs_threshold_lower")
    if threshold is None:
        remedy = "verl refuses this as well; set the threshold."
        raise SettingError("rollout_rs", criteria, "but `rollout_rs_threshold` is not set", remedy=remedy)
    if lower is not None:
        return parse_rejection_thresholds([[lower, threshold]], criteria)
    entries = parse_rejection_thresholds(threshold, criteria)
    return [_inverted(entry, name) if name in _INVERTED else entry for entry, name in zip(entries, names, strict=True)]


def _inverted(bounds: Any, name: str) -> list[float]:
    """Turn bounds on the inverse of the ratio into bounds on the ratio that keep the same tokens."""
    lower, upper = bounds
    if lower == 0 or abs(lower * upper - 1) < 1e-9:  # verl refuses a lower bound of 0, so such bounds are on the ratio
        return [lower, upper]
    inverted = [1 / upper, 1 / lower]
    warn(
        f"verl applies the bounds of `{name}` to the inverse of the ratio: [{lower:g}, {upper:g}] there keeps ratios "
        f"in [{inverted[0]:.6g}, {inverted[1]:.6g}], and the translated configuration has these bounds. If you meant "
        f"ratios in [{lower:g}, {upper:g}], set `rollout_rs_threshold` to that.",
        "rollout_rs_threshold",
    )
    return inverted


def split_verl(settings: Mapping[str, object]) -> tuple[object, dict[str, object]]:
    """The section of verl among settings with dotted names, `NOT_SET` without one, and all other settings."""
    whole: object = NOT_SET
    section: dict[str, object] = {}
    others: dict[str, object] = {}
    keys = [*VERL_KEYS, *FIRST_KEYS]
    names = [*keys, *(f"algorithm.rollout_correction.{key}" for key in keys)]
    for name, value in settings.items():
        # verl copies the section into the loss. Some scripts set it there alone
        inside = name.removeprefix("algorithm.").removeprefix(_IN_LOSS)
        key = inside.removeprefix("rollout_correction.")
        if inside == "rollout_correction":
            whole = whole if name.startswith(_IN_LOSS) and str(value).startswith("${") else value
        elif key != inside or (key in keys and not (key == "loss_type" and value not in _LOSSES)):
            section[key] = section.get(key, value) if name.startswith(_IN_LOSS) else value
        elif key != "loss_type" and (near := difflib.get_close_matches(name, names, 1, 0.85)):
            raise SettingError(name, value, "which verl does not have", remedy=f"Did you mean `{near[0]}`?")
        else:
            others[name] = value
    return _with_older(section or whole, others)


def _with_older(section: object, others: dict[str, object]) -> tuple[object, dict[str, object]]:
    """
    The section completed by verl's older settings outside it: a cap of token weights, and the sampler's
    log-probabilities.
    """
    given = {} if section is NOT_SET else section
    if not isinstance(given, Mapping):
        return section, others
    older, names = _older_settings(others)
    rest = {name: value for name, value in others.items() if name not in names}
    if is_first(given) and older:
        raise SettingError(
            "rollout_is", given.get("rollout_is"), "beside newer settings of verl", remedy="Remove one."
        )
    unset = {key for key in older if given.get(key) in (None, "null", False)}
    for key, value in older.items():
        if key not in unset and given[key] != value and key != "rollout_is_threshold":
            warn(
                f"`{key}` is {given[key]!r} in `rollout_correction`, so that {value!r} of an older setting is left "
                "out.",
                key,
            )
    if "rollout_is" in unset:  # the cap belongs to these weights
        unset.add("rollout_is_threshold")
    added = {key: value for key, value in older.items() if key in unset}
    return ({**given, **added} if added else section), rest


def _older_settings(others: Mapping[str, object]) -> tuple[dict[str, object], set[str]]:
    """The section that verl's older settings amount to, and the names of these settings."""
    section: dict[str, object] = {}
    names: set[str] = set()
    truths = dict.fromkeys(("use_rollout_log_probs", "compute_prox_log_prob"), False)
    for name, value in others.items():
        key = name
        for prefix in ("actor_rollout_ref.", "actor.", "async_training."):
            key = key.removeprefix(prefix)
        if key in _CAPS:
            names.add(name)
            cap = read_value(value, name)
            if cap is not None and parse_number(cap, name) > 0:  # verl's default is -1
                section |= {"rollout_is": "token", "rollout_is_threshold": value}
        elif key in truths:
            names.add(name)
            truths[key] = parse_truth(read_value(value, name), name)
    if truths["use_rollout_log_probs"] and not truths["compute_prox_log_prob"]:
        section["bypass_mode"] = True
    return section, names


def with_divergence(fields: dict[str, Any], others: dict[str, object]) -> dict[str, Any]:
    """Fields with verl's loss `dppo_tv` or `dppo_kl` around the sampler. Its clip ratios bound a divergence."""
    mode = next((value for name, value in others.items() if name.endswith("policy_loss.loss_mode")), None)
    if mode not in ("dppo_tv", "dppo_kl") or not fields.get("bypass_mode"):
        return fields
    values: dict[str, object] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}  # verl's defaults
    for name in [*others]:
        if (key := name.rpartition(".")[2]) in (*values, "loss_mode"):
            values[key] = others.pop(name)
    bounds = [parse_number(values[f"clip_ratio_{side}"], f"clip_ratio_{side}") for side in ("low", "high")]
    preset = {
        "rollout_correction": f"bypass_{mode}",
        "rollout_is_threshold": parse_weight_threshold(values["clip_ratio_c"]),
    }
    return {**preset, "rollout_rs_threshold": [bounds]}
