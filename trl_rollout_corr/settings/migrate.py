"""
Settings of other tools, translated to fields of [`RolloutCorrectionConfig`].

Each function takes a mapping and returns a dictionary of fields. A setting without an exact counterpart gives a warning. An
unknown key, and a value that cannot be translated, are a `ValueError`. The classmethods `RolloutCorrectionConfig.from_verl`
and `.from_trl` call them. `legacy.py` translates settings of verl's first versions.
"""

from collections.abc import Mapping
from typing import Any

from ..messages import SettingError, nearest, warn, warn_idle
from .criteria import DIRECTED, FIRST_NAMES
from .thresholds import parse_number, parse_rejection_thresholds, parse_weight_threshold


# Fields of verl's typed configuration, of today and of the pull request that introduced it.
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
)
# Criteria whose bounds verl applies to the inverse of the ratio. By their first names they bounded the ratio itself.
_INVERTED = ("token_k1", "seq_sum_k1", "seq_mean_k1")

_TRL_KEYS = (
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_cap",
)

OFF = {"rollout_correction": "disabled"}

# Counterparts in TRL of verl's settings outside the section, without `actor_rollout_ref`. docs/migration.md has them, too.
_GRPO_OR_RLOO = "TRL has `RolloutCorrectedGRPOTrainer` for grpo and `RolloutCorrectedRLOOTrainer` for rloo"
_ESTIMATORS = {
    "grpo": "train with `RolloutCorrectedGRPOTrainer`",
    "rloo": "train with `RolloutCorrectedRLOOTrainer`",
    "gae": "TRL has neither GAE nor a value model. GRPO and RLOO compare completions of the same prompt instead",
}
COUNTERPARTS = {
    "algorithm.gamma": "it discounts rewards per token, and TRL's trainers give one reward to the whole completion",
    "algorithm.lam": "it is a parameter of GAE, which TRL does not have",
    "algorithm.use_kl_in_reward": "RLOO does that with `beta`; GRPO puts the divergence into the loss",
    "algorithm.kl_ctrl": "TRL has `beta`",
    "algorithm.kl_penalty": "TRL has `beta`",
    "algorithm.norm_adv_by_std_in_grpo": "TRL has `scale_rewards`",
    "model.path": "TRL has `model_name_or_path`",
    "actor.optim.lr": "TRL has `learning_rate`",
    "actor.ppo_epochs": "TRL has `num_iterations`",
    "actor.ppo_mini_batch_size": "multiplied by `rollout.n`, it is TRL's `per_device_train_batch_size * "
    "gradient_accumulation_steps` of all processes",
    "actor.clip_ratio_low": "TRL has `epsilon`",
    "actor.clip_ratio_high": "TRL has `epsilon_high`",
    "actor.clip_ratio_c": "with `bypass_mode` and `ppo_clip` it is `rollout_clip_ratio_c`, otherwise TRL's `delta`",
    "actor.loss_agg_mode": "TRL has `loss_type`",
    "actor.ess_scaling": "nothing here scales the step by the effective sample size, which gained nothing in our benchmarks",
    "actor.use_kl_loss": "TRL has `beta`",
    "actor.kl_loss_coef": "TRL has `beta`",
    "actor.grad_clip": "TRL has `max_grad_norm`",
    "rollout.n": "TRL has `num_generations`",
    "rollout.temperature": "TRL has `temperature`",
    "rollout.top_p": "TRL has `top_p`",
    "rollout.top_k": "TRL has `top_k`",
    "rollout.calculate_log_probs": "the trainers ask for log-probabilities where they need them",
    "data.train_batch_size": "multiplied by `rollout.n`, it is TRL's `per_device_train_batch_size * "
    "steps_per_generation` of all processes",
    "data.max_prompt_length": "TRL has none: filter the dataset; `vllm_max_model_length` bounds prompt and completion "
    "together",
    "data.max_response_length": "TRL has `max_completion_length`",
    "trainer.total_epochs": "TRL has `num_train_epochs`",
    "trainer.total_training_steps": "TRL has `max_steps`",
    "trainer.logger": "TRL has `report_to`",
}
# Names of variables in scripts. Shorter ones than three letters say too little, but for this one
_OF_VARIABLES = {name.rpartition(".")[2]: name for name in COUNTERPARTS} | {"learning_rate": "actor.optim.lr"}


def counterpart(path: tuple[str, ...], value: object) -> str:
    """
    What TRL has for a setting of verl outside the section, as text; empty if nothing is known about it.

    Args:
        path (`tuple[str, ...]`):
            Keys of the setting, such as `("actor_rollout_ref", "actor", "optim", "lr")`. A single one is the name of a
            variable of a script.
        value (`object`):
            Value of the setting.
    """
    name = ".".join(path).removeprefix("actor_rollout_ref.")
    if name in ("adv_estimator", "algorithm.adv_estimator"):
        return _ESTIMATORS.get(str(value), _GRPO_OR_RLOO)
    if len(path) == 1 and (len(name) > 2 or name.lower() == "lr"):
        name = _OF_VARIABLES.get(name.lower(), name)
    above = [name.rsplit(".", n)[0] for n in range(name.count(".") + 1)]  # a setting may be a section
    return next((COUNTERPARTS[key] for key in above if key in COUNTERPARTS), "")


def from_verl(settings: Mapping[str, object] | None) -> dict[str, Any]:
    """
    Translate the `rollout_correction` section of a verl configuration; `None` turns correction off.

    The function reads today's keys and the keys of the pull request that introduced the section (bounds on the ratio, veto,
    first names of the criteria). It converts text such as `"null"` and `"true"`. It handles these differences:

    - verl 0.9.1 applies the bounds of `*_k1` criteria to the inverse of the ratio. Bounds that are not reciprocal are
      inverted here, with a warning, so that a ported run rejects the same tokens. Bounds that verl does not have
      (of `seq_max_k1`, `token_tv`, `token_kl` and `token_binary_kl`, and a lower bound of 0) have the same meaning as here.
    - verl accepts `rollout_is` without a threshold and then computes no weights. So does the translation, with a warning.
    - A missing `rollout_is` is None, as in verl's YAML defaults.
    """
    if settings is None:
        return dict(OFF)
    settings = plain(settings, VERL_KEYS, "a verl `rollout_correction` section")
    fields = {**_verl_weights(settings), **_verl_rejection(settings)}
    pure, loss = settings.get("use_pure_rollout_correction"), settings.get("loss_type", "ppo_clip")
    if settings.get("bypass_mode") or settings.get("bypass_old_logprob_for_rollout"):
        return {**fields, "bypass_mode": True, "rollout_loss_type": "reinforce" if pure else loss}
    if pure:
        warn_idle("use_pure_rollout_correction", pure, "`bypass_old_logprob_for_rollout` is False")
    if loss not in ("ppo_clip", None):
        warn_idle("loss_type", loss, "`bypass_mode` is False")
    return fields


def _verl_weights(settings: dict[str, Any]) -> dict[str, Any]:
    level, threshold = settings.get("rollout_is"), settings.get("rollout_is_threshold", 2.0)
    normalize = {"rollout_is_batch_normalize": True} if settings.get("rollout_is_batch_normalize") else {}
    if level is not None and threshold is not None:
        return {"rollout_is": level, "rollout_is_threshold": parse_weight_threshold(threshold), **normalize}
    idle: dict[str, Any] = {**normalize}
    if level is not None:
        message = "`rollout_is_threshold` is null, which makes verl compute no weights: `rollout_is` is set to None."
        warn(message, "rollout_is_threshold")
    elif threshold not in (None, 2.0, "2.0") or ("rollout_is" not in settings and "rollout_is_threshold" in settings):
        idle["rollout_is_threshold"] = threshold  # verl's YAML defaults have 2.0 with a level of null
    for name, value in idle.items():
        warn_idle(name, value, "`rollout_is` is None")
    return {"rollout_is": None}


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
    for name in ("rollout_rs_threshold", "rollout_rs_threshold_lower"):
        if names is None and settings.get(name) is not None:
            warn_idle(name, settings[name], "`rollout_rs` is not set")
    if settings.get("rollout_token_veto_threshold") is not None:
        criteria, thresholds = add_veto(criteria, thresholds, settings, "rollout_token_veto_threshold")
    return {"rollout_rs": criteria, "rollout_rs_threshold": thresholds} if criteria else {}


def _verl_thresholds(settings: dict[str, Any], names: list[str], criteria: list[str]) -> list[Any]:
    threshold, lower = settings.get("rollout_rs_threshold"), settings.get("rollout_rs_threshold_lower")
    if threshold is None:
        remedy = "verl refuses this as well; set the threshold."
        raise SettingError("rollout_rs", criteria, "but `rollout_rs_threshold` is not set", remedy=remedy)
    if lower is not None:
        if directed := [name for name in criteria if name.removeprefix("token_") in DIRECTED]:
            reason = f"which is a lower bound on the ratio, but {directed[0]!r} has no lower bound"
            remedy = "Write a pair into `rollout_rs_threshold`: a bound for negative and one for positive advantages."
            raise SettingError("rollout_rs_threshold_lower", lower, reason, remedy=remedy)
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
        f"verl applies the bounds of `{name}` to the inverse of the ratio: [{lower:g}, {upper:g}] there keeps ratios in "
        f"[{inverted[0]:.6g}, {inverted[1]:.6g}], and the translated configuration has these bounds. If you meant ratios in "
        f"[{lower:g}, {upper:g}], set `rollout_rs_threshold` to that.",
        "rollout_rs_threshold",
    )
    return inverted


def from_trl(settings: Mapping[str, object]) -> dict[str, Any]:
    """
    Translate TRL's `vllm_importance_sampling_*` settings of `GRPOConfig`; missing ones have TRL's defaults.

    The `truncate` modes become a truncation bound, or with `clip_min` a pair that weights are clamped to. The `mask` modes
    set weights outside the bounds to 0 and keep the others, which is IcePop. TRL takes the ratio of a token without a
    log-probability as 1, hence `rollout_nan_policy`.
    """
    settings = plain(settings, _TRL_KEYS, "TRL's `vllm_importance_sampling_*` settings")
    if not settings.get("vllm_importance_sampling_correction", True):
        return dict(OFF)
    mode = settings.get("vllm_importance_sampling_mode", "sequence_mask")
    upper = settings.get("vllm_importance_sampling_cap") or settings.get("vllm_importance_sampling_clip_max", 3.0)
    lower = settings.get("vllm_importance_sampling_clip_min")
    level, _, bounding = str(mode).partition("_")
    if level not in ("token", "sequence") or bounding not in ("truncate", "mask"):
        allowed = "token_truncate, token_mask, sequence_truncate or sequence_mask"
        raise SettingError("vllm_importance_sampling_mode", mode, allowed=allowed)
    upper = float("inf") if upper is None else upper
    threshold = parse_weight_threshold(upper if lower is None and bounding == "truncate" else [lower or 0.0, upper])
    fields = {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_nan_policy": "neutralize"}
    return {**fields, "rollout_is_clamp": True} if bounding == "truncate" and lower is not None else fields


def add_veto(
    criteria: list[str], thresholds: list, settings: Mapping[str, object], name: str
) -> tuple[list[str], list]:
    """Reject a sequence if the ratio of any of its tokens is below the threshold of a name."""
    lower = parse_number(settings[name], name)
    return [*criteria, "seq_max_k1"], [*thresholds, [lower, float("inf")]]


def plain(settings: Mapping[str, object], keys: tuple[str, ...], what: str) -> dict[str, Any]:
    """Check the keys, and turn the text `"null"`, `"true"` or `"false"` of a shell script into its value."""
    words = {"null": None, "none": None, "true": True, "false": False}
    plain = {
        key: words.get(value.strip().lower(), value) if isinstance(value, str) else value
        for key, value in settings.items()
        if key != "_target_"  # of Hydra
    }
    if unknown := sorted(set(plain) - set(keys)):
        key = unknown[0]
        remedy = f"{nearest(key, keys)} Known keys: {', '.join(keys)}.".strip()
        if keys is VERL_KEYS:
            remedy += " To use a preset, write its name, not a mapping: `rollout_correction: auto`."
        raise SettingError(key, plain[key], f"which does not belong to {what}", remedy=remedy)
    return plain
