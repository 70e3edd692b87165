"""
Settings of SkyRL, translated to fields of [`RolloutCorrectionConfig`] by `from_skyrl`.

This follows SkyRL's source of August 2026. Its bounds apply to the ratio (trainer over sampler), and it takes the
trainer's log-probabilities before the step, as decoupled mode does here.
"""

import math
from collections.abc import Mapping
from typing import Any

from ...messages import SettingError, nearest, warn, warn_idle
from ...settings.thresholds import parse_number, parse_truth
from .trl import OFF, read_value


_ALGORITHM = "trainer.algorithm."
_CORRECTION = f"{_ALGORITHM}off_policy_correction."
_INF = float("inf")
# SkyRL's defaults
_DEFAULTS: dict[str, Any] = {
    "tis_ratio_type": None,
    "token_tis_ratio_clip_high": 2.0,
    "sequence_tis_ratio_clip_high": 5.0,
    "sequence_mask_metric": None,
    "geo_mask_low": 0.99,
    "geo_mask_high": 1.01,
    "product_mask_low": 0.5,
    "product_mask_high": 2.0,
    "outlier_token_is_threshold_low": None,
    "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None,
    "token_mask_is_threshold_high": None,
    "token_mask_eps_low": None,  # from a fork: distances from 1
    "token_mask_eps_high": None,
}
_SIDES = ("low", "high")
# Keys of bounds on the ratio of a token, and of distances from 1
_OF_TOKENS = ("token_mask_is_threshold", "token_mask_eps")
_METRICS = {"geometric": ("geo_mask", "seq_mean_k1"), "product": ("product_mask", "seq_sum_k1")}
_DPPO = {"binary_tv": ("bypass_dppo_tv", "token_tv"), "binary_kl": ("bypass_dppo_kl", "token_kl")}
# Settings of the algorithm that decide about the correction
_DECISIVE = ("policy_loss_type", "use_tis", "tis_imp_ratio_cap", "dppo.dppo_type", "dppo.delta_low", "dppo.delta_high")
# verl's names for settings that TRL offers, too
AS_IN_VERL = {
    "trainer.algorithm.advantage_estimator": "algorithm.adv_estimator",
    "trainer.algorithm.grpo_norm_by_std": "algorithm.norm_adv_by_std_in_grpo",
    "trainer.algorithm.use_kl_in_reward": "algorithm.use_kl_in_reward",
    "trainer.algorithm.kl_ctrl": "algorithm.kl_ctrl",
    "trainer.algorithm.use_kl_loss": "actor.use_kl_loss",
    "trainer.algorithm.kl_loss_coef": "actor.kl_loss_coef",
    "trainer.algorithm.eps_clip_low": "actor.clip_ratio_low",
    "trainer.algorithm.eps_clip_high": "actor.clip_ratio_high",
    "trainer.algorithm.loss_reduction": "actor.loss_agg_mode",
    "trainer.policy.model.path": "model.path",
    "trainer.policy.optimizer_config.lr": "actor.optim.lr",
    "trainer.policy.optimizer_config.max_grad_norm": "actor.grad_clip",
    "trainer.update_epochs_per_batch": "actor.ppo_epochs",
    "trainer.policy_mini_batch_size": "actor.ppo_mini_batch_size",
    "trainer.train_batch_size": "data.train_batch_size",
    "trainer.epochs": "trainer.total_epochs",
    "generator.n_samples_per_prompt": "rollout.n",
    "generator.sampling_params.max_generate_length": "data.max_response_length",
    "generator.sampling_params": "rollout",
    "generator.inference_engine.enable_return_routed_experts": "rollout.enable_rollout_routing_replay",
    "generator.inference_engine.engine_init_kwargs": "rollout.engine_kwargs",
}


def is_skyrl(settings: Mapping[str, object]) -> bool:
    """`True` for dotted names of SkyRL."""
    return any(name.startswith(_ALGORITHM) for name in settings)


def from_skyrl(settings: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, object]]:
    """Fields for dotted names of SkyRL, and the remaining settings."""
    section: dict[str, Any] = {}
    decisive: dict[str, Any] = {}
    others: dict[str, object] = {}
    for name, value in settings.items():
        inside = name.removeprefix(_ALGORITHM)
        if name.startswith(_CORRECTION):
            key = name.removeprefix(_CORRECTION)
            if key not in _DEFAULTS:
                remedy = f"{nearest(key, _DEFAULTS)} Known keys: {', '.join(_DEFAULTS)}.".strip()
                raise SettingError(name, value, "which does not belong to SkyRL's correction", remedy=remedy)
            section[key] = read_value(value, name)
        elif inside != name and inside in _DECISIVE:
            decisive[inside] = read_value(value, name)
        else:
            others[name] = value
    if parse_truth(decisive.get("use_tis", False), "use_tis"):
        section |= {"tis_ratio_type": "token", "token_tis_ratio_clip_high": decisive.get("tis_imp_ratio_cap", -1.0)}
    loss = decisive.get("policy_loss_type", "regular")
    fields = _fields_of_loss(loss, decisive, others, section)
    in_reward = parse_truth(others.get("trainer.algorithm.use_kl_in_reward", False), "use_kl_in_reward")
    if in_reward and "trainer.algorithm.kl_loss_coef" in others:  # SkyRL uses one coefficient for both
        others["algorithm.kl_ctrl.kl_coef"] = others.pop("trainer.algorithm.kl_loss_coef")
    others.setdefault("trainer.algorithm.use_kl_loss", not in_reward)  # SkyRL's default
    if loss == "dual_clip" and "trainer.algorithm.clip_ratio_c" in others:
        others["actor.clip_ratio_c"] = others.pop("trainer.algorithm.clip_ratio_c")
    return fields, others


def _fields_of_loss(
    loss: object, decisive: Mapping[str, Any], others: dict[str, object], section: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields for the section and for a loss of SkyRL, whose own ratio may refer to the sampler."""
    weights, criteria = _weights(section), _rejection(section)
    if loss in ("rollout_is", "dppo") and weights["rollout_is"]:
        reason = f"while the ratio of `policy_loss_type: {loss}` corrects for the sampler already"
        raise SettingError("tis_ratio_type", section["tis_ratio_type"], reason, remedy="Remove one of the two.")
    if loss == "rollout_is":  # IcePop around the sampler, without a gradient through the ratio
        low, high = (
            parse_number(others.pop(f"trainer.algorithm.eps_clip_{side}", 0.2), f"eps_clip_{side}")
            for side in ("low", "high")
        )
        weights = {"rollout_is": "token", "rollout_is_threshold": [max(1 - low, 0.0), 1 + high]}
        return {**weights, **_named(criteria), "bypass_mode": True, "rollout_loss_type": "reinforce"}
    if loss == "dppo":
        kind = decisive.get("dppo.dppo_type", "binary_tv")
        if kind not in [*_DPPO]:
            raise SettingError("dppo_type", kind, allowed=f"one of {', '.join(_DPPO)}")
        preset, criterion = _DPPO[kind]
        bounds = [parse_number(decisive.get(f"dppo.delta_{side}", 0.2), f"delta_{side}") for side in ("low", "high")]
        return {"rollout_correction": preset, **_named({criterion: bounds, **criteria})}
    if others.get("trainer.algorithm.cispo.cispo_anchor") == "rollout":
        reason = "which makes CISPO's ratio the one to the sampler, and nothing here is the same"
        raise SettingError("cispo_anchor", "rollout", reason, remedy="Take `rollout_correction: auto`.")
    fields = {**weights, **_named(criteria)}
    return fields if fields.keys() - {"rollout_is"} else dict(OFF)


def _weights(section: Mapping[str, Any]) -> dict[str, Any]:
    kind = section.get("tis_ratio_type")
    for other in ("token", "sequence"):
        _warn_if_idle(section, f"{other}_tis_ratio_clip_high", f"`tis_ratio_type` is {kind!r}", idle=other != kind)
    if kind is None:
        return {"rollout_is": None}
    if kind not in ("token", "sequence"):
        raise SettingError("tis_ratio_type", kind, allowed="token, sequence or null")
    name = f"{kind}_tis_ratio_clip_high"
    return {"rollout_is": kind, "rollout_is_threshold": parse_number(section.get(name, _DEFAULTS[name]), name)}


def _rejection(section: Mapping[str, Any]) -> dict[str, list[float]]:
    """Bounds on the ratio by criterion, in SkyRL's order."""
    criteria = _outlier_criteria(section) | _token_criteria(section) | _sequence_criteria(section)
    one_ratio = section.get("sequence_mask_metric") or section.get("tis_ratio_type") == "sequence"
    if "token_k1" in criteria and one_ratio:
        warn(
            "In SkyRL, tokens that `token_mask_*` drops do not count in the ratio of their completion. Here they do, "
            "so that a few more completions may be rejected or get another weight.",
            "token_mask_is_threshold_low",
        )
    return criteria


def _outlier_criteria(section: Mapping[str, Any]) -> dict[str, list[float]]:
    name = "outlier_token_is_threshold"
    pair = [section.get(f"{name}_{side}") for side in _SIDES]
    return {} if pair == [None, None] else {"seq_max_k1": _bounds(pair, name)}


def _token_criteria(section: Mapping[str, Any]) -> dict[str, list[float]]:
    """Bounds on the ratio of a token, or distances of the ratio from 1; one bound alone has no effect."""
    bounds, distances = ([section.get(f"{name}_{side}") for side in _SIDES] for name in _OF_TOKENS)
    for name, pair in zip(_OF_TOKENS, (bounds, distances), strict=True):
        if pair.count(None) == 1:
            given, missing = _SIDES if pair[1] is None else reversed(_SIDES)
            warn_idle(f"{name}_{given}", section[f"{name}_{given}"], f"`{name}_{missing}` is not set")
    if None not in bounds:
        return {"token_k1": _bounds(bounds, _OF_TOKENS[0])}
    if None in distances:
        return {}
    low, high = (parse_number(x, _OF_TOKENS[1]) for x in distances)
    _warn_about_forks(low, high)
    return {"token_k1": [max(1 - low, 0.0), 1 + high]}


def _sequence_criteria(section: Mapping[str, Any]) -> dict[str, list[float]]:
    """Bounds on the ratio of a completion, by its metric. Bounds of another metric have no effect."""
    metric = section.get("sequence_mask_metric")
    if metric is not None and metric not in [*_METRICS]:
        raise SettingError("sequence_mask_metric", metric, allowed=f"{', '.join(_METRICS)} or null")
    criteria: dict[str, list[float]] = {}
    for name, (key, criterion) in _METRICS.items():
        for side in _SIDES:
            _warn_if_idle(section, f"{key}_{side}", f"`sequence_mask_metric` is {metric!r}", idle=metric != name)
        if metric == name:
            pair = [section.get(f"{key}_{side}", _DEFAULTS[f"{key}_{side}"]) for side in _SIDES]
            criteria[criterion] = _bounds(pair, key)
    return criteria


def _warn_about_forks(low: float, high: float) -> None:
    """Name the reading of a key that SkyRL itself lacks, and what the other readings would be."""
    kept, of_ratio, of_logarithm = (
        f"[{bounds[0]:.4g}, {bounds[1]:.4g}]"
        for bounds in (
            (max(1 - low, 0.0), 1 + high),
            (low, high),
            (math.exp(-min(low, 700.0)), math.exp(min(high, 700.0))),
        )
    )
    warn(
        "Forks of SkyRL use `token_mask_eps_low` and `token_mask_eps_high` with more than one meaning. Here they are "
        f"read as distances of the ratio from 1, which keeps ratios in {kept}. If they are bounds of the ratio in "
        f"your fork, the entry of `token_k1` in `rollout_rs_threshold` must be {of_ratio}, and {of_logarithm} if they "
        "are bounds of its logarithm.",
        "token_mask_eps_low",
    )


def _bounds(pair: list[Any], name: str) -> list[float]:
    """A pair of bounds on the ratio. A missing bound means none."""
    low, high = pair
    return [
        0.0 if low is None else parse_number(low, f"{name}_low"),
        _INF if high is None else parse_number(high, f"{name}_high"),
    ]


def _named(criteria: Mapping[str, list[float]]) -> dict[str, Any]:
    return {"rollout_rs": [*criteria], "rollout_rs_threshold": [*criteria.values()]} if criteria else {}


def _warn_if_idle(section: Mapping[str, Any], name: str, reason: str, *, idle: bool) -> None:
    """Warn about a bound that nothing reads, unless it is SkyRL's default, which every whole file contains."""
    if idle and section.get(name) not in (None, _DEFAULTS[name], str(_DEFAULTS[name])):
        warn_idle(name, section[name], reason)
